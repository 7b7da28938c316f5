"""Forecasters: tables in, forecasts out, by hand, beside each other and beside the naive ones."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from flax import nnx
from matplotlib import cbook
from small_networks import Line
from statsmodels import datasets
from tiers import first

import turbanet as tn
from turbanet.core.plan import say_once
from turbanet.forecasting import Forecaster
from turbanet.series.inputs import windows

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


KINDS = [("both", False), ("both", True), ("local", False), ("global", False)]


@pytest.mark.parametrize(("kind", "direct"), first(2, KINDS))
def test_changes_are_added_to_the_last_value_in_the_series_unit(kind, direct):
    how = {"horizon": 3, "window": 5, "kind": kind, "direct": direct, **QUIET}
    found = Forecaster(Steps(3 if direct else 1), **how).fit(WALKS).predict()
    assert found.columns.tolist() == ["unique_id", "ds", "Steps", "Naive", "SeasonalNaive", "RWD"]
    for name, values in WALKS.groupby("unique_id").y:
        ours = found[found.unique_id == name]
        expected = values.iloc[-1] + np.arange(1, 4) * values.std(ddof=0)
        np.testing.assert_allclose(ours.Steps, expected, rtol=1e-5)
        np.testing.assert_allclose(ours.Naive, values.iloc[-1])
        np.testing.assert_allclose(ours.SeasonalNaive, values.iloc[-7:-4])
        drift = (values.iloc[-1] - values.iloc[0]) / (len(values) - 1)
        np.testing.assert_allclose(ours.RWD, values.iloc[-1] + drift * np.arange(1, 4))
    assert found[found.unique_id == "b"].ds.tolist() == list(pd.date_range("2024-04-03", periods=3))


def test_windows_by_hand():
    x, y = windows(np.arange(6, dtype=np.float32) ** 2, window=3, steps=2)
    assert x.tolist() == [[-4, -3, 0], [-8, -5, 0]]
    assert y.tolist() == [[5, 12], [7, 16]]
    x, y = windows(np.arange(6, dtype=np.float32) ** 2, window=3, steps=2, relative=False)
    assert x.tolist() == [[0, 1, 4], [1, 4, 9]]
    assert y.tolist() == [[9, 16], [16, 25]]


def test_a_local_network_is_the_one_that_fit_trains_on_itswindows():
    values = WALKS[WALKS.unique_id == "a"].y.to_numpy()
    scaled = ((values - values.mean()) / values.std()).astype(np.float32)
    x, y = windows(scaled, 6, 1)
    x = x[..., None]
    swarm = tn.TurbaTrainState.swarm(Line(), optax.adam(0.01), np.array([0]), sample_input=x[:1], seed=4)
    swarm, _ = tn.fit(swarm, x, y, tn.mse, epochs=3, batch_size=8, progress=False)
    expected = float(tn.predict(swarm, (scaled[-6:] - scaled[-1])[None, :, None])[0, 0, 0])
    expected = (expected + scaled[-1]) * values.std() + values.mean()
    ours = Forecaster(Line(), horizon=1, window=6, epochs=3, batch_size=8, seed=4, progress=False).fit(WALKS)
    assert ours.predict().Line.tolist()[0] == pytest.approx(expected, rel=1e-5)
    assert len(ours.swarms_["local"]) == 3
    assert ours.histories_["local"].train_loss.shape == (3, 3)


TOGETHER = WALKS[WALKS.unique_id != "b"]  # which ends before the others


@pytest.mark.parametrize("kind", first(1, ["local", "global"]))
def test_a_forecast_from_an_origin_is_that_of_a_table_that_ends_there(kind, caplog):
    say_once.cache_clear()
    how = {"model": Steps(1), "h": 2, "input_size": 4, "kind": kind, **QUIET}
    found = Forecaster(**how).cross_validation(WALKS, n_windows=3, step_size=1)
    assert found.unique_id.unique().tolist() == ["a", "c"]  # b had ended
    assert "1 of 3 series, such as b at 2024-04-05" in caplog.text
    for back in (4, 2):
        cut = WALKS[WALKS.ds <= DAYS[-1 - back]]
        alone = Forecaster(**how).fit(cut).predict().query("unique_id != 'b'")
        ours = found[found.cutoff == DAYS[-1 - back]]
        for column in ("Steps", "Naive", "SeasonalNaive", "RWD"):
            np.testing.assert_array_equal(ours[column], alone[column])
        assert ours.ds.tolist() == alone.ds.tolist()
    true = WALKS.set_index(["unique_id", "ds"]).y
    np.testing.assert_array_equal(found.y, true.loc[list(zip(found.unique_id, found.ds, strict=True))])


class Number(nn.Module):
    """The same change after every window."""

    @nn.compact
    def __call__(self, x):
        return jnp.tile(self.param("number", nn.initializers.zeros, (1,)), (len(x), 1))


@pytest.mark.parametrize("kind", ["global", "local"])
def test_each_origin_is_forecast_by_its_own_networks(kind, monkeypatch):
    def numbered(swarm, *data, **how):
        """Instead of training: member i forecasts the change i."""
        number = jnp.arange(len(swarm), dtype=jnp.float32)
        return swarm.replace(
            params=jax.tree.map(lambda leaf: jnp.broadcast_to(number, leaf.T.shape).T, swarm.params)
        ), None

    monkeypatch.setattr("turbanet.series.networks.fit", numbered)
    monkeypatch.setattr("turbanet.series.networks.diverged", lambda swarm, history: np.zeros(len(swarm), bool))
    how = {"h": 1, "input_size": 4, "kind": kind, **QUIET}
    found = Forecaster(Number(), **how).cross_validation(TOGETHER, n_windows=3).set_index(["cutoff", "unique_id"])
    for origin, day in enumerate(DAYS[-4:-1]):
        for series, name in enumerate(["a", "c"]):
            y = TOGETHER[(TOGETHER.unique_id == name) & (TOGETHER.ds <= day)].y
            expected = y.iloc[-1] + (origin if kind == "global" else 2 * origin + series) * y.std(ddof=0)
            assert found.Number[day, name] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", first(1, ["global", "local"]))
def test_networks_of_the_first_origin_forecast_from_later_ones(kind):
    how = {"model": Line(), "h": 2, "input_size": 4, "kind": kind, **QUIET}
    found = Forecaster(**how).cross_validation(TOGETHER, n_windows=3, refit=False)
    first = Forecaster(**how).fit(TOGETHER[TOGETHER.ds <= DAYS[-7]])
    for cutoff, ours in found.groupby("cutoff"):
        np.testing.assert_allclose(ours.Line, first.predict(df=TOGETHER[TOGETHER.ds <= cutoff]).Line, rtol=1e-5)
    every_second = Forecaster(**how).cross_validation(TOGETHER, n_windows=3, refit=2)
    by_origin = [frame.Line.to_numpy() for _, frame in every_second.groupby("cutoff")]
    for ours, expected in zip(by_origin, [frame.Line for _, frame in found.groupby("cutoff")], strict=True):
        same = np.allclose(ours, expected, rtol=1e-5)
        assert same == (ours is not by_origin[2])


EXOG = {"hist_exog_list": ["volume"], "futr_exog_list": ["promo", "day"]}


WEEKDAY = pd.CategoricalDtype(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"])


def with_exog(walks):
    rows = rng.normal(size=len(walks)), rng.random(len(walks)) < 0.3
    return walks.assign(volume=rows[0], promo=rows[1], day=walks.ds.dt.day_name().astype(WEEKDAY))


@pytest.mark.parametrize(
    ("kind", "how"),
    first(
        3,
        [
            ("global", {"model": Line(6), "quantiles": (0.1, 0.5, 0.9)}),
            ("local", {"model": Line(4), "loss": "negative_binomial"}),
            ("global", {"fill": "forward"}),
            ("local", {}),
        ],
    ),
)
def test_no_forecast_sees_what_came_after_it(kind, how):
    """Values, covariates and rows after an origin change nothing of it: scaling, fills, calendars, intervals."""
    how = {
        "model": Line(2),
        "h": 2,
        "input_size": 4,
        "kind": kind,
        "direct": True,
        "calibration": 2,
        **EXOG,
        **QUIET,
    } | how
    how |= {"freq": "D"} if "fill" in how else {}
    walks = with_exog(TOGETHER.assign(y=lambda rows: (rows.y.abs() * 10).round() if "loss" in how else rows.y))
    static = pd.DataFrame({"unique_id": ["a", "c"], "size": [1.0, 2.0]})
    beside = {"static_df": static} if kind == "global" else {}
    how |= {"stat_exog_list": ["size"]} if beside else {}
    changed = walks.copy()
    after = changed.ds > DAYS[-3]
    changed.loc[after, "y"] = changed.y[after] * 3 + 7 * ("loss" in how)
    changed.loc[after, ["volume"]] = np.nan
    if "fill" in how:
        changed = changed.drop(changed.index[after & (changed.unique_id == "a")][:1])
    before, now = (
        Forecaster(**how)
        .cross_validation(each, n_windows=2, level=50, **beside)
        .query("cutoff < @DAYS[-3]")
        .reset_index(drop=True)
        for each in (walks, changed)
    )
    pd.testing.assert_frame_equal(before, now)
    with_hole = walks.drop(walks.index[walks.ds == DAYS[-2]])  # a closure that nobody scheduled
    before = Forecaster(**how).fit(walks[walks.ds <= DAYS[-3]], **beside)
    future = with_exog(before.make_future_dataframe())[["unique_id", "ds", "promo", "day"]]
    now = Forecaster(**how).fit(with_hole[with_hole.ds <= DAYS[-3]], **beside)
    pd.testing.assert_frame_equal(before.predict(futr_df=future), now.predict(futr_df=future))


def test_intervals_are_of_the_errors_of_horizons_that_were_not_seen():
    how = {"horizon": 2, "window": 4, "calibration": 4, **QUIET}
    found = Forecaster(Steps(1), **how).fit(TOGETHER).predict(level=[50, 75])
    for name, rows in TOGETHER.groupby("unique_id"):
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
    plain = Forecaster(Line(), horizon=2, window=4, plan=tn.Plan(1, 2), **QUIET).fit(TOGETHER).predict()
    how = {"horizon": 2, "window": 4, "plan": tn.Plan(1, 2), "calibration": 3}
    with_it = Forecaster(Line(), **how, **QUIET).fit(TOGETHER).predict()
    np.testing.assert_allclose(plain.Line, with_it.Line, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", first(1, ["global", "local"]))
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
    assert found.columns.tolist() == ["unique_id", "ds", "Steps", "Naive", "RWD"]  # whole numbers have no season
    assert found.ds.tolist() == [47, 48, 40, 41, 47, 48]


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_series_that_ended_before_an_origin_of_the_calibration_is_named(kind):
    with pytest.raises(ValueError, match="Series b, which ends at 2024-04-.*, has fewer than 2 values after"):
        Forecaster(h=2, input_size=4, kind=kind, calibration=2, **QUIET).fit(WALKS)


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
        (
            lambda rows: rows.assign(y=rows.y.where(rows.index != 41)),
            "y is nan in series b at 2024-03-02.*leave",
        ),
        (lambda rows: rows.assign(y=rows.y.astype(object).where(rows.index != 41, "x")), "y is 'x' in row 41"),
        (lambda rows: pd.concat([rows, rows[3:4]]), "Series a has two rows for 2024-03-04"),
        (
            lambda rows: rows[(rows.unique_id != "b") | (rows.ds < "2024-03-05")],
            "Series b has 4 values up to 2024-04-09.* needs 5",
        ),
        (lambda rows: rows.groupby("unique_id").head(2), "too few to tell"),
        (lambda rows: rows.assign(ds=DAYS[0] + pd.to_timedelta(rows.index**2, "D")), "follow no calendar"),
        (
            lambda rows: rows.assign(price=1.0, day=2),
            "has price, day too, .* name it in hist_exog_list",
        ),
        (lambda rows: pd.concat([rows, rows[["y"]]], axis=1), "has y too"),
        (lambda rows: rows.assign(ds=rows.index > 3), "ds holds no dates that pandas reads"),
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
        ({"horizon": 0}, "h must be a whole number"),
        ({"calibration": -1}, "calibration must be a whole number"),
        ({"loss": "tweedie"}, 'loss is "squared_error", "poisson"'),
        ({"loss": tn.l2_loss, "nonnegative": True}, "nonnegative=True brings its own loss"),
        ({"quantiles": (0.1, 0.9)}, "must hold 0.5"),
        ({"quantiles": (0.5, 1)}, "levels between 0 and 1"),
        ({"quantiles": (0.1, 0.5), "horizon": 3}, "direct=True"),
        ({"hist_exog_list": ["x"], "horizon": 3}, "not known ahead.*direct=True"),
        ({"futr_exog_list": "promo"}, r"is a list, got 'promo': put it in a list"),
        ({"futr_exog_list": ["x"], "horizon": 9, "direct": True}, "input_size of at least 9"),
        ({"stat_exog_list": ["x"]}, 'take kind="global"'),
        ({"val_size": 4}, "give both, or none"),
        ({"target_col": "LSTM"}, "'LSTM' names two columns"),
        ({"id_col": "cutoff"}, "'cutoff' names two columns"),
        ({"hist_exog_list": ["y"]}, "'y' names two columns"),
        ({"model": type("Naive", (nn.Module,), {})()}, "class is called Naive, as a baseline's column"),
        ({"val_size": 1, "patience": 2, "horizon": 3, "direct": True}, "hold out as many"),
        ({"season": 2.5}, "season must be a whole number"),
    ],
)
def test_what_no_forecaster_can_be_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Forecaster(**{"horizon": 1, "window": 4} | how)


def test_a_column_may_be_called_as_anything_else():
    named = WALKS.rename(columns={"unique_id": "series", "ds": "step", "y": "error"})
    how = {"id_col": "series", "time_col": "step", "target_col": "error"}
    found = Forecaster(Line(), h=2, input_size=4, **how, **QUIET).cross_validation(named)
    plain = Forecaster(Line(), h=2, input_size=4, **QUIET).cross_validation(WALKS)
    assert found.columns.tolist() == ["series", "step", "cutoff", "error", *plain.columns[4:]]
    np.testing.assert_array_equal(found.to_numpy(), plain.to_numpy())
    none = {"hist_exog_list": None, "futr_exog_list": None, "stat_exog_list": None, "quantiles": None}
    Forecaster(Line(), h=2, input_size=4, **none, **QUIET).fit(WALKS).predict(level=None)


def test_names_of_earlier_versions_and_of_neuralforecast_are_one():
    forecaster = Forecaster(horizon=3, window=4)
    assert (forecaster.h, forecaster.horizon, forecaster.input_size, forecaster.window) == (3, 3, 4, 4)
    with pytest.raises(TypeError, match="horizon and h are one argument"):
        Forecaster(h=1, horizon=1, input_size=3)
    assert repr(forecaster) == "Forecaster(LSTM, local, 4 values to 3 ahead)"


@pytest.mark.parametrize("how", [{"quantiles": (0.1, 0.5, 0.9)}, {"hist_exog_list": ["x"]}], ids=str)
def test_what_is_not_known_beyond_the_horizon_is_not_forecast_there(how):
    outputs = 3 if "quantiles" in how else 1
    table = WALKS.assign(x=1.0) if "hist_exog_list" in how else WALKS
    forecaster = Forecaster(Line(outputs), h=1, input_size=4, **how, **QUIET).fit(table)
    assert len(forecaster.predict()) == 3
    with pytest.raises(ValueError, match="end at h=1, 2 steps came: fit with a longer horizon"):
        forecaster.predict(2)
    with pytest.raises(ValueError, match="end at h=1, 2 steps came"):
        forecaster.cross_validation(table, h=2)


class Normed(nn.Module):
    """Batch statistics and dropout by a keyword that has no default."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x.reshape(len(x), -1)))
        return nn.Dense(1)(nn.Dropout(0.3, deterministic=not train)(x))


