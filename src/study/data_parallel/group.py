"""Processes that train one PyTorch network by torch.distributed: synchronously (DDP) or with a parameter server."""

import copy
import dataclasses
import datetime
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from study.data_parallel import workers

DDP, DOWNPOUR = "ddp", "downpour"
PATIENCE = datetime.timedelta(minutes=10)  # until a worker that does not answer is an error


@dataclasses.dataclass
class Job:
    """A training of one network by several workers, which all start with the same job.

    method : "ddp", where each step takes the mean gradient of all workers' batches, or "downpour", where one more
        process serves the weights: a worker sends its changes since the last exchange and receives the current weights
        (Dean et al. 2012)
    model : a PyTorch network on the CPU, trained in place
    dataset : of (x, y)
    order : int64 [worker, epoch, step, batch], from `turbanet.data.sampling.deal`
    criterion, optimizer : as for `workers.train`; the latter is a function
    every : steps of a worker between two exchanges with the server
    """

    method: str
    model: Any
    dataset: Any
    order: Any
    criterion: Any
    optimizer: Any
    every: int = 16

    def __post_init__(self):
        if self.method not in (DDP, DOWNPOUR):
            raise ValueError(f"method must be {DDP!r} or {DOWNPOUR!r}, got {self.method!r}.")
        if self.method == DOWNPOUR and next(self.model.buffers(), None) is not None:
            raise ValueError("A parameter server carries no running statistics: train a network with BatchNorm by DDP.")

    @property
    def processes(self) -> int:
        """The number of processes: workers, and a server if there is one."""
        return len(self.order) + (self.method == DOWNPOUR)


def train(job: Job):
    """Train `job.model` in place on this machine: (table of the steps, see `workers.table`; startup seconds).

    Errors are those of `workers.spawn`.
    """
    job.model.share_memory()
    job.order = job.order.share_memory_()
    record = workers.room(job.order)
    started = multiprocessing.get_context("spawn").Value("d", 0.0)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        address = f"file://{folder}/meet"
        workers.spawn(_local, job, record, address, started, count=job.processes)
    return workers.table(record), started.value - begin


def _local(rank, job, record, address, started):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=job.processes, timeout=PATIENCE)
    _work(rank, job, record, started)
    dist.destroy_process_group()


def _work(rank, job, record, started):
    """Do this rank's part of the job in a process group; rank 0 copies the trained weights to `job.model`."""
    torch.set_num_threads(1)
    model = copy.deepcopy(job.model)  # private, not in shared memory
    dist.barrier()
    if rank == 0:
        started.value = time.perf_counter()  # all processes of a machine share this clock
    if job.method == DOWNPOUR and rank == 0:
        _serve(model, exchanges=len(job.order) * -(-record.shape[1] // job.every))
    else:
        worker = rank - (job.method == DOWNPOUR)
        network = DistributedDataParallel(model) if job.method == DDP else model
        after = None if job.method == DDP else _Exchange(model, record[worker], job.every)
        settings = {"criterion": job.criterion, "optimizer": job.optimizer}
        settings |= {"record": record[worker], "worker": worker, "after": after}
        workers.train(network, job.dataset, job.order[worker], **settings)
    if rank == 0:
        job.model.load_state_dict(model.state_dict())


def _serve(model, exchanges):
    """Add each worker's changes to the weights and answer with the weights and the number of others' updates since."""
    weights = parameters_to_vector(model.parameters()).detach()
    change = torch.empty_like(weights)
    versions = [0] * dist.get_world_size()  # of the weights that each worker has
    for version in range(exchanges):
        sender = dist.recv(change)
        weights += change
        dist.send(torch.cat([weights, weights.new_tensor([version - versions[sender]])]), sender)
        versions[sender] = version + 1
    vector_to_parameters(weights, model.parameters())


class _Exchange:
    """Called after each step of a worker; every few steps it sends changes to the server and receives the weights."""

    def __init__(self, model, record, every):
        self.model = model
        self.record = record
        self.every = every
        self.weights = parameters_to_vector(model.parameters()).detach()  # the server's at the last exchange

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
