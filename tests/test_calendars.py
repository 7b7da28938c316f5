"""Calendars: times that follow on real ones, by pandas' own offsets; tables of other libraries and kinds of times."""

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from small_networks import Line

from turbanet.core.plan import say_once
from turbanet.forecasting import Forecaster, scores
from turbanet.series import calendar
from turbanet.series.panel import Columns, read

BERLIN = "Europe/Berlin"
TRADING = pd.bdate_range("2022-11-01", "2024-02-29").difference(pd.to_datetime(["2022-12-26", "2023-01-02"]))
SESSION = pd.DatetimeIndex(
    [day + pd.Timedelta(minutes=570 + 15 * i) for day in pd.bdate_range("2024-01-02", periods=30) for i in range(26)]
)
DAY_15, DAY_30 = (pd.DateOffset(months=1, day=day) for day in (15, 30))


def sessions(first, last):
    """Each hour of working days from the first to the last one of a session."""
    days = pd.bdate_range("2024-01-01", periods=30)
    return pd.DatetimeIndex([day + pd.Timedelta(hours=hour) for day in days for hour in range(first, last + 1)])


# The times that are there, pandas' offset of those to come, and the steps of a season.
LEARNED = {
    "trading days without two holidays": (TRADING, "B", 5),
    "hours over the change to summer time": (pd.date_range("2024-03-25", periods=400, freq="h", tz=BERLIN), "h", 24),
    "hours over the change to winter time": (pd.date_range("2024-10-20", periods=400, freq="h", tz=BERLIN), "h", 24),
    "hours, two of them missing": (
        pd.date_range("2024-10-20", periods=400, freq="h", tz=BERLIN).delete([40, 300]),
        "h",
        24,
    ),
    "local midnight": (pd.date_range("2024-03-01", periods=60, freq="D", tz=BERLIN), "D", 7),
    "local midnight with holes": (pd.date_range("2024-03-01", periods=60, freq="D", tz=BERLIN).delete([5, 31]), "D", 7),
    "monthly on the 15th": (pd.date_range("2022-01-15", periods=26, freq=DAY_15), DAY_15, 12),
    "monthly on the 30th": (pd.date_range("2022-01-30", periods=26, freq=DAY_30), DAY_30, 12),
    "three 15ths 31 days apart": (pd.date_range("2024-07-15", periods=3, freq=DAY_15), DAY_15, 12),
    "twice a month": (pd.date_range("2022-01-15", periods=40, freq="SME"), "SME", 24),
    "ends of months": (pd.date_range("2022-01-31", periods=26, freq="ME"), "ME", 12),
    "a month is missing": (pd.date_range("2022-01-31", periods=26, freq="ME").delete(9), "ME", 12),
    "last business days": (pd.date_range("2022-01-31", periods=26, freq="BME"), "BME", 12),
    "quarters": (pd.date_range("2002-01-31", periods=26, freq="QE"), "QE", 4),
    "years": (pd.date_range("1990-01-31", periods=26, freq="YE"), "YE", 1),
    "Sundays, one of them missing": (pd.date_range("2022-01-31", periods=40, freq="W").delete(9), "W", 52),
    "ends of short months": (pd.DatetimeIndex(["2024-02-29", "2024-04-30", "2024-06-30"]), "2ME", 6),
    "Sundays": (pd.date_range("2022-01-31", periods=26, freq="W"), "W", 52),
    "every second day": (pd.date_range("2022-01-31", periods=26, freq="2D"), "2D", None),
    "a quarter of an hour": (pd.date_range("2022-01-31", periods=260, freq="15min"), "15min", 96),
    "Sunday to Thursday": (
        pd.date_range("2024-01-01", periods=90, freq=pd.offsets.CustomBusinessDay(weekmask="Sun Mon Tue Wed Thu")),
        pd.offsets.CustomBusinessDay(weekmask="Sun Mon Tue Wed Thu"),
        5,
    ),
    "last Thursdays of months": (pd.date_range("2019-01-01", "2024-04-30", freq="LWOM-THU"), "LWOM-THU", 12),
    "fourth Thursdays of months": (pd.date_range("2019-01-01", "2024-04-30", freq="WOM-4THU"), "WOM-4THU", 12),
    "hours of working days from 8": (sessions(8, 15), pd.offsets.CustomBusinessHour(start="08:00", end="16:00"), 8),
    "hours of working days from 9": (sessions(9, 16), pd.offsets.CustomBusinessHour(start="09:00", end="17:00"), 8),
}


