"""Checks of data against a swarm and a loss: once, on the host, before anything is traced."""

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.errors import InvalidRngError

from turbanet.core import member
from turbanet.core.cache import read
from turbanet.data.examples import Data, as_inputs, of_members

CHECKED_ROWS = 8  # of which a loss may check the prediction before the training
MAX_SHAPES = 4  # that an error lists


def expects(check: Callable) -> Callable:
    """Return a decorator that declares which targets a loss can use, for `fit` to check.

    check(y, prediction) yields (array, bad, expected) for arrays in y: `bad`, bool, broadcasts to the array's shape and
    is true where the loss cannot use it; `expected` says what the loss expects there. `prediction` is one member's of
    one row, shape and type alone, and leads with the member axis where y does. Where the array is `prediction`
    itself, `bad` is a function of some predictions that returns such a bool. A fourth entry, an array in y of a weight
    for each row, allows anything in the rows of weight 0.
    """

    def mark(loss_fn):
        loss_fn.check = check
        return loss_fn

    return mark


def check_data(
    swarm: Any, data: Any, loss_fn: Callable | None, *, allow_nan: bool, part: str = "", trains: bool = False
) -> None:
    """Raise ValueError if a row of `data` that some member sees is of no use for training.

    That is an x that the model cannot take, a target that `loss_fn` declares unusable (see `expects`) and, unless
    `allow_nan`, NaN and infinite numbers; of rows that the swarm `trains` on also weights of 0 where batch statistics
    would count them. `part` names the data in errors: "validation ".
    """
    _check_loss(loss_fn)
    leaves = jax.tree.leaves_with_path({"x": data.x, "y": data.y})
    examples = [(f"{part}{path[0].key}", leaf, own) for (path, leaf), own in zip(leaves, data.is_own, strict=False)]
    for name, array, own in () if allow_nan else examples:
        if jnp.issubdtype(array.dtype, jnp.inexact) and not _is_finite(array):
            bad = ~np.isfinite(np.asarray(array))
            _raise_for(name, array, own, bad, "numbers; mend or leave out such rows, or say allow_nan=True", data)
    unwrapped = loss_fn
    while isinstance(unwrapped, partial):
        unwrapped = unwrapped.func
    check = getattr(unwrapped, "check", None)
    shapes = [leaf.shape[own + 1 :] for leaf, own in zip(jax.tree.leaves(data.x), data.is_own, strict=False)]
    sample_shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(swarm.sample)]
    trees: list[Any] = [jax.tree.structure(tree) for tree in (data.x, unfreeze(swarm.sample))]
    is_alike = shapes == sample_shapes and trees[0] == trees[1]
    if check is None and is_alike:
        return
    try:
        prediction = one_prediction(swarm, data.x, shapes)
    except (InvalidRngError, member.AlwaysTrains):  # a model that always draws predicts only in a loss
        return
    except Exception as error:
        if not sample_shapes or is_alike or predicted_by_first(swarm, data, loss_fn, CHECKED_ROWS):
            return  # a user's loss may hand it a part of x, or more
        given, made_for = _listed(data.x, shapes), _listed(swarm.sample, sample_shapes)
        received = f"rows of shape {given}, as the swarm was made for {made_for}"
        raise ValueError(f"The model cannot take {part}x with {received}{as_inputs(data.x)}.") from error
    if next((own for name, _, own in examples if name.endswith("y")), False):
        prediction = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), prediction)
    for array, bad, expected, *weight in () if check is None else check(data.y, prediction):
        if array is prediction:
            for predictions in predicted_by_first(swarm, data, loss_fn, CHECKED_ROWS):
                _check_prediction(predictions, bad, expected)
            continue
        name, own = next((name, own) for name, leaf, own in examples if leaf is array)
        counts = True
        for leaf in weight:
            counts = np.asarray(leaf) != 0  # [row], or [member, row] where each has its own
            counts = counts if own or leaf.ndim == 1 else counts.any(axis=0)
        _raise_for(name, array, own, np.broadcast_to(bad, array.shape), expected, data, counts)
    if trains and (weight_of := getattr(unwrapped, "weight_of", None)) and (statistics := batch_statistics(swarm)):
        name, weight, own = next(each for each in examples if each[1] is weight_of(data.y))
        advice = f"a number above 0, as the model's {statistics} count each row (take GroupNorm)"
        _raise_for(name, weight, own, np.asarray(weight) == 0, advice, data)


def short(data: Data, batch_size: int | None) -> np.ndarray:
    """Positions of the members that see fewer rows than a batch has, int [member]."""
    return np.flatnonzero(data.count < min(batch_size or data.length, data.length)) if data.ragged else np.arange(0)


def check_masks(swarm: Any, loss_fn: Callable, what: str, advice: str) -> None:
    """Raise ValueError, with `advice`, if the loss or the model cannot leave out rows of a batch, as `what` needs."""
    if not member.takes(loss_fn, "mask"):
        needs = "a loss that takes mask=, bool [batch] (see turbanet.mean_over_rows)"
    elif statistics := batch_statistics(swarm):
        needs = f"a model without {statistics}, which are of all rows of a batch (take GroupNorm)"
    else:
        return
    raise ValueError(f"{what} need {needs}, or {advice}.")


