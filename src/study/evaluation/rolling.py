"""Volatility forecasts from several origins: examples without look-ahead, usual forecasts, tests of differences."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import stats
from scipy.fft import dct
from statsmodels.stats.multitest import multipletests

from study.measurement import timing
from turbanet.data.sampling import ragged

FLOOR = 0.05  # percent a day: smaller absolute returns are rounding of prices, and 0 has no logarithm
DECAYS = (0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99)  # grid of the exponentially weighted average
HAR_DAYS = (1, 5, 22)  # windows of the HAR regression's averages (Corsi 2009)


class Rolling(NamedTuple):
    """The result of `rolling`; an example is the day whose close is the last known one."""

    x: np.ndarray  # float32 [origin, ticker, example, window, 1], standardised
    y: np.ndarray  # float32 [origin, ticker, example, 1], standardised
    train: np.ndarray  # int32 [origin, row], rows of the example axis, padded at the end with -1
    validation: np.ndarray  # int32 [origin, row]
    test: np.ndarray  # int32 [origin, row]
    centre: np.ndarray  # float64 [origin, ticker], what was subtracted from the target
    spread: np.ndarray  # float64 [origin, ticker], what it was divided by
    truth: np.ndarray  # float64 [ticker, example], the target, not standardised
    day: np.ndarray  # int64 [example], index of the last known day


def returns(close) -> np.ndarray:
    """Compute daily log returns in percent [day, ticker] of closes [day, ticker]; the first day's is NaN."""
    logs = np.log(np.asarray(close, np.float64))
    return 100 * np.diff(logs, axis=0, prepend=np.nan)


