"""Panels of series, read from long tables (unique_id, ds, y) and checked."""

import dataclasses
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from turbanet.core.arrays import first_line

COLUMNS = "unique_id", "ds", "y"
SEASONS = {"h": 24, "B": 5, "D": 7, "W": 52, "M": 12, "ME": 12, "MS": 12, "Q": 4, "QE": 4, "QS": 4}  # by frequency


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel of series, which may begin and end at different times.

    series : {id: pandas series of y, float64, by ds}
    freq : pandas offset from one time to the next, or 1 where times are whole numbers
    """

    series: dict[Any, pd.Series]
    freq: Any

    def cut(self, steps: int) -> "Panel":
        """Return the series without their last `steps`."""
        return dataclasses.replace(self, series={name: y.iloc[: len(y) - steps] for name, y in self.series.items()})

    def tail(self, steps: int) -> "Panel":
        """Return the last `steps` of the series, or all of those that are shorter."""
        return dataclasses.replace(self, series={name: y.iloc[-steps:].copy() for name, y in self.series.items()})

    def last(self, steps: int) -> np.ndarray:
        """Return the last `steps` values [series, step]."""
        return np.stack([y.to_numpy()[-steps:] for y in self.series.values()])

    def state(self) -> dict[str, Any]:
        """Return what `of` makes this panel of: text, numbers and arrays, without objects of pandas."""
        index = [y.index for y in self.series.values()]
        zone = None if isinstance(self.freq, int) else index[0].tz
        times = [(each if zone is None else each.tz_convert(None)).to_numpy() for each in index]
        freq = self.freq if isinstance(self.freq, int) else self.freq.freqstr
        values = [y.to_numpy() for y in self.series.values()]
        return {"ids": list(self.series), "times": times, "values": values, "freq": freq, "zone": zone and str(zone)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Panel":
        """Return the panel that `state` described."""
        whole, zone = isinstance(state["freq"], int), state["zone"]
        index = [pd.Index(times) for times in state["times"]]
        if zone is not None:
            index = [pd.DatetimeIndex(each).tz_localize("UTC").tz_convert(zone) for each in index]
        series = [pd.Series(values, each) for values, each in zip(state["values"], index, strict=True)]
        freq = state["freq"] if whole else pd.tseries.frequencies.to_offset(state["freq"])
        return cls(dict(zip(state["ids"], series, strict=True)), freq)

    def after(self, cut: int, steps: int) -> np.ndarray:
        """Return the `steps` values [series, step] that follow on the series without their last `cut`."""
        return np.stack([y.to_numpy()[len(y) - cut :][:steps] for y in self.series.values()])

    def coming(self, steps: int) -> list[Any]:
        """Return the next `steps` times of each series."""
        return [_times(y.index[-1], steps + 1, self.freq)[1:] for y in self.series.values()]

    @property
    def season(self) -> int | None:
        """Steps in the usual season of series of this frequency, None if unknown."""
        return None if isinstance(self.freq, int) else SEASONS.get(self.freq.freqstr.partition("-")[0])


def read(table: Any, freq: Any = None) -> Panel:
    """Return the series of a pandas table with the columns unique_id, ds (dates or whole numbers) and y, in any order.

    freq: pandas' name of the step from one ds to the next; None: the one inferred from the longest series. Raises
    ValueError for missing or further columns, values that are no numbers, and series with a gap or a repeated time.
    """
    if missing := [name for name in COLUMNS if name not in table]:
        raise ValueError(f"The table needs the columns {', '.join(COLUMNS)}; it has no {', '.join(missing)}.")
    if further := list((Counter(table.columns) - Counter(COLUMNS)).elements()):
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
    try:
        ds = table.ds.astype(np.int64) if whole else pd.to_datetime(table.ds)  # a smaller type could overflow later
    except (TypeError, ValueError) as error:
        problem = f"ds holds no dates that pandas reads ({first_line(error)})"
        raise ValueError(f"{problem}: make them dates, or whole numbers.") from error
    tidy = pd.DataFrame({"unique_id": table.unique_id, "ds": ds, "y": values}).sort_values(["unique_id", "ds"])
    twice = tidy.duplicated(["unique_id", "ds"])
    if twice.any():
        row = tidy[twice].iloc[0]
        raise ValueError(f"Series {row.unique_id} has two rows for {row.ds}: keep one of them.")
    series = dict(iter(tidy.set_index("ds").groupby("unique_id", sort=False).y))
    step: Any = 1 if whole else _offset(max(series.values(), key=len).index, freq)
    for name, y in series.items():
        expected = _times(y.index[0], len(y), step)
        if (wrong := np.asarray(expected != y.index)).any():
            kind = "whole numbers" if whole else f"frequency {step.freqstr}"
            problem = f"Series {name} has no row for {expected[int(wrong.argmax())]} ({kind})"
            raise ValueError(f"{problem}: fill it, or number the steps without holes.")
    return Panel(series, step)


def _times(first, count, step):
    """Return `count` times, a `step` apart."""
    return first + np.arange(count) if isinstance(step, int) else pd.date_range(first, periods=count, freq=step)


def _offset(times, freq):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 warns that infer_freq will return an offset
        name = freq or (pd.infer_freq(times) if len(times) > 2 else None)
    if name is None:
        advice = 'name the step, freq="D", fill the holes, or number the steps with whole numbers'
        raise ValueError(f"The times in ds are not equally far apart, or too few to tell: {advice}.")
    return pd.tseries.frequencies.to_offset(name)
