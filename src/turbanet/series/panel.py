"""Panels of series: rows of long tables in order, what is known beside them, and missing rows."""

import dataclasses
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from turbanet.core.plan import say_once
from turbanet.series import calendar as calendars, tables
from turbanet.series.tables import Columns, Kind

FORWARD = "forward"
RHYTHM_ROWS = 20  # the last ones of a series, which tell its rhythm
QUARTER = pd.Timedelta(weeks=13)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Series, which may begin and end at different times, as rows: series after series, each in the order of its times.

    ids : [series]; begin, end : int [series], the first row of each, and the one after its last
    ds : times [row]; y : float64 [row]
    exog : float64 [row, column], those known so far (hist) before those known ahead (futr); NaN where missing
    names : of these columns, such as day=Monday for a level of a category
    filled : bool [row], whether y was missing, and filled
    plain : bool [column], whether a column is one of 0 and 1, which is not scaled
    hist : number of columns that are known so far only
    """

    ids: pd.Index
    begin: np.ndarray
    end: np.ndarray
    ds: pd.Index
    y: np.ndarray
    exog: np.ndarray
    names: tuple[str, ...]
    plain: np.ndarray
    hist: int
    kind: Kind
    filled: np.ndarray

    @property
    def truth(self) -> np.ndarray:
        """Return y [row], NaN where it was filled."""
        return np.where(self.filled, np.nan, self.y)

    @property
    def times(self) -> pd.Index:
        """All times of the panel, each once and in order."""
        return self.ds.unique().sort_values()

    def until(self, time: Any) -> np.ndarray:
        """Return the row after the last one up to `time` [series]."""
        return self.begin + np.add.reduceat((self.ds <= time).astype(np.int64), self.begin)

    def values(self, stop: np.ndarray, series: Any = slice(None)) -> list[np.ndarray]:
        """Return y [step] of some series, all by default, up to the row `stop` [series] of each."""
        return [self.y[slice(*each)] for each in zip(self.begin[series], stop, strict=True)]

    def tail(self, steps: int) -> "Panel":
        """Return the last `steps` rows of each series, or all of those that are shorter."""
        first = np.maximum(self.begin, self.end - steps)
        rows = np.concatenate([np.arange(*each) for each in zip(first, self.end, strict=True)])
        end = np.cumsum(self.end - first)
        parts = {"begin": np.r_[0, end[:-1]], "end": end, "ds": self.ds[rows], "y": self.y[rows]}
        return dataclasses.replace(self, **parts, exog=self.exog[rows], filled=self.filled[rows])

    def state(self) -> dict[str, Any]:
        """Return what `of` makes this panel of: text, numbers and arrays, without objects of pandas."""
        zone = getattr(self.ds, "tz", None)
        ds = (self.ds if zone is None else self.ds.tz_convert(None)).to_numpy()
        arrays = {
            name: getattr(self, name) for name in ("begin", "end", "y", "exog", "names", "plain", "hist", "filled")
        }
        ids = self.ids.to_numpy()
        ids = ids.astype(object) if ids.dtype.kind not in "biufM" else ids
        return arrays | {"ids": ids, "ds": ds, "zone": zone and str(zone), **vars(self.kind)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Panel":
        """Return the panel that `state` described."""
        arrays = {name: state[name] for name in ("begin", "end", "y", "exog", "names", "plain", "hist", "filled")}
        ds = pd.Index(state["ds"])
        ds = ds.tz_localize("UTC").tz_convert(state["zone"]) if state["zone"] is not None else ds
        kind = Kind(**{name: state[name] for name in vars(Kind()) if name in state})
        return cls(ids=pd.Index(state["ids"], tupleize_cols=False), ds=ds, kind=kind, **arrays)


def read(table: Any, columns: Columns, freq: Any = None, fill: Any = None) -> Panel:
    """Return the panel of a long table (pandas, polars, Arrow), a row for each series and time in any order.

    freq : a calendar, as `Forecaster` takes it; fill : "forward" or a number for rows and values that are missing in
    its grid. Raises ValueError for missing and further columns, for values that are no numbers, and repeated times.
    """
    table, kind = tables.as_pandas(table, columns)
    named = columns.ids, columns.time, columns.target, *columns.hist, *columns.futr
    tables.check_columns(table, named)
    ids, ds, kind = tables.keys(table, columns, kind)
    y = tables.numbers(table[columns.target], columns.target, missing=fill is not None)
    exog, labels, plain = tables.encoded(table, columns.hist + columns.futr)
    codes, names = pd.factorize(ids, sort=True)
    order = np.lexsort([ds.asi8 if isinstance(ds, pd.DatetimeIndex) else ds, codes])
    codes, ds, y, exog = codes[order], ds[order], y[order], exog[order]
    if (twice := (np.diff(codes) == 0) & (ds[1:] == ds[:-1])).any():
        row = int(twice.argmax())
        raise ValueError(f"Series {names[codes[row]]} has two rows for {kind.shown(ds[row])}: keep one of them.")
    end = np.cumsum(np.bincount(codes))
    hist = len(tables.encoded(table[:1], columns.hist)[1])
    panel = Panel(names, np.r_[0, end[:-1]], end, ds, y, exog, labels, plain, hist, kind, np.zeros(len(y), bool))
    if fill is not None:
        return _filled(panel, freq, fill)
    if not (finite := np.isfinite(y)).all():
        row = int((~finite).argmax())
        problem = f"{columns.target} is {y[row]} in series {names[codes[row]]} at {kind.shown(ds[row])}"
        raise ValueError(f'{problem}: leave the row out, or give fill="forward" or a number, with freq.')
    return panel


def read_static(table: Any, columns: Columns, ids: pd.Index) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """Return what does not change of each series, float64 [series, column], as `encoded` gives columns."""
    if table is None:
        raise ValueError(f"static_df with {columns.ids}, {', '.join(columns.stat)} is missing: give it.")
    table, _ = tables.as_pandas(table, columns)
    tables.check_columns(table, (columns.ids, *columns.stat), "static_df")
    if (twice := table[columns.ids].duplicated()).any():
        raise ValueError(f"static_df has two rows for series {table[columns.ids][twice].iloc[0]}: keep one of them.")
    positions = tables.located(ids.tolist(), table[columns.ids].tolist())
    if (positions < 0).any():
        problem = f"static_df has no row for series {ids.tolist()[int((positions < 0).argmax())]!r}"
        raise ValueError(f"{problem} (its first is {table[columns.ids].tolist()[0]!r}): give it one.")
    values, labels, plain = tables.encoded(table, columns.stat)
    if np.isnan(values[positions]).any():
        raise ValueError(
            f"static_df has a missing value for series {ids[np.isnan(values[positions]).any(1).argmax()]}."
        )
    return values[positions], labels, plain


def read_future(table: Any, columns: Columns, panel: Panel, coming: list[pd.Index]) -> np.ndarray:
    """Return what is known ahead of each series, [series, step, column], at the times that follow on it."""
    if table is None:
        what = f"futr_df with {', '.join(columns.futr)} at the times to come is missing"
        raise ValueError(f"{what}: fill make_future_dataframe() with them.")
    table, kind = tables.as_pandas(table, columns)
    tables.check_columns(table, (columns.ids, columns.time, *columns.futr), "futr_df")
    ids, ds, kind = tables.keys(table, columns, kind)
    values, labels, _ = tables.encoded(table, columns.futr)
    tables.check_labels(labels, panel.names[panel.hist :])
    given = pd.MultiIndex.from_arrays([tables.located(ids.tolist(), panel.ids.tolist()), ds])
    if (twice := given.duplicated() & (given.get_level_values(0) >= 0)).any():
        time = kind.shown(ds[twice][0])
        raise ValueError(f"futr_df has two rows for series {ids[twice].iloc[0]} at {time}: keep one of them.")
    if kind.period != panel.kind.period:
        kinds = [f"periods of {each.period}" if each.period else "no periods" for each in (kind, panel.kind)]
        raise ValueError("futr_df has times that are {}, the series have {}: give the same.".format(*kinds))
    names = np.repeat(np.arange(len(coming)), list(map(len, coming)))
    times = coming[0].append(coming[1:])
    zone = getattr(ds, "tz", None)
    if isinstance(times, pd.DatetimeIndex) and (zone is None) != (times.tz is None):
        raise ValueError(f"futr_df has times in the zone {zone}, the series' are in {times.tz}: give the same.")
    positions = given[given.get_level_values(0) >= 0].get_indexer(pd.MultiIndex.from_arrays([names, times]))
    if (positions < 0).any():
        row = int((positions < 0).argmax())
        problem = f"futr_df has no row for series {panel.ids[row // len(coming[0])]} at {panel.kind.shown(times[row])}"
        raise ValueError(f"{problem}: start from make_future_dataframe().")
    values = values[given.get_level_values(0) >= 0]
    return values[positions].reshape(len(panel.ids), len(coming[0]), -1)


def say_gaps(panel: Panel, calendar: calendars.Calendar | None) -> None:
    """Log once which series lack times between their first and last one that the panel or its calendar has."""
    times = panel.times
    lacking = times.get_indexer(panel.ds[panel.end - 1]) - times.get_indexer(panel.ds[panel.begin])
    lacking = lacking + 1 - (panel.end - panel.begin)
    if lacking.any():
        some = panel.ids[lacking > 0]
        which = f"{len(some)} of {len(panel.ids)} series lack times that others have, such as {some[0]}"
    elif isinstance(calendar, calendars.Offset) and len(gap := _grid_of(calendar, times).difference(times)):
        which = f"The table has no rows for {gap[0]} and {len(gap) - 1} more times of its grid"
    else:
        which = ""
    if which:
        say_once(f"{which}: values follow one another without them; fill= and freq= make a grid of equal steps.")
    if isinstance(calendar, calendars.Offset | calendars.Listed):
        off = times.difference(_grid_of(calendar, times))
        if len(off):
            which = f"The table has rows for {off[0]} and {len(off) - 1} more times that are not of freq"
            say_once(f"{which}: values follow one another with them, and none are forecast.")


def check_rhythm(panel: Panel, calendar: calendars.Calendar) -> None:
    """Raise ValueError for a series of another rhythm than the calendar's, as weeks or working days are among days.

    Most of its last times are not followed by the calendar's next one, or it has hardly a row of a weekday or an hour.
    """
    leads = cache(partial(calendars.leads, calendar))
    grid = cache(lambda first, last: _grid_of(calendar, (first, last)))
    for name, begin, end in zip(panel.ids, panel.begin, panel.end, strict=True):
        ds = panel.ds[begin:end]
        if len(ds) < 5:  # fewer may be those of a holiday
            continue
        pairs = list(pairwise(ds[-RHYTHM_ROWS:]))
        off = [pair for pair in pairs if not leads(*pair)]
        off = off if 2 * len(off) > len(pairs) else _lacking(calendar, ds, grid)
        if off:
            time, following = off[-1]
            expected = calendar.after(time, 1)[0]
            time, following, expected = map(panel.kind.shown, (time, following, expected))
            problem = f"Series {name} goes on from {time} with {following}, its calendar with {expected}"
            advice = "name the freq that it has, give series of another rhythm a Forecaster of their own"
            raise ValueError(f"{problem}: {advice}, or fill missing rows by fill= and freq=.")


def _lacking(calendar, ds, grid):
    """Return [(time, following) around one of a weekday or an hour that a series hardly has in its last quarter]."""
    if not isinstance(calendar, calendars.Offset | calendars.Weekly):
        return []
    ds = ds[ds >= ds[-1] - QUARTER]
    times = grid(ds[0], ds[-1])
    if len(missing := times.difference(ds)) < 3:
        return []
    for kind in (lambda times: times.day_of_week, lambda times: times - times.normalize()):
        expected = kind(times).value_counts()
        found = kind(ds).value_counts().reindex(expected.index, fill_value=0)
        hardly = expected.index[(expected >= 3) & (found < expected / 10)]
        if kind(missing).isin(hardly).any():
            position = ds.searchsorted(missing[kind(missing).isin(hardly)][-1])
            return [(ds[position - 1], ds[position])]
    return []


def _filled(panel, freq, fill):
    """Return the panel with a row for each time of its calendar's grid, values filled from those before."""
    if fill != FORWARD and (isinstance(fill, bool | str) or not np.isfinite(fill)):
        raise ValueError(f'fill must be "forward", a number or None, got {fill!r}.')
    if panel.kind.period is not None:
        freq = calendars.step_of(panel.kind.period if freq is None else freq, panel.kind.period)
    if freq is None:
        raise ValueError('fill= makes a grid of equal steps, and no step came: name it, such as freq="D".')
    calendar = calendars.given(freq, panel.times, check=False)
    parts: list[tuple[Any, ...]] = []
    for name, begin, end in zip(panel.ids, panel.begin, panel.end, strict=True):
        there = np.flatnonzero(~np.isnan(panel.y[begin:end]))
        if not len(there):
            raise ValueError(f"Series {name} has no value: leave it out.")
        begin, end = begin + there[0], begin + there[-1] + 1  # nothing is filled beyond
        ds = panel.ds[begin:end]
        grid = _grid_of(calendar, ds)
        if len(off := ds.difference(grid)):
            time = panel.kind.shown(off[0])
            raise ValueError(f"Series {name} has a row for {time}, which is no time of freq: leave it out.")
        positions = ds.get_indexer(grid)
        y = np.where(positions < 0, np.nan, panel.y[begin:end][positions])
        missing = np.isnan(y)
        y = pd.Series(y).ffill().to_numpy() if fill == FORWARD else np.where(np.isnan(y), fill, y)
        parts.append((grid, y, missing, np.where(positions[:, None] < 0, np.nan, panel.exog[begin:end][positions])))
    grids = [part[0] for part in parts]
    y, filled, exog = (np.concatenate([part[column] for part in parts]) for column in (1, 2, 3))
    end = np.cumsum(list(map(len, grids)))
    rows = {"ds": grids[0].append(grids[1:]), "y": y, "exog": exog, "filled": filled}
    if 2 * filled.sum() > len(filled):
        say_once(
            f"fill={fill!r} made {filled.sum()} of {len(filled)} rows: give a freq of longer steps if that is too many."
        )
    return dataclasses.replace(panel, begin=np.r_[0, end[:-1]], end=end, **rows)


def _grid_of(calendar, ds):
    """Return the times of a calendar from the first of `ds` to the last."""
    if isinstance(calendar, calendars.Weekly):
        weeks = 2 + (ds[-1] - ds[0]).days // 7
        times = calendar.after(ds[0], weeks * len(calendar.days) * len(calendar.clock))
        return times[times <= ds[-1]].insert(0, ds[0])
    if isinstance(calendar, calendars.Offset):
        return calendar.times(ds[0], end=ds[-1])
    if isinstance(calendar, calendars.Steps):
        return pd.Index(np.arange(ds[0], ds[-1] + 1, calendar.step))
    return calendar.times[(calendar.times >= ds[0]) & (calendar.times <= ds[-1])]
