"""Losses of one member: `loss(params, x, y, apply_fn) -> (scalar, prediction)`."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from turbanet.data.checks import expects
from turbanet.data.sample_weight import (
    mean_over_rows,
    weighted as weighted,  # exported here as well
)

PROBABILITY_TOLERANCE = 0.001  # by which a probability may lie outside of 0 to 1
SUM_TOLERANCE = 0.01  # by which a sum of probabilities may differ from 1, in half precision
LossAndPrediction = tuple[jax.Array, jax.Array]


def _classes(y, prediction):
    """Check y as classes, if it has one integer a row, and as probabilities otherwise."""
    shape = _one_array(prediction).shape
    if _array(y).ndim >= len(shape):
        # The loss itself refuses another shape ...
        return _distributions(y, prediction) if y.shape[-1:] == shape[-1:] else []
    if not jnp.issubdtype(y.dtype, jnp.integer):
        return []  # ... or the type
    classes = np.int32(prediction.shape[-1])  # of a type of its own: 256 is 0 in the type of uint8 labels
    return [(y, (y < 0) | (y >= classes), f"a class from 0 to {classes - 1}, as the model has {classes} outputs")]


def _probabilities(y, prediction):
    return [(y, ~_is_probability(_array(y)), "0, 1 or a probability between them")]


def _distributions(y, prediction):
    """Check y as each row's probabilities of the classes; a row of zeros is allowed and has a loss of 0."""
    advice = "probabilities that sum to one over classes; binary_cross_entropy takes each class for itself"
    return [*_probabilities(y, prediction), (y, ~_sums_to_one(y) & (y != 0).any(-1, keepdims=True), advice)]


def _both_distributions(y, prediction):
    advice = "probabilities that sum to one: softmax_cross_entropy takes logits, or end the model in a softmax"
    return [*_distributions(y, prediction), (_one_array(prediction), _is_no_distribution, advice)]


def _is_no_distribution(prediction):
    return ~(_is_probability(prediction) & _sums_to_one(prediction))


def _sums_to_one(array):
    return abs(array.sum(-1, keepdims=True) - 1) < SUM_TOLERANCE


def _is_probability(y):
    return (y >= -PROBABILITY_TOLERANCE) & (y <= 1 + PROBABILITY_TOLERANCE)


def _one_array(prediction):
    if hasattr(prediction, "shape"):
        return prediction
    which = repr(next(iter(prediction))) if isinstance(prediction, Mapping) else 0
    advice = f"take a loss of your own, which may call this one with lambda *inputs: apply_fn(*inputs)[{which}]"
    raise ValueError(f"The model returns a {type(prediction).__name__}, and this loss compares one array: {advice}.")


def _array(y):
    if hasattr(y, "dtype"):
        return y
    raise ValueError(f"This loss takes y as one array, got a {type(y).__name__}: for (y, weight) take weighted(loss).")


@mean_over_rows
def mse(params: Any, x: Any, y: jax.Array, apply_fn: Callable) -> LossAndPrediction:
    """Mean squared error.

    Parameters
    ----------
    params : the network's parameters
    x : [batch, ...]
    y : [batch, output], of the shape of the prediction
    apply_fn : `apply_fn({"params": params}, x)` -> prediction [batch, output]

    Other Parameters
    ----------------
    mask, weight : which rows count, and how much; None: all alike (see `mean_over_rows`)

    Returns
    -------
    The loss, in the square of y's unit, and the prediction.

    Raises
    ------
    ValueError : for a target of another shape than the prediction, which would broadcast.
    """
    prediction = _predicted(params, x, apply_fn)
    _check(prediction, y)
    return optax.squared_error(prediction, y), prediction