def log_volatility(close, horizon: int) -> np.ndarray:
    """Compute the log of the next `horizon` days' mean absolute return [day, ticker]; NaN where days are missing."""
    absolute = np.abs(returns(close))
    ahead = np.full(absolute.shape, np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(absolute, horizon, axis=0).mean(-1)  # from each day on
    ahead[: len(absolute) - horizon] = windows[1:]
    return np.log(np.maximum(ahead, FLOOR))


def rolling(close, *, horizon: int, window: int, origins: int, test_days: int, validation_days: int):
    """Make examples of fully listed tickers, split at each origin and standardised by its training days.

    Parameters
    ----------
    close : US dollars [day, ticker], no NaN
    horizon : days of the target, `log_volatility`; inputs are logs of absolute returns
    window : days of an input
    origins : the number of forecasts, each of the next `test_days` days; they end with the data
    validation_days : the last examples before an origin, for early stopping

    Returns
    -------
    Rolling. A training example's target ends no later than the first validation example's last known day, a validation
    example's no later than the origin's: no example straddles two sets.

    Raises
    ------
    ValueError : NaN; days too few for so many origins.
    """
    close = np.asarray(close, np.float64)
    if np.isnan(close).any():
        raise ValueError("close has NaN: give tickers that were listed throughout.")
    inputs = np.log(np.maximum(np.abs(returns(close)), FLOOR))
    truth = log_volatility(close, horizon)
    day = np.arange(max(window, *HAR_DAYS), len(close) - horizon)  # the first return is that of the second day
    x = np.lib.stride_tricks.sliding_window_view(inputs, window, axis=0)[day - window + 1].swapaxes(0, 1)
    y = truth[day].T
    parts = {"train": [], "validation": [], "test": []}
    for origin in range(origins):
        first = len(day) - (origins - origin) * test_days
        known = first - horizon  # the last example whose target is known at the origin
        begin = known - validation_days + 1
        parts["train"].append(np.arange(max(begin - horizon + 1, 0)))
        parts["validation"].append(np.arange(max(begin, 0), max(known + 1, 0)))
        parts["test"].append(np.arange(first, first + test_days))
    if min(len(rows) for rows in parts["train"]) < validation_days or not validation_days:
        raise ValueError(f"{len(close)} days are too few for {origins} origins of {test_days} test days.")
    centre, spread = (np.stack([f(y[:, rows], axis=1) for rows in parts["train"]]) for f in (np.mean, np.std))
    inner = [x[:, rows] for rows in parts["train"]]
    x_centre, x_spread = (
        np.stack([f(part, axis=(1, 2)) for part in inner])[..., None, None] for f in (np.mean, np.std)
    )
    return Rolling(
        ((x - x_centre) / x_spread).astype(np.float32)[..., None],
        ((y - centre[..., None]) / spread[..., None]).astype(np.float32)[..., None],
        *(np.asarray(ragged(rows)) for rows in parts.values()),
        centre,
        spread,
        y,
        day,
    )


def pooled(rows, *, tickers: int, examples: int) -> np.ndarray:
    """Number the rows [origin, row] of all tickers' concatenated examples: int32 [origin, ticker x row]."""
    firsts = examples * np.arange(tickers)[:, None]
    return np.asarray(ragged((firsts + own[own >= 0]).ravel() for own in rows))


def usual_forecasts(close, examples: Rolling, *, horizon: int) -> dict[str, np.ndarray]:
    """Make the usual volatility forecasts, fitted to each origin's known examples: {name: [origin, ticker, example]}.

    They are persistence (the last `horizon` days), an exponentially weighted average plus a constant with the best
    decay on known examples, and the HAR regression (1, 5 and 22 days; Corsi 2009) for each ticker and for all tickers.
    """
    absolute = np.abs(returns(close))[1:]
    days = examples.day - 1  # of `absolute`, which begins a day later
    past = {count: _trailing(absolute, count)[days].T for count in {horizon, *HAR_DAYS}}
    decayed = [_weighted(absolute, decay)[days].T for decay in DECAYS]
    regressors = np.stack([np.ones_like(examples.truth), *(past[count] for count in HAR_DAYS)], axis=-1)
    found = {"persistence": [], "weighted average": [], "HAR, each ticker": [], "HAR, all tickers": []}
    for train, validation in zip(examples.train, examples.validation, strict=True):
        known = np.concatenate([train[train >= 0], validation[validation >= 0]])
        truth = examples.truth[:, known]
        offsets = [(truth - one[:, known]).mean() for one in decayed]
        errors = [((truth - one[:, known] - offset) ** 2).mean() for one, offset in zip(decayed, offsets)]
        best = int(np.argmin(errors))
        found["persistence"].append(past[horizon])
        found["weighted average"].append(decayed[best] + offsets[best])
        own = [np.linalg.lstsq(each[known], y, rcond=None)[0] for each, y in zip(regressors, truth)]
        found["HAR, each ticker"].append(np.einsum("kef,kf->ke", regressors, np.stack(own)))
        pooled = np.linalg.lstsq(regressors[:, known].reshape(-1, regressors.shape[-1]), truth.ravel(), rcond=None)[0]
        found["HAR, all tickers"].append(regressors @ pooled)
    return {name: np.stack(one) for name, one in found.items()}


def daily_loss(forecast, examples: Rolling) -> np.ndarray:
    """Compute each test day's mean squared error over tickers: forecast [origin, ticker, example] -> [day]."""
    days = []
    for own, rows in zip(forecast, examples.test, strict=True):
        days.append(((own[:, rows] - examples.truth[:, rows]) ** 2).mean(0))
    return np.concatenate(days)


def qlike(forecast, examples: Rolling) -> np.ndarray:
    """Compute each test day's QLIKE, the mean over tickers, of log forecasts [origin, ticker, example] -> [day].

    A log forecast becomes exp(forecast + variance / 2), a lognormal's mean; the variance is that of its errors on the
    origin's validation examples of all tickers.
    """
    days = []
    for own, validation, rows in zip(forecast, examples.validation, examples.test, strict=True):
        held = validation[validation >= 0]
        variance = np.var(examples.truth[:, held] - own[:, held])
        ratio = np.exp(examples.truth[:, rows] - own[:, rows] - variance / 2)
        days.append((ratio - np.log(ratio) - 1).mean(0))
    return np.concatenate(days)


def compared(losses: Mapping[str, np.ndarray], pairs, *, horizon: int) -> pd.DataFrame:
    """Test pairs of forecasts over days by Diebold and Mariano: a table of one, other, difference, dm, p, holm.

    losses : {forecast: [day]}, means over tickers, as tickers of one day are not independent. dm is the classical p
    with Newey and West's errors of `horizon` lags, corrected as by Harvey, Leybourne and Newbold (1997). On few days
    with overlapping targets it rejects too often. So p uses the equal-weighted cosines' errors and degrees of
    freedom (Lazarus, Lewis, Stock and Watson 2018); holm is Holm's correction of p for all pairs.
    """
    lines = []
    for one, other in pairs:
        gap = np.asarray(losses[one]) - np.asarray(losses[other])
        count = len(gap)
        fit = sm.OLS(gap, np.ones(count)).fit(cov_type="HAC", cov_kwds={"maxlags": horizon})
        corrected = np.sqrt((count + 1 - 2 * horizon + horizon * (horizon - 1) / count) / count)
        classical = 2 * stats.t.sf(abs(float(fit.tvalues[0]) * corrected), count - 1)
        freedom = max(1, int(0.41 * count ** (2 / 3)))
        power = dct(gap, norm="ortho")[1 : freedom + 1] ** 2  # of the lowest frequencies, the mean apart
        statistic = gap.mean() / np.sqrt(power.mean() / count)
        lines.append((one, other, gap.mean(), classical, 2 * stats.t.sf(abs(statistic), freedom)))
    table = pd.DataFrame(lines, columns=["one", "other", "difference", "dm", "p"])
    return table.assign(holm=multipletests(table.p, method="holm")[1])


def over_days(loss, *, block: int) -> tuple[float, float, float]:
    """Compute the mean of a loss [day], and Student's 95 % interval over blocks of `block` consecutive days."""
    blocks = [part.mean() for part in np.array_split(loss, max(2, len(loss) // block))]
    return (float(np.mean(loss)), *timing.interval(blocks))


def _trailing(absolute, count):
    """Compute the log of the last `count` days' mean [day, ticker]; NaN for the first days."""
    mean = np.full(absolute.shape, np.nan)
    mean[count - 1 :] = np.lib.stride_tricks.sliding_window_view(absolute, count, axis=0).mean(-1)
    return np.log(np.maximum(mean, FLOOR))


def _weighted(absolute, decay):
    """Compute the log of the exponentially weighted average up to each day."""
    average = pd.DataFrame(absolute).ewm(alpha=1 - decay, adjust=True).mean().to_numpy()
    return np.log(np.maximum(average, FLOOR))
