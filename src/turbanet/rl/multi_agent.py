"""Agents together: every member learns by PPO in one world that all of them act in at once."""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from turbanet.networks.policies import Agent, distribution
from turbanet.ppo import PPOConfig
from turbanet.rl import learning
from turbanet.rl.agents import AgentHistory, name_the_lost, new_swarm
from turbanet.rl.settings import count_updates, into_swarm, of_members
from turbanet.training import member, program
from turbanet.training.arrays import check_seed, check_whole
from turbanet.training.interrupt import Interrupted, noted
from turbanet.training.member import Swarm
from turbanet.training.plan import LARGEST_BLOCK, Plan, home

INTERFACE = "reset", "step", "agents", "actions", "limit"


def train_together(
    world: Any,
    config: PPOConfig | None = None,
    swarm: Swarm | None = None,
    *,
    seed: int = 0,
    shared: bool = False,
    model: Any = None,
    devices: int | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
) -> tuple[Swarm, AgentHistory]:
    """Train the agents that live in one world, all of them at once: each has a network of its own, or all share one.

    An update is one call of a compiled program: `config.n_steps` of `config.n_envs` copies of the world, in which every
    member acts, and then every member's own steps by PPO on what it has seen.

    Parameters
    ----------
    world : such as `Foraging`: an object with `agents`, `actions` and `limit`, the steps of an episode, with reset(key)
        -> (observations [agent, feature], state) and step(key, state, action [agent]) -> (observations, state,
        rewards [agent])
    config : None for the defaults of `PPOConfig`
    swarm : what was trained before and learns on; None for a new one
    seed : of a new swarm, and of the worlds
    shared : whether one network, a swarm of one, acts for all agents and learns from all of them
    model : as `train_agents` takes it
    devices : how many of JAX's; None: as many as divide the members
    progress, on_interrupt : as `train_agents` takes them

    Returns
    -------
    (swarm, AgentHistory) : member i is agent i of the world; returns are of whole episodes

    Raises
    ------
    ValueError : for a world without that interface, a swarm of another number of members than agents, and settings
        that do not fit one another
    """
    config = config or PPOConfig()
    check(world)
    seed = int(check_seed(seed))
    updates = count_updates(config, world.agents if shared else 1)
    if on_interrupt not in ("raise", "return"):
        raise ValueError(f'on_interrupt must be "raise" or "return", got {on_interrupt!r}.')
    members = 1 if shared else world.agents
    observed = jax.eval_shape(world.reset, jax.random.key(0))[0]
    if swarm is None:
        swarm = new_swarm(model or Agent(world.actions), config, members, observed.shape[1:], seed)
    elif model is not None:
        raise ValueError("A model came with a swarm, which has its own: leave one of the two out.")
    if len(swarm) != members:
        raise ValueError(f"A member is an agent: the swarm has {len(swarm)}, and {members} act in this world.")
    together = Together(learning.learner(config, world), shared)
    plan = _plan(members, devices)
    settings = of_members(config, members, updates=updates)
    state = plan.place(together.begun(into_swarm(swarm, settings), observed))
    own = plan.place(jax.tree.map(lambda value: np.broadcast_to(value, members), settings))
    begin, later = jax.random.split(jax.random.fold_in(jax.random.key(seed), int(swarm.step[0])))  # new in each call
    everywhere = plan.share((together.worlds(begin), later))
    began = time.perf_counter()
    run = together.compiled(plan, state, own, *everywhere)
    compiled = time.perf_counter()
    found: list[Any] = []
    hidden = {} if progress else {"disable": True}
    with noted() as interrupted, tqdm(range(updates), unit="update", **hidden) as bar:
        worlds, key = everywhere
        for _ in bar:
            state, worlds, seen = run(state, own, worlds, key)
            found.append(jax.tree.map(np.asarray, seen))
            bar.set_postfix({"return": f"{found[-1]['train_return'].mean():.4g}"})
            if interrupted():
                break
        stopped = interrupted()
    history = _history(found, swarm, config, compiled - began, time.perf_counter() - compiled, plan)
    name_the_lost(history, "its weights are lost")
    state = jax.device_put(state.replace(underway=None, epoch=state.epoch + len(found)), jax.tree.map(home, swarm))
    trained = swarm.replace(
        **{name: getattr(state, name) for name in ("params", "opt_state", "collections", "step", "epoch")}
    )
    if stopped and on_interrupt == "raise":
        raise Interrupted(trained, history)
    return trained, history