@pytest.mark.parametrize("name", LEARNED)
def test_times_to_come_are_those_of_pandas_offset(name):
    times, offset, season = LEARNED[name]
    rule = calendar.learned(times)
    expected = pd.date_range(times[-1], periods=9, freq=offset)[1:]
    assert rule.after(times[-1], 8).tolist() == expected.tolist()
    assert rule.season == season
    assert calendar.restored(calendar.state(rule)).after(times[-1], 8).tolist() == expected.tolist()


@pytest.mark.parametrize("zone", [None, "America/New_York"])
def test_sessions_of_trading_days_go_on_the_next_morning(zone):
    times = SESSION.tz_localize(zone).delete([30, 31, 200])  # halts
    rule = calendar.learned(times)
    expected = [pd.Timestamp("2024-02-13 09:30", tz=zone), pd.Timestamp("2024-02-13 09:45", tz=zone)]
    assert rule.after(times[-1], 2).tolist() == expected
    assert rule.after(times[0], 800)[-1] > times[-1]
    assert rule.season == 26


def test_times_of_the_clock_go_on_over_the_change_to_winter_time():
    wall = pd.date_range("2024-03-20", "2024-10-27 18:00", freq="6h")
    times = wall.tz_localize(BERLIN)
    for there in (times[:-6], times[:-6].delete([5, 31])):
        rule = calendar.learned(there)
        assert rule.after(times[-7], 6).tolist() == times[-6:].tolist()
        assert calendar.restored(calendar.state(rule)).after(times[-7], 6).tolist() == times[-6:].tolist()


def test_times_without_a_rule_have_no_calendar():
    irregular = pd.DatetimeIndex(np.sort(np.random.default_rng(0).integers(0, 10**17, 60)))
    assert calendar.learned(irregular) is None
    assert calendar.learned(TRADING[:2]) is None


