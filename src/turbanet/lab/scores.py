"""Tables of scores with their intervals: models over test rows, forecasts over tickers."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

import turbanet as tn


def score_table(outputs: Mapping[str, np.ndarray], y, *, resamples: int, seed: int = 0) -> pd.DataFrame:
    """Each model's scores in percent, the mean of its members', each beside its 95 % interval over the test rows.

    outputs: {model: [member, row, class]}, y: int [row]. The intervals are percentiles of a bootstrap with `resamples`
    draws.
    """
    lines = []
    for model, output in outputs.items():
        mean = tn.member_scores(output, y).mean()
        line = {"model": model}
        for score, (low, high) in tn.score_interval(output, y, resamples=resamples, seed=seed).items():
            line[f"{score} (%)"] = 100 * mean[score]
            line[f"{score} interval"] = f"{100 * low:.1f} to {100 * high:.1f}"
        lines.append(line)
    return pd.DataFrame(lines)


def against_persistence(errors: Mapping[str, np.ndarray], persistence, *, resamples: int, seed: int = 0):
    """On how many tickers each forecast beats persistence, with a 95 % percentile bootstrap over tickers.

    errors: {forecast: percent [ticker]}, of the first tickers where a forecast has not all; persistence: [ticker].
    """
    rng = np.random.default_rng(seed)
    lines = []
    for forecast, error in errors.items():
        naive = np.asarray(persistence)[: len(error)]
        ratio = error / naive
        draws = ratio[rng.integers(len(ratio), size=(resamples, len(ratio)))]
        low, high = 100 * np.quantile((draws < 1).mean(axis=1), [0.025, 0.975])
        lines.append(
            {
                "forecast": forecast,
                "tickers": len(ratio),
                "median error (%)": np.median(error),
                "persistence (%)": np.median(naive),
                "median error over persistence": np.median(ratio),
                "beats persistence": int((ratio < 1).sum()),
                "share (%)": 100 * (ratio < 1).mean(),
                "95 % interval": f"{low:.1f} to {high:.1f}",
            }
        )
    return pd.DataFrame(lines)
