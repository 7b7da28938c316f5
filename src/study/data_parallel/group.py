"""Processes that train one PyTorch network through torch.distributed: in step (DDP), or by a parameter server."""

import argparse
import copy
import dataclasses
import datetime
import importlib.metadata
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from study.data_parallel import workers

DDP, DOWNPOUR = "ddp", "downpour"
PACKAGES = ("torch", "numpy")  # that all workers must have in one version
PATIENCE = datetime.timedelta(minutes=10)  # with a worker that does not answer, on another host


@dataclasses.dataclass
class Job:
    """A training of one network by several workers, all of them started with the same job.

    way : "ddp", where each step takes the mean gradient of all workers' batches, or "downpour", where one more process
        serves the weights: a worker sends what it changed since it last asked, and gets the weights of that moment
        (Dean et al. 2012)
    model : a PyTorch network on the CPU, trained in place
    dataset : of (x, y)
    order : int64 [worker, epoch, step, batch], as `turbanet.data.sampling.deal` deals rows out
    criterion, optimizer, scheduler : as `workers.train` takes them, the latter two as functions
    every : steps of a worker between two exchanges with the server
    """

    way: str
    model: Any
    dataset: Any
    order: Any
    criterion: Any
    optimizer: Any
    scheduler: Any = None
    every: int = 16

    def __post_init__(self):
        if self.way not in (DDP, DOWNPOUR):
            raise ValueError(f"way must be {DDP!r} or {DOWNPOUR!r}, got {self.way!r}.")
        if self.way == DOWNPOUR and next(self.model.buffers(), None) is not None:
            raise ValueError("A parameter server carries no running statistics: train a network with BatchNorm by DDP.")

    @property
    def processes(self) -> int:
        """Workers, and the server."""
        return len(self.order) + (self.way == DOWNPOUR)


def train(job: Job):
    """Train `job.model` in place on this machine: (a table of the steps, as `workers.table`; seconds until the first).

    Errors are those of `workers.together`.
    """
    job.model.share_memory()
    job.order = job.order.share_memory_()
    record = _record(job).share_memory_()
    started = multiprocessing.get_context("spawn").Value("d", 0.0)
    called = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        where = f"file://{folder}/meet"
        workers.together(_local, job, record, where, started, count=job.processes)
    return workers.table(record), started.value - called


def _local(rank, job, record, where, started):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=job.processes, timeout=PATIENCE)
    _work(rank, job, record, started)
    dist.destroy_process_group()


def _record(job):
    """Room for what the workers record: float64 [worker, step, 3]."""
    count, *steps, _ = job.order.shape
    return torch.full((count, steps[0] * steps[1], len(workers.COLUMNS)), torch.nan, dtype=torch.float64)


def _work(rank, job, record, started=None):
    """What the process of this rank does, in a group: the first one ends with the trained weights in `job.model`."""
    torch.set_num_threads(1)
    _check_versions({package: importlib.metadata.version(package) for package in PACKAGES})
    model = copy.deepcopy(job.model)  # of its own, not in shared memory
    dist.barrier()
    if rank == 0 and started is not None:
        started.value = time.perf_counter()  # of a clock that all processes of a machine share
    how = {"criterion": job.criterion, "optimizer": job.optimizer, "scheduler": job.scheduler}
    if job.way == DDP:
        workers.train(
            DistributedDataParallel(model), job.dataset, job.order[rank], record=record[rank], worker=rank, **how
        )
    elif rank == 0:
        _serve(model, exchanges=len(job.order) * -(-record.shape[1] // job.every))
    else:
        worker = rank - 1
        exchange = _Exchange(model, record[worker], job.every)
        workers.train(
            model, job.dataset, job.order[worker], record=record[worker], worker=worker, after=exchange, **how
        )
    if rank == 0:
        job.model.load_state_dict(model.state_dict())


def _serve(model, exchanges):
    """Add what the workers send to the weights, and answer each with the sum and how many others came between."""
    weights = parameters_to_vector(model.parameters()).detach()
    change = torch.empty_like(weights)
    known = [0] * dist.get_world_size()
    for version in range(exchanges):
        sender = dist.recv(change)
        weights += change
        dist.send(torch.cat([weights, weights.new_tensor([version - known[sender]])]), sender)
        known[sender] = version + 1
    vector_to_parameters(weights, model.parameters())


class _Exchange:
    """After each step of a worker: every few of them, what changed goes to the server and its weights come back."""

    def __init__(self, model, record, every):
        self.model = model
        self.record = record
        self.every = every
        self.weights = parameters_to_vector(model.parameters()).detach()  # as the server last sent them

    def __call__(self, step):
        if (step + 1) % self.every and step + 1 < len(self.record):
            return
        changed = parameters_to_vector(self.model.parameters()).detach() - self.weights
        answer = changed.new_empty(len(changed) + 1)
        dist.send(changed, 0)
        dist.recv(answer, 0)
        self.weights, behind = answer[:-1].clone(), answer[-1]
        vector_to_parameters(self.weights.clone(), self.model.parameters())
        self.record[step, workers.BEHIND] = behind


def _check_versions(mine):
    """RuntimeError where the processes of a group have different packages."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if found := _difference(every):
        raise RuntimeError(found)


def _difference(every):
    """A sentence on the first package whose version is not the same everywhere, or None."""
    for package, version in every[0].items():
        for rank, other in enumerate(every):
            if other[package] != version:
                came = f"process 0 has {package} {version}, process {rank} has {other[package]}"
                return f"All workers need the same packages: {came}; install one version everywhere."
    return None


def main(arguments=None):
    """One worker of a job on several hosts: on each, `torchrun ... -m study.data_parallel.group job.pt results/`.

    job.pt is a `Job` that torch.save wrote; the first process leaves checkpoint.pt and losses.csv in the folder.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it by torchrun, which says who the workers are")
    job = torch.load(given.job, weights_only=False)
    if int(os.environ["WORLD_SIZE"]) != job.processes:
        parser.error(f"the job is for {job.processes} processes, torchrun started {os.environ['WORLD_SIZE']}")
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = dist.get_rank()
    record = _record(job)
    _work(rank, job, record)
    every = [None] * job.processes if rank == 0 else None
    dist.gather_object(record, every)
    if rank == 0:
        given.folder.mkdir(parents=True, exist_ok=True)
        own = slice(job.way == DOWNPOUR, None)  # the server records nothing
        whole = torch.stack([each[worker] for worker, each in enumerate(every[own])])
        workers.table(whole).to_csv(given.folder / "losses.csv", index=False)
        torch.save(job.model.state_dict(), given.folder / "checkpoint.pt")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
