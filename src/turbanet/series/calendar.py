"""Calendars: the times that follow on a series, by a rule that is given or learned from the times that are there."""

import dataclasses
import itertools
import warnings
from typing import Any

import numpy as np
import pandas as pd

from turbanet.core.arrays import first_line

SEASONS = {"W": 52, "D": 7, "h": 24, "min": 24 * 60, "s": 60, "B": 5, "C": 5}  # of one unit
SEASONS |= {"M": 12, "WOM": 12, "LWOM": 12, "SM": 24, "Q": 4, "Y": 1}
SECONDS = {"W": 7 * 24 * 3600, "D": 24 * 3600, "h": 3600, "min": 60, "s": 1}
SHARE = 0.9  # of a grid's times that are there where it is learned
DAY = pd.Timedelta(days=1)
ADVICE = 'name the step, such as freq="D" or freq=1, a pandas offset, or the list of all times, those to come too'


@dataclasses.dataclass(frozen=True)
class Steps:
    """Whole numbers, `step` apart."""

    step: int
    season: int | None = None

    def after(self, last: Any, steps: int) -> pd.Index:
        return pd.Index(last + self.step * np.arange(1, steps + 1))


@dataclasses.dataclass(frozen=True)
class Offset:
    """A pandas offset from each time to the next."""

    offset: Any

    def after(self, last: pd.Timestamp, steps: int) -> pd.DatetimeIndex:
        times = self.times(last, periods=steps + 1)
        return times[times > last][:steps]

    def times(self, first: pd.Timestamp, **until: Any) -> pd.DatetimeIndex:
        """Return the times from `first` on, as `pd.date_range` does, on the clock of a zone where days are counted."""
        if isinstance(self.offset, pd.offsets.Tick):
            return pd.date_range(first, freq=self.offset, **until)
        until = {name: getattr(value, "tz_localize", lambda _, v=value: v)(None) for name, value in until.items()}
        return _in_zone(pd.date_range(first.tz_localize(None), freq=self.offset, **until), first.tz)

    @property
    def season(self) -> int | None:
        return _season(self.offset.base, self.offset.n)


@dataclasses.dataclass(frozen=True)
class Monthly:
    """The same days of each `every`th month, the last day where a month has no such day."""

    every: int
    days: tuple[int, ...]
    clock: tuple[pd.Timedelta, ...]

    def after(self, last: pd.Timestamp, steps: int) -> pd.DatetimeIndex:
        first = last.tz_localize(None).to_period("M")
        months = pd.period_range(first, periods=(steps + 1) * self.every + 1, freq="M")[:: self.every]
        dates = [month.start_time + DAY * (min(day, month.days_in_month) - 1) for month in months for day in self.days]
        return _clocked(pd.DatetimeIndex(dates), self.clock, last)[:steps]

    @property
    def season(self) -> int | None:
        return 12 // self.every * len(self.days) * len(self.clock) if 12 % self.every == 0 else None


