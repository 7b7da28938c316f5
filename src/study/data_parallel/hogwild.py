"""Lock-free parallel SGD on CPU cores: processes update one network in shared memory (Hogwild: Recht et al. 2011)."""

import copy
import time

import torch
from torch import multiprocessing

from study.data_parallel import workers


def train(model, dataset, order, *, criterion, optimizer, shared_state=False):
    """Train `model` in place by a process of one thread for each worker: (table, see `workers.table`; startup seconds).

    Parameters
    ----------
    model : a PyTorch network on the CPU; it is moved to shared memory
    dataset, criterion, optimizer : as for `workers.train`
    order : int64 [worker, epoch, step, batch], from `turbanet.data.sampling.deal`
    shared_state : whether the processes also share the optimizer's state; its type must make it in the first step

    Errors are those of `workers.spawn`.
    """
    count = len(order)
    record = workers.room(order)
    updates = torch.zeros(count, dtype=torch.long).share_memory_()
    model.share_memory()
    if shared_state:
        optimizer = _with_shared_state(optimizer, model)
    begin = time.perf_counter()
    started = multiprocessing.get_context("spawn").Value("d", 0.0)
    ready = multiprocessing.get_context("spawn").Barrier(count)
    job = (model, dataset, optimizer, criterion, order.share_memory_(), record, updates, ready, started)
    workers.spawn(workers.train_shared, *job, count=count)
    return workers.table(record), started.value - begin


def _with_shared_state(optimizer, model):
    """Return optimizer(parameters) with the state of its first step, zeroed and in shared memory."""
    parameters = list(model.parameters())
    optimizer, trial = (optimizer(each) for each in (parameters, copy.deepcopy(parameters)))
    copies = trial.param_groups[0]["params"]
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    trial.step()
    for parameter, other in zip(parameters, copies, strict=True):
        optimizer.state[parameter] = {
            name: torch.zeros_like(value).share_memory_() if torch.is_tensor(value) else value
            for name, value in trial.state[other].items()
        }
    return optimizer
