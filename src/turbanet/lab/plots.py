"""The study's figures: arrays and an Axes in, the Axes out; one colour for one thing in all of them."""

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.colors import to_rgb
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

from turbanet.lab import labels
from turbanet.lab.labels import LOOP, MARKERS, OURS

COLUMN, PAGE = 3.5, 7.2  # inches: one column of a paper, two columns
COLOURS = {name: to_rgb(colour) for name, colour in labels.COLOURS.items()}


def style():
    """Readable at column width; the fonts of a figure are the fonts of the page."""
    sns.set_theme(style="ticks", context="paper", font_scale=0.9)
    plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False, "savefig.dpi": 200})


def caption(fig, text):
    """A line below the figure: data source, machine, size."""
    fig.get_layout_engine().set(rect=(0, 0.045 * 3 / fig.get_figheight(), 1, 1 - 0.045 * 3 / fig.get_figheight()))
    fig.text(0.005, 0.005, text, fontsize=5, color="0.4", ha="left", va="bottom", wrap=True)
    return fig


def concept(axes, lanes=8):
    """The idea in three Axes: one small network on a wide device, many one after the other, many together."""
    titles = ["one network: the device idles", "one after the other: it still idles", "together: every lane works"]
    for ax, title, filled in zip(axes, titles, (1, 4, 4), strict=True):
        for lane in range(lanes):
            ax.add_patch(Rectangle((0, lane), 10, 0.8, facecolor="0.95", edgecolor="0.8", lw=0.6))
        together = title.startswith("together")
        for network in range(lanes if together else filled):
            x, lane = (0.3, network) if together else (0.3 + 2.4 * network, 0)
            colour = COLOURS[OURS] if together else COLOURS[LOOP]
            ax.add_patch(FancyBboxPatch((x, lane + 0.12), 1.9, 0.56, "round,pad=0,rounding_size=0.2", color=colour))
            for unit in range(3):
                ax.add_patch(Circle((x + 0.4 + 0.55 * unit, lane + 0.4), 0.13, color="white"))
        ax.set(xlim=(-0.1, 10.1), ylim=(-0.2, lanes), xlabel="time", title=title, xticks=[], yticks=[])
        sns.despine(ax=ax, left=True, bottom=True)
    axes[0].set_ylabel(f"the device: {lanes} lanes")
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


def time_against_size(ax, times, fits):
    """Median seconds against swarm size with the range of the repeats, and the fitted lines.

    times: a frame [way, members, seconds]; fits: {way: (slope, intercept, r2)}.
    """
    for way, group in times.groupby("way", sort=False):
        size = group.groupby("members").seconds
        middle, low, high = size.median(), size.min(), size.max()
        slope, intercept, r2 = fits[way]
        label = f"{way}: {slope:.3g} s per network, R² {r2:.3f}"
        error = [middle - low, high - middle]
        ax.errorbar(
            middle.index, middle, error, color=COLOURS[way], marker=MARKERS[way], ls="", ms=3, lw=0.8, label=label
        )
        ends = np.array([middle.index.min(), middle.index.max()])
        ax.plot(ends, intercept + slope * ends, color=COLOURS[way], lw=0.9, alpha=0.7)
    ax.set(xlabel="networks trained", ylabel="training time (s)")
    _legend_above(ax, fontsize=5.5)
    sns.despine(ax=ax)
    return ax


def ratio_against_size(ax, times, base=OURS):
    """How many times longer each way takes than `base` at the same size, medians."""
    middle = times.groupby(["way", "members"], sort=False).seconds.median().unstack("way")
    for way in middle.columns.drop(base):
        ratio = (middle[way] / middle[base]).dropna()
        ax.plot(ratio.index, ratio, color=COLOURS[way], marker=MARKERS[way], ms=3, lw=1, label=way)
    ax.axhline(1, color=COLOURS[base], lw=1, label=base)
    ax.set(xlabel="networks trained", ylabel=f"time over {base}'s", xscale="log", yscale="log")
    _legend_above(ax, fontsize=5.5)
    sns.despine(ax=ax)
    return ax


def confusion(ax, counts, title, *, difference=False):
    """A confusion matrix [true, predicted] of row shares in percent; `difference` of two, in percentage points."""
    limit = {"vmin": -2, "vmax": 2, "cmap": "RdBu"} if difference else {"vmin": 0, "vmax": 100, "cmap": "Blues"}
    form = "+.1f" if difference else ".0f"
    text = np.vectorize(lambda v: "" if abs(v) < 0.05 else format(v, form))(counts)
    sns.heatmap(counts, annot=text, fmt="", ax=ax, cbar=False, square=True, annot_kws={"size": 4}, **limit)
    ax.set(title=title, xlabel="predicted", ylabel="true")
    ax.tick_params(length=0, labelsize=5)
    return ax


