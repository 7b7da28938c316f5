"""Callbacks that only look: a pandas table and a plot of a training, drawn anew in a notebook after each segment."""

import io
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from turbanet.training.callbacks import TrainingView

if TYPE_CHECKING:
    import pandas as pd


class ProgressTable:
    """A callback that keeps `table`, a line a segment, and shows it in a notebook.

    Columns: epoch (epochs done, in this call), seconds (since this was made), training (members that
    train on), and of each loss and metric, by its name, the members' median with `_low` and `_high`, their 5 % and 95 %
    quantiles; all of the segment's last epoch.

    show : whether a notebook shows it
    """

    def __init__(self, *, show: bool = True):
        self.show = show
        self.table: pd.DataFrame | None = None
        self._begin = time.monotonic()
        self._display = None

    def __call__(self, view: TrainingView) -> None:
        import pandas as pd

        line = {"epoch": view.epoch, "seconds": time.monotonic() - self._begin, "training": int(view.training.sum())}
        for name, values in view.history.seen().items():
            low, median, high = _spread(values[-1:])[:, 0]
            line |= {name: median, f"{name}_low": low, f"{name}_high": high}
        self.table = pd.concat([self.table, pd.DataFrame([line])], ignore_index=True)
        if self.show:
            self._display = _shown(self.table, self._display)


class LivePlot:
    """A callback that draws each loss and metric against the epochs, the members' median in their 5 to 95 %.

    It needs matplotlib (extra "study"), and shows `figure` in a notebook; elsewhere `figure.savefig` keeps it.

    show : whether a notebook shows it
    """

    def __init__(self, *, show: bool = True):
        self.show = show
        self.figure: Any = None
        self._display = None

    def __call__(self, view: TrainingView) -> None:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        seen = view.history.seen()
        metrics = [name for name in seen if not name.endswith("_loss")]
        self.figure = Figure(figsize=(4.5 * (1 + len(metrics)), 3.2), layout="constrained")
        axes = self.figure.subplots(1, 1 + len(metrics), squeeze=False)[0]
        for name, values in seen.items():
            ax = axes[1 + metrics.index(name) if name in metrics else 0]
            low, median, high = _spread(values)
            epoch = 1 + np.arange(len(values))
            (line,) = ax.plot(epoch, median, marker="." if len(epoch) == 1 else "", label=name.replace("_", " "))
            ax.fill_between(epoch, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        for ax in axes:
            ax.set(xlabel="epoch", xlim=(1, max(view.epochs, 2)))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.legend()
        axes[0].set_title(f"{view.training.sum()} of {len(view.training)} members train on", fontsize="medium")
        if self.show:
            self._display = _shown(self.figure, self._display)


def _spread(values):
    """5 %, 50 % and 95 % over the members that have a number: [epoch, member] -> [3, epoch], NaN where none has."""
    some = ~np.isnan(values).all(1)
    found = np.full((3, len(values)), np.nan)
    found[:, some] = np.nanquantile(values[some], [0.05, 0.5, 0.95], axis=1)
    return found


def _shown(thing, display):
    """Show a table or a figure in a notebook, in the place where `display` has shown it before."""
    ipython = sys.modules.get("IPython")  # which whoever runs a notebook has loaded
    shell = ipython and ipython.get_ipython()
    if not hasattr(shell, "kernel"):  # a terminal has nothing to draw on
        return None
    from IPython.display import Image, display as show

    if hasattr(thing, "savefig"):
        thing.savefig(picture := io.BytesIO(), format="png", dpi=100)
        thing = Image(picture.getvalue())
    if display is None:
        return show(thing, display_id=True)
    display.update(thing)
    return display
