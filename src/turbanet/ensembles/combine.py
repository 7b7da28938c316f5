"""Combine members into one prediction, and score each member, their average and the ensemble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_softmax, softmax
from numpy.typing import ArrayLike

from turbanet.core import extras
from turbanet.core.arrays import as_array, check_whole, seeded
from turbanet.ensembles.predictions import (
    check_nan,
    check_outputs,
    of_logits,
    of_members,
    of_one_output,
    true_class,
    with_classes,
)

if TYPE_CHECKING:
    import pandas as pd

DRAWS = 64  # resamples that are scored at a time
SCORES = "accuracy", "precision", "recall", "f1"


def ensemble_mean(logits: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """Mean over members of the class probabilities: logits [member, row, class] -> [row, class].

    weights: [member], not negative, for a weighted mean; see `stacking_weights` and `greedy_weights`. Raises
    ValueError for other weights and for members that predict NaN; `without_nan` finds the others.

    Examples
    --------
    >>> import numpy as np, turbanet as tn
    >>> logits = np.log([[[0.9, 0.1]], [[0.5, 0.5]]])  # two members, one row, two classes
    >>> print(np.asarray(tn.ensemble_mean(logits)).round(2))
    [[0.7 0.3]]
    >>> print(np.asarray(tn.ensemble_mean(logits, weights=[3, 1])).round(2))
    [[0.8 0.2]]
    """
    logits = of_logits(logits)
    if weights is not None:
        weights = np.asarray(weights, float)
        if weights.shape != (len(logits),) or not ((weights >= 0) & np.isfinite(weights)).all() or not weights.any():
            raise ValueError(f"weights must be {len(logits)} numbers of at least 0 and not all 0, got {weights}.")
        weights = weights / weights.max()  # in float64: float32 holds no 1e-50, which the exp of an evidence may be
    return mean_probabilities(logits, weights)


@jax.jit
def mean_probabilities(logits: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Mean over members of the softmax of logits [member, row, class], weighted by [member] -> [row, class]."""
    return jnp.average(softmax(logits, axis=-1), axis=0, weights=weights)


def ensemble_geometric_mean(logits: ArrayLike) -> jax.Array:
    """Normalised geometric mean of the members' probabilities: logits [member, row, class] -> [row, class]."""
    log_probability = log_softmax(of_logits(logits), axis=-1)
    least = jnp.finfo(log_probability.dtype).min / len(log_probability)  # of classes that a member gives no probability
    return softmax(jnp.maximum(log_probability, least).mean(axis=0), axis=-1)


def ensemble_vote(logits: ArrayLike) -> jax.Array:
    """Share of members that vote for each class: [member, row, class] -> [row, class]; argmax is the majority vote."""
    logits = of_members(logits)
    check_outputs(logits, "logits")
    return (logits.argmax(-1)[..., None] == jnp.arange(logits.shape[-1])).mean(axis=0)


def stacking_weights(logits: ArrayLike, y: ArrayLike, *, rounds: int = 200) -> jax.Array:
    """Return weights [member] of `ensemble_mean` by maximum likelihood of held-out rows.

    logits: [member, row, class], y: int [row], of rows that no member was trained on. Expectation maximisation for the
    proportions of a mixture (Dempster et al. 1977, section 4.3): no round lowers the likelihood, and more `rounds`
    come closer to its maximum.
    """
    check_whole(rounds=rounds)
    log_likelihood = true_class(log_softmax(of_logits(logits), axis=-1), y)
    log_likelihood = jnp.maximum(log_likelihood, jnp.finfo(log_likelihood.dtype).min)
    # A factor common to a row cancels; this one keeps rows that are unlikely under all members from underflowing.
    likelihood = jnp.exp(log_likelihood - log_likelihood.max(0))

    def update(_, weights):
        share = weights[:, None] * likelihood
        return (share / share.sum(0)).mean(1)

    return jax.lax.fori_loop(0, rounds, update, jnp.full(len(likelihood), 1 / len(likelihood)))


