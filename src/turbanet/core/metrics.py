"""Metrics of held-out predictions: compiled if a metric takes a mask, computed on the host otherwise."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from turbanet.core.arrays import first_line
from turbanet.core.member import parameters, takes
from turbanet.core.stopping import LOSS

ONE = "validation_metric"  # the name of a metric that was given alone
TRUE = {"y", "y_true", "labels_true", "true", "truth", "target", "targets", "label", "labels"}  # names of an argument
RESERVED = {"epoch", "seed", "member", "train_loss", "validation_loss"}  # columns of `History.frame`


def split(metric: Any) -> tuple[tuple, dict[str, Callable]]:
    """Split the argument `metric` of `fit` in two: ((name, metric), ...) to compile, {name: metric} for the host.

    A metric(prediction, y, mask=mask), where mask, bool [row], says which rows count, is compiled. Raises ValueError
    for anything but metrics.
    """
    metrics = {} if metric is None else dict(metric) if isinstance(metric, Mapping) else {ONE: metric}
    for name, each in metrics.items():
        if score := getattr(each, "_score_func", None):
            which = f"{name} is a scorer of scikit-learn's, which takes an estimator"
            raise ValueError(f"{which}: give its metric, sklearn.metrics.{score.__name__}.")
        if not callable(each) or not isinstance(name, str) or name in RESERVED:
            received = f"{name!r}: {each!r}" if isinstance(metric, Mapping) else repr(metric)
            known = f"metric(prediction, y) or {{name: metric}}, names other than {', '.join(sorted(RESERVED))}"
            raise ValueError(f"metric is {known}; got {received}.")
    in_program = {name: each for name, each in metrics.items() if takes(each, "mask")}
    return tuple(in_program.items()), {name: each for name, each in metrics.items() if name not in in_program}


def monitored(monitor: str, mode: str | None, names: list[str], patience: int | None) -> tuple[str, str]:
    """Return (monitor, mode) for early stopping, checked against the `names` of the metrics."""
    if monitor != LOSS and (monitor not in names or patience is None):
        known = f"the name of what patience is to follow, of {[LOSS, *names]}"
        raise ValueError(f"monitor must be {known}, got {monitor!r} with patience={patience}.")
    if (mode is not None) != (monitor != LOSS) or mode not in (None, "min", "max"):
        wanted = f'of the metric {monitor}, "min" or "max"' if monitor != LOSS else "of a metric that monitor names"
        raise ValueError(f"mode is for what is good {wanted}, got {mode!r}.")
    return monitor, mode or "min"


def ordered(metric: Callable) -> Callable:
    """Return metric(prediction, y, ...) of one whose first argument may have a name of `TRUE`, and so take y first."""
    first, second = [*parameters(metric), "", ""][:2]
    if (first in TRUE and second not in TRUE | {"t"}) or (first, second) == ("y1", "y2"):
        return lambda prediction, y, **more: metric(y, prediction, **more)
    return metric


def on_host(name: str, metric: Callable) -> Callable:
    """Return metric(prediction, y) -> float, for one member's exact rows.

    Where y holds classes, scikit-learn's metrics receive the likeliest classes or the probabilities, not logits.
    """
    convert = _converter(metric, [*parameters(metric), "", ""][1])
    score = ordered(metric)

    def of_member(prediction, y):
        value = score(convert(prediction, y), y)
        if np.ndim(value):
            raise ValueError(f"A metric returns one number; {name} returned an array of shape {np.shape(value)}.")
        return float(value)

    return of_member


def check(metrics: Mapping[str, Callable], prediction: Any, y: Any) -> None:
    """Raise ValueError for a metric of the host that cannot score one member's prediction of its rows."""
    leads = {np.shape(leaf)[:1] for leaf in jax.tree.leaves((prediction, y))}
    if len(leads) != 1 or () in leads:
        got = f"{jax.tree.map(np.shape, prediction)} and y of {jax.tree.map(np.shape, y)}"
        advice = "return such a prediction from the loss, or write metric(prediction, y, mask)"
        raise ValueError(f"A metric is called with a prediction whose arrays lead with the rows, got {got}: {advice}.")
    for name, metric in metrics.items():
        try:
            with warnings.catch_warnings():  # about an untrained network's predictions
                warnings.simplefilter("ignore")
                on_host(name, metric)(prediction, y)
        except Exception as error:  # the metric may be the user's
            shapes = jax.tree.map(np.shape, (prediction, y))
            problem = f"The metric {name} cannot score predictions and y of shapes {shapes[0]} and {shapes[1]}"
            if isinstance(y, tuple):
                problem += ", a tuple, as of a weighted loss, of which a metric of your own scores y[0]"
            raise ValueError(f"{problem}: {first_line(error)}") from error


def _converter(metric, second):
    """Return convert(prediction, y) -> the argument `second` of a metric, which for scikit-learn's says its kind."""
    while isinstance(metric, partial):
        metric = metric.func
    module = getattr(metric, "__module__", None) or ""
    if not module.startswith("sklearn.metrics") or module.endswith("_regression") or second == "pred_decision":
        return lambda prediction, y: prediction
    of_probabilities = metric.__name__ in ("log_loss", "d2_log_loss_score")
    takes_classes = second in ("y_pred", "labels_pred", "y2") and not of_probabilities
    return as_classes if takes_classes else partial(as_probabilities, of_one=second == "y_score")


def as_classes(prediction: Any, y: Any) -> Any:
    """Return classes [row] of logits or probabilities [row, class], or of the probability of 1, [row] or [row, 1]."""
    if not holds_classes(y) or not np.issubdtype(prediction.dtype, np.inexact):
        return prediction
    if prediction.ndim > y.ndim and prediction.shape[-1] > 1:
        return prediction.argmax(-1)
    is_probability = (prediction >= 0).all() and (prediction <= 1).all()
    return (prediction > 0.5).astype(int).reshape(y.shape) if is_probability else prediction


def as_probabilities(prediction: Any, y: Any, *, of_one: bool = False) -> Any:
    """Return probabilities [row, class] of logits; of the second of two classes alone, [row], if `of_one`."""
    if not holds_classes(y) or prediction.ndim == y.ndim or prediction.shape[-1] == 1:
        return prediction
    sums = prediction.sum(-1)
    if (prediction < 0).any() or (abs(sums - 1) > 0.01).any():
        prediction = np.exp(prediction - prediction.max(-1, keepdims=True), dtype=np.float64)
        prediction /= prediction.sum(-1, keepdims=True)
    return prediction[..., 1] if of_one and prediction.shape[-1] == 2 else prediction


def holds_classes(y: Any) -> bool:
    """Whether y is int or bool, [row] or [row, 1]."""
    is_column = hasattr(y, "dtype") and (y.ndim == 1 or y.shape[1:] == (1,))
    return is_column and y.dtype.kind in "iub"
