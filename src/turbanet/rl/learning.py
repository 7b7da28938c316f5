"""One agent's PPO updates: rollouts in its environments, advantages, epochs over minibatches."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from turbanet.core import member, stopping
from turbanet.data.sampling import epoch_order
from turbanet.networks.policies import distribution, running
from turbanet.ppo import PPOConfig, Taken, check_one_a_row, gae, ppo_loss
from turbanet.rl import environments
from turbanet.rl.settings import into_optimizer, without_numbers
from turbanet.training.program import Train, room

LOSS_SETTINGS = "clip_range", "ent_coef", "vf_coef"
METRICS = "policy_loss", "value_loss", "entropy", "kl", "train_return", "episodes", "evaluation"  # beside the loss
REWARD_CLIP = 10.0  # largest magnitude of a normalised reward


@struct.dataclass
class Life:
    """State of a member's environments and of its running statistics: leaves [member, ...]."""

    worlds: Any  # states of the environments [env, ...]
    observation: Any  # [env, ...]
    so_far: Any  # return so far of each unfinished episode [env]
    discounted: Any  # discounted sum of rewards [env], whose deviation normalises rewards
    spread: Any  # running mean, variance and count of that sum
    updates: Any  # number of updates made


@dataclasses.dataclass(frozen=True)
class Loss:
    """`ppo_loss` with the signature that `member.train_step` calls: y is (Taken, {setting: number})."""

    clip_values: bool

    def __call__(self, params, x, y, apply_fn):
        taken, settings = y
        policy, values = apply_fn({"params": params}, x)
        own = {name: settings[name] for name in LOSS_SETTINGS}
        return ppo_loss(policy, values, taken, **own, clip_values=self.clip_values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learn(Train):
    """Epochs of one agent, each of some updates and an evaluation: (state, data) -> (state, metrics).

    An agent trains until its evaluation reaches `solved` or its losses are no longer finite.
    """

    env: Any
    config: PPOConfig  # without the settings that are data
    every: int  # updates of an epoch
    episodes: int  # of an evaluation; 0: no evaluation
    uneven: bool = False  # whether the first epochs have one update fewer than `every`
    solved: float = float("inf")

    @property
    def metric_names(self):
        return list(METRICS)

    @property
    def computed(self) -> dict[str, Any]:
        counts = self.every, self.episodes
        return {"environment": self.env, "settings": self.config, "updates and episodes": counts, "solved": self.solved}

    def initial_life(self, params: Any) -> Life:
        """Return zeros of the shapes of one member's `Life`; the first update resets the environments."""
        life = jax.eval_shape(lambda: self._reset(jax.random.key(0), params))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), life)

    def _reset(self, key, params):
        observation, worlds = environments.reset(self.env, jax.random.split(key, self.config.n_envs), params)
        zeros = jnp.zeros(self.config.n_envs)
        spread = {"mean": jnp.zeros(()), "variance": jnp.ones(()), "count": jnp.zeros(())}
        return Life(worlds, observation, zeros, zeros, spread, jnp.int32(0))

    def epoch(self, state, data):
        settings = data.x["settings"]
        shape = jax.eval_shape(self._update, state, settings, data.x["params"])[1]
        count = self.every - (state._underway.updates < settings["shorter"]) if self.uneven else self.every

        def update(number, carry):
            state, recorded = carry
            state, metrics = self._update(state, settings, data.x["params"])
            return state, jax.tree.map(lambda all, one: all.at[number].set(one), recorded, metrics)

        state, metrics = jax.lax.fori_loop(0, count, update, (state, room(shape, self.every)))
        return state, (metrics, jnp.arange(self.every) < count, data.x["params"])

    def _end(self, before, after, seen, held_out):
        """Evaluate the member and decide whether it trains on; a diverged member keeps its state from `before`."""
        metrics, made, params = seen
        finite = jnp.isfinite(metrics["loss"]).all()
        evaluation = jnp.float32(jnp.nan)
        if self.episodes:
            key = jax.random.fold_in(member.member_key(after.seed, after.id, member.PLAY), after.epoch)
            returns = environments.play(self.env, after, params, key, episodes=self.episodes)
            evaluation = returns.mean()
        active = before._stopping.active
        trains_on = active & finite & ~(evaluation >= self.solved)
        after = stopping.choose(active & finite, after.replace(epoch=after.epoch + 1), before)
        after = after.replace(_stopping=before._stopping.replace(active=trains_on))
        metrics = {name: jnp.where(active & made, value, jnp.nan) for name, value in metrics.items()}
        metrics["evaluation"] = jnp.where(active, evaluation, jnp.nan)
        return after, (metrics.pop("loss"), None, metrics)

    def _update(self, state, settings, params):
        """Make a rollout and train on it: -> (state, metrics)."""
        state, settings, (reset_key, act_key, shuffle_key) = self.prepared(state, settings)
        life = state._underway
        life = stopping.choose(life.updates == 0, self._reset(reset_key, params).replace(spread=life.spread), life)
        life, rollout = self._rollout(state, life, act_key, params, settings["gamma"])
        return self.improved(state.replace(_underway=life), settings, rollout, shuffle_key)

    def prepared(self, state: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any], jax.Array]:
        """Return a member with annealed settings in its optimizer, these settings, and keys to reset, act, shuffle."""
        left = 1 - state._underway.updates / settings["updates"]
        settings = {name: value * left if name in self.config.anneal else value for name, value in settings.items()}
        key = jax.random.fold_in(member.member_key(state.seed, state.id, member.ACT), state.step)
        return state.replace(opt_state=into_optimizer(state.opt_state, settings)), settings, jax.random.split(key, 3)

    def improved(self, state: Any, settings: dict[str, Any], rollout: Any, key: jax.Array) -> tuple[Any, Any]:
        """Return a member trained on a rollout, {name: [step, env, ...]}, and {metric: number}."""
        config, life = self.config, state._underway
        rewards = rollout["reward"]
        if config.normalize_rewards:
            spread = running(life.spread, rollout["discounted"].ravel())
            life = life.replace(spread=spread)
            rewards = jnp.clip(rewards / jnp.sqrt(spread["variance"] + 1e-8), -REWARD_CLIP, REWARD_CLIP)
        taken = self._with_advantages(state, rollout, rewards, settings)
        transitions = jax.tree.map(_flat, (rollout["observation"], taken))

        def epoch(state, key):
            order = epoch_order(key, rewards.size, length=rewards.size, batch_size=self.batch_size)
            return jax.lax.scan(step, state, jax.tree.map(lambda leaf: leaf[order], transitions))

        def step(state, batch):
            x, taken = batch
            state, loss, parts = member.train_step(self.loss_fn, state, x, (taken, settings))
            return state, {"loss": loss, **parts}

        state, losses = jax.lax.scan(epoch, state, jax.random.split(key, config.n_epochs))
        if config.normalize_observations:
            rows = transitions[0].reshape(-1, transitions[0].shape[-1])  # `Normalised` has one mean a feature
            statistics = running(state.collections["observations"], rows)
            state = state.replace(collections={**state.collections, "observations": statistics})
        episodes = rollout["ended"].sum()
        train_return = jnp.where(rollout["ended"], rollout["so_far"], 0).sum() / episodes
        metrics = {**jax.tree.map(jnp.mean, losses), "train_return": train_return, "episodes": episodes}
        metrics = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), metrics)
        return state.replace(_underway=life.replace(updates=life.updates + 1)), metrics

    def _rollout(self, state, life, key, params, gamma):
        """Take `n_steps` in every environment: -> (life, {name: [step, env, ...]})."""
        steps, envs = self.config.n_steps, self.config.n_envs
        noise_key, step_key, reset_key = jax.random.split(key, 3)
        out = jax.eval_shape(lambda: member.predict(state, life.observation))
        if not isinstance(out, tuple) or len(out) != 2 or hasattr(out, "log_probability"):
            raise ValueError(f"A network that learns returns (policy, values), not {type(out).__name__}: see Agent.")
        policy = jax.eval_shape(lambda out: environments.policy(self.env, params, out), out)
        # Noise, keys and new episodes are drawn for the whole rollout at once; a reset in each step would cost as much.
        noise = policy.noise(noise_key, steps)
        keys = jax.random.split(step_key, (steps, envs))
        new_episodes = environments.reset(self.env, jax.random.split(reset_key, (steps, envs)), params)

        def one_step(life, drawn):
            noise, keys, new_episode = drawn
            action = distribution(member.predict(state, life.observation)[0]).sample(noise)
            observation, worlds, reward, terminated, truncated = environments.step(
                self.env, keys, life.worlds, action, params
            )
            ended = terminated | truncated
            so_far, discounted = life.so_far + reward, gamma * life.discounted + reward
            step = {"observation": life.observation, "action": action, "reward": reward, "terminated": terminated}
            step |= {"ended": ended, "last": observation, "so_far": so_far, "discounted": discounted}

            def where_ended(new, old):
                return jnp.where(ended.reshape(envs, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)

            start = (*new_episode, jnp.zeros(envs), jnp.zeros(envs))
            observation, worlds, so_far, discounted = jax.tree.map(
                where_ended, start, (observation, worlds, so_far, discounted)
            )
            return life.replace(worlds=worlds, observation=observation, so_far=so_far, discounted=discounted), step

        return jax.lax.scan(one_step, life, (noise, keys, new_episodes))

    def _with_advantages(self, state, rollout, rewards, settings):
        """Return the actions of a rollout, [step, env, ...], with their advantages and returns."""

        def predict(observation):
            policy, values = member.predict(state, _flat(observation))
            log_probability = distribution(policy).log_probability(_flat(rollout["action"]))
            check_one_a_row(log_probability, values, _flat(rewards))
            return log_probability.reshape(rewards.shape), values.reshape(rewards.shape)

        log_probability, values = predict(rollout["observation"])
        following = predict(rollout["last"])[1]
        discounts = settings["gamma"], settings["gae_lambda"]
        advantages = gae(rewards, values, following, rollout["terminated"], rollout["ended"], *discounts)
        return Taken(rollout["action"], log_probability, advantages, advantages + values, values)


def _flat(leaf):
    """Reshape [step, env, ...] to [transition, ...]."""
    return leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])


def learner(config: PPOConfig, env: Any, *, every: int = 1, episodes: int = 0, **options: Any) -> Learn:
    """Return the `Learn` program of these settings; options : its others."""
    loss = Loss(config.clip_values)
    options |= {"config": without_numbers(config), "every": every, "episodes": episodes}
    return Learn(loss, config.batch_size, env=env, **options)
