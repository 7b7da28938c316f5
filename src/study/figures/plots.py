"""Figures that stages share: functions take arrays and an Axes and return the Axes; colours are the same everywhere."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy.optimize import isotonic_regression

from study.figures import labels
from study.figures.labels import LOOP, MARKERS, OURS

COLUMN, PAGE = 3.5, 7.2  # inches: widths of one and of two columns of a paper
SMALL = 7  # points at print size, the smallest type
COLOURS = {name: to_rgb(colour) for name, colour in labels.COLOURS.items()}


def style():
    """Set a style that is readable at column width without scaling, whatever the user's own."""
    plt.rcdefaults()
    sns.set_theme(style="ticks", context="paper", font_scale=0.9, palette="colorblind")
    plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False, "savefig.dpi": 200})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def concept(axes, lanes=8):
    """Draw the idea in two Axes: as many networks as the device has lanes, one after the other and together."""
    for ax, title, method in zip(axes, ("one after the other", "together"), (LOOP, OURS), strict=True):
        for lane in range(lanes):
            ax.add_patch(Rectangle((0, lane), lanes, 0.8, facecolor="0.95", edgecolor="0.8", lw=0.6))
        for network in range(lanes):
            x, lane = (0, network) if method == OURS else (network, 0)
            shape = "round,pad=0,rounding_size=0.15"
            ax.add_patch(FancyBboxPatch((x + 0.08, lane + 0.1), 0.84, 0.6, shape, color=COLOURS[method], lw=0))
        ax.set(xlim=(-0.1, lanes + 0.1), ylim=(-0.2, lanes), xticks=[], yticks=[])
        ax.set_title(f"{lanes} networks,\n{title}", fontsize=SMALL + 1)
        ax.set_xlabel("time (schematic)", fontsize=SMALL + 1)
        sns.despine(ax=ax, left=True, bottom=True)
    axes[0].set_ylabel(f"a device of {lanes} lanes", fontsize=SMALL + 1)
    return axes


def time_against_size(ax, times):
    """Plot median seconds against swarm size, logarithmic, with the repeats' range; dashed: ours cold.

    times : a table of method, members, seconds, compile_seconds
    """
    for method, group in times.groupby("method", sort=False):
        size = group.groupby("members")
        middle, low, high = size.seconds.median(), size.seconds.min(), size.seconds.max()
        kwargs = {"color": COLOURS[method], "lw": 1}
        ax.errorbar(
            middle.index, middle, [middle - low, high - middle], marker=MARKERS[method], ms=3, label=method, **kwargs
        )
        if method == OURS:
            cold = middle + size.compile_seconds.first()
            ax.plot(cold.index, cold, ls="--", label=f"{method}, cold", **kwargs)
    ax.set(xlabel="networks trained", ylabel="training time (s)")
    return _against_size(ax)


def ratio_against_size(ax, table, base=OURS):
    """Plot each method's time over that of `base` at the same size: a table of method, members, ratio, low, high."""
    for method, part in table[table.method != base].groupby("method", sort=False):
        error = [part.ratio - part.low, part.high - part.ratio]
        ax.errorbar(
            part.members,
            part.ratio,
            error,
            color=COLOURS[method],
            marker=MARKERS[method],
            ms=3,
            lw=1,
            capsize=1.5,
            label=method,
        )
    ax.axhline(1, color=COLOURS[base], lw=1, label=base)
    ax.set(xlabel="networks trained", ylabel=f"time relative to {base}")
    return _against_size(ax)


