"""Scores are of a member's own rows as one batch, and its steps are those that it makes alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.training.plan import say_once

QUIET = {"progress": False}


def rmse(params, x, y, apply_fn):
    prediction = apply_fn({"params": params}, x)
    return jnp.sqrt(jnp.mean((prediction - y) ** 2)), prediction


def ranking(params, x, y, apply_fn):
    """Logistic loss of each pair of rows whose targets differ (RankNet, Burges et al. 2005)."""
    score = apply_fn({"params": params}, x)[:, 0]
    above = (y[:, None, 0] > y[None, :, 0]).astype(score.dtype)
    pairs = above * jax.nn.softplus(score[None] - score[:, None])
    return pairs.sum() / jnp.maximum(above.sum(), 1), score[:, None]


def line(members, optimizer=None, slope=1.0):
    """Networks that predict `slope` times x."""
    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optimizer or optax.sgd(0.0), members, input_size=1)
    kernel = jnp.full((members, 1, 1), slope)
    return swarm.replace(params={"Dense_0": {"kernel": kernel, "bias": jnp.zeros((members, 1))}})


ERRORS = np.array([0.3, 0.4, 0.4, 1.3, 3.05, 6.25])  # root mean square 2.90, mean 1.95
X = np.concatenate([ERRORS, 9.0 + np.arange(4)]).astype(np.float32)[:, None]
ZERO = np.zeros_like(X)
SIX = np.arange(6)
PADDED = tn.ragged([SIX, np.arange(7)])


@pytest.mark.parametrize("rows", [np.stack([SIX, SIX]), PADDED], ids=["six", "six beside seven"])
def test_evaluate_is_the_loss_of_the_rows_as_one_batch(rows):
    assert tn.evaluate(line(2), X, ZERO, rmse, rows=rows)[0] == pytest.approx(2.90, abs=0.005)


def test_a_weighted_loss_is_weighted_whatever_others_have():
    squares, weights = np.array([2, 0.2, 0.1, 0.1, 0.1, 0.74, 9]), np.array([14.0, 1, 1, 1, 1, 1, 1])
    assert squares[:6].mean() == pytest.approx(0.54)
    y = np.sqrt(squares, dtype=np.float32)[:, None], weights.astype(np.float32)
    found = tn.evaluate(line(2), np.zeros_like(y[0]), y, tn.weighted(tn.mse), rows=PADDED)
    expected = [np.average(squares[:rows], weights=weights[:rows]) for rows in (6, 7)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[0] == pytest.approx(1.54, abs=0.005)


@pytest.mark.parametrize("rows", [32, 33])
def test_cross_validation_is_by_the_loss_that_was_asked_for(rows):
    x = np.random.default_rng(rows).normal(size=(rows, 1)).astype(np.float32)
    job = {"optimizer": optax.sgd(0.0), "epochs": 1, "folds": 4, **QUIET}
    found = tn.cross_validate(tn.MLP((1,)), x, 3 * x, loss=rmse, batch_size=8, **job)
    assert (np.asarray(found.validation_rows) < 0).any() == (rows == 33)
    for fold, own in enumerate(np.asarray(found.validation_rows)):
        slope = found.swarms["mlp"].params["Dense_0"]["kernel"][fold, 0, 0]
        expected = np.sqrt(np.mean((slope - 3) ** 2 * x[own[own >= 0]] ** 2))
        assert found.final().validation_loss[fold] == pytest.approx(expected, rel=1e-4)


LOSSES = {
    "mse": (tn.mse, 2, jnp.float32),
    "l2_loss": (tn.l2_loss, 2, jnp.float32),
    "softmax_cross_entropy": (tn.softmax_cross_entropy, 2, jnp.int32),
    "one hot": (tn.softmax_cross_entropy, 2, None),
    "cross_entropy": (tn.cross_entropy, 2, None),
    "binary_cross_entropy": (tn.binary_cross_entropy, 1, jnp.int32),
    "augmented": (tn.augmented(tn.mse, tn.RandomFlip()), 2, jnp.float32),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_mask_leaves_out_is_in_neither_value_nor_gradient(name):
    loss, outputs, kind = LOSSES[name]
    rng = np.random.default_rng(0)
    x, params = rng.normal(size=(7, 3)).astype(np.float32), jnp.asarray(rng.normal(size=(3, outputs)), jnp.float32)
    y = rng.integers(0, 2, 7) if kind == jnp.int32 else np.eye(2, dtype=np.float32)[rng.integers(0, 2, 7)]

    def apply_fn(variables, x):
        out = x @ variables["params"]
        return jax.nn.softmax(out) if loss is tn.cross_entropy else out

    def value(params, *given, **counted):
        return loss(params, *given, apply_fn, **counted)[0]

    mask = np.array([False, True, True, False, True, True, False])
    spoilt = np.where(mask[:, None], x, np.nan), np.where(mask.reshape(-1, *[1] * (y.ndim - 1)), y, -9)
    with_gradient = jax.jit(jax.value_and_grad(value))
    expected = with_gradient(params, x[mask], y[mask])
    for counted in ({"mask": mask}, {"weight": mask * 2.0}, {"mask": mask, "weight": np.where(mask, 0.5, np.nan)}):
        found = with_gradient(params, *spoilt, **counted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)
    assert value(params, *spoilt, mask=np.zeros(7, bool)) == 0


def test_weights_of_one_are_the_loss_and_other_losses_are_refused():
    y, ones = ERRORS.astype(np.float32)[:, None], np.ones(6, np.float32)
    assert tn.weighted(tn.mse)({}, y, (y, ones), lambda _, x: 0 * x)[0] == pytest.approx(np.mean(ERRORS**2), rel=1e-6)
    with pytest.raises(ValueError, match=r"weighted needs a loss that takes weight=, \[batch\], which rmse does not"):
        tn.weighted(rmse)


def test_a_loss_of_its_own_takes_weights_over_the_batch():
    def weighted_rmse(params, x, y, apply_fn, weight):
        prediction = apply_fn({"params": params}, x)
        return jnp.sqrt(jnp.average((prediction - y)[:, 0] ** 2, weights=weight)), prediction

    weights = np.arange(1.0, 11, dtype=np.float32)
    found = tn.evaluate(line(2), X, (ZERO, weights), tn.weighted(weighted_rmse), rows=PADDED)
    expected = [np.sqrt(np.average(X[:rows, 0] ** 2, weights=weights[:rows])) for rows in (6, 7)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_wrapper_that_takes_no_mask_is_given_none():
    @functools.wraps(tn.mse)
    def twice(params, x, y, apply_fn):
        value, prediction = tn.mse(params, x, y, apply_fn)
        return 2 * value, prediction

    found = tn.evaluate(line(2), X, ZERO, twice, rows=PADDED)
    np.testing.assert_allclose(found, [2 * np.mean(X[:rows] ** 2) for rows in (6, 7)], rtol=1e-5)


def test_many_numbers_of_rows_under_a_loss_without_a_mask_are_said(caplog):
    say_once.cache_clear()
    rows = tn.ragged([np.arange(count) % 10 for count in range(1, 18)])
    tn.evaluate(line(17), X, ZERO, tn.mse, rows=rows)
    assert "mask=" not in caplog.text
    found = tn.evaluate(line(17), X, ZERO, rmse, rows=rows)
    assert "scored by a program for each of 17 numbers of rows; one that takes mask=" in caplog.text
    expected = [np.sqrt(np.mean(X[np.arange(count) % 10] ** 2)) for count in range(1, 18)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
