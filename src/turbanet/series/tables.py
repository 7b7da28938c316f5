"""Long tables of any library: their columns as ids, times and numbers, and forecasts written as such tables."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from turbanet.core.arrays import first_line
from turbanet.core.extras import needed


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of a table's columns, and what is known beside the series."""

    ids: str = "unique_id"
    time: str = "ds"
    target: str = "y"
    hist: tuple[str, ...] = ()
    futr: tuple[str, ...] = ()
    stat: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the times of a table are, so that those to come are written as such.

    period : the frequency of a table of pandas' periods, whose times are their ordinals
    library : the library of the table, such as polars
    time : narwhals' type of its times, such as ("Datetime", "us", None)
    """

    period: str | None = None
    library: str = "pandas"
    time: tuple | None = None

    def shown(self, time: Any) -> Any:
        """Return a time as a message names it: as the period that an ordinal stands for."""
        return time if self.period is None else pd.Period(ordinal=int(time), freq=self.period)

    def written(self, table: pd.DataFrame, time: str) -> Any:
        """Return a pandas table as a table of the library that the input came in."""
        if self.period is not None:
            for name in {time, "cutoff"} & set(table.columns):
                table[name] = pd.PeriodIndex.from_ordinals(table[name].to_numpy(np.int64), freq=self.period)
        if self.library == "pandas":
            return table
        narwhals = needed("narwhals", "forecast")
        times = [name for name in (time, "cutoff") if name in table]
        zone = getattr(table[time].dtype, "tz", None)
        if zone is not None:
            table[times] = table[times].apply(lambda column: column.dt.tz_convert("UTC").dt.tz_localize(None))
        frame = narwhals.from_dict({name: table[name].to_numpy() for name in table}, backend=self.library)
        if zone is not None:
            utc = [narwhals.col(name).dt.replace_time_zone("UTC") for name in times]
            frame = frame.with_columns(each.dt.convert_time_zone(str(zone)) for each in utc)
        if self.time is not None:
            dtype = getattr(narwhals, self.time[0])(*self.time[1:])
            if not dtype.is_integer() or table[time].max() <= np.iinfo(self.time[0].lower()).max:  # else of 64 bits
                frame = frame.with_columns(narwhals.col(name).cast(dtype) for name in times)
        return frame.to_native()


def located(ids: Sequence[Any], among: Sequence[Any]) -> np.ndarray:
    """Return the places of ids among others, int [id], -1 for none; 1, "1", 1.0 and True are different."""
    positions = {(type(each), each): number for number, each in enumerate(among)}
    return np.array([positions.get((type(each), each), -1) for each in ids], dtype=int)


def check_columns(table: pd.DataFrame, named: Sequence[str], name: str = "The table") -> None:
    """Raise ValueError if a table has no rows, lacks a column, has one twice, or one that nobody named."""
    if missing := [each for each in named if each not in table]:
        lacks = f"it has no {', '.join(missing)}: rename yours, or give id_col=, time_col=, target_col="
        raise ValueError(f"{name} needs the columns {', '.join(named)}; {lacks}.")
    if further := list((Counter(table.columns) - Counter(named)).elements()):
        beside = "name it in hist_exog_list (known so far) or futr_exog_list (known ahead), or drop it"
        advice = beside if name == "The table" else "drop it"
        which = f"it has {', '.join(map(str, further))} too, which no network sees"
        raise ValueError(f"{name} has the columns {', '.join(named)} alone; {which}: {advice}.")
    if not len(table):
        raise ValueError(f"{name} has no rows: give at least one series.")


def check_labels(labels: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError if encoded columns are not those of the table of `fit`."""
    if list(labels) != list(known):
        which = " and ".join(sorted(set(labels) ^ set(known))) or "their order"
        problem = f"The columns beside the series are others than in fit, by {which:.100}"
        raise ValueError(f"{problem}: give categories the same levels, as pd.CategoricalDtype and pl.Enum do.")