GIVEN = {
    "name": "B",
    "business days": pd.offsets.CustomBusinessDay(holidays=["2024-03-01"]),
    "list": [*TRADING, pd.Timestamp("2024-03-04"), pd.Timestamp("2024-03-05")],
    "dates": [*(day.date() for day in TRADING), datetime.date(2024, 3, 4), datetime.date(2024, 3, 5)],
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_calendar_that_is_given(name):
    rule = calendar.given(GIVEN[name], TRADING)
    first = "2024-03-01" if name == "name" else "2024-03-04"
    assert rule.after(TRADING[-1], 2)[0] == pd.Timestamp(first)
    again = calendar.restored(calendar.state(rule))
    assert again.after(TRADING[-1], 2).tolist() == rule.after(TRADING[-1], 2).tolist()


@pytest.mark.parametrize(
    ("freq", "message"),
    [
        ("ME", "not those of freq=ME: after 2023-05-2. 00:00:00 comes"),
        ("h", "not those of freq=h"),
        (3, "freq=3 is a step of whole numbers.*ds holds dates"),
        (["x"], "freq is no calendar of dates"),
        (TRADING[:9], "not those of freq=Listed"),
    ],
)
def test_a_calendar_of_other_times_is_refused(freq, message):
    with pytest.raises(ValueError, match=message):
        calendar.given(freq, TRADING)


def test_whole_numbers_have_steps_and_no_names():
    numbers = pd.Index([*range(7, 70, 7), 77])  # one is missing
    assert calendar.learned(numbers).after(77, 2).tolist() == [84, 91]
    assert calendar.learned(pd.Index([202011, 202012, 202101, 202102])) is None  # months, which are no numbers
    assert calendar.given([5, 9, 8, 7, *range(5)], pd.Index(range(6))).after(5, 3).tolist() == [7, 8, 9]
    assert calendar.given(2, pd.Index([2, 4, 6])).after(6, 2).tolist() == [8, 10]
    with pytest.raises(ValueError, match="ds holds whole numbers, and freq='D' came too: leave freq out"):
        calendar.given("D", numbers)


def test_a_list_that_ends_too_early():
    with pytest.raises(ValueError, match="freq lists 2 times after 2024-02-29.*, 3 are forecast: list more"):
        calendar.given(GIVEN["list"], TRADING).after(TRADING[-1], 3)


def test_a_calendar_that_no_file_holds():
    rule = calendar.Offset(pd.DateOffset(months=1, day=15))
    with pytest.raises(TypeError, match="No file holds the calendar .*a list of all times"):
        calendar.state(rule)


# Tables: what the times of a forecast are written as.

Y = np.arange(20.0)
HOW = {"model": Line(), "h": 2, "input_size": 3, "epochs": 1, "progress": False}


def kinds():
    days = pd.date_range("2024-01-01", periods=20)
    for dtype in (np.int8, np.uint8, np.int64, "Int8"):
        last = np.iinfo(np.uint8 if dtype == np.uint8 else np.int8).max
        yield str(dtype), pd.array(np.arange(last - 19, last + 1), dtype=dtype), [last + 1, last + 2]
    yield "int as objects", pd.Series(range(20), dtype=object), [20, 21]
    yield "Period", days.to_period("D"), list(pd.period_range("2024-01-21", periods=2, freq="D"))
    months = pd.period_range("2022-01", periods=20, freq="M")
    yield "months", months, list(pd.period_range("2023-09", periods=2, freq="M"))
    yield "date", [day.date() for day in days], list(pd.date_range("2024-01-21", periods=2))
    yield "text", days.astype(str), list(pd.date_range("2024-01-21", periods=2))


@pytest.mark.parametrize(("ds", "expected"), [each[1:] for each in kinds()], ids=[each[0] for each in kinds()])
def test_times_come_back_as_what_they_are(ds, expected):
    found = Forecaster(**HOW).fit(pd.DataFrame({"unique_id": "a", "ds": ds, "y": Y})).predict()
    assert found.ds.tolist() == expected


@pytest.mark.parametrize(("kind", "expected"), [("Int8", "Int64"), ("UInt8", "UInt8"), ("Int16", "Int16")])
def test_whole_number_times_keep_their_type_where_it_holds_them(kind, expected):
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"unique_id": ["a"] * 40, "ds": np.arange(88, 128), "y": np.sin(np.arange(40.0))})
    table = table.with_columns(polars.col("ds").cast(getattr(polars, kind)))
    found = Forecaster(h=3, input_size=4, epochs=1, progress=False).fit(table).predict()
    assert found["ds"].to_list() == [128, 129, 130]
    assert found.schema["ds"] == getattr(polars, expected)


def test_polars_and_arrow_tables_come_back_as_such():
    polars = pytest.importorskip("polars")
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=i) for i in range(20)]
    columns = {"shop": ["a"] * 20 + ["b"] * 20, "day": days * 2, "sold": np.tile(Y, 2)}
    how = HOW | {"id_col": "shop", "time_col": "day", "target_col": "sold"}
    expected = Forecaster(**how).fit(pd.DataFrame(columns)).predict()
    found = Forecaster(**how).fit(polars.DataFrame(columns)).predict()
    assert found.schema["day"] == polars.Date
    assert found["day"].to_list() == [datetime.date(2024, 1, 21), datetime.date(2024, 1, 22)] * 2
    np.testing.assert_array_equal(found["Line"].to_numpy(), expected.Line)
    origins = Forecaster(**how).cross_validation(polars.DataFrame(columns))
    assert origins.schema["cutoff"] == polars.Date
    found = Forecaster(**how).fit(pa.table(columns)).predict()
    assert isinstance(found, pa.Table)
    assert found.schema.field("day").type == pa.date32()
    np.testing.assert_array_equal(found["Line"].to_numpy(), expected.Line)
    zoned = polars.DataFrame(columns).with_columns(polars.col("day").cast(polars.Datetime("us", BERLIN)))
    assert Forecaster(**how).fit(zoned).predict().schema["day"] == polars.Datetime("us", BERLIN)


@pytest.mark.parametrize("freq", ["D", None])
def test_days_go_on_where_a_zone_has_no_midnight(freq):
    days = pd.date_range("2024-03-01", periods=80).tz_localize("Africa/Cairo", nonexistent="shift_forward")
    before = Forecaster(**HOW, freq=freq).fit(pd.DataFrame({"unique_id": "a", "ds": days[:55], "y": np.arange(55.0)}))
    assert days[56].hour == 1
    assert before.predict().ds.tolist() == days[55:57].tolist()
    over = pd.DataFrame({"unique_id": "a", "ds": days, "y": np.arange(80.0)})
    filled = read(over.drop(index=[20, 60]), Columns(), "D", "forward")
    assert filled.ds.tolist() == days.tolist()


