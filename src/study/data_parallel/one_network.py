"""One network, many workers: every way to train it from the same weights, and what each took and reached."""

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import joblib
import numpy as np
import optax
import torch

import turbanet as tn
from study.baselines import trainers
from study.baselines.twins import tensor
from study.data_parallel import group, workers
from study.data_parallel.hogwild import DistributedTester, DistributedTrainer
from study.figures.labels import DDP, DILOCO, DOWNPOUR, HOGWILD, LOCAL, SERIAL, SERIAL_ONE, SHARED
from study.measurement.machine import utilisation
from turbanet.data.sampling import deal

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)  # DiLoCo's (Douillard et al. 2023)


@dataclasses.dataclass(frozen=True)
class Task:
    """One network and how it is trained.

    model, twin : the Flax model, and what makes a PyTorch one of one member's parameters
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
        """The network as a swarm of one."""
        optimizer = {"sgd": partial(optax.sgd, momentum=self.momentum), "adam": optax.adam}[self.optimizer]
        rate = self.learning_rate
        return tn.TurbaTrainState.swarm(self.model, optimizer(rate), 1, sample_input=self.x[:1], seed=self.seed)

    def torch_optimizer(self):
        """The same optimizer in PyTorch, as a function of parameters."""
        own = {"momentum": self.momentum} if self.optimizer == "sgd" else {}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.optimizer]
        return partial(kind, lr=self.learning_rate, fused=True, **own)

    def dataset(self):
        """The rows as PyTorch has them."""
        return torch.utils.data.TensorDataset(tensor(self.x), tensor(self.y).long())


@dataclasses.dataclass(frozen=True)
class Run:
    """One way's training.

    losses : a table of worker, step, seconds (from the first step on), loss and behind (updates by others meanwhile)
    startup_seconds : of what comes before the first step: processes, compilation
    network : the PyTorch network that came out
    use : the use of the machine while it trained, `machine.utilisation().frame`
    window : batches of an epoch, of all workers: a loss is the mean of as many, as single ones are noise
    """

    way: str
    losses: Any
    startup_seconds: float
    network: Any
    use: Any
    window: int

    def seconds_to(self, target: float) -> float:
        """Until the mean loss of an epoch's batches is at most `target`, startup apart; infinite if it never is."""
        return workers.seconds_to(self.losses, target, self.window)

    def loss_after(self, epoch: int) -> float:
        """The mean loss of the so-manieth epoch, a loss to aim for."""
        return float(workers.smoothed(self.losses, self.window).iloc[epoch * self.window - 1])

    def cpu(self) -> float:
        """The mean share of the cores' time that was busy, 0 to 1."""
        return float(self.use.filter(like="core_").to_numpy().mean() / 100)

    def score(self, x, y):
        """(accuracy, table of classes) on x [row, ...], y [row]."""
        rows = torch.utils.data.TensorDataset(tensor(x), tensor(y).long())
        return DistributedTester(torch.utils.data.DataLoader(rows, batch_size=1000))(self.network)[:2]


def run(way: str, task: Task, *, count: int | None = None) -> Run:
    """Train the task's network in one of the ways, by `count` workers where it has any (None: one per core)."""
    count = count or joblib.cpu_count()
    if way not in _WAYS:
        raise ValueError(f"Unknown way {way!r}; known: {', '.join(_WAYS)}.")
    swarm = task.swarm()
    start = swarm if way in (LOCAL, DILOCO) else task.twin(jax.device_get(swarm.get_state(0).params))
    with utilisation() as use:
        losses, startup, network = _WAYS[way](task, start, count)
    inside = use.frame[use.frame.seconds.between(startup, startup + losses.seconds.max())]
    use = inside.assign(seconds=inside.seconds - startup)
    return Run(way, losses, startup, network, use, len(losses) // task.epochs)


def _serial(task, network, count, threads):
    order = deal(rows=len(task.x), workers=1, epochs=task.epochs, batch_size=task.batch_size, seed=task.seed)
    order = torch.from_numpy(order).long()
    record = torch.empty((1, order.shape[1] * order.shape[2], len(workers.COLUMNS)), dtype=torch.float64)
    loss = torch.nn.CrossEntropyLoss()
    with trainers.torch_threads(threads):
        how = {"criterion": loss, "optimizer": task.torch_optimizer(), "record": record[0]}
        workers.train(network, task.dataset(), order[0], **how)
    return workers.table(record), 0.0, network


def _hogwild(task, network, count, shared):
    with tempfile.TemporaryDirectory() as folder:
        loss = torch.nn.CrossEntropyLoss()
        how = {"shared_state": shared, "seed": task.seed}
        train = DistributedTrainer(count, loss, folder, task.batch_size, **how)
        trained = train(network, task.dataset(), task.torch_optimizer(), None, task.epochs)
    return trained.losses, trained.startup_seconds, network


def _group(task, network, count, way):
    order = deal(rows=len(task.x), workers=count, epochs=task.epochs, batch_size=task.batch_size, seed=task.seed)
    data = {"dataset": task.dataset(), "order": torch.from_numpy(order).long()}
    how = {"criterion": torch.nn.CrossEntropyLoss(), "optimizer": task.torch_optimizer(), "every": task.every}
    losses, startup = group.train(group.Job(way, network, **data, **how))
    return losses, startup, network


def _local(task, swarm, count, outer):
    how = {"epochs": task.epochs, "batch_size": task.batch_size, "every": task.every, "seed": task.seed}
    job = {"workers": count, "outer": outer}
    swarm, seen = tn.federated.local_sgd(swarm, task.x, task.y, tn.softmax_cross_entropy, **job, **how)
    record = np.zeros((count, len(seen.seconds), len(workers.COLUMNS)))
    record[:, :, workers.TOOK] = seen.seconds
    record[:, :, workers.LOSS] = seen.loss.T
    return workers.table(record), seen.startup_seconds, task.twin(jax.device_get(swarm.get_state(0).params))


_WAYS = {
    SERIAL_ONE: partial(_serial, threads=1),
    SERIAL: partial(_serial, threads=joblib.cpu_count()),
    HOGWILD: partial(_hogwild, shared=False),
    SHARED: partial(_hogwild, shared=True),
    DDP: partial(_group, way=group.DDP),
    DOWNPOUR: partial(_group, way=group.DOWNPOUR),
    LOCAL: partial(_local, outer=None),
    DILOCO: partial(_local, outer=OUTER),
}
WAYS = tuple(_WAYS)
