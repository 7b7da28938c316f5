"""A callback that shows a training in a notebook: a pandas table, shown again after each segment."""

import io
import sys
import time
from typing import TYPE_CHECKING

from turbanet.core import extras
from turbanet.training.callbacks import TrainingView

if TYPE_CHECKING:
    import pandas as pd


class ProgressTable:
    """A callback that keeps `table`, a row a segment, and shows it in a notebook.

    Columns: epoch (done in this call), seconds (since the callback was created), training (members that still train),
    and for each loss and metric, by its name, the members' median with `_low` and `_high`, their 5 % and 95 %
    quantiles; all of the segment's last epoch.

    show : whether a notebook shows it
    """

    def __init__(self, *, show: bool = True):
        self.show = show
        self.table: pd.DataFrame | None = None
        self._begin = time.monotonic()
        self._display = None

    def __call__(self, view: TrainingView) -> None:
        pd = extras.pandas()

        row = {"epoch": view.epoch, "seconds": time.monotonic() - self._begin, "training": int(view.training.sum())}
        for name, values in view.history.recorded().items():
            low, median, high = pd.Series(values[-1]).quantile([0.05, 0.5, 0.95])  # without NaN
            row |= {name: median, f"{name}_low": low, f"{name}_high": high}
        self.table = pd.concat([self.table, pd.DataFrame([row])], ignore_index=True)
        if self.show:
            self._display = shown(self.table, self._display)


def shown(thing, display):
    """Show a table or a figure in a notebook, in place of what `display` showed before, and return the display."""
    ipython = sys.modules.get("IPython")  # loaded wherever a notebook runs
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
