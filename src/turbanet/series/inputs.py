"""What networks see of a series: scaled windows, and what is known beside them."""

import dataclasses
from typing import Any

import numpy as np

from turbanet.core.arrays import divisor
from turbanet.series.panel import Panel
from turbanet.series.targets import Target


@dataclasses.dataclass(frozen=True)
class Shape:
    """What networks see and return: `window` values, `steps` ahead at once, columns beside the series."""

    window: int
    steps: int
    hist: int
    futr: int
    stat: int

    @property
    def channels(self) -> int:
        return 1 + 2 * self.hist + 4 * self.futr + self.stat

    def samples(self, ahead: int) -> dict[str, np.ndarray]:
        """Return a window of zeros [1, time], the number of its series [1], and what is known beside it."""
        sample = {"window": np.zeros((1, self.window), np.float32), "series": np.zeros(1, np.int32)}
        if self.hist:
            sample["hist_exog"] = np.zeros((1, self.window, self.hist), np.float32)
        if self.futr:
            sample["futr_exog"] = np.zeros((1, self.window + ahead, self.futr), np.float32)
        return sample


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Centre and spread [pair, 1 + column] of the series and of what is known beside them, by training rows."""

    centre: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, panel: Panel, target: Target, series: np.ndarray, stop: np.ndarray) -> "Scaling":
        """Return those of each pair's rows, up to `stop`."""
        centre = np.zeros((len(series), 1 + panel.exog.shape[1]))
        spread = np.ones_like(centre)
        for i, (begin, end) in enumerate(zip(panel.begin[series], stop, strict=True)):
            centre[i, 0], spread[i, 0] = target.scaling(panel.y[begin:end])
            if panel.exog.shape[1]:
                centre[i, 1:], spread[i, 1:] = standards(panel.exog[begin:end], panel.plain)
        return cls(centre, spread)

    def __getitem__(self, pair: Any) -> "Scaling":
        return Scaling(self.centre[pair], self.spread[pair])

    def where(self, pair: np.ndarray, other: "Scaling") -> "Scaling":
        """Return this one's where `pair` is true, and those of another."""
        return Scaling(*(np.where(pair[:, None], *each) for each in zip(vars(self).values(), vars(other).values())))

    def exog(self, values: np.ndarray, columns: slice) -> np.ndarray:
        """Return values [pair, time, column] of these of the columns, scaled."""
        at = slice(1 + (columns.start or 0), None if columns.stop is None else 1 + columns.stop)
        return ((values - self.centre[:, None, at]) / self.spread[:, None, at]).astype(np.float32)


def standards(values: np.ndarray, plain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation [column] of what is there; 0 and 1 of columns of 0 and 1."""
    there = ~np.isnan(values)
    count = np.maximum(there.sum(axis=0), 1)
    centre = np.where(there, values, 0).sum(axis=0) / count
    spread = np.sqrt(np.where(there, (values - centre) ** 2, 0).sum(axis=0) / count)
    return np.where(plain, 0, centre), np.where(plain, 1, divisor(spread, centre))


def channels(value: Any, hist: Any, futr: Any, stat: Any, shape: Shape, xp: Any = np) -> Any:
    """Return what a network sees [row, time, channel], float32.

    The value; what was known so far; what is known ahead, at the value's time and `steps` later; what never changes. A
    missing value is the mean, 0, and each column that may miss some has a channel that says where.
    """
    parts = [value[..., None]]
    ahead = [futr[:, : shape.window], futr[:, shape.steps : shape.steps + shape.window]] if shape.futr else []
    for part in ([hist] if shape.hist else []) + ahead:
        missing = xp.isnan(part)
        parts += [xp.where(missing, 0, part), missing.astype(xp.float32)]
    if shape.stat:
        parts.append(xp.broadcast_to(stat[:, None], (*value.shape, shape.stat)))
    return xp.concatenate(parts, axis=-1).astype(xp.float32) if len(parts) > 1 else parts[0]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What networks see, in the unit of the table, but for what never changes, which is scaled.

    y : [request, time]; hist : [request, time, column]; futr : [request, time + steps ahead, column]
    stat : [request, column] or None; number : int32 [request], of the series that a global network is told
    """

    y: np.ndarray
    hist: np.ndarray
    futr: np.ndarray
    stat: Any
    number: np.ndarray


def windows(values: np.ndarray, window: int, steps: int, relative: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows [row, time] and what follows them [row, step], both minus the window's last value."""
    whole = np.lib.stride_tricks.sliding_window_view(values, window + steps)
    whole = whole - whole[:, window - 1 : window] if relative else whole
    return whole[:, :window], whole[:, window:]
