"""Training jobs of estimators: run one by one, or by another runner, such as one that trains many as one swarm."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core.cache import read
from turbanet.core.fingerprint import fingerprint
from turbanet.core.schedules import hyperparameters
from turbanet.data.sampling import ragged
from turbanet.training.fit import fit
from turbanet.training.history import History
from turbanet.training.program import Evaluate


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments of one call of `fit`.

    swarm : the members before training
    x, y : [row, ...]; y may be a pair
    loss_fn : as `fit` takes it
    rows : int [member, row], the rows that each member is trained on
    validation : int [row] or [member, row], the rows that its members are scored on, or None
    settings : other arguments of `fit`
    drawn : by what seeds and rows were drawn, if each `fit` draws others; None: an equal `fit` has equal ones
    """

    swarm: Any
    x: np.ndarray
    y: Any
    loss_fn: Callable
    rows: np.ndarray
    validation: np.ndarray | None
    settings: dict[str, Any]
    drawn: Any = None

    @cached_property
    def kind(self) -> tuple:
        """What must be equal for jobs to train as one swarm."""
        functions = fingerprint(self.settings), read(Evaluate(self.loss_fn), self.swarm.apply_fn, self.swarm.tx)
        leaves = jax.tree.leaves((self.swarm.replace(loss_fn=None), self.x, self.y))
        shapes = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        held_out = None if self.validation is None else self.validation.shape[-1]
        count, batch_size = self.rows.shape[1], self.settings["batch_size"]
        steps = ("all rows", count) if batch_size >= count else -(-count // batch_size)  # of an epoch
        return functions, shapes, steps, held_out

    @cached_property
    def data(self) -> str:
        """The fingerprint of x and y."""
        return fingerprint((self.x, self.y))

    @cached_property
    def recipe(self) -> tuple:
        """What is equal for jobs of equal estimators and data."""
        drawn = self.drawn or (self.swarm.seed, self.rows, self.validation)
        return self.kind, self.data, fingerprint((hyperparameters(self.swarm), drawn))

    def with_data_of(self, other: "Job") -> "Job":
        """Return the job with the arrays of another one, whose data are equal."""
        job = dataclasses.replace(self, x=other.x, y=other.y)
        vars(job)["data"] = other.data  # known, and costs a pass over the arrays
        return job

    def run(self, cluster: Any = None) -> tuple[Any, History]:
        """Train here or on a cluster, and return (trained members, history)."""
        all_rows = np.array_equal(self.rows, np.tile(np.arange(len(self.x)), (len(self.rows), 1)))
        kwargs: dict[str, Any] = {"rows": None if all_rows else self.rows, "progress": False, **self.settings}
        if self.validation is not None:
            shared = self.validation if self.validation.ndim == 1 else slice(None)
            kwargs["validation"] = jax.tree.map(lambda leaf: leaf[shared], (self.x, self.y))
            kwargs["validation_rows"] = self.validation if self.validation.ndim == 2 else None
        fit_members: Any = fit if cluster is None else cluster.fit
        return fit_members(self.swarm, self.x, self.y, self.loss_fn, **kwargs)


# A search puts another one here, in a context of its own, as scikit-learn is between it and the estimators' `fit`.
RUNNER: ContextVar[Callable] = ContextVar("runner", default=lambda job, cluster: (job, *job.run(cluster)))


def train(job: Job, cluster: Any = None) -> tuple[Job, Any, History]:
    """Run a job by `RUNNER`, and return (the job that ran, trained members, history)."""
    return RUNNER.get()(job, cluster)


def run_grouped(jobs: dict[Any, Job], cluster: Any = None) -> tuple[dict[Any, tuple[Any, History]], list[int]]:
    """Run jobs, those of one kind as one swarm, and return ({key: the job's result}, jobs of each kind)."""
    kinds: dict[tuple, dict[Any, Job]] = defaultdict(dict)
    for key, job in jobs.items():
        kinds[job.kind][key] = job
    results: dict[Any, tuple[Any, History]] = {}
    for group in kinds.values():
        swarm, history = _concatenate(list(group.values())).run(cluster)
        of_jobs = _split(swarm, history, [len(job.swarm) for job in group.values()])
        results.update(zip(group, of_jobs, strict=True))
    return results, list(map(len, kinds.values()))


def _concatenate(jobs):
    """Return jobs of one kind as one job that holds equal data once."""
    first = jobs[0]
    datasets = {job.data: (job.x, job.y) for job in jobs}
    x, y = jax.tree.map(lambda *leaves: np.concatenate(leaves), *datasets.values())
    starts = dict(zip(datasets, np.cumsum([0, *(len(x) for x, _ in datasets.values())])))
    with_offset = [(job, starts[job.data]) for job in jobs]
    rows = np.asarray(ragged(own + offset for job, offset in with_offset for own in job.rows))
    held_out = None
    if first.validation is not None:
        held_out = np.concatenate([np.tile(job.validation + start, (len(job.swarm), 1)) for job, start in with_offset])
    leaves = zip(*(jax.tree.leaves(job.swarm) for job in jobs), strict=True)
    swarm = jax.tree.unflatten(jax.tree.structure(first.swarm), map(jnp.concatenate, leaves))
    return Job(swarm, x, y, first.loss_fn, rows, held_out, first.settings)


def _split(swarm, history, sizes):
    """Yield (swarm, history) of each job, of `sizes` members; seconds are shared by numbers of members."""
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        here = slice(end - size, end)
        of_job = {name: values[..., here] for name, values in vars(history).items() if isinstance(values, np.ndarray)}
        epochs = of_job["epochs"].max()
        of_job |= {name: losses[:epochs] for name, losses in of_job.items() if losses.ndim == 2}
        of_job |= {name: getattr(history, name) * size / sum(sizes) for name in ("compile_seconds", "steady_seconds")}
        yield jax.tree.map(lambda leaf, here=here: leaf[here], swarm), dataclasses.replace(history, **of_job)