class OfNnx(nnx.Module):
    def __init__(self, rngs, width=5):
        self.norm, self.last = nnx.BatchNorm(width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.norm(x[:, -1])))


@pytest.mark.parametrize("model", [Normed(), nnx.bridge.ToLinen(OfNnx)], ids=["Linen", "NNX"])
def test_a_network_of_all_series_knows_whether_it_trains(model):
    forecaster = Forecaster(model, h=2, input_size=4, kind="global", **QUIET).fit(WALKS)
    statistics = jax.tree.leaves(forecaster.swarms_["global"].collections)
    assert len(statistics) >= 2 and any(np.abs(leaf).min() > 0 for leaf in statistics)  # from 0, by batches
    alone = forecaster.predict(df=WALKS[WALKS.unique_id == "c"])
    among_all = forecaster.predict().query("unique_id == 'c'")
    np.testing.assert_allclose(alone.iloc[:, 2], among_all.iloc[:, 2], rtol=1e-5)


def test_a_network_of_all_series_is_a_module():
    pair = (lambda key, x: {"w": jnp.zeros(4)}, lambda params, x: x[..., 0] @ params["w"])
    with pytest.raises(ValueError, match='told which one it sees, .* is for kind="local"'):
        Forecaster(pair, h=1, input_size=4, kind="both")


