"""Each member's own hyperparameters, and its own learning rate from epoch to epoch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from turbanet.training.arrays import as_array

ADVICE = "wrap the optimizer: optax.inject_hyperparams(optax.adam)(learning_rate=0.001)"


def hyperparameters(swarm: Any) -> dict[str, jax.Array]:
    """{name: array [member]} of what `optax.inject_hyperparams` holds in the swarm's optimizer, nested or not."""
    found = optax.tree.get_all_with_path(swarm.opt_state, "hyperparams")
    return {name: value for _, values in found for name, value in values.items()}


def with_hyperparameters(swarm: Any, **values: Any) -> Any:
    """The same swarm with these hyperparameters of its optimizer: `values` are each a number, or one a member.

    A schedule, if the swarm has one, goes on from a learning rate given here. Raises ValueError for a name that the
    optimizer does not hold or computes by itself, and for another number of values than members.

    Examples
    --------
    >>> import optax
    >>> from turbanet import MLP, TurbaTrainState, hyperparameters, with_hyperparameters
    >>> optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.001)
    >>> swarm = TurbaTrainState.swarm(MLP((3,)), optimizer, swarm_size=2, input_size=4)
    >>> swarm = with_hyperparameters(swarm, learning_rate=[0.25, 0.5], b1=0.75)
    >>> [hyperparameters(swarm)[name].tolist() for name in ("learning_rate", "b1")]
    [[0.25, 0.5], [0.75, 0.75]]
    """
    present = hyperparameters(swarm)
    new = {}
    for name, given in values.items():
        if name not in present:
            raise ValueError(f"The optimizer has no hyperparameter {name!r}; it has {sorted(present)}; {ADVICE}.")
        value = as_array(given, name)
        if value.ndim and value.shape != (len(swarm),):
            raise ValueError(f"{name} must be one number or {len(swarm)} of them, got shape {value.shape}.")
        new[name] = jnp.broadcast_to(jnp.asarray(value, present[name].dtype), present[name].shape)
    _check_free(swarm, new)
    schedule = swarm.schedule
    if schedule is not None and "learning_rate" in new:
        plateau = schedule.plateau._replace(scale=jnp.ones_like(schedule.plateau.scale))
        schedule = schedule.replace(base=new["learning_rate"], plateau=plateau)
    return swarm.replace(opt_state=_set(swarm.opt_state, new), schedule=schedule)


def constant(epoch: Any, base: Any) -> Any:
    """`base` at every `epoch`."""
    return base


def cosine(epoch: Any, base: Any, *, period: float = 10, floor: float = 1e-6) -> Any:
    """Along a cosine down and up again, as PyTorch's CosineAnnealingLR.

    Parameters
    ----------
    epoch : the number of epochs before this one
    base : the learning rate at epoch 0
    period : epochs from there down to `floor`
    floor : the lowest learning rate

    Returns
    -------
    The learning rate of this epoch.
    """
    return floor + (base - floor) * (1 + jnp.cos(jnp.pi * epoch / period)) / 2


def warm(epoch: Any, base: Any, *, period: float = 10, floor: float = 1e-6) -> Any:
    """Along a cosine down, again and again from the start (Loshchilov and Hutter 2017).

    Parameters
    ----------
    epoch : the number of epochs before this one
    base : the learning rate at the start of each period
    period : epochs from one start to the next
    floor : the learning rate that a period approaches

    Returns
    -------
    The learning rate of this epoch.
    """
    return cosine(epoch % period, base, period=period, floor=floor)


def multistep(epoch: Any, base: Any, *, milestones: tuple[int, ...] = (82, 123), factor: float = 0.1) -> Any:
    """Down by a factor from some epochs on; the defaults are He et al.'s (2015) for CIFAR.

    Parameters
    ----------
    epoch : the number of epochs before this one
    base : the learning rate before the first milestone
    milestones : the epochs from which on it is multiplied, each once
    factor : by what

    Returns
    -------
    The learning rate of this epoch.
    """
    return base * factor ** sum(epoch >= milestone for milestone in milestones)


def reduce(epoch: Any, base: Any) -> Any:
    """`base` at every `epoch`, halved by `PLATEAU` where the validation loss stays for more than 5 epochs."""
    return base


