"""The study's figures: arrays and an Axes in, the Axes out; one colour for one thing in all of them."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.colors import to_rgb
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from study.figures import labels
from study.figures.labels import LOOP, MARKERS, OURS

COLUMN, PAGE = 3.5, 7.2  # inches: one column of a paper, two columns
SMALL = 7  # points, at print size: no type is smaller
COLOURS = {name: to_rgb(colour) for name, colour in labels.COLOURS.items()}


def style():
    """Readable at column width; the fonts of a figure are the fonts of the page."""
    sns.set_theme(style="ticks", context="paper", font_scale=0.9, palette="colorblind")
    plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False, "savefig.dpi": 200})


def concept(axes, lanes=8):
    """The idea, a schematic in two Axes: as many networks as the device has lanes, one after the other and together."""
    for ax, title, way in zip(axes, ("one after the other", "together"), (LOOP, OURS), strict=True):
        for lane in range(lanes):
            ax.add_patch(Rectangle((0, lane), lanes, 0.8, facecolor="0.95", edgecolor="0.8", lw=0.6))
        for network in range(lanes):
            x, lane = (0, network) if way == OURS else (network, 0)
            shape = "round,pad=0,rounding_size=0.15"
            ax.add_patch(FancyBboxPatch((x + 0.08, lane + 0.1), 0.84, 0.6, shape, color=COLOURS[way], lw=0))
        ax.set(xlim=(-0.1, lanes + 0.1), ylim=(-0.2, lanes), xticks=[], yticks=[])
        ax.set_title(f"{lanes} networks,\n{title}", fontsize=SMALL + 1)
        ax.set_xlabel("time (schematic)", fontsize=SMALL + 1)
        sns.despine(ax=ax, left=True, bottom=True)
    axes[0].set_ylabel(f"a device of {lanes} lanes", fontsize=SMALL + 1)
    return axes


def spirals(ax, x, y):
    """The two classes of points x [row, 2]."""
    ax.scatter(*x.T, c=np.asarray(y), cmap="coolwarm", s=8, linewidths=0)
    return ax.set(xticks=[], yticks=[], aspect="equal") and ax


def decision(ax, probability, x, y, extent):
    """One network's probability of class 1 on a grid [row, column], with its training points."""
    ax.imshow(probability, origin="lower", extent=extent, cmap="coolwarm", vmin=0, vmax=1, interpolation="bilinear")
    ax.scatter(*x.T, c=np.asarray(y), cmap="coolwarm", s=3, linewidths=0.2, edgecolors="white")
    ax.set(xticks=[], yticks=[])
    return ax