def test_a_list_of_dates_as_text_is_in_the_order_of_dates():
    days = pd.date_range("2023-12-10", periods=45)
    table = pd.DataFrame({"unique_id": "a", "ds": days[:20], "y": Y})
    for form in ("%m/%d/%Y", "%d %b %Y", "%Y-%m-%d"):
        found = Forecaster(**HOW, freq=days.strftime(form).tolist()).fit(table).predict()
        assert found.ds.tolist() == days[20:22].tolist()


def test_a_zone_by_another_library_is_the_same_zone(tmp_path):
    polars = pytest.importorskip("polars")
    days = [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(days=i) for i in range(20)]
    table = polars.DataFrame({"unique_id": "a", "ds": days, "y": Y})
    Forecaster(**HOW).fit(table).save(tmp_path / "file")
    again = Forecaster.load(tmp_path / "file", model=HOW["model"])
    assert again.predict(df=table)["ds"].to_list() == [days[-1] + datetime.timedelta(days=i) for i in (1, 2)]
    assert again.predict()["ds"].dtype == table["ds"].dtype  # a table of polars' too
    as_text = table.with_columns(polars.col("ds").dt.to_string("%Y-%m-%d"))
    assert isinstance(Forecaster(**HOW).fit(as_text).predict()["ds"].dtype, polars.Datetime)


@pytest.mark.parametrize("freq", [pd.offsets.CustomBusinessDay(holidays=["2024-01-29"]), "list"])
def test_a_forecaster_is_saved_with_its_calendar(freq, tmp_path):
    days = pd.bdate_range("2024-01-01", periods=30)
    table = pd.DataFrame({"unique_id": "a", "ds": days[:20], "y": Y})
    Forecaster(**HOW, freq=days.delete(20) if freq == "list" else freq).fit(table).save(tmp_path / "file")
    again = Forecaster.load(tmp_path / "file", model=HOW["model"])
    assert again.predict().ds.tolist() == days[21:23].tolist()


def test_periods_of_months_have_a_season_and_a_name():
    months = pd.period_range("2020-01", periods=20, freq="M")
    table = pd.DataFrame({"unique_id": "a", "ds": months, "y": Y})
    found = Forecaster(**HOW, freq="M").fit(table).predict()
    assert found.SeasonalNaive.tolist() == [8, 9]
    with pytest.raises(ValueError, match=r"times were period\[M\] in fit, the table's are period\[D\]"):
        Forecaster(**HOW).fit(table).predict(df=table.assign(ds=pd.period_range("2020-01-01", periods=20, freq="D")))


def test_what_is_no_table_is_refused():
    with pytest.raises(TypeError, match="must be a table .*got dict"):
        Forecaster(**HOW).fit({"unique_id": ["a"] * 20, "ds": range(20), "y": Y})


