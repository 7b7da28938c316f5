"""Intervals around forecasts, from the errors of forecasts that came before (split conformal prediction)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd


@dataclasses.dataclass(frozen=True)
class Conformal:
    """Absolute errors [cut, series, step] of forecasts by networks that had not seen what they forecast.

    spread : [series], the unit in which the errors of all series are those of a new one; None: none is new
    """

    errors: np.ndarray
    spread: np.ndarray | None = None

    def add(
        self,
        table: pd.DataFrame,
        name: str,
        level: float | Sequence[float],
        series: np.ndarray,
        steps: int,
        spread: np.ndarray | None = None,
        least: float = -np.inf,
    ) -> None:
        """Add the columns from NAME-lo-LEVEL to NAME-hi-LEVEL, which cover `level` percent, to a table of forecasts.

        series : int [series], the places of those in the table, -1 for new ones of this spread [series]
        least : below which no interval reaches. Raises ValueError where there are too few errors for a level
        """
        for each in np.atleast_1d(level):
            half = self._half_width(each, series, steps, spread).ravel()
            table[f"{name}-lo-{each:g}"] = np.maximum(table[name] - half, least)
            table[f"{name}-hi-{each:g}"] = table[name] + half

    def _half_width(self, level, series, steps, spread):
        """Return half the width [series, step] of intervals."""
        if not 1 <= level < 100:
            raise ValueError(f"level is in percent, from 1 to below 100, such as 90; got {level}.")
        count, _, horizon = self.errors.shape
        rank = int(np.ceil((count + 1) * level / 100))
        if rank > count or steps > horizon:
            needed = int(np.ceil(level / (100 - level)))
            advice = f"calibration of at least {needed}, and {horizon} steps at the most"
            raise ValueError(f"{level:g} % intervals of {steps} steps need {advice}; calibration is {count}.")
        width = np.sort(self.errors, axis=0)[rank - 1][series]
        new = series < 0
        if self.spread is not None and spread is not None and new.any():
            pooled = (self.errors / self.spread[:, None]).reshape(-1, horizon)
            place = min(int(np.ceil((len(pooled) + 1) * level / 100)), len(pooled)) - 1
            width[new] = np.sort(pooled, axis=0)[place] * spread[new, None]
        return width[:, :steps]
