"""Figures of federated learning: rows by client, accuracy by round and by client; functions take an Axes."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import MaxNLocator

from study.figures import plots
from study.figures.labels import OURS
from study.figures.plots import COLOURS, SMALL


def dealt(ax, rows, labels, title):
    """Plot the first clients' rows of each class: rows int [client, row], padded with -1; labels int [row]."""
    counts = np.array([np.bincount(labels[own[own >= 0]], minlength=labels.max() + 1) for own in np.asarray(rows)[:20]])
    left = np.zeros(len(counts))
    for number, share in enumerate(counts.T):
        ax.barh(np.arange(len(counts)), share, left=left, color=sns.color_palette("tab10")[number % 10], height=0.85)
        left += share
    ax.set(xlabel="rows", yticks=[])
    ax.set_title(title, fontsize=SMALL + 1)
    sns.despine(ax=ax, left=True)
    return ax


def accuracies(ax, curves, target=None):
    """Plot test accuracy against rounds: {label: (rounds, accuracies)}."""
    for name, (rounds, values) in curves.items():
        ax.plot(rounds, 100 * np.asarray(values), lw=1.2, label=name)
    if target is not None:
        ax.axhline(100 * target, color="0.6", lw=0.7, ls="--")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="rounds", ylabel="test accuracy (%)")
    return ax


def clients(ax, found):
    """Plot each client's accuracy on its own held-out rows and the mean: {label: accuracies [client]}."""
    lines = [(name, 100 * value) for name, each in found.items() for value in each]
    table = pd.DataFrame(lines, columns=["label", "value"])
    sns.stripplot(table, x="value", y="label", hue="label", ax=ax, size=2, alpha=0.6, jitter=0.3, legend=False)
    for position, each in enumerate(found.values()):
        ax.plot([100 * np.mean(each)] * 2, [position - 0.35, position + 0.35], color="black", lw=1.2)
    ax.set(xlabel="accuracy on own held-out rows (%)", ylabel="")
    ax.tick_params(axis="y", labelsize=SMALL)
    return ax


def seconds(ax, table):
    """Plot milliseconds per round, logarithmic, a point for each line of a table of network, method, seconds."""
    for position, network in enumerate(table.network.unique()):
        for method, colour, shift in ((OURS, COLOURS[OURS], -0.12), ("PyTorch", COLOURS["PyTorch"], 0.12)):
            each = 1000 * table[(table.network == network) & (table.method == method)].seconds
            label = None if position else method
            ax.plot(each, [position + shift] * len(each), "o", color=colour, ms=4, label=label)
    ax.set(yticks=range(table.network.nunique()), yticklabels=table.network.unique(), xlabel="milliseconds per round")
    ax.invert_yaxis()
    plots.logarithmic(ax, "x")
    ax.legend(fontsize=SMALL)
    return ax


def privacy(ax, table):
    """Plot accuracy against epsilon, logarithmic, annotated with the noise: a table of noise, accuracy, epsilons.

    Each column that begins with "epsilon" is a line, for one number of clients with the same noise on their mean.
    """
    for name in table.filter(like="epsilon"):
        label = name.removeprefix("epsilon").removeprefix(" of ") or "these clients"
        ax.plot(table[name], 100 * table.accuracy, "o-", ms=4, lw=1, label=label)
    for line in table.itertuples():
        point = (line.epsilon, 100 * line.accuracy)
        ax.annotate(f"{line.noise:g}", point, (-2, 4), textcoords="offset points", fontsize=SMALL, ha="right")
    ax.set_xscale("log")
    ax.margins(x=0.12, y=0.25)
    ax.set(xlabel="epsilon of a client", ylabel="test accuracy (%)")
    ax.legend(fontsize=SMALL, ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1))
    return ax
