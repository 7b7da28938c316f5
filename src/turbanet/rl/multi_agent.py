"""Multi-agent PPO: every member acts and learns in one world that all members share."""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core import member
from turbanet.core.arrays import check_seed, check_whole
from turbanet.core.cache import read
from turbanet.core.gather import home
from turbanet.core.interrupt import Interrupted, noted
from turbanet.core.plan import LARGEST_BLOCK, dividing
from turbanet.core.progress import progress_bar
from turbanet.core.state import check_swarm
from turbanet.networks.policies import Agent
from turbanet.ppo import PPOConfig
from turbanet.rl import environments, learning
from turbanet.rl.agents import AgentHistory, history_of, new_swarm, warn_of_diverged
from turbanet.rl.settings import as_config, count_updates, into_swarm, of_members
from turbanet.training import compilation
from turbanet.training.callbacks import check_callbacks
from turbanet.turba_train_state import TurbaTrainState

INTERFACE = "reset", "step", "agents", "actions", "limit"


def train_together(
    world: Any,
    config: PPOConfig | None = None,
    swarm: TurbaTrainState | None = None,
    *,
    seed: int = 0,
    shared: bool = False,
    model: Any = None,
    devices: int | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
) -> tuple[TurbaTrainState, AgentHistory]:
    """Train the agents of one world by PPO, each with a network of its own or all with one shared network.

    An update is one call of a compiled program: `config.n_steps` steps of `config.n_envs` copies of the world, in which
    every member acts, then each member's optimizer steps on its own transitions.

    Parameters
    ----------
    world : an object such as `Foraging`, with the numbers `agents`, `actions` and `limit` (steps of an episode), with
        reset(key) -> (observations [agent, feature], state) and step(key, state, action [agent]) -> (observations,
        state, rewards [agent])
    config : None for the defaults of `PPOConfig`
    swarm : a swarm trained before, whose training continues; None for a new one
    seed : seed of a new swarm and of the worlds
    shared : whether one network, a swarm of one, acts for all agents and learns from all of them
    model : as in `train_agents`
    devices : number of JAX devices; None: the largest number that divides the members
    progress, on_interrupt : as in `train_agents`

    Returns
    -------
    (swarm, AgentHistory) : member i is agent i of the world; returns are of whole episodes

    Raises
    ------
    ValueError : for a world without that interface, a swarm with another number of members than agents, and settings
        that contradict one another
    """
    config = as_config(config)
    observations = check(world)
    seed = int(check_seed(seed))
    updates = count_updates(config, world.agents if shared else 1)
    check_callbacks((), on_interrupt)
    members = 1 if shared else world.agents
    if swarm is None:
        swarm = new_swarm(model or Agent(world.actions), config, members, observations, seed)
    elif model is not None:
        raise ValueError("A model came with a swarm, which has its own: leave one of the two out.")
    environments.check_sample(world, observations, check_swarm(swarm))
    if len(swarm) != members:
        raise ValueError(f"A member is an agent: the swarm has {len(swarm)}, and {members} act in this world.")
    together = Together(learning.learner(config, world), shared)
    plan = _plan(members, devices)
    settings = of_members(config, members, updates=updates)
    state = plan.place(together.initial_state(into_swarm(swarm, settings, config)))
    own = plan.place(jax.tree.map(lambda value: np.broadcast_to(value, members), settings))
    key = jax.random.fold_in(jax.random.key(seed), int(swarm.step[0]))  # a second call acts in other worlds
    reset_key, key = jax.random.split(key)
    worlds, key = plan.share((together.worlds(reset_key), key))
    began = time.perf_counter()
    run = together.compiled(plan, state, own, worlds, key)
    compiled = time.perf_counter()
    recorded: list[Any] = []
    with noted() as interrupted, progress_bar(progress, iterable=range(updates), unit="update") as bar:
        for _ in bar:
            state, worlds, metrics = run(state, own, worlds, key)
            recorded.append(jax.tree.map(np.asarray, metrics))
            bar.set_postfix({"return": f"{recorded[-1]['train_return'].mean():.4g}"})
            if interrupted():
                break
        stopped = interrupted()
    history = _history(recorded, swarm, config, (compiled - began, time.perf_counter() - compiled), plan)
    warn_of_diverged(history, "its weights are lost")
    state = jax.device_put(state.replace(_underway=None, epoch=state.epoch + len(recorded)), jax.tree.map(home, swarm))
    trained = swarm.replace(
        **{name: getattr(state, name) for name in ("params", "opt_state", "collections", "step", "epoch")}
    )
    if stopped and on_interrupt == "raise":
        raise Interrupted(trained, history)
    return trained, history


