"""study.data_parallel.one_network: every method trains the same network on the same rows, and says what it took."""

import numpy as np
import pandas as pd
import pytest
import torch
from tiers import first

import turbanet as tn
from study.baselines.twins import mlp_twin
from study.data_parallel import one_network
from study.figures.labels import DDP, DILOCO, DOWNPOUR, HOGWILD, LOCAL, SERIAL, SERIAL_ONE, SHARED
from study.measurement import machine

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 6)).astype(np.float32)
Y = X[:, :3].argmax(-1)


def task(**how):
    values = {"epochs": 4, "batch_size": 5, "learning_rate": 0.05, "every": 3} | how
    return one_network.Task(tn.MLP((8, 3)), mlp_twin, X, Y, **values)


@pytest.fixture(scope="module")
def serial():
    return one_network.run(SERIAL_ONE, task())


@pytest.mark.parametrize("method", first(2, [SERIAL, LOCAL, HOGWILD, DDP, DOWNPOUR]))
def test_with_one_worker_every_method_is_the_serial_one(method, serial):
    found = one_network.run(method, task(), count=1)
    np.testing.assert_allclose(found.losses.loss, serial.losses.loss, rtol=1e-3)
    assert found.losses.columns.tolist() == serial.losses.columns.tolist()
    assert found.startup_seconds >= 0 and found.score(X, Y)[0] == pytest.approx(serial.score(X, Y)[0], abs=0.02)


@pytest.mark.parametrize("method", first(1, [DILOCO, LOCAL, SHARED]))
def test_two_workers_learn(method):
    rate = 0.005 if method == DILOCO else 0.05  # an outer rate and momentum make its steps seven times as long
    found = one_network.run(method, task(epochs=20, learning_rate=rate), count=2)
    first, last = found.losses.loss[:20].mean(), found.losses.loss[-20:].mean()
    assert last < 0.8 * first
    accuracy, by_class = found.score(X, Y)
    chosen = found.network(torch.from_numpy(X)).argmax(-1).numpy()
    assert accuracy == np.mean(chosen == Y) > 0.5
    np.testing.assert_allclose(by_class, [np.mean(chosen[label == Y] == label) for label in np.arange(3)])
    assert len(found.use) == 1 or found.use.seconds.between(0, found.losses.seconds.max()).all()


def test_a_training_shorter_than_the_time_between_two_samples_has_one(monkeypatch):
    monkeypatch.setattr(one_network, "utilisation", lambda: machine.utilisation(60))
    assert 0 <= one_network.run(SERIAL_ONE, task()).cpu() <= 1


def test_adam_is_the_same_in_both_libraries():
    how = {"optimizer": "adam", "learning_rate": 0.01}
    ours = one_network.run(LOCAL, task(**how), count=1)
    theirs = one_network.run(SERIAL_ONE, task(**how))
    np.testing.assert_allclose(ours.losses.loss, theirs.losses.loss, rtol=1e-3)


def test_a_loss_to_aim_for_is_the_mean_of_an_epoch():
    losses = pd.DataFrame({"seconds": np.arange(8.0), "loss": [8.0, 7, 6, 5, 4, 3, 2, 1]})
    run = one_network.Run(HOGWILD, losses, 1.0, torch.nn.Identity(), None, window=2)
    assert run.loss_after(2) == 5.5 and run.seconds_to(5.5) == 3.0 and run.seconds_to(0.5) == np.inf


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="Unknown method 'horovod'; known: PyTorch, serial, one thread"):
        one_network.run("horovod", task())
