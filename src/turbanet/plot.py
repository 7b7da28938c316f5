"""Pictures of results: each function draws into an Axes, a new one if none is given, and returns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from turbanet.core.arrays import check_whole
from turbanet.core.extras import needed
from turbanet.core.tables import BOUND, dated, quantiles
from turbanet.ensembles.calibration import binned
from turbanet.ensembles.combine import accuracy, accuracy_by_size, ensemble_mean
from turbanet.ensembles.predictions import with_classes
from turbanet.live import shown
from turbanet.training.callbacks import TrainingView
from turbanet.training.fit import predict
from turbanet.training.history import History

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "decision_regions",
    "ensemble_size",
    "forecasts",
    "history",
    "reliability",
    "search",
    "style",
    "uncertainty",
]

# Okabe and Ito (2008): told apart by readers of any colour vision.
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
MARKERS = "osD^v<>"
SIZES = {"screen": ((6.4, 4.0), 11, 100), "print": ((3.5, 2.4), 8, 300)}  # inches, points, dots per inch
HUGE = 1e300  # in place of infinity, which has no quantile beside it
WIDE = 30  # times the smallest value, from which on positive values are spread on a logarithmic axis


@contextmanager
def style(kind: str = "screen") -> Iterator[None]:
    """Context in which figures are sized and coloured for a "screen" or for a column in "print"."""
    if kind not in SIZES:
        raise ValueError(f"style is {' or '.join(SIZES)}; got {kind!r}.")
    size, points, dots = SIZES[kind]
    rc_context = needed("matplotlib", "plot").rc_context
    colours = needed("cycler", "plot").cycler(color=COLOURS)
    settings = {"figure.figsize": size, "font.size": points, "figure.dpi": dots, "savefig.dpi": dots}
    settings |= {"axes.prop_cycle": colours, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(settings | {"legend.frameon": False, "figure.constrained_layout.use": True}):
        yield


def history(history: History, *, names: list[str] | None = None, ax: Any = None) -> Any:
    """Plot losses and metrics against epochs: the members' median, and the band of 5 to 95 % of them.

    Epochs of an earlier call count if they are as many for all members.

    names : which of `history.recorded()`; None: the losses
    """
    if not isinstance(history, History):
        raise ValueError(f"history plots the History that fit returns; got {type(history).__name__}.")
    names = [names] if isinstance(names, str) else names
    recorded = history.recorded()
    names = [name for name in recorded if name.endswith("_loss")] if names is None else names
    if unknown := [name for name in names if name not in recorded]:
        raise ValueError(f"names are of {', '.join(recorded)}; got {unknown[0]!r}.")
    with _axes(ax) as ax:
        for name in names:
            values = recorded[name]
            kept = ~np.isnan(values).all(axis=1)
            epochs = 1 + _begun(history) + np.flatnonzero(kept)
            values = np.clip(values[kept].astype(float), -HUGE, HUGE)
            bounds = np.nanquantile(values, [0.05, 0.5, 0.95], axis=1) if kept.any() else np.empty((3, 0))
            low, median, high = np.where(np.abs(bounds) > HUGE / 1e9, np.sign(bounds) * np.inf, bounds)
            alone = "." if len(epochs) == 1 else ""
            (line,) = ax.plot(epochs, median, marker=alone, label=name.replace("_", " "))
            ax.fill_between(epochs, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        kinds = {"loss" if name.endswith("_loss") else name for name in names}
        ax.set(xlabel="epoch", ylabel=kinds.pop() if len(kinds) == 1 else "")
        ax.legend()
    return ax


def _begun(history):
    """Return how many epochs all members had trained before; 0 if they differ."""
    begun = np.unique(history.begun)
    return int(begun[0]) if len(begun) == 1 else 0


class LivePlot:
    """A callback that plots each loss and metric by `history`, anew after each segment.

    It shows `figure` in a notebook; elsewhere save it by `figure.savefig`.

    show : whether a notebook shows it
    """

    def __init__(self, *, show: bool = True):
        self.show = show
        self.figure: Any = None
        self._display = None

    def __call__(self, view: TrainingView) -> None:
        figure = needed("matplotlib.figure", "plot").Figure
        recorded = view.history.recorded()
        panels = [[name for name in recorded if name.endswith("_loss")]]
        panels += [[name] for name in recorded if not name.endswith("_loss")]
        begun = _begun(view.history)
        with style():
            self.figure = figure(figsize=(4.5 * len(panels), 3.2))
            axes = self.figure.subplots(1, len(panels), squeeze=False)[0]
            for ax, names in zip(axes, panels, strict=True):
                history(view.history, names=names, ax=ax).set_xlim(begun + 1, begun + max(view.epochs, 2))
                ax.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_title(f"{view.training.sum()} of {len(view.training)} members train on", fontsize="medium")
        if self.show:
            self._display = shown(self.figure, self._display)


def search(table: Any, by: str, score: str | None = None, *, ax: Any = None) -> Any:
    """Plot candidates' scores against a hyperparameter: a point for each, and the median of each value.

    Values that are no numbers, such as layers or names, stand as text beside one another.

    table : a row for each candidate, such as `history.best().join(candidates, on="member")`; or a fitted search, of
        `TurbaSearchCV` or scikit-learn
    by : a column, or a parameter of the search; score : a column; None: validation_loss, or a search's mean_test_score
    """
    pandas = needed("pandas", "plot")
    if hasattr(table, "cv_results_"):
        table = pandas.DataFrame({name: _plain(column) for name, column in table.cv_results_.items()})
        by, score = by if by in table else f"param_{by}", score or "mean_test_score"
    table = table.to_pandas() if hasattr(table, "to_pandas") else table
    score = score or "validation_loss"
    if missing := {by, score} - set(table):
        raise ValueError(f"The table has the columns {', '.join(map(str, table))}; it lacks {missing.pop()!r}.")
    types = pandas.api.types
    are_numbers = types.is_numeric_dtype(table[by]) and not types.is_bool_dtype(table[by]) and table[by].notna().all()
    if not are_numbers:
        table = table.copy()
        table[by] = table[by].map(str)
    medians = table.groupby(by)[score].median()
    with _axes(ax) as ax:
        ax.plot(table[by], table[score], "o", alpha=0.4, markersize=4, color=COLOURS[0], label="a candidate")
        ax.plot(medians.index, medians, "-" if are_numbers else "_", markersize=18, color=COLOURS[1], label="median")
        if are_numbers and 0 < WIDE * table[by].min() <= table[by].max():
            ax.set_xscale("log")
        ax.set(xlabel=str(by).replace("_", " "), ylabel=str(score).replace("_", " "))
        ax.legend()
    return ax


def _plain(column):
    """Return a column of a search's results as a list of numbers, or of texts if one of them is no number."""
    values = [np.nan if value is np.ma.masked else value for value in column]
    return values if all(isinstance(value, Number) for value in values) else list(map(str, values))


