"""Hyperparameters and learning rate schedules of each member's own."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from turbanet.core.arrays import as_array, first_line
from turbanet.core.state import State, Swarm, check_state, check_swarm

ADVICE = "wrap the optimizer: optax.inject_hyperparams(optax.adam)(learning_rate=0.001)"


def hyperparameters(swarm: State) -> dict[str, jax.Array]:
    """Return {name: array [member]} of what `optax.inject_hyperparams` holds in the swarm's optimizer, nested or not.

    Those of one network are numbers. Where several parts of the optimizer have the same name, as with
    `optax.multi_transform`, the part precedes it: "head.learning_rate".
    """
    return {name: value for name, (_, value) in _found(check_state(swarm).opt_state).items()}


def with_hyperparameters(swarm: Swarm, **values: Any) -> Swarm:
    """Return the swarm with new hyperparameters of its optimizer: `values` are each a number, or one a member.

    Names are those of `hyperparameters`, or a single one's end, after a point. A schedule, if the swarm has one, begins
    anew from a learning rate given here. Raises ValueError for a name that the optimizer does not hold, holds several
    times or computes itself, for another number of values than members, and for NaN.

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
    for name, new_value in values.items():
        several = [name] if name in present else [known for known in present if known.endswith(f".{name}")]
        if len(several) != 1:
            which = "give one of these" if present else ADVICE
            which = f"; say which, by **{{{several[0]!r}: ...}}" if several else f"; {which}"
            has = "several hyperparameters" if several else "no hyperparameter"
            raise ValueError(f"The optimizer has {has} {name!r}; it has {sorted(several or present)}{which}.")
        name = several[0]
        value = as_array(new_value, name)
        if value.ndim and value.shape != jnp.shape(swarm.step):
            numbers = f"one number or {len(swarm)} of them" if jnp.ndim(swarm.step) else "one number, of one network"
            raise ValueError(f"{name} must be {numbers}, got shape {value.shape}.")
        if not isinstance(value, jax.core.Tracer) and np.isnan(value).any():
            raise ValueError(f"{name} must be numbers, got NaN: {new_value!s:.60}.")
        old = present[name]
        # A hyperparameter that Optax has as an int may be changed to any number.
        is_int = jnp.issubdtype(old.dtype, jnp.integer) and jnp.issubdtype(value.dtype, jnp.integer)
        new[name] = jnp.broadcast_to(jnp.asarray(value, old.dtype if is_int else _float(swarm, old)), old.shape)
    _check_free(swarm, new)
    schedule = swarm.schedule
    if schedule is None or not schedule.base.keys() & new.keys():
        return swarm.replace(opt_state=_set(swarm.opt_state, new))
    swarm = jax.vmap(begin_epoch)(swarm) if jnp.ndim(swarm.step) else begin_epoch(swarm)  # rates that are not in `new`
    swarm = swarm.replace(opt_state=_set(swarm.opt_state, new))
    plateau = schedule.plateau._replace(scale=jnp.ones_like(schedule.plateau.scale))
    return swarm.replace(schedule=schedule.replace(base=learning_rates(swarm), begin=swarm.epoch, plateau=plateau))


def constant(epoch: Any, base: Any) -> Any:
    """Return `base` at every `epoch`."""
    return base


def cosine(epoch: Any, base: Any, *, period: float = 10, floor: float = 1e-6) -> Any:
    """Decay along a cosine and rise again, as PyTorch's CosineAnnealingLR.

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
    """Decay along a cosine with warm restarts (Loshchilov and Hutter 2017).

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
    """Decay by a factor at each milestone; the defaults are He et al.'s (2015) for CIFAR.

    Parameters
    ----------
    epoch : the number of epochs before this one
    base : the learning rate before the first milestone
    milestones : the epochs from which on it is multiplied by `factor`, once each
    factor : what it is multiplied by

    Returns
    -------
    The learning rate of this epoch.
    """
    return base * factor ** sum(epoch >= milestone for milestone in milestones)


def reduce(epoch: Any, base: Any) -> Any:
    """Return `base` at every `epoch`; `PLATEAU` halves it after more than 5 epochs without a better validation loss."""
    return base


SCHEDULES = {"constant": constant, "cosine": cosine, "warm": warm, "multistep": multistep, "reduce": reduce}
# The published numbers of reduce, which are PyTorch's but for the patience; Optax halves at the last of these epochs.
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=6, rtol=1e-4)


@struct.dataclass
class Schedule:
    """The learning rate schedule of each member: leaves [member]."""

    which: Any  # index into functions
    base: Any  # {name: learning rate}, as `hyperparameters` names them
    begin: Any  # the epoch from which on it counts
    plateau: Any  # Optax's state of `PLATEAU`: the best validation loss, and the scale by which reduce multiplies
    functions: tuple[Callable, ...] = struct.field(pytree_node=False)


