"""Baselines by what they must forecast, their scores by hand and by scikit-learn."""

import sys

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_pinball_loss

from turbanet.forecasting import Forecaster, scores
from turbanet.series import baselines, intervals
from turbanet.series.intervals import Conformal, check_levels

rng = np.random.default_rng(0)
WAVE = np.sin(2 * np.pi * np.arange(96) / 12)


class Still(nn.Module):
    """No change, and nothing that is learned."""

    @nn.compact
    def __call__(self, x):
        return jnp.zeros((len(x), 1)) * self.param("nothing", nn.initializers.zeros, (1,))


@pytest.mark.parametrize("name", ["ETS", "Theta", "GradientBoosting"])
def test_a_season_with_a_trend_goes_on(name):
    series = [10 + 0.1 * np.arange(96) + WAVE, 2 * WAVE]
    found = baselines.model(name, 24)([y[:84] for y in series], 12, 24, 12)
    expected = np.stack([y[84:] for y in series])
    assert np.abs(found - expected).mean(1) == pytest.approx([0, 0], abs=0.5)
    assert found.shape == (2, 12)


@pytest.mark.parametrize("name", ["ETS", "Theta", "GradientBoosting"])
@pytest.mark.parametrize("value", [5.0, 0.1, -3.0])
def test_a_constant_series_goes_on(name, value):
    found = baselines.model(name, 3)([np.full(38, value), np.arange(38.0)], 7, 3, 2)
    np.testing.assert_allclose(found[0], value, rtol=1e-4)


def test_baselines_stand_beside_the_networks():
    months = pd.date_range("2015-01-01", periods=96, freq="MS")
    table = pd.DataFrame({"unique_id": "a", "ds": months, "y": 10 + WAVE})
    forecaster = Forecaster(Still(), h=3, input_size=12, epochs=1, progress=False)
    found = forecaster.cross_validation(table, n_windows=2, models=["Theta", "ETS"])
    assert found.columns[4:].tolist() == ["Still", "Naive", "SeasonalNaive", "RWD", "Theta", "ETS"]
    np.testing.assert_allclose(found.SeasonalNaive, found.y, atol=1e-9)
    with pytest.raises(ValueError, match="No baseline is called 'Prophet'; .* ETS, Theta, GradientBoosting"):
        forecaster.cross_validation(table, models=["Prophet"])


def test_scores_by_hand():
    y = {name: rng.normal(size=20).cumsum() for name in ("a", "b")}
    table = pd.concat(pd.DataFrame({"unique_id": name, "ds": range(20), "y": each}) for name, each in y.items())
    rows = []
    for name, cutoff in (("a", 15), ("a", 17), ("b", 15), ("b", 17)):
        for step in (1, 2):
            forecast = {"M": rng.normal(), "M-q0.1": rng.normal(), "M-q0.9": rng.normal(), "M-lo-80": 0.0}
            rows.append(
                {"unique_id": name, "ds": cutoff + step, "cutoff": cutoff, "y": y[name][cutoff + step]} | forecast
            )
    frame = pd.DataFrame(rows)
    found = scores(frame.sample(frac=1, random_state=0), table, season=3)
    whole = scores(frame, table, season=3, by_step=False)
    assert len(whole) == 1 and whole.columns.tolist() == ["model", "MASE", "standard_error", "pinball"]
    for part, ours in [
        *((frame[frame.ds - frame.cutoff == step], found[found.step == step].iloc[0]) for step in (1, 2)),
        (frame, whole.iloc[0]),
    ]:
        scaled = [
            abs(row.y - row.M)
            / np.abs(y[row.unique_id][3 : row.cutoff + 1] - y[row.unique_id][: row.cutoff - 2]).mean()
            for row in part.itertuples()
        ]
        assert pytest.approx(np.mean(scaled)) == ours.MASE
        by_series = [np.mean([each for each, at in zip(scaled, part.unique_id) if at == name]) for name in ("a", "b")]
        assert ours.standard_error == pytest.approx(np.std(by_series, ddof=1) / np.sqrt(2))
        pinball = [mean_pinball_loss(part.y, part[f"M-q{level}"], alpha=level) for level in (0.1, 0.9)]
        assert ours.pinball == pytest.approx(np.mean(pinball))
    assert found.model.tolist() == ["M", "M"]
    with pytest.raises(ValueError, match="no column 'NN'"):
        scores(frame, table, models="NN")
    polars = pytest.importorskip("polars")
    pd.testing.assert_frame_equal(scores(polars.from_pandas(frame), polars.from_pandas(table), season=3), found)
    holes = table.assign(y=table.y.where(table.ds != 1))
    assert np.isfinite(scores(frame, holes, season=3).MASE).all()


