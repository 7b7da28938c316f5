"""Calibration: scores of predicted probabilities, temperature scaling and prediction intervals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr
from numpy.typing import ArrayLike

from turbanet.core.arrays import check_whole
from turbanet.ensembles.combine import ensemble_mean
from turbanet.ensembles.predictions import (
    check_nan,
    of_logits,
    of_one_output,
    true_class,
    with_classes,
    with_probabilities,
)


def negative_log_likelihood(probability: ArrayLike, y: ArrayLike) -> jax.Array:
    """Mean negative log-probability of the true class, in nats: [..., row, class], int [row] -> [...].

    It is finite where that probability is 0.
    """
    likelihood = true_class(*with_probabilities(probability, y))
    return -jnp.log(jnp.maximum(likelihood, jnp.finfo(likelihood.dtype).tiny)).mean(-1)


def brier_score(probability: ArrayLike, y: ArrayLike) -> jax.Array:
    """Mean squared error of the probabilities, summed over classes: [..., row, class] -> [...].

    y: int [row]. From 0 (sure and right) to 2 (sure and wrong) (Brier 1950).
    """
    probability, y = with_probabilities(probability, y)
    truth = jax.nn.one_hot(y, probability.shape[-1])
    return jnp.square(probability - truth).sum(-1).mean(-1)


def expected_calibration_error(probability: ArrayLike, y: ArrayLike, *, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over equal-width bins of the confidence: [row, class] -> a number.

    y: int [row]. The confidence is the largest probability (Guo et al. 2017, equation 3).
    """
    check_whole(bins=bins)
    if np.ndim(probability) != 2:
        raise ValueError(f"probability must be [row, class], got {np.ndim(probability)} axes: give one member's.")
    confidence, right, bin_of_row = binned(probability, y, bins)
    gap = np.bincount(bin_of_row, right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def binned(probability: ArrayLike, y: ArrayLike, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the confidence, whether it is right, and the bin of it: [..., row, class], int [row] -> [..., row] each.

    Bins are of equal width, open below and closed above.
    """
    probability, y = map(np.asarray, with_probabilities(probability, y))
    confidence = probability.max(-1)
    bin_of_row = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    return confidence, probability.argmax(-1) == y, bin_of_row


def temperature(logits: ArrayLike, y: ArrayLike) -> np.ndarray:
    """Return the temperature that minimises the mean negative log-likelihood of logits / temperature.

    logits: [..., row, class], y: int [row] -> [...]. Fitted on held-out rows, it corrects over- and underconfidence
    without changing the predicted class (Guo et al. 2017, section 4.2). It lies between exp(-20) and exp(20), which it
    reaches where the likelihood has no maximum. Raises ValueError for probabilities, for members that predict NaN, and
    for a true class of no probability.
    """
    from scipy.optimize import elementwise
    from scipy.special import softmax

    _, y = with_classes(logits, y)
    logits = np.asarray(logits, np.float64)
    members = np.asarray(of_logits(logits.reshape(-1, *logits.shape[-2:])), np.float64)
    if not np.isfinite(members[:, np.arange(len(y)), y]).all():
        advice = "no temperature changes that; give logits, as turbanet.predict returns them"
        raise ValueError(f"A true class has the logit -inf, a probability of 0: {advice}.")

    def slope(log_temperature, member):
        """The loss's derivative by 1 / temperature, which grows with it: the loss is convex."""
        found = np.empty(len(member))
        for position, (one, scale) in enumerate(zip(members[member], np.exp(-log_temperature), strict=True)):
            probability = softmax(one * scale, axis=-1)
            mean = np.multiply(probability, one, out=np.zeros_like(one), where=probability > 0).sum(-1)
            found[position] = (mean - one[np.arange(len(y)), y]).mean()
        return found

    every, low, high = np.arange(len(members)), np.full(len(members), -20.0), np.full(len(members), 20.0)
    root = elementwise.find_root(slope, (low, high), args=(every,), tolerances={"xatol": 1e-6})
    at_bound = np.where(slope(low, every) > 0, high, low)  # where the loss falls or rises all the way
    return np.exp(np.where(root.success, root.x, at_bound)).reshape(logits.shape[:-2])


def diversity(logits: ArrayLike) -> jax.Array:
    """Mutual information between prediction and member, in nats: [member, row, class] -> [row].

    It is the entropy of the mean prediction minus the mean entropy of the members' predictions: 0 where all members
    agree, and at most the log of the number of classes (Lakshminarayanan et al. 2017).
    """
    probability = jax.nn.softmax(of_logits(logits), axis=-1)
    return jnp.maximum(entr(ensemble_mean(logits)).sum(-1) - entr(probability).sum(-1).mean(0), 0)


def prediction_interval(
    prediction: ArrayLike, calibration: tuple[ArrayLike, ArrayLike] | None = None, *, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds (low, high), each [row, ...], of a regression ensemble's predictions [member, row, ...].

    Without `calibration` they are quantiles over members, which measure how far members differ and not how far they
    err. `calibration` is (prediction [member, row, ...], y [row, ...]) of rows that no member was trained on. With it
    the bounds are the mean plus or minus as many standard deviations over members as cover `level` of those rows:
    they cover `level` of new rows, whatever the model (normalised split conformal intervals, Lei et al. 2018, section
    5.2). Each output is calibrated by itself.

    Where all members agree exactly, the standard deviation is 0. Such a row of `calibration` needs 0 standard
    deviations if the members are right, otherwise infinitely many. Such a row of `prediction` gets an interval of
    width 0. If more rows of `calibration` than 1 - `level` need infinitely many, every interval is (-inf, inf).

    Raises ValueError for fewer than two members, a level outside (0, 1), a calibration of another shape, of other
    members or with an infinite y, and too few calibration rows for the level.
    """
    prediction = of_one_output(prediction, "prediction")
    check_nan(prediction, "prediction")
    if len(prediction) < 2 or not 0 < level < 1:
        raise ValueError(f"An interval needs two members and a level in (0, 1), got {len(prediction)} and {level}.")
    if calibration is None:
        low, high = np.quantile(prediction, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high
    held_out, y = (of_one_output(part, f"calibration[{position}]") for position, part in enumerate(calibration))
    check_nan(held_out, "calibration[0]")
    if held_out.shape != (len(prediction), *y.shape) or y.shape[1:] != prediction.shape[2:]:
        expected = f"(prediction [{len(prediction)} members, *y.shape], y [row, *{prediction.shape[2:]}])"
        raise ValueError(f"calibration is {expected}, got shapes {held_out.shape} and {y.shape}.")
    if not np.isfinite(y).all():
        raise ValueError("The y of calibration must be finite numbers: leave the other rows out.")
    factor = factor_of(deviations(y, *_centre_and_spread(held_out)), level)
    centre, spread = _centre_and_spread(prediction)
    return interval(centre, spread, factor)


def interval(centre: np.ndarray, spread: np.ndarray, factor: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return `centre` minus and plus `factor` spreads, infinite where the factor is."""
    half_width = factor * np.where(np.isinf(factor), 1, spread)
    return centre - half_width, centre + half_width


def deviations(y: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return |y - centre| / spread, all of one shape; where spread is 0, it is 0 for no error and else infinite."""
    error = np.abs(y - centre)
    return np.divide(error, spread, out=np.where(error > 0, np.inf, error), where=spread > 0)


def factor_of(deviations: np.ndarray, level: float) -> np.ndarray:
    """Return how many spreads cover `level` of new rows, from those of rows that no member saw: [row, ...] -> [...].

    Raises ValueError for too few rows for the level.
    """
    rank = int(np.ceil(round((len(deviations) + 1) * level, 6)))
    if rank > len(deviations):
        raise ValueError(f"A level of {level} needs at least {rows_for(level)} rows of calibration.")
    return np.sort(deviations, axis=0)[rank - 1]


def rows_for(level: float) -> int:
    """Return how many rows `factor_of` needs for a level."""
    return int(np.ceil(round(level / (1 - level), 6)))  # 0.9 / 0.1 is a little more than 9 in floating point


def _centre_and_spread(prediction):
    """Mean and standard deviation over members; where members agree exactly, these are exact too."""
    from_first = prediction - prediction[0]
    return prediction[0] + from_first.mean(0), from_first.std(0)
