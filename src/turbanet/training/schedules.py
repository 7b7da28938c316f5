"""Each member's own hyperparameters, and its own learning rate from epoch to epoch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

HOW = "wrap the optimizer: optax.inject_hyperparams(optax.adam)(learning_rate=0.001)"


def hyperparameters(swarm) -> dict[str, Any]:
    """{name: array [member]} of what `optax.inject_hyperparams` holds in the swarm's optimizer, nested or not."""
    found = {}
    for _, values in optax.tree.get_all_with_path(swarm.opt_state, "hyperparams"):
        found |= values
    return found


def with_hyperparameters(swarm, **values):
    """The same swarm with hyperparameters of its optimizer set: each a number, or one a member [member].

    A learning rate is what the swarm's schedule, if it has one, goes on from. Raises ValueError for a name that the
    optimizer does not hold or computes by itself, and for another number of values than members.
    """
    known, new = hyperparameters(swarm), {}
    if not known:
        raise ValueError(f"This optimizer holds no hyperparameters as data; {HOW}.")
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"The optimizer has no hyperparameter {name!r}; it has {', '.join(sorted(known))}.")
        if np.ndim(value) and np.shape(value) != (len(swarm),):
            raise ValueError(f"{name} must be one number or {len(swarm)} of them, got shape {np.shape(value)}.")
        new[name] = jnp.broadcast_to(jnp.asarray(value, known[name].dtype), known[name].shape)
    _check_free(swarm, new)
    follow = swarm.schedule
    if follow is not None and "learning_rate" in new:
        follow = follow.replace(base=new["learning_rate"], scale=jnp.ones_like(follow.scale))
    return swarm.replace(opt_state=_set(swarm.opt_state, new), schedule=follow)


def constant(epoch, base):
    """The base value."""
    return base


def cosine(epoch, base, *, period=10, floor=1e-6):
    """Down to `floor` in `period` epochs along a cosine, and up again, as PyTorch's CosineAnnealingLR."""
    return floor + (base - floor) * (1 + jnp.cos(jnp.pi * epoch / period)) / 2


def warm(epoch, base, *, period=10, floor=1e-6):
    """Down to `floor` along a cosine, anew each `period` epochs (Loshchilov and Hutter 2017)."""
    return cosine(epoch % period, base, period=period, floor=floor)


def multistep(epoch, base, *, milestones=(82, 123), factor=0.1):
    """The base value, times `factor` from each of the `milestones` on: by default He et al.'s (2015) for CIFAR."""
    return base * factor ** sum(epoch >= milestone for milestone in milestones)


def reduce(epoch, base):
    """The base value, halved where the validation loss has not improved for more than 5 epochs."""
    return base


NAMED = {"constant": constant, "cosine": cosine, "warm": warm, "multistep": multistep, "reduce": reduce}
FACTOR, PATIENCE, THRESHOLD = 0.5, 5, 1e-4  # of reduce: the published ones, which are PyTorch's but for the patience


@struct.dataclass
class Schedule:
    """What a member's learning rate follows: an index into `functions`, its base value, how the plateau stands."""

    which: Any
    base: Any
    best: Any
    waited: Any
    scale: Any
    functions: tuple[Callable, ...] = struct.field(pytree_node=False)


def with_schedule(swarm, schedule):
    """The same swarm with a learning rate that changes at each epoch of `fit`, from each member's present one.

    schedule: "constant", "cosine", "warm", "multistep", "reduce" or a function (epoch, base) -> learning rate, such as
    partial(multistep, milestones=(30, 60)), for all members or a list of one a member. Epochs count from the swarm's
    own (`swarm.epoch`). Raises ValueError for an unknown name, another number of them and an optimizer without a
    learning rate as data.
    """
    base = hyperparameters(swarm).get("learning_rate")
    if base is None:
        raise ValueError(f"A schedule needs a learning_rate as data; {HOW}.")
    _check_free(swarm, ["learning_rate"])
    each = list(schedule) if isinstance(schedule, list | tuple | np.ndarray) else [schedule] * len(swarm)
    if len(each) != len(swarm):
        raise ValueError(f"schedule must be one or {len(swarm)} of them, got {len(each)}.")
    for one in each:
        if not callable(one) and one not in NAMED:
            raise ValueError(f"Unknown schedule {one!r}; known: {', '.join(NAMED)}, or a function (epoch, base).")
    each = [one if callable(one) else NAMED[one] for one in each]
    functions = tuple(dict.fromkeys(each))
    for function in functions:
        value = jax.eval_shape(function, jnp.int32(0), base[0])
        if getattr(value, "shape", None) != ():
            raise ValueError(f"A schedule returns one number; {function} returned {value}.")
    return swarm.replace(
        schedule=Schedule(
            which=jnp.array([functions.index(one) for one in each], jnp.int32),
            base=base,
            best=jnp.full(len(swarm), jnp.inf, base.dtype),
            waited=jnp.zeros(len(swarm), jnp.int32),
            scale=jnp.ones(len(swarm), base.dtype),
            functions=functions,
        )
    )


def needs_validation(swarm) -> bool:
    """Whether some member's learning rate follows its validation loss."""
    return swarm.schedule is not None and reduce in swarm.schedule.functions


def begin_epoch(state):
    """One member with the learning rate of its epoch."""
    follow = state.schedule
    if follow is None:
        return state
    value = jax.lax.switch(follow.which, [_cast(function) for function in follow.functions], state.epoch, follow.base)
    return state.replace(opt_state=_set(state.opt_state, {"learning_rate": value * follow.scale}))


def end_epoch(state, validation_loss):
    """One member after an epoch: on a plateau for longer than PATIENCE epochs, `reduce` halves its learning rate."""
    follow = state.schedule
    if follow is None or reduce not in follow.functions or validation_loss is None:
        return state
    better = validation_loss < follow.best * (1 - THRESHOLD)
    waited = jnp.where(better, 0, follow.waited + 1)
    drop = (waited > PATIENCE) & (follow.which == follow.functions.index(reduce))
    follow = follow.replace(
        best=jnp.where(better, validation_loss, follow.best).astype(follow.best.dtype),
        waited=jnp.where(drop, 0, waited),
        scale=jnp.where(drop, FACTOR * follow.scale, follow.scale),
    )
    return state.replace(schedule=follow)


def _check_free(swarm, names):
    """ValueError for a hyperparameter that was given to Optax as a schedule: it would be overwritten at each step."""
    for _, computed in optax.tree.get_all_with_path(swarm.opt_state, "hyperparams_states"):
        for name in names:
            if name in computed:
                raise ValueError(f"{name} was given to Optax as a schedule, which sets it at each step; {HOW}.")


def _cast(function):
    return lambda epoch, base: jnp.asarray(function(epoch, base), base.dtype)


def _set(opt_state, values):
    def is_hyperparameter(path, _):  # and no layer of that name
        return getattr(path[-2], "name", None) == "hyperparams"

    return optax.tree.set(opt_state, is_hyperparameter, **values)
