"""Panels of series, read from long tables (unique_id, ds, y) and checked, and their naive forecasts."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import pandas as pd

from turbanet.core.arrays import first_line

COLUMNS = "unique_id", "ds", "y"
SEASONS = {"h": 24, "B": 5, "D": 7, "W": 52, "M": 12, "ME": 12, "MS": 12, "Q": 4, "QE": 4, "QS": 4}  # by frequency


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel of series, which may begin and end at different times.

    ids : [series]
    values : a list over series of float64 [time]
    times : a list over series of ds [time]
    freq : pandas offset from one time to the next, or 1 where times are whole numbers
    """

    ids: np.ndarray
    values: list[np.ndarray]
    times: list[Any]
    freq: Any

    def cut(self, steps: int) -> "Panel":
        """Return the series without their last `steps`, at least one."""
        values = [each[:-steps] for each in self.values]
        return dataclasses.replace(self, values=values, times=[each[:-steps] for each in self.times])

    def check_ends(self) -> None:
        """Raise ValueError where series end at different times, as one network of all would then see the future."""
        ends = pd.Series([each[-1] for each in self.times])
        if ends.nunique() > 1:
            late = f"Series {self.ids[ends.argmin()]} ends at {ends.min()}, others up to {ends.max()}"
            raise ValueError(f'{late}: one network of all would see later times than it forecasts; take kind="local".')

    def coming(self, steps: int) -> list[Any]:
        """Return the next `steps` times of each series."""
        if isinstance(self.freq, int):
            return [each[-1] + 1 + np.arange(steps) for each in self.times]
        return [pd.date_range(each[-1], periods=steps + 1, freq=self.freq)[1:] for each in self.times]

    @property
    def season(self) -> int | None:
        """Steps in the usual season of series of this frequency, None if unknown."""
        return None if isinstance(self.freq, int) else SEASONS.get(self.freq.freqstr.partition("-")[0])

    def check_length(self, steps: int, what: str) -> None:
        """Raise ValueError for a series of fewer than the `steps` that `what` needs."""
        lengths = np.array(list(map(len, self.values)))
        if (lengths < steps).any():
            short = int(lengths.argmin())
            problem = f"Series {self.ids[short]} has {lengths[short]} values"
            raise ValueError(f"{problem}, {what} needs {steps}: leave it out, or take a shorter window or horizon.")


def read(table: Any, freq: Any = None) -> Panel:
    """Return the series of a pandas table with the columns unique_id, ds (dates or whole numbers) and y, in any order.

    freq: pandas' name of the step from one ds to the next; None: the one inferred from the longest series. Raises
    ValueError for missing or further columns, values that are no numbers, and series with a gap or a repeated time.
    """
    if missing := [name for name in COLUMNS if name not in table]:
        raise ValueError(f"The table needs the columns {', '.join(COLUMNS)}; it has no {', '.join(missing)}.")
    if len(table.columns) > len(COLUMNS):
        further = list(table.columns)
        for name in COLUMNS:
            further.remove(name)
        advice = f"it has {', '.join(map(str, further))} too, which no network sees: drop it"
        raise ValueError(f"The table has the columns {', '.join(COLUMNS)} alone; {advice}.")
    if not len(table):
        raise ValueError("The table has no rows: give at least one series.")
    if table.unique_id.isna().any() or table.ds.isna().any():
        row = int((table.unique_id.isna() | table.ds.isna()).to_numpy().argmax())
        raise ValueError(f"Row {row} of the table has no unique_id or no ds: fill it, or leave it out.")
    if pd.api.types.is_float_dtype(table.ds):
        raise ValueError("ds holds decimal numbers: make them dates, or whole numbers by .astype(int).")
    if table.y.dtype.kind in "cmM":
        raise ValueError(f"y must be real numbers, got {table.y.dtype}: convert it.")
    values = pd.to_numeric(table.y, errors="coerce").to_numpy(np.float64)
    if not (finite := np.isfinite(values)).all():
        row = table.iloc[int((~finite).argmax())]
        raise ValueError(f"y is {row.y} in series {row.unique_id} at {row.ds}: fill it, or leave the series out.")
    whole = pd.api.types.is_integer_dtype(table.ds)
    if whole and freq is not None:
        raise ValueError(f"ds holds whole numbers, which are 1 apart, and freq={freq!r} came too: leave freq out.")
    ds = table.ds.astype(np.int64) if whole else _dates(table.ds)  # a smaller type could overflow in forecasts
    tidy = pd.DataFrame({"unique_id": table.unique_id, "ds": ds, "y": values}).sort_values(["unique_id", "ds"])
    twice = tidy.duplicated(["unique_id", "ds"])
    if twice.any():
        row = tidy[twice].iloc[0]
        raise ValueError(f"Series {row.unique_id} has two rows for {row.ds}: keep one of them.")
    ids, times, series = [], [], []
    for name, rows in tidy.groupby("unique_id", sort=False):
        ids.append(name)
        times.append(rows.ds.to_numpy() if whole else pd.DatetimeIndex(rows.ds))
        series.append(rows.y.to_numpy())
    step = 1 if whole else _offset(times, freq)
    for name, each in zip(ids, times, strict=True):
        _check_regular(name, each, step)
    return Panel(np.array(ids), series, times, step)


def naive(values: np.ndarray, steps: int) -> np.ndarray:
    """Return the last value of a series, repeated for each of the next `steps`."""
    return np.full(steps, values[-1])


def seasonal_naive(values: np.ndarray, steps: int, season: int) -> np.ndarray:
    """Return the last season of a series, repeated for the next `steps`; NaN if the series is shorter than a season."""
    if len(values) < season:
        return np.full(steps, np.nan)
    return np.resize(values[-season:], steps)


def _dates(ds):
    try:
        return pd.to_datetime(ds)
    except (TypeError, ValueError) as error:
        problem = f"ds holds no dates that pandas reads ({first_line(error)})"
        raise ValueError(f"{problem}: make them dates, or whole numbers.") from error


def _offset(times, freq):
    longest = max(times, key=len)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 warns that infer_freq will return an offset
        name = freq or (pd.infer_freq(longest) if len(longest) > 2 else None)
    if name is None:
        advice = 'name the step, freq="D", fill the holes, or number the steps with whole numbers'
        raise ValueError(f"The times in ds are not equally far apart, or too few to tell: {advice}.")
    return pd.tseries.frequencies.to_offset(name)


def _check_regular(name, times, step):
    if step == 1 and isinstance(step, int):
        expected = times[0] + np.arange(len(times))
    else:
        expected = pd.date_range(times[0], periods=len(times), freq=step)
    wrong = np.asarray(expected != times)
    if wrong.any():
        gap = expected[int(wrong.argmax())]
        kind = "whole numbers" if isinstance(step, int) else f"frequency {step.freqstr}"
        raise ValueError(f"Series {name} has no row for {gap} ({kind}): fill it, or number the steps without holes.")