def greedy_weights(logits: ArrayLike, y: ArrayLike, *, size: int = 20) -> np.ndarray:
    """Return weights [member], which sum to 1, by greedy ensemble selection with replacement (Caruana et al. 2004).

    logits: [member, row, class], y: int [row], of rows that no member was trained on. Each of `size` rounds adds the
    member that raises the likelihood most; the best of all sizes up to `size` is returned.
    """
    check_whole(size=size)
    likelihood = np.asarray(true_class(softmax(of_logits(logits), axis=-1), y), np.float64)
    selected: list[int] = []
    losses = []
    for count in range(1, size + 1):
        with_each = (likelihood[selected].sum(0) + likelihood) / count
        loss = -np.log(np.maximum(with_each, np.finfo(float).tiny)).mean(1)
        selected.append(int(loss.argmin()))
        losses.append(loss.min())
    best_size = int(np.argmin(losses)) + 1
    return np.bincount(selected[:best_size], minlength=len(likelihood)) / best_size


def out_of_bag(prediction: ArrayLike, rows: ArrayLike) -> np.ndarray:
    """Mean prediction of the members that were not trained on a row: [member, row, ...] -> [row, ...], NaN if all were.

    rows: int [member, row], the rows that each member was trained on (see `sampling`), padded with -1. Such
    predictions can be scored without test rows (Breiman 1996). Raises ValueError for members that predict NaN, and for
    rows of other shapes or outside of the prediction.
    """
    prediction, rows = of_one_output(prediction, "prediction"), np.asarray(rows)
    check_nan(prediction, "prediction")
    members, length = (*prediction.shape, 0, 0)[:2]
    if rows.shape[:-1] != (members,) or rows.dtype.kind not in "iu" or rows.max(initial=-1) >= length:
        got = f"{rows.dtype} {rows.shape} up to {rows.max(initial=-1)}"
        raise ValueError(f"rows must be int [member, row], {members} members and rows below {length}; got {got}.")
    return of_unseen_rows(prediction, rows).mean(axis=0).filled(np.nan)


def of_unseen_rows(prediction: np.ndarray, rows: np.ndarray) -> np.ma.MaskedArray:
    """Return prediction [member, row, ...] as an array that masks `rows` [member, row] of each member."""
    in_bags = np.zeros(prediction.shape, bool)
    for in_bag, trained_on in zip(in_bags, rows, strict=True):
        in_bag[trained_on[trained_on >= 0]] = True
    return np.ma.array(prediction, mask=in_bags)


def accuracy(prediction: ArrayLike, y: ArrayLike, mask: ArrayLike | None = None) -> jax.Array:
    """Share of rows whose largest entry is the true class: [..., row, class], int [row] -> [...].

    A row that holds NaN is wrong. mask: bool [row], the rows that count; None: all. Raises ValueError for different
    numbers of rows, for a mask of no row and for a y that does not hold classes of the prediction.

    Examples
    --------
    >>> import numpy as np, turbanet as tn
    >>> prediction = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])  # four rows, two classes
    >>> print(tn.accuracy(prediction, np.array([0, 1, 1, 1])))
    0.75
    """
    prediction, y = with_classes(prediction, y)
    counted = None if mask is None else as_array(mask, "mask").astype(bool)
    if counted is not None and counted.shape[-1:] != y.shape:
        raise ValueError(f"mask must be bool [row] of {len(y)} rows, got shape {counted.shape}.")
    if not isinstance(counted, jax.core.Tracer | None) and not counted.any():
        raise ValueError("mask leaves out all rows: a score needs at least one.")
    right = (prediction.argmax(-1) == y) & ~jnp.isnan(prediction).any(axis=-1)
    return jnp.asarray(right).mean(axis=-1, where=counted)


def scores(prediction: ArrayLike, y: ArrayLike) -> dict[str, float]:
    """Accuracy and macro-averaged precision, recall and F1 of one prediction [row, class], as scikit-learn has them.

    Raises ValueError for a prediction with NaN and for a y that does not hold its classes.
    """
    counts = confusion(prediction, y)
    return dict(zip(SCORES, _of_totals(np.diagonal(counts), counts.sum(1), counts.sum(0)).tolist()))


def member_scores(prediction: ArrayLike, y: ArrayLike) -> pd.DataFrame:
    """Return a pandas table of the `scores` of each member of prediction [member, row, class], one row per member."""
    pd = extras.pandas()

    return pd.DataFrame([scores(one, y) for one in of_members(prediction, "prediction")]).rename_axis("member")