@dataclasses.dataclass(frozen=True)
class Together:
    """An update of all members at once: a rollout of the worlds that they share, then the steps of each."""

    learn: learning.Learn
    shared: bool

    @property
    def world(self):
        return self.learn.env

    def begun(self, swarm, observed):
        """The members with a life that has not begun; what they observe is the worlds' to keep."""
        envs = self.learn.config.n_envs * (self.world.agents if self.shared else 1)
        nothing = np.zeros((len(swarm), envs), np.float32)
        number = np.zeros(len(swarm), np.float32)
        spread = {"mean": number, "variance": number + 1, "count": number}
        return swarm.replace(underway=learning.Life((), (), nothing, nothing, spread, number.astype(np.int32)))

    def worlds(self, key):
        """(Observations [world, agent, feature], states [world, ...], steps of the episode so far)."""
        keys = jax.random.split(key, self.learn.config.n_envs)
        return (*jax.jit(jax.vmap(self.world.reset))(keys), jnp.int32(0))

    def update(self, plan, state, settings, worlds, key):
        """-> (members, worlds, {name: what was seen [member]})."""
        updates = state.underway.updates[0]
        state, settings, keys = jax.vmap(self.learn.prepared)(state, settings)
        state, worlds, seen = self._rollout(state, settings, worlds, keys[:, 1], jax.random.fold_in(key, updates))
        state, found = plan.vectorise(lambda own, _: self.learn.improved(*own))((state, settings, seen, keys[:, 2]), ())
        return state, worlds, found

    def _rollout(self, state, settings, worlds, keys, key):
        """What every member sees, {name: [member, step, env, ...]}."""
        config, life = self.learn.config, state.underway
        shape = jax.eval_shape(jax.vmap(self._policy), state, self._to_members(worlds[0]))

        def of_member(key, policy):
            return policy.noise(key, config.n_steps)

        noise = jax.vmap(of_member)(keys, shape)

        def step(carry, drawn):
            (observation, worlds, time), so_far, discounted = carry
            noise, key = drawn
            action = jax.vmap(lambda state, x, noise: self._policy(state, x).sample(noise))(
                state, self._to_members(observation), noise
            )
            move, begin = jax.random.split(key)
            keys = jax.random.split(move, config.n_envs)
            last, worlds, reward = jax.vmap(self.world.step)(keys, worlds, self._to_worlds(action))
            reward = self._to_members(reward)
            ended = time + 1 >= self.world.limit
            anew = jax.vmap(self.world.reset)(jax.random.split(begin, config.n_envs))
            after = jax.tree.map(lambda new, old: jnp.where(ended, new, old), anew, (last, worlds))
            so_far, discounted = so_far + reward, settings["gamma"][:, None] * discounted + reward
            everyone = jnp.broadcast_to(ended, reward.shape)
            seen = {"observation": self._to_members(observation), "action": action, "reward": reward}
            seen |= {"ended": everyone, "terminated": jnp.zeros_like(everyone), "last": self._to_members(last)}
            seen |= {"so_far": so_far, "discounted": discounted}
            carry = (*after, jnp.where(ended, 0, time + 1)), *(jnp.where(ended, 0, x) for x in (so_far, discounted))
            return carry, seen

        drawn = jnp.swapaxes(noise, 0, 1), jax.random.split(key, config.n_steps)
        carry, seen = jax.lax.scan(step, (worlds, life.so_far, life.discounted), drawn)
        worlds, so_far, discounted = carry
        life = life.replace(so_far=so_far, discounted=discounted)
        return state.replace(underway=life), worlds, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), seen)

    def _policy(self, state, x):
        return distribution(member.predict(state, x)[0])

    def _to_members(self, leaf):
        """[world, agent, ...] as [member, env, ...]."""
        return leaf.reshape(1, -1, *leaf.shape[2:]) if self.shared else jnp.swapaxes(leaf, 0, 1)

    def _to_worlds(self, leaf):
        """[member, env, ...] as [world, agent, ...]."""
        worlds = self.learn.config.n_envs, self.world.agents
        return leaf.reshape(*worlds, *leaf.shape[2:]) if self.shared else jnp.swapaxes(leaf, 0, 1)

    def compiled(self, plan, state, *others):
        """(members, settings, worlds, key) -> (members, worlds, what was seen); an equal one is compiled once."""
        key = program.identity(self, plan, state, others)
        run = program.remembered(key, partial(self._compile, plan, state, others))

        def call(state, *others):
            members, worlds, seen = run(jax.tree.leaves(state), *others)
            return jax.tree.unflatten(jax.tree.structure(state), members), worlds, seen

        return call

    def _compile(self, plan, state, others):
        tree = jax.tree.structure(state)

        def of_leaves(leaves, *others):
            state, worlds, seen = self.update(plan, jax.tree.unflatten(tree, leaves), *others)
            return jax.tree.leaves(state), worlds, seen

        places = jax.tree.map(lambda leaf: leaf.sharding, (jax.tree.leaves(state), others[1]))
        settings: dict[str, Any] = {"donate_argnums": 0, "out_shardings": (*places, None)}
        return plan.lower(of_leaves, jax.tree.leaves(state), *others, **settings).compile()


