"""Figures of evolution: fitness, descent, hyperparameters; functions take an Axes and return it."""

import numpy as np
import seaborn as sns
from matplotlib.collections import LineCollection
from matplotlib.ticker import MaxNLocator

from study.figures import plots
from study.figures.labels import OURS
from study.figures.plots import COLOURS, SMALL
from turbanet.evolution.genealogy import NOBODY


def fitness(ax, curves):
    """Plot mean fitness against generation, {rule: [seed, generation]}: the mean over seeds within their range."""
    palette = sns.color_palette("colorblind", len(curves))
    for (name, found), colour in zip(curves.items(), palette, strict=True):
        generation = np.arange(found.shape[1])
        ax.fill_between(generation, found.min(0), found.max(0), color=colour, alpha=0.2, lw=0)
        ax.plot(generation, found.mean(0), color=colour, lw=1.2, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="generation", ylabel="mean return", ylim=(0, None))
    return plots.name_lines(ax)


def genealogy(ax, history):
    """Plot all members by rank, the fittest on top, joined to their parents, and the best member's line of descent."""
    rank = np.argsort(np.argsort(-history.fitness, axis=1), axis=1)
    ids, parents = history.member.tolist(), history.parents.tolist()
    ranks = [dict(zip(*of_generation, strict=True)) for of_generation in zip(ids, rank, strict=True)]
    lines = []
    for generation in range(1, len(ids)):
        for member, of_member in zip(ids[generation], parents[generation], strict=True):
            end = generation, ranks[generation][member]
            lines += [((generation - 1, ranks[generation - 1][one]), end) for one in of_member if one != NOBODY]
    best = history.lineage()
    line = [(generation, ranks[generation][member]) for generation, member in zip(best.generation, best.member)]
    ax.add_collection(LineCollection(lines, colors=[(*COLOURS["member"][:3], 0.35)], linewidths=0.4))
    ax.plot(*np.transpose(line), "o-", color=COLOURS[OURS], ms=3, lw=1.5)
    ax.set(xlabel="generation", ylabel="rank by fitness", xlim=(-0.3, len(rank) - 0.7), ylim=(rank.shape[1], -1))
    return ax


def founders(history):
    """Count the members of each generation that descend, by first parents, from each founder: [generation, founder]."""
    founder = {int(member): number for number, member in enumerate(history.member[0])}
    counts = [np.ones(len(founder), int)]
    for members, parents in zip(history.member[1:], history.parents[1:, :, 0], strict=True):
        founder = {int(member): founder[int(parent)] for member, parent in zip(members, parents, strict=True)}
        counts.append(np.bincount(list(founder.values()), minlength=len(counts[0])))
    return np.array(counts)


def descent(ax, counts):
    """Plot each founder's share of each generation, counts [generation, founder], the largest at the bottom."""
    shares = 100 * counts / counts.sum(1, keepdims=True)
    order = np.lexsort((-counts.sum(0), -counts[-1]))
    colours = sns.color_palette("colorblind", 10)
    ax.stackplot(np.arange(len(shares)), shares.T[order], colors=colours, lw=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="generation", ylabel="descendants of a founder (%)", xlim=(0, len(shares) - 1), ylim=(0, 100))
    return ax


def schedules(ax, history, name, label):
    """Plot a hyperparameter against rounds: the range of all members, their median, the best member's descent."""
    rounds, values = np.arange(len(history.fitness)), history.values[name]
    ax.fill_between(rounds, values.min(1), values.max(1), color=COLOURS["member"], alpha=0.3, lw=0)
    ax.plot(rounds, np.median(values, axis=1), color="0.4", lw=1, label="median")
    ax.plot(rounds, history.lineage()[name], "o-", color=COLOURS[OURS], ms=3, lw=1.5, label="of the best")
    ax.set(xlabel="round", ylabel=label)
    return plots.name_lines(plots.logarithmic(ax, "y"))


def paired(ax, differences):
    """Plot differences to a baseline {label: [seed]} in percentage points, with mean and 95 % interval."""
    from study.measurement.timing import interval

    for position, found in enumerate(differences.values()):
        low, high = interval(found)
        ax.plot(found, np.full(len(found), position) + 0.18, ".", color=COLOURS["member"], ms=4)
        ax.errorbar(
            found.mean(),
            position,
            xerr=[[found.mean() - low], [high - found.mean()]],
            fmt="o",
            ms=4,
            capsize=3,
            color=COLOURS[OURS],
            lw=1.2,
        )
    ax.axvline(0, color="0.4", ls=":", lw=1)
    ax.set(yticks=range(len(differences)), yticklabels=list(differences), ylim=(-0.6, len(differences) - 0.4))
    ax.tick_params(axis="y", labelsize=SMALL)
    ax.set_xlabel("difference in test accuracy\n(percentage points)", fontsize=SMALL + 1)
    return ax


def quantiles(ax, table):
    """Plot each column of a table with a line for each generation."""
    for name, column in table.items():
        ax.plot(column.to_numpy(), "o-", ms=3, lw=1, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="generation", ylabel="true return", ylim=(0, None))
    ax.legend(fontsize=SMALL)
    return ax


def reward_map(fig, ax, pays, first, second, names):
    """Map a reward network's reward [second, first] over two observed numbers, the others at 0."""
    extent = (first[0], first[-1], second[0], second[-1])
    image = ax.imshow(pays, origin="lower", extent=extent, aspect="auto", cmap="cividis")
    fig.colorbar(image, ax=ax, label="reward")
    ax.spines[:].set_visible(True)
    ax.set(xlabel=names[0], ylabel=names[1])
    return ax