def with_schedule(swarm: Swarm, schedule: Any) -> Swarm:
    """Return the swarm with a learning rate that changes at each epoch of `fit`, from each member's present one.

    Each of several learning rates, such as those of `optax.multi_transform`, changes from its own value.

    schedule: a function (epoch, base) -> learning rate, such as lambda epoch, base: base * 0.9**epoch, for all members,
    or a list of them, one a member; or a name, of PyTorch's schedulers with published settings: "cosine" falls for 10
    epochs and rises for the next 10, whatever the number of epochs trained; "warm" begins anew every 10 epochs;
    "multistep" divides by 10 from the epochs 82 and 123 on; "reduce" halves after 6 epochs without a better validation
    loss; "constant". Epochs count from this call on, also of a swarm that has trained before. Raises ValueError for an
    unknown name, another number of schedules than members, and an optimizer without a learning rate as data.
    """
    base = learning_rates(check_swarm(swarm))
    if not base:
        raise ValueError(f"A schedule needs a learning_rate as data; {ADVICE}.")
    _check_free(swarm, base)
    each = list(schedule) if isinstance(schedule, list | tuple | np.ndarray) else [schedule] * len(swarm)
    if len(each) != len(swarm):
        raise ValueError(f"schedule must be one or {len(swarm)} of them, got {len(each)}.")
    of_members: list[Any] = [SCHEDULES.get(one, one) if isinstance(one, str) else one for one in each]
    for one in of_members:
        if not (callable(one) and isinstance(one, Hashable)):
            raise ValueError(f"Unknown schedule {one!r}; known: {', '.join(SCHEDULES)}, or a function (epoch, base).")
    functions = tuple(dict.fromkeys(of_members))
    for function in functions:
        try:
            value = jax.eval_shape(function, jnp.int32(0), next(iter(base.values()))[0])
        except TypeError as error:
            optax_schedule = "one of Optax's, of steps, is lambda epoch, base: schedule(epoch * steps_of_an_epoch)"
            problem = f"A schedule is a function (epoch, base) -> learning rate; {optax_schedule}"
            advice = "It is in jax.numpy, with jnp.where in place of if"
            raise ValueError(f"{problem}. {advice}. {function} raised: {first_line(error)}") from error
        if getattr(value, "shape", None) != ():
            raise ValueError(f"A schedule returns one number; {function} returned {value}.")
    which = jnp.array([functions.index(function) for function in of_members], jnp.int32)
    opt_state = _set(swarm.opt_state, base)
    plateau = jax.vmap(PLATEAU.init)(base)
    return swarm.replace(opt_state=opt_state, schedule=Schedule(which, base, swarm.epoch, plateau, functions))


def learning_rates(swarm: State) -> dict[str, jax.Array]:
    """Return {name: floating-point array [member]} of the learning rates among `hyperparameters`."""
    found = _found(swarm.opt_state)
    return {
        name: jnp.asarray(value, _float(swarm, value))
        for name, (path, value) in found.items()
        if path[-1].key == "learning_rate"
    }


def needs_validation(swarm: State) -> bool:
    """Whether some member's learning rate follows its validation loss."""
    return swarm.schedule is not None and reduce in swarm.schedule.functions


def begin_epoch(state: Swarm) -> Swarm:
    """Return the member `state` with the learning rate of its epoch."""
    schedule = state.schedule
    if schedule is None:
        return state
    branches = [lambda epoch, base, f=f: jnp.asarray(f(epoch, base), base.dtype) for f in schedule.functions]
    rates = {
        name: jax.lax.switch(schedule.which, branches, state.epoch - schedule.begin, base) * schedule.plateau.scale
        for name, base in schedule.base.items()
    }
    return state.replace(opt_state=_set(state.opt_state, rates))


def end_epoch(state: Swarm, validation_loss: Any) -> Swarm:
    """Return the member `state` after an epoch: `reduce` halves its learning rate on a plateau of the loss."""
    schedule = state.schedule
    if schedule is None or reduce not in schedule.functions or validation_loss is None:
        return state
    _, plateau = PLATEAU.update({}, schedule.plateau, value=validation_loss)
    follows = schedule.which == schedule.functions.index(reduce)
    plateau = plateau._replace(scale=jnp.where(follows, plateau.scale, schedule.plateau.scale))
    return state.replace(schedule=schedule.replace(plateau=plateau))


def _found(opt_state):
    """Return {name: (path, value)} of hyperparameters; equal names get as much of their paths as tells them apart."""
    by_name: dict[str, list] = {}
    for path, values in optax.tree.get_all_with_path(opt_state, "hyperparams"):
        for name, value in values.items():
            by_name.setdefault(name, []).append(((*path, jax.tree_util.DictKey(name)), value))
    found: dict[str, tuple] = {}
    for several in by_name.values():
        paths = [path[:-2] for path, _ in several]
        keys = [tuple(key for key in path if not hasattr(key, "name")) for path in paths]  # of dicts and tuples
        for heads in ([()] * len(paths), keys, paths):
            ends = [path[-1:] for path, _ in several]
            names = [jax.tree_util.keystr(a + b, simple=True, separator=".") for a, b in zip(heads, ends, strict=True)]
            if len(set(names)) == len(names):
                break
        found |= zip(names, several, strict=True)
    return found


def _check_free(swarm, names):
    """Raise ValueError for a hyperparameter given to Optax as a schedule, which overwrites it at each step."""
    states = optax.tree.get_all_with_path(swarm.opt_state, "hyperparams_states")
    computed = {(path[:-1], name) for path, values in states for name in values}
    for name, (path, _) in _found(swarm.opt_state).items():
        if name in names and (path[:-2], path[-1].key) in computed:
            raise ValueError(f"{name} was given to Optax as a schedule, which sets it at each step; {ADVICE}.")


def _set(opt_state, values):
    found = _found(opt_state)
    for name, value in values.items():
        path, _ = found[name]
        opt_state = optax.tree.set(opt_state, lambda other, _, path=path: other == path, **{path[-1].key: value})
    return opt_state


def _float(swarm, value):
    """Return a hyperparameter's floating-point type: its own, or else Optax's for these params."""
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    return value.dtype if is_float else optax.tree.dtype(swarm.params, "highest")
