"""Trainings that estimators ask for: done one by one, or noted and then done together, where their shapes agree."""

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

from turbanet.training.checkpoint import types
from turbanet.training.fingerprint import fingerprint
from turbanet.training.fit import fit
from turbanet.training.history import History
from turbanet.training.program import Evaluate, read


@dataclasses.dataclass(frozen=True)
class Job:
    """One training: what `fit` is called with.

    swarm : the members before it
    x, y : [row, ...]; y may be a pair
    loss_fn : as `fit` takes it
    rows : int [member, row], which of those each member sees
    validation : int [row] or [member, row], which of them its members are scored on, or None
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
        """Jobs of one kind can train as one swarm."""
        functions = fingerprint(self.how), read(Evaluate(self.loss_fn), self.swarm.apply_fn, self.swarm.tx)
        members = types(jax.tree.map(lambda leaf: leaf[0], self.swarm.replace(loss_fn=None)))
        rows = types(jax.tree.map(lambda leaf: leaf[:0], (self.x, self.y)))
        held_out = None if self.validation is None else self.validation.shape[-1]
        seen, batch_size = self.rows.shape[1], self.how["batch_size"]
        steps = ("all rows", seen) if batch_size >= seen else -(-seen // batch_size)  # of an epoch
        return functions, tuple(members.items()), tuple(rows.items()), steps, held_out

    @cached_property
    def data(self) -> str:
        """Equal data have equal ones."""
        return fingerprint((self.x, self.y))

    def run(self, cluster: Any = None) -> tuple[Any, History]:
        """(trained members, what was seen), trained here or on a cluster."""
        whole = np.arange(len(self.x))
        everyone_sees_all = all(np.array_equal(rows, whole) for rows in self.rows)
        given: dict[str, Any] = {"rows": None if everyone_sees_all else self.rows, "progress": False, **self.how}
        if self.validation is not None:
            shared = self.validation if self.validation.ndim == 1 else slice(None)
            given["validation"] = jax.tree.map(lambda leaf: leaf[shared], (self.x, self.y))
            given["validation_rows"] = self.validation if self.validation.ndim == 2 else None
        trains: Any = fit if cluster is None else cluster.fit
        return trains(self.swarm, self.x, self.y, self.loss_fn, **given)


class Noted(Exception):
    """A training was noted, and not done."""


_noted: ContextVar[list[Job] | None] = ContextVar("noted", default=None)
_ready: ContextVar[deque | None] = ContextVar("ready", default=None)


def train(job: Job, cluster: Any = None) -> tuple[Job, Any, History]:
    """(the job that was done, what its `run` returned): where jobs are only noted, `Noted` is raised.

    Where one was noted before that is the same but for what was drawn (seeds, rows), its results are taken, and it is
    the job that was done.
    """
    if (jobs := _noted.get()) is not None:
        jobs.append(job)
        raise Noted
    if ready := _ready.get():
        noted, result = ready.popleft()
        if noted.data == job.data:
            return noted, *result
    return job, *job.run(cluster)


@contextlib.contextmanager
def noting() -> Iterator[list[Job]]:
    """Inside, an estimator's `fit` raises `Noted`, and its training is in the list."""
    jobs: list[Job] = []
    token = _noted.set(jobs)
    try:
        yield jobs
    finally:
        _noted.reset(token)


@contextlib.contextmanager
def ready(jobs: Iterable[Job], results: Iterable[tuple[Any, History]]) -> Iterator[None]:
    """Inside, estimators' calls of `fit`, in the order in which they were noted, train nothing.

    One that is handed other data than it was then does train.
    """
    token = _ready.set(deque(zip(jobs, results, strict=True)))
    try:
        yield
    finally:
        _ready.reset(token)


def together(jobs: list[Job], cluster: Any = None) -> tuple[list[tuple[Any, History]], list[list[int]]]:
    """What `train` would return of each job, those of one kind trained as one swarm: and who they were."""
    kinds = defaultdict(list)
    for place, job in enumerate(jobs):
        kinds[job.kind].append(place)
    results: list[Any] = [None] * len(jobs)
    for places in kinds.values():
        some = [jobs[place] for place in places]
        swarm, history = _joined(some).run(cluster)
        trained = _apart(swarm, history, [len(job.swarm) for job in some])
        for place, result in zip(places, trained, strict=True):
            results[place] = result
    return results, list(kinds.values())


def _joined(jobs):
    """Jobs of one kind as one: equal data are held once."""
    first = jobs[0]
    begins, sets = {}, []
    length = 0
    for job in jobs:
        if job.data not in begins:
            begins[job.data] = length
            sets.append((job.x, job.y))
            length += len(job.x)
    x, y = jax.tree.map(lambda *parts: np.concatenate(parts), *sets)
    offsets = [begins[job.data] for job in jobs]
    width = max(job.rows.shape[1] for job in jobs)
    each = [job.rows + begin for job, begin in zip(jobs, offsets, strict=True)]
    rows = np.concatenate([np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=-1) for own in each])
    leaves = zip(*(jax.tree.leaves(job.swarm) for job in jobs), strict=True)
    tree = jax.tree.structure(first.swarm)
    swarm = jax.tree.unflatten(tree, [jnp.concatenate(parts) for parts in leaves])
    if first.validation is None:
        return Job(swarm, x, y, first.loss_fn, rows, None, first.how)
    held_out = [job.validation + begin for job, begin in zip(jobs, offsets, strict=True)]
    each = [np.tile(one, (len(job.swarm), 1)) for one, job in zip(held_out, jobs, strict=True)]
    return Job(swarm, x, y, first.loss_fn, rows, np.concatenate(each), first.how)


def _apart(swarm, history, sizes):
    """(swarm, history) of each of the jobs of these numbers of members."""
    ends = np.cumsum(sizes)
    share = 1 / ends[-1]
    for end, size in zip(ends, sizes, strict=True):
        here = slice(end - size, end)
        of_members = {name: getattr(history, name)[here] for name in ("seed", "member", "epochs", "begun")}
        seen = {name: getattr(history, name) for name in ("train_loss", "validation_loss")}
        most = history.epochs[here].max()
        seen = {name: losses if losses is None else losses[:most, here] for name, losses in seen.items()}
        costs = {name: getattr(history, name) * size * share for name in ("compile_seconds", "steady_seconds")}
        of_job = dataclasses.replace(history, **of_members, **seen, **costs)
        yield jax.tree.map(lambda leaf, here=here: leaf[here], swarm), of_job