def test_models_are_scored_on_the_same_rows(caplog):
    table = pd.DataFrame({"unique_id": ["a"] * 9 + ["wild"] * 9, "ds": [*range(9)] * 2, "y": [*range(9)] * 2})
    rows = pd.DataFrame({"unique_id": ["a", "wild"], "ds": 8, "cutoff": 7, "y": 8.0})
    every = scores(rows.assign(M=[7.0, 0.0], Short=[6.0, np.nan], No=np.nan), table, by_step=False).set_index("model")
    assert every.MASE["M"] == 1 and every.MASE["Short"] == 2 and np.isnan(every.MASE["No"])
    assert "Short: no forecast of 1 rows, which are left out for every model" in caplog.text
    assert scores(rows.assign(M=[7.0, 0.0]), table, by_step=False).MASE[0] == (1 + 8) / 2


def test_series_without_a_scale_are_named(caplog):
    sold = pd.DataFrame({"unique_id": "sold", "ds": range(12), "y": np.arange(12.0) % 3})
    table = pd.concat([sold, sold.assign(unique_id="new item", y=np.r_[np.zeros(10), 5, 5])])
    rows = table[table.ds > 9].assign(cutoff=9, Naive=0.0)
    found = scores(rows, table, by_step=False)
    assert "MASE leaves out 1 of 2 series, such as new item: they never changed before an origin" in caplog.text
    pd.testing.assert_frame_equal(found, scores(rows[rows.unique_id == "sold"], table, by_step=False))
    assert np.isnan(scores(rows, table, by_step=False, season=12).MASE[0])
    assert "MASE leaves out 2 of 2 series" in caplog.text


def test_rows_that_fill_made_are_to_stand_in_the_table_of_scores(caplog):
    table = pd.DataFrame({"unique_id": np.repeat(["a", "b"], 12), "ds": list(range(12)) * 2, "y": np.arange(24.0) % 3})
    rows = table[table.ds > 9].assign(cutoff=9, Naive=0.0)
    scores(rows, table)
    assert not caplog.records
    for lacking, said in ((15, "lacks rows of 1 series, such as b, and MASE"), (23, "lacks rows, and MASE")):
        scores(rows, table.drop(lacking))
        assert said in caplog.text


def test_tables_without_the_columns_of_scores_are_refused():
    table = pd.DataFrame({"unique_id": "a", "ds": range(9), "y": 1.0})
    ahead = table.rename(columns={"y": "M"})
    with pytest.raises(ValueError, match="what cross_validation returns, needs .* it has no cutoff, y"):
        scores(ahead, table)
    with pytest.raises(ValueError, match="The table needs the columns unique_id, date, y; it has no date"):
        scores(table.assign(cutoff=3, M=1.0).rename(columns={"ds": "date"}), table, time_col="date")


@pytest.mark.parametrize("name", ["ETS", "GradientBoosting"])
def test_a_baseline_that_cannot_be_is_refused_before_any_training(name, monkeypatch):
    monkeypatch.setattr("turbanet.series.networks.Trained", lambda *_: pytest.fail("it trained"))
    table = pd.DataFrame({"unique_id": "a", "ds": range(40), "y": 1.0})
    forecaster = Forecaster(Still(), h=1, input_size=1, epochs=1, progress=False)
    if name == "ETS":
        monkeypatch.setitem(sys.modules, "statsmodels", None)
    with pytest.raises((ImportError, ValueError), match="baselines|GradientBoosting sees changes"):
        forecaster.cross_validation(table, models=name)


def test_a_series_without_early_origins_has_intervals_of_its_own_errors():
    errors = np.stack([np.arange(1.0, 5), [7, np.nan, np.nan, 5], [np.nan] * 4], axis=1)[
        ..., None
    ]  # [cut, series, step]
    table = pd.DataFrame({"M": np.zeros(3)})
    Conformal(errors).add(table, "M", np.array([60]), np.arange(3), 1)
    np.testing.assert_array_equal(table["M-hi-60"], [3, 7, np.nan])  # ceil(5 * 0.6) and ceil(3 * 0.6)


