"""study.data_parallel.suite: what is measured is what its tables say, with runs made up."""

import numpy as np
import pandas as pd
import pytest
import torch

from study.data_parallel import one_network, suite as workers_suite
from study.figures.labels import HOGWILD, SERIAL_ONE


@pytest.fixture
def made_up(monkeypatch):
    """Runs of four epochs of one batch, whose loss falls by a tenth of a hundred learning rates an epoch."""
    images = np.zeros((10, 4), np.float32), np.arange(10)
    monkeypatch.setattr(workers_suite, "_mnist_data", lambda rows: (images, *images))

    def run(method, task, count=None):
        if method == HOGWILD and task.learning_rate > 1:
            raise FloatingPointError("The loss of worker 1 is nan.")
        pace = 0.5 if method == HOGWILD else 1.0  # seconds an epoch
        loss = 2 - 10 * task.learning_rate * np.arange(4)
        losses = pd.DataFrame({"seconds": pace * np.arange(4), "loss": loss, "behind": 0})
        use = pd.DataFrame({"core_0": [50.0], "core_1": [100.0]})
        return one_network.Run(method, losses, 3.0, torch.nn.Identity(), use, window=1)

    monkeypatch.setattr(one_network, "run", run)
    monkeypatch.setattr(one_network.Run, "score", lambda self, x, y: (0.25, None))


def test_every_method_is_timed_to_the_loss_of_serial_training_at_its_best(made_up):
    found = workers_suite.learning_rates(rates=(0.01, 0.05), seeds=2, epochs=4, target_epochs=3)
    assert set(found.method) == set(one_network.METHODS) and len(found) == 4 * len(one_network.METHODS)
    assert (found.target == 1.0).all()  # 2 - 10 * 0.05 * 2
    to_loss = found.set_index(["method", "learning_rate", "seed"]).seconds_to_loss
    assert to_loss[SERIAL_ONE, 0.05, 1] == 2.0 and to_loss[HOGWILD, 0.05, 0] == 1.0
    assert np.isinf(to_loss[SERIAL_ONE, 0.01, 0])
    assert (found.accuracy == 0.25).all() and (found.cpu == 0.75).all() and (found.startup_seconds == 3).all()


def test_a_method_that_diverges_is_said_and_left_out(made_up, capsys):
    found = workers_suite.learning_rates(rates=(0.05, 2.0), seeds=1, epochs=4, target_epochs=3)
    assert "Hogwild: The loss of worker 1 is nan." in capsys.readouterr().err
    assert len(found) == 2 * len(one_network.METHODS) - 1


def test_a_method_is_at_its_best_where_its_median_seed_is_first_and_one_that_diverged_never_is():
    lines = [(HOGWILD, 0.1, seed, took) for seed, took in enumerate([1.0, 9.0, 9.0])]
    lines += [(HOGWILD, 0.2, seed, 5.0) for seed in range(3)]
    lines += [(HOGWILD, 0.4, 0, 0.1)]  # the other two seeds diverged
    lines += [(SERIAL_ONE, 0.1, seed, 2.0) for seed in range(3)]
    table = pd.DataFrame(lines, columns=["method", "learning_rate", "seed", "seconds_to_loss"])
    best = workers_suite.at_its_best(table)
    assert best.groupby("method").learning_rate.unique().map(list).to_dict() == {HOGWILD: [0.2], SERIAL_ONE: [0.1]}
    assert len(best) == 6
