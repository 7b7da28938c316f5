"""What a forecaster is told, checked before anything is trained."""

from typing import Any

import numpy as np
from flax import linen as nn

from turbanet.core.arrays import check_whole
from turbanet.core.plan import say_once
from turbanet.loss import mse
from turbanet.series.baselines import DRIFT, MODELS, NAIVE, SEASONAL
from turbanet.series.networks import BOTH, GLOBAL, LOCAL
from turbanet.series.panel import Panel
from turbanet.series.tables import Columns
from turbanet.series.targets import COUNTS, NONNEGATIVE, REAL, Target

SQUARED = "squared_error"


def check(forecaster: Any, steps: int, model: str) -> None:
    """Raise ValueError for what no forecaster can be; steps: that its model returns; model: its class's name."""
    whole = {name: getattr(forecaster, name) for name in ("h", "input_size", "epochs", "batch_size", "features")}
    check_whole(**whole, season=1 if forecaster.season is None else forecaster.season)
    if forecaster.kind not in (LOCAL, GLOBAL, BOTH):
        raise ValueError(f'kind must be "{LOCAL}", "{GLOBAL}" or "{BOTH}", got {forecaster.kind!r}.')
    if forecaster.kind != LOCAL and not isinstance(forecaster.network, nn.Module):
        advice = f'a pair (init, apply) is for kind="{LOCAL}"'
        raise ValueError(f"A network of all series is told which one it sees, as a Flax module can be: {advice}.")
    for name in ("calibration", "val_size"):
        if not isinstance(number := getattr(forecaster, name), int | np.integer) or number < 0:
            raise ValueError(f"{name} must be a whole number, 0 for none; got {number!r}.")
    beside = [name for each in ("hist", "futr", "stat") for name in getattr(forecaster, f"{each}_exog_list")]
    named = [forecaster.id_col, forecaster.time_col, forecaster.target_col, *beside]
    written = {"cutoff", NAIVE, SEASONAL, DRIFT, *MODELS, model} & set(named)
    if written or len(set(named)) < len(named):
        wrong = min(written) if written else next(name for name in named if named.count(name) > 1)
        raise ValueError(f"{wrong!r} names two columns of a table or of its forecasts: rename one of them.")
    if model in {NAIVE, SEASONAL, DRIFT, *MODELS}:
        raise ValueError(f"The model's class is called {model}, as a baseline's column is: rename it.")
    if bool(forecaster.val_size) != (forecaster.patience is not None):
        raise ValueError("val_size and patience stop a training early together: give both, or none.")
    if 0 < forecaster.val_size < steps:
        raise ValueError(f"val_size is {forecaster.val_size}, a model forecasts {steps} steps: hold out as many.")


def listed(forecaster: Any, name: str) -> tuple:
    """Return a parameter that is a list, array or index as a tuple, () for None; ValueError for one value alone."""
    value = getattr(forecaster, name)
    if value is not None and (isinstance(value, str) or not hasattr(value, "__iter__")):
        raise ValueError(f"{name} is a list, got {value!r}: put it in a list.")
    return () if value is None else tuple(value)


def target_of(forecaster: Any, steps: int) -> Target:
    """Return what is forecast; ValueError for a loss and quantiles that do not go together."""
    loss, levels = forecaster.loss, tuple(sorted(forecaster.quantiles))
    counts, named = isinstance(loss, str) and loss in COUNTS, loss == SQUARED
    if isinstance(loss, str) and not (counts or named):
        known = ", ".join(f'"{name}"' for name in (SQUARED, *COUNTS))
        raise ValueError(f"loss is {known}, or a function; got {loss!r}.")
    if not (counts or named or loss is mse) and (forecaster.nonnegative or levels):
        what = "nonnegative=True" if forecaster.nonnegative else "quantiles"
        raise ValueError(f"{what} brings its own loss, and another came: leave one of them out.")
    if any(not 0 < each < 1 for each in levels) or len(set(levels)) < len(levels):
        raise ValueError(f"quantiles are levels between 0 and 1, each once; got {levels}.")
    if levels and 0.5 not in levels and not counts:
        raise ValueError(f"quantiles must hold 0.5, the median, which is the point forecast; got {levels}.")
    if levels and steps < forecaster.h:
        raise ValueError("Quantiles of several steps take a model that returns them at once: direct=True.")
    family = loss if counts else NONNEGATIVE if forecaster.nonnegative else REAL
    return Target(family, levels, mse if isinstance(loss, str) else loss)


def columns_of(forecaster: Any, steps: int) -> Columns:
    """Return the columns of a forecaster's table; ValueError for those that its networks cannot see."""
    lists = {name: getattr(forecaster, f"{name}_exog_list") for name in ("hist", "futr", "stat")}
    if lists["hist"] and steps < forecaster.h:
        raise ValueError("hist_exog_list is not known ahead, as recursive forecasts want it: take direct=True.")
    if lists["futr"] and forecaster.input_size < steps:
        raise ValueError(f"futr_exog_list takes input_size of at least {steps}, the steps ahead.")
    if lists["stat"] and LOCAL in forecaster.kinds:
        raise ValueError(f'A network of one series learns nothing from stat_exog_list: take kind="{GLOBAL}".')
    return Columns(
        forecaster.id_col,
        forecaster.time_col,
        forecaster.target_col,
        **lists,
    )


def check_lengths(panel: Panel, origins: Any, stops: list[np.ndarray], needed: int, horizon: int) -> None:
    """Raise ValueError for a series of too few values: `needed` before the first origin, `horizon` after each.

    origins : times, the last one first; stops : [origin][series], the row after the last one up to it
    """
    counts = stops[-1] - panel.begin
    if (counts < needed).any():
        first = int(counts.argmin())
        what = "training with its calibration" if len(origins) > 1 else "training"
        origin = panel.kind.shown(origins[-1])
        which = f"Series {panel.ids[first]} has {counts[first]} values up to {origin}, {what} needs {needed}"
        raise ValueError(f"{which}: leave it out, or take a shorter window or horizon.")
    for stop, origin in zip(stops[1:], origins[1:], strict=True):
        if len(short := np.flatnonzero(panel.end - stop < horizon)):
            series = short[0]
            last = panel.kind.shown(panel.ds[panel.end[series] - 1])
            which = f"Series {panel.ids[series]}, which ends at {last}, has fewer than {horizon} values after"
            advice = "leave it out, fill gaps before its end by freq= and fill=, or take calibration=0"
            raise ValueError(f"{which} {panel.kind.shown(origin)}, an origin of the calibration: {advice}.")
    ended = np.flatnonzero(panel.ds[panel.end - 1] < origins[0])
    if len(ended):
        origin = panel.kind.shown(origins[0])
        which = f"{len(ended)} of {len(panel.ids)} series, such as {panel.ids[ended[0]]}, end before {origin}"
        say_once(f"{which}: their forecasts follow on their own last values.")