@dataclasses.dataclass(frozen=True)
class Together:
    """One update of all members: a rollout of the worlds that they share, then the optimizer steps of each."""

    learn: learning.Learn
    shared: bool

    @property
    def world(self):
        return self.learn.env

    def initial_state(self, swarm):
        """Return the members with an initial `Life`, without worlds and observations, which all members share."""
        envs = self.learn.config.n_envs * (self.world.agents if self.shared else 1)
        returns = np.zeros((len(swarm), envs), jnp.result_type(float))
        zeros = np.zeros(len(swarm), jnp.result_type(float))
        spread = {"mean": zeros, "variance": zeros + 1, "count": zeros}
        return swarm.replace(_underway=learning.Life((), (), returns, returns, spread, zeros.astype(np.int32)))

    def worlds(self, key):
        """Return (observations [world, agent, feature], states [world, ...], steps of the episode so far)."""
        keys = jax.random.split(key, self.learn.config.n_envs)
        return (*jax.jit(jax.vmap(self.world.reset))(keys), jnp.int32(0))

    def update(self, plan, state, settings, worlds, key):
        """Make one update: -> (members, worlds, {metric: [member]})."""
        updates = state._underway.updates[0]
        state, settings, keys = jax.vmap(self.learn.prepared)(state, settings)
        state, worlds, rollout = self._rollout(state, settings, worlds, keys[:, 1], jax.random.fold_in(key, updates))
        own = state, settings, rollout, keys[:, 2]
        state, metrics = plan.vectorise(lambda own, _: self.learn.improved(*own))(own, ())
        return state, worlds, metrics

    def _rollout(self, state, settings, worlds, keys, key):
        """Take `n_steps` in every world: -> (members, worlds, {name: [member, step, env, ...]})."""
        config, life = self.learn.config, state._underway
        policies = jax.eval_shape(jax.vmap(partial(_policy, self.world)), state, self._to_members(worlds[0]))
        noise = jax.vmap(lambda key, policy: policy.noise(key, config.n_steps))(keys, policies)

        def one_step(carry, drawn):
            (observation, worlds, time), so_far, discounted = carry
            noise, key = drawn
            action = jax.vmap(lambda state, x, noise: _policy(self.world, state, x).sample(noise))(
                state, self._to_members(observation), noise
            )
            step_key, reset_key = jax.random.split(key)
            keys = jax.random.split(step_key, config.n_envs)
            last, worlds, reward = jax.vmap(self.world.step)(keys, worlds, self._to_worlds(action))
            reward = self._to_members(reward)
            ended = time + 1 >= self.world.limit
            new_episode = jax.vmap(self.world.reset)(jax.random.split(reset_key, config.n_envs))
            after = jax.tree.map(lambda new, old: jnp.where(ended, new, old), new_episode, (last, worlds))
            so_far, discounted = so_far + reward, settings["gamma"][:, None] * discounted + reward
            all_ended = jnp.broadcast_to(ended, reward.shape)
            step = {"observation": self._to_members(observation), "action": action, "reward": reward}
            step |= {"ended": all_ended, "terminated": jnp.zeros_like(all_ended), "last": self._to_members(last)}
            step |= {"so_far": so_far, "discounted": discounted}
            carry = (*after, jnp.where(ended, 0, time + 1)), *(jnp.where(ended, 0, x) for x in (so_far, discounted))
            return carry, step

        drawn = jnp.swapaxes(noise, 0, 1), jax.random.split(key, config.n_steps)
        carry, rollout = jax.lax.scan(one_step, (worlds, life.so_far, life.discounted), drawn)
        worlds, so_far, discounted = carry
        life = life.replace(so_far=so_far, discounted=discounted)
        return state.replace(_underway=life), worlds, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rollout)

    def _to_members(self, leaf):
        """Rearrange [world, agent, ...] to [member, env, ...]."""
        return leaf.reshape(1, -1, *leaf.shape[2:]) if self.shared else jnp.swapaxes(leaf, 0, 1)

    def _to_worlds(self, leaf):
        """Rearrange [member, env, ...] to [world, agent, ...]."""
        worlds = self.learn.config.n_envs, self.world.agents
        return leaf.reshape(*worlds, *leaf.shape[2:]) if self.shared else jnp.swapaxes(leaf, 0, 1)

    def compiled(self, plan, state, *others):
        """Return the compiled update (members, settings, worlds, key) -> (members, worlds, metrics), cached."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (jax.tree.leaves(state), others[1]))
        function = partial(self.update, plan)
        return compilation.on_devices(self, function, plan, state, *others, out_shardings=(*shardings, None))


def check(world: Any) -> tuple[int, ...]:
    """Return the shape of an agent's observation; ValueError for an object without the world interface."""
    if isinstance(world, type):
        raise ValueError(f"A world is an object; got the class {world.__name__}: make one, {world.__name__}(...).")
    if missing := [name for name in INTERFACE if not hasattr(world, name)]:
        required = f"an object with {', '.join(INTERFACE)}, such as Foraging"
        raise ValueError(f"A world is {required}; {type(world).__name__} has no {', '.join(missing)}.")
    check_whole(**{name: getattr(world, name) for name in ("agents", "actions", "limit")})
    key, each = jax.random.key(0), (world.agents,)
    begun: Any = jax.eval_shape(world.reset, key)
    observed: Any = begun[0] if isinstance(begun, tuple) and len(begun) == 2 else None
    if getattr(observed, "shape", ())[:1] != each:
        returned = f"returns {jax.tree.map(jnp.shape, begun)!s:.200}"
        raise ValueError(f"reset {returned}: it must be (observations [{world.agents}, ...], the world's state).")
    after: Any = jax.eval_shape(world.step, key, begun[1], jax.ShapeDtypeStruct(each, jnp.int32))
    kinds = [getattr(part, "shape", None) for part in after] if isinstance(after, tuple) else []
    if len(kinds) != 3 or kinds[0] != observed.shape or kinds[2] != each:
        required = f"(observations {list(observed.shape)}, the world's state, rewards [{world.agents}])"
        raise ValueError(f"step returns {jax.tree.map(jnp.shape, after)!s:.200}: it must be {required}.")
    return observed.shape[1:]


