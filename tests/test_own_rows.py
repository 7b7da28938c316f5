"""Scores are of a member's own rows as one batch, and its steps are those that it makes alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.model_selection import TimeSeriesSplit
from tiers import first

import turbanet as tn
from turbanet.core.plan import say_once

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


@pytest.mark.parametrize("rows", first(1, [33, 32]))
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
}


@pytest.mark.parametrize("name", first(3, LOSSES))
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


@pytest.mark.parametrize(
    "values, message",
    [
        (
            lambda p, y: (p - y) ** 2,
            r"The values are \[3, 3\], each row's with every other row, .*: give both one shape",
        ),
        (lambda p, y: p**2 + (y - p) ** 2 / 2, r"The values are \[3, 3\], each row's with every other row"),
        (lambda p, y: ((p[:, 0] - y) ** 2).mean(), r"takes each row's values, .*, got \[\] of 3 rows: leave the mean"),
        (lambda p, y: (p - y[:, None]).mean(0), r"takes each row's values, .*, got \[1\] of 3 rows: leave the mean"),
    ],
)
@pytest.mark.parametrize("counted", [{}, {"weight": np.ones(3)}])
def test_values_of_other_rows_are_refused(values, message, counted):
    loss = tn.mean_over_rows(lambda params, x, y, apply_fn: (values(x, y), x))
    with pytest.raises(ValueError, match=message):
        loss({}, np.ones((3, 1)), np.ones(3), None, **counted)


def test_a_weight_of_two_axes_is_refused():
    with pytest.raises(ValueError, match=r"mask and weight are \[batch\], a number a row, got \[3, 1\]"):
        tn.mse({}, np.ones((3, 1)), np.ones((3, 1)), lambda _, x: x, weight=np.ones((3, 1)))


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


COUNTS = 3, 8, 13, 30
RAGGED = tn.ragged([np.random.default_rng(count).permutation(30)[:count] for count in COUNTS])


def table(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 3)).astype(np.float32), rng.integers(0, 2, rows)


ADAM = optax.adam(optax.exponential_decay(0.05, 2, 0.9))  # which counts steps


def net(members=4, model=None):
    return tn.TurbaTrainState.swarm(model or tn.MLP((4, 2)), ADAM, members, input_size=3, seed=5)


def train(swarm, x, y, loss=tn.softmax_cross_entropy, **how):
    return tn.fit(swarm, x, y, loss, **{"epochs": 2, "plan": tn.Plan(1, 2), **QUIET, **how})


def alone(swarm, position, x, y, steps):
    """A plain Optax loop of one network over the rows of each step: (params, losses [step])."""
    params = swarm.get_state(position).params
    moments, losses = ADAM.init(params), []
    for rows in steps:
        value, gradient = SLOPE(params, x[rows], y[rows])
        params, moments = UPDATE(gradient, moments, params)
        losses.append(float(value))
    return params, losses


@jax.jit
def UPDATE(gradient, moments, params):
    updates, moments = ADAM.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments


@jax.jit
@jax.value_and_grad
def SLOPE(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(tn.MLP((4, 2)).apply({"params": params}, x), y).mean()


def close(one, other, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10), one, other)


@pytest.mark.parametrize(("batch_size", "steps"), first(2, [(10, [1, 10]), (None, [1, 1]), (64, [1, 2])]))
def test_a_member_makes_the_steps_that_it_makes_alone(batch_size, steps):
    x, y = table(100)
    rows = np.full((2, 130), -1)  # wider than any member has
    rows[0, :10], rows[1, :100] = np.arange(10), np.arange(100)
    trained, history = train(net(2), x, y, rows=rows, batch_size=batch_size, epochs=3)
    assert trained.step.tolist() == [3 * each for each in steps]
    for member, own in enumerate((10, 100)):
        one, losses = train(net(2)[[member]], x[:own], y[:own], batch_size=batch_size, epochs=3)
        np.testing.assert_allclose(history.train_loss[:, member], losses.train_loss[:, 0], rtol=1e-5)
        close(trained.get_state(member).params, one.get_state(0).params)


@pytest.mark.optimized
def test_how_wide_rows_come_changes_no_bit():
    x, y = table(30)
    found = []
    for width in (10, 25):
        rows = np.pad(np.arange(20).reshape(2, 10), ((0, 0), (0, width - 10)), constant_values=-1)
        trained, history = train(net(2), x, y, of_classes, rows=rows)  # a batch of all, and no mask
        found.append((trained.params, history.train_loss))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_how_wide_rows_come_changes_nothing_where_there_is_no_y():
    @tn.mean_over_rows
    def reconstruction(params, x, y, apply_fn):
        prediction = apply_fn({"params": params}, x)
        return (prediction - x) ** 2, prediction

    x, rows = table(30)[0], np.full((2, 30), -1)
    rows[0, :10], rows[1, :8] = range(10), range(8)
    nets = tn.TurbaTrainState.swarm(nn.Dense(x.shape[1]), optax.sgd(0.1), 2, sample_input=x[:1])
    how = {"epochs": 1, "batch_size": 4, "equal_steps": True, "progress": False}
    wide, narrow = (tn.fit(nets, x, None, reconstruction, rows=each, **how)[0] for each in (rows, rows[:, :10]))
    jax.tree.map(np.testing.assert_array_equal, wide.params, narrow.params)
    assert tn.predict(nets, x, rows=rows).shape[:2] == rows.shape


def test_folds_in_time_make_the_steps_of_each():
    x, y = table(62)
    job = {"optimizer": optax.adam(0.01), "loss": tn.softmax_cross_entropy, "epochs": 2, "batch_size": 8, **QUIET}
    found = tn.cross_validate(tn.MLP((4, 2)), x, y, folds=TimeSeriesSplit(4), **job)
    assert found.swarms["mlp"].step.tolist() == [4, 8, 10, 14]


@pytest.mark.parametrize("batch_size", first(1, [8, 20]))
def test_ragged_members_end_where_plain_loops_end_in_float64(batch_size):
    with jax.enable_x64(True):
        x, y = table(30)
        swarm = net()
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), swarm.params)
        swarm = swarm.replace(params=params, opt_state=jax.vmap(ADAM.init)(params))
        trained, history = train(swarm, x.astype(float), y, rows=RAGGED, batch_size=batch_size, epochs=4)
        for member, order in enumerate(tn.batch_order(swarm, RAGGED, epochs=4, batch_size=batch_size)):
            steps = [rows[rows >= 0] for rows in order.reshape(-1, order.shape[-1]) if (rows >= 0).any()]
            assert len(steps) == 4 * -(-COUNTS[member] // batch_size)
            params, losses = alone(swarm, member, x.astype(float), y, steps)
            close(trained.get_state(member).params, params, rtol=1e-9)
            np.testing.assert_allclose(history.train_loss[:, member], np.reshape(losses, (4, -1)).mean(1), rtol=1e-9)


def test_a_batch_of_all_rows_counts_each_once_and_the_order_says_so():
    order = tn.batch_order(net(), RAGGED, epochs=2, batch_size=20)
    assert order.shape == (4, 2, 2, 20)
    for member, count in enumerate(COUNTS[:3]):
        for epoch in order[member]:
            np.testing.assert_array_equal(epoch[0], np.pad(RAGGED[member][:count], (0, 20 - count), constant_values=-1))
            assert (epoch[1] == -1).all()
    assert set(order[3, 0].ravel()) == set(range(30))


def test_equal_steps_are_made_by_name():
    x, y = table(30)
    how = {"batch_size": 8, "equal_steps": True, "epochs": 2}
    trained, history = train(net(), x, y, rows=RAGGED, **how)
    assert trained.step.tolist() == [8] * 4
    for member, order in enumerate(tn.batch_order(net(), RAGGED, **how)):
        for epoch in order.reshape(2, -1):  # its rows again and again, in the epoch's order
            own = epoch[: COUNTS[member]]
            np.testing.assert_array_equal(epoch, np.resize(own, 32))
            assert set(own) == set(np.asarray(RAGGED[member][: COUNTS[member]]))
        _, losses = alone(net(), member, x, y, order.reshape(-1, 8))
        np.testing.assert_allclose(history.train_loss[:, member], np.reshape(losses, (2, 4)).mean(1), rtol=1e-4)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x)))


def of_classes(params, x, y, apply_fn):
    return rmse(params, x, jax.nn.one_hot(y, 2), apply_fn)


@pytest.mark.parametrize(
    ("loss", "model", "needs"),
    [
        (of_classes, None, r"need a loss that takes mask=, bool \[batch\]"),
        (tn.softmax_cross_entropy, Normed(), r"need a model without \['batch_stats'\]"),
    ],
)
def test_fewer_rows_than_a_batch_are_refused_where_none_can_be_left_out(loss, model, needs):
    x, y = table(30)
    which = r"Batches of 8 rows for member 0 \(seed 5, id 0\), which sees 3, "
    with pytest.raises(ValueError, match=f"{which}{needs}.* or batch_size=3 at the most, or equal_steps=True"):
        train(net(model=model), x, y, loss, batch_size=8, rows=RAGGED)
    trained, _ = train(net(model=model), x, y, loss, batch_size=3, rows=RAGGED, epochs=1)
    assert trained.step.tolist() == [1, 3, 5, 10]
    trained, _ = train(net(model=model), x, y, loss, batch_size=8, rows=RAGGED, epochs=1, equal_steps=True)
    assert trained.step.tolist() == [4] * 4


class Scaled(nn.Module):
    """A model whose collection is a table that no step changes."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x * self.variable("constants", "scale", lambda: jnp.arange(1.0, 1 + x.shape[-1])).value)


