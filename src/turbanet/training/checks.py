"""Data held against a swarm and a loss, once, on the host: what no training could use stops before it begins."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError

from turbanet.training import member, metrics, schedules, stopping
from turbanet.training.arrays import check_whole
from turbanet.training.data import Data, of_members, pair, prepare, targets
from turbanet.training.program import read, rows_at_once

SOME = 8  # rows whose prediction is looked at before the training


class Checked(NamedTuple):
    """What `fit` makes of its arguments: the loss, `Data`, the metrics compiled and called, what patience follows."""

    loss_fn: Callable
    data: Any
    held_out: Any
    in_program: tuple
    on_host: dict
    rule: tuple


def expects(check: Callable) -> Callable:
    """A decorator that tells `fit` what the loss under it can use as targets.

    check(y, prediction) yields (array, bad, expected) for arrays in y: bool, which broadcasts to its shape, where it
    holds what the loss cannot use, and what the loss expects there. `prediction` is one member's of a row, known by
    shape and type alone, and leads with the member axis where y does; with it in the array's place, `bad` is a function
    of some predictions that returns such a bool.
    """

    def mark(loss_fn):
        loss_fn.check = check
        return loss_fn

    return mark


def check_data(swarm: Any, data: Any, loss_fn: Callable | None, *, allow_nan: bool, part: str = "") -> None:
    """ValueError for what no training could use, in the rows of `data` that some member sees.

    That is an x that the model cannot take, a target that `loss_fn` says it cannot use and, unless `allow_nan`, NaN and
    infinite numbers. `part` says in errors what the data are for: "validation ".
    """
    leaves = jax.tree.leaves_with_path({"x": data.x, "y": data.y})
    examples = [(f"{part}{path[0].key}", leaf, own) for (path, leaf), own in zip(leaves, data.is_own, strict=False)]
    for name, array, own in () if allow_nan else examples:
        if jnp.issubdtype(array.dtype, jnp.inexact) and not _is_finite(array):
            bad = ~np.isfinite(np.asarray(array))
            _raise_for(name, array, own, bad, "numbers; mend or leave out such rows, or say allow_nan=True", data)
    asked = loss_fn
    while isinstance(asked, partial):
        asked = asked.func
    check = getattr(asked, "check", None)
    shapes = [leaf.shape[own + 1 :] for leaf, own in zip(jax.tree.leaves(data.x), data.is_own, strict=False)]
    made = [leaf.shape[1:] for leaf in jax.tree.leaves(swarm.sample)]
    if check is None and shapes == made:
        return
    try:
        prediction = one_prediction(swarm, data.x, shapes)
    except InvalidRngError:  # a model that always draws predicts only in a loss
        return
    except Exception as error:
        if not made or shapes == made:  # a loss of its own may hand it more than x
            return
        came = f"rows of shape {_listed(shapes)}, as the swarm was made for {_listed(made)}"
        raise ValueError(f"The model cannot take {part}x with {came}.") from error
    if next((own for name, _, own in examples if name.endswith("y")), False):
        prediction = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), prediction)
    for array, bad, expected in () if check is None else check(data.y, prediction):
        if array is prediction:
            _check_prediction(_of_first_member(swarm, data, loss_fn, SOME), bad, expected)
            continue
        name, own = next((name, own) for name, leaf, own in examples if leaf is array)
        _raise_for(name, array, own, np.broadcast_to(bad, array.shape), expected, data)


def check_fit(
    swarm,
    x,
    y,
    loss_fn,
    *,
    epochs,
    batch_size=None,
    rows=None,
    validation=None,
    validation_rows=None,
    metric=None,
    patience=None,
    monitor=stopping.LOSS,
    mode=None,
    per_member=False,
    allow_nan=False,
    equal_steps=False,
    segment=None,
    of_batches=False,
    **_: Any,
) -> Checked:
    """ValueError for what `fit` refuses of its arguments, else what it makes of them.

    of_batches : whether x and y come later, batch by batch
    """
    if validation is None and (validation_rows is not None or metric is not None):
        raise ValueError("validation_rows or metric came without validation=(x, y): give the data they are for.")
    if validation is None and (patience is not None or schedules.needs_validation(swarm)):
        raise ValueError('patience and the schedule "reduce" follow the validation loss: give validation=(x, y).')
    loss_fn = swarm.loss(loss_fn)
    data = held_out = None
    if not of_batches:
        data = prepare(swarm, x, y, rows=rows, per_member=per_member)
        check_data(swarm, data, loss_fn, allow_nan=allow_nan)
    if validation is not None:
        held_out = prepare(swarm, *pair(validation), rows=validation_rows, per_member=per_member)
        check_data(swarm, held_out, loss_fn, allow_nan=allow_nan, part="validation ")
    optional = {"batch_size": batch_size, "segment": segment, "patience": patience}
    check_whole(epochs=epochs, **{name: number for name, number in optional.items() if number is not None})
    if data is not None and not equal_steps and len(members := short(data, batch_size)):
        one, least = members[0], int(np.min(data.count))
        which = f"member {one} (seed {swarm.seed[one]}, id {swarm.id[one]}), which sees {data.count[one]}"
        batch = f"Batches of {min(batch_size or data.length, data.length)} rows for {which},"
        check_masks(swarm, loss_fn, batch, f"batch_size={least} at the most, or equal_steps=True")
    in_program, on_host = metrics.split(metric)
    rule = metrics.monitored(monitor, mode, [*dict(in_program), *on_host], patience)
    if held_out and on_host and (prediction := _of_first_member(swarm, held_out, loss_fn)) is not None:
        metrics.check(on_host, prediction, targets(held_out, 0))
    return Checked(loss_fn, data, held_out, in_program, on_host, rule)


def short(data: Data, batch_size: int | None) -> np.ndarray:
    """int, the positions of the members that see fewer rows than a batch has."""
    return np.flatnonzero(data.count < min(batch_size or data.length, data.length)) if data.ragged else np.arange(0)


def check_masks(swarm: Any, loss_fn: Callable, what: str, advice: str) -> None:
    """ValueError where `what` leaves rows of a batch out and the loss or the model cannot: a sentence with `advice`."""
    if not member.takes(loss_fn, "mask"):
        needs = "a loss that takes mask=, bool [batch] (see turbanet.mean_over_rows)"
    elif swarm.collections:
        needs = f"a model without {sorted(swarm.collections)}, which are of all rows of a batch (take GroupNorm)"
    else:
        return
    raise ValueError(f"{what} need {needs}, or {advice}.")


def _is_finite(array):
    """Whether its sum is, or else all that is in it: one pass over the memory where nothing is wrong."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(np.asarray(array)).all())


