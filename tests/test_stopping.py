"""Early stopping of each member by itself, against a plain loop that stops, and by hand."""

import shutil

import jax
import numpy as np
import optax
import pytest
from conftest import DEVICES
from tiers import first

import turbanet as tn
from turbanet.core import stopping
from turbanet.training import parts, run as training

rng = np.random.default_rng(1)
X = rng.normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] + rng.normal(size=40) > 0).astype(np.int32)
X_VAL, Y_VAL = X[30:], Y[30:]
X, Y = X[:30], Y[:30]
MODEL = tn.MLP((6, 2))
RATES = [0.0, 0.02, 0.5, 0.001, 1.0, 0.05, 0.0, 0.2]


def made():
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    swarm = tn.TurbaTrainState.swarm(MODEL, optimizer, len(RATES), sample_input=X[:1])
    return tn.with_hyperparameters(swarm, learning_rate=RATES)


def train(swarm, patience=3, epochs=30, **more):
    how = {"batch_size": 10, "progress": False, "plan": tn.Plan(DEVICES, 2), "segment": 2, **more}
    data = X, Y, tn.softmax_cross_entropy
    return tn.fit(swarm, *data, epochs=epochs, validation=(X_VAL, Y_VAL), patience=patience, **how)


BY_ADAM = optax.scale_by_adam()  # and the rate, which is an argument: the step is compiled once


@jax.jit
def step(params, state, x, y, rate):
    gradients = jax.grad(lambda p: tn.softmax_cross_entropy(p, x, y, MODEL.apply)[0])(params)
    updates, state = BY_ADAM.update(gradients, state, params)
    return optax.apply_updates(params, jax.tree.map(lambda update: -rate * update, updates)), state


@jax.jit
def held_out_loss(params):
    return tn.softmax_cross_entropy(params, X_VAL, Y_VAL, MODEL.apply)[0]


def alone(swarm, index, patience=3, epochs=30, min_delta=0.0):
    """A plain loop of one network: (validation losses, best params)."""
    order = tn.batch_order(swarm, 30, epochs=epochs, batch_size=10)[index]
    params = swarm.get_state(index).params
    state, losses, best, best_params = BY_ADAM.init(params), [], np.inf, params
    waited = 0
    for epoch in range(epochs):
        for rows in order[epoch]:
            params, state = step(params, state, X[rows], Y[rows], RATES[index])
        losses.append(float(held_out_loss(params)))
        waited = 0 if losses[-1] < best - min_delta else waited + 1
        if waited == 0:
            best, best_params = losses[-1], params
        if waited >= patience:
            break
    return losses, best_params