def test_a_short_series_trains_as_alone():
    short, long = table(a=A[:20]), table(z=C)
    how = {"h": 1, "input_size": 4, "batch_size": 8, "progress": False, "epochs": 3}
    alone = Forecaster(Line(), **how).fit(short)
    beside = Forecaster(Line(), **how).fit(pd.concat([short, long]))
    ours = jax.tree.map(lambda leaf: leaf[:1], beside.swarms_["local"])
    assert int(ours.step[0]) == int(alone.swarms_["local"].step[0]) == 3 * 2  # 16 windows
    np.testing.assert_allclose(beside.predict().Line.iloc[0], alone.predict().Line.iloc[0], rtol=1e-5)


def test_parameters_count_from_the_next_fit_on(tmp_path):
    forecaster = Forecaster(Line(), h=1, input_size=4, **QUIET)
    forecaster.kind = "global"
    assert list(forecaster.fit(WALKS).swarms_) == ["global"]
    forecaster.save(tmp_path / "kept")
    same = Forecaster.load(tmp_path / "kept", model=Line(), kind="global", epochs=7, quantiles=[])
    assert same.epochs == 7
    with pytest.raises(ValueError, match="was fitted with nonnegative=False, and True came: fit anew"):
        Forecaster.load(tmp_path / "kept", model=Line(), nonnegative=True)
    with pytest.raises(ValueError, match="was fitted with loss=.*, and 'poisson' came: fit anew"):
        Forecaster.load(tmp_path / "kept", model=Line(), loss="poisson")
    before = forecaster.predict()
    forecaster.nonnegative = True
    forecaster.cross_validation(WALKS.assign(y=WALKS.y.abs()))
    pd.testing.assert_frame_equal(forecaster.predict(), before)


