"""Figures of agents: learning, costs, behaviour; functions take arrays and an Axes and return the Axes."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.animation import FuncAnimation
from matplotlib.patches import Rectangle

from study.figures import plots
from study.figures.labels import OURS, SCAN
from study.figures.plots import COLOURS, SMALL


def learning(ax, steps, returns, band):
    """Plot returns [update, member] against steps: the interquartile mean in its band, over the middle 80 % of members.

    Updates in which fewer than half of the members end an episode are left out: short episodes end first.

    band : (mean, low, high) [update]
    """
    some = np.isfinite(returns).mean(axis=1) >= 0.5
    steps, returns, (mean, low, high) = np.asarray(steps)[some], returns[some], np.asarray(band)[:, some]
    most = pd.DataFrame(returns).quantile([0.1, 0.9], axis=1).to_numpy()
    ax.fill_between(steps, *most, color=COLOURS["member"], alpha=0.3, lw=0)
    ax.fill_between(steps, low, high, color=COLOURS[OURS], alpha=0.3, lw=0)
    ax.plot(steps, mean, color=COLOURS[OURS], lw=1.5)
    ax.set(xlabel="steps in the environment", ylabel="return")
    return ax


def profile(ax, thresholds, curves):
    """Plot the share of members above each return: curves {label: [threshold]}."""
    for name, curve in curves.items():
        ax.step(thresholds, 100 * curve, where="post", lw=1.2, label=name)
    ax.set(xlabel="return", ylabel="agents above it (%)", ylim=(0, 105))
    ax.legend(fontsize=SMALL)
    return ax


def seconds_per_agent(ax, table):
    """Plot seconds of an agent, warm and cold, against the number trained: a table of members, warm, cold."""
    for kind, style in (("warm", "-"), ("cold", "--")):
        ax.plot(table.members, table[kind], style, color=COLOURS[OURS], marker="o", ms=3, lw=1, label=kind)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(plots.FuncFormatter(lambda value, _: f"{value:g}"))
    plots.logarithmic(ax, "y")
    ax.set(xlabel="agents trained", ylabel="seconds per agent")
    ax.legend(fontsize=SMALL)
    return ax


def costs(ax, table):
    """Plot a labelled point on a logarithmic axis for each line of a table of method and seconds."""
    in_jax = {OURS: COLOURS[OURS], "jit(vmap": COLOURS[SCAN]}
    for position, row in enumerate(table[::-1].itertuples()):
        colour = next((one for name, one in in_jax.items() if row.method.startswith(name)), COLOURS["PyTorch"])
        ax.plot(row.seconds, position, "o", color=colour, ms=5)
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": SMALL}
        ax.annotate(f"{row.seconds:.3g}", (row.seconds, position), **above)
    plots.logarithmic(ax, "x")
    ax.set(xlabel="seconds per agent", xlim=(table.seconds.min() / 3, 3 * table.seconds.max()))
    ax.set(yticks=range(len(table)), yticklabels=table.method[::-1], ylim=(-0.5, len(table) - 0.2))
    ax.tick_params(axis="y", labelsize=SMALL)
    return ax


def cart_poles(axes, states, names):
    """Draw a cart and its pole in each Axes: states (x, angle) in metres and radians."""
    for ax, (x, angle), name in zip(axes, states, names, strict=True):
        ax.plot([-2.4, 2.4], [0, 0], color="0.7", lw=0.8)
        ax.add_patch(Rectangle((x - 0.3, 0), 0.6, 0.3, color="0.3", lw=0))
        ax.plot([x, x + np.sin(angle)], [0.3, 0.3 + np.cos(angle)], color=COLOURS[OURS], lw=2)
        ax.set(xlim=(-2.6, 2.6), ylim=(-0.2, 1.6), aspect="equal", xticks=[], yticks=[])
        ax.set_title(name, fontsize=SMALL)
        sns.despine(ax=ax, left=True, bottom=True)
    return axes


def boards(axes, food, positions, names):
    """Draw the grid in each Axes: food [time, row, column], positions of agents [time, agent, 2]."""
    for ax, cells, position, name in zip(axes, food, positions, names, strict=True):
        ax.imshow(1 - cells, cmap="Greens_r", vmin=-0.6, vmax=1.0)
        ax.plot(position[:, 1], position[:, 0], "o", color=COLOURS[OURS], ms=2)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(True)
        ax.set_title(name, fontsize=SMALL)
    return axes


def movie(food, positions):
    """Animate `boards` over time."""
    fig, ax = plt.subplots(figsize=(2.6, 2.6))

    def frame(time):
        ax.clear()
        return boards([ax], food[[time]], positions[[time]], [f"frame {time}"])

    animation = FuncAnimation(fig, frame, frames=len(food), interval=150)
    plt.close(fig)
    return animation


def foraging(ax, steps, own, one, *, at_random):
    """Plot food eaten by each agent against steps: `own` networks (mean, low, high) [update], one network, random."""
    mean, low, high = own
    ax.fill_between(steps, low, high, color=COLOURS[OURS], alpha=0.3, lw=0)
    ax.plot(steps, mean, color=COLOURS[OURS], lw=1.2, label="a network each")
    ax.plot(steps, one, color=COLOURS["PyTorch"], lw=1.2, label="one network")
    ax.axhline(at_random, color="0.4", ls=":", lw=1, label="at random")
    ax.set(xlabel="steps", ylabel="food eaten per agent", ylim=(0, None))
    ax.legend(fontsize=SMALL)
    return ax


def returns_by(ax, x, returns, what):
    """Plot returns {label: [member]} against a number of each agent's environment on a logarithmic axis."""
    for (name, values), (mark, colour) in zip(returns.items(), (("o", COLOURS[OURS]), ("x", "0.4")), strict=True):
        ax.plot(x, values, mark, ms=3, color=colour, label=name)
    plots.logarithmic(ax, "x")
    ax.set(xlabel=what, ylabel="return", ylim=(0, None))
    ax.legend(fontsize=SMALL)
    return ax
