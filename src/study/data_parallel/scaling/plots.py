"""Figures of data-parallel training by several frameworks: throughput, efficiency, accuracy; they take an Axes."""

import itertools

import numpy as np
import seaborn as sns
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from pandas.api.types import is_numeric_dtype

from study.figures import plots
from study.figures.labels import FRAMEWORKS
from study.figures.plots import SMALL

RATE = "images per second"


def throughput(ax, table, predicted=None):
    """Plot images per second against workers with the measured range, and a dashed prediction if there is one.

    table : from `suite.compared`; marks are open where workers share cores
    predicted : a table of workers and images per second
    """
    for name, own in table.groupby("framework", sort=False):
        middle = own[RATE]
        ax.errorbar(own.workers, middle, [middle - own.low, own.high - middle], label=name, **_style(name))
        _open(ax, own, RATE)
    if predicted is not None:
        ax.plot(predicted.workers, predicted[RATE], color="0.4", ls="--", lw=1, label="predicted")
    ax.set(ylabel=RATE, ylim=(0, None))
    return plots.name_lines(_against_workers(ax))


def by_framework(ax, table, column):
    """Plot a column of a table of framework, workers and oversubscribed: a row a framework, marks by workers.

    Marks are open where workers share cores.
    """
    names = list(table.framework.unique())
    counts = sorted(table.workers.unique())
    colours = sns.color_palette("crest", len(counts))
    for workers, shade, marker in zip(counts, colours, itertools.cycle("oDs^v"), strict=False):
        own = table[(table.workers == workers) & table[column].notna()]
        face = "white" if own.oversubscribed.any() else shade
        position = [names.index(name) for name in own.framework]
        label = "1 worker" if workers == 1 else f"{workers} workers"
        ax.plot(own[column], position, marker, ms=4, color=shade, mfc=face, label=label)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5), xlim=(0, None), xlabel=column)
    ax.tick_params(labelsize=SMALL)
    ax.grid(axis="y", color="0.92", lw=0.6)
    return ax


def efficiency(ax, table, predicted=None):
    """Plot efficiency, throughput over that of as many single workers, against workers.

    predicted : a table of workers and efficiency, dashed
    """
    for name, own in table.groupby("framework", sort=False):
        ax.plot(own.workers, own.efficiency, label=name, **_style(name))
        _open(ax, own, "efficiency")
    if predicted is not None:
        ax.plot(predicted.workers, predicted.efficiency, color="0.4", ls="--", lw=1, label="predicted")
    ax.axhline(1, color="0.3", lw=0.8, ls=":")
    ax.set(ylabel="efficiency", ylim=(0, None))
    return plots.name_lines(_against_workers(ax))


def accuracy(ax, table, x, by="framework"):
    """Plot test accuracy in percent against column `x`, a line for each value of `by`; the table has a `framework`.

    Names have their framework's colour and, for several of one framework, other dashes; numbers have a colour scale.
    """
    numbers = is_numeric_dtype(table[by])
    shades = iter(sns.color_palette("viridis", table[by].nunique()))
    dashes = {name: iter(("-", "--", ":")) for name in table.framework}
    for name, own in table.groupby(by, sort=numbers):
        framework = own.framework.iloc[0]
        style = _style(framework) | ({"color": next(shades)} if numbers else {"ls": next(dashes[framework])})
        ax.plot(own[x], 100 * own.accuracy, label=name, **style)
    beside = [line for other in ax.get_shared_y_axes().get_siblings(ax) for line in other.lines]
    ax.set(xlabel=x, ylabel="test accuracy (%)", ylim=(0, 1.05 * max(line.get_ydata().max() for line in beside)))
    if numbers:
        ax.set_title(f"names: {by}", fontsize=SMALL, loc="right")
    return plots.name_lines(ax)


def costs(ax, table, cost):
    """Plot a labelled bar for each line of a table of `what`, `framework` and a cost."""
    table = table[::-1]
    bars = ax.barh(table.what, table[cost], color=[FRAMEWORKS[name].colour for name in table.framework], height=0.6)
    ax.bar_label(bars, fmt=" {:.0f}", fontsize=SMALL)
    ax.set(xlabel=cost, xlim=(0, 1.15 * table[cost].max()))
    ax.tick_params(axis="y", labelsize=SMALL)
    return ax


def sums(ax, sizes, seconds, fitted):
    """Plot the time of a sum over workers against its bytes: median and range of seconds [size, repeat], and a fit."""
    middle = np.median(seconds, axis=1)
    spread = [middle - seconds.min(1), seconds.max(1) - middle]
    ax.errorbar(sizes / 1e6, 1e3 * middle, [1e3 * side for side in spread], fmt="o", ms=3, lw=1, label="measured")
    ax.plot(sizes / 1e6, 1e3 * fitted, color="0.4", ls="--", lw=1, label="latency and bandwidth")
    ax.set(xlabel="message (MB)", ylabel="sum over workers (ms)")
    plots.logarithmic(ax)
    ax.legend(fontsize=SMALL)
    return ax


def _style(name):
    label = FRAMEWORKS[name]
    return {"color": label.colour, "marker": label.marker, "ms": 4, "lw": 1}


def _open(ax, own, column):
    shared = own[own.oversubscribed]
    name = own.framework.iloc[0]
    ax.plot(shared.workers, shared[column], **(_style(name) | {"ls": "", "mfc": "white", "zorder": 3}))


def _against_workers(ax):
    ax.set_xscale("log", base=2)
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(FixedLocator([2**power for power in range(12) if low <= 2**power <= high]))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="workers")
    return ax
