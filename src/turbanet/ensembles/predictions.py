"""Checks that all scores share: predictions of the right axes without NaN, and classes that they know."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from turbanet.core.arrays import as_array, as_numpy

Array = jax.Array | np.ndarray
SUM_TOLERANCE = 0.01  # of the sum of a row's probabilities, which bfloat16 rounds


def without_nan(prediction: ArrayLike) -> np.ndarray:
    """Tell which members predict no NaN: prediction [member, ...] -> bool [member].

    `prediction[without_nan(prediction)]` leaves the others out.

    Examples
    --------
    >>> import numpy as np, turbanet as tn
    >>> print(tn.ensembles.without_nan(np.array([[0.5, 0.5], [np.nan, 1.0]])))
    [ True False]
    """
    array = of_one_output(prediction, "prediction")
    return ~np.isnan(array).any(axis=tuple(range(1, array.ndim)))


def of_one_output(prediction: ArrayLike, name: str) -> np.ndarray:
    """Return a prediction as a NumPy array in float32 at least; ValueError for the tuple of several outputs."""
    _refuse_several(prediction, name)
    array = as_numpy(prediction, name)
    return array.astype(np.promote_types(array.dtype, np.float32), copy=False)


def _refuse_several(prediction, name):
    if isinstance(prediction, tuple) and any(np.ndim(each) > 0 and hasattr(each, "shape") for each in prediction):
        raise ValueError(f"{name} came as a tuple, as of a model with several outputs: give one of them, {name}[0].")


def of_members(prediction: ArrayLike, name: str = "logits") -> Array:
    """Return `prediction` as an array [member, row, class] in float32 at least.

    Raises ValueError for other axes, no member, and members that predict NaN.
    """
    _refuse_several(prediction, name)
    array = _float32(as_array(prediction, name))
    if not len(array):
        raise ValueError(f"{name} has shape {array.shape}, no member: an ensemble needs at least one.")
    if array.ndim != 3:
        raise ValueError(f"{name} must be [member, row, class], got shape {array.shape}; one alone is {name}[None].")
    check_nan(array, name)
    return array


def of_logits(logits: ArrayLike) -> Array:
    """Return logits as `of_members` does; ValueError for probabilities, which the softmax would flatten.

    ValueError also for logits of infinity, and for rows that have minus infinity alone.
    """
    array = of_members(logits)
    check_outputs(array, "logits")
    if isinstance(array, jax.core.Tracer) or not array.size:
        return array
    if not np.isfinite(array.sum()) and not np.isfinite(array.max(-1)).all():
        raise ValueError("The largest logit of a row must be a finite number, got one that is infinite.")
    # Rounded, as in a table, a few rows may have other sums.
    if array.min() >= 0 and np.median(np.asarray(_distance_from_one(array))) < 2 * SUM_TOLERANCE:
        advice = "give what the model predicts before its softmax, or np.log of the probabilities"
        raise ValueError(f"These logits are probabilities, at least 0 and with a sum of 1 in a row: {advice}.")
    return array


def are_probabilities(entries: Array) -> bool:
    """Whether entries [..., class] are at least 0 and sum to 1."""
    return bool(entries.min() >= 0 and (_distance_from_one(entries) < SUM_TOLERANCE).all())


def _distance_from_one(entries):
    return abs(entries.sum(-1, dtype=np.float32) - 1)


def _float32(array):
    """Return an array in float32 at least: a model may compute in bfloat16, a score does not."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32), copy=False)


def check_nan(prediction: Any, name: str) -> None:
    """Raise ValueError, with the members' positions, for NaN in a prediction [member, ...]; a tracer passes."""
    if isinstance(prediction, jax.core.Tracer) or not np.isnan(prediction.sum()):
        return
    if members := np.flatnonzero(~without_nan(prediction)).tolist():
        advice = f"leave them out, {name}[turbanet.ensembles.without_nan({name})]"
        raise ValueError(f"The members at positions {members} predict NaN: {advice}.")


def with_classes(prediction: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """Return both as arrays, [..., row, class] and int [row]; ValueError for other axes or, unless traced, classes."""
    _refuse_several(prediction, "prediction")
    array = as_array(prediction, "prediction")
    if isinstance(y, tuple):
        raise ValueError("y came as a tuple, as for a weighted loss: score the classes in it, such as y[0].")
    true = as_array(y, "y")
    if true.ndim != 1 or array.ndim < 2:
        raise ValueError(f"A prediction is [..., row, class], its y int [row]; got shapes {array.shape}, {true.shape}.")
    if array.shape[-2] != len(true):
        raise ValueError(f"prediction has {array.shape[-2]} rows, y has {len(true)}.")
    if not len(true):
        raise ValueError(f"prediction has shape {array.shape}, no row: a score needs at least one.")
    check_outputs(array, "prediction")
    classes = np.int32(array.shape[-1])  # of a type of its own: 256 is 0 in the type of uint8 labels
    if not isinstance(true, jax.core.Tracer):
        is_class = (true >= 0) & (true < classes) & (true % 1 == 0)
        if len(bad := np.flatnonzero(~np.asarray(is_class))):
            known = f"the prediction has the classes 0 to {classes - 1}"
            raise ValueError(f"y holds {true[bad[0]]} in row {bad[0]}; {known}.")
    return array, true.astype(np.int32)


def check_outputs(prediction: Any, name: str) -> None:
    """Raise ValueError for a prediction [..., row, class] of a single class, whose probability is always 1."""
    if prediction.shape[-1] == 1:
        raise ValueError(f"{name} has shape {prediction.shape}, one output a row: give an output for each class.")


def with_probabilities(probability: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """Return both as `with_classes` does, in float32 at least; ValueError for other numbers than probabilities.

    Tracers pass unchecked.
    """
    array, y = with_classes(probability, y)
    array = _float32(array)
    if not isinstance(array, jax.core.Tracer):
        entries = np.asarray(array, np.float32)
        if not are_probabilities(entries):
            total = entries.sum(-1)
            got = f"rows that sum to {total.min():.3g} up to {total.max():.3g}, the least entry {entries.min():.3g}"
            raise ValueError(f"Probabilities are at least 0 and sum to 1; got {got}: of logits take jax.nn.softmax.")
    return array, y


def true_class(prediction: ArrayLike, y: ArrayLike) -> jax.Array:
    """Return the entries of the true classes: [..., row, class], int [row] -> [..., row]; raises as `with_classes`."""
    array, true = map(jnp.asarray, with_classes(prediction, y))
    return array.at[..., jnp.arange(len(true)), true].get(mode="fill")  # NaN for an unknown class, if traced
