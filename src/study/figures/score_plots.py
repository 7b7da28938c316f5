"""Figures of predictions and scores that stages share: functions take arrays and an Axes and return the Axes."""

import numpy as np
import seaborn as sns

from study.figures import labels
from study.figures.labels import OURS
from study.figures.plots import COLOURS, SMALL


def confusion(ax, counts, title, *, limit=None):
    """Plot a confusion matrix [true, predicted] of row shares in percent.

    limit : the colours' limit for a difference of two matrices in percentage points: red is less, blue more; less than
        half a point has no number
    """
    counts = np.asarray(counts)
    form, least, colours = ".0f", 0.05, {"vmin": 0, "vmax": 100, "cmap": "Blues"}
    if limit is not None:
        form, least, colours = ".1f", 0.5, {"vmin": -limit, "vmax": limit, "cmap": "RdBu"}
    text = np.vectorize(lambda v: "" if abs(v) < least else format(v, form))(counts)
    sns.heatmap(counts, annot=text, fmt="", ax=ax, cbar=False, square=True, annot_kws={"size": SMALL}, **colours)
    ax.set(xlabel="predicted", ylabel="true")
    ax.set_title(title, fontsize=SMALL + 1)
    ax.tick_params(length=0, labelsize=SMALL)
    return ax


def median_and_range(ax, x, values, style, label):
    """Plot values [x, member]: the members' median as a line, their range as a band."""
    values = np.asarray(values)
    (line,) = ax.plot(x, np.median(values, axis=1), style, color=COLOURS[OURS], lw=1.2, label=label)
    ax.fill_between(x, values.min(1), values.max(1), color=line.get_color(), alpha=0.2, lw=0)
    return ax


def accuracy_against_size(ax, curve, member, label):
    """Plot an ensemble's accuracy in percent [draw, size] against its size, and the average member's."""
    size = np.arange(1, curve.shape[1] + 1)
    (line,) = ax.plot(size, curve.mean(0), lw=1.5, label=label)
    ax.fill_between(size, curve.min(0), curve.max(0), color=line.get_color(), alpha=0.2, lw=0)
    ax.axhline(member, color=line.get_color(), lw=0.8, ls=":")
    ax.set(xlabel="networks in the ensemble", ylabel="accuracy (%)")
    return ax


def fold_scores(ax, frame, intervals, chance=None):
    """Plot each fold's accuracy in percent, the mean and its interval: a table of model, schedule, accuracy.

    intervals : {(model, schedule): (mean, low, high)}, percent; chance : the accuracy of guessing, a line
    """
    if chance is not None:
        ax.axhline(chance, color="0.5", lw=0.8, ls=":", label="chance")
    for position, ((model, schedule), (mean, low, high)) in enumerate(intervals.items()):
        own = frame[(frame.model == model) & (frame.schedule == schedule)].accuracy
        texts = [None, None] if position else ["one fold", "mean, 95 % interval"]
        ax.plot(np.full(len(own), position - 0.12), own, "o", ms=2.5, color=COLOURS["member"], label=texts[0])
        kwargs = {"fmt": "s", "ms": 3, "lw": 1, "color": COLOURS[OURS], "label": texts[1]}
        ax.errorbar(position + 0.12, mean, [[mean - low], [high - mean]], **kwargs)
    names = [f"{labels.WORKLOADS.get(model, model)}\n{schedule}" for model, schedule in intervals]
    ax.set(xticks=range(len(names)), ylabel="accuracy on held-out rows (%)")
    ax.set_xticklabels(names, fontsize=SMALL)
    ax.legend(fontsize=SMALL)
    return ax


def class_scores(ax, table):
    """Plot accuracies of classes in percent: a table with a line for each kind of network, a column for each class."""
    sns.heatmap(
        table, annot=True, fmt=".0f", cmap="Blues", vmin=0, vmax=100, cbar=False, ax=ax, annot_kws={"size": SMALL}
    )
    ax.set(xlabel="class", ylabel="")
    ax.tick_params(length=0, labelsize=SMALL)
    return ax
