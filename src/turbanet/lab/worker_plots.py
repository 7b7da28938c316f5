"""Figures of many workers on one network: who talks to whom, losses, staleness, speed-ups; arrays and an Axes in."""

import numpy as np
import seaborn as sns
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from turbanet.lab import plots, workers
from turbanet.lab.labels import DDP, DOWNPOUR, HOGWILD, LOCAL, MARKERS
from turbanet.lab.plots import COLOURS, SMALL

FRAMEWORK_MARKERS = "osD^vPX*<>"
ARCHITECTURES = {  # the way: what stands above the workers, what an arrow is
    HOGWILD: ("weights in shared memory", "every step, no lock"),
    DOWNPOUR: ("parameter server", "every few steps, own pace"),
    DDP: ("mean of the gradients", "every step, all wait"),
    LOCAL: ("mean of the weights", "every few steps, compiled"),
}


def architectures(axes):
    """Who talks to whom, a schematic of four ways in as many Axes: two workers with rows of their own below."""
    for ax, (way, (above, arrow)) in zip(axes, ARCHITECTURES.items(), strict=True):
        _box(ax, 0.5, 0.82, above, COLOURS[way])
        for x, worker in ((0.23, "worker 1"), (0.77, "worker 2")):
            own = f"{worker}\n" + ("one set of weights" if way == HOGWILD else "own copy")
            _box(ax, x, 0.42, worker if way == HOGWILD else own, "0.45", width=0.42)
            _box(ax, x, 0.08, "own rows", "0.75", width=0.42, height=0.12)
            _arrow(ax, (x, 0.15), (x, 0.32), "->")
            _arrow(ax, (x, 0.53), (0.5 + 0.4 * (x - 0.5), 0.72), "<->")
        ax.set_title(f"{way}\n{arrow}", fontsize=SMALL)
        ax.set(xlim=(0, 1), ylim=(0, 0.95))
        ax.set_axis_off()
    return axes


def losses(axes, runs, *, target=None):
    """Mean training loss of the last epoch's batches, {way: (table of losses, batches of an epoch)}: time, epochs."""
    for way, (table, window) in runs.items():
        mean = workers.smoothed(table, window)
        style = {"color": COLOURS[way], "lw": 1.1, "label": way}
        axes[0].plot(table.seconds, mean, **style)
        axes[1].plot(np.arange(1, len(table) + 1) / window, mean, **style)
    for ax, name in zip(axes, ("seconds of training", "epochs of rows seen"), strict=True):
        if target is not None:
            ax.axhline(target, color="0.5", lw=0.8, ls=":")
        ax.set(xlabel=name, ylabel="training loss (nats)")
        sns.despine(ax=ax)
    axes[0].legend(fontsize=SMALL)
    return axes


def staleness(ax, runs):
    """How many updates of others came between a worker's reading and its writing: {way: table of losses}, shares."""
    most = 0
    for way, table in runs.items():
        share = table.behind.value_counts(normalize=True).sort_index()
        most = max(most, share[share > 0.001].index.max())
        ax.plot(share.index, 100 * share, MARKERS[way], ls="-", ms=3, lw=1, color=COLOURS[way], label=way)
    ax.set(xlabel="updates behind", ylabel="steps (%)", xlim=(-0.3, most + 0.3))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=SMALL)
    sns.despine(ax=ax)
    return ax


def speed_ups(ax, table, base):
    """Time of `base` over each way's, to the same loss: a table of way and speed-up, one bar each, 1 marked."""
    table = table[::-1]
    ax.barh(table.way, table["speed-up"], color=[COLOURS[way] for way in table.way], height=0.65)
    for place, value in enumerate(table["speed-up"]):
        ax.text(value, place, f" {value:.2f}", va="center", fontsize=SMALL)
    ax.axvline(1, color="0.3", lw=0.8, ls=":")
    ax.set(xlabel=f"times as fast as {base}", xlim=(0, 1.15 * table["speed-up"].max()))
    ax.tick_params(axis="y", labelsize=SMALL)
    sns.despine(ax=ax)
    return ax


def _box(ax, x, y, text, colour, width=0.86, height=0.2):
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, "round,pad=0,rounding_size=0.03", fc="white", ec=colour, lw=1
    )
    ax.add_patch(shape)
    ax.text(x, y, text, ha="center", va="center", fontsize=SMALL)


def _arrow(ax, begin, end, style):
    ax.add_patch(FancyArrowPatch(begin, end, arrowstyle=style, mutation_scale=6, lw=0.8, color="0.3"))


def throughput(ax, table, predicted):
    """Rows a second against workers, logarithmic: measured, with the range of the runs, and predicted, dashed.

    table : framework, workers, images a second, low, high; predicted : workers, images a second
    """
    for number, (name, own) in enumerate(table.groupby("framework")):
        middle = own["images a second"]
        ax.errorbar(
            own.workers,
            middle,
            [middle - own.low, own.high - middle],
            fmt=FRAMEWORK_MARKERS[number % len(FRAMEWORK_MARKERS)],
            ls="-",
            ms=3,
            lw=1,
            color=f"C{number % 10}",
            label=name,
        )
    ax.plot(predicted.workers, predicted["images a second"], color="0.4", ls="--", lw=1, label="predicted")
    ax.set(xlabel="workers", ylabel="images a second")
    plots.logarithmic(ax)
    ax.legend(fontsize=SMALL)
    sns.despine(ax=ax)
    return ax


def sums(ax, sizes, seconds, fitted):
    """Seconds of a sum over workers against the bytes of its message: median and range of [size, repeat], and a fit."""
    middle = np.median(seconds, axis=1)
    spread = [middle - seconds.min(1), seconds.max(1) - middle]
    ax.errorbar(sizes / 1e6, 1e3 * middle, [1e3 * side for side in spread], fmt="o", ms=3, lw=1, label="measured")
    ax.plot(sizes / 1e6, 1e3 * fitted, color="0.4", ls="--", lw=1, label="latency and bandwidth")
    ax.set(xlabel="message (MB)", ylabel="sum over workers (ms)", xscale="log", yscale="log")
    ax.legend(fontsize=SMALL)
    sns.despine(ax=ax)
    return ax