@pytest.mark.optimized
def test_each_member_stops_where_it_stops_alone_with_its_best_weights():
    swarm = made()
    trained, history = train(swarm)
    assert len(set(history.epochs)) > 2  # they stop at different times
    for index in range(len(RATES)):
        losses, params = alone(swarm, index)
        assert history.epochs[index] == len(losses)
        np.testing.assert_allclose(history.validation_loss[: len(losses), index], losses, rtol=1e-3)
        assert np.isnan(history.validation_loss[len(losses) :, index]).all()
        ours = trained.get_state(index).params["Dense_1"]["kernel"]
        np.testing.assert_allclose(ours, params["Dense_1"]["kernel"], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(trained.id, swarm.id)


def test_who_trains_on_is_not_changed_by_who_stops(monkeypatch):
    swarm = made()
    compacted, history = train(swarm)
    monkeypatch.setattr(training.Training, "_set_aside", lambda self: None)
    whole, other = train(swarm)
    np.testing.assert_array_equal(history.train_loss, other.train_loss[: len(history.train_loss)])
    jax.tree.map(np.testing.assert_array_equal, compacted, whole)


def test_stopped_members_are_set_aside(monkeypatch):
    sizes, place = [], training.Training._place
    monkeypatch.setattr(training.Training, "_place", lambda self, s: sizes.append(len(s)) or place(self, s))
    train(made())
    assert sizes[0] == 8 and sizes[-1] <= 4 and sizes == sorted(sizes, reverse=True)


def test_data_of_its_own_stays_with_its_member():
    shift = 0.3 * np.arange(8, dtype=np.float32)[:, None, None]
    x, y, x_val, y_val = X + shift, np.tile(Y, (8, 1)), X_VAL + shift, np.tile(Y_VAL, (8, 1))

    def losses(members):
        how = {"epochs": 30, "batch_size": 10, "progress": False, "plan": tn.Plan(1, 1), "segment": 2, "patience": 3}
        data = x[members], y[members], tn.softmax_cross_entropy
        held_out = x_val[members], y_val[members]
        return tn.fit(made()[members], *data, per_member=True, validation=held_out, **how)[1].validation_loss

    together = losses(np.arange(8))
    last = np.flatnonzero(np.isnan(together).sum(axis=0) < 15)
    assert 0 < len(last) < 5 and last.max() >= len(last)  # some went on, and not the first ones
    for member in last:
        alone = losses(np.array([member]))[:, 0]
        np.testing.assert_allclose(together[: len(alone), member], alone, rtol=1e-4)


def test_a_training_that_all_have_left_ends():
    history = train(made(), patience=1, epochs=200)[1]
    assert len(history.train_loss) < 200 and history.epochs.max() <= len(history.train_loss)


def test_members_with_random_keys_in_the_optimizer_are_set_aside():
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(1.2))
    swarm = tn.TurbaTrainState.swarm(tn.MLP((6, 2)), optimizer, 6, sample_input=X[:1])
    trained, history = train(swarm, patience=1, segment=1)
    assert len(set(history.epochs)) > 1
    np.testing.assert_array_equal(trained.id, swarm.id)
    steps = 3 * history.epochs  # of each member; a step draws a new key
    np.testing.assert_array_equal(trained.opt_state[0].count, steps)
    for key, id, count in zip(trained.opt_state[0].rng_key, swarm.id, steps, strict=True):
        expected = jax.random.key(3)
        for _ in range(count):  # made the member's own before each draw
            expected = jax.random.split(jax.random.fold_in(jax.random.fold_in(expected, 0), id))[0]
        assert key == expected


def test_min_delta_is_what_counts_as_better():
    swarm = made()
    history = train(swarm, min_delta=0.02)[1]
    assert [len(alone(swarm, index, min_delta=0.02)[0]) for index in range(8)] == history.epochs.tolist()


def right(prediction, y):
    return (prediction.argmax(-1) == y).mean()


def distance(prediction, y):
    return np.abs(prediction[:, 1] - y).mean()


def waits(scores, patience):
    """By hand, of values [epoch] that are to become small: (epochs until it stops, epochs until the best one)."""
    best = 0
    for epoch, score in enumerate(scores):
        if score < scores[best] or epoch == 0:
            best = epoch
        if epoch - best >= patience:
            return epoch + 1, best + 1
    return len(scores), best + 1


FOLLOWED = [(tn.accuracy, -1, np.inf), (distance, 1, 0)]  # epochs in one piece, and in parts
FOLLOWED += [(tn.accuracy, -1, 0), (distance, 1, np.inf), (right, -1, np.inf), (right, -1, 0)]


@pytest.mark.parametrize(("metric", "sign", "long"), first(2, FOLLOWED))
def test_patience_follows_a_metric(metric, sign, long, monkeypatch):
    monkeypatch.setattr(parts, "LONG", long)
    swarm, job = made(), {"metric": {"loss": right, "score": metric}}
    trained, history = train(swarm, monitor="score", mode="min" if sign > 0 else "max", **job)
    whole = train(swarm, patience=None, **job)[1].validation_metric["score"]
    expected = [waits(sign * whole[:, index], 3) for index in range(8)]
    assert history.epochs.tolist() == [stop for stop, _ in expected] and len(set(history.epochs)) > 1
    assert min(history.epochs[1:4]) < len(history.train_loss)
    assert expected != [waits(history.validation_loss[:stop, index], 3) for index, (stop, _) in enumerate(expected)]
    for index, (stop, best) in list(enumerate(expected))[1:4]:
        np.testing.assert_array_equal(history.validation_metric["score"][:stop, index], whole[:stop, index])
        assert np.isnan(history.validation_metric["score"][stop:, index]).all()
        assert np.isnan(history.validation_loss[stop:, index]).all()
        then = train(swarm, patience=None, epochs=best, **job)[0].get_state(index)
        jax.tree.map(np.testing.assert_array_equal, trained.get_state(index).params, then.params)


