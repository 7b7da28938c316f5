"""Environments with gymnax's interface: checked, one's own parameters for each member, episodes played to their end."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.networks.policies import distribution
from turbanet.training import member
from turbanet.training.arrays import as_arrays

INTERFACE = "reset", "step_env", "is_truncated", "action_space"
MOST_STEPS = 10_000  # of an episode that is played to its end


def check(env: Any) -> None:
    """ValueError for an object that is no environment."""
    if missing := [name for name in INTERFACE if not callable(getattr(env, name, None))]:
        known = f"one of gymnax's, as gymnax.make returns it first, or an object with {', '.join(INTERFACE)}"
        raise ValueError(f"The environment is {known}; {type(env).__name__} has no {', '.join(missing)}.")


def parameters(env: Any, given: Any, members: int) -> tuple[Any, Any]:
    """The parameters of an environment as arrays, and for each leaf whether it leads with the member axis.

    given : None for the environment's own; a leaf with one axis more than there is each member's own
    """
    default: Any = getattr(env, "default_params", None)
    if given is None:
        given = default
    arrays = as_arrays(given, "params")
    if default is None:
        return arrays, jax.tree.map(lambda _: False, arrays)
    if type(arrays) is not type(default):
        raise ValueError(
            f"params are {type(default).__name__}, as env.default_params.replace(...) makes them; got {given!r:.80}."
        )

    def is_own(path, leaf, known):
        if np.ndim(leaf) == np.ndim(known):
            return False
        if np.shape(leaf) != (members, *np.shape(known)):
            name = jax.tree_util.keystr(path)
            wanted = f"{np.shape(known)}, or {(members, *np.shape(known))} for one a member"
            raise ValueError(f"The environment's params{name} must be of shape {wanted}; got {np.shape(leaf)}.")
        return True

    return arrays, jax.tree_util.tree_map_with_path(is_own, arrays, default)


def actions(env: Any, params: Any) -> tuple[int, bool]:
    """(How many actions there are, False), or (numbers of an action, True); ValueError for other kinds of space."""
    space = env.action_space(params)
    if isinstance(getattr(space, "n", None), int | np.integer):
        return int(space.n), False
    if hasattr(space, "low") and len(space.shape) == 1:
        return space.shape[0], True
    came = f"{type(space).__name__} {getattr(space, 'shape', '')}".strip()
    raise ValueError(f"Actions are numbered, Discrete(n), or a Box of one axis; {type(env).__name__} takes {came}.")


def reset(env: Any, keys: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    """(Observations, states) of as many new episodes as keys [...]."""
    begin = env.reset
    for _ in keys.shape:
        begin = jax.vmap(begin, (0, None))
    observation, worlds = begin(keys, params)
    return jnp.asarray(observation, float), worlds


def step(env: Any, keys: jax.Array, worlds: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
    """One step of every environment [env]: (observations, states, rewards, terminated, truncated), none begun anew.

    A number outside of what an action may be is taken for the nearest that it may be. An episode that ended by the
    environment's rules was not truncated.
    """
    space = env.action_space(params)
    if hasattr(space, "low"):
        action = jnp.clip(action, space.low, space.high)
    out = jax.vmap(env.step_env, (0, 0, 0, None))(keys, worlds, action, params)
    observation, worlds, reward, terminated = out[:4]
    terminated = jnp.asarray(terminated, bool)
    truncated = jax.vmap(env.is_truncated, (0, None))(worlds, params) & ~terminated
    return jnp.asarray(observation, float), worlds, jnp.asarray(reward, float), terminated, truncated


def policy(env: Any, params: Any, out: Any) -> Any:
    """The distribution over actions of what a network returned: a policy, or (policy, values).

    ValueError for one over other actions than the environment takes.
    """
    is_pair = isinstance(out, tuple) and not hasattr(out, "log_probability")
    found = distribution(out[0] if is_pair else out)
    number, continuous = actions(env, params)
    has = jax.eval_shape(found.mode)
    if continuous != jnp.issubdtype(has.dtype, jnp.floating):
        wanted = "a distribution over numbers, such as Gaussian" if continuous else "logits of numbered actions"
        raise ValueError(f"{type(env).__name__} takes {wanted}; the network returned {type(found).__name__}.")
    of_network = has.shape[-1] if continuous else getattr(found, "logits", jnp.zeros(number)).shape[-1]
    if of_network != number:
        raise ValueError(f"{type(env).__name__} takes {number} action(s), the network's policy is over {of_network}.")
    return found


def play(env: Any, state: Any, params: Any, key: jax.Array, *, episodes: int, greedy: bool = True) -> jax.Array:
    """One member's returns [episode] of episodes beside one another, each to its end or MOST_STEPS.

    greedy : whether the likeliest action is taken in each step, or one is drawn
    """
    first, later = jax.random.split(key)

    def another(carry):
        number, observation, worlds, total, goes_on = carry
        draw, move = jax.random.split(jax.random.fold_in(later, number))
        acts = policy(env, params, member.predict(state, observation))
        action = acts.mode() if greedy else acts.sample(acts.noise(draw))
        keys = jax.random.split(move, episodes)
        observation, worlds, reward, terminated, truncated = step(env, keys, worlds, action, params)
        total = total + jnp.where(goes_on, reward, 0)
        return number + 1, observation, worlds, total, goes_on & ~(terminated | truncated)

    def goes_on(carry):
        return carry[-1].any() & (carry[0] < MOST_STEPS)

    begun = reset(env, jax.random.split(first, episodes), params)
    carry = jnp.int32(0), *begun, jnp.zeros(episodes), jnp.ones(episodes, bool)
    carry = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), carry, jax.eval_shape(another, carry))
    return jax.lax.while_loop(goes_on, another, carry)[3]
