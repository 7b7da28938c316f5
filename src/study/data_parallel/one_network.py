"""One network, many workers: every method to train it from the same weights, with its time and scores."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import joblib
import numpy as np
import optax
import torch
from sklearn.metrics import accuracy_score, recall_score

import turbanet as tn
from study.baselines import trainers
from study.baselines.layers import tensor
from study.data_parallel import group, hogwild, workers
from study.figures.labels import DDP, DILOCO, DOWNPOUR, HOGWILD, LOCAL, SERIAL, SERIAL_ONE, SHARED
from study.measurement.machine import utilisation
from turbanet.data.sampling import deal

ROWS_AT_ONCE = 1000  # of a test set
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)  # DiLoCo's (Douillard et al. 2023)


@dataclasses.dataclass(frozen=True)
class Task:
    """One network and its training's settings.

    model, twin : the Flax model, and twin(params) -> the PyTorch network with one member's parameters
    x, y : arrays [row, ...], int [row]
    optimizer : "sgd" (with `momentum`) or "adam"
    every : steps between two averages, or two exchanges with the parameter server
    """

    model: Any
    twin: Callable
    x: Any
    y: Any
    epochs: int
    batch_size: int
    learning_rate: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    every: int = 16
    seed: int = 0

    def swarm(self):
        """Make the network as a swarm of one."""
        optimizer = {"sgd": partial(optax.sgd, momentum=self.momentum), "adam": optax.adam}[self.optimizer]
        rate = self.learning_rate
        return tn.TurbaTrainState.swarm(self.model, optimizer(rate), 1, sample_input=self.x[:1], seed=self.seed)

    def torch_optimizer(self):
        """Return the same optimizer in PyTorch as a function of parameters."""
        own = {"momentum": self.momentum} if self.optimizer == "sgd" else {}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimizer]
        return partial(kind, lr=self.learning_rate, fused=True, **own)

    def torch_job(self, workers):
        """Return what `workers.train` takes for so many workers: {"dataset", "order", "criterion", "optimizer"}."""
        order = deal(rows=len(self.x), workers=workers, epochs=self.epochs, batch_size=self.batch_size, seed=self.seed)
        return {
            "dataset": torch.utils.data.TensorDataset(tensor(self.x), tensor(self.y).long()),
            "order": torch.from_numpy(order).long(),
            "criterion": torch.nn.CrossEntropyLoss(),
            "optimizer": self.torch_optimizer(),
        }


@dataclasses.dataclass(frozen=True)
class Run:
    """One method's training.

    losses : a table of worker, step, seconds (from the first step on), loss and behind (updates by others meanwhile)
    startup_seconds : before the first step: processes, compilation
    network : the trained PyTorch network
    use : the use of the machine during the training, `machine.utilisation().frame`
    window : batches of an epoch by all workers; a loss is their mean, as single batches are noisy
    """

    method: str
    losses: Any
    startup_seconds: float
    network: Any
    use: Any
    window: int

    def seconds_to(self, target: float) -> float:
        """Return seconds without startup until an epoch's mean loss is at most `target`; infinite if it never is."""
        return workers.seconds_to(self.losses, target, self.window)

    def loss_after(self, epoch: int) -> float:
        """Return the mean loss of the given epoch, counted from 1."""
        return float(workers.smoothed(self.losses, self.window).iloc[epoch * self.window - 1])

    def cpu(self) -> float:
        """Return the mean share of busy core time, 0 to 1."""
        return float(self.use.filter(like="core_").to_numpy().mean() / 100)

    def score(self, x, y):
        """Score the network on x [row, ...], y [row]: (accuracy, accuracy on the rows of each class [class])."""
        self.network.eval()
        with torch.no_grad():
            logits = torch.cat([self.network(rows) for rows in tensor(x).split(ROWS_AT_ONCE)])
        chosen, classes = logits.argmax(-1).numpy(), np.arange(logits.shape[1])
        by_class = recall_score(y, chosen, labels=classes, average=None, zero_division=np.nan)
        return accuracy_score(y, chosen), by_class


def run(method: str, task: Task, *, count: int | None = None) -> Run:
    """Train the task's network by a method of METHODS, with `count` workers where it has any (None: one per core)."""
    count = count or joblib.cpu_count()
    if method not in _METHODS:
        raise ValueError(f"Unknown method {method!r}; known: {', '.join(_METHODS)}.")
    swarm = task.swarm()
    start = swarm if method in (LOCAL, DILOCO) else task.twin(jax.device_get(swarm.get_state(0).params))
    with utilisation() as use:
        losses, startup, network = _METHODS[method](task, start, count)
    end = startup + losses.seconds.max()
    inside = use.frame[use.frame.seconds.between(startup, end)]
    if inside.empty:  # it took less than the time between two samples
        inside = use.frame.iloc[[(use.frame.seconds - end).abs().argmin()]]
    use = inside.assign(seconds=inside.seconds - startup)
    return Run(method, losses, startup, network, use, len(losses) // task.epochs)


def _serial(task, network, count, threads):
    job = task.torch_job(1)
    record = workers.room(job["order"])
    with trainers.torch_threads(threads):
        workers.train(network, **job | {"order": job["order"][0]}, record=record[0])
    return workers.table(record), 0.0, network


def _hogwild(task, network, count, shared):
    return *hogwild.train(network, **task.torch_job(count), shared_state=shared), network


def _group(task, network, count, method):
    return *group.train(group.Job(method, network, **task.torch_job(count), every=task.every)), network


def _local(task, swarm, count, outer):
    kwargs = {"epochs": task.epochs, "batch_size": task.batch_size, "every": task.every, "seed": task.seed}
    job = {"workers": count, "outer": outer}
    swarm, history = tn.federated.local_sgd(swarm, task.x, task.y, tn.softmax_cross_entropy, **job, **kwargs)
    record = np.zeros((count, len(history.seconds), len(workers.COLUMNS)))
    record[:, :, workers.SECONDS] = history.seconds
    record[:, :, workers.LOSS] = history.loss.T
    return workers.table(record), history.startup_seconds, task.twin(jax.device_get(swarm.get_state(0).params))


_METHODS = {
    SERIAL_ONE: partial(_serial, threads=1),
    SERIAL: partial(_serial, threads=joblib.cpu_count()),
    HOGWILD: partial(_hogwild, shared=False),
    SHARED: partial(_hogwild, shared=True),
    DDP: partial(_group, method=group.DDP),
    DOWNPOUR: partial(_group, method=group.DOWNPOUR),
    LOCAL: partial(_local, outer=None),
    DILOCO: partial(_local, outer=OUTER),
}
METHODS = tuple(_METHODS)
