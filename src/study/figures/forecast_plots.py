"""Figures of the stocks' forecasts: errors over tickers, one ticker's days; functions take an Axes and return it."""

import numpy as np
import pandas as pd

from study.figures.labels import OURS
from study.figures.plots import COLOURS, SMALL, logarithmic, name_lines
from turbanet import plot


def error_distribution(ax, errors):
    """Plot the distributions of the tickers' errors on a logarithmic axis: errors {name: percent [ticker]}."""
    every = np.concatenate(list(errors.values()))
    bins = np.geomspace(every[every > 0].min(), every.max(), 40)
    for name, values in errors.items():
        method = OURS if name.startswith(OURS) else "PyTorch" if name.startswith("PyTorch") else "persistence"
        weights = np.full(len(values), 100 / len(values))
        label = f"{name} (median {np.median(values):.2f} %)"
        ax.hist(
            np.maximum(values, bins[0]),
            bins,
            weights=weights,
            histtype="step",
            color=COLOURS[method],
            lw=1.2,
            label=label,
        )
        ax.axvline(np.median(values), color=COLOURS[method], lw=0.8, ls=":")
    ax.set(xlabel="average absolute error of a ticker (% of its price)", ylabel="share of tickers (%)")
    logarithmic(ax, "x").legend(fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)  # above
    return ax


def forecast(ax, dates, truth, predictions, title):
    """Plot one ticker's closes and predictions {name: [day]} on its test days in US dollars; persistence is dotted."""
    table = pd.DataFrame({"unique_id": title, "ds": dates, "y": truth, **predictions})
    styles = [":" if name == "persistence" else "-" for name in predictions]
    colours = [COLOURS["persistence" if style == ":" else OURS] for style in styles]
    thin = [0.9] * (1 + len(styles))
    ax.set_prop_cycle(color=[COLOURS["truth"], *colours], linestyle=["-", *styles], linewidth=thin)
    plot.forecasts(table[["unique_id", "ds", "y"]], table.drop(columns="y"), ax=ax).get_legend().remove()
    ax.title.set_fontsize(SMALL)
    ax.tick_params(labelsize=SMALL)
    return ax


def error_by_step(ax, curves):
    """Plot errors against the steps ahead, named in place: curves {name: a table of step, MASE, standard_error}."""
    for name, table in curves.items():
        kwargs = {"marker": "o", "ms": 3, "lw": 1, "capsize": 1.5, "label": name}
        ax.errorbar(table.step, table.MASE, table.standard_error, **kwargs)
    ax.set(xlabel="days ahead", ylabel="mean absolute scaled error")
    ax.set_xticks(table.step)
    return name_lines(ax)
