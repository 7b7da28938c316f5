"""Worker processes that train one PyTorch network: their steps, records and errors."""

import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import multiprocessing

SECONDS, LOSS, BEHIND = range(3)  # of a record: since the start, a batch's loss, others' updates during the step
COLUMNS = ("seconds", "loss", "behind")


def train(
    model,
    dataset,
    order,
    *,
    criterion,
    optimizer,
    record,
    worker: int = 0,
    others: Callable[[], int] | None = None,
    after: Callable[[int], None] | None = None,
):
    """Train one worker's model in place.

    Parameters
    ----------
    dataset : a TensorDataset of (x, y)
    order : int [epoch, step, batch], the rows of each step
    criterion : criterion(prediction, y) -> loss
    optimizer : PyTorch's, or a function that makes one from the parameters
    record : float64 [step, 3] on the CPU, filled with COLUMNS
    worker : its number, for errors
    others : returns the number of the other workers' updates so far
    after : called with each step's number after the step

    Raises
    ------
    FloatingPointError : for a loss that is NaN or infinite, named with its step and learning rate
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    model.train()
    record = np.asarray(record)  # the same memory; faster to write into than a tensor
    begin = time.perf_counter()
    for step, rows in enumerate(order.flatten(end_dim=1)):
        before = others() if others else 0
        x, y = dataset[rows]
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        behind = others() - before if others else 0
        optimizer.step()
        value = loss.item()
        record[step] = time.perf_counter() - begin, value, behind
        if not math.isfinite(value):
            rate = optimizer.param_groups[0]["lr"]
            problem = f"The loss of worker {worker} is {value} at step {step}, with learning rate {rate:g}"
            raise FloatingPointError(f"{problem}: take a smaller one, or fewer workers.")
        if after:
            after(step)


def train_shared(worker, model, dataset, optimizer, criterion, order, record, updates, ready, started):
    """Run `train` in a process that shares the model's weights with others; each counts its `updates` [worker].

    order : int [worker, epoch, step, batch]; record : float64 [worker, step, 3]
    ready : a barrier before the first step; started : set to its time, on the clock of all processes
    """
    torch.set_num_threads(1)
    updates = np.asarray(updates)  # the same memory; faster to read than a tensor

    def others():
        return int(updates.sum() - updates[worker])

    def after(step):
        updates[worker] += 1

    kwargs = {"criterion": criterion, "optimizer": optimizer, "record": record[worker]}
    ready.wait()
    if worker == 0:
        started.value = time.perf_counter()
    train(model, dataset, order[worker], worker=worker, others=others, after=after, **kwargs)


def room(order):
    """Return room in shared memory for the record of an order [worker, epoch, step, batch]; `table` reads it."""
    workers, epochs, steps, _ = order.shape
    return torch.full((workers, epochs * steps, len(COLUMNS)), torch.nan, dtype=torch.float64).share_memory_()


def table(record):
    """Turn a record, float64 [worker, step, 3], into a pandas table in time order: worker, step and COLUMNS."""
    import pandas as pd

    record = np.asarray(record)
    workers, steps, _ = record.shape
    frame = pd.DataFrame(record.reshape(-1, len(COLUMNS)), columns=list(COLUMNS))
    frame.insert(0, "worker", np.repeat(np.arange(workers), steps))
    frame.insert(1, "step", np.tile(np.arange(steps), workers))
    return frame.astype({"behind": int}).sort_values("seconds", ignore_index=True)


def smoothed(losses, window: int):
    """Return the moving mean of `window` batches of all workers, NaN for the first ones."""
    return losses.loss.rolling(window).mean()


def seconds_to(losses, target: float, window: int) -> float:
    """Return the first time at which the moving mean loss is at most `target`; infinite if it never is.

    losses : a table of seconds and loss in time order
    """
    reached = losses.seconds[smoothed(losses, window) <= target]
    return float(reached.iloc[0]) if len(reached) else math.inf


def spawn(work: Callable[..., Any], *arguments: Any, count: int) -> None:
    """Run work(worker, *arguments) in `count` new processes; all end when one fails.

    Results are written into shared tensors among the arguments.

    Raises
    ------
    TypeError : before anything starts, for arguments that cannot be pickled
    FloatingPointError : from a worker
    RuntimeError : for any other error in a worker, with its traceback, and for a worker that was killed
    """
    try:
        context = multiprocessing.start_processes(work, arguments, nprocs=count, join=False, start_method="spawn")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        advice = "name it at the top of a module, or use functools.partial"
        raise TypeError(f"Another process cannot unpickle a lambda or a nested function: {advice}.") from error
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
        problem = f"Worker {error.error_index} was ended by {ended}, and the others were stopped"
        raise RuntimeError(f"{problem}: nothing of this training is kept.") from None
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
