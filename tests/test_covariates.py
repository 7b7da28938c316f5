"""What is known beside the series: known so far, known ahead, never changing, missing; series that are new."""

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from small_networks import Line
from tiers import first

import turbanet as tn
from turbanet.forecasting import Forecaster
from turbanet.series.inputs import Shape, channels, standards
from turbanet.series.tables import Columns, as_pandas, encoded

rng = np.random.default_rng(2)
DAYS = pd.date_range("2023-01-02", periods=120)
FAST = {"epochs": 60, "optimizer": optax.adam(0.02), "progress": False}


@pytest.mark.parametrize("price", [9.99, 0.1, 10.0])
def test_a_column_that_is_constant_but_for_rounding_is_constant(price):
    """The mean of 60 times 0.1 is not 0.1: a later change would be of 1e16 deviations."""
    centre, spread = standards(np.full((60, 1), price), np.array([False]))
    assert centre == pytest.approx(price) and spread == 1


def test_channels_by_hand():
    shape = Shape(window=3, steps=1, hist=1, futr=1, stat=1)
    hist = np.array([[[1.0], [np.nan], [3.0]]])
    futr = np.array([[[0.0], [1.0], [np.nan], [2.0]]])
    expected = [
        [7, 1, 0, 0, 0, 1, 0, 9],  # value; hist, missing; futr, missing; futr of the next step, missing; static
        [8, 0, 1, 1, 0, 0, 1, 9],
        [0, 3, 0, 0, 1, 2, 0, 9],
    ]
    for xp in (np, jnp):
        seen = channels(xp.asarray([[7.0, 8, 0]]), xp.asarray(hist), xp.asarray(futr), xp.asarray([[9.0]]), shape, xp)
        assert np.asarray(seen)[0].tolist() == expected
    assert shape.channels == 8


def test_columns_as_numbers():
    size = pd.Categorical(["S", None, "L"], ["S", "M", "L"])
    table = pd.DataFrame({"price": [1.0, np.nan, 3], "promo": [True, False, True], "size": size})
    values, labels, plain = encoded(table, ["price", "promo", "size"])
    assert labels == ("price", "promo", "size=S", "size=M", "size=L")
    np.testing.assert_array_equal(values, [[1, 1, 1, 0, 0], [np.nan, 0, *[np.nan] * 3], [3, 1, 0, 0, 1]])
    centre, spread = standards(values, plain)
    assert centre.tolist() == [2, 0, 0, 0, 0]
    assert spread.tolist() == [1, 1, 1, 1, 1]
    assert standards(np.array([[1.0], [5]]), np.array([False]))[1].tolist() == [2]