def confusion(prediction: ArrayLike, y: ArrayLike) -> np.ndarray:
    """Confusion matrix int [true class, predicted class] of one prediction [row, class]; raises as `scores`."""
    from sklearn.metrics import confusion_matrix

    prediction, y = with_classes(prediction, y)
    if prediction.ndim != 2:
        raise ValueError(f"One prediction is [row, class], got shape {prediction.shape}: member_scores takes members.")
    check_nan(prediction[None], "prediction[None]")
    return confusion_matrix(y, np.asarray(prediction).argmax(-1), labels=np.arange(prediction.shape[-1]))


def mean_confusion(prediction: ArrayLike, y: ArrayLike) -> np.ndarray:
    """The average member's confusion matrix: prediction [member, row, class] -> float [true, predicted]."""
    return np.mean([confusion(one, y) for one in of_members(prediction, "prediction")], axis=0)


def score_interval(
    prediction: ArrayLike, y: ArrayLike, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap intervals, over rows, of the `scores` averaged over members.

    An interval tells how far the score would move on another test set of this size (Efron and Tibshirani 1993, section
    13.3). It is too narrow with a handful of errors, or of rows of a class, and has no width without any: for an
    accuracy near 1 take Wilson's.

    Parameters
    ----------
    prediction : [member, row, class], one member for a single model or an ensemble
    y : int [row]
    resamples : bootstrap draws of the rows
    level : share of the draws inside the interval
    seed : of the draws

    Returns
    -------
    {score: (low, high)}
    """
    check_whole(resamples=resamples)
    if not 0 < level < 1:
        raise ValueError(f"level is the share of the draws inside, between 0 and 1; got {level!r}.")
    prediction = np.asarray(of_members(prediction, "prediction"))
    _, y = with_classes(prediction, y)
    rng = np.random.default_rng(seed)
    _, rows, classes = prediction.shape
    predicted, true = prediction.argmax(-1), np.asarray(y)
    draws = []
    for begin in range(0, resamples, DRAWS):
        count = min(DRAWS, resamples - begin)
        times = [np.bincount(rng.integers(rows, size=rows), minlength=rows) for _ in range(count)]
        draws.append(_of_draws(predicted, true, np.array(times, np.float32).T, classes).mean(axis=1))
    low, high = np.quantile(np.concatenate(draws, axis=1), [(1 - level) / 2, (1 + level) / 2], axis=1)
    return dict(zip(SCORES, zip(low.tolist(), high.tolist())))


def _of_draws(predicted, true, times, classes):
    """Return SCORES [score, member, draw] where each row counts so many `times`, float32 [row, draw].

    predicted: int [member, row]; true: int [row]. The counts are whole, and so exact, below 2**24 rows.
    """
    found = []
    for label in range(classes):
        is_predicted, is_true = (predicted == label).astype(np.float32), true == label
        right = is_predicted[:, is_true] @ times[is_true]
        found.append(np.broadcast_arrays(right, times[is_true].sum(0), is_predicted @ times))
    return _of_totals(*np.moveaxis(np.array(found, float), 0, -1))


def _of_totals(right, true, predicted):
    """Return SCORES [score, ...] of the rows [..., class] that are right, true, predicted; one never predicted is 0."""
    precision_recall_f1 = right / np.maximum([predicted, true, (true + predicted) / 2], 1)
    classes = ((true + predicted) > 0).sum(-1)  # a class that is neither true nor predicted has no score
    return np.array([right.sum(-1) / true.sum(-1), *precision_recall_f1.sum(-1) / classes])


@seeded
def accuracy_by_size(logits: ArrayLike, y: ArrayLike, *, seed: int | jax.Array, orders: int = 20) -> jax.Array:
    """Accuracy of the ensemble mean of the first 1, 2, ... members, in random orders.

    Parameters
    ----------
    logits : [member, row, class]
    y : int [row]
    seed : of the random orders, an int or a JAX random key
    orders : how many

    Returns
    -------
    [order, size]
    """
    probability = softmax(of_logits(logits), axis=-1)

    def curve(key):
        return accuracy(jnp.cumsum(jax.random.permutation(key, probability), axis=0), y)

    return jax.lax.map(curve, jax.random.split(seed, orders))


def disagreement(logits: ArrayLike) -> jax.Array:
    """Share of pairs of members that predict different classes: [member, row, class] -> [row]."""
    members = len(of_members(logits))
    if members < 2:
        raise ValueError("Disagreement needs at least two members.")
    return (1 - jnp.square(ensemble_vote(logits)).sum(-1)) * members / (members - 1)
