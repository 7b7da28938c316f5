"""Figures of federated learning: who has which rows, rounds against accuracy, what each client gets; an Axes in."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import MaxNLocator

from study.figures import plots
from study.figures.labels import OURS
from study.figures.plots import COLOURS, SMALL


def dealt(ax, rows, labels, title):
    """How many rows of each class the first clients have: rows int [client, row], -1 at the end; labels int [row]."""
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
    """Test accuracy against rounds: {what: (rounds, accuracies)}, each a line with its name."""
    for name, (rounds, values) in curves.items():
        ax.plot(rounds, 100 * np.asarray(values), lw=1.2, label=name)
    if target is not None:
        ax.axhline(100 * target, color="0.6", lw=0.7, ls="--")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="rounds", ylabel="test accuracy (%)")
    ax.legend(fontsize=SMALL)
    sns.despine(ax=ax)
    return ax


def clients(ax, found):
    """The accuracy of each client on its own held-out rows: {what: accuracies [client]}, a point a client."""
    table = pd.DataFrame(
        [(name, 100 * value) for name, each in found.items() for value in each], columns=["who", "value"]
    )
    sns.stripplot(table, x="value", y="who", hue="who", ax=ax, size=2, alpha=0.6, jitter=0.3, legend=False)
    for place, each in enumerate(found.values()):
        ax.plot([100 * np.mean(each)] * 2, [place - 0.35, place + 0.35], color="black", lw=1.2)
    ax.set(xlabel="accuracy on own held-out rows (%)", ylabel="")
    ax.tick_params(axis="y", labelsize=SMALL)
    sns.despine(ax=ax)
    return ax


def seconds(ax, table):
    """Milliseconds of a round by way and network, one training a point; logarithmic: a table of these and seconds."""
    for place, network in enumerate(table.network.unique()):
        for way, colour, shift in ((OURS, COLOURS[OURS], -0.12), ("PyTorch", COLOURS["PyTorch"], 0.12)):
            each = 1000 * table[(table.network == network) & (table.way == way)].seconds
            ax.plot(each, [place + shift] * len(each), "o", color=colour, ms=4, label=way if not place else None)
    ax.set(yticks=range(table.network.nunique()), yticklabels=table.network.unique(), xlabel="milliseconds a round")
    ax.invert_yaxis()
    plots.logarithmic(ax, "x")
    ax.legend(fontsize=SMALL)
    sns.despine(ax=ax)
    return ax


def privacy(ax, table):
    """Accuracy against epsilon, logarithmic, with the noise of each point: a table of noise, accuracy and epsilons.

    Columns that begin with "epsilon" are a line each; of more clients the noise on their mean is the same.
    """
    for name in table.filter(like="epsilon"):
        who = name.removeprefix("epsilon").removeprefix(" of ") or "these clients"
        ax.plot(table[name], 100 * table.accuracy, "o-", ms=4, lw=1, label=who)
    for line in table.itertuples():
        place = (line.epsilon, 100 * line.accuracy)
        ax.annotate(f"{line.noise:g}", place, (-2, 4), textcoords="offset points", fontsize=SMALL, ha="right")
    ax.set_xscale("log")
    ax.margins(x=0.12, y=0.25)
    ax.set(xlabel="epsilon of a client", ylabel="test accuracy (%)")
    ax.legend(fontsize=SMALL, ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1))
    sns.despine(ax=ax)
    return ax
