"""What is forecast: real numbers, numbers that are not negative, counts; a point, or quantiles as well."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from scipy import stats

from turbanet.core.arrays import divisor
from turbanet.data.sample_weight import mean_over_rows
from turbanet.loss import mse

REAL, NONNEGATIVE, POISSON, NEGATIVE_BINOMIAL = "real", "nonnegative", "poisson", "negative_binomial"
COUNTS = POISSON, NEGATIVE_BINOMIAL
LEAST_DISPERSION = 0.01  # of the negative binomial's variance, mean + dispersion * mean²


@dataclasses.dataclass(frozen=True)
class Target:
    """What networks forecast of a series.

    Real numbers are standardised, and a network forecasts changes from the window's last value. All others are divided
    by their mean, and a network's outputs go through a function of positive values.

    family : "real", "nonnegative", "poisson" or "negative_binomial"
    quantiles : levels that are forecast beside the point; of counts those of the distribution, of others trained by
        their pinball losses, then sorted (Chernozhukov, Fernández-Val and Galichon 2010)
    loss : of real numbers without quantiles
    """

    family: str = REAL
    quantiles: tuple[float, ...] = ()
    loss: Callable = mse

    @property
    def counts(self) -> bool:
        return self.family in COUNTS

    @property
    def relative(self) -> bool:
        return self.family == REAL

    @property
    def least(self) -> float:
        """The least value that there is."""
        return -np.inf if self.relative else 0.0

    @property
    def outputs(self) -> int:
        """Numbers that a network returns for each step."""
        return 2 if self.family == NEGATIVE_BINOMIAL else 1 if self.counts else len(self.quantiles) or 1

    def check(self, y: np.ndarray) -> None:
        """Raise ValueError for values that are none of this family."""
        if self.relative:
            return
        wrong = y[(y < 0) | (self.counts & (y % 1 != 0))]
        if len(wrong):
            what = "counts, whole numbers from 0 on" if self.counts else "not negative"
            raise ValueError(f"The target must be {what}, and is {wrong[0]:g}: choose another loss, or none.")

    def scaling(self, y: np.ndarray) -> tuple[float, float]:
        """Return the centre and the spread by which a series is scaled."""
        centre, spread = (y.mean(), y.std()) if self.relative else (0.0, y.mean())
        return centre, float(divisor(spread, centre))

    def training_loss(self) -> Callable:
        """Return the loss of one member for `fit`; equal targets have one and the same function."""
        if self.relative and not self.quantiles:
            return self.loss
        return _loss(self.family, () if self.counts else self.quantiles)

    def targets(self, y: np.ndarray, spread: float) -> np.ndarray:
        """Return what the loss compares with, of scaled values [row, step]."""
        if self.family != NEGATIVE_BINOMIAL:
            return y
        raw = np.round(y.astype(np.float64) * spread).astype(np.float32)  # not scale-free: it takes the counts
        return np.stack([raw, np.full_like(raw, np.log(spread))], axis=-1)

    def combined(self, outs: list[Any]) -> Any:
        """Return the outputs of several kinds of networks as one: the mean forecast, the mean of each quantile."""
        if self.counts:
            outs = [jnp.asarray(out, jnp.float32) for out in outs]
            log_mean = jax.nn.logsumexp(jnp.stack([out[..., 0] for out in outs]), axis=0) - np.float32(
                np.log(len(outs))
            )
            return jnp.stack(outs).mean(axis=0).at[..., 0].set(log_mean)
        outs = [jnp.sort(out, axis=-1) for out in outs]
        if self.relative:
            return jnp.stack(outs).mean(axis=0)
        mean = jax.nn.softplus(jnp.stack(outs)).mean(axis=0)
        return mean + jnp.log(-jnp.expm1(-mean))  # the output whose softplus is the mean

    def point(self, out: Any) -> Any:
        """Return the scaled point forecast [..., step] of outputs [..., step, output]: a mean, or the median."""
        if self.counts:
            return jnp.exp(out[..., 0])
        out = jnp.sort(out, axis=-1)[..., self.quantiles.index(0.5)] if self.quantiles else out[..., 0]
        return out if self.relative else jax.nn.softplus(out)

    def quantile(self, out: np.ndarray, level: float, last: np.ndarray, scale: tuple) -> np.ndarray:
        """Return a quantile [..., step] in the unit of y, from outputs [..., step, output].

        last : [..., 1], the window's last scaled value; scale : the centre and the spread, each [..., 1]
        """
        if self.counts:
            mean = np.exp(out[..., 0].astype(np.float64)) * scale[1]
            if self.family == POISSON:
                return stats.poisson.ppf(level, mean)
            size = 1 / np.asarray(_dispersion(out[..., 1]), np.float64)
            return stats.nbinom.ppf(level, size, size / (size + mean))
        scaled = np.sort(out, axis=-1)[..., self.quantiles.index(level)]
        scaled = scaled + last if self.relative else np.asarray(jax.nn.softplus(scaled))
        return scaled * scale[1] + scale[0]


def pinball(error: Any, level: Any) -> Any:
    """Return the pinball losses of errors, y less its forecast, of quantiles; for NumPy and JAX."""
    return error * (level - (error < 0))


def _dispersion(out):
    return jax.nn.softplus(out) + LEAST_DISPERSION


@cache
def _loss(family, quantiles):
    """Return the loss of outputs [batch, step * output], y scaled [batch, step] (see `Target.targets`)."""
    levels = jnp.array(quantiles)

    @mean_over_rows
    def loss(params, x, y, apply_fn):
        prediction = apply_fn({"params": params}, x)
        steps = y.shape[1]
        outputs = Target(family, quantiles).outputs
        if prediction.shape != (len(y), steps * outputs):
            wanted = f"{outputs} output(s) for each of {steps} step(s), [row, {steps * outputs}]"
            raise ValueError(f"The model must return {wanted}, it returns {prediction.shape}: change it.")
        out = prediction.reshape(len(prediction), steps, -1).astype(jnp.float32)
        if family == POISSON:
            each = jnp.exp(out[..., 0]) - y * out[..., 0]
        elif family == NEGATIVE_BINOMIAL:
            count, log_spread = y[..., 0], y[..., 1]
            log_mean, size = out[..., 0] + log_spread, 1 / _dispersion(out[..., 1])
            log_sum = jnp.logaddexp(log_mean, jnp.log(size))
            each = gammaln(size) + gammaln(count + 1) - gammaln(count + size)
            each = each - size * (jnp.log(size) - log_sum) - count * (log_mean - log_sum)
        else:
            out = out if family == REAL else jax.nn.softplus(out)
            error = y[..., None] - out
            each = pinball(error, levels) if quantiles else error**2
        return each.reshape(len(each), -1), prediction

    return loss