def accuracy_against_size(ax, curve, member, label):
    """Ensemble accuracy [order, size] against its size: mean and range over orders; the average member as a line."""
    size = np.arange(1, curve.shape[1] + 1)
    (line,) = ax.plot(size, curve.mean(0), lw=1.5, label=label)
    ax.fill_between(size, curve.min(0), curve.max(0), color=line.get_color(), alpha=0.2, lw=0)
    ax.axhline(member, color=line.get_color(), lw=0.8, ls=":")
    ax.set(xlabel="networks in the ensemble", ylabel="accuracy")
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
    ax.set(xscale="log", xlabel="average absolute error of a ticker (% of its price)", ylabel="share of tickers (%)")
    _legend_above(ax, fontsize=6)
    sns.despine(ax=ax)
    return ax


def forecast(ax, dates, truth, predictions, title):
    """One ticker's test days: closes and predictions in US dollars; predictions {name: [day]}."""
    ax.plot(dates, truth, color=COLOURS["truth"], lw=1, label="truth")
    for name, values in predictions.items():
        way = "persistence" if name == "persistence" else OURS
        ax.plot(dates, values, color=COLOURS[way], lw=0.9, ls=":" if way == "persistence" else "-", label=name)
    ax.set_title(title, fontsize=7)
    locator = AutoDateLocator(minticks=2, maxticks=6)
    ax.xaxis.set(major_locator=locator, major_formatter=ConciseDateFormatter(locator))
    ax.tick_params(labelsize=5)
    sns.despine(ax=ax)
    return ax


def seconds_by_model(ax, times):
    """Seconds of every way for each model as bars: a frame [model, way, seconds], medians."""
    models = list(times.model.unique())
    ways = list(times.way.unique())
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        middle = times[times.way == way].groupby("model").seconds.sum().reindex(models)
        place = np.arange(len(models)) + (i - (len(ways) - 1) / 2) * width
        bars = ax.bar(place, middle, width, color=COLOURS[way], label=way)
        ax.bar_label(bars, fmt="{:.1f}", fontsize=4.5)
    ax.set(xticks=range(len(models)), xticklabels=models, ylabel="training time (s)")
    _legend_above(ax, fontsize=5.5)
    sns.despine(ax=ax)
    return ax


def use_of_cores(ax, frame, title):
    """Every core's use against time, and their mean: `machine.utilisation().frame`."""
    cores = frame.filter(like="core_")
    ax.plot(frame.seconds, cores, lw=0.5, color=COLOURS["member"])
    ax.plot(frame.seconds, cores.mean(axis=1), lw=1.2, color=COLOURS["truth"])
    ax.set(xlabel="seconds", ylabel="busy (%)", xlim=(0, None), ylim=(0, 105))
    ax.set_title(title, fontsize=7)
    sns.despine(ax=ax)
    return ax


def fold_scores(ax, frame, intervals):
    """Each fold's accuracy in percent as a point, the mean and its interval beside: frame [model, schedule, accuracy].

    intervals: {(model, schedule): (mean, low, high)}, percent.
    """
    for place, ((model, schedule), (mean, low, high)) in enumerate(intervals.items()):
        own = frame[(frame.model == model) & (frame.schedule == schedule)].accuracy
        ax.plot(np.full(len(own), place - 0.12), own, "o", ms=2.5, color=COLOURS["member"])
        ax.errorbar(place + 0.12, mean, [[mean - low], [high - mean]], fmt="s", ms=3, lw=1, color=COLOURS[OURS])
    names = [f"{model}\n{schedule}" for model, schedule in intervals]
    ax.set(xticks=range(len(names)), ylabel="accuracy on held-out rows (%)")
    ax.set_xticklabels(names, fontsize=5.5)
    sns.despine(ax=ax)
    return ax


def class_scores(ax, table):
    """Percent right of each class: a frame, one line a network kind, one column a class."""
    sns.heatmap(table, annot=True, fmt=".0f", cmap="Blues", vmin=0, vmax=100, cbar=False, ax=ax, annot_kws={"size": 5})
    ax.set(xlabel="class", ylabel="")
    ax.tick_params(length=0, labelsize=5.5)
    return ax


def _legend_above(ax, fontsize):
    """A legend that covers no line."""
    ax.legend(fontsize=fontsize, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
