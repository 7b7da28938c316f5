"""Local SGD: where the workers of one network end is where loops in NumPy and Optax, written out by hand, end."""

import contextlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEVICES
from tiers import first

import turbanet as tn
from turbanet.data.sampling import deal
from turbanet.federated import averaging
from turbanet.training import compilation

RATE, MOMENTUM = 0.1, 0.9
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(23, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1 * RANDOM.normal(size=(23, 1))).astype(np.float32)
JOB = {"epochs": 2, "batch_size": 4, "seed": 5}
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def line(optimizer=None, **how):
    """A linear model as a swarm of one."""
    optimizer = optimizer or optax.sgd(RATE, MOMENTUM)
    return tn.TurbaTrainState.swarm(nn.Dense(1), optimizer, 1, sample_input=X[:1], **how)


def by_hand(start, workers, every, outer=None):
    """Workers of a line in NumPy, SGD with momentum on the mean squared error, averaged every few steps."""
    weights = np.vstack([np.asarray(start.params["kernel"][0]), np.asarray(start.params["bias"])]).astype(float)
    design = np.hstack([X, np.ones((len(X), 1))])
    order = deal(rows=len(X), workers=workers, **JOB).reshape(workers, -1, JOB["batch_size"])
    own, speed = np.stack([weights] * workers), np.zeros((workers, *weights.shape))
    pace, losses = np.zeros_like(weights), []
    for step in range(order.shape[1]):
        errors = [design[order[w, step]] @ own[w] - Y[order[w, step]] for w in range(workers)]
        losses.append([np.mean(error**2) for error in errors])
        for w, error in enumerate(errors):
            speed[w] = MOMENTUM * speed[w] + 2 * design[order[w, step]].T @ error / len(error)
            own[w] -= RATE * speed[w]
        if (step + 1) % every == 0 or step + 1 == order.shape[1]:
            downhill = weights - own.mean(0)
            if outer is None:
                weights = weights - downhill
            else:
                pace = downhill + outer["momentum"] * pace
                weights = weights - outer["learning_rate"] * (downhill + outer["momentum"] * pace)
            own[:] = weights
    return weights, np.array(losses)


@pytest.mark.parametrize(
    ("workers", "devices", "every", "outer"),
    first(
        4,
        [
            (2, 2, 3, NESTEROV),
            (2, 2, 50, None),
            (3, 2, 3, None),
            (4, 2, 50, NESTEROV),
            (1, 2, 3, None),
            (1, 2, 1, NESTEROV),
            (2, 1, 1, None),
        ],
    ),
)
def test_workers_end_where_a_loop_in_numpy_ends(workers, devices, every, outer):
    start = line()
    expected, losses = by_hand(start, workers, every, outer)
    how = {"workers": workers, "devices": devices, "every": every, "outer": outer and optax.sgd(**outer)}
    net, seen = tn.federated.local_sgd(start, X, Y, tn.mse, **how, **JOB)
    np.testing.assert_allclose(seen.loss, losses, rtol=1e-4, atol=1e-6)
    found = np.vstack([net.params["kernel"][0], net.params["bias"]])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_one_worker_with_adam_ends_where_a_plain_optax_loop_ends():
    model, tx = tn.MLP((8, 4)), optax.adam(0.01)
    y = RANDOM.integers(0, 4, len(X))
    start = tn.TurbaTrainState.swarm(model, tx, 1, sample_input=X[:1], seed=3)
    params = start.get_state(0).params
    moments = tx.init(params)
    slope = jax.jit(jax.grad(lambda params, x, y: tn.softmax_cross_entropy(params, x, y, model.apply)[0]))
    for rows in deal(rows=len(X), workers=1, **JOB)[0].reshape(-1, JOB["batch_size"]):
        updates, moments = tx.update(slope(params, X[rows], y[rows]), moments)
        params = optax.apply_updates(params, updates)
    net, _ = tn.federated.local_sgd(start, X, y, tn.softmax_cross_entropy, workers=1, every=2, **JOB)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), net.get_state(0).params, params)


