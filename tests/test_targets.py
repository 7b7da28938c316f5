"""What is forecast: losses by SciPy's likelihoods and scikit-learn's pinball loss, quantiles by simulated series."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from scipy import stats
from scipy.special import gammaln
from sklearn.metrics import mean_pinball_loss
from small_networks import Line
from tiers import first

import turbanet as tn
from turbanet.forecasting import Forecaster
from turbanet.series.targets import Target, _dispersion

rng = np.random.default_rng(1)
QUIET = {"progress": False}


def found(target, out, y):
    return float(target.training_loss()({}, jnp.zeros((len(y), 1)), jnp.asarray(y), lambda params, x: out)[0])


def test_the_poisson_loss_is_the_likelihood_of_scaled_counts():
    out = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
    count = rng.poisson(2.0, (5, 3)).astype(np.float32)
    mean = np.exp(np.asarray(out, np.float64))
    expected = -stats.poisson.logpmf(count, mean) - gammaln(count + 1)  # a constant
    assert found(Target("poisson"), out, count) == pytest.approx(expected.mean(), rel=1e-5)


def test_the_negative_binomial_loss_is_the_likelihood_of_counts():
    target = Target("negative_binomial")
    out = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32)  # log mean and dispersion of three steps
    spread, count = 4.0, rng.poisson(3.0, (5, 3)).astype(np.float32)
    steps = np.asarray(out, np.float64).reshape(5, 3, 2)
    mean, size = np.exp(steps[..., 0]) * spread, 1 / np.asarray(_dispersion(steps[..., 1]), np.float64)
    expected = -stats.nbinom.logpmf(count, size, size / (size + mean)).mean()
    y = target.targets(count / np.float32(spread), spread)
    assert found(target, out, y) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["real", "nonnegative"])
def test_the_loss_of_quantiles_is_the_mean_of_pinball_losses(family):
    levels = 0.1, 0.5, 0.8
    out, y = rng.normal(size=(5, 2, 3)).astype(np.float32), rng.normal(size=(5, 2)).astype(np.float32)
    forecast = out if family == "real" else np.log1p(np.exp(out))
    each = [mean_pinball_loss(y.ravel(), forecast[..., i].ravel(), alpha=level) for i, level in enumerate(levels)]
    ours = found(Target(family, levels), jnp.asarray(out.reshape(5, 6)), y)
    assert ours == pytest.approx(np.mean(each), rel=1e-5)


def test_kinds_of_networks_are_combined_as_forecasts():
    outs = [jnp.asarray(rng.normal(size=(4, 2, 2)), jnp.float32) for _ in range(2)]
    together = np.asarray(Target("negative_binomial").combined(outs))
    np.testing.assert_allclose(np.exp(together[..., 0]), np.mean([np.exp(out[..., 0]) for out in outs], 0), rtol=1e-5)
    np.testing.assert_allclose(together[..., 1], np.mean([out[..., 1] for out in outs], 0), rtol=1e-5)
    of_levels = np.asarray(Target("real", (0.2, 0.5)).combined(outs))
    np.testing.assert_allclose(of_levels, np.mean([np.sort(out, -1) for out in outs], 0), rtol=1e-5)


def test_a_point_forecast_is_the_median_of_quantiles_that_cross():
    crossed = jnp.array([[[3.0, 1.0, 2.0], [5.0, 4.0, 6.0]]])
    np.testing.assert_array_equal(Target("real", (0.1, 0.5, 0.9)).point(crossed), [[2, 5]])


def test_a_model_of_other_outputs_is_refused():
    for family, levels, outputs, given in (
        ("real", (0.1, 0.5, 0.9), 3, 5),
        ("real", (0.1, 0.5, 0.9), 3, 2),
        ("nonnegative", (0.1, 0.5, 0.9), 3, 2),
        ("negative_binomial", (), 2, 2),
        ("poisson", (), 1, 4),
    ):
        target = Target(family, levels)
        y = target.targets(np.zeros((4, 2), np.float32), 1.0)
        with pytest.raises(ValueError, match=rf"must return {outputs} output\(s\) for each of 2 step\(s\)"):
            found(target, jnp.zeros((4, given)), y)


@pytest.mark.parametrize(("y", "message"), [([1.5, 2], "counts, whole numbers from 0"), ([-1, 2], "must be counts")])
def test_targets_of_another_family_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        Target("poisson").check(np.array(y))
    Target("real").check(np.array(y))


class Constant(nn.Module):
    """The same outputs for each window, which training finds."""

    outputs: int

    @nn.compact
    def __call__(self, x):
        return jnp.tile(self.param("out", nn.initializers.zeros, (self.outputs,)), (len(x), 1))


LONG = pd.date_range("2020-01-01", periods=1500)
CONSTANT = {"epochs": 60, "batch_size": 256, "optimizer": optax.adam(0.05), **QUIET}


def test_counts_with_mostly_zeros_get_the_quantiles_of_their_distribution():
    """80 % zeros: a network that can only learn one distribution ends at the counts' own quantiles."""
    size, mean = 0.09, 1.0
    y = stats.nbinom.rvs(size, size / (size + mean), size=1500, random_state=3)
    assert (y == 0).mean() == pytest.approx(0.8, abs=0.03)
    table = pd.DataFrame({"unique_id": "a", "ds": LONG, "y": y})
    how = {"h": 1, "input_size": 3, "loss": "negative_binomial", "quantiles": (0.5, 0.9, 0.99), **CONSTANT}
    forecast = Forecaster(Constant(2), **how).fit(table).predict().iloc[0]
    assert forecast.Constant == pytest.approx(y.mean(), rel=0.1)
    assert forecast["Constant-q0.5"] == 0
    assert forecast["Constant-q0.9"] == pytest.approx(np.quantile(y, 0.9), abs=1)
    assert forecast["Constant-q0.99"] == pytest.approx(np.quantile(y, 0.99), rel=0.25)


