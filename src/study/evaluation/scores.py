"""Tables of scores with their intervals: models over test rows, forecasts over tickers; calibration."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.calibration import calibration_curve

import turbanet as tn


def score_table(outputs: Mapping[str, np.ndarray], y, *, resamples: int, seed: int = 0) -> pd.DataFrame:
    """Each model's scores in percent, the mean of its members', each beside its 95 % interval over the test rows.

    outputs: {model: [member, row, class]}, y: int [row]. The intervals are percentiles of a bootstrap with `resamples`
    draws.
    """
    lines = []
    for model, output in outputs.items():
        mean = tn.ensembles.member_scores(output, y).mean()
        line = {"model": model}
        for score, (low, high) in tn.score_interval(output, y, resamples=resamples, seed=seed).items():
            line[f"{score} (%)"] = 100 * mean[score]
            line[f"{score} interval"] = f"{100 * low:.1f} to {100 * high:.1f}"
        lines.append(line)
    return pd.DataFrame(lines)


def differences(right: Mapping[str, np.ndarray], pairs, *, resamples: int, seed: int = 0) -> pd.DataFrame:
    """By how many percentage points of the same test rows one model is better, with a 95 % bootstrap over the rows.

    right: {model: [row], the share of its networks that are right}; pairs: (one, other). A table of one, other,
    points, low, high: the rows are drawn together for both models, the networks are these.
    """
    lines = []
    for one, other in pairs:
        gap = 100 * (np.asarray(right[one], float) - np.asarray(right[other], float))
        how = {"n_resamples": resamples, "method": "percentile", "rng": seed}
        low, high = stats.bootstrap((gap,), np.mean, **how).confidence_interval
        lines.append((one, other, gap.mean(), low, high))
    return pd.DataFrame(lines, columns=["one", "other", "points", "low", "high"])


def calibration(probability, y) -> dict[str, float]:
    """Expected calibration error, log loss and Brier score, the means over members: [member, row, class], int [row]."""
    return {
        "calibration_error": float(np.mean([tn.ensembles.expected_calibration_error(one, y) for one in probability])),
        "log_loss": float(tn.ensembles.negative_log_likelihood(probability, y).mean()),
        "brier": float(tn.ensembles.brier_score(probability, y).mean()),
    }


def reliability(probability, y, *, bins: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """(mean confidence, share right) in equal-width bins of the confidence, rows of all members together, by sklearn.

    probability: [member, row, class], y: int [row]; bins that no row falls into are left out.
    """
    probability = np.asarray(probability)
    right = (probability.argmax(-1) == y).ravel()
    accuracy, confidence = calibration_curve(right, probability.max(-1).ravel().clip(0, 1), n_bins=bins)
    return confidence, accuracy


def against_persistence(errors: Mapping[str, tuple[np.ndarray, np.ndarray]], *, block: int = 5) -> pd.DataFrame:
    """On how many tickers each forecast beats persistence, with a 95 % interval by a jackknife over blocks of days.

    errors: {forecast: (its errors, persistence's on the same tickers)}, percent [ticker, day]. Tickers share their
    days, and a day's errors are like the last one's: left out are `block` days in a row, for all tickers at once. A
    bootstrap would add noise to each ticker's mean and draw every share towards one half.
    """
    lines = []
    for forecast, (error, naive) in errors.items():
        ratio = error.mean(1) / naive.mean(1)
        share = 100 * (ratio < 1).mean()
        parts = np.array_split(np.arange(error.shape[1]), max(2, error.shape[1] // block))
        without = [np.delete(error - naive, part, axis=1).mean(1) for part in parts]
        shares = np.array([100 * (gap < 0).mean() for gap in without])
        spread = np.sqrt((len(parts) - 1) * shares.var())
        half = stats.t.ppf(0.975, len(parts) - 1) * spread
        low, high = max(0.0, share - half), min(100.0, share + half)
        lines.append(
            {
                "forecast": forecast,
                "tickers": len(ratio),
                "median error (%)": np.median(error.mean(1)),
                "persistence (%)": np.median(naive.mean(1)),
                "median error over persistence": np.median(ratio),
                "beats persistence": int((ratio < 1).sum()),
                "share (%)": share,
                "95 % interval": f"{low:.1f} to {high:.1f}",
            }
        )
    return pd.DataFrame(lines)
