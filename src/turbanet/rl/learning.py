"""How one agent learns: rollouts in its environments, advantages, epochs over minibatches; one program for a swarm."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from turbanet.networks.policies import distribution, running
from turbanet.ppo import PPOConfig, Taken, gae, ppo_loss
from turbanet.rl import environments
from turbanet.rl.settings import into_optimizer, without_numbers
from turbanet.training import member, stopping
from turbanet.training.program import Train, room
from turbanet.training.sampling import epoch_order

IN_LOSS = "clip_range", "ent_coef", "vf_coef"
SEEN = "policy_loss", "value_loss", "entropy", "kl", "train_return", "episodes", "evaluation"  # beside the loss
HIGHEST = 10.0  # what a normalised reward is at the most


@struct.dataclass
class Life:
    """Where a member is in its environments: leaves [member, ...]."""

    worlds: Any  # states of the environments [env, ...]
    observation: Any  # [env, ...]
    so_far: Any  # return of each episode under way [env]
    discounted: Any  # sum that rewards are normalised by [env]
    spread: Any  # running mean, variance and count of that sum
    updates: Any  # that were made


@struct.dataclass
class Solved:
    """Which members learn on: those whose evaluation has not reached `at`, and whose losses are numbers."""

    active: Any  # bool [member]
    at: float = struct.field(pytree_node=False)
    monitor: str = struct.field(pytree_node=False, default="evaluation")

    @property
    def rule(self):
        return f"at {self.at}"


@dataclasses.dataclass(frozen=True)
class Loss:
    """`ppo_loss` as `member.train_step` takes it: y is (Taken, {setting: number})."""

    clip_values: bool

    def __call__(self, params, x, y, apply_fn):
        taken, settings = y
        policy, values = apply_fn({"params": params}, x)
        weights = {name: settings[name] for name in IN_LOSS}
        return ppo_loss(policy, values, taken, **weights, clip_values=self.clip_values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learn(Train):
    """Some epochs of one agent, each of some updates and an evaluation: (state, data) -> (state, what was seen)."""

    env: Any
    config: PPOConfig  # without the numbers that may be each member's own
    every: int  # updates of an epoch
    episodes: int  # of an evaluation
    uneven: bool = False  # whether the first epochs have an update fewer, as the epochs do not divide them

    @property
    def seen(self):
        return list(SEEN)

    @property
    def computed(self) -> dict[str, Any]:
        return {"environment": self.env, "settings": self.config, "updates and episodes": (self.every, self.episodes)}

    def begun(self, state: Any, params: Any) -> Life:
        """The life of one member that has not begun, by its types and shapes; worlds are made in the first update."""
        begun = jax.eval_shape(lambda: self._begun(jax.random.key(0), params))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), begun)

    def _begun(self, key, params):
        observation, worlds = environments.reset(self.env, jax.random.split(key, self.config.n_envs), params)
        nothing = jnp.zeros(self.config.n_envs)
        spread = {"mean": jnp.zeros(()), "variance": jnp.ones(()), "count": jnp.zeros(())}
        return Life(worlds, observation, nothing, nothing, spread, jnp.int32(0))

    def _epoch(self, state, data):
        settings = data.x["settings"]
        shape = jax.eval_shape(self._update, state, settings, data.x["params"])[1]
        count = self.every - (state.underway.updates < settings["shorter"]) if self.uneven else self.every

        def update(number, carry):
            state, every = carry
            state, losses = self._update(state, settings, data.x["params"])
            return state, jax.tree.map(lambda all, one: all.at[number].set(one), every, losses)

        state, losses = jax.lax.fori_loop(0, count, update, (state, room(shape, self.every)))
        return state, (losses, jnp.arange(self.every) < count, data.x["params"])

    def _end(self, before, after, seen, held_out):
        """An evaluation, and whether the member learns on; one that has lost its numbers stays where it was."""
        losses, made, params = seen
        sane = jnp.isfinite(losses["loss"]).all()
        evaluation = jnp.float32(jnp.nan)
        if self.episodes:
            key = jax.random.fold_in(member.member_key(after.seed, after.id, member.PLAY), after.epoch)
            returns = environments.play(self.env, after, params, key, episodes=self.episodes)
            evaluation = returns.mean()
        active = before.stopping.active
        goes_on = active & sane & ~(evaluation >= before.stopping.at)
        after = stopping.choose(active & sane, after.replace(epoch=after.epoch + 1), before)
        after = after.replace(stopping=before.stopping.replace(active=goes_on))
        losses = {name: jnp.where(active & made, value, jnp.nan) for name, value in losses.items()}
        losses["evaluation"] = jnp.where(active, evaluation, jnp.nan)
        return after, (losses.pop("loss"), None, losses, None)

    def _update(self, state, settings, params):
        """A rollout and the steps on it: -> (state, {name: what was seen})."""
        state, settings, (begin, act, order) = self.prepared(state, settings)
        life = state.underway
        life = stopping.choose(life.updates == 0, self._begun(begin, params).replace(spread=life.spread), life)
        life, seen = self._rollout(state, life, act, params, settings["gamma"])
        return self.improved(state.replace(underway=life), settings, seen, order)

    def prepared(self, state: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any], jax.Array]:
        """A member with an update's settings in its optimizer, these, and three keys: to begin, to act, to shuffle."""
        left = 1 - state.underway.updates / settings["updates"]
        settings = {name: value * left if name in self.config.anneal else value for name, value in settings.items()}
        key = jax.random.fold_in(member.member_key(state.seed, state.id, member.ACT), state.step)
        return state.replace(opt_state=into_optimizer(state.opt_state, settings)), settings, jax.random.split(key, 3)

    def improved(self, state: Any, settings: dict[str, Any], seen: dict[str, Any], key: jax.Array) -> tuple[Any, Any]:
        """A member after its steps on what it has `seen`, {name: [step, env, ...]}: -> (state, {name: number})."""
        config, life = self.config, state.underway
        rewards = seen["reward"]
        if config.normalize_rewards:
            spread = running(life.spread, seen["discounted"].ravel())
            life = life.replace(spread=spread)
            rewards = jnp.clip(rewards / jnp.sqrt(spread["variance"] + 1e-8), -HIGHEST, HIGHEST)
        transitions = jax.tree.map(_flat, (seen["observation"], self._judged(state, seen, rewards, settings)))

        def epoch(state, key):
            order = epoch_order(key, rewards.size, length=rewards.size, batch_size=self.batch_size)
            return jax.lax.scan(step, state, jax.tree.map(lambda leaf: leaf[order], transitions))

        def step(state, batch):
            x, taken = batch
            state, loss, parts = member.train_step(self.loss_fn, state, x, (taken, settings))
            return state, {"loss": loss, **parts}

        state, losses = jax.lax.scan(epoch, state, jax.random.split(key, config.n_epochs))
        if config.normalize_observations:
            known = state.collections["observations"]
            state = state.replace(collections={**state.collections, "observations": running(known, transitions[0])})
        episodes = seen["ended"].sum()
        found = jax.tree.map(jnp.mean, losses)
        found |= {"train_return": jnp.where(seen["ended"], seen["so_far"], 0).sum() / episodes, "episodes": episodes}
        found = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), found)
        return state.replace(underway=life.replace(updates=life.updates + 1)), found

    def _rollout(self, state, life, key, params, gamma):
        """`n_steps` of every environment: -> (life, {name: [step, env, ...]})."""
        steps, envs = self.config.n_steps, self.config.n_envs
        draw, move, begin = jax.random.split(key, 3)
        out = jax.eval_shape(lambda: member.predict(state, life.observation))
        if not isinstance(out, tuple) or len(out) != 2 or hasattr(out, "log_probability"):
            raise ValueError(f"A network that learns returns (policy, values), not {type(out).__name__}: see Agent.")
        policy = jax.eval_shape(lambda out: environments.policy(self.env, params, out), out)
        # All that is drawn is drawn in one piece, new episodes too: an environment draws one in each step anyway.
        noise = policy.noise(draw, steps)
        keys = jax.random.split(move, (steps, envs))
        anew = environments.reset(self.env, jax.random.split(begin, (steps, envs)), params)

        def step(life, drawn):
            noise, keys, anew = drawn
            action = distribution(member.predict(state, life.observation)[0]).sample(noise)
            observation, worlds, reward, terminated, truncated = environments.step(
                self.env, keys, life.worlds, action, params
            )
            ended = terminated | truncated
            so_far, discounted = life.so_far + reward, gamma * life.discounted + reward
            seen = {"observation": life.observation, "action": action, "reward": reward, "terminated": terminated}
            seen |= {"ended": ended, "last": observation, "so_far": so_far, "discounted": discounted}

            def of_next(new, old):
                return jnp.where(ended.reshape(envs, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)

            begun = (*anew, jnp.zeros(envs), jnp.zeros(envs))
            observation, worlds, so_far, discounted = jax.tree.map(
                of_next, begun, (observation, worlds, so_far, discounted)
            )
            return life.replace(worlds=worlds, observation=observation, so_far=so_far, discounted=discounted), seen

        return jax.lax.scan(step, life, (noise, keys, anew))

    def _judged(self, state, seen, rewards, settings):
        """What was taken, [step, env, ...], with its advantages."""

        def predicted(observation):
            policy, values = member.predict(state, _flat(observation))
            return distribution(policy), values.reshape(rewards.shape)

        policy, values = predicted(seen["observation"])
        following = predicted(seen["last"])[1]
        discounts = settings["gamma"], settings["gae_lambda"]
        advantages = gae(rewards, values, following, seen["terminated"], seen["ended"], *discounts)
        logarithms = policy.log_probability(_flat(seen["action"])).reshape(rewards.shape)
        return Taken(seen["action"], logarithms, advantages, advantages + values, values)


def _flat(leaf):
    """[step, env, ...] as [transition, ...]."""
    return leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])


def learner(config: PPOConfig, env: Any, *, every: int = 1, episodes: int = 0, uneven: bool = False) -> Learn:
    """What learns by these settings: see `Learn`."""
    return Learn(
        Loss(config.clip_values),
        config.batch_size,
        env=env,
        config=without_numbers(config),
        every=every,
        episodes=episodes,
        uneven=uneven,
    )