class Normalised(nn.Module):
    """A model with running statistics."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_equal_copies_in_half_precision_have_themselves_as_their_mean(kind):
    start = tn.TurbaTrainState.swarm(tn.MLP((4, 2), param_dtype=kind), optax.sgd(0.0), 1, sample_input=X[:1])
    how = {"workers": 20, "every": 1, "batch_size": 1, "epochs": 1}
    net, _ = tn.federated.local_sgd(start, X, np.zeros(len(X), int), tn.softmax_cross_entropy, **how)
    jax.tree.map(np.testing.assert_array_equal, net.params, start.params)


def test_a_batch_of_more_rows_than_a_worker_has_holds_each_once():
    job = {"workers": 1, "epochs": 2}
    nets = [tn.federated.local_sgd(line(), X, Y, tn.mse, batch_size=size, **job)[0] for size in (len(X), len(X) + 7)]
    np.testing.assert_array_equal(*(net.params["kernel"] for net in nets))


def test_running_statistics_are_averaged_too():
    start = tn.TurbaTrainState.swarm(Normalised(), optax.sgd(0.0), 1, sample_input=X[:1])
    how = {"epochs": 1, "batch_size": 6, "seed": 5}
    order = deal(rows=len(X), workers=2, **how)[:, 0]
    mean = np.zeros((2, 3))
    for step in range(order.shape[1]):
        mean = 0.5 * mean + 0.5 * X[order[:, step]].mean(1)
        mean[:] = mean.mean(0)
    net, _ = tn.federated.local_sgd(start, X, Y, tn.mse, workers=2, every=1, **how)
    np.testing.assert_allclose(net.collections["batch_stats"]["BatchNorm_0"]["mean"], mean[:1], rtol=1e-4, atol=1e-6)


def test_the_network_comes_back_as_it_came_and_trains_on():
    start = line(seed=4).set_loss_fn(tn.mse)
    net, seen = tn.federated.local_sgd(start, X, Y, workers=2, every=5, **JOB)
    assert len(net) == 1 and net.seed.tolist() == [4] and net.id.tolist() == start.id.tolist()
    assert net.epoch.tolist() == [2] and net.step.tolist() == [len(seen.loss)] and net.params["bias"].shape == (1, 1)
    assert jax.tree.structure(net) == jax.tree.structure(start)
    on, history = tn.fit(net, X, Y, epochs=3, progress=False)
    assert history.train_loss[-1, 0] < seen.loss[0].mean() and len(on) == 1
    assert (np.diff(seen.seconds) >= 0).all() and seen.seconds.shape == (len(seen.loss),) and seen.seconds[0] > 0


def test_a_second_call_goes_on_with_other_orders():
    how = {"workers": 2, "batch_size": 4, "every": 1, "seed": 5}
    _, seen = tn.federated.local_sgd(line(optax.sgd(RATE)), X, Y, tn.mse, epochs=2, **how)
    half, first = tn.federated.local_sgd(line(optax.sgd(RATE)), X, Y, tn.mse, epochs=1, **how)
    _, second = tn.federated.local_sgd(half, X, Y, tn.mse, epochs=1, **how)
    np.testing.assert_allclose(np.concatenate([first.loss, second.loss]), seen.loss, rtol=1e-5)


def test_dropout_differs_between_workers():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dropout(0.5, deterministic=not train)(nn.Dense(1)(x))

    start = tn.TurbaTrainState.swarm(Dropped(), optax.sgd(0.0), 1, sample_input=X[:1])
    _, seen = tn.federated.local_sgd(start, jnp.ones((24, 3)), jnp.ones((24, 1)), tn.mse, workers=2, every=2, **JOB)
    assert (seen.loss[:, 0] != seen.loss[:, 1]).any()


def test_an_equal_training_compiles_nothing_anew():
    compilation.forget()
    start = line()
    tn.federated.local_sgd(start, X, Y, tn.mse, workers=2, every=4, **JOB)
    before = len(compilation._programs())
    tn.federated.local_sgd(line(), X, Y, tn.mse, workers=2, every=4, **JOB)
    assert len(compilation._programs()) == before
    tn.federated.local_sgd(start, X, Y, tn.mse, workers=2, every=6, **JOB)
    assert len(compilation._programs()) == before + 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"workers": 24}, "24 workers, 23 rows"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"every": 0}, "every must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": None}, "seed must be one int from 0"),
        ({"seed": jax.random.key(0)}, "seed must be one int from 0"),
        ({"x": X[:-1]}, "same number of rows"),
        ({"x": np.where(X > 1, np.nan, X)}, "x holds nan in row"),
        ({"devices": 3}, f"devices must be 1 to {DEVICES}"),
    ],
)
def test_bad_input_stops_before_anything_is_trained(wrong, sentence):
    job = {"x": X, "workers": 2, **JOB} | wrong
    with pytest.raises(ValueError, match=sentence):
        tn.federated.local_sgd(line(), job.pop("x"), Y, tn.mse, **job)


def test_several_networks_and_schedules_by_epoch_are_refused():
    several = tn.TurbaTrainState.swarm(nn.Dense(1), optax.sgd(RATE), 3, sample_input=X[:1])
    with pytest.raises(ValueError, match="one network by many workers, got a swarm of 3"):
        tn.federated.local_sgd(several, X, Y, tn.mse, workers=2, **JOB)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    scheduled = tn.with_schedule(line(tx), "cosine")
    with pytest.raises(ValueError, match="schedule of steps"):
        tn.federated.local_sgd(scheduled, X, Y, tn.mse, workers=2, **JOB)


def test_a_loss_that_grows_beyond_all_numbers_is_named_with_its_step():
    with pytest.raises(FloatingPointError, match=r"The loss of worker \d is (inf|nan) at step \d+: take a smaller"):
        tn.federated.local_sgd(line(optax.sgd(1e6)), X, Y, tn.mse, workers=2, **JOB | {"epochs": 20})


def test_ctrl_c_keeps_the_steps_so_far(monkeypatch):
    job = {"workers": 2, "every": 2, **JOB, "epochs": 12}
    _, whole = tn.federated.local_sgd(line(), X, Y, tn.mse, **job)
    monkeypatch.setattr(averaging, "noted", lambda: contextlib.nullcontext(lambda: True))
    with pytest.raises(tn.Interrupted, match=r"after \d+ step") as caught:
        tn.federated.local_sgd(line(), X, Y, tn.mse, **job)
    history, swarm = caught.value.history, caught.value.swarm
    done = len(history.loss)
    assert 0 < done < len(whole.loss) and len(history.seconds) == done and swarm.step.tolist() == [done]
    np.testing.assert_allclose(history.loss, whole.loss[:done], rtol=1e-5)
    assert swarm.epoch.tolist() == [done * 12 // len(whole.loss)]
