"""Scores over the folds of a cross-validation, with intervals for folds that share training rows."""

import numpy as np
from scipy import stats


def accuracy_table(accuracy, *, folds):
    """Tabulate each model's and schedule's accuracy over the folds in percent, with the interval of `difference`.

    accuracy : a table of model, schedule, accuracy and serial (PyTorch's, of the same networks), one line a fold
    """
    import pandas as pd

    lines = []
    for (model, schedule), part in accuracy.groupby(["model", "schedule"], sort=False):
        own = 100 * part.accuracy
        serial = 100 * part.serial
        mean, low, high, _ = difference(own, np.zeros(len(own)), train=folds - 1, test=1)
        gap = difference(own, serial, train=folds - 1, test=1)[:3]
        line = [mean, low, high, serial.mean(), *gap, own.std()]
        lines.append((model, schedule, *np.round(line, 9)))  # a gap of zero shows no rounding error
    columns = [
        "swarm (%)",
        "low",
        "high",
        "serial (%)",
        "swarm less serial",
        "gap low",
        "gap high",
        "spread over folds",
    ]
    return pd.DataFrame(lines, columns=["model", "schedule", *columns])


def difference(a, b, *, train, test, level=0.95):
    """Compare two networks' scores [fold] in pairs: (mean of a - b, low, high, p).

    Student's t with the variance corrected for training rows that folds share (Nadeau and Bengio 2003).

    train, test : the rows of a fold's two parts, or their proportion
    """

    gap = np.asarray(a, float) - np.asarray(b, float)
    if len(gap) < 2:
        raise ValueError(f"A paired comparison needs at least two folds, got {len(gap)}.")
    error = np.sqrt((1 / len(gap) + test / train) * gap.var(ddof=1))
    if error == 0:
        return float(gap.mean()), float(gap.mean()), float(gap.mean()), 1.0 if gap.mean() == 0 else 0.0
    low, high = stats.t.interval(level, len(gap) - 1, gap.mean(), error)
    p = 2 * stats.t.sf(abs(gap.mean()) / error, len(gap) - 1)
    return float(gap.mean()), float(low), float(high), float(p)