@dataclasses.dataclass(frozen=True)
class Weekly:
    """The same days of each week (Monday is 0), and the same times of each of these days."""

    days: tuple[int, ...]
    clock: tuple[pd.Timedelta, ...]

    def after(self, last: pd.Timestamp, steps: int) -> pd.DatetimeIndex:
        weeks = 2 + -(-steps // (len(self.days) * len(self.clock)))
        dates = pd.date_range(last.tz_localize(None).normalize(), periods=7 * weeks)
        return _clocked(dates[np.isin(dates.day_of_week, self.days)], self.clock, last)[:steps]

    @property
    def season(self) -> int:
        steps = len(self.clock) if len(self.clock) > 1 else len(self.days)
        return steps if steps > 1 else SEASONS["W"]


@dataclasses.dataclass(frozen=True)
class Listed:
    """All times, those to come too, as they were given."""

    times: pd.Index
    season = None

    def after(self, last: Any, steps: int) -> pd.Index:
        coming = self.times[self.times > last][:steps]
        if len(coming) < steps:
            problem = f"freq lists {len(coming)} times after {last}, {steps} are forecast"
            raise ValueError(f"{problem}: list more times, or forecast fewer steps.")
        return coming


Calendar = Steps | Offset | Monthly | Weekly | Listed
RULES: dict[str, type] = {rule.__name__: rule for rule in (Steps, Offset, Monthly, Weekly, Listed)}


def given(freq: Any, times: pd.Index, *, check: bool = True) -> Calendar:
    """Return the calendar that a caller gave: a step, the name of an offset, an offset, or a list of all times.

    times : those that are there, in order. Raises ValueError where fewer than half of them lead to the next one, if
    `check`.
    """
    numbers = not isinstance(times, pd.DatetimeIndex)
    if isinstance(freq, int | np.integer) and not isinstance(freq, bool):
        if not numbers or freq < 1:
            raise ValueError(f"freq={freq} is a step of whole numbers, at least 1; ds holds {_kind(times)}: {ADVICE}.")
        calendar: Calendar = Steps(int(freq))
    elif isinstance(freq, str | pd.offsets.BaseOffset):
        if numbers:
            problem = f"ds holds {_kind(times)}, and freq={freq!r} came too"
            raise ValueError(f"{problem}: leave freq out, or give the step as a number.")
        calendar = Offset(_offset(freq))
    else:
        calendar = Listed(_listed(freq, times))
    if check and len(times) > 1:
        some = times[-min(len(times), 200) :]
        follows = [leads(calendar, *pair) for pair in itertools.pairwise(some)]
        if np.mean(follows) < 0.5:
            wrong = some[int(np.argmin(follows)) :][:2]
            shown = freq if isinstance(freq, str | int) else type(calendar).__name__
            raise ValueError(f"The times in ds are not those of freq={shown}: after {wrong[0]} comes {wrong[1]}.")
    return calendar


def step_of(freq: Any, period: str) -> Any:
    """Return the step in whole numbers of a `freq` that names the frequency of a table's periods; others as they are.

    period : that frequency, such as M; ValueError for another one
    """
    if not isinstance(freq, str | pd.offsets.BaseOffset):
        return freq
    offset = pd.PeriodDtype(period).freq
    try:
        named = pd.PeriodDtype(freq).freq
    except (AttributeError, TypeError, ValueError):  # as of the end of a month, "ME", whose period is "M"
        named = _offset(freq)
    if named != offset:
        raise ValueError(f"ds holds periods of {period}, and freq={freq!r} came too: leave freq out.")
    return offset.n


def _offset(freq):
    try:
        return pd.tseries.frequencies.to_offset(freq)
    except ValueError as error:
        raise ValueError(f"freq={freq!r} is no step of pandas ({first_line(error)}): {ADVICE}.") from error


def of_periods(calendar: Calendar | None, period: str) -> Calendar | None:
    """Return a calendar of whole numbers with the season of the periods that they count."""
    if not isinstance(calendar, Steps):
        return calendar
    return Steps(calendar.step, _season(pd.PeriodDtype(period).freq.base, calendar.step))


def learned(times: pd.Index) -> Calendar | None:
    """Return the calendar of times that are there, each once and in order; None if they follow none.

    Tried in this order: the same days of months; equal steps; equal steps, of which a tenth may be missing; the same
    times on the same days of the week, with holidays (most of the days of that kind are there).
    """
    if len(times) < 3:
        return None
    if not isinstance(times, pd.DatetimeIndex):
        steps = np.diff(times.to_numpy())
        step = int(pd.Series(steps).mode()[0])
        return Steps(step) if not (steps % step).any() and len(steps) >= SHARE * steps.sum() / step else None
    wall = times.tz_localize(None)
    return _months(wall) or _equal(times, wall) or _grid(times, wall) or _week(wall)


def leads(calendar: Calendar, time: Any, following: Any) -> bool:
    """Return whether a calendar goes on from one time with the other."""
    try:
        return calendar.after(time, 1)[0] == following
    except (TypeError, ValueError):  # naive times and zones do not compare
        return False


def state(calendar: Calendar | None) -> dict[str, Any] | None:
    """Return what `restored` makes this calendar of: text, numbers and arrays."""
    if calendar is None:
        return None
    about: dict[str, Any] = {"rule": type(calendar).__name__}
    if isinstance(calendar, Offset):
        name, offset = calendar.offset.freqstr, calendar.offset
        if type(offset) is pd.offsets.CustomBusinessDay and not offset.offset:
            return about | {"n": offset.n, "weekmask": offset.weekmask, "holidays": list(map(str, offset.holidays))}
        if pd.tseries.frequencies.to_offset(name.partition("<")[0].strip() or "D") != offset:
            raise TypeError(f"No file holds the calendar {offset!r}: give fit a list of all times as freq.")
        return about | {"offset": name}
    if isinstance(calendar, Listed):
        zone = getattr(calendar.times, "tz", None)
        times = calendar.times if zone is None else calendar.times.tz_convert(None)
        return about | {"times": times.to_numpy(), "zone": zone and str(zone)}
    fields = dataclasses.asdict(calendar)
    return about | fields | {"clock": tuple(int(time.value) for time in fields.get("clock", ()))}


def restored(about: dict[str, Any] | None) -> Calendar | None:
    """Return the calendar that `state` described."""
    if about is None:
        return None
    fields = {name: value for name, value in about.items() if name not in ("rule", "zone", "clock")}
    rule = RULES[about["rule"]]
    if "holidays" in fields:
        fields = {"offset": pd.offsets.CustomBusinessDay(**fields)}
    elif rule is Offset:
        fields = {"offset": pd.tseries.frequencies.to_offset(fields["offset"])}
    elif rule is Listed:
        times = pd.Index(fields["times"])
        fields = {"times": times.tz_localize("UTC").tz_convert(about["zone"]) if about["zone"] else times}
    elif rule is not Steps:
        fields["clock"] = tuple(map(pd.Timedelta, about["clock"]))
    return rule(**fields)


def _season(unit, count):
    """Return how many steps of `count` units, a pandas offset, make a season; None if they make no whole one."""
    name = unit.freqstr.partition("-")[0]
    name = name if name in SEASONS else name.lstrip("B").rstrip("SE")
    if name in SECONDS:  # 24 hours are a day
        seconds = count * SECONDS[name]
        name = next(unit for unit, length in SECONDS.items() if seconds % length == 0)
        count = seconds // SECONDS[name]
    return SEASONS[name] // count if name in SEASONS and SEASONS[name] % count == 0 else None


def _listed(freq, times):
    """Return a list of times in order, of the kind of those that are there."""
    try:
        index = pd.Index(freq)
        index = index.astype(np.int64) if not isinstance(times, pd.DatetimeIndex) else pd.DatetimeIndex(index)
        index = index.unique().sort_values()
        zone = getattr(times, "tz", None)
        if zone is not None and index.tz is None:
            index = index.tz_localize(zone)
        return index.as_unit("ns") if isinstance(index, pd.DatetimeIndex) else index
    except (TypeError, ValueError) as error:
        raise ValueError(f"freq is no calendar of {_kind(times)} ({error}): {ADVICE}.") from error


def _kind(times):
    return "dates" if isinstance(times, pd.DatetimeIndex) else "whole numbers"


def _clocked(dates, clock, last):
    """Return the times of `dates` at each of `clock`, in the zone of `last` and after it."""
    times = _in_zone(pd.DatetimeIndex([date + time for date in dates for time in clock]), last.tz)
    return times[times > last].unique()


def _in_zone(wall, zone):
    """Return times of a zone's clock, or later where the clock leaves a time out."""
    return wall.tz_localize(zone, ambiguous=np.ones(len(wall), bool), nonexistent="shift_forward")


def _months(wall):
    """Return the rule of times that are the same days of equally distant months."""
    month = wall.year * 12 + wall.month
    clock = wall - wall.normalize()
    steps = np.diff(np.unique(month))
    every = pd.Series(steps).mode()
    if clock.nunique() > 1 or not len(steps) or (steps != every[0]).mean() > 1 - SHARE:
        return None
    counts = pd.Series(wall.day).groupby(np.asarray(month)).agg(list)
    days = max(counts, key=lambda each: (len(each), each))  # of a long month, which has all of them
    days = [31] if (wall.day == wall.days_in_month).all() else days
    if len(days) > 2:
        return None
    length = wall.days_in_month
    expected = np.minimum(np.array(days)[:, None], np.asarray(length)[None])
    if not (expected == np.asarray(wall.day)[None]).any(axis=0).all() or len(wall) < SHARE * len(counts) * len(days):
        return None
    return Monthly(int(every[0]), tuple(int(day) for day in days), (clock[0],))


def _equal(times, wall):
    """Return the offset of times that are equally far apart, on the clock or in a zone's calendar."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 warns that infer_freq will return an offset
        name = pd.infer_freq(times)
        on_clock = name is None and wall.is_unique
        name = pd.infer_freq(wall) if on_clock else name
    offset = None if name is None else pd.tseries.frequencies.to_offset(name)
    if on_clock and isinstance(offset, pd.offsets.Tick) and pd.Timedelta(offset) % DAY:
        return None  # hours of an offset are equally long; these are not where the clock changes
    if offset is None or isinstance(offset, pd.offsets.BusinessHour):  # whose hours are always 9 to 17
        return None
    last_of_month = pd.offsets.LastWeekOfMonth(weekday=wall[0].weekday())  # which pandas takes for the fourth
    for each in (offset, last_of_month):
        if times.equals(Offset(each).times(times[0], end=times[-1])):
            return Offset(each)
    return None


def _grid(times, wall):
    """Return the offset of times of which at most a tenth is missing."""
    for index in (times, wall):
        steps = np.diff(index.as_unit("ns").asi8)
        step = pd.Series(steps).mode()[0]
        if step > 0 and not (steps % step).any() and len(steps) >= SHARE * steps.sum() / step:
            whole_days = step % DAY.value == 0
            if whole_days or index is times:
                days = pd.tseries.frequencies.to_offset(f"{step // DAY.value}D") if whole_days else None
                return Offset(days or pd.tseries.frequencies.to_offset(pd.Timedelta(step)))
    return None


def _week(wall):
    """Return the days of the week and the times of day on which most of the times are.

    A day from Monday to Friday is left out only where the times span it twice or more.
    """
    dates = wall.normalize()
    per_day = pd.Series(np.asarray(dates.unique().day_of_week)).value_counts()
    days = tuple(sorted(int(day) for day in per_day.index[per_day >= per_day.max() / 2]))
    per_time = pd.Series(wall - dates).value_counts()
    clock = tuple(sorted(per_time.index[per_time >= per_time.max() / 2]))
    kept = pd.TimedeltaIndex(clock).asi8
    often = per_time.index[per_time > max(1, per_time.max() / 4)]
    other = np.searchsorted(kept, often.difference(clock).asi8)
    if ((kept[other % len(kept)] - kept[other - 1] - 1) % DAY.value < DAY.value / 2).any():
        return None  # rows lack times by day, and not the calendar by night
    regular = np.isin(wall.day_of_week, days) & (wall - dates).isin(clock)
    span = pd.date_range(dates[0], dates[-1])
    left_out = [day for day in range(5) if day not in days]
    if (np.bincount(span.day_of_week, minlength=7)[left_out] < 2).any():
        return None
    expected = np.isin(span.day_of_week, days).sum() * len(clock)
    return Weekly(days, clock) if regular.mean() >= SHARE and regular.sum() >= 0.8 * expected else None