def test_a_training_that_follows_a_metric_is_resumed(tmp_path):
    job = {"metric": right, "monitor": "validation_metric", "mode": "max"}
    straight = train(made(), **job)
    kept = tn.Checkpoints(tmp_path, keep=99)
    train(made(), checkpoints=kept, **job)
    last = sorted((int(each.name) for each in tmp_path.iterdir() if each.name.isdigit()), reverse=True)
    assert len(last) > 2
    for number in last[:-1]:
        shutil.rmtree(tmp_path / str(number))
    resumed = train(made(), checkpoints=kept, **job)
    np.testing.assert_array_equal(resumed[1].validation_metric, straight[1].validation_metric)
    jax.tree.map(np.testing.assert_array_equal, resumed[0].params, straight[0].params)
    with pytest.raises(ValueError, match="stopping was 3, 0.0, max validation_metric and is 3, 0.0, min valid"):
        train(made(), checkpoints=kept, **job | {"mode": "min"})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"monitor": "auc", "mode": "max"},
            r"patience is to follow, of \['validation_loss', 'right'\], got 'auc' with patience=3",
        ),
        ({"monitor": "right", "mode": "max", "patience": None}, "got 'right' with patience=None"),
        ({"monitor": "right"}, 'good of the metric right, "min" or "max", got None'),
        ({"monitor": "right", "mode": "auto"}, "got 'auto'"),
        ({"mode": "max"}, "mode is for what is good of a metric that monitor names, got 'max'"),
    ],
)
def test_what_cannot_be_followed_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        train(made(), **{"metric": {"right": right}} | how)


def test_a_member_that_breaks_keeps_its_last_good_weights():
    swarm = made()
    state = stopping.prepared(swarm, 2, 0.0, (stopping.LOSS, "min"), ()).get_state(1)
    broken = state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, state.params))
    after = stopping.after_epoch(state, broken, {stopping.LOSS: np.float32(np.nan)})
    jax.tree.map(np.testing.assert_array_equal, after._stopping.params, state.params)
    assert after._stopping.waited == 1 and after._stopping.active
    assert not stopping.after_epoch(after, after, {stopping.LOSS: np.float32(np.nan)})._stopping.active


def test_without_patience_nobody_stops():
    history = tn.fit(made(), X, Y, tn.softmax_cross_entropy, epochs=3, progress=False)[1]
    assert history.epochs.tolist() == [3] * 8


def test_patience_needs_validation():
    with pytest.raises(ValueError, match="follow the validation loss: give validation"):
        tn.fit(made(), X, Y, tn.softmax_cross_entropy, epochs=3, patience=2, progress=False)


@pytest.mark.parametrize("patience", [0, 1.5])
def test_patience_is_a_whole_number(patience):
    with pytest.raises(ValueError, match="patience must be a whole number"):
        train(made(), patience=patience)


def test_min_delta_goes_with_patience():
    x, y = np.ones((4, 3), np.float32), np.zeros(4, int)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, input_size=3)
    with pytest.raises(ValueError, match="min_delta=0.1 came without patience"):
        tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=1, validation=(x, y), min_delta=0.1)


@pytest.mark.parametrize("min_delta", [np.nan, -0.1, np.inf])
def test_by_how_much_an_epoch_is_better_is_a_number_of_at_least_0(min_delta):
    with pytest.raises(ValueError, match="min_delta is by how much an epoch must be better, at least 0; got"):
        train(made(), min_delta=min_delta)