def batch_statistics(swarm):
    """Return the names of the model's collections that follow the rows of a batch, and are no constants."""
    return member.changing(swarm.get_state(0)) if swarm.collections else []


def _is_finite(array):
    """Whether an array is finite: it is if its sum is, which takes one pass over the memory."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(np.asarray(array)).all())


def _raise_for(name, array, own, bad, expected, data, counts=True):
    """Raise ValueError for the first row of `array` that some member sees, that `counts` and is `bad`, if there is."""
    in_row = counts & bad.any(axis=tuple(range(1 + own, bad.ndim)))  # [row], or [member, row] where each has its own
    if data.rows is not None and in_row.any():
        is_read = np.zeros((len(data.rows), in_row.shape[-1] + 1), bool)
        np.put_along_axis(is_read, data.rows, True, axis=1)  # padding marks the last column, which is of no row
        in_row = in_row & (is_read[:, :-1] if own else is_read[:, :-1].any(axis=0))
    if in_row.any():
        first = tuple(np.argwhere(in_row)[0].tolist())
        value = np.asarray(array[first])[bad[first]].flat[0]
        where = f"row {first[-1]}" + (f" of member {first[0]}" if own else "")
        raise ValueError(f"{name} holds {value} in {where}, where it must hold {expected}.")


def _check_prediction(predictions, is_bad, expected):
    """Raise ValueError if predictions [row, class] hold a row that `is_bad`."""
    if (bad := is_bad(predictions)).any():
        received = np.array2string(predictions[np.argwhere(bad)[0][0]], precision=3, threshold=6, separator=", ")
        raise ValueError(f"The model predicts {received} in a row, where this loss takes {expected}.")


def predicted_by_first(swarm, data, loss_fn, max_rows=None):
    """[The first member's prediction in `loss_fn` of up to `max_rows` rows]; [] if it fails or is not finite."""
    (own,) = of_members((data,), 0)
    count = int(own.length if own.count is None else own.count)
    rows = own.read(np.arange(count)[:max_rows])
    bare = swarm.get_state(0).replace(loss_fn=None, sample=None, schedule=None, _stopping=None)
    try:
        prediction = jax.tree.map(np.asarray, _predicted_in(loss_fn, bare, *rows))
    except Exception:  # the training will raise it, with more context
        return []
    leaves = [leaf for leaf in jax.tree.leaves(prediction) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return [prediction] if all(map(_is_finite, leaves)) else []


@partial(jax.jit, static_argnums=0)
def _predicted_in(loss_fn, state, x, y):
    return member.evaluate(loss_fn, state, x, y, rows_at_once=member.rows_at_once())[1]


def one_prediction(swarm: Any, x: Any, shapes: list) -> Any:
    """Shape and type [1, ...] of one member's prediction of a row of x, whose leaves' rows have these `shapes`."""
    leaves, x_tree = jax.tree.flatten(x)
    known = [size for leaf in jax.tree.leaves(swarm.sample) for size in leaf.shape]
    rows = 1 + max(known, default=0)  # that the model does not take for features, as it may the one row of [1]
    row = tuple(jax.ShapeDtypeStruct((rows, *shape), leaf.dtype) for leaf, shape in zip(leaves, shapes, strict=True))
    state, tree = jax.tree.flatten(swarm.replace(loss_fn=None))
    one = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in state)
    prediction = _predicted(read(one_prediction, swarm.apply_fn), tree, one, x_tree, row)
    return jax.tree.map(lambda leaf: leaf.update(shape=(1, *leaf.shape[1:])), prediction)


@lru_cache(maxsize=64)
def _predicted(known, tree, state, x_tree, x):
    return jax.eval_shape(member.predict, jax.tree.unflatten(tree, state), jax.tree.unflatten(x_tree, x))


def _check_loss(loss_fn):
    """Raise ValueError for a loss that cannot take four arguments, such as one of (prediction, y)."""
    try:
        signature = inspect.signature(loss_fn, follow_wrapped=False) if loss_fn else None
    except (TypeError, ValueError):  # without a signature, as it is written in C
        return
    try:
        if signature:
            signature.bind(*range(4), **{name: None for name in ("mask", "member") if member.takes(loss_fn, name)})
            of_optax = (getattr(getattr(loss_fn, "func", loss_fn), "__module__", None) or "").startswith("optax.")
            if of_optax or "apply_fn" in [*signature.parameters][:3]:
                raise TypeError
    except TypeError:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        advice = "in this order, with the prediction by apply_fn({'params': params}, x); more comes in y, or by partial"
        raise ValueError(f"A loss is loss(params, x, y, apply_fn); got {name}{signature}: {advice}.") from None


def _listed(tree, shapes):
    """Name the shapes of a tree's leaves, as the tree has them."""
    if len(shapes) > MAX_SHAPES:
        return f"{', '.join(map(str, shapes[:MAX_SHAPES]))}, ... ({len(shapes)} of them)"
    return str(unfreeze(jax.tree.unflatten(jax.tree.structure(tree), shapes)))
