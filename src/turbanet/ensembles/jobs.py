"""Training jobs of estimators: run one by one, or deferred and then run as one swarm where their shapes agree."""

import contextlib
import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.checkpoints.identity import types
from turbanet.core.fingerprint import fingerprint
from turbanet.training.fit import fit
from turbanet.training.history import History
from turbanet.training.program import Evaluate, read


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments of one call of `fit`.

    swarm : the members before training
    x, y : [row, ...]; y may be a pair
    loss_fn : as `fit` takes it
    rows : int [member, row], the rows that each member is trained on
    validation : int [row] or [member, row], the rows that its members are scored on, or None
    how : other arguments of `fit`
    """

    swarm: Any
    x: np.ndarray
    y: Any
    loss_fn: Callable
    rows: np.ndarray
    validation: np.ndarray | None
    how: dict[str, Any]

    @cached_property
    def kind(self) -> tuple:
        """What must be equal for jobs to train as one swarm."""
        functions = fingerprint(self.how), read(Evaluate(self.loss_fn), self.swarm.apply_fn, self.swarm.tx)
        members = types(jax.tree.map(lambda leaf: leaf[0], self.swarm.replace(loss_fn=None)))
        rows = types(jax.tree.map(lambda leaf: leaf[:0], (self.x, self.y)))
        held_out = None if self.validation is None else self.validation.shape[-1]
        count, batch_size = self.rows.shape[1], self.how["batch_size"]
        steps = ("all rows", count) if batch_size >= count else -(-count // batch_size)  # of an epoch
        return functions, tuple(members.items()), tuple(rows.items()), steps, held_out

    @cached_property
    def data(self) -> str:
        """The fingerprint of x and y."""
        return fingerprint((self.x, self.y))

    def run(self, cluster: Any = None) -> tuple[Any, History]:
        """Train here or on a cluster, and return (trained members, history)."""
        whole = np.arange(len(self.x))
        all_rows = all(np.array_equal(rows, whole) for rows in self.rows)
        kwargs: dict[str, Any] = {"rows": None if all_rows else self.rows, "progress": False, **self.how}
        if self.validation is not None:
            shared = self.validation if self.validation.ndim == 1 else slice(None)
            kwargs["validation"] = jax.tree.map(lambda leaf: leaf[shared], (self.x, self.y))
            kwargs["validation_rows"] = self.validation if self.validation.ndim == 2 else None
        fit_members: Any = fit if cluster is None else cluster.fit
        return fit_members(self.swarm, self.x, self.y, self.loss_fn, **kwargs)


class Deferred(Exception):
    """Raised by `train` instead of training, when a job was recorded for later."""


_deferred: ContextVar[list[Job] | None] = ContextVar("deferred", default=None)
_finished: ContextVar[deque | None] = ContextVar("finished", default=None)


def train(job: Job, cluster: Any = None) -> tuple[Job, Any, History]:
    """Run a job and return (the job that ran, trained members, history); inside `deferring`, raise `Deferred`.

    Inside `replaying`, the next recorded job takes the place of one with equal data, from which it may differ in what
    was drawn at random (seeds, rows); its result is returned and nothing is trained.
    """
    if (jobs := _deferred.get()) is not None:
        jobs.append(job)
        raise Deferred
    if finished := _finished.get():
        recorded, result = finished.popleft()
        if recorded.data == job.data:
            return recorded, *result
    return job, *job.run(cluster)


@contextlib.contextmanager
def deferring() -> Iterator[list[Job]]:
    """Context in which an estimator's `fit` adds its job to the yielded list and raises `Deferred`."""
    jobs: list[Job] = []
    token = _deferred.set(jobs)
    try:
        yield jobs
    finally:
        _deferred.reset(token)


@contextlib.contextmanager
def replaying(jobs: Iterable[Job], results: Iterable[tuple[Any, History]]) -> Iterator[None]:
    """Context in which estimators' `fit` calls, in the order of the deferred `jobs`, take `results` and do not train.

    A call with other data than its job had does train.
    """
    token = _finished.set(deque(zip(jobs, results, strict=True)))
    try:
        yield
    finally:
        _finished.reset(token)


def run_grouped(jobs: list[Job], cluster: Any = None) -> tuple[list[tuple[Any, History]], list[list[int]]]:
    """Run jobs, those of one kind as one swarm, and return (the result of each job, the positions of each group)."""
    kinds = defaultdict(list)
    for position, job in enumerate(jobs):
        kinds[job.kind].append(position)
    results: list[Any] = [None] * len(jobs)
    for positions in kinds.values():
        group = [jobs[position] for position in positions]
        swarm, history = _concatenate(group).run(cluster)
        trained = _split(swarm, history, [len(job.swarm) for job in group])
        for position, result in zip(positions, trained, strict=True):
            results[position] = result
    return results, list(kinds.values())


def _concatenate(jobs):
    """Return jobs of one kind as one job that holds equal data once."""
    first = jobs[0]
    starts, datasets = {}, []
    length = 0
    for job in jobs:
        if job.data not in starts:
            starts[job.data] = length
            datasets.append((job.x, job.y))
            length += len(job.x)
    x, y = jax.tree.map(lambda *leaves: np.concatenate(leaves), *datasets)
    offsets = [starts[job.data] for job in jobs]
    width = max(job.rows.shape[1] for job in jobs)
    shifted = [job.rows + offset for job, offset in zip(jobs, offsets, strict=True)]
    rows = np.concatenate([np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=-1) for own in shifted])
    leaves = zip(*(jax.tree.leaves(job.swarm) for job in jobs), strict=True)
    tree = jax.tree.structure(first.swarm)
    swarm = jax.tree.unflatten(tree, [jnp.concatenate(parts) for parts in leaves])
    if first.validation is None:
        return Job(swarm, x, y, first.loss_fn, rows, None, first.how)
    held_out = [job.validation + offset for job, offset in zip(jobs, offsets, strict=True)]
    tiled = [np.tile(own, (len(job.swarm), 1)) for own, job in zip(held_out, jobs, strict=True)]
    return Job(swarm, x, y, first.loss_fn, rows, np.concatenate(tiled), first.how)


def _split(swarm, history, sizes):
    """Yield (swarm, history) of each job, of `sizes` members; seconds are shared by numbers of members."""
    ends = np.cumsum(sizes)
    share = 1 / ends[-1]
    for end, size in zip(ends, sizes, strict=True):
        here = slice(end - size, end)
        of_members = {name: getattr(history, name)[here] for name in ("seed", "member", "epochs", "begun")}
        recorded = {name: getattr(history, name) for name in ("train_loss", "validation_loss")}
        epochs = history.epochs[here].max()
        recorded = {name: losses if losses is None else losses[:epochs, here] for name, losses in recorded.items()}
        costs = {name: getattr(history, name) * size * share for name in ("compile_seconds", "steady_seconds")}
        of_job = dataclasses.replace(history, **of_members, **recorded, **costs)
        yield jax.tree.map(lambda leaf, here=here: leaf[here], swarm), of_job