def encoded(table: pd.DataFrame, names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """Return columns as numbers [row, column], their names, and which of them are of 0 and 1.

    A category is one column for each of its levels, as its type declares them; NaN where it is missing.
    """
    parts, labels, plain = [np.empty((len(table), 0))], [], [np.empty(0, bool)]
    for name in names:
        column, levels = table[name], None
        if isinstance(column.dtype, pd.CategoricalDtype):
            codes, levels = column.cat.codes.to_numpy(), column.cat.categories
            values = np.where(codes[:, None] < 0, np.nan, codes[:, None] == np.arange(len(levels)))
        elif pd.api.types.is_bool_dtype(column.dtype):
            values = column.to_numpy(np.float64, na_value=np.nan)[:, None]
        else:
            if not pd.api.types.is_numeric_dtype(column.dtype):
                advice = 'make text a category, table[name].astype("category"), and others numbers'
                raise ValueError(f"{name} must be numbers, bool or a category, got {column.dtype}: {advice}.")
            values = numbers(column, name, missing=True)[:, None]
        parts.append(values)
        labels += [name] if levels is None else [f"{name}={level}" for level in levels]
        is_plain = not pd.api.types.is_numeric_dtype(column.dtype) or pd.api.types.is_bool_dtype(column.dtype)
        plain.append(np.full(values.shape[1], is_plain))
    return np.concatenate(parts, axis=1), tuple(labels), np.concatenate(plain)


def as_pandas(table, columns):
    """Return a table as a pandas one, and its `Kind`."""
    if isinstance(table, pd.DataFrame):
        index = [name for name in table.index.names if name in (columns.ids, columns.time) and name not in table]
        return table.reset_index(index).reset_index(drop=True), Kind()
    narwhals = needed("narwhals", "forecast")
    try:
        frame = narwhals.from_native(table, eager_only=True)
    except TypeError as error:
        advice = f"got {type(table).__name__}: make it one"
        raise TypeError(f"The series must be a table (pandas, polars, Arrow) of rows, {advice}.") from error
    table = frame.to_pandas()
    for name, dtype in frame.schema.items():
        if dtype == narwhals.Categorical:  # in the order of its rows; pandas sorts
            table[name] = table[name].cat.reorder_categories(sorted(table[name].cat.categories))
        elif dtype == narwhals.Boolean:
            table[name] = table[name].astype("boolean")
    time = frame.schema.get(columns.time)
    if time in (None, narwhals.String, narwhals.Categorical):
        return table, Kind(library=frame.implementation.value)
    about = [getattr(time, name) for name in ("time_unit", "time_zone") if hasattr(time, name)]
    return table, Kind(library=frame.implementation.value, time=(type(time).__name__, *about))


def keys(table, columns, kind):
    """Return the ids and the times of a table's rows, and what the times are."""
    ids, ds = table[columns.ids], table[columns.time]
    ids = ids.astype(object) if isinstance(ids.dtype, pd.CategoricalDtype) else ids
    ds = ds.astype(ds.cat.categories.dtype) if isinstance(ds.dtype, pd.CategoricalDtype) else ds
    if ids.dtype == object:
        ids = pd.Series([each.item() if isinstance(each, np.generic) else each for each in ids], dtype=object)
    if (empty := (ids.isna() | ds.isna()).to_numpy()).any():
        which = f"Row {int(empty.argmax())} of the table has no {columns.ids} or no {columns.time}"
        raise ValueError(f"{which}: fill it, or leave it out.")
    if ids.dtype == object and len(types := sorted({type(each).__name__ for each in ids})) > 1:
        raise ValueError(f"{columns.ids} holds {' and '.join(types)}: make them of one type, such as by .map(str).")
    if pd.api.types.is_float_dtype(ds):
        raise ValueError(f"{columns.time} holds decimal numbers: make them dates, or whole numbers by .astype(int).")
    if isinstance(ds.dtype, pd.PeriodDtype):
        kind = dataclasses.replace(kind, period=str(ds.dtype)[len("period[") : -1])
        return ids, pd.Index(pd.PeriodIndex(ds).asi8), kind
    if pd.api.types.is_integer_dtype(ds) or pd.api.types.infer_dtype(ds) == "integer":
        whole = ds.astype(np.int64)  # a smaller type could overflow later
        crosses_a_year = (whole.drop_duplicates().sort_values().diff() == 89).any()  # from 202312 to 202401
        for form in ("%Y%m%d", "%Y%m") if crosses_a_year else ("%Y%m%d",):
            dates = pd.to_datetime(whole.astype(str), format=form, errors="coerce")
            if dates.notna().all() and dates.dt.year.between(1900, 2100).all():
                advice = f'make them dates, pd.to_datetime(table["{columns.time}"].astype(str), format="{form}")'
                raise ValueError(f"{columns.time} holds whole numbers that read as dates, {whole.iloc[0]}: {advice}.")
        return ids, pd.Index(whole), kind
    if (form := _ambiguous(ds)) is not None:
        advice = f'pd.to_datetime(table["{columns.time}"], format="%d.%m.%Y"), for example'
        raise ValueError(f"{columns.time} holds {form}, which may be a day or a month first: make dates, {advice}.")
    try:
        if pd.api.types.is_bool_dtype(ds):
            raise TypeError("they are bool")
        return ids, pd.DatetimeIndex(pd.to_datetime(ds)).as_unit("ns"), kind
    except (TypeError, ValueError) as error:
        problem = f"{columns.time} holds no dates that pandas reads ({first_line(error)})"
        raise ValueError(f"{problem}: make them dates, or whole numbers.") from error


def _ambiguous(ds):
    """Return the first time if all are text such as 01/02/2023, which reads as a day of January or of February."""
    if not pd.api.types.is_string_dtype(ds):
        return None
    parts = ds.astype(str).str.extract(r"^\s*(\d{1,2})[./-](\d{1,2})[./-]\d{2,4}\b")
    two = parts.dropna().astype(int)
    return ds.iloc[0] if len(two) == len(ds) > 0 and (two <= 12).all(axis=None) else None


def numbers(column, name, missing):
    if column.dtype.kind in "cmM":
        raise ValueError(f"{name} must be real numbers, got {column.dtype}: convert it.")
    numbers = pd.to_numeric(column, errors="coerce")
    if (text := (numbers.isna() & column.notna()).to_numpy()).any():
        raise ValueError(f"{name} is {column.iloc[int(text.argmax())]!r} in row {int(text.argmax())}: give numbers.")
    values = numbers.to_numpy(np.float64, na_value=np.nan)
    if missing and np.isinf(values).any():
        raise ValueError(f"{name} is infinite in row {int(np.isinf(values).argmax())}: give numbers.")
    return values