@pytest.mark.parametrize(
    "ids",
    [["007", "7"], ["a", "a "], ["a", "a\0"], [10, 9], [1.0, 1.5], [("x", 1), ("x", 2)], ["ä", "a\u0308"]],
)
def test_ids_are_kept_apart_to_the_letter(ids):
    column = pd.Series(np.empty(40, object))
    for row in range(40):
        column[row] = ids[row // 20]
    table = pd.DataFrame({"unique_id": column, "ds": [*range(20)] * 2, "y": np.r_[Y, -Y]})
    forecaster = Forecaster(**HOW).fit(table)
    found = forecaster.predict()
    assert sorted(map(repr, forecaster.series_)) == sorted(map(repr, ids))
    for name, last in zip(ids, (19, -19), strict=True):
        own = found[[repr(each) == repr(name) for each in found.unique_id]]
        assert own.Naive.tolist() == [last, last]
    pd.testing.assert_frame_equal(forecaster.predict(df=table), found)


def test_categories_that_no_row_has_are_no_series():
    table = pd.DataFrame({"unique_id": pd.Categorical(["b"] * 20, ["a", "b"]), "ds": range(20), "y": Y})
    assert Forecaster(**HOW).fit(table).series_ == ["b"]


# Missing rows: values train by position, or fill a grid.


def test_halts_train_by_position_and_are_said(caplog):
    say_once.cache_clear()
    days = pd.bdate_range("2024-01-01", periods=20)
    whole = pd.DataFrame({"unique_id": "a", "ds": days, "y": Y})
    halted = pd.DataFrame({"unique_id": "b", "ds": days.delete([5, 6]), "y": Y[:18]})
    found = Forecaster(**HOW).fit(pd.concat([whole, halted])).predict()
    assert "1 of 2 series lack times that others have, such as b" in caplog.text
    assert found.ds.tolist() == [*pd.bdate_range("2024-01-29", periods=2)] * 2
    panel = read(pd.concat([whole, halted]), Columns())
    assert panel.y[panel.begin[1] : panel.end[1]].tolist() == Y[:18].tolist()
    caplog.clear()
    Forecaster(**HOW).fit(whole.assign(ds=pd.date_range("2024-01-01", periods=20)).drop(4))
    assert "The table has no rows for 2024-01-05" in caplog.text


def test_series_of_another_rhythm_than_the_calendar_are_refused():
    def rows(name, freq):
        days = pd.date_range("2024-01-01", "2024-05-16", freq=freq)
        return pd.DataFrame({"unique_id": name, "ds": days, "y": np.sin(np.arange(len(days)))})

    for one, other in [("D", "W-MON"), ("D", "2D"), ("W-MON", "W-WED")]:
        with pytest.raises(ValueError, match=r"Series [ab] goes on from .* with .*, its calendar with .* of their own"):
            Forecaster(**HOW).fit(pd.concat([rows("a", one), rows("b", other)]))
    daily = Forecaster(**HOW).fit(rows("a", "D"))
    with pytest.raises(ValueError, match="Series a goes on from 2024-05-06 00:00:00 with 2024-05-13 00:00:00"):
        daily.predict(df=rows("a", "W-MON"))
    numbers = pd.DataFrame({"unique_id": "b", "ds": range(0, 60, 3), "y": Y})
    with pytest.raises(ValueError, match="Series b goes on from 54 with 57, its calendar with 55"):
        Forecaster(**HOW).fit(pd.concat([numbers, pd.DataFrame({"unique_id": "a", "ds": range(60), "y": 1.0})]))


@pytest.mark.parametrize("open_on", [range(5), range(6)])
def test_a_series_without_a_weekday_that_its_calendar_has_is_refused(open_on):
    def rows(name, lacking=(), days=range(7)):
        ds = pd.date_range("2024-01-01", periods=91)
        ds = ds[ds.day_of_week.isin(days)].delete(lacking)
        return pd.DataFrame({"unique_id": name, "ds": ds, "y": np.sin(np.arange(len(ds)))})

    table = pd.concat([rows("office", days=open_on), rows("mall")])
    for call in (Forecaster(**HOW).fit, Forecaster(**HOW).cross_validation):
        with pytest.raises(ValueError, match="Series office goes on from .* of their own"):
            call(table)
    for lacking in ([69, 76, 80, 86], [63, 70, 77, 84]):  # two Mondays of five, the last four
        Forecaster(**HOW).fit(pd.concat([rows("shop", lacking), rows("mall")]))
    hours = pd.date_range("2024-01-01", periods=300, freq="h")

    def beside_all(ds):
        return pd.concat([pd.DataFrame({"unique_id": len(each), "ds": each, "y": 1.0}) for each in (hours, ds)])

    Forecaster(**HOW).fit(beside_all(hours.delete([-3, -6, -9, -27, -30, -33, -51, -75])))  # hours with holes
    for some in (hours[(hours.hour >= 6) & (hours.hour < 22)], hours[hours.hour != 3]):
        with pytest.raises(ValueError, match="goes on from .*, its calendar with"):
            Forecaster(**HOW).fit(beside_all(some))
    hours = pd.date_range("2024-01-01", periods=24 * 30, freq="h")
    with pytest.raises(ValueError, match="2024-01-26 23:00:00 with 2024-01-29 00:00:00, its calendar"):
        Forecaster(**HOW).fit(beside_all(hours[hours.day_of_week < 5]))


def test_hours_and_weeks_that_rows_lack_are_not_those_of_the_calendar():
    weeks = pd.date_range("2020-01-06", periods=150, freq="W-MON").delete(
        [5, 6, 31, 32, 33, 57, 58, 83, 84, 85, 109, 110, 111, 135, 136, 137, 138]
    )
    assert calendar.learned(weeks).season == 52
    rng = np.random.default_rng(50)
    hours = pd.date_range("2024-01-01", periods=200, freq="h")[rng.random(200) > 0.1]
    found = calendar.learned(hours)
    assert found is None or found.after(hours[-1], 24).equals(pd.date_range(hours[-1], periods=25, freq="h")[1:])
    days = pd.date_range("2024-01-01", periods=120)
    shop = pd.DatetimeIndex([day + pd.Timedelta(hours=hour) for day in days for hour in range(7, 22)])
    found = calendar.learned(shop.union(days[[40, 80]] + pd.Timedelta(hours=22)))  # two late evenings
    assert found == calendar.Weekly(tuple(range(7)), tuple(pd.Timedelta(hours=hour) for hour in range(7, 22)))


@pytest.mark.parametrize(
    "months, change, said",
    [
        (["2024-01", "2024-02", "2024-03", "2024-03"], {}, "has two rows for 2024-03"),
        (["2024-01", "2024-02", "2024-03"], {"y": np.nan}, "y is nan in series a at 2024-01"),
        (pd.period_range("2020-01", periods=20, freq="3M"), {}, "goes on from 2024-09 with 2024-12, .* with 2024-10"),
    ],
    ids=["twice", "missing", "rhythm"],
)
def test_messages_name_periods_and_not_their_ordinals(months, change, said):
    def rows(name, months, **change):
        return pd.DataFrame({"unique_id": name, "ds": pd.PeriodIndex(months, freq="M"), "y": 1.0}).assign(**change)

    monthly = rows("b", pd.period_range("2019-01", periods=70, freq="M"))
    with pytest.raises(ValueError, match=said):
        Forecaster(**HOW).fit(pd.concat([rows("a", months, **change), monthly]))


@pytest.mark.parametrize(
    "times",
    [
        pd.date_range("2024-05-06", periods=72, freq="h").delete(range(3, 70, 7)),  # three days with gaps
        pd.date_range("2024-05-06", periods=40, freq="15min").delete(range(3, 38, 7)),  # one day
        sessions(8, 15)[8:40],  # Tuesday to Friday
        sessions(8, 15)[16:72].delete(range(24, 32)),  # two weeks, of which one Monday is a holiday
    ],
    ids=["three days", "one day", "four sessions", "a holiday"],
)
def test_a_working_day_that_never_came_may_be_a_holiday(times):
    with pytest.raises(ValueError, match="follow no calendar, or are too few to tell"):
        Forecaster(**HOW).fit(pd.DataFrame({"unique_id": "a", "ds": times, "y": np.sin(np.arange(len(times)))}))


def test_one_week_of_sessions_goes_on_after_the_weekend():
    rule = calendar.learned(sessions(8, 15)[:40])
    assert rule.after(sessions(8, 15)[39], 8).tolist() == sessions(8, 15)[40:48].tolist()


@pytest.mark.parametrize(
    "freq",
    [pd.offsets.CustomBusinessDay(holidays=["2024-03-22"]), list(pd.bdate_range("2024-01-01", "2024-05-01")), None],
    ids=["offset", "list", "learned"],
)
def test_a_saved_forecaster_keeps_the_calendar_that_it_was_given(freq, tmp_path):
    days = pd.bdate_range("2024-01-01", "2024-03-21")
    table = pd.DataFrame({"unique_id": "a", "ds": days, "y": np.sin(np.arange(len(days)))})
    forecaster = Forecaster(**HOW, freq=freq).fit(table)
    forecaster.save(tmp_path / "kept")
    again = Forecaster.load(tmp_path / "kept", model=HOW["model"])
    assert (again.freq is None) == (freq is None)
    pd.testing.assert_frame_equal(again.fit(table).predict(), forecaster.predict())


def test_half_months_have_a_season_however_they_are_named():
    assert [calendar.Offset(pd.tseries.frequencies.to_offset(name)).season for name in ("SMS", "SME")] == [24, 24]


def test_a_few_rows_around_holidays_are_of_the_calendar():
    days = pd.bdate_range("2024-01-01", periods=60)
    daily = Forecaster(**HOW).fit(pd.DataFrame({"unique_id": "a", "ds": days, "y": np.sin(np.arange(60.0))}))
    few = pd.DataFrame({"unique_id": "a", "ds": days[[50, 52, 54, 56]], "y": 1.0})
    assert daily.predict(df=few).ds.tolist() == days[[57, 58]].tolist()


def test_what_was_filled_is_not_scored():
    days = pd.date_range("2024-01-01", periods=30)
    table = pd.DataFrame({"unique_id": "a", "ds": days, "y": np.arange(30.0)}).drop([27])
    found = Forecaster(**HOW, freq="D", fill="forward").cross_validation(table, n_windows=2)
    np.testing.assert_array_equal(found.y, [26, np.nan, 28, 29])
    assert found.Naive.tolist() == [25, 25, 26, 26]
    last = scores(found, table)[lambda each: each.model == "Naive"]  # of errors of 1, none, 2 and 3, by steps of 1
    assert last.step.tolist() == [1, 2] and last.MASE.tolist() == pytest.approx([(1 + 2) / 2, 3])


@pytest.mark.parametrize("of", ["days", "numbers", "periods"])
def test_rows_of_few_days_are_filled(of, caplog):
    days = {"numbers": np.arange(60), "periods": pd.period_range("2024-01-01", periods=60, freq="D")}
    sold = np.arange(0, 60, 3)
    ds = days.get(of, pd.date_range("2024-01-01", periods=60))[sold]
    table = pd.DataFrame({"unique_id": "pump", "ds": ds, "y": 1.0 + sold})
    how = HOW | {"freq": {"days": "D", "numbers": 1}.get(of), "fill": 0}
    say_once.cache_clear()
    forecaster = Forecaster(**how).fit(table)
    assert "fill=0 made 38 of 58 rows" in caplog.text
    assert forecaster._panel.y.tolist()[-3:] == [0, 0, 58]
    assert forecaster.predict(df=table[-8:]).Naive.tolist() == [58, 58]


def test_rows_that_freq_does_not_have_are_named(caplog):
    table = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2024-01-01", periods=60), "y": 1.0})
    Forecaster(**HOW, freq="B").fit(table)
    assert "rows for 2024-01-06 00:00:00 and 15 more times that are not of freq" in caplog.text


def test_text_that_reads_as_two_dates_is_refused():
    for form, asked in (("%d.%m.%Y", "01.01.2023"), ("%m/%d/%y", "01/01/23")):
        months = pd.date_range("2023-01-01", periods=12, freq="MS").strftime(form)
        table = pd.DataFrame({"unique_id": "a", "ds": months, "y": 1.0})
        with pytest.raises(ValueError, match=f"ds holds {asked}, which may be a day or a month first: make dates"):
            Forecaster(**HOW).fit(table)
    days = pd.date_range("2023-01-01", periods=31).strftime("%m/%d/%Y")  # the 13th can be no month
    Forecaster(**HOW).fit(pd.DataFrame({"unique_id": "a", "ds": days, "y": 1.0}))


def test_fill_makes_a_grid():
    days = pd.date_range("2024-01-01", periods=6)
    table = pd.DataFrame({"unique_id": "a", "ds": days, "y": [1, np.nan, 3, 4, 5, 6.0]}).drop([3, 4])
    columns = Columns(futr=("promo",))
    begins = pd.DataFrame({"unique_id": "a", "ds": [days[0] - pd.Timedelta(days=1)], "y": [np.nan]})
    ends = pd.DataFrame({"unique_id": "a", "ds": [days[-1] + pd.Timedelta(days=1)], "y": [np.nan]})
    for fill, expected in (("forward", [1, 1, 3, 3, 3, 6]), (0, [1, 0, 3, 0, 0, 6])):
        # Nothing comes before the first value or follows the last.
        panel = read(pd.concat([begins, table, ends]).assign(promo=True), columns, "D", fill)
        np.testing.assert_array_equal(panel.truth, [1, np.nan, 3, np.nan, np.nan, 6])
        assert panel.y.tolist() == expected
        assert panel.ds.tolist() == days.tolist()
        assert np.isnan(panel.exog[:, 0]).tolist() == [False, False, False, True, True, False]
    for change, freq, fill, message in (
        ({}, None, 0, 'no step came: name it, such as freq="D"'),
        ({}, "D", "backward", 'must be "forward", a number or None'),
    ):
        with pytest.raises(ValueError, match=message):
            read(table.assign(**change), Columns(), freq, fill)


@pytest.mark.parametrize("index", ["ds", "unique_id", ["unique_id", "ds"]])
def test_times_and_names_may_be_the_index(index):
    days = pd.date_range("2024-01-01", periods=30)
    table = pd.DataFrame({"unique_id": "a", "ds": days, "y": np.arange(30.0)})
    expected = read(table, Columns())
    found = read(table.set_index(index), Columns())
    assert found.ids.tolist() == ["a"] and found.ds.equals(expected.ds) and found.y.tolist() == expected.y.tolist()


def test_freq_names_the_periods_or_is_refused():
    months = pd.period_range("2020-01", periods=20, freq="M")
    table = pd.DataFrame({"unique_id": "a", "ds": months, "y": Y})
    for freq in ("ME", pd.offsets.MonthEnd(), None, 1):
        found = Forecaster(**HOW, freq=freq).fit(table)
        assert found.predict().ds.tolist() == [months[-1] + 1, months[-1] + 2] and found.calendar_.season == 12
    for freq in ("D", "Q", "2M", "QE", pd.offsets.QuarterEnd(), pd.DateOffset(months=1)):
        with pytest.raises(ValueError, match="ds holds periods of M, and freq=.* came too: leave freq out"):
            Forecaster(**HOW, freq=freq).fit(table)


@pytest.mark.parametrize("freq", [None, "M", pd.period_range("2020-01", periods=30, freq="M").asi8])
def test_missing_periods_are_filled(freq):
    months = pd.period_range("2020-01", periods=21, freq="M").delete(7)
    filled = read(pd.DataFrame({"unique_id": "a", "ds": months, "y": Y}), Columns(), freq, "forward")
    assert np.diff(filled.ds).tolist() == [1] * 20 and filled.y[6:9].tolist() == [6, 6, 7]


def test_every_second_month_is_half_a_season():
    months = pd.period_range("2020-01", periods=20, freq="2M")
    table = pd.DataFrame({"unique_id": "a", "ds": months.asfreq("M"), "y": Y})
    assert Forecaster(**HOW).fit(table).calendar_ == calendar.Steps(2, 6)
    assert Forecaster(**HOW).fit(table.assign(ds=months)).calendar_ == calendar.Steps(2, 6)


@pytest.mark.parametrize(
    "spellings, season",
    [
        (("D", "24h", "1440min", "86400s"), 7),
        (("h", "60min", "3600s"), 24),
        (("min", "60s"), 1440),
        (("W-SUN", "7D", "168h"), 52),
        (("14D", "2W"), 26),
        (("2D", "48h", "500ms"), None),
        (("30s",), 2),
    ],
)
def test_a_season_does_not_depend_on_the_spelling_of_the_step(spellings, season):
    offsets = map(pd.tseries.frequencies.to_offset, spellings)
    assert [calendar.Offset(offset).season for offset in offsets] == [season] * len(spellings)


def test_ids_of_several_types_are_refused():
    table = pd.DataFrame(
        {"unique_id": pd.Series(["1"] * 20 + [1] * 20, dtype=object), "ds": [*range(20)] * 2, "y": 1.0}
    )
    with pytest.raises(ValueError, match="unique_id holds int and str: make them of one type"):
        Forecaster(**HOW).fit(table)


def test_dates_as_whole_numbers_are_refused_and_counters_are_not():
    days = pd.date_range("2020-01-12", periods=20)
    table = pd.DataFrame({"unique_id": "a", "ds": days.strftime("%Y%m%d").astype(int), "y": Y})
    with pytest.raises(ValueError, match=r'read as dates, 20200112: make them dates, pd.to_datetime\(table\["ds"\]'):
        Forecaster(**HOW).fit(table)
    months = pd.date_range("2023-01-01", periods=20, freq="MS").strftime("%Y%m").astype(int)
    with pytest.raises(ValueError, match=r"read as dates, 202301: make them dates, .*format=\"%Y%m\""):
        Forecaster(**HOW).fit(table.assign(ds=months))
    categories = Forecaster(**HOW).fit(table.assign(ds=pd.Categorical(range(20)))).predict()
    assert categories.ds.tolist() == [20, 21]
    counted = table.assign(ds=20200112 + np.arange(20) * 5)
    assert Forecaster(**HOW).fit(counted).predict().ds.tolist() == [20200212, 20200217]