def test_columns_of_polars_are_those_of_pandas():
    polars = pytest.importorskip("polars")
    columns = {"size": ["S", None, "L"], "promo": [True, None, False]}
    expected = encoded(pd.DataFrame(columns).astype({"size": "category", "promo": "boolean"}), list(columns))
    table = polars.DataFrame(columns).with_columns(polars.col("size").cast(polars.Categorical))
    for each in (table, table.to_arrow()):
        for found, wanted in zip(encoded(as_pandas(each, Columns())[0], list(columns)), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def promoted(count=3):
    """Noise that a promotion lifts by 5, on days that nothing else tells of."""
    rows = []
    for shop in range(count):
        promo = rng.random(120) < 0.3
        y = 10 * shop + rng.normal(scale=0.3, size=120) + 5 * promo
        rows.append(pd.DataFrame({"unique_id": f"shop {shop}", "ds": DAYS, "y": y, "promo": promo}))
    return pd.concat(rows, ignore_index=True)


@pytest.mark.parametrize(("kind", "direct"), first(2, [("local", False), ("global", True), ("global", False)]))
def test_a_promotion_that_is_known_ahead_is_forecast(kind, direct):
    table = promoted()
    how = {"h": 3, "input_size": 6, "kind": kind, "direct": direct, "futr_exog_list": ["promo"], **FAST}
    known, ahead = table[table.ds < DAYS[-3]], table[table.ds >= DAYS[-3]]
    forecaster = Forecaster(tn.LSTM(16, outputs=3 if direct else 1), **how).fit(known)
    future = forecaster.make_future_dataframe()
    assert future.ds.tolist() == ahead.ds.tolist()
    future["promo"] = ahead.promo.to_numpy()
    found = forecaster.predict(futr_df=future)
    error = np.abs(found.LSTM.to_numpy() - ahead.y.to_numpy())
    assert error.mean() < 1.5 < np.abs(found.Naive.to_numpy() - ahead.y.to_numpy()).mean()
    none = forecaster.predict(futr_df=future.assign(promo=False)).LSTM
    every = forecaster.predict(futr_df=future.assign(promo=True)).LSTM
    assert (every - none).mean() == pytest.approx(5, abs=1.5)
    again = forecaster.cross_validation(table, n_windows=1)
    np.testing.assert_allclose(again.LSTM, found.LSTM, rtol=1e-3, atol=1e-2)


def test_fewer_steps_than_the_horizon_see_the_same_future():
    table = promoted(2)
    how = {"h": 4, "input_size": 6, "direct": True, "futr_exog_list": ["promo"], "epochs": 2, "progress": False}
    forecaster = Forecaster(Line(4), **how).fit(table)
    future = forecaster.make_future_dataframe().assign(promo=[True, False, False, True] * 2)
    whole, first = (forecaster.predict(h, futr_df=future) for h in (4, 2))
    np.testing.assert_allclose(first.Line, whole.groupby("unique_id").head(2).Line, rtol=1e-6)
    by_position = Forecaster(Line(4), **how).cross_validation(table, h=2, n_windows=1)
    assert len(by_position) == 4


def test_bool_and_numbers_of_new_series_are_scaled_as_in_fit():
    table = promoted(2)
    how = {"h": 1, "input_size": 4, "kind": "global", "futr_exog_list": ["promo"], "epochs": 2, "progress": False}
    forecaster = Forecaster(Line(), **how).fit(table)
    new = promoted(1).assign(unique_id="new")
    future = forecaster.make_future_dataframe(df=new).assign(promo=True)
    numbers = forecaster.predict(df=new.assign(promo=new.promo.astype(int)), futr_df=future.assign(promo=1))
    pd.testing.assert_frame_equal(numbers, forecaster.predict(df=new, futr_df=future))


def test_futures_that_do_not_fit_are_refused():
    table = promoted(2)
    forecaster = Forecaster(Line(), h=2, input_size=4, futr_exog_list=["promo"], epochs=1, progress=False).fit(table)
    future = forecaster.make_future_dataframe().assign(promo=True)
    for futr_df, message in (
        (None, "futr_df with promo at the times to come is missing: fill make_future_dataframe"),
        (future[:3], "futr_df has no row for series shop 1 at 2023-05-03"),
        (pd.concat([future, future[:1]]), "futr_df has two rows for series shop 0"),
        (future.assign(ds=future.ds + pd.Timedelta(hours=1)), "has no row for series shop 0 at 2023-05-02 00:00:00"),
        (future.assign(ds=future.ds.dt.tz_localize("UTC")), "futr_df has times in the zone UTC"),
        (future.assign(ds=future.ds.dt.to_period("D")), "futr_df has times that are periods of D, .* have no periods"),
        (future.drop(columns="promo"), "futr_df needs the columns unique_id, ds, promo"),
        (future.assign(promo=pd.Categorical([True] * 4)), "columns beside the series are others than in fit"),
        (future.assign(promo="yes"), "promo must be numbers, bool or a category"),
    ):
        with pytest.raises(ValueError, match=message):
            forecaster.predict(futr_df=futr_df)
    plain = Forecaster(Line(), h=1, input_size=4, epochs=1, progress=False).fit(table.drop(columns="promo"))
    with pytest.raises(ValueError, match="futr_df came, and futr_exog_list names no column"):
        plain.predict(futr_df=future)


def test_what_was_known_so_far_is_seen():
    """A series that follows another one by a day."""
    leader = rng.normal(size=121)
    table = pd.DataFrame({"unique_id": "a", "ds": DAYS, "y": leader[:-1], "leader": leader[1:]})
    how = {"h": 1, "input_size": 4, "hist_exog_list": ["leader"], **FAST}
    scored = Forecaster(Line(), **how).cross_validation(table, n_windows=10, refit=False)
    assert np.abs(scored.Line - scored.y).mean() < 0.4 * np.abs(scored.Naive - scored.y).mean()
    holes = table.assign(leader=table.leader.where(rng.random(120) < 0.7))
    scored = Forecaster(Line(), **how).cross_validation(holes, n_windows=10, refit=False)
    assert np.isfinite(scored.Line).all()


STATIC = pd.DataFrame({"unique_id": ["down", "new", "up"], "slope": [-1.0, 1.0, 1.0]})


def test_what_never_changes_is_seen_of_new_series_too():
    noise = 0.05 * rng.normal(size=(3, 120))
    values = {"up": np.arange(120) + noise[0], "down": -np.arange(120) + noise[1]}
    table = pd.concat(pd.DataFrame({"unique_id": name, "ds": DAYS, "y": y}) for name, y in values.items())
    how = {"h": 1, "input_size": 1, "kind": "global", "stat_exog_list": ["slope"], "features": 1, **FAST}
    forecaster = Forecaster(tn.LSTM(8), **how).fit(table, static_df=STATIC)
    new = pd.DataFrame({"unique_id": "new", "ds": DAYS, "y": 50 + np.arange(120) + noise[2]})
    found = forecaster.predict(df=new, static_df=STATIC)
    assert (found.LSTM - found.Naive).item() > 0.3  # a window of one value, less that value, says nothing
    for static_df, message in (
        (None, "static_df with unique_id, slope is missing"),
        (STATIC[:1], r"static_df has no row for series 'new' \(its first is 'down'\)"),
        (pd.concat([STATIC, STATIC]), "static_df has two rows for series down"),
        (STATIC.assign(slope=np.nan), "static_df has a missing value for series new"),
    ):
        with pytest.raises(ValueError, match=message):
            forecaster.predict(df=new, static_df=static_df)
    kinds = pd.CategoricalDtype(["bank", "oil", "tech"])
    sectors = pd.DataFrame({"unique_id": ["down", "up"], "slope": pd.Categorical(["oil", "tech"], dtype=kinds)})
    by_sector = Forecaster(Line(), **how | {"epochs": 1}).fit(table, static_df=sectors)
    for levels in (["tech"], ["gas", "oil", "zinc"]):
        one = pd.DataFrame({"unique_id": ["new"], "slope": pd.Categorical([levels[0]], levels)})
        with pytest.raises(ValueError, match="columns beside the series are others than in fit, by slope="):
            by_sector.predict(df=new, static_df=one)
    with pytest.raises(ValueError, match="stat_exog_list names no column"):
        Forecaster(h=1, input_size=2, kind="global").fit(table, static_df=STATIC)


def waves(names, length=120):
    phase = rng.uniform(0, 7, len(names))
    parts = [
        pd.DataFrame({"unique_id": name, "ds": DAYS[:length], "y": 9 + np.sin(2 * np.pi * (np.arange(length) + p) / 7)})
        for name, p in zip(names, phase, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)


def test_a_global_network_forecasts_series_that_it_has_not_seen():
    forecaster = Forecaster(tn.LSTM(16), h=3, input_size=8, kind="global", calibration=1, **FAST)
    forecaster.fit(waves([f"wave {i}" for i in range(8)]))
    new = waves(["x", "y"]).assign(y=lambda rows: 1000 * rows.y)
    known = new[new.ds < DAYS[-3]]
    found = forecaster.predict(df=known, level=50)
    true = new[new.ds >= DAYS[-3]].y.to_numpy()
    assert np.abs(found.LSTM - true).mean() < 0.3 * np.abs(found.Naive - true).mean()
    half = found["LSTM-hi-50"] - found.LSTM
    assert (half > 0).all() and (half < 1000).all()
    small = forecaster.predict(df=known.assign(y=known.y / 1000), level=50)
    np.testing.assert_allclose(small["LSTM-hi-50"] - small.LSTM, half / 1000, rtol=1e-3)
    np.testing.assert_array_equal(forecaster.series_, [f"wave {i}" for i in range(8)])


def test_a_series_that_begins_two_years_later_is_trained_on_what_it_has():
    months = pd.date_range("2015-01-01", periods=72, freq="MS")
    y = 10 + np.sin(np.arange(72) * np.pi / 6) + 0.05 * rng.normal(size=(2, 72))
    early = pd.DataFrame({"unique_id": "early", "ds": months, "y": y[0]})
    late = pd.DataFrame({"unique_id": "late", "ds": months[24:], "y": y[1, 24:]})
    forecaster = Forecaster(tn.LSTM(8), h=6, input_size=12, kind="both", epochs=60, progress=False)
    scored = forecaster.cross_validation(pd.concat([early, late]), n_windows=3)
    assert scored.groupby("unique_id").size().to_dict() == {"early": 18, "late": 18}
    errors = scored[["LSTM", "Naive"]].sub(scored.y, axis=0).abs().groupby(scored.unique_id).mean()
    assert (errors.Naive > errors.LSTM).all()


@pytest.mark.parametrize("kind", first(1, ["global", "local"]))
def test_what_is_saved_and_exported_takes_what_is_known_beside(kind, tmp_path):
    table = promoted(2).assign(volume=rng.normal(size=240))
    how = {"h": 2, "input_size": 4, "direct": True, "kind": kind, "epochs": 2, "progress": False}
    how |= {"hist_exog_list": ["volume"], "futr_exog_list": ["promo"]}
    forecaster = Forecaster(Line(2), **how).fit(table)
    future = forecaster.make_future_dataframe().assign(promo=[True, False] * 2)
    expected = forecaster.predict(futr_df=future)
    forecaster.save(tmp_path / "file")
    again = Forecaster.load(tmp_path / "file", model=Line(2))
    pd.testing.assert_frame_equal(again.predict(futr_df=future), expected)
    ends = table.groupby("unique_id").tail(4)
    promo = np.concatenate([ends.promo.to_numpy(float).reshape(2, 4), [[1, 0]] * 2], axis=1)[..., None]
    program = tn.export(forecaster)
    window, volume = (ends[name].to_numpy().reshape(2, 4) for name in ("y", "volume"))
    x = {"window": window, "series": np.arange(2), "hist_exog": volume[..., None], "futr_exog": promo}
    np.testing.assert_allclose(program(x).ravel(), expected.Line, rtol=1e-4, atol=1e-5)
