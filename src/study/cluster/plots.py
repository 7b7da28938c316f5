"""Figures of a swarm over machines: shards by worker over time, seconds by method; functions take an Axes."""

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from study.cluster.methods import JOBLIB, SHARDS, TASKS
from study.figures import labels, plots
from study.figures.labels import FRAMEWORKS, OURS
from study.figures.plots import COLOURS, SMALL

DEAD = "#d55e00"  # attempts that ended with their node
METHODS = {SHARDS: COLOURS[OURS], TASKS: FRAMEWORKS["JAX"].colour, JOBLIB: labels.COLOURS["PyTorch"]}


def timeline(ax, attempts, title=""):
    """Draw a line a worker and a numbered bar a shard: a table of shard, worker, begin, end (seconds), lost."""
    for one in attempts.itertuples():
        look = {"facecolor": "white", "edgecolor": DEAD, "hatch": "////"} if one.lost else {"facecolor": COLOURS[OURS]}
        ax.barh(one.worker, one.end - one.begin, left=one.begin, height=0.7, **{"edgecolor": "white"} | look)
        centre = (one.begin + one.end) / 2, one.worker
        box = {"boxstyle": "round,pad=0.1", "color": "white"} if one.lost else None
        colour = "black" if one.lost else "white"
        ax.text(*centre, one.shard, color=colour, fontsize=SMALL, ha="center", va="center", bbox=box)
    if attempts.lost.any():
        ax.axvline(attempts[attempts.lost].end.max(), color=DEAD, lw=1.2)
        lost = Patch(facecolor="white", edgecolor=DEAD, hatch="////")
        ax.legend([lost], ["lost with its node"], fontsize=SMALL, loc="lower right", bbox_to_anchor=(1, 1))
    ax.set(ylabel="worker", yticks=sorted(set(attempts.worker)))
    ax.set_title(title, fontsize=SMALL + 1, loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.invert_yaxis()
    return ax


def seconds(ax, table):
    """Plot milliseconds per network, logarithmic, a point for each line of a table of method, networks, seconds."""
    names = [f"{method}, {count:,}" for method, count in zip(table.method, table.networks)]
    for position, line in enumerate(table.itertuples()):
        value = 1000 * line.seconds / line.networks
        ax.plot([value], [position], "o", color=METHODS.get(line.method, COLOURS[OURS]), ms=5)
        ax.annotate(f"{value:.3g}", (value, position), (0, 5), textcoords="offset points", fontsize=SMALL, ha="center")
    ax.set(yticks=range(len(table)), yticklabels=names, xlabel="milliseconds per network")
    ax.set(ylim=(len(table) - 0.5, -0.7))
    plots.logarithmic(ax, "x")
    ax.margins(x=0.15)
    return ax
