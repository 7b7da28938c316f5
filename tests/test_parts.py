"""Epochs that are too long for one call are trained in parts: the same training, wherever it is cut."""

import os
import signal

import jax
import numpy as np
import optax
import pytest
from conftest import DEVICES
from tiers import first

import turbanet as tn
from turbanet.data.examples import prepare
from turbanet.training import parts, program, run as training

rng = np.random.default_rng(0)
X = rng.normal(size=(30, 3)).astype(np.float32)
Y = rng.integers(0, 2, 30)
RAGGED = np.array([[*range(12), *[-1] * 18], [*range(30)], [*range(5, 25), *[-1] * 10]])


def made():
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
    return tn.TurbaTrainState.swarm(tn.MLP((6, 2)), optimizer, 3, sample_input=X[:1])


def train(schedule=None, **how):
    swarm = made() if schedule is None else tn.with_schedule(made(), schedule)
    job = {"epochs": 5, "batch_size": 8, "progress": False, "plan": tn.Plan(DEVICES, 1), "validation": (X, Y)}
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **job | how)


def limit(monkeypatch, operations):
    """From so many operations on an epoch is long, on every platform."""
    monkeypatch.setattr(parts, "LONG", operations)
    monkeypatch.setattr(parts, "LONG_ON_ACCELERATOR", operations)


@pytest.fixture
def in_parts(monkeypatch):
    """Every epoch of several steps is too long, and a call has one step."""
    limit(monkeypatch, 0)
    monkeypatch.setattr(training, "CALL_SECONDS", 0)


def seen(history):
    return [history.train_loss, history.validation_loss, history.epochs]


@pytest.mark.parametrize(
    "how",
    first(
        5,
        [
            {},
            {"rows": RAGGED, "validation_rows": RAGGED},
            {"patience": 1, "min_delta": 0.05, "plan": tn.Plan(1, 3)},
            {"rows": RAGGED, "batch_size": 20},
            {"rows": RAGGED, "equal_steps": True},
            {"shuffle": False, "batch_size": 7},
            {"metric": {"accuracy": tn.accuracy, "mean": lambda prediction, y: prediction.mean()}},
            {"schedule": "warm"},
            {"schedule": ["reduce", "cosine", "constant"], "segment": 2},
            {"validation": None, "plan": tn.Plan(1, 2)},
        ],
    ),
    ids=lambda how: ", ".join(how) or "plain",
)
def test_parts_train_what_whole_epochs_train(how, request):
    whole, expected = train(**how)
    request.getfixturevalue("in_parts")
    found, history = train(**how)
    assert found._underway is None
    for one, wanted in zip(seen(history), seen(expected), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4) if wanted is not None else None
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-3, atol=1e-5)
    if "metric" in how:
        for name, metric in history.validation_metric.items():
            np.testing.assert_allclose(metric, expected.validation_metric[name], rtol=1e-3, atol=1e-6)


@pytest.mark.optimized
def test_no_bit_depends_on_where_an_epoch_is_cut(in_parts, monkeypatch):
    one, losses = train(patience=3)
    monkeypatch.setattr(training, "CALL_SECONDS", 1e9)
    other, same = train(patience=3)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(one), jax.tree.leaves(other))
    for a, b in zip(seen(losses), seen(same), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("steps", [1, 6, 8])
def test_a_training_that_was_stopped_inside_an_epoch_goes_on_bit_for_bit(in_parts, steps, tmp_path, monkeypatch):
    expected = train()
    run, calls = training.Training._train, []

    def interrupted(self, most):
        calls.append(self.steps_done)
        if len(calls) == steps:
            os.kill(os.getpid(), signal.SIGINT)
        run(self, most)

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "_train", interrupted)
        swarm, history = train(on_interrupt="return", checkpoints=tmp_path)
    assert len(calls) == steps and len(history.train_loss) == steps // 4 and swarm._underway is None
    found = train(checkpoints=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]))
    np.testing.assert_array_equal(found[1].train_loss, expected[1].train_loss)


def test_the_bar_moves_inside_an_epoch(in_parts, monkeypatch):
    places = []
    advance = training.Training.advance
    monkeypatch.setattr(training.Training, "advance", lambda self: (advance(self), places.append(self.progress)))
    train(epochs=1)
    assert places == [0.25, 0.5, 0.75, 1.0]


def long(rows, members=4, size=8, batch_size=8, model=None, x=None):
    x = np.zeros((rows, size), np.float32) if x is None else x
    swarm = tn.TurbaTrainState.swarm(model or tn.MLP((size, 2)), optax.sgd(0.1), members, sample_input=x[:1])
    data = prepare(swarm, x, np.zeros(len(x), int))
    return parts.is_long(program.Train(tn.softmax_cross_entropy, batch_size), swarm, data, tn.Plan())


def test_what_is_long_goes_by_the_weights_and_rows_of_an_epoch(monkeypatch):
    operations = 6 * (9 * 8 + 9 * 2) * 800 * 4
    for most, expected in ((1.01 * operations, False), (0.99 * operations, True)):
        limit(monkeypatch, most)
        assert long(800) is expected
    assert not long(8)  # one step cannot be cut


def test_a_sequence_counts_at_each_of_its_positions(monkeypatch):
    series, weights = np.zeros((800, 20, 3), np.float32), 4 * (3 * 5 + 5 * 5 + 5) + 6
    for share, expected in ((1.01, False), (0.99, True)):
        limit(monkeypatch, share * 6 * weights * 20 * 800 * 4)
        assert long(800, model=tn.LSTM(5), x=series) is expected


def test_an_image_counts_at_the_square_root_of_its_positions(monkeypatch):
    images, weights = np.zeros((64, 32, 32, 3), np.float32), (75 + 1) * 6 + (150 + 1) * 16 + 401 * 120 + 121 * 84 + 850
    for share, expected in ((1.01, False), (0.99, True)):
        limit(monkeypatch, share * 6 * weights * 32 * 64 * 4)
        assert long(64, model=tn.networks.LeNet(), x=images) is expected
