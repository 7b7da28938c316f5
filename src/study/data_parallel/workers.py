"""Worker processes that train one PyTorch network: their steps, what they record of them, and how they end."""

import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import multiprocessing
from torch.optim.lr_scheduler import ReduceLROnPlateau

TOOK, LOSS, BEHIND = range(3)  # of a record: seconds since the start, a batch's loss, updates by others meanwhile
COLUMNS = ("seconds", "loss", "behind")


def train(
    model,
    dataset,
    order,
    *,
    criterion,
    optimizer,
    scheduler=None,
    record,
    worker: int = 0,
    others: Callable[[], int] | None = None,
    after: Callable[[int], None] | None = None,
):
    """One worker's training, in place.

    Parameters
    ----------
    dataset : (x, y) of rows at an index: a TensorDataset, or whatever is indexed by one row
    order : int [epoch, step, batch], the rows of each step
    criterion : criterion(prediction, y) -> the loss
    optimizer, scheduler : PyTorch's, or functions that make them of the parameters and of the optimizer
    record : float64 [step, 3], filled: see COLUMNS
    worker : its number, for errors
    others : how many updates the others have made so far
    after : called with the number of each step once it is made

    Raises
    ------
    FloatingPointError : for a loss that is NaN or infinite, named with its step and learning rate
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    if scheduler is not None and not hasattr(scheduler, "step"):
        scheduler = scheduler(optimizer)
    model.train()
    step = 0
    begin = time.perf_counter()
    for batches in order:
        first = step
        for rows in batches:
            seen = others() if others else 0
            x, y = _read(dataset, rows)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            behind = others() - seen if others else 0
            optimizer.step()
            value = loss.item()
            record[step] = torch.tensor([time.perf_counter() - begin, value, behind], dtype=torch.float64)
            if not math.isfinite(value):
                rate = optimizer.param_groups[0]["lr"]
                came = f"The loss of worker {worker} is {value} at step {step}, with learning rate {rate:g}"
                raise FloatingPointError(f"{came}: take a smaller one, or fewer workers.")
            if after:
                after(step)
            step += 1
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(record[first:step, LOSS].mean().item())
        elif scheduler is not None:
            scheduler.step()


def train_shared(worker, model, dataset, optimizer, scheduler, criterion, order, record, updates, ready, started):
    """`train` in a process that shares the model's weights with others, which count their `updates` [worker].

    order : int [worker, epoch, step, batch]; record : float64 [worker, step, 3]
    ready : a barrier before the first step; started : a number for when that was, on the clock of all processes
    """
    torch.set_num_threads(1)
    not_mine = torch.arange(len(updates)) != worker

    def others():
        return int(updates[not_mine].sum())

    def after(step):
        updates[worker] += 1

    how = {"criterion": criterion, "optimizer": optimizer, "scheduler": scheduler, "record": record[worker]}
    ready.wait()
    if worker == 0:
        started.value = time.perf_counter()
    train(model, dataset, order[worker], worker=worker, others=others, after=after, **how)


def table(record):
    """A record float64 [worker, step, 3] as a pandas table, in the order of time: worker, step and COLUMNS."""
    import pandas as pd

    record = np.asarray(record)
    workers, steps, _ = record.shape
    frame = pd.DataFrame(record.reshape(-1, len(COLUMNS)), columns=list(COLUMNS))
    frame.insert(0, "worker", np.repeat(np.arange(workers), steps))
    frame.insert(1, "step", np.tile(np.arange(steps), workers))
    return frame.astype({"behind": int}).sort_values("seconds", ignore_index=True)


def smoothed(losses, window: int):
    """The mean loss of the last `window` batches of all workers, NaN before there are as many."""
    return losses.loss.rolling(window).mean()


def seconds_to(losses, target: float, window: int) -> float:
    """When the mean loss of the last `window` batches first is at most `target`; infinite if it never is.

    losses: a table of seconds and loss in the order of time.
    """
    there = losses.seconds[smoothed(losses, window) <= target]
    return float(there.iloc[0]) if len(there) else math.inf


def together(work: Callable[..., Any], *arguments: Any, count: int) -> None:
    """work(worker, *arguments) in `count` new processes, which all end with the first that fails.

    What they are to give back they write into shared tensors among the arguments.

    Raises
    ------
    TypeError : before anything starts, for arguments that no other process can read
    FloatingPointError : where a worker raised one
    RuntimeError : for any other error in a worker, with its traceback, and for a worker that was killed
    """
    try:
        context = multiprocessing.start_processes(work, arguments, nprocs=count, join=False, start_method="spawn")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        advice = "name it at the top of a module, or use functools.partial"
        raise TypeError(f"No other process can be handed a lambda or what a function defines: {advice}.") from error
    try:
        while not context.join():
            pass
    except multiprocessing.ProcessRaisedException as error:
        kind, _, sentence = str(error).strip().rpartition("\n")[2].partition(": ")
        if kind == FloatingPointError.__name__:
            raise FloatingPointError(sentence) from None
        raise RuntimeError(f"A worker failed, and the others were stopped.\n{error}") from None
    except multiprocessing.ProcessExitedException as error:
        ended = error.signal_name or f"exit code {error.exit_code}"
        came = f"Worker {error.error_index} was ended by {ended}, and the others were stopped"
        raise RuntimeError(f"{came}: nothing of this training is kept.") from None
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _read(dataset, rows):
    if isinstance(dataset, torch.utils.data.TensorDataset):
        return dataset[rows]
    return torch.utils.data.default_collate([dataset[int(row)] for row in rows])
