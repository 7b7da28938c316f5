"""Environments with gymnax's interface: checks, parameters of each member, steps, whole episodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from turbanet.core import member
from turbanet.core.arrays import as_arrays
from turbanet.networks.policies import distribution

INTERFACE = "reset", "step_env", "is_truncated", "action_space"
MAX_STEPS = 10_000  # of an episode, which may never end by itself


def check(env: Any) -> None:
    """Raise ValueError for an object without the environment interface."""
    if missing := [name for name in INTERFACE if not callable(getattr(env, name, None))]:
        required = f"one of gymnax's, as gymnax.make returns it first, or an object with {', '.join(INTERFACE)}"
        name = f"the class {env.__name__}" if isinstance(env, type) else type(env).__name__
        why = f"{name} has no {', '.join(missing)}"
        if callable(getattr(env, "step", None)):
            why += ", and a step of Gymnasium's runs outside of JAX: take gymnax's, or write it in jax.numpy"
        raise ValueError(f"The environment is {required}; {why}.")
    if isinstance(env, type):
        raise ValueError(f"The environment is an object; got the class {env.__name__}: make one, {env.__name__}(...).")


def observation_shape(env: Any, params: Any) -> tuple[int, ...]:
    """Return the shape of one observation; ValueError for several arrays, or one number."""
    start = jax.eval_shape(env.reset, jax.random.key(0), params)
    if not isinstance(start, tuple | list) or len(start) != 2:
        raise ValueError(f"reset returns (observation, state); {type(env).__name__}'s returned {start!r:.80}.")
    observation = start[0]
    if not hasattr(observation, "shape"):
        received = f"a {type(observation).__name__} of {len(jax.tree.leaves(observation))}"
        advice = "join them in reset and step_env, such as by jax.flatten_util.ravel_pytree(observation)[0]"
        raise ValueError(f"An observation is one array; {type(env).__name__} gives {received}: {advice}.")
    if not observation.shape:
        advice = "return observation[None] in reset and step_env, or jax.nn.one_hot of a state's number"
        raise ValueError(f"An observation has at least one axis; {type(env).__name__} gives one number: {advice}.")
    return observation.shape


def check_types(env: Any, params: Any) -> None:
    """Raise ValueError for an environment whose steps return other shapes and types than its `reset`."""
    number, continuous = actions(env, params)
    action = jnp.zeros(number) if continuous else jnp.int32(0)
    observation, world = jax.eval_shape(env.reset, jax.random.key(0), params)
    after = jax.eval_shape(env.step_env, jax.random.key(0), world, action, params)
    kinds = []
    for seen, state in ((observation, world), after[:2]):
        leaves = tree_leaves_with_path(state)
        kinds.append([f"observation {list(jnp.shape(seen))}", f"{len(leaves)} arrays as the state"])
        kinds[-1] += [f"state{keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    for first, then in zip(*kinds, strict=False):
        if first != then:
            raise ValueError(f"{type(env).__name__}: reset returns {first}, step_env {then}: make them equal.")


def check_sample(env: Any, shape: tuple[int, ...], swarm: Any) -> None:
    """Raise ValueError for agents that were made for other observations than those of this `shape`."""
    made = getattr(swarm.sample, "shape", None)
    if made and made[-len(shape) :] != shape:
        made = made[-len(shape) :]
        raise ValueError(f"{type(env).__name__} gives observations {shape}, the agents were made for {made}.")


def parameters(env: Any, params: Any, members: int) -> tuple[Any, Any]:
    """Return an environment's parameters as arrays, and for each leaf whether it leads with the member axis.

    params : None for the environment's `default_params`; a leaf with one axis more than there has a value a member
    """
    default: Any = getattr(env, "default_params", None)
    if params is None:
        params = default
    arrays = as_arrays(params, "params")
    if default is None:
        return arrays, jax.tree.map(lambda _: False, arrays)
    if type(arrays) is not type(default):
        raise ValueError(
            f"params are {type(default).__name__}, as env.default_params.replace(...) makes them; got {params!r:.80}."
        )
    shapes, given = (
        {keystr(path): np.shape(leaf) for path, leaf in tree_leaves_with_path(tree)} for tree in (default, arrays)
    )
    if given.keys() != shapes.keys():
        raise ValueError(f"params must have the entries of env.default_params, {default!r:.80}; got {params!r:.80}.")

    def is_own(path, leaf):
        shape = shapes[keystr(path)]
        if np.ndim(leaf) == len(shape):
            return False
        if np.shape(leaf) != (members, *shape):
            required = f"{shape}, or {(members, *shape)} for one a member"
            raise ValueError(
                f"The environment's params{keystr(path)} must be of shape {required}; got {np.shape(leaf)}."
            )
        return True

    return arrays, jax.tree.map_with_path(is_own, arrays)


def actions(env: Any, params: Any) -> tuple[int, bool]:
    """Return (number of discrete actions, False) or (length of a continuous action, True).

    Raises ValueError for other action spaces.
    """
    space = env.action_space(params)
    is_one = not getattr(space, "shape", ()) and not getattr(space, "start", 0)
    if isinstance(getattr(space, "n", None), int | np.integer) and is_one:
        return int(space.n), False
    if hasattr(space, "low") and len(shape := getattr(space, "shape", np.shape(space.low))) == 1:
        return shape[0], True
    received = f"{type(space).__name__} {getattr(space, 'shape', '')}".strip()
    known = "Actions are numbered from 0, Discrete(n), or a Box of one axis"
    raise ValueError(f"{known}; {type(env).__name__} takes {received}.")


def reset(env: Any, keys: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    """Return (observations, states) of new episodes, one for each of keys [...]."""
    reset_all = env.reset
    for _ in keys.shape:
        reset_all = jax.vmap(reset_all, (0, None))
    observation, worlds = reset_all(keys, params)
    return jnp.asarray(observation, float), worlds


def step(env: Any, keys: jax.Array, worlds: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
    """Step every environment [env] without resets: (observations, states, rewards, terminated, truncated).

    Continuous actions are clipped to the action space. An episode that terminated is not truncated.
    """
    space = env.action_space(params)
    if hasattr(space, "low"):
        action = jnp.clip(action, jnp.asarray(space.low), jnp.asarray(space.high))
    out = jax.vmap(env.step_env, (0, 0, 0, None))(keys, worlds, action, params)
    if len(out) != 5:
        required = "(observation, state, reward, terminated, info), with truncation told by is_truncated"
        raise ValueError(f"step_env returns {required}; {type(env).__name__}'s returned {len(out)} values.")
    observation, worlds, reward, terminated, _ = out
    reward, terminated = jnp.asarray(reward, float), jnp.asarray(terminated, bool)
    truncated = jnp.asarray(jax.vmap(env.is_truncated, (0, None))(worlds, params), bool)
    for what, given in {"reward": reward, "terminated": terminated, "truncated": truncated}.items():
        if given.ndim != 1:
            raise ValueError(f"{type(env).__name__}'s {what} has shape {given.shape[1:]}: make it one number.")
    return jnp.asarray(observation, float), worlds, reward, terminated, truncated & ~terminated


def policy(env: Any, params: Any, out: Any) -> Any:
    """Return `policy_over` the actions that the environment takes."""
    return policy_over(*actions(env, params), out, type(env).__name__)


def policy_over(number: int, continuous: bool, out: Any, name: str) -> Any:
    """Return the distribution over actions in a network's output, which is a policy or (policy, values).

    number, continuous : what `actions` told; name : who takes them. Raises ValueError for one over other actions.
    """
    is_pair = isinstance(out, tuple) and not hasattr(out, "log_probability")
    policy = distribution(out[0] if is_pair else out)
    mode = jax.eval_shape(policy.mode)
    if continuous != jnp.issubdtype(mode.dtype, jnp.floating):
        required = "a distribution over numbers, such as Gaussian" if continuous else "logits of numbered actions"
        raise ValueError(f"{name} takes {required}; the network returned {type(policy).__name__}.")
    if mode.ndim != 1 + continuous:
        advice = "flatten an observation of several axes in the network, and give it as model="
        raise ValueError(f"{name} takes one action for each observation, the policy is {list(mode.shape)}: {advice}.")
    size = mode.shape[-1] if continuous else getattr(policy, "logits", jnp.zeros(number)).shape[-1]
    if size != number:
        raise ValueError(f"{name} takes {number} action(s), the network's policy is over {size}.")
    return policy


def play(env: Any, state: Any, params: Any, key: jax.Array, *, episodes: int, greedy: bool = True) -> jax.Array:
    """Return one member's returns [episode] of parallel episodes, each played to its end or for MAX_STEPS.

    greedy : whether to take the likeliest action in each step instead of sampling one
    """
    reset_key, step_key = jax.random.split(key)

    def body(carry):
        number, observation, worlds, total, running = carry
        action_key, move_key = jax.random.split(jax.random.fold_in(step_key, number))
        actor = policy(env, params, member.predict(state, observation))
        action = actor.mode() if greedy else actor.sample(actor.noise(action_key))
        keys = jax.random.split(move_key, episodes)
        observation, worlds, reward, terminated, truncated = step(env, keys, worlds, action, params)
        total = total + jnp.where(running, reward, 0)
        return number + 1, observation, worlds, total, running & ~(terminated | truncated)

    def condition(carry):
        return carry[-1].any() & (carry[0] < MAX_STEPS)

    start = reset(env, jax.random.split(reset_key, episodes), params)
    carry = jnp.int32(0), *start, jnp.zeros(episodes), jnp.ones(episodes, bool)
    carry = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), carry, jax.eval_shape(body, carry))
    return jax.lax.while_loop(condition, body, carry)[3]
