"""Figures of many workers on one network: communication, losses, staleness, speed-ups; functions take an Axes."""

import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from study.data_parallel import workers
from study.figures import plots
from study.figures.labels import DDP, DOWNPOUR, HOGWILD, LOCAL, MARKERS
from study.figures.plots import COLOURS, SMALL

ARCHITECTURES = {  # method: the box above the workers, the meaning of an arrow
    HOGWILD: ("weights in shared memory", "every step, no lock"),
    DOWNPOUR: ("parameter server", "every few steps, own pace"),
    DDP: ("mean of the gradients", "every step, all wait"),
    LOCAL: ("mean of the weights", "every few steps, compiled"),
}


def architectures(axes):
    """Draw the communication of four methods, a schematic of two workers with their own rows in each Axes."""
    for ax, (method, (above, arrow)) in zip(axes, ARCHITECTURES.items(), strict=True):
        _box(ax, 0.5, 0.82, above, COLOURS[method])
        for x, worker in ((0.23, "worker 1"), (0.77, "worker 2")):
            own = f"{worker}\n" + ("one set of weights" if method == HOGWILD else "own copy")
            _box(ax, x, 0.42, worker if method == HOGWILD else own, "0.45", width=0.42)
            _box(ax, x, 0.08, "own rows", "0.75", width=0.42, height=0.12)
            _arrow(ax, (x, 0.15), (x, 0.32), "->")
            _arrow(ax, (x, 0.53), (0.5 + 0.4 * (x - 0.5), 0.72), "<->")
        ax.set_title(f"{method}\n{arrow}", fontsize=SMALL)
        ax.set(xlim=(0, 1), ylim=(0, 0.95))
        ax.set_axis_off()
    return axes


def losses(axes, runs, *, target=None):
    """Plot the moving mean loss over an epoch's batches against time and epochs: {method: (losses, batches)}."""
    for method, (table, window) in runs.items():
        mean = workers.smoothed(table, window)
        style = {"color": COLOURS[method], "lw": 1.1, "label": method}
        axes[0].plot(table.seconds, mean, **style)
        axes[1].plot(np.arange(1, len(table) + 1) / window, mean, **style)
    for ax, name in zip(axes, ("seconds of training", "epochs of rows seen"), strict=True):
        if target is not None:
            ax.axhline(target, color="0.5", lw=0.8, ls=":")
        ax.set(xlabel=name, ylabel="training loss (nats)")
    axes[0].legend(fontsize=SMALL)
    return axes


def staleness(ax, runs):
    """Plot the distribution of others' updates between a worker's read and write: {method: table of losses}."""
    most = 0
    for method, table in runs.items():
        share = table.behind.value_counts(normalize=True).sort_index()
        most = max(most, share[share > 0.001].index.max())
        ax.plot(share.index, 100 * share, MARKERS[method], ls="-", ms=3, lw=1, color=COLOURS[method], label=method)
    ax.set(xlabel="updates behind", ylabel="steps (%)", xlim=(-0.3, most + 0.3))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=SMALL)
    return ax


def speed_ups(ax, table, base):
    """Plot the time of `base` over each method's to the same loss: bars for a table of method, speed-up; 1 marked."""
    table = table[::-1]
    bars = ax.barh(table.method, table["speed-up"], color=[COLOURS[method] for method in table.method], height=0.65)
    ax.bar_label(bars, fmt=" {:.2f}", fontsize=SMALL)
    ax.axvline(1, color="0.3", lw=0.8, ls=":")
    ax.set_xlabel(f"times as fast as {base}", loc="right")  # the label is longer than the axis
    ax.set_xlim(0, 1.15 * table["speed-up"].max())
    ax.tick_params(axis="y", labelsize=SMALL)
    return ax


def _box(ax, x, y, text, colour, width=0.86, height=0.2):
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, "round,pad=0,rounding_size=0.03", fc="white", ec=colour, lw=1
    )
    ax.add_patch(shape)
    ax.text(x, y, text, ha="center", va="center", fontsize=SMALL)


def _arrow(ax, begin, end, style):
    ax.add_patch(FancyArrowPatch(begin, end, arrowstyle=style, mutation_scale=6, lw=0.8, color="0.3"))


def against_workers(ax, table):
    """Plot speed-ups over one thread against workers: a table of method, workers, speed-up, oversubscribed (open)."""
    for method, own in table.groupby("method", sort=False):
        kwargs = {"color": COLOURS[method], "marker": MARKERS[method], "ms": 4}
        ax.plot(own.workers, own["speed-up"], lw=1, label=method, **kwargs)
        shared = own[own.oversubscribed]
        ax.plot(shared.workers, shared["speed-up"], mfc="white", ls="", **kwargs)
    ax.axhline(1, color="0.3", lw=0.8, ls=":")
    ax.set(xlabel="workers", ylabel="times as fast as one thread", xticks=sorted(table.workers.unique()))
    return plots.name_lines(ax)


def seconds_of_seeds(ax, table):
    """Plot seconds to a loss, logarithmic: seeds as points, medians as lines; a table of method, seconds_to_loss."""
    methods = list(dict.fromkeys(table.method))[::-1]
    for position, method in enumerate(methods):
        seconds = table.seconds_to_loss[table.method == method]
        ax.plot(seconds, np.full(len(seconds), position), MARKERS[method], ms=3.5, color=COLOURS[method], alpha=0.7)
        ax.plot(2 * [seconds.median()], [position - 0.3, position + 0.3], color=COLOURS[method], lw=1.5)
    ax.set(xlabel="seconds to the loss", yticks=range(len(methods)), yticklabels=methods)
    ax.tick_params(axis="y", labelsize=SMALL)
    plots.logarithmic(ax, "x")
    return ax