def test_constants_of_a_model_are_no_statistics_of_a_batch():
    x, y = table(30)
    swarm = net(model=Scaled())
    trained, _ = train(swarm, x, y, rows=RAGGED, batch_size=8)
    own = np.asarray(RAGGED[2][: COUNTS[2]])
    one, _ = train(swarm[[2]], x[own], y[own], batch_size=8)
    close(trained.get_state(2).params, one.get_state(0).params)
    weight = np.ones(30, np.float32)
    weight[3] = 0
    weighted, _ = train(swarm, x, (y, weight), tn.weighted(tn.softmax_cross_entropy))
    without, _ = train(swarm, np.delete(x, 3, 0), np.delete(y, 3))
    close(weighted.params, without.params)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(16)(x)))


def test_what_a_member_draws_depends_on_no_other_members_rows():
    x, y = table(30)
    swarm = net(model=Dropped())
    trained, _ = train(swarm, x, y, rows=RAGGED, batch_size=20)
    own = np.asarray(RAGGED[2][: COUNTS[2]])
    one, _ = train(swarm[[2]], x[own], y[own], batch_size=20)
    close(trained.get_state(2).params, one.get_state(0).params)


@pytest.mark.optimized
def test_training_bits_depend_on_no_other_members_rows():
    x, y = table(30)
    spoilt = np.where(np.arange(30)[:, None] < 12, x, np.nan)
    found = []
    for seen, other in ((x, np.arange(30)), (spoilt, np.arange(9, 22))):
        rows = tn.ragged([np.arange(12), np.arange(3), other])
        trained, history = train(net(3), seen, y, rows=rows, batch_size=8, allow_nan=True)
        assert np.isnan(history.train_loss[-1, 2]) == (seen is spoilt)
        found.append((jax.tree.map(lambda leaf: leaf[:2], trained.params), history.train_loss[:, :2]))
    jax.tree.map(np.testing.assert_array_equal, *found)


