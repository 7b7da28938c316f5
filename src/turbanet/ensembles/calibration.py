"""How far predicted probabilities and intervals can be trusted, and what mends them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr
from numpy.typing import ArrayLike

from turbanet.ensembles.combine import ensemble_mean
from turbanet.ensembles.predictions import Array, check_nan, of_members, true_class, with_classes

SUM_OFF = 0.01  # from 1, which bfloat16 rounds to


def negative_log_likelihood(probability: ArrayLike, y: ArrayLike) -> jax.Array:
    """Mean negative log-probability of the true class in nats: [..., row, class], int [row] -> [...]; finite at 0."""
    likelihood = true_class(*_probabilities(probability, y))
    return -jnp.log(jnp.maximum(likelihood, jnp.finfo(likelihood.dtype).tiny)).mean(-1)


def brier_score(probability: ArrayLike, y: ArrayLike) -> jax.Array:
    """Mean squared distance of the probabilities from the truth, summed over classes: [..., row, class] -> [...].

    y: int [row]. From 0 (sure and right) to 2 (sure and wrong) (Brier 1950).
    """
    probability, y = _probabilities(probability, y)
    truth = jax.nn.one_hot(y, probability.shape[-1])
    return jnp.square(probability - truth).sum(-1).mean(-1)


def expected_calibration_error(probability: ArrayLike, y: ArrayLike, *, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over equal-width bins of the confidence: [row, class] -> a number.

    y: int [row]. The confidence is the largest probability (Guo et al. 2017, equation 3).
    """
    probability, y = map(np.asarray, _probabilities(probability, y))
    confidence = probability.max(-1)
    right = probability.argmax(-1) == y
    bin_of_row = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)  # open below, closed above
    gap = np.bincount(bin_of_row, right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def temperature(logits: ArrayLike, y: ArrayLike) -> np.ndarray:
    """The temperature that minimises the likelihood loss of logits / temperature: [..., row, class] -> [...].

    y: int [row]. Found on held-out rows it mends over- and underconfidence and changes no choice (Guo et al. 2017,
    section 4.2).
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    _, y = with_classes(logits, y)
    logits = np.asarray(logits, np.float64)

    def loss(log_temperature, logits):
        log_probability = log_softmax(logits * np.exp(-log_temperature), axis=-1)
        return -log_probability[np.arange(len(y)), y].mean()

    members = logits.reshape(-1, *logits.shape[-2:])
    found = [minimize_scalar(loss, args=(one,), bounds=(-6, 6), options={"xatol": 1e-6}).x for one in members]
    return np.exp(found).reshape(logits.shape[:-2])


def diversity(logits: ArrayLike) -> jax.Array:
    """What members know apart, in nats: entropy of the mean less mean entropy, [member, row, class] -> [row].

    0 where all members say the same; at most the log of the number of classes (Lakshminarayanan et al. 2017).
    """
    probability = jax.nn.softmax(of_members(logits), axis=-1)
    return jnp.maximum(entr(ensemble_mean(logits)).sum(-1) - entr(probability).sum(-1).mean(0), 0)


def prediction_interval(
    prediction: ArrayLike, calibration: tuple[ArrayLike, ArrayLike] | None = None, *, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) [row, ...] around regression ensembles' predictions [member, row, ...].

    Without `calibration` the quantiles over members: how far they differ, not how far they err. With it, (prediction
    [member, row, ...], y [row, ...]) of rows that nobody trained on, the mean and as many standard deviations over
    members as hold `level` of those rows: `level` of new rows then fall inside, whatever the model (normalised split
    conformal intervals, Lei et al. 2018, section 5.2).

    Where all members agree exactly there is no deviation to count in: such a row of `calibration` needs 0 of them if
    the members are right, and otherwise more than any number; such a row of `prediction` has the interval of width 0.
    If more rows of `calibration` than `level` leaves out need more than any number, every interval is (-inf, inf).

    Raises ValueError for fewer than two members, a level outside (0, 1), a calibration of shapes that do not fit each
    other and one of too few rows for the level.
    """
    prediction = np.asarray(prediction)
    check_nan(prediction, "prediction")
    if len(prediction) < 2 or not 0 < level < 1:
        raise ValueError(f"An interval needs two members and a level in (0, 1), got {len(prediction)} and {level}.")
    if calibration is None:
        low, high = np.quantile(prediction, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high
    held_out, y = map(np.asarray, calibration)
    check_nan(held_out, "calibration[0]")
    if held_out.shape[1:] != y.shape:
        raise ValueError(f"calibration is (prediction [member, *y.shape], y), got {held_out.shape} and {y.shape}.")
    factor = factor_of(deviations(y, *_centre_and_spread(held_out)), level)
    centre, spread = _centre_and_spread(prediction)
    half_width = np.full_like(spread, np.inf) if np.isinf(factor) else factor * spread
    return centre - half_width, centre + half_width


def deviations(y: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """How many times `spread` each y is away from `centre`, all of one shape: infinite where it is and spread is 0."""
    error = np.abs(y - centre)
    return np.divide(error, spread, out=np.where(error > 0, np.inf, error), where=spread > 0)


def factor_of(deviations: np.ndarray, level: float) -> float:
    """How many spreads hold `level` of new rows, by the `deviations` of rows that nobody trained on.

    Raises ValueError where these are too few for the level.
    """
    rank = int(np.ceil((deviations.size + 1) * level))
    if rank > deviations.size:
        raise ValueError(f"A level of {level} needs at least {int(np.ceil(level / (1 - level)))} rows of calibration.")
    return float(np.sort(deviations.ravel())[rank - 1])


def _centre_and_spread(prediction):
    """Mean and standard deviation over members; where they agree exactly, their value and 0, free of rounding."""
    from_first = prediction - prediction[0]
    return prediction[0] + from_first.mean(0), from_first.std(0)


def _probabilities(probability: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """`with_classes` of probabilities; ValueError for numbers that are none, such as logits. Traced ones pass."""
    probability, y = with_classes(probability, y)
    if not isinstance(probability, jax.core.Tracer):
        entries = np.asarray(probability, np.float32)
        total = entries.sum(-1)
        if not (np.abs(total - 1) < SUM_OFF).all() or entries.min() < 0:
            came = f"rows that sum to {total.min():.3g} up to {total.max():.3g}, the least entry {entries.min():.3g}"
            raise ValueError(f"Probabilities are at least 0 and sum to 1; got {came}: of logits take jax.nn.softmax.")
    return probability, y
