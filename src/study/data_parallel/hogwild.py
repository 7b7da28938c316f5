"""Lock-free parallel SGD on CPU cores: processes update one network in shared memory (Hogwild: Recht et al. 2011)."""

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch import multiprocessing

from study.data_parallel import workers
from turbanet.core.arrays import check_whole
from turbanet.core.plan import say_once
from turbanet.data.sampling import deal

CHECKPOINT, LOSSES, SCORES = "checkpoint.pt", "losses.csv", "scores.csv"


@dataclasses.dataclass(frozen=True)
class Trained:
    """The record of a training.

    losses : a table of worker, step, seconds, loss and behind (updates by others during the step), by time
    startup_seconds : from the call to the first step, mostly the start of the processes
    """

    losses: Any
    startup_seconds: float


@dataclasses.dataclass
class DistributedTrainer:
    """Trains one network by several processes of one thread each, which share its weights without locks.

    Parameters
    ----------
    processes : their number; None takes one per core
    criterion : criterion(prediction, y) -> loss of a batch, such as nn.CrossEntropyLoss()
    root_dir : the folder for checkpoint.pt (the weights) and losses.csv
    batch_size : rows in a process's step
    shared_state : whether the processes also share the optimizer's state
    seed : of the order of rows
    """

    processes: int | None
    criterion: Any
    root_dir: Any
    batch_size: int
    shared_state: bool = False
    seed: int = 0

    def __call__(self, model, dataset, optimizer, scheduler, epochs: int) -> Trained:
        """Train `model` in place on `dataset`; each epoch deals its rows out to the processes anew.

        Parameters
        ----------
        model : a PyTorch network on the CPU; it is moved to shared memory
        dataset : of (x, y); a TensorDataset, or indexed row by row
        optimizer : a PyTorch optimizer of the model's parameters, or a function of them that makes one
        scheduler : None, a PyTorch scheduler of that optimizer, or a function of it; each process steps its own
        epochs : passes over all rows

        Raises
        ------
        ValueError : for more processes than rows, and numbers below 1
        FloatingPointError : for a loss that is NaN or infinite, with its step and learning rate
        RuntimeError : for a process that fails, with its traceback, or is killed; no process and no file remains
        """
        count = joblib.cpu_count() if self.processes is None else self.processes
        check_whole(processes=count)
        if count > joblib.cpu_count():
            say_once(f"{count} processes share {joblib.cpu_count()} cores: what each gets is less than a core.")
        folder = Path(self.root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CHECKPOINT, LOSSES):
            (folder / name).unlink(missing_ok=True)  # from an earlier training
        dealt = deal(rows=len(dataset), workers=count, epochs=epochs, batch_size=self.batch_size, seed=self.seed)
        order = torch.from_numpy(dealt).long().share_memory_()
        record = torch.full((count, order[0, :, :, 0].numel(), 3), torch.nan, dtype=torch.float64).share_memory_()
        updates = torch.zeros(count, dtype=torch.long).share_memory_()
        model.share_memory()
        if self.shared_state:
            optimizer = _with_shared_state(optimizer, model)
        begin = time.perf_counter()
        started = multiprocessing.get_context("spawn").Value("d", 0.0)
        ready = multiprocessing.get_context("spawn").Barrier(count)
        job = (model, dataset, optimizer, scheduler, self.criterion, order, record, updates, ready, started)
        workers.spawn(workers.train_shared, *job, count=count)
        losses = workers.table(record)
        torch.save(model.state_dict(), folder / CHECKPOINT)
        losses.to_csv(folder / LOSSES, index=False)
        return Trained(losses, started.value - begin)


@dataclasses.dataclass
class DistributedTester:
    """Scores a classifier on all batches (x, y) of `loader`; writes scores.csv into root_dir unless that is None."""

    loader: Any
    root_dir: Any = None

    def __call__(self, model):
        """Return (accuracy; a table of class, rows, right, accuracy; the confusion matrix).

        The matrix is int [true class, predicted class].
        """
        import pandas as pd
        from sklearn.metrics import confusion_matrix

        model.eval()
        with torch.no_grad():
            found = [(y, model(x)) for x, y in self.loader]
        y = torch.cat([y for y, _ in found]).numpy()
        scores = torch.cat([prediction for _, prediction in found])
        matrix = confusion_matrix(y, scores.argmax(-1).numpy(), labels=np.arange(scores.shape[1]))
        rows, right = matrix.sum(1), matrix.diagonal()
        share = np.divide(right, rows, out=np.full(len(rows), np.nan), where=rows > 0)
        classes = pd.DataFrame({"class": np.arange(len(rows)), "rows": rows, "right": right, "accuracy": share})
        if self.root_dir is not None:
            Path(self.root_dir).mkdir(parents=True, exist_ok=True)
            classes.to_csv(Path(self.root_dir) / SCORES, index=False)
        return float(right.sum() / rows.sum()), classes, matrix


def _with_shared_state(optimizer, model):
    """Give the optimizer the state of its first step, zeroed and in shared memory, and return it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trial = copy.deepcopy(optimizer)  # its parameters are copies, so a step may change them
    copies = [parameter for group in trial.param_groups for parameter in group["params"]]
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    trial.step()
    for parameter, other in zip(parameters, copies, strict=True):
        optimizer.state[parameter] = {
            name: torch.zeros_like(value).share_memory_() if torch.is_tensor(value) else value
            for name, value in trial.state[other].items()
        }
    return optimizer
