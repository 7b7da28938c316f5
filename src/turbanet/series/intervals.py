"""Intervals around forecasts, from the errors of forecasts that came before (split conformal prediction)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd


def check_levels(level: float | Sequence[float] | None, count: int, steps: int, horizon: int) -> np.ndarray:
    """Return levels in percent; ValueError for those that `count` earlier horizons cannot give."""
    levels = np.atleast_1d(() if level is None else level)
    if levels.dtype.kind not in "iuf":
        raise ValueError(f"level is a number, or some, in percent, such as 90; got {level!r}.")
    for each in levels:
        if not 1 <= each < 100:
            raise ValueError(f"level is in percent, from 1 to below 100, such as 90; got {each}.")
        if steps > horizon:
            raise ValueError(f"Intervals are of {horizon} steps at most, the horizon; {steps} came: leave level out.")
        if _rank(each, count) > count:
            needed = next(n for n in range(count, 10**6) if _rank(each, n) <= n)
            advice = "fit with more, or with quantiles= of that level"
            raise ValueError(
                f"{each:g} % intervals need calibration of at least {needed}; calibration is {count}: {advice}."
            )
    return levels


@dataclasses.dataclass(frozen=True)
class Conformal:
    """Absolute errors [cut, series, step] of forecasts by networks that had not seen what they forecast.

    Errors are NaN where a series had too few values. unit : `unit` of each series [series], in which the errors of all
    are those of a new one; None: none is new
    """

    errors: np.ndarray
    unit: np.ndarray | None = None

    def add(
        self,
        table: pd.DataFrame,
        name: str,
        levels: np.ndarray,
        series: np.ndarray,
        steps: int,
        new_unit: np.ndarray | None = None,
        least: float = -np.inf,
    ) -> None:
        """Add the columns from NAME-lo-LEVEL to NAME-hi-LEVEL, which cover LEVEL percent, to a table of forecasts.

        They are NaN for a series that has too few errors for the level.

        levels : of `check_levels`
        series : int [series], the places of those in the table, -1 for new ones
        new_unit : `unit` of the new ones [new]
        least : below which no interval reaches
        """
        for level in levels:
            half = _width(self.errors, level)[series]
            half[series < 0] = np.nan
            if self.unit is not None and new_unit is not None and len(new_unit):
                pooled = (self.errors / self.unit[:, None]).reshape(-1, 1, self.errors.shape[2])
                half[series < 0] = _width(pooled, level) * new_unit[:, None]
            half = half[:, :steps].ravel()
            table[f"{name}-lo-{level:g}"] = np.maximum(table[name] - half, least)
            table[f"{name}-hi-{level:g}"] = table[name] + half


def unit(y: np.ndarray) -> float:
    """Return the mean absolute step from each value of a series to the next; NaN for one that never changes.

    It does not grow with the length of a series that wanders or has a trend, as the standard deviation does.
    """
    step = np.abs(np.diff(y)).mean() if len(y) > 1 else 0.0
    return step if step > 0 else np.nan


def _rank(level, count):
    return np.ceil(np.round((count + 1) * level / 100, 9)).astype(int)


def _width(errors, level):
    """Return the error [series, step] of [cut, series, step] that `level` percent do not exceed."""
    count = np.isfinite(errors).sum(axis=0)
    rank = _rank(level, count)
    position = np.clip(rank, 1, len(errors))[None] - 1
    width = np.take_along_axis(np.sort(errors, axis=0), position, axis=0)[0]  # NaN lie last
    return np.where(rank <= count, width, np.nan)