def test_a_new_series_has_intervals_of_all_errors_in_units_of_its_mean_absolute_step():
    walk = np.array([0.0, 2, 1, 4, 2])  # steps of 2, 1, 3 and 2
    assert intervals.unit(walk) == 2 and intervals.unit(np.arange(9.0)) == intervals.unit(np.arange(900.0)) == 1
    assert np.isnan(intervals.unit(np.ones(5))) and np.isnan(intervals.unit(np.ones(1)))
    errors = np.array([[2.0, 10], [6, 20], [4, 30]])[..., None]  # [cut, series, step]: 1, 3, 2 and 1, 2, 3 units
    table = pd.DataFrame({"M": np.zeros(3)})
    known = Conformal(errors, np.array([2.0, 10]))
    known.add(table, "M", np.array([70]), np.array([0, -1, -1]), 1, np.array([5.0, np.nan]))
    np.testing.assert_allclose(table["M-hi-70"], [6, 3 * 5, np.nan])  # ceil(4 * .7) of [2, 4, 6], ceil(7 * .7) of all
    Conformal(errors).add(table, "M", np.array([70]), np.array([0, -1, -1]), 1, np.array([5.0, 5]))
    np.testing.assert_allclose(table["M-hi-70"], [6, np.nan, np.nan])  # as saved without units


def test_intervals_of_new_walks_cover_alike_with_few_rows_and_with_many():
    rng = np.random.default_rng(0)

    def walks(name, count, length):
        index = pd.MultiIndex.from_product([[f"{name}{i}" for i in range(count)], range(length)])
        y = rng.normal(size=(count, length)).cumsum(axis=1).ravel()
        return pd.DataFrame({"y": y}, index.set_names(["unique_id", "ds"])).reset_index()

    settings = {"h": 1, "input_size": 4, "kind": "global", "calibration": 9, "epochs": 2, "progress": False}
    forecaster = Forecaster(Still(), **settings).fit(walks("known", 30, 60))
    new = walks("new", 300, 61)
    inside = []
    for length in (5, 60):
        found = forecaster.predict(df=new[new.ds.between(60 - length, 59)], level=80).merge(new)
        inside.append(found.y.between(found["Still-lo-80"], found["Still-hi-80"]).mean())
    np.testing.assert_allclose(inside, 0.8, atol=0.07)


@pytest.mark.parametrize(
    ("level", "steps", "message"),
    [
        (0.9, 1, "in percent"),
        (90, 1, "need calibration of at least 9; calibration is 4"),
        (50, 3, "of 2 steps at most"),
    ],
)
def test_levels_that_no_errors_give_are_refused(level, steps, message):
    with pytest.raises(ValueError, match=message):
        check_levels(level, 4, steps, 2)
    assert check_levels(None, 0, 1, 1).tolist() == []
    assert check_levels(99.9, 999, 1, 1).tolist() == [99.9]


def test_intervals_cover_what_they_say():
    """Random walks: intervals of 19 earlier origins, of 60 series, over 5 later origins."""
    table = pd.concat(
        pd.DataFrame({"unique_id": i, "ds": range(80), "y": rng.normal(size=80).cumsum()}) for i in range(60)
    )
    forecaster = Forecaster(Still(), h=1, input_size=2, epochs=1, calibration=19, progress=False)
    found = forecaster.cross_validation(table, n_windows=5, level=[50, 90])
    for level in (50, 90):
        inside = (found[f"Still-lo-{level}"] <= found.y) & (found.y <= found[f"Still-hi-{level}"])
        assert inside.mean() == pytest.approx(level / 100, abs=0.07)


def test_levels_of_any_size_are_quantiles_and_dates_of_python_are_dates():
    days = [day.date() for day in pd.date_range("2024-01-01", periods=8)]
    table = pd.DataFrame({"unique_id": "a", "ds": days, "y": [0.0, 1, 3, 4, 6, 9, 10, 12]})
    found = table[6:].assign(cutoff=days[5], N=9.0, **{"N-q1e-05": 8.0, "N-q0.5": 9.0, "N-quick": 9.5})
    scored = scores(found, table, by_step=False)
    assert scored.model.tolist() == ["N", "N-quick"] and np.isfinite(scored.pinball[0])
    with pytest.raises(ValueError, match="The table has no series 'b', which was forecast"):
        scores(pd.concat([found, found.assign(unique_id="b")]), table)