def reliability(probability: Any, y: ArrayLike, *, bins: int = 10, ax: Any = None) -> Any:
    """Plot the share of right predictions against the confidence in them, in bins of equal width.

    probability : [row, class], or [member, row, class] for all members' rows; or {name: either}
    y : int [row]
    """
    check_whole(bins=bins)
    curves = probability if isinstance(probability, Mapping) else {"": probability}
    with _axes(ax) as ax:
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        for (name, one), marker in zip(curves.items(), cycle(MARKERS), strict=False):
            confidence, right, which = map(np.ravel, binned(one, y, bins))
            filled = np.unique(which)
            means = [[values[which == each].mean() for each in filled] for values in (confidence, right)]
            ax.plot(*means, marker=marker, markersize=4, label=name)
        ax.set(xlabel="confidence", ylabel="share right", xlim=(0, 1), ylim=(0, 1))
        if isinstance(probability, Mapping):
            ax.legend(loc="upper left")  # where curves near the diagonal are not
    return ax


def uncertainty(logits: ArrayLike, y: ArrayLike, *, ax: Any = None) -> Any:
    """Plot the ensemble's accuracy on its most confident rows against their share of all rows.

    The curve rises to the left if low confidence marks wrong predictions.

    logits : [member, row, class]; y : int [row]
    """
    probability, true = map(np.asarray, with_classes(ensemble_mean(logits), y))
    surest = np.argsort(-probability.max(axis=1), kind="stable")
    right = (probability.argmax(axis=1) == true)[surest]
    count = 1 + np.arange(len(right))
    with _axes(ax) as ax:
        ax.plot(count / len(right), right.cumsum() / count)
        ax.set(xlabel="share of rows, the surest first", ylabel="accuracy", xlim=(0, 1))
    return ax