def decision_wall(fig, probability, x, y, extent):
    """Every member's decision boundary, probability [member, row, column], as a wall of small pictures."""
    columns = int(np.ceil(np.sqrt(len(probability))))
    grid = fig.subplots(-(-len(probability) // columns), columns, squeeze=False)
    for ax, one in zip(grid.flat, probability, strict=False):
        ax.imshow(one, origin="lower", extent=extent, cmap="coolwarm", vmin=0, vmax=1)
        ax.scatter(*x.T, c=np.asarray(y), cmap="coolwarm", s=0.4, linewidths=0)
    for ax in grid.flat:
        ax.set_axis_off()
    return grid


def losses(ax, frame, **kwargs):
    """Training loss against epoch: every member thin, their median thick; a `History.frame()`."""
    wide = frame.pivot_table(index="epoch", columns=["seed", "member"], values="train_loss")
    ax.plot(wide.index, wide, color=COLOURS["member"], lw=0.4, alpha=0.5)
    ax.plot(wide.index, wide.median(axis=1), color=COLOURS[OURS], lw=1.8, label="median member", **kwargs)
    ax.set(xlabel="epoch", ylabel="loss (nats)")
    return ax


def time_against_size(ax, times):
    """Median seconds against swarm size, both logarithmic, with the range of the repeats; ours with compilation dashed.

    times: a frame [way, members, seconds, compile_seconds].
    """
    for way, group in times.groupby("way", sort=False):
        size = group.groupby("members")
        middle, low, high = size.seconds.median(), size.seconds.min(), size.seconds.max()
        how = {"color": COLOURS[way], "lw": 1}
        ax.errorbar(middle.index, middle, [middle - low, high - middle], marker=MARKERS[way], ms=3, label=way, **how)
        if way == OURS:
            cold = middle + size.compile_seconds.first()
            ax.plot(cold.index, cold, ls="--", label=f"{way}, with its compilation", **how)
    ax.set(xlabel="networks trained", ylabel="training time (s)")
    return _against_size(ax)


def ratio_against_size(ax, table, base=OURS):
    """How many times longer each way takes than `base` at the same size: a frame [way, members, ratio, low, high]."""
    for way, part in table[table.way != base].groupby("way", sort=False):
        error = [part.ratio - part.low, part.high - part.ratio]
        ax.errorbar(
            part.members, part.ratio, error, color=COLOURS[way], marker=MARKERS[way], ms=3, lw=1, capsize=1.5, label=way
        )
    ax.axhline(1, color=COLOURS[base], lw=1, label=base)
    ax.set(xlabel="networks trained", ylabel=f"time over {base}'s")
    return _against_size(ax)


def _against_size(ax):
    """Numbers of networks along x, in powers of two; a logarithmic y."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))
    logarithmic(ax, "y")
    _legend_above(ax)
    sns.despine(ax=ax)
    return ax


def logarithmic(ax, which="both"):
    """The axes x, y or both logarithmic with plain numbers; at 1, 2 and 5 of each power where there are few."""
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
    """Each workload's ways in an Axes of its own: time over TurbaNet's, with its interval, and the cold one, hollow.

    axes: an array of Axes that share y; table: a frame [workload, way, ratio, low, high, cold_ratio].
    """
    ways = [way for way in labels.WAYS if way in set(table.way)]
    for ax, (workload, part) in zip(axes.flat, table.groupby("workload", sort=False)):
        for row in part.itertuples():
            how = {"color": COLOURS[row.way], "marker": MARKERS[row.way], "ms": 4, "lw": 1}
            error = [[row.ratio - row.low], [row.high - row.ratio]]
            ax.errorbar(row.ratio, ways.index(row.way), xerr=error, **how)
            ax.plot(row.cold_ratio, ways.index(row.way), mfc="none", **how)
        ax.axvline(1, color=COLOURS[OURS], lw=1)
        ax.set(yticks=range(len(ways)), yticklabels=ways, ylim=(len(ways) - 0.5, -0.5))
        ax.set_title(labels.WORKLOADS.get(workload, workload), fontsize=SMALL + 1)
        logarithmic(ax, "x").tick_params(labelsize=SMALL)
        sns.despine(ax=ax)
    for ax in list(axes.flat)[table.workload.nunique() :]:
        ax.set_axis_off()
    axes.flat[0].get_figure().supxlabel(f"time over {OURS}'s: filled warm, hollow cold", fontsize=SMALL + 1)
    return axes


def confusion(ax, counts, title, *, limit=None):
    """A confusion matrix [true, predicted] of row shares in percent.

    limit: that of the colours, for the difference of two in percentage points: red is less, blue more; one of less
    than half a point has no number.
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


def roofline(ax, table, *, peak, bandwidths):
    """Each workload under the machine's ceilings: a frame [workload, operations_per_byte, gflops].

    peak: GFLOP/s of matrix products; bandwidths: {name: GB/s}, the fastest first.
    """
    few, many = table.operations_per_byte.min() / 3, table.operations_per_byte.max() * 3
    intensity = np.geomspace(few, many)
    for (name, speed), line in zip(bandwidths.items(), ("-", "--"), strict=True):
        ax.plot(
            intensity, np.minimum(peak, intensity * speed), line, color="0.4", lw=1, label=f"{name}, {speed:.0f} GB/s"
        )
    for row, marker in zip(table.itertuples(), itertools.cycle("osD^v<>P")):
        label = labels.WORKLOADS.get(row.workload, row.workload)
        ax.plot(row.operations_per_byte, row.gflops, marker, ms=4, label=label)
    ax.set(xlabel="operations per byte of weights moved", ylabel="GFLOP/s of matrix products")
    ax.legend(fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncol=2, borderaxespad=0.2, columnspacing=1)
    sns.despine(ax=logarithmic(ax))
    return ax


def median_and_range(ax, x, values, style, label):
    """The median over members of values [x, member] as a line, all of them as a band."""
    values = np.asarray(values)
    (line,) = ax.plot(x, np.median(values, axis=1), style, color=COLOURS[OURS], lw=1.2, label=label)
    ax.fill_between(x, values.min(1), values.max(1), color=line.get_color(), alpha=0.2, lw=0)
    sns.despine(ax=ax)
    return ax


def reliability(ax, curves):
    """How often a model is right against how sure it is: curves {model: (confidence, accuracy)}, shares of one."""
    ax.plot([0, 1], [0, 1], color="0.6", lw=0.8)
    for (name, (confidence, accuracy)), marker in zip(curves.items(), "osD^v"):
        ax.plot(confidence, accuracy, marker=marker, ms=3, lw=1, label=name)
    ax.set(xlabel="confidence", ylabel="share right", xlim=(0, 1), ylim=(0, 1))
    ax.legend(fontsize=SMALL, loc="upper left")
    sns.despine(ax=ax)
    return ax


def accuracy_against_size(ax, curve, member, label):
    """Ensemble accuracy in percent [draw, size] against its size: mean and range; the average member's as a line."""
    size = np.arange(1, curve.shape[1] + 1)
    (line,) = ax.plot(size, curve.mean(0), lw=1.5, label=label)
    ax.fill_between(size, curve.min(0), curve.max(0), color=line.get_color(), alpha=0.2, lw=0)
    ax.axhline(member, color=line.get_color(), lw=0.8, ls=":")
    ax.set(xlabel="networks in the ensemble", ylabel="accuracy (%)")
    sns.despine(ax=ax)
    return ax


def error_distribution(ax, errors):
    """Distributions of each ticker's error, overlaid: errors {name: percent [ticker]}, on a log axis."""
    every = np.concatenate(list(errors.values()))
    bins = np.geomspace(every[every > 0].min(), every.max(), 40)
    for name, values in errors.items():
        way = OURS if name.startswith(OURS) else "PyTorch" if name.startswith("PyTorch") else "persistence"
        weights = np.full(len(values), 100 / len(values))
        label = f"{name} (median {np.median(values):.2f} %)"
        ax.hist(
            np.maximum(values, bins[0]), bins, weights=weights, histtype="step", color=COLOURS[way], lw=1.2, label=label
        )
        ax.axvline(np.median(values), color=COLOURS[way], lw=0.8, ls=":")
    ax.set(xlabel="average absolute error of a ticker (% of its price)", ylabel="share of tickers (%)")
    _legend_above(logarithmic(ax, "x"))
    sns.despine(ax=ax)
    return ax


def forecast(ax, dates, truth, predictions, title):
    """One ticker's test days: closes and predictions in US dollars; predictions {name: [day]}."""
    ax.plot(dates, truth, color=COLOURS["truth"], lw=1, label="truth")
    for name, values in predictions.items():
        way = "persistence" if name == "persistence" else OURS
        ax.plot(dates, values, color=COLOURS[way], lw=0.9, ls=":" if way == "persistence" else "-", label=name)
    ax.set_title(title, fontsize=SMALL)
    locator = AutoDateLocator(minticks=2, maxticks=6)
    ax.xaxis.set(major_locator=locator, major_formatter=ConciseDateFormatter(locator))
    ax.tick_params(labelsize=SMALL)
    sns.despine(ax=ax)
    return ax


def seconds_by_model(ax, times):
    """Seconds of every way for each model as bars with their range: a frame [model, way, seconds, low, high]."""
    models = list(times.model.unique())
    ways = list(times.way.unique())
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        part = times[times.way == way].set_index("model").reindex(models)
        place = np.arange(len(models)) + (i - (len(ways) - 1) / 2) * width
        error = [part.seconds - part.low, part.high - part.seconds]
        ax.bar(place, part.seconds, width, color=COLOURS[way], label=way, yerr=error, error_kw={"lw": 0.8})
    names = [labels.WORKLOADS.get(model, model) for model in models]
    ax.set(xticks=range(len(models)), xticklabels=names, ylabel="training time (s)")
    _legend_above(logarithmic(ax, "y"))
    sns.despine(ax=ax)
    return ax


def use_of_cores(ax, frame, title):
    """Every core's use against time, and their mean: `machine.utilisation().frame`."""
    cores = frame.filter(like="core_")
    ax.plot(frame.seconds, cores, lw=0.5, color=COLOURS["member"])
    ax.plot(frame.seconds, cores.mean(axis=1), lw=1.2, color=COLOURS["truth"])
    ax.set(xlabel="seconds", ylabel="busy (%)", xlim=(0, None), ylim=(0, 105))
    ax.set_title(title, fontsize=SMALL)
    sns.despine(ax=ax)
    return ax


def fold_scores(ax, frame, intervals, chance=None):
    """Each fold's accuracy in percent as a point, the mean and its interval beside: frame [model, schedule, accuracy].

    intervals: {(model, schedule): (mean, low, high)}, percent; chance: what guessing has right, as a line.
    """
    if chance is not None:
        ax.axhline(chance, color="0.5", lw=0.8, ls=":", label="chance")
    for place, ((model, schedule), (mean, low, high)) in enumerate(intervals.items()):
        own = frame[(frame.model == model) & (frame.schedule == schedule)].accuracy
        said = [None, None] if place else ["one fold", "mean, 95 % interval"]
        ax.plot(np.full(len(own), place - 0.12), own, "o", ms=2.5, color=COLOURS["member"], label=said[0])
        how = {"fmt": "s", "ms": 3, "lw": 1, "color": COLOURS[OURS], "label": said[1]}
        ax.errorbar(place + 0.12, mean, [[mean - low], [high - mean]], **how)
    names = [f"{labels.WORKLOADS.get(model, model)}\n{schedule}" for model, schedule in intervals]
    ax.set(xticks=range(len(names)), ylabel="accuracy on held-out rows (%)")
    ax.set_xticklabels(names, fontsize=SMALL)
    ax.legend(fontsize=SMALL)
    sns.despine(ax=ax)
    return ax


def class_scores(ax, table):
    """Percent right of each class: a frame, one line a network kind, one column a class."""
    sns.heatmap(
        table, annot=True, fmt=".0f", cmap="Blues", vmin=0, vmax=100, cbar=False, ax=ax, annot_kws={"size": SMALL}
    )
    ax.set(xlabel="class", ylabel="")
    ax.tick_params(length=0, labelsize=SMALL)
    return ax


def _legend_above(ax):
    """A legend that covers no line."""
    ax.legend(fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
