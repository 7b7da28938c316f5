"""Scores of agents over their seeds, as Agarwal et al. (2021) recommend, with their intervals."""

import numpy as np
from scipy import stats


def interquartile_mean(returns, *, resamples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean of the middle half of the members, and its 95 % interval by a bootstrap over them (Agarwal et al. 2021).

    returns: [..., member]. (mean, low, high) [...]; members without a number are left out.
    """
    returns = np.asarray(returns, float)
    found = []
    for own in returns.reshape(-1, returns.shape[-1]):
        own = own[~np.isnan(own)]
        if own.size < 2 or np.ptp(own) == 0:
            found.append([own.mean() if own.size else np.nan] * 3)
            continue
        how = {"n_resamples": resamples, "method": "percentile", "rng": seed, "vectorized": True}
        low, high = stats.bootstrap((own,), _middle, **how).confidence_interval
        found.append([_middle(own), low, high])
    return tuple(np.transpose(found).reshape(3, *returns.shape[:-1]))


def _middle(values, axis=-1):
    return stats.trim_mean(values, 0.25, axis=axis)


def performance_profile(returns, thresholds) -> np.ndarray:
    """The share of the members [member] whose return is above each threshold (Agarwal et al. 2021): [threshold]."""
    return (np.asarray(returns)[:, None] > np.asarray(thresholds)).mean(0)


def share(count: int, of: int) -> tuple[float, float, float]:
    """(Share, low, high): how many of how many, with Wilson's 95 % interval."""
    interval = stats.binomtest(int(count), int(of)).proportion_ci(method="wilson")
    return count / of, float(interval.low), float(interval.high)
