"""How far predicted probabilities and intervals can be trusted, and what mends them."""

import jax.numpy as jnp
import numpy as np
from jax.nn import log_softmax
from jax.scipy.special import entr

from turbanet.ensembles.combine import ensemble_mean, true_class


def negative_log_likelihood(probability, y):
    """Mean negative log-probability of the true class in nats: [..., row, class], int [row] -> [...]; finite at 0."""
    own = true_class(probability, y)
    return -jnp.log(jnp.maximum(own, jnp.finfo(own.dtype).tiny)).mean(-1)


def brier_score(probability, y):
    """Mean squared distance of the probabilities from the truth, summed over classes: [..., row, class] -> [...].

    From 0 (sure and right) to 2 (sure and wrong) (Brier 1950).
    """
    true_class(probability, y)
    truth = jnp.asarray(y)[:, None] == jnp.arange(probability.shape[-1])
    return jnp.square(probability - truth).sum(-1).mean(-1)


def expected_calibration_error(probability, y, *, bins=15):
    """Mean gap between confidence and accuracy over equal-width bins of the confidence: [row, class] -> a number.

    The confidence is the largest probability (Guo et al. 2017, equation 3).
    """
    true_class(probability, y)
    probability = np.asarray(probability)
    confidence, right = probability.max(-1), probability.argmax(-1) == np.asarray(y)
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)  # bins are open below, closed above
    gap = np.bincount(which, right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def temperature(logits, y):
    """The temperature that minimises the likelihood loss of logits / temperature: [..., row, class] -> [...].

    Found on held-out rows it mends over- and underconfidence and changes no choice (Guo et al. 2017, section 4.2).
    """
    from scipy.optimize import minimize_scalar

    true_class(logits, y)
    logits, y = np.asarray(logits, np.float64), np.asarray(y)

    def best(one):
        def loss(log_temperature):
            scaled = one * np.exp(-log_temperature)
            top = scaled.max(-1, keepdims=True)
            own = np.take_along_axis(scaled - top, y[:, None], -1)[:, 0]
            return np.mean(np.log(np.exp(scaled - top).sum(-1)) - own)

        return np.exp(minimize_scalar(loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-6}).x)

    return np.reshape([best(one) for one in logits.reshape(-1, *logits.shape[-2:])], logits.shape[:-2])


def diversity(logits):
    """What members know apart, in nats: entropy of the mean less mean entropy, [member, row, class] -> [row].

    0 where all members say the same; at most the log of the number of classes (Lakshminarayanan et al. 2017).
    """
    each = jnp.exp(log_softmax(logits, axis=-1))
    return jnp.maximum(entr(ensemble_mean(logits)).sum(-1) - entr(each).sum(-1).mean(0), 0)


def prediction_interval(prediction, calibration=None, *, level=0.95):
    """(low, high) [row, ...] around regression ensembles' predictions [member, row, ...].

    Without `calibration` the quantiles over members: how far they differ, not how far they err. With it, (prediction
    [member, row, ...], y [row, ...]) of rows that nobody trained on, the mean and as many standard deviations over
    members as hold `level` of those rows: `level` of new rows then fall inside, whatever the model (normalised split
    conformal intervals, Lei et al. 2018, section 5.2).
    """
    prediction = np.asarray(prediction)
    if len(prediction) < 2 or not 0 < level < 1:
        raise ValueError(f"An interval needs two members and a level in (0, 1), got {len(prediction)} and {level}.")
    if calibration is None:
        return tuple(np.quantile(prediction, [(1 - level) / 2, (1 + level) / 2], axis=0))
    held_out, y = map(np.asarray, calibration)
    if held_out.shape[1:] != y.shape:
        raise ValueError(f"calibration is (prediction [member, *y.shape], y), got {held_out.shape} and {y.shape}.")
    width = np.abs(y - held_out.mean(0)) / held_out.std(0)
    rank = int(np.ceil((width.size + 1) * level))
    if rank > width.size:
        raise ValueError(f"A level of {level} needs at least {int(np.ceil(level / (1 - level)))} rows of calibration.")
    factor = np.sort(width.ravel())[rank - 1]
    centre, spread = prediction.mean(0), prediction.std(0)
    return centre - factor * spread, centre + factor * spread