def ensemble_size(logits: ArrayLike, y: ArrayLike, *, seed: Any = 0, orders: int = 20, ax: Any = None) -> Any:
    """Plot accuracy against the number of members: the mean over random orders, their range, the average member's.

    logits : [member, row, class]; y : int [row]; seed, orders : as `ensembles.accuracy_by_size` takes them
    """
    check_whole(orders=orders)
    curve = np.asarray(accuracy_by_size(logits, y, seed=seed, orders=orders))
    size = 1 + np.arange(curve.shape[1])
    with _axes(ax) as ax:
        (line,) = ax.plot(size, curve.mean(0), marker="." if len(size) == 1 else "", label="ensemble")
        ax.fill_between(size, curve.min(0), curve.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        ax.axhline(np.mean(accuracy(logits, y)), color=line.get_color(), linestyle=":", label="average member")
        ax.set(xlabel="members", ylabel="accuracy")
        ax.legend()
    return ax


def decision_regions(swarm: Any, x: ArrayLike, y: ArrayLike, *, points: int = 200, ax: Any = None) -> Any:
    """Plot where a swarm of two features predicts which class, paler where its members' mean is less sure.

    x : [row, 2]; y : int [row]; points : of the grid, in each direction
    """
    x = np.asarray(x, np.float32)
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"decision_regions takes x [row, 2]; got {list(x.shape)}.")
    if not np.isfinite(x).all():
        raise ValueError("decision_regions takes finite x: leave out the rows with NaN or infinite numbers.")
    margin = 0.05 * np.ptp(x, axis=0)
    (left, low), (right, high) = x.min(0) - margin, x.max(0) + margin
    grid = np.meshgrid(np.linspace(left, right, points), np.linspace(low, high, points))
    logits = predict(swarm, np.stack(grid, axis=-1).reshape(-1, 2).astype(np.float32))
    probability = np.asarray(ensemble_mean(logits)).reshape(points, points, -1)
    _, labels = with_classes(np.zeros((len(x), probability.shape[-1])), y)
    colors = needed("matplotlib.colors", "plot")
    palette = np.array([colors.to_rgb(COLOURS[i % len(COLOURS)]) for i in range(probability.shape[-1])])
    sure = (probability.max(-1, keepdims=True) - 1 / len(palette)) / (1 - 1 / len(palette))
    picture = 1 - 0.6 * sure * (1 - palette[probability.argmax(-1)])
    with _axes(ax) as ax:
        ax.imshow(picture, origin="lower", extent=(left, right, low, high), aspect="auto")
        ax.scatter(*x.T, c=palette[np.asarray(labels)], s=10, linewidths=0.3, edgecolors="white")
    return ax