@pytest.mark.parametrize(
    "later", [{"input_size": 2}, {"input_size": 30}, {"h": 5}, {"futr_exog_list": ["p"]}, {"target_col": "value"}]
)
def test_parameters_set_later_change_no_forecast_of_what_was_fitted(later, tmp_path):
    forecaster = Forecaster(Line(2), h=2, input_size=4, direct=True, calibration=4, **QUIET)
    longest = WALKS[WALKS.unique_id == "a"]
    before = forecaster.fit(longest).predict(level=80)
    for name, value in later.items():
        setattr(forecaster, name, value)
    kept = forecaster.save(tmp_path / "kept") or Forecaster.load(tmp_path / "kept", model=Line(2))
    for each in (forecaster, copy.deepcopy(forecaster), pickle.loads(pickle.dumps(forecaster)), kept):
        pd.testing.assert_frame_equal(each.predict(level=80), before)
        pd.testing.assert_frame_equal(each.predict(df=longest, level=80), before)
        assert len(each.make_future_dataframe()) == 2
        with pytest.raises(ValueError, match="end at h=2, 3 steps came"):
            each.predict(3)
    assert all(getattr(forecaster, name) == value for name, value in later.items())  # for the next fit


def test_a_refused_fit_leaves_the_forecasts_of_the_one_before():
    forecaster = Forecaster(Line(), h=1, input_size=4, **QUIET).fit(WALKS)
    before = forecaster.predict()
    forecaster.input_size = 60
    with pytest.raises(ValueError, match="training needs 61"):
        forecaster.fit(WALKS)
    pd.testing.assert_frame_equal(forecaster.predict(), before)


