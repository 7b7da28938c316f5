"""Tables of scores with their intervals: models over test rows, forecasts over tickers; calibration."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

import turbanet as tn


def score_table(outputs: Mapping[str, np.ndarray], y, *, resamples: int, seed: int = 0) -> pd.DataFrame:
    """Tabulate each model's mean scores over members in percent with 95 % intervals over the test rows.

    outputs : {model: [member, row, class]}; y : int [row]; resamples : draws of the percentile bootstrap
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
    """Compare models' accuracies on the same test rows with a 95 % bootstrap over rows, in percentage points.

    right : {model: [row], the share of its networks that classify the row correctly}; pairs : (one, other). Returns a
    table of one, other, points, low, high. Rows are drawn jointly for both models; the networks are fixed.
    """
    lines = []
    for one, other in pairs:
        gap = 100 * (np.asarray(right[one], float) - np.asarray(right[other], float))
        bootstrap = stats.bootstrap((gap,), np.mean, n_resamples=resamples, method="percentile", rng=seed)
        lines.append((one, other, gap.mean(), *bootstrap.confidence_interval))
    return pd.DataFrame(lines, columns=["one", "other", "points", "low", "high"])


def calibration(probability, y) -> dict[str, float]:
    """Compute calibration error, log loss and Brier score, means over members: [member, row, class], y int [row]."""
    return {
        "calibration_error": float(np.mean([tn.ensembles.expected_calibration_error(one, y) for one in probability])),
        "log_loss": float(tn.ensembles.negative_log_likelihood(probability, y).mean()),
        "brier": float(tn.ensembles.brier_score(probability, y).mean()),
    }


def against_persistence(errors: Mapping[str, tuple[np.ndarray, np.ndarray]], *, block: int = 5) -> pd.DataFrame:
    """Count the tickers on which forecasts beat persistence, with a 95 % jackknife interval over blocks of days.

    errors : {forecast: (its errors, persistence's on the same tickers)}, percent [ticker, day]. Errors depend across
    tickers and from day to day, so the jackknife leaves out `block` consecutive days of all tickers. A bootstrap would
    add noise to each ticker's mean and draw every share towards one half.
    """
    lines = []
    for forecast, (error, naive) in errors.items():
        with np.errstate(divide="ignore", invalid="ignore"):  # a price that never changes has no error of persistence
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
                "median error over persistence": np.nanmedian(ratio),
                "beats persistence": int((ratio < 1).sum()),
                "share (%)": share,
                "95 % interval": f"{low:.1f} to {high:.1f}" if spread else "",  # equal shares have no spread
            }
        )
    return pd.DataFrame(lines)