def forecasts(
    truth: pd.DataFrame,
    forecast: pd.DataFrame,
    series: Any = None,
    *,
    last: int | None = None,
    ax: Any = None,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
) -> Any:
    """Plot a series and its forecasts, with bands between columns such as LSTM-lo-80 and LSTM-hi-80, or of quantiles.

    truth : unique_id, ds, y, as `Forecaster` takes it
    forecast : unique_id, ds and a column for each model, as `Forecaster.predict` returns it; with the column cutoff, as
        `cross_validation` returns it, a line for each origin
    series : the unique_id to plot; None: the first one forecast; last : its newest values to plot; None: all
    id_col, time_col, target_col : what these columns are called
    """
    columns = id_col, time_col, target_col
    series, known, ahead = _of_series(truth, forecast, series, *columns)
    if last is not None:
        check_whole(last=last)
        known = known[-last:]
    models = [name for name in ahead if name not in (*columns, "cutoff") and not BOUND.search(str(name))]
    origins = [each for _, each in ahead.groupby("cutoff", dropna=False)] if "cutoff" in ahead else [ahead]
    origins = [ahead] if len(origins) == len(ahead) else origins  # of one step each: a line of them all
    with _axes(ax) as ax:
        ax.plot(known[time_col], known[target_col], color="black", label="truth")
        for name in models:
            (line,) = ax.plot(origins[0][time_col], origins[0][name], label=name, marker="." if len(ahead) == 1 else "")
            for each in origins[1:]:
                ax.plot(each[time_col], each[name], color=line.get_color())
            bounds = [(low, low.replace("-lo-", "-hi-")) for low in ahead if low.startswith(f"{name}-lo-")]
            bounds = [pair for pair in bounds if pair[1] in ahead]
            levels = list(quantiles(name, ahead))
            bounds += [(levels[i], levels[-1 - i]) for i in range(len(levels) // 2)]
            for low, high in bounds:
                for each in origins:
                    color = line.get_color()
                    ax.fill_between(each[time_col], each[low], each[high], color=color, alpha=0.2, linewidth=0)
                    if len(each) == 1:
                        ax.vlines(each[time_col], each[low], each[high], color=color, alpha=0.4)
        if ahead[time_col].dtype.kind == "M":
            dates = needed("matplotlib.dates", "plot")
            zone = getattr(ahead[time_col].dtype, "tz", None)
            locator = dates.AutoDateLocator(tz=zone, minticks=3, maxticks=7)
            ax.xaxis.set(major_locator=locator, major_formatter=dates.ConciseDateFormatter(locator, tz=zone))
        ax.set(title=str(series))
        ax.legend()
    return ax


def _of_series(truth, forecast, series, id_col, time_col, target_col):
    """Return (name, values, forecasts) of one series in order of time; ValueError for other tables."""
    tables = [table.to_pandas() if hasattr(table, "to_pandas") else table for table in (truth, forecast)]
    named = {"truth": [id_col, time_col, target_col], "forecast": [id_col, time_col]}
    for (what, names), table in zip(named.items(), tables, strict=True):
        if missing := [name for name in names if name not in table]:
            raise ValueError(f"{what} needs the columns {', '.join(names)}; it has no {', '.join(missing)}.")
        if not len(table):
            raise ValueError(f"{what} has no rows: give those of one series at least.")
    tables = [table.assign(**{time_col: dated(table[time_col])}) for table in tables]
    series = tables[1][id_col].iloc[0] if series is None else series
    known, ahead = (table[table[id_col] == series].sort_values(time_col) for table in tables)
    for what, rows, table in zip(("forecast", "value"), (ahead, known), tables[::-1], strict=True):
        if not len(rows):
            raise ValueError(f"No {what} of {series!r}; there are those of {list(table[id_col].unique())!s:.100}.")
    return series, known, ahead


@contextmanager
def _axes(ax):
    """Context with `ax`, or with the Axes of a new figure for a screen."""
    if ax is not None:
        yield ax
        return
    pyplot = needed("matplotlib.pyplot", "plot")
    if pyplot.rcParams["axes.prop_cycle"].by_key().get("color") == list(COLOURS):  # within `style`
        yield pyplot.subplots()[1]
    else:
        with style():
            yield pyplot.subplots()[1]