def check(world: Any) -> None:
    """ValueError for an object that is no world."""
    if missing := [name for name in INTERFACE if not hasattr(world, name)]:
        known = f"an object with {', '.join(INTERFACE)}, such as Foraging"
        raise ValueError(f"A world is {known}; {type(world).__name__} has no {', '.join(missing)}.")
    check_whole(**{name: getattr(world, name) for name in ("agents", "actions", "limit")})


def evaluate_together(
    world: Any, swarm: Swarm | None = None, *, episodes: int = 10, greedy: bool = False, seed: int = 0
) -> np.ndarray:
    """The returns [agent, episode] of whole episodes of a world.

    Parameters
    ----------
    world : as `train_together` takes it
    swarm : of as many members as there are agents, or of one whose network acts for all; None: agents act at random
    episodes : beside one another
    greedy : whether the likeliest action is taken in each step, or one is drawn
    seed : of the episodes
    """
    return np.asarray(play_together(world, swarm, episodes=episodes, greedy=greedy, seed=seed)[0])


def play_together(
    world: Any, swarm: Swarm | None = None, *, episodes: int = 1, greedy: bool = False, seed: int = 0
) -> tuple[jax.Array, Any]:
    """(Returns [agent, episode], states of the world [step, episode, ...]); arguments are `evaluate_together`'s."""
    check(world)
    check_whole(episodes=episodes)
    if swarm is not None and len(swarm) not in (1, world.agents):
        raise ValueError(f"{world.agents} agents act in this world, by a network each or by one; got {len(swarm)}.")
    if swarm is not None:
        swarm = swarm.replace(loss_fn=None, sample=None)
    known = program.read(check, world, getattr(swarm, "apply_fn", None))
    return _played(world, swarm, episodes, greedy, jax.random.key(check_seed(seed)), known)


@partial(jax.jit, static_argnums=(0, 2, 3, 5))
def _played(world, swarm, episodes, greedy, key, known):
    begin, later = jax.random.split(key)
    shape = episodes, world.agents

    def act(observation, key):
        if swarm is None:
            return jax.random.randint(key, shape, 0, world.actions)
        alone = len(swarm) == 1
        x = observation.reshape(1, -1, *observation.shape[2:]) if alone else jnp.swapaxes(observation, 0, 1)
        policy = jax.vmap(lambda state, x: distribution(member.predict(state, x)[0]))(swarm, x)
        action = policy.mode() if greedy else policy.sample(policy.noise(key))
        return action.reshape(shape) if alone else jnp.swapaxes(action, 0, 1)

    def step(carry, key):
        observation, worlds = carry
        draw, move = jax.random.split(key)
        action = act(observation, draw)
        observation, after, reward = jax.vmap(world.step)(jax.random.split(move, episodes), worlds, action)
        return (observation, after), (reward, worlds)

    start = jax.vmap(world.reset)(jax.random.split(begin, episodes))
    _, (rewards, worlds) = jax.lax.scan(step, start, jax.random.split(later, world.limit))
    return rewards.sum(0).T, worlds


def _plan(members, devices):
    """As many devices as divide the members, in blocks of all of a share, or of the largest part of it on a CPU."""
    known: Any = Plan(devices).devices
    count = max(count for count in range(1, len(known) + 1) if members % count == 0)
    share = members // count
    plan = Plan(known[:count], block=share)
    if plan.on_accelerator:
        return plan
    return dataclasses.replace(plan, block=max(size for size in range(1, LARGEST_BLOCK + 1) if share % size == 0))


def _history(found, swarm, config, compile_seconds, seconds, plan):
    nothing = np.zeros((0, len(swarm)), np.float32)
    names = ["loss", *(name for name in learning.SEEN if name != "evaluation")]
    seen = {name: np.stack([each[name] for each in found]) if found else nothing for name in names}
    return AgentHistory(
        train_loss=seen.pop("loss"),
        **seen,
        steps=config.n_steps * config.n_envs,
        evaluation=None,
        updates=np.full(len(swarm), len(found)),
        seed=np.asarray(swarm.seed),
        member=np.asarray(swarm.id),
        compile_seconds=compile_seconds,
        steady_seconds=seconds,
        plan=plan,
    )
