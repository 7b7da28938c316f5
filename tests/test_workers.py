"""study.data_parallel.workers: one worker's steps, what is recorded, and how processes end together."""

import math
import os
import signal
import time
from functools import partial

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch import nn

from study.data_parallel import workers

X = torch.linspace(-1, 1, 12)[:, None]
Y = 2 * X + 1
SQUARED = nn.MSELoss()
SGD = partial(torch.optim.SGD, lr=0.1)


def line():
    """y = 0."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    return model


def room(order):
    return torch.full((order.shape[0] * order.shape[1], 3), torch.nan, dtype=torch.float64)


def test_steps_are_those_of_gradient_descent_by_hand():
    order = torch.arange(12).reshape(1, 3, 4).repeat(2, 1, 1)
    record = room(order)
    model = line()
    workers.train(model, torch.utils.data.TensorDataset(X, Y), order, criterion=SQUARED, optimizer=SGD, record=record)
    slope, height, losses = 0.0, 0.0, []
    for rows in order.reshape(-1, 4).numpy():
        x = X[rows, 0].numpy().astype(float)
        error = slope * x + height - (2 * x + 1)
        losses.append(np.mean(error**2))
        slope, height = slope - 0.1 * 2 * np.mean(error * x), height - 0.1 * 2 * np.mean(error)
    np.testing.assert_allclose(record[:, workers.LOSS], losses, rtol=1e-5)
    np.testing.assert_allclose([model.weight.item(), model.bias.item()], [slope, height], rtol=1e-5)
    assert (np.diff(record[:, workers.SECONDS]) > 0).all() and (record[:, workers.BEHIND] == 0).all()


def test_updates_of_others_during_a_step_are_counted():
    order = torch.arange(12).reshape(1, 3, 4)
    record = room(order)
    made = iter([0, 0, 0, 2, 2, 3])  # before and after each step
    how = {"criterion": SQUARED, "optimizer": SGD, "record": record, "others": lambda: next(made)}
    workers.train(line(), torch.utils.data.TensorDataset(X, Y), order, **how)
    assert record[:, workers.BEHIND].tolist() == [0, 2, 1]


def test_a_loss_that_is_no_number_is_named_with_step_and_learning_rate():
    order = torch.arange(12).reshape(1, 3, 4).repeat(50, 1, 1)
    with pytest.raises(FloatingPointError, match=r"worker 3 is (inf|nan) at step \d+, with learning rate 1e\+06: take"):
        how = {"criterion": SQUARED, "optimizer": partial(torch.optim.SGD, lr=1e6), "record": room(order), "worker": 3}
        workers.train(line(), torch.utils.data.TensorDataset(X, Y), order, **how)


def test_a_record_as_a_table_is_in_the_order_of_time():
    record = np.zeros((2, 2, 3))
    record[:, :, workers.SECONDS] = [[0.1, 0.4], [0.2, 0.3]]
    record[:, :, workers.LOSS] = [[4, 1], [3, 2]]
    record[1, 1, workers.BEHIND] = 5
    found = workers.table(record)
    assert found.columns.tolist() == ["worker", "step", "seconds", "loss", "behind"]
    assert found.loss.tolist() == [4, 3, 2, 1] and found.worker.tolist() == [0, 1, 1, 0]
    assert found.step.tolist() == [0, 0, 1, 1] and found.behind.tolist() == [0, 0, 5, 0]


def test_seconds_to_a_loss_is_when_the_mean_of_a_window_gets_there():
    losses = pd.DataFrame({"seconds": [1.0, 2.0, 3.0, 4.0], "loss": [4.0, 1.0, 3.0, 1.0]})
    assert workers.seconds_to(losses, 2.5, window=2) == 2.0  # (4 + 1) / 2
    assert workers.seconds_to(losses, 2.0, window=2) == 3.0
    assert workers.seconds_to(losses, 1.9, window=2) == math.inf
    assert workers.seconds_to(losses, 1.0, window=1) == 2.0


def put(worker, into):
    into[worker] = worker + 1


def fail(worker, how):
    if worker == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "diverged":
            raise FloatingPointError("The loss is nan.")
        raise KeyError("of a worker")
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "kind", "sentence"),
    [
        (
            "killed",
            RuntimeError,
            r"^Worker 1 was ended by SIGKILL, and the others were stopped: nothing of this training",
        ),
        ("raised", RuntimeError, r"(?s)A worker failed.*in fail.*KeyError: 'of a worker'"),
        ("diverged", FloatingPointError, r"^The loss is nan\.$"),
    ],
)
def test_all_end_with_the_first_that_fails_and_no_process_is_left(how, kind, sentence):
    before = set(psutil.Process().children(recursive=True))
    began = time.monotonic()
    with pytest.raises(kind, match=sentence):
        workers.spawn(fail, how, count=2)
    assert time.monotonic() - began < 60  # they would sleep for ten minutes
    left = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in left if "resource_tracker" not in " ".join(process.cmdline())] == []


def test_what_no_process_can_be_handed_is_said():
    with pytest.raises(TypeError, match="Another process cannot unpickle a lambda"):
        workers.spawn(put, lambda: None, count=1)