def _against_size(ax):
    """Scale x, a number of networks, in powers of two and y logarithmically."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))
    return name_lines(logarithmic(ax, "y"))


def name_lines(ax):
    """Write the name of each labelled line behind its right end, in its colour; names do not overlap."""
    handles, names = ax.get_legend_handles_labels()
    lines = [handle.lines[0] if hasattr(handle, "lines") else handle for handle in handles]
    ends = [line.get_xydata()[np.isfinite(line.get_xydata()).all(axis=1)][-1] for line in lines]
    height = ax.transAxes.inverted().transform(ax.transData.transform(ends))[:, 1]
    gap = 1.3 * SMALL / 72 / (ax.figure.get_figheight() * ax.get_position().height)
    order = np.argsort(height, kind="stable")
    apart = gap * np.arange(len(order))
    placed = isotonic_regression(height[order] - apart).x + apart  # the nearest places that are so far apart
    for y, number in zip(placed, order, strict=True):
        style = {"color": lines[number].get_color(), "va": "center", "fontsize": SMALL, "annotation_clip": False}
        ax.annotate(names[number], (1, y), (4, 0), xycoords="axes fraction", textcoords="offset points", **style)
    return ax


def logarithmic(ax, which="both"):
    """Make the axes x, y or both logarithmic with plain numbers, at 1, 2 and 5 of each power on short axes."""
    for name in "xy" if which == "both" else which:
        ax.set(**{f"{name}scale": "log"})
        axis = getattr(ax, f"{name}axis")
        low, high = np.log10(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high - low < 1.7 else (1,)))
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(NullFormatter())
    return ax


def _plain(value, _):
    return np.format_float_positional(value, precision=6, trim="-")


def ratios_by_workload(axes, table):
    """Plot each workload's methods in its own Axes: time over TurbaNet's, warm with interval, cold hollow.

    axes : an array of Axes that share x and y; table : columns workload, method, ratio, low, high, cold_ratio
    """
    methods = [method for method in labels.METHODS if method in set(table.method)]
    for ax, (workload, part) in zip(axes.flat, table.groupby("workload", sort=False)):
        for row in part.itertuples():
            kwargs = {"color": COLOURS[row.method], "marker": MARKERS[row.method], "ms": 4, "lw": 1}
            error = [[row.ratio - row.low], [row.high - row.ratio]]
            ax.errorbar(row.ratio, methods.index(row.method), xerr=error, **kwargs)
            ax.plot(row.cold_ratio, methods.index(row.method), mfc="none", **kwargs)
        ax.axvline(1, color=COLOURS[OURS], lw=1)
        ax.set(yticks=range(len(methods)), yticklabels=methods, ylim=(len(methods) - 0.5, -0.5))
        ax.set_title(labels.WORKLOADS.get(workload, workload), fontsize=SMALL + 1)
        logarithmic(ax, "x").tick_params(labelsize=SMALL)
    for ax in list(axes.flat)[table.workload.nunique() :]:
        ax.set_axis_off()
    axes.flat[0].get_figure().supxlabel(f"time relative to {OURS} (filled: warm, hollow: cold)", fontsize=SMALL + 1)
    return axes


def roofline(ax, table, *, peak, bandwidths):
    """Plot each workload under the machine's ceilings: a table of workload, operations_per_byte, gflops.

    peak : GFLOP/s of matrix products; bandwidths : {name: GB/s}, the fastest first
    """
    few, many = table.operations_per_byte.min() / 3, table.operations_per_byte.max() * 3
    intensity = np.geomspace(few, many)
    for (name, speed), line in zip(bandwidths.items(), ("-", "--"), strict=True):
        label = f"{name}, {speed:.0f} GB/s{' (dashed)' if line == '--' else ''}"
        ax.plot(intensity, np.minimum(peak, intensity * speed), line, color="0.4", lw=1, label=label)
    for row, marker in zip(table.itertuples(), itertools.cycle("osD^v<>P")):
        label = labels.WORKLOADS.get(row.workload, row.workload)
        ax.plot(row.operations_per_byte, row.gflops, marker, ms=4, label=label)
    ax.set(xlabel="operations per byte of weights moved", ylabel="GFLOP/s of matrix products")
    return name_lines(logarithmic(ax))


def seconds_by_model(axes, times):
    """Plot seconds of each model in its own Axes, a point with its range a method.

    axes : Axes that share y; times : a table of model, method, seconds, low, high
    """
    methods = list(times.method.unique())
    for ax, (model, part) in zip(axes, times.groupby("model", sort=False), strict=True):
        for row in part.itertuples():
            error = [[row.seconds - row.low], [row.high - row.seconds]]
            style = {"color": COLOURS[row.method], "marker": MARKERS[row.method], "ms": 4, "lw": 1}
            ax.errorbar(row.seconds, methods.index(row.method), xerr=error, **style)
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": SMALL}
            ax.annotate(f"{row.seconds:.3g}", (row.seconds, methods.index(row.method)), **above)
        ax.set(yticks=range(len(methods)), yticklabels=methods, ylim=(len(methods) - 0.5, -0.7))
        ax.set(xlabel="training time (s)", xlim=(0, 1.2 * part.high.max()))
        ax.set_title(labels.WORKLOADS.get(model, model), fontsize=SMALL + 1)
        ax.tick_params(labelsize=SMALL)
    return axes


def use_of_cores(ax, frame, title):
    """Plot the cores' use and its mean against time: `machine.utilisation().frame`."""
    cores = frame.filter(like="core_")
    ax.plot(frame.seconds, cores, lw=0.5, color=COLOURS["member"])
    ax.plot(frame.seconds, cores.mean(axis=1), lw=1.2, color=COLOURS["truth"])
    ax.set(xlabel="seconds", ylabel="busy (%)", xlim=(0, None), ylim=(0, 105))
    ax.set_title(title, fontsize=SMALL)
    return ax