def quantile_loss(level: float) -> Callable[..., LossAndPrediction]:
    """Return the loss whose minimum is the quantile `level` of y (Koenker and Bassett 1978), also called pinball loss.

    Equal levels give one and the same function.

    Parameters
    ----------
    level : between 0 and 1; 0.5 is half the mean absolute error

    Returns
    -------
    A loss that takes x, y [batch, output], masks and weights as `mse` does.

    Raises
    ------
    ValueError : for a level that is not between 0 and 1.
    """
    try:
        number = float(level)
    except (TypeError, ValueError):  # several of them, or none
        number = 0.0
    if not 0 < number < 1:
        raise ValueError(f"A quantile's level is a number between 0 and 1; got {level!r:.60}.")
    return _quantile_loss(number)


@cache
def _quantile_loss(level):
    @mean_over_rows
    def loss(params: Any, x: Any, y: jax.Array, apply_fn: Callable) -> LossAndPrediction:
        prediction = _predicted(params, x, apply_fn)
        _check(prediction, y)
        error = y - prediction
        return jnp.maximum(level * error, (level - 1) * error), prediction

    return loss


@mean_over_rows
def l2_loss(params: Any, x: Any, y: jax.Array, apply_fn: Callable) -> LossAndPrediction:
    """Half the mean squared error.

    Parameters
    ----------
    params : the network's parameters
    x : [batch, ...]
    y : [batch, output], of the shape of the prediction
    apply_fn : `apply_fn({"params": params}, x)` -> prediction [batch, output]

    Other Parameters
    ----------------
    mask, weight : which rows count, and how much; None: all alike (see `mean_over_rows`)

    Returns
    -------
    The loss, in the square of y's unit, and the prediction.

    Raises
    ------
    ValueError : for a target of another shape than the prediction, which would broadcast.
    """
    prediction = _predicted(params, x, apply_fn)
    _check(prediction, y)
    return optax.l2_loss(prediction, y), prediction


@expects(_classes)
@mean_over_rows
def softmax_cross_entropy(params: Any, x: Any, y: jax.Array, apply_fn: Callable) -> LossAndPrediction:
    """Mean cross-entropy of logits.

    Parameters
    ----------
    params : the network's parameters
    x : [batch, ...]
    y : classes, int [batch], or their probabilities such as one-hot rows, [batch, class]
    apply_fn : `apply_fn({"params": params}, x)` -> logits [batch, class]

    Other Parameters
    ----------------
    mask, weight : which rows count, and how much; None: all alike (see `mean_over_rows`)

    Returns
    -------
    The loss in nats, and the logits.

    Raises
    ------
    ValueError : for a target of a shape that does not go with the logits, and for classes that are not integers.

    A class outside of the logits makes the loss NaN; `fit` and `evaluate` name the row that holds it.

    Examples
    --------
    A network that gives three classes equal logits, one of which is right:

    >>> import jax.numpy as jnp
    >>> from turbanet import softmax_cross_entropy
    >>> equal = lambda variables, x: jnp.zeros((len(x), 3))
    >>> loss, logits = softmax_cross_entropy({}, jnp.ones((2, 5)), jnp.array([0, 2]), equal)
    >>> print(f"{loss:.4f}, the logarithm of 3; logits {logits.shape}")
    1.0986, the logarithm of 3; logits (2, 3)
    """
    logits = _predicted(params, x, apply_fn)
    if logits.ndim < 2 and _array(y).shape == logits.shape and jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(f"Logits are [batch, class], got shape {logits.shape}: one a row is for binary_cross_entropy.")
    classes_first = jnp.moveaxis(logits, -1, 0)  # few classes as the last axis would leave the vector units idle
    if _array(y).ndim == logits.ndim - 1:
        if not jnp.issubdtype(y.dtype, jnp.integer):
            raise ValueError(f"Class labels are whole numbers, these are of type {y.dtype}: cast them to int.")
        _check(logits[..., 0], y)
        is_target = jnp.arange(len(classes_first)).reshape(-1, *[1] * y.ndim) == y  # compared, not gathered: it fuses
        target_logit = jnp.sum(jnp.where(is_target, classes_first, 0), axis=0)
        target_logit = jnp.where((y >= 0) & (y < np.int32(len(classes_first))), target_logit, jnp.nan)
        return jax.nn.logsumexp(classes_first, axis=0) - target_logit, logits
    _check(logits, y, ", or of classes give y.squeeze()")
    _check_outputs(logits)
    y, log_probability = jnp.moveaxis(y, -1, 0), jax.nn.log_softmax(classes_first, axis=0)
    return -jnp.sum(jnp.where(y != 0, y * log_probability, 0), axis=0), logits  # 0 x -inf is 0