def with_mask(params, x, y, apply_fn, mask=None):
    prediction = apply_fn({"params": params}, x)
    squares = (prediction - jax.nn.one_hot(y, 2)) ** 2
    return jnp.sqrt(jnp.mean(squares, where=None if mask is None else mask[:, None])), prediction


@pytest.mark.parametrize("monitor", first(1, ["accuracy", "on the host", None]))
def test_a_loss_without_a_mask_is_followed_as_the_same_one_with_it(monitor):
    x, y = table(30)
    metrics = {"accuracy": tn.accuracy, "on the host": lambda prediction, y: np.abs(prediction[:, 1] - y).mean()}
    how = {"validation": (x, 1 - y), "validation_rows": RAGGED, "metric": metrics, "patience": 3, "segment": 2}
    how |= {} if monitor is None else {"monitor": monitor, "mode": "min"}
    (one, with_it), (other, without) = (train(net(), x, y, loss, epochs=9, **how) for loss in (with_mask, of_classes))
    np.testing.assert_array_equal(with_it.epochs, without.epochs)
    assert with_it.epochs.min() < 9
    np.testing.assert_allclose(with_it.validation_loss, without.validation_loss, rtol=1e-5)
    for name in metrics:
        np.testing.assert_allclose(with_it.validation_metric[name], without.validation_metric[name], rtol=1e-4)
    close(one.params, other.params)


@pytest.mark.parametrize("as_rows", [False, True], ids=["lists", "rows"])
def test_the_prediction_of_padding_is_nan(as_rows):
    x = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.01), 2, sample_input=x[:1])
    whole = np.asarray(tn.predict(swarm, x))
    if as_rows:
        found = tn.predict(swarm, x, rows=tn.ragged([range(9), range(4)]))
    else:
        found = tn.predict(swarm, [x, x[:4]], per_member=True)
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(found[1, :4], whole[1, :4], rtol=1e-6)
    assert np.isnan(found[1, 4:]).all()