def _raise_for(name, array, own, bad, expected, data):
    """ValueError for the first row of `array` that somebody sees and where it is `bad`, if there is one."""
    in_row = bad.any(axis=tuple(range(1 + own, bad.ndim)))  # [row], or [member, row] where each has its own
    if data.rows is not None and in_row.any():
        seen = np.zeros((len(data.rows), in_row.shape[-1] + 1), bool)
        np.put_along_axis(seen, data.rows, True, axis=1)  # padding marks the last column, which is of no row
        in_row = in_row & (seen[:, :-1] if own else seen[:, :-1].any(axis=0))
    if in_row.any():
        first = tuple(np.argwhere(in_row)[0].tolist())
        value = np.asarray(array[first])[bad[first]].flat[0]
        where = f"row {first[-1]}" + (f" of member {first[0]}" if own else "")
        raise ValueError(f"{name} holds {value} in {where}, where it must hold {expected}.")


def _check_prediction(found, is_bad, expected):
    """ValueError for predictions [row, class] that are there and `is_bad`."""
    if found is not None and (bad := is_bad(found)).any():
        came = np.array2string(found[np.argwhere(bad)[0][0]], precision=3, threshold=6, separator=", ")
        raise ValueError(f"The model predicts {came} in a row, where this loss takes {expected}.")


def _of_first_member(swarm, data, loss_fn, most=None):
    """What the first member predicts in `loss_fn` for `most` of its rows; None where it fails or has other numbers."""
    (own,) = of_members((data,), 0)
    count = int(own.length if own.count is None else own.count)
    rows = own.read(np.arange(count)[:most])
    bare = swarm.get_state(0).replace(loss_fn=None, sample=None, schedule=None, stopping=None)
    try:
        found = jax.tree.map(np.asarray, _predicted_in(loss_fn, bare, *rows))
    except Exception:  # the training will raise it, with all that is known there
        return None
    leaves = [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return found if all(map(_is_finite, leaves)) else None


@partial(jax.jit, static_argnums=0)
def _predicted_in(loss_fn, state, x, y):
    return member.evaluate(loss_fn, state, x, y, rows_at_once=rows_at_once())[1]


def one_prediction(swarm: Any, x: Any, shapes: list) -> Any:
    """One member's prediction of a row of x, whose leaves' rows have these `shapes`: known by shape and type."""
    leaves, x_tree = jax.tree.flatten(x)
    row = tuple(jax.ShapeDtypeStruct((1, *shape), leaf.dtype) for leaf, shape in zip(leaves, shapes, strict=True))
    state, tree = jax.tree.flatten(swarm.replace(loss_fn=None))
    one = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in state)
    return _predicted(read(one_prediction, swarm.apply_fn), tree, one, x_tree, row)


@lru_cache(maxsize=64)
def _predicted(known, tree, state, x_tree, x):
    return jax.eval_shape(member.predict, jax.tree.unflatten(tree, state), jax.tree.unflatten(x_tree, x))


def _listed(shapes):
    return ", ".join(map(str, shapes))
