"""Federated averaging in PyTorch; the clients of a round are dealt out to processes, one per core."""

import copy
import dataclasses
import time
from typing import Any

import torch
from torch import multiprocessing
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from study.data_parallel import workers


@dataclasses.dataclass
class Job:
    """A network and the rows on which the clients of each round train it.

    model : a PyTorch network on the CPU, trained in place
    x, y : tensors [row, ...], int64 [row]
    order : int64 [round, sampled, step, batch], rows of x
    learning_rate : of the clients' SGD
    """

    model: Any
    x: Any
    y: Any
    order: Any
    learning_rate: float


def train(job: Job, *, processes: int):
    """Train `job.model`: (seconds of each round, float64 [round]; startup seconds until the processes are ready).

    All clients have equally many rows and so equal weights. The shuffles in `order` are made before.
    """
    job = dataclasses.replace(job, model=job.model.share_memory())
    for name in ("x", "y", "order"):
        getattr(job, name).share_memory_()
    count = sum(each.numel() for each in job.model.parameters())
    sums = torch.zeros((processes, count)).share_memory_()
    ticks = torch.zeros(len(job.order) + 1, dtype=torch.float64).share_memory_()
    barrier = multiprocessing.get_context("spawn").Barrier(processes)
    begin = time.perf_counter()
    workers.spawn(_work, job, sums, ticks, barrier, count=processes)
    return ticks.diff().numpy(), float(ticks[0]) - begin


def _work(rank, job, sums, ticks, barrier):
    """Train this process's clients in every round; the first process keeps the server's weights."""
    torch.set_num_threads(1)
    model = copy.deepcopy(job.model)
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, fused=True)
    processes = len(sums)
    sampled = job.order.shape[1]
    server = list(job.model.parameters())

    def step(rows):
        optimizer.zero_grad()
        loss_fn(model(job.x[rows]), job.y[rows]).backward()
        optimizer.step()

    step(job.order[0, 0, 0])  # a warm-up, outside the time: each client starts from the server's weights
    barrier.wait()
    if rank == 0:
        ticks[0] = time.perf_counter()
    for number in range(len(job.order)):
        start = parameters_to_vector(server).detach()
        sums[rank].zero_()
        for client in range(rank, sampled, processes):
            vector_to_parameters(start.clone(), model.parameters())
            for rows in job.order[number, client]:
                step(rows)
            sums[rank] += parameters_to_vector(model.parameters()).detach() - start
        barrier.wait()
        if rank == 0:
            with torch.no_grad():
                for weights, change in zip(server, _split(sums.sum(0) / sampled, server), strict=True):
                    weights += change
            ticks[number + 1] = time.perf_counter()
        barrier.wait()


def _split(vector, like):
    return [part.view_as(each) for part, each in zip(vector.split([e.numel() for e in like]), like, strict=True)]
