"""Scores of agents over their seeds, as Agarwal et al. (2021) recommend, with their intervals."""

import numpy as np
from scipy import stats


def interquartile_mean(returns, *, resamples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the mean of the members' middle half with a 95 % bootstrap interval over members (Agarwal et al. 2021).

    returns : [..., member], NaN for members to leave out. Returns (mean, low, high), each [...].
    """
    returns = np.asarray(returns, float)
    found = []
    for own in returns.reshape(-1, returns.shape[-1]):
        own = own[~np.isnan(own)]
        if own.size < 2 or np.ptp(own) == 0:
            found.append([own.mean() if own.size else np.nan] * 3)
            continue
        bootstrap = stats.bootstrap((own,), _middle, n_resamples=resamples, method="percentile", rng=seed)
        found.append([_middle(own), *bootstrap.confidence_interval])
    return tuple(np.transpose(found).reshape(3, *returns.shape[:-1]))


def _middle(values, axis=-1):
    return stats.trim_mean(values, 0.25, axis=axis)


def performance_profile(returns, thresholds) -> np.ndarray:
    """Compute the share of members whose return [member] exceeds each threshold (Agarwal et al. 2021): [threshold]."""
    return (np.asarray(returns)[:, None] > np.asarray(thresholds)).mean(0)


def share(count: int, of: int) -> tuple[float, float, float]:
    """Compute `count` / `of` with Wilson's 95 % interval: (share, low, high)."""
    interval = stats.binomtest(int(count), int(of)).proportion_ci(method="wilson")
    return count / of, float(interval.low), float(interval.high)