NAMED = {"constant": constant, "cosine": cosine, "warm": warm, "multistep": multistep, "reduce": reduce}
# The published numbers of reduce, which are PyTorch's but for the patience; Optax halves at the last of these epochs.
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=6, rtol=1e-4)


@struct.dataclass
class Schedule:
    """What each member's learning rate follows: leaves [member]."""

    which: Any  # index into functions
    base: Any  # learning rate
    plateau: Any  # how the validation loss stands and what reduce has made of 1, as Optax keeps it
    functions: tuple[Callable, ...] = struct.field(pytree_node=False)


def with_schedule(swarm: Any, schedule: Any) -> Any:
    """The same swarm with a learning rate that changes at each epoch of `fit`, from each member's present one.

    schedule: "constant", "cosine", "warm", "multistep", "reduce" or a function (epoch, base) -> learning rate, such as
    partial(multistep, milestones=(30, 60)), for all members, or a list of them, one a member. The epochs that a member
    has trained for before (`swarm.epoch`) count. Raises ValueError for an unknown name, another number of schedules
    than members, and an optimizer without a learning rate as data.
    """
    base = hyperparameters(swarm).get("learning_rate")
    if base is None:
        raise ValueError(f"A schedule needs a learning_rate as data; {ADVICE}.")
    _check_free(swarm, ["learning_rate"])
    given = list(schedule) if isinstance(schedule, list | tuple | np.ndarray) else [schedule] * len(swarm)
    if len(given) != len(swarm):
        raise ValueError(f"schedule must be one or {len(swarm)} of them, got {len(given)}.")
    of_members = [NAMED.get(one, one) for one in given]
    functions = tuple(dict.fromkeys(of_members))
    for function in functions:
        if not callable(function):
            raise ValueError(f"Unknown schedule {function!r}; known: {', '.join(NAMED)}, or a function (epoch, base).")
        value = jax.eval_shape(function, jnp.int32(0), base[0])
        if getattr(value, "shape", None) != ():
            raise ValueError(f"A schedule returns one number; {function} returned {value}.")
    which = jnp.array([functions.index(function) for function in of_members], jnp.int32)
    return swarm.replace(schedule=Schedule(which, base, jax.vmap(PLATEAU.init)(base), functions))


def needs_validation(swarm: Any) -> bool:
    """Whether some member's learning rate follows its validation loss."""
    return swarm.schedule is not None and reduce in swarm.schedule.functions


def begin_epoch(state: Any) -> Any:
    """The member `state` with the learning rate of its epoch."""
    schedule = state.schedule
    if schedule is None:
        return state
    branches = [lambda epoch, base, f=f: jnp.asarray(f(epoch, base), base.dtype) for f in schedule.functions]
    value = jax.lax.switch(schedule.which, branches, state.epoch, schedule.base)
    return state.replace(opt_state=_set(state.opt_state, {"learning_rate": value * schedule.plateau.scale}))


def end_epoch(state: Any, validation_loss: Any) -> Any:
    """The member `state` after an epoch: `reduce` halves its learning rate where `validation_loss` stays too long."""
    schedule = state.schedule
    if schedule is None or reduce not in schedule.functions or validation_loss is None:
        return state
    _, plateau = PLATEAU.update({}, schedule.plateau, value=validation_loss)
    follows = schedule.which == schedule.functions.index(reduce)
    plateau = plateau._replace(scale=jnp.where(follows, plateau.scale, schedule.plateau.scale))
    return state.replace(schedule=schedule.replace(plateau=plateau))


def _check_free(swarm, names):
    """ValueError for a hyperparameter that was given to Optax as a schedule: it would be overwritten at each step."""
    for _, computed in optax.tree.get_all_with_path(swarm.opt_state, "hyperparams_states"):
        for name in computed.keys() & names:
            raise ValueError(f"{name} was given to Optax as a schedule, which sets it at each step; {ADVICE}.")


def _set(opt_state, values):  # where they are hyperparameters, and not layers of these names
    return optax.tree.set(opt_state, lambda path, _: getattr(path[-2], "name", None) == "hyperparams", **values)
