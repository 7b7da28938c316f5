"""What `fit` scores held-out predictions by: compiled where a metric takes a mask, on the host where it does not."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from turbanet.training.member import takes
from turbanet.training.stopping import LOSS

ONE = "validation_metric"  # the name of a metric that was given alone
EPOCHS = 8  # of which the predictions come back at a time
TAKEN = {"epoch", "seed", "member", "train_loss", "validation_loss"}  # columns of `History.frame`


def split(metric: Any) -> tuple[tuple, dict[str, Callable]]:
    """What `fit` takes as `metric` in two: ((name, metric), ...) that are compiled, {name: metric} for the host.

    Compiled is a metric(prediction, y, mask=mask), where mask, bool [row], says which rows count. Raises ValueError for
    anything else than metrics.
    """
    metrics = {} if metric is None else dict(metric) if isinstance(metric, Mapping) else {ONE: metric}
    for name, each in metrics.items():
        if not callable(each) or not isinstance(name, str) or name in TAKEN:
            came = f"{name!r}: {each!r}" if isinstance(metric, Mapping) else repr(metric)
            known = f"metric(prediction, y) or {{name: metric}}, names other than {', '.join(sorted(TAKEN))}"
            raise ValueError(f"metric is {known}; got {came}.")
    in_program = {name: each for name, each in metrics.items() if takes(each, "mask")}
    return tuple(in_program.items()), {name: each for name, each in metrics.items() if name not in in_program}


def monitored(monitor: str, mode: str | None, names: list[str], patience: int | None) -> tuple[str, str]:
    """(monitor, mode) as early stopping takes them, in a training with metrics of these `names`."""
    if monitor != LOSS and (monitor not in names or patience is None):
        known = f"the name of a metric that patience is to follow, of {names}"
        raise ValueError(f"monitor must be {known}, got {monitor!r} with patience={patience}.")
    if (mode is not None) != (monitor != LOSS) or mode not in (None, "min", "max"):
        wanted = f'of the metric {monitor}, "min" or "max"' if monitor != LOSS else "of a metric that monitor names"
        raise ValueError(f"mode is for what is good {wanted}, got {mode!r}.")
    return monitor, mode or "min"


def on_host(name: str, metric: Callable) -> Callable:
    """metric(prediction, y) -> float of one member's exact rows; scikit-learn's (y_true, y_pred) are handed over so."""
    first = next(iter(_parameters(metric)), "")

    def of_member(prediction, y):
        value = metric(y, prediction) if first in ("y_true", "labels_true") else metric(prediction, y)
        if np.ndim(value):
            raise ValueError(f"A metric returns one number; {name} returned an array of shape {np.shape(value)}.")
        return float(value)

    return of_member


def _parameters(metric):
    try:
        return inspect.signature(metric).parameters
    except (TypeError, ValueError):  # written in C
        return {}