def test_two_kinds_are_the_mean_of_their_forecasts():
    target, random = Target("nonnegative"), np.random.default_rng(0)
    outs = [random.normal(size=(7, 3, 1)).astype(np.float32) * 3 for _ in range(2)]
    expected = np.mean([target.point(out) for out in outs], axis=0)
    np.testing.assert_allclose(target.point(target.combined(outs)), expected, rtol=1e-4)


@pytest.mark.parametrize("nonnegative", [False, True])
def test_quantiles_are_those_of_what_follows(nonnegative):
    y = rng.gamma(2.0, 3.0, size=1500)
    table = pd.DataFrame({"unique_id": "a", "ds": LONG, "y": y})
    levels = (0.1, 0.5, 0.9)
    how = {"h": 2, "direct": True, "input_size": 3, "quantiles": levels, "nonnegative": nonnegative, **CONSTANT}
    forecast = Forecaster(Constant(6), **how).fit(table).predict()
    quantiles = forecast[[f"Constant-q{level}" for level in levels]].to_numpy()
    assert (np.diff(quantiles, axis=1) > 0).all()
    np.testing.assert_array_equal(forecast["Constant-q0.5"], forecast.Constant)
    if nonnegative:  # those of real numbers are of changes from a last value that says nothing here
        np.testing.assert_allclose(quantiles, np.tile(np.quantile(y, levels), (2, 1)), rtol=0.1)
    else:
        change = np.quantile(y[1:] - y[:-1], levels)
        np.testing.assert_allclose(quantiles[0] - y[-1], change, atol=0.5)


def test_no_forecast_is_negative():
    y = np.maximum(rng.normal(size=60).cumsum(), 0)
    table = pd.DataFrame({"unique_id": "a", "ds": LONG[:60], "y": y})
    how = {"h": 3, "input_size": 4, "epochs": 3, "nonnegative": True, "calibration": 4, **QUIET}
    forecast = Forecaster(Line(), **how).fit(table).predict(level=80)
    assert (forecast[["Line", "Line-lo-80"]] >= 0).all(axis=None)
    with pytest.raises(ValueError, match="must be not negative, and is -1"):
        Forecaster(Line(), **how).fit(table.assign(y=-1.0))


@pytest.mark.parametrize("kind", first(1, ["global", "local"]))
def test_a_network_stops_where_held_out_values_get_worse(kind):
    y = rng.normal(size=(2, 80))
    table = pd.DataFrame({"unique_id": np.repeat(["a", "b"], 80), "ds": [*LONG[:80]] * 2, "y": y.ravel()})
    how = {"h": 2, "direct": True, "input_size": 8, "kind": kind, "epochs": 60, "val_size": 20, "patience": 2, **QUIET}
    forecaster = Forecaster(tn.LSTM(16, outputs=2), optimizer=optax.adam(0.03), **how).fit(table)
    history = forecaster.histories_[kind]
    assert history.validation_loss.shape[0] < 60
    assert np.isfinite(forecaster.predict().LSTM).all()


def test_windows_held_out_are_not_trained_on():
    y = np.r_[np.zeros(20), np.full(10, 5.0)] + 0.01 * rng.normal(size=30)
    table = pd.DataFrame({"unique_id": "a", "ds": LONG[:30], "y": y})
    changed = table.assign(y=np.r_[y[:25], y[25:][::-1]])  # the same mean and spread
    how = {"h": 1, "input_size": 4, "epochs": 2, "val_size": 5, "patience": 5, **QUIET}
    first, second = (Forecaster(Line(), **how).fit(each).histories_["local"] for each in (table, changed))
    np.testing.assert_allclose(first.train_loss, second.train_loss, rtol=1e-6)
    assert not np.allclose(first.validation_loss, second.validation_loss, rtol=1e-6)


def test_the_validation_loss_is_of_windows_whose_steps_are_all_held_out():
    y = np.r_[rng.normal(size=25), rng.normal(3, 1, size=5)]
    table = pd.DataFrame({"unique_id": "a", "ds": LONG[:30], "y": y})
    how = {"h": 2, "direct": True, "input_size": 4, "epochs": 1, "val_size": 5, "patience": 1, **QUIET}
    history = Forecaster(Constant(2), optimizer=optax.sgd(0.0), **how).fit(table).histories_["local"]
    changes = np.stack([y[25:29] - y[24:28], y[26:30] - y[24:28]])  # from each window's last value, which 0 forecasts
    assert history.validation_loss.item() == pytest.approx((changes**2).mean() / y.var(), rel=1e-5)
