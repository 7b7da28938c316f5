"""Figures of the projection to many machines: sleeping shards with their prediction, seconds by machines."""

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from study.cluster.projection import PARTS
from study.figures.plots import COLOURS, SMALL, logarithmic

NAMES = {  # part: name and colour in figures
    "training_seconds": ("training", "#0173b2"),
    "shard_seconds": ("shards, beside training", "#56b4e9"),
    "first_seconds": ("compilation and imports", "#949494"),
    "dispatch_seconds": ("handing out shards", "#d55e00"),
    "disk_seconds": ("shared folder", "#de8f05"),
    "gather_seconds": ("gathering", "#029e73"),
}


def predicted_and_measured(ax: object, table: pd.DataFrame) -> object:
    """Plot seconds against workers: measured points, the predicted line, the ideal without waiting dashed.

    table : from `projection.beside_measured`
    """
    ax.plot(table.workers, table.ideal_seconds, "--", color="0.6", lw=1, label="nobody waits")
    ax.plot(table.workers, table.predicted_seconds, color="#0173b2", lw=1.2, label="predicted")
    ax.plot(table.workers, table.seconds, "o", color=COLOURS["truth"], ms=4, label="measured")
    ax.set_xscale("log", base=2)
    ax.set(xticks=sorted(set(table.workers)), xlabel="workers", ylabel="seconds")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_ylim(0, 1.15 * table[["seconds", "predicted_seconds", "ideal_seconds"]].to_numpy().max())
    ax.legend(fontsize=SMALL, loc="lower right")
    return ax


def over_machines(ax: object, table: pd.DataFrame) -> object:
    """Plot seconds of each part and of the whole, in black, against machines, logarithmic, to show bottlenecks.

    table : from `projection.projected`
    """
    for part in PARTS:
        name, colour = NAMES[part]
        ax.plot(table.machines, table[part], "o-", color=colour, ms=2.5, lw=1, label=name)
    ax.plot(table.machines, table.seconds, color=COLOURS["truth"], lw=2, alpha=0.8, label="all of it")
    logarithmic(ax)
    ax.set(xticks=table.machines[:: max(1, int(np.ceil(len(table) / 6)))], xlabel="machines", ylabel="seconds")
    ax.legend(fontsize=SMALL, loc="lower left", bbox_to_anchor=(-0.15, 1), ncols=2, borderaxespad=0.2, columnspacing=1)
    return ax