@expects(_both_distributions)
@mean_over_rows
def cross_entropy(params: Any, x: Any, y: jax.Array, apply_fn: Callable) -> LossAndPrediction:
    """Mean cross-entropy of probabilities, finite at a probability of 0.

    Parameters
    ----------
    params : the network's parameters
    x : [batch, ...]
    y : one-hot rows [batch, class]
    apply_fn : `apply_fn({"params": params}, x)` -> probabilities [batch, class]

    Other Parameters
    ----------------
    mask, weight : which rows count, and how much; None: all alike (see `mean_over_rows`)

    Returns
    -------
    The loss in nats, and the probabilities.

    Raises
    ------
    ValueError : for a target of another shape than the probabilities.

    A prediction that is no distribution, such as logits, makes the loss NaN; `fit` and `evaluate` refuse it, and such
    rows of y.
    """
    probability = _predicted(params, x, apply_fn)
    _check(probability, y)
    _check_outputs(probability)
    log_probability = jnp.log(jnp.maximum(probability, jnp.finfo(probability.dtype).tiny))
    cost = -jnp.sum(jnp.where(y > 0, y * log_probability, 0.0), axis=-1)
    return jnp.where(_is_no_distribution(probability).any(axis=-1), jnp.nan, cost), probability


@expects(_probabilities)
@mean_over_rows
def binary_cross_entropy(params: Any, x: Any, y: jax.Array, apply_fn: Callable) -> LossAndPrediction:
    """Mean cross-entropy of one logit an example, for two classes.

    Parameters
    ----------
    params : the network's parameters
    x : [batch, ...]
    y : 0 or 1 [batch], or the probability of 1
    apply_fn : `apply_fn({"params": params}, x)` -> logit [batch, 1] or [batch]

    Other Parameters
    ----------------
    mask, weight : which rows count, and how much; None: all alike (see `mean_over_rows`)

    Returns
    -------
    The loss in nats, and the probabilities of 1, of the shape of the logits.

    Raises
    ------
    ValueError : for a target of another number of examples.

    A target outside of 0 to 1 makes the loss NaN; `fit` and `evaluate` name the row that holds it.
    """
    logits = _predicted(params, x, apply_fn)
    flat = logits.reshape(y.shape) if logits.shape == (*_array(y).shape, 1) else logits
    _check(flat, y)
    target = jnp.where(_is_probability(y), y, jnp.nan).astype(flat.dtype)
    return optax.sigmoid_binary_cross_entropy(flat, target), jax.nn.sigmoid(logits)


def _predicted(params, x, apply_fn):
    """Return the prediction in float32 at least: a model may compute in bfloat16, a loss does not."""
    prediction = _one_array(apply_fn({"params": params}, x))
    return prediction.astype(jnp.promote_types(prediction.dtype, jnp.float32))


def _check(prediction, y, hint=""):
    if prediction.shape != _array(y).shape:
        hint = ", such as by y[..., None]" if prediction.shape == (*y.shape, 1) else hint
        raise ValueError(f"The prediction has shape {prediction.shape}, the target {y.shape}: make them equal{hint}.")


def _check_outputs(prediction):
    if prediction.shape[-1] == 1:
        advice = "give it an output for each class, or take binary_cross_entropy"
        raise ValueError(f"The model has one output, whose probability among one class is always 1: {advice}.")
