"""The figure of the GPU chapter, drawn from the results of `make gpu` into the card's folder."""

from pathlib import Path

import matplotlib.pyplot as plt

from study.figures import plots
from study.figures.labels import COLOURS, GRAPH, LOOP, OURS, SCAN
from study.gpu import chapter
from study.pipeline.reports import Report

STEPS = 1024  # of the published sweep
APART = 1.5  # times that a line needs from the next one for a label of its own


def growth(ax, card: Path):
    """Plot seconds of the published sweep's steps against the number of networks, a labelled line a method."""
    table = STEPS * chapter.sweep(card, chapter.SMALL)
    names = {LOOP: "PyTorch's loop", GRAPH: "PyTorch,\nCUDA graphs", SCAN: "XLA, by hand", OURS: "TurbaNet"}
    if table[SCAN].iloc[-1] < APART * table[OURS].iloc[-1]:
        del names[SCAN]
    colours = COLOURS | {GRAPH: "#595959"}
    for name, label in names.items():
        y = table[list(chapter.LOOPS)].min(axis=1) if name == LOOP else table[name]
        ax.loglog(table.index, y, color=colours[name], marker="o", ms=3, lw=2 if name == OURS else 1.2)
        end = table.index[-1], y.iloc[-1]
        ax.annotate(label, end, (7, 0), textcoords="offset points", va="center", color=colours[name], fontsize=8)
    calls = STEPS * chapter.calls(card).wall_per_step
    ax.loglog(calls.index, calls, color=colours[OURS], lw=1.2, ls="--")
    one = table[list(chapter.LOOPS)].min(axis=1).iloc[0]
    ax.axhline(one, color=COLOURS[LOOP], lw=0.6, ls=":")
    ax.set(xlabel="number of 2-16-2 networks", ylabel=f"seconds for {STEPS:,} steps")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def draw(card: Path) -> None:
    """Draw the growth figure into figures/ of the card's folder, with its note."""
    plots.style()
    fig, ax = plt.subplots(figsize=(plots.COLUMN, 2.6))
    growth(ax, card)
    report = Report("gpu")
    report.folder = card
    steps = chapter.calls(card).steps
    note = (
        "One network's time times their number where they train one after the other; the dotted line is one network's. "
        "TurbaNet: its compiled program; dashed: with the start and the end of the measured calls, of "
        f"{steps.max():,} to {steps.min()} steps"
    )
    report.figure(fig, "growth", f"{note}. Warm, medians of five turns; {chapter.numbers(card)['measured']}.")
    plt.close(fig)