def test_a_forecaster_of_an_earlier_version_has_lists():
    forecaster = Forecaster(Line(), h=1, input_size=4, **QUIET).fit(WALKS)
    state = forecaster.__getstate__() | {"hist_exog_list": [], "quantiles": None}
    again = Forecaster.__new__(Forecaster)
    again.__setstate__(state)
    pd.testing.assert_frame_equal(again.predict(df=WALKS), forecaster.predict(df=WALKS))


def test_lists_may_be_arrays_and_indices():
    x = WALKS.assign(p=1.0, q=2.0)
    how = {"h": 2, "input_size": 4, "direct": True, **QUIET}
    columns = x.columns[3:]
    plain = Forecaster(hist_exog_list=["p", "q"], quantiles=[0.1, 0.5], **how).fit(x).predict()
    found = Forecaster(hist_exog_list=columns, quantiles=np.array([0.1, 0.5]), **how).fit(x).predict(level=np.array([]))
    pd.testing.assert_frame_equal(found, plain)
    with pytest.raises(ValueError, match="quantiles is a list, got 0.5: put it in a list"):
        Forecaster(quantiles=0.5, **how)
    with pytest.raises(ValueError, match="level is a number, or some, in percent, such as 90; got '80'"):
        Forecaster(**how).fit(WALKS).predict(level="80")


