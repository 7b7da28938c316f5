"""Forecasters: tables in, forecasts out, by hand, beside each other and beside the naive ones."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from matplotlib import cbook
from statsmodels import datasets

import turbanet as tn
from turbanet.forecasting import Forecaster
from turbanet.series import panel
from turbanet.series.networks import _windows

DAYS = pd.date_range("2024-03-01", periods=40, freq="D")
rng = np.random.default_rng(0)
QUIET = {"progress": False, "epochs": 2}


def table(**series):
    """A long table of {name: values}, each from the first day on."""
    return pd.concat(
        [pd.DataFrame({"unique_id": name, "ds": DAYS[: len(y)], "y": y}) for name, y in series.items()]
    ).reset_index(drop=True)


A, B, C = (rng.normal(size=length).cumsum() for length in (40, 33, 40))
WALKS = table(a=50 + A, b=B, c=1000 * C)


class Steps(nn.Module):
    """Changes that nothing is learned of: 1, 2, ... after the last value, in the unit that networks are trained in."""

    steps: int

    @nn.compact
    def __call__(self, x):
        nothing = self.param("nothing", nn.initializers.zeros, (1,))
        return jnp.tile(1.0 + jnp.arange(self.steps), (len(x), 1)) + 0 * nothing


@pytest.mark.parametrize(("kind", "direct"), [("local", False), ("global", False), ("both", False), ("both", True)])
def test_changes_are_added_to_the_last_value_in_the_series_unit(kind, direct):
    how = {"horizon": 3, "window": 5, "kind": kind, "direct": direct, **QUIET}
    found = Forecaster(Steps(3 if direct else 1), **how).fit(WALKS).predict()
    assert found.columns.tolist() == ["unique_id", "ds", "Steps", "Naive", "SeasonalNaive"]
    for name, values in WALKS.groupby("unique_id").y:
        ours = found[found.unique_id == name]
        expected = values.iloc[-1] + np.arange(1, 4) * values.std(ddof=0)
        np.testing.assert_allclose(ours.Steps, expected, rtol=1e-5)
        np.testing.assert_allclose(ours.Naive, values.iloc[-1])
        np.testing.assert_allclose(ours.SeasonalNaive, values.iloc[-7:-4])
    assert found[found.unique_id == "b"].ds.tolist() == list(pd.date_range("2024-04-03", periods=3))


def test_windows_by_hand():
    x, y = _windows(np.arange(6, dtype=np.float32) ** 2, window=3, steps=2)
    assert x[..., 0].tolist() == [[-4, -3, 0], [-8, -5, 0]]
    assert y.tolist() == [[5, 12], [7, 16]]


def test_a_local_network_is_the_one_that_fit_trains_on_its_windows():
    values = WALKS[WALKS.unique_id == "a"].y.to_numpy()
    scaled = ((values - values.mean()) / values.std()).astype(np.float32)
    x, y = _windows(scaled, 6, 1)
    swarm = tn.TurbaTrainState.swarm(tn.LSTM(), optax.adam(0.01), np.array([0]), sample_input=x[:1], seed=4)
    swarm, _ = tn.fit(swarm, x, y, tn.mse, epochs=3, batch_size=8, progress=False)
    expected = float(tn.predict(swarm, (scaled[-6:] - scaled[-1])[None, :, None])[0, 0, 0])
    expected = (expected + scaled[-1]) * values.std() + values.mean()
    ours = Forecaster(horizon=1, window=6, epochs=3, batch_size=8, seed=4, progress=False).fit(WALKS)
    assert ours.predict().LSTM.tolist()[0] == pytest.approx(expected, rel=1e-5)
    assert len(ours.swarms_["local"]) == 3
    assert ours.histories_["local"].train_loss.shape == (3, 3)


TOGETHER = WALKS[WALKS.unique_id != "b"]  # which ends before the others


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_forecast_from_an_origin_is_that_of_a_table_that_ends_there(kind):
    how = {"model": Steps(1), "horizon": 2, "window": 4, "kind": kind, **QUIET}
    walks = WALKS if kind == "local" else TOGETHER
    found = Forecaster(**how).cross_validation(walks, windows=3, step=1)
    assert len(found) == 3 * 2 * walks.unique_id.nunique()
    ends = walks.groupby("unique_id").ds.max()
    for back in (4, 3, 2):
        cut = walks[walks.ds <= walks.unique_id.map(ends) - pd.Timedelta(days=back)]
        alone = Forecaster(**how).fit(cut).predict()
        ours = found[found.cutoff == found.unique_id.map(ends) - pd.Timedelta(days=back)]
        for column in ("Steps", "Naive", "SeasonalNaive"):
            np.testing.assert_array_equal(ours[column], alone[column])
        assert ours.ds.tolist() == alone.ds.tolist()
    true = walks.set_index(["unique_id", "ds"]).y
    np.testing.assert_array_equal(found.y, true.loc[list(zip(found.unique_id, found.ds, strict=True))])


@pytest.mark.parametrize("kind", ["local", "global"])
def test_no_forecast_sees_what_came_after_it(kind):
    forecaster = Forecaster(horizon=2, window=4, kind=kind, **QUIET)
    walks = WALKS if kind == "local" else TOGETHER
    changed = walks.copy()
    changed.loc[changed.groupby("unique_id").cumcount(ascending=False) < 2, "y"] *= -3  # the last two values
    before = forecaster.cross_validation(walks, windows=2)
    after = forecaster.cross_validation(changed, windows=2)
    last = before.cutoff == before.unique_id.map(walks.groupby("unique_id").ds.max()) - pd.Timedelta(days=2)
    assert last.sum() == 2 * walks.unique_id.nunique()
    forecasts = ["LSTM", "Naive", "SeasonalNaive"]
    np.testing.assert_array_equal(before[forecasts], after[forecasts])
    assert not before[last].y.equals(after[last].y)


def test_intervals_are_of_the_errors_of_horizons_that_were_not_seen():
    how = {"horizon": 2, "window": 4, "calibration": 4, **QUIET}
    found = Forecaster(Steps(1), **how).fit(WALKS).predict(level=[50, 75])
    for name, rows in WALKS.groupby("unique_id"):
        y = rows.y.to_numpy()
        errors = []
        for cut in (2, 4, 6, 8):
            seen = y[:-cut]
            forecast = seen[-1] + np.arange(1, 3) * seen.std()
            errors.append(np.abs(y[len(seen) : len(seen) + 2] - forecast))
        ours = found[found.unique_id == name]
        for level, rank in ((50, 3), (75, 4)):  # ceil(5 * level)
            half_width = np.sort(errors, axis=0)[rank - 1]
            np.testing.assert_allclose(ours[f"Steps-hi-{level}"] - ours.Steps, half_width, rtol=1e-3)
            np.testing.assert_allclose(ours.Steps - ours[f"Steps-lo-{level}"], half_width, rtol=1e-3)


def test_calibration_changes_no_forecast():
    plain = Forecaster(horizon=2, window=4, plan=tn.Plan(1, 3), **QUIET).fit(WALKS).predict()
    with_it = Forecaster(horizon=2, window=4, plan=tn.Plan(1, 3), calibration=3, **QUIET).fit(WALKS).predict()
    np.testing.assert_allclose(plain.LSTM, with_it.LSTM, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["local", "global"])
def test_series_that_repeat_are_learned_each_as_it_is(kind):
    time = np.arange(40)
    shapes = table(saw=time % 4.0, up=10 * np.where(time % 4 < 2, 0.0, 1.0))
    how = {"horizon": 4, "window": 8, "epochs": 150, "kind": kind, "progress": False, "season": 4}
    found = Forecaster(tn.LSTM(16), optimizer=optax.adam(0.01), **how).fit(shapes).predict()
    assert np.abs(found.LSTM - found.SeasonalNaive)[found.unique_id == "saw"].max() < 0.5
    assert np.abs(found.LSTM - found.SeasonalNaive)[found.unique_id == "up"].max() < 2


def test_a_global_network_is_told_which_series_it_sees():
    up_or_down = table(up=np.cumsum(np.ones(40)), down=np.cumsum(-np.ones(40)))
    flat = up_or_down.assign(y=lambda rows: rows.y * (1 + 1e-9 * rng.normal(size=len(rows))))
    how = {"horizon": 1, "window": 1, "epochs": 200, "kind": "global", "progress": False}
    found = Forecaster(tn.LSTM(8), optimizer=optax.adam(0.02), **how).fit(flat).predict()
    change = (found.LSTM - found.Naive).tolist()  # a window of one value, less that value, says nothing
    assert found.unique_id.tolist() == ["down", "up"]
    assert change == pytest.approx([-1, 1], abs=0.2)


def test_whole_numbers_as_times_and_rows_in_any_order():
    numbered = WALKS.assign(ds=WALKS.groupby("unique_id").cumcount() + 7)
    mixed = numbered.sample(frac=1, random_state=0)
    found = Forecaster(Steps(1), horizon=2, window=4, **QUIET).fit(mixed).predict().sort_values("unique_id")
    assert found.columns.tolist() == ["unique_id", "ds", "Steps", "Naive"]  # whole numbers have no season
    assert found.ds.tolist() == [47, 48, 40, 41, 47, 48]


@pytest.mark.parametrize("how", [{"calibration": 2}, {}])
def test_one_network_of_series_that_end_at_different_times_has_no_origin(how):
    forecaster = Forecaster(horizon=2, window=4, kind="both", **QUIET, **how)
    with pytest.raises(ValueError, match="Series b ends at 2024-04-02.*take kind=.local"):
        forecaster.fit(WALKS) if how else forecaster.cross_validation(WALKS, windows=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows.assign(unique_id=rows.unique_id.where(rows.index != 5)),
            "Row 5 .* has no unique_id",
        ),
        (lambda rows: rows.assign(ds=rows.index * 1.0), "ds holds decimal numbers"),
        (lambda rows: rows.rename(columns={"y": "value"}), "it has no y"),
        (lambda rows: rows[:0], "has no rows"),
        (lambda rows: rows.assign(y=rows.y.where(rows.index != 41)), "y is nan in series b at 2024-03-02"),
        (lambda rows: pd.concat([rows, rows[3:4]]), "Series a has two rows for 2024-03-04"),
        (lambda rows: rows.drop(50), "Series b has no row for 2024-03-11 .*frequency D"),
        (lambda rows: rows.assign(ds=rows.index * 2), "Series a has no row for 1 .*whole numbers"),
        (
            lambda rows: rows[(rows.unique_id != "b") | (rows.ds < "2024-03-05")],
            "Series b has 4 values, .* needs 5",
        ),
        (lambda rows: rows.groupby("unique_id").head(2), "too few to tell"),
        (lambda rows: rows.assign(price=1.0, day=2), "has price, day too, which no network sees: drop it"),
        (lambda rows: pd.concat([rows, rows[["y"]]], axis=1), "has y too"),
        (lambda rows: rows.assign(ds=rows.index > 3), "ds holds no dates that pandas reads"),
        (lambda rows: rows.assign(ds=rows.ds.dt.to_period("D")), "ds holds no dates that pandas reads"),
        (lambda rows: rows.assign(y=rows.ds), "y must be real numbers, got datetime64"),
        (lambda rows: rows.assign(y=1j), "y must be real numbers, got complex128"),
    ],
)
def test_tables_that_are_none_of_series_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Forecaster(horizon=1, window=4, **QUIET).fit(change(WALKS))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kind": "locl"}, 'kind must be "local", "global" or "both"'),
        ({"horizon": 0}, "horizon must be a whole number"),
        ({"calibration": -1}, "calibration must be a whole number of horizons"),
        ({"season": 2.5}, "season must be a whole number"),
    ],
)
def test_what_no_forecaster_can_be_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Forecaster(**{"horizon": 1, "window": 4} | how)


def test_what_a_forecaster_cannot_forecast_is_refused():
    direct = Forecaster(horizon=2, window=4, direct=True, **QUIET)
    with pytest.raises(ValueError, match=r"call fit\(table\) first"):
        direct.predict()
    direct.fit(WALKS)
    with pytest.raises(ValueError, match="forecasts 2 steps, not 3"):
        direct.predict(3)
    with pytest.raises(ValueError, match="need calibration of at least 9"):
        direct.predict(level=[90])
    with pytest.raises(ValueError, match="in percent, from 1 to below 100"):
        direct.predict(level=0.9)
    with pytest.raises(ValueError, match="a forecast from 30 origins needs"):
        direct.cross_validation(WALKS, windows=30)


@pytest.mark.parametrize("kind", ["local", "global"])
def test_newer_rows_are_forecast_by_the_networks_and_the_scaling_of_fit(kind):
    forecaster = Forecaster(Steps(1), horizon=2, window=4, kind=kind, calibration=3, **QUIET).fit(TOGETHER)
    pd.testing.assert_frame_equal(forecaster.predict(table=TOGETHER, level=50), forecaster.predict(level=50))
    newer = TOGETHER[TOGETHER.unique_id == "c"][-9:].assign(ds=lambda rows: rows.ds + pd.Timedelta(days=30))
    found = forecaster.predict(table=newer, level=50)
    np.testing.assert_allclose(found.Steps, newer.y.iloc[-1] + np.arange(1, 3) * (1000 * C).std(), rtol=1e-5)
    assert found.ds.tolist() == list(DAYS[-1] + pd.to_timedelta([31, 32], "D"))
    at_once = forecaster.predict(level=50).query("unique_id == 'c'")
    np.testing.assert_allclose(found["Steps-hi-50"] - found.Steps, at_once["Steps-hi-50"] - at_once.Steps, rtol=1e-5)


def test_some_of_the_series_are_forecast_by_their_own_networks():
    forecaster = Forecaster(horizon=2, window=4, kind="both", epochs=20, progress=False).fit(WALKS)
    alone = forecaster.predict(table=WALKS[WALKS.unique_id == "c"])
    among_all = forecaster.predict().query("unique_id == 'c'")
    np.testing.assert_allclose(alone.LSTM, among_all.LSTM, rtol=1e-5)


def test_newer_rows_of_other_series_are_refused():
    forecaster = Forecaster(horizon=2, window=4, **QUIET).fit(WALKS)
    for newer, message in (
        (WALKS.assign(unique_id="z" + WALKS.unique_id), "No network was trained on series za: call fit with a table"),
        (WALKS.groupby("unique_id").tail(3), "Series a has 3 values, a network sees 4: give its last ones"),
        (
            WALKS.assign(ds=WALKS.groupby("unique_id").cumcount()),
            "apart in fit, the table's are 1: give the same",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            forecaster.predict(table=newer)
    with pytest.raises(ValueError, match=r"A table goes by its name, predict\(table=newer\)"):
        forecaster.predict(WALKS)


def test_a_model_of_other_steps_is_refused():
    with pytest.raises(ValueError, match="make them equal"):
        Forecaster(tn.LSTM(4, outputs=3), horizon=2, window=4, direct=True, **QUIET).fit(WALKS)


def test_seasons_by_frequency():
    for freq, season in [("h", 24), ("MS", 12), ("B", 5), ("W-SUN", 52), ("QE-DEC", 4)]:
        times = pd.date_range("2020-01-06", periods=60, freq=freq)
        assert panel.read(pd.DataFrame({"unique_id": 1, "ds": times, "y": np.arange(60.0)})).season == season


def monthly():
    """Two monthly series that statsmodels ships."""
    co2 = datasets.co2.load_pandas().data.co2.resample("MS").mean().interpolate()
    el_nino = datasets.elnino.load_pandas().data.set_index("YEAR").stack().to_numpy(float)
    el_nino = pd.Series(el_nino, pd.date_range("1950-01-01", periods=len(el_nino), freq="MS"))
    each = {"co2": co2, "elnino": el_nino}
    return pd.concat([pd.DataFrame({"unique_id": name, "ds": y.index, "y": y.to_numpy()}) for name, y in each.items()])


def daily():
    """Closes of trading days, which have holes in a calendar, that matplotlib ships."""
    close = cbook.get_sample_data("goog.npz")["price_data"]["close"].astype(float)
    return pd.DataFrame({"unique_id": "goog", "ds": np.arange(len(close)), "y": close})


# Of statsforecast 2.1.1: forecast(h=8), and mean absolute errors of cross_validation(h=6, n_windows=3, step_size=4).
STATSFORECAST = {
    "co2": (371.02, [370.175, 371.325, 372.06, 372.775, 373.8, 373.06, 371.3, 369.425], 2.95444444, 1.48111111),
    "elnino": (22.07, [24.7, 26.16, 26.54, 26.04, 24.75, 23.26, 21.11, 19.49], 2.93166667, 1.18111111),
    "goog": (362.71, [338.11, 328.98, 332.0, 381.02, 362.71, 338.11, 328.98, 332.0], 28.02166667, 41.03277778),
}


@pytest.mark.parametrize("series", [monthly, daily])
def test_naive_forecasts_are_those_of_statsforecast(series):
    data = series()
    how = {"horizon": 6, "window": 4, "season": 5 if series is daily else None, **QUIET}
    ahead = Forecaster(Steps(1), **how).fit(data).predict(8)
    origins = Forecaster(Steps(1), **how).cross_validation(data, windows=3, step=4)
    for name, rows in ahead.groupby("unique_id"):
        naive, seasonal, naive_error, seasonal_error = STATSFORECAST[name]
        np.testing.assert_allclose(rows.Naive, naive)
        np.testing.assert_allclose(rows.SeasonalNaive, seasonal)
        errors = origins[origins.unique_id == name][["Naive", "SeasonalNaive"]].sub(origins.y, axis=0).abs().mean()
        np.testing.assert_allclose(errors, [naive_error, seasonal_error], rtol=1e-7)


def test_networks_forecast_a_year_of_co2_better_than_the_year_before():
    data = monthly().query("unique_id == 'co2'")
    found = Forecaster(horizon=12, window=24, progress=False).cross_validation(data, windows=3)
    errors = found[["LSTM", "Naive", "SeasonalNaive"]].sub(found.y, axis=0).abs().mean()
    assert errors.LSTM < 0.6 * errors.SeasonalNaive < 0.6 * errors.Naive  # .34, 1.41 and 1.95 when this was written


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, "Int8"])
def test_small_whole_numbers_have_room_for_what_follows(dtype):
    last = np.iinfo(np.uint8 if dtype == np.uint8 else np.int8).max
    ds = pd.array(np.arange(last - 9, last + 1), dtype=dtype)
    table = pd.DataFrame({"unique_id": "a", "ds": ds, "y": np.arange(10.0)})
    assert panel.read(table).coming(2)[0].tolist() == [last + 1, last + 2]


def test_a_frequency_of_whole_numbers_is_refused():
    table = pd.DataFrame({"unique_id": "a", "ds": range(10), "y": np.arange(10.0)})
    with pytest.raises(ValueError, match="which are 1 apart, and freq='D' came too: leave freq out"):
        panel.read(table, "D")