def evaluate_together(
    world: Any, swarm: TurbaTrainState | None = None, *, episodes: int = 10, greedy: bool = False, seed: int = 0
) -> np.ndarray:
    """Return the returns [agent, episode] of whole episodes of a world.

    Parameters
    ----------
    world : as in `train_together`
    swarm : one member for each agent, or a single one that acts for all; None: agents act at random
    episodes : number of parallel episodes
    greedy : whether to take the likeliest action in each step instead of sampling one
    seed : seed of the episodes
    """
    return np.asarray(play_together(world, swarm, episodes=episodes, greedy=greedy, seed=seed)[0])


def play_together(
    world: Any, swarm: TurbaTrainState | None = None, *, episodes: int = 1, greedy: bool = False, seed: int = 0
) -> tuple[jax.Array, Any]:
    """Return (returns [agent, episode], states of the world [step, episode, ...]); see `evaluate_together`."""
    shape = check(world)
    check_whole(episodes=episodes)
    if swarm is not None:
        environments.check_sample(world, shape, check_swarm(swarm))
        if len(swarm) not in (1, world.agents):
            raise ValueError(f"{world.agents} agents act in this world, by a network each or by one; got {len(swarm)}.")
        swarm = swarm.replace(loss_fn=None, sample=None)
    fingerprint = read(check, world, getattr(swarm, "apply_fn", None))
    return _play(world, swarm, episodes, greedy, jax.random.key(check_seed(seed)), fingerprint)


@partial(jax.jit, static_argnums=(0, 2, 3, 5))
def _play(world, swarm, episodes, greedy, key, fingerprint):
    """Play episodes in one program; the fingerprint compiles anew when the code of the world or network changes."""
    reset_key, step_key = jax.random.split(key)
    shape = episodes, world.agents

    def act(observation, key):
        if swarm is None:
            return jax.random.randint(key, shape, 0, world.actions)
        shared = len(swarm) == 1
        x = observation.reshape(1, -1, *observation.shape[2:]) if shared else jnp.swapaxes(observation, 0, 1)
        policy = jax.vmap(partial(_policy, world))(swarm, x)
        action = policy.mode() if greedy else policy.sample(policy.noise(key))
        return action.reshape(shape) if shared else jnp.swapaxes(action, 0, 1)

    def step(carry, key):
        observation, worlds = carry
        action_key, move_key = jax.random.split(key)
        action = act(observation, action_key)
        observation, after, reward = jax.vmap(world.step)(jax.random.split(move_key, episodes), worlds, action)
        return (observation, after), (reward, worlds)

    start = jax.vmap(world.reset)(jax.random.split(reset_key, episodes))
    _, (rewards, worlds) = jax.lax.scan(step, start, jax.random.split(step_key, world.limit))
    return rewards.sum(0).T, worlds


def _policy(world, state, x):
    return environments.policy_over(world.actions, False, member.predict(state, x), type(world).__name__)


def _plan(members, devices):
    """Return a plan for the largest number of devices that divides the members.

    A block is all members of a device; on a CPU the largest divisor of their number up to LARGEST_BLOCK.
    """
    plan = dividing(devices, members)
    if plan.on_accelerator:
        return plan
    share: Any = plan.block
    return dataclasses.replace(plan, block=max(size for size in range(1, LARGEST_BLOCK + 1) if share % size == 0))


def _history(recorded, swarm, config, seconds, plan):
    empty = np.zeros((0, len(swarm)), np.float32)
    names = ["loss", *(name for name in learning.METRICS if name != "evaluation")]
    metrics = {name: np.stack([update[name] for update in recorded]) if recorded else empty for name in names}
    return history_of(metrics, None, swarm, config, seconds, plan)