def test_a_fit_that_fails_leaves_the_one_before(monkeypatch):
    static = pd.DataFrame({"unique_id": list("abc"), "k": pd.Categorical(list("uvu"))})
    forecaster = Forecaster(Line(), h=1, input_size=4, kind="global", stat_exog_list=["k"], **QUIET)
    before = forecaster.fit(WALKS, static_df=static)._stat_labels
    monkeypatch.setattr("turbanet.series.networks.Trained", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forecaster.fit(WALKS, static_df=static.assign(k=pd.Categorical(list("uvw"))))
    assert forecaster._stat_labels == before


def test_a_step_that_pandas_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"freq='M' is no step of pandas \(.*\): name the step, such as freq="):
        Forecaster(Line(), h=1, input_size=4, freq="M", **QUIET).fit(WALKS)


def test_what_a_forecaster_cannot_forecast_is_refused():
    direct = Forecaster(Line(2), horizon=2, window=4, direct=True, **QUIET)
    with pytest.raises(ValueError, match=r"call fit\(df\) first"):
        direct.predict()
    direct.fit(WALKS)
    with pytest.raises(ValueError, match="end at h=2, 3 steps came"):
        direct.predict(3)
    with pytest.raises(ValueError, match="need calibration of at least 9"):
        direct.predict(level=[90])
    with pytest.raises(ValueError, match="in percent, from 1 to below 100"):
        direct.predict(level=0.9)
    with pytest.raises(ValueError, match="a forecast from 30 origins, .* needs 61 times"):
        direct.cross_validation(WALKS, windows=30)
    with pytest.raises(ValueError, match="A forecast needs 6 values before the first origin"):
        direct.cross_validation(WALKS, windows=18)


@pytest.mark.parametrize("kind", first(1, ["local", "global"]))
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
    forecaster = Forecaster(Line(), horizon=2, window=4, kind="both", **QUIET).fit(WALKS)
    alone = forecaster.predict(table=WALKS[WALKS.unique_id == "c"])
    among_all = forecaster.predict().query("unique_id == 'c'")
    np.testing.assert_allclose(alone.Line, among_all.Line, rtol=1e-5)


def test_newer_rows_of_other_series_are_refused():
    forecaster = Forecaster(Line(), horizon=2, window=4, **QUIET).fit(WALKS)
    for newer, message in (
        (WALKS.assign(unique_id="z" + WALKS.unique_id), "No network was trained on series za: call fit with a table"),
        (WALKS.groupby("unique_id").tail(3), "Series a has 3 values from its first one on, a network sees 4: give its"),
        (
            WALKS.assign(ds=WALKS.groupby("unique_id").cumcount()),
            "The times were datetime64.* in fit, the table's are int64: give the same",
        ),
        (WALKS.assign(ds=WALKS.ds.dt.tz_localize("Europe/Berlin")), "table's are datetime64.*Europe/Berlin"),
    ):
        with pytest.raises(ValueError, match=message):
            forecaster.predict(table=newer)
    with pytest.raises(ValueError, match=r"A table goes by its name, predict\(df=newer\)"):
        forecaster.predict(WALKS)


def test_a_model_of_other_steps_is_refused():
    for model, steps, received in ((Line(3), 2, "3"), (tn.MLP((8, 1)), 1, "4, 1")):
        message = rf"takes windows \[batch, 4, 1\], .* returns \[batch, {steps}\]; it returned \[batch, {received}\]"
        with pytest.raises(ValueError, match=message):
            Forecaster(model, horizon=steps, window=4, direct=True, **QUIET).fit(WALKS)


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
    origins = pd.concat(
        Forecaster(Steps(1), **how).cross_validation(each, windows=3, step=4) for _, each in data.groupby("unique_id")
    ).reset_index(drop=True)
    for name, rows in ahead.groupby("unique_id"):
        naive, seasonal, naive_error, seasonal_error = STATSFORECAST[name]
        np.testing.assert_allclose(rows.Naive, naive)
        np.testing.assert_allclose(rows.SeasonalNaive, seasonal)
        errors = origins[origins.unique_id == name][["Naive", "SeasonalNaive"]].sub(origins.y, axis=0).abs().mean()
        np.testing.assert_allclose(errors, [naive_error, seasonal_error], rtol=1e-7)


@pytest.mark.thorough
def test_networks_forecast_a_year_of_co2_better_than_the_year_before():
    data = monthly().query("unique_id == 'co2'")
    found = Forecaster(horizon=12, window=24, progress=False).cross_validation(data, windows=3)
    errors = found[["LSTM", "Naive", "SeasonalNaive"]].sub(found.y, axis=0).abs().mean()
    assert errors.LSTM < 0.6 * errors.SeasonalNaive < 0.6 * errors.Naive  # .34, 1.41 and 1.95 when this was written
