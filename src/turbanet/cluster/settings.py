"""A cluster as an argument, for functions that otherwise train members by `fit` on this machine."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from turbanet.checkpoints.identity import versions
from turbanet.cluster import driver, validation
from turbanet.core.fingerprint import fingerprint
from turbanet.core.gather import home
from turbanet.core.state import check_swarm
from turbanet.core.storage import place
from turbanet.training.fit import History
from turbanet.turba_train_state import TurbaTrainState


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The machines of a Ray cluster, an argument of `cross_validate` and the estimators.

    Each training has its own folder in `checkpoints`, named by a fingerprint of all that determines its results: the
    same call resumes an earlier one, and other calls use other folders. Nothing there is removed.

    Parameters
    ----------
    checkpoints : a folder that every node sees, by its path or an address
    shard : members of a task, or all of a smaller swarm; None: as in `turbanet.cluster.fit`
    address, cpus, gpus, memory, attempts, progress : as `turbanet.cluster.fit` takes them

    Examples
    --------
    >>> import turbanet as tn
    >>> cluster = tn.cluster.Cluster("/shared/runs", address="auto")
    >>> fit = cluster.fit  # swarm, history = fit(swarm, x, y, loss, epochs=20)
    """

    checkpoints: str | os.PathLike
    address: str | None = None
    shard: int | None = None
    cpus: float = 1
    gpus: float = 0
    memory: int | None = None
    attempts: int = 3
    progress: bool = True

    def fit(
        self, swarm: TurbaTrainState, x: Any, y: Any, loss_fn: Callable | None = None, **arguments: Any
    ) -> tuple[TurbaTrainState, History]:
        """Train as `turbanet.fit` does, on the cluster, and return all members to this process.

        Arguments are those of `turbanet.fit` without checkpoints, callbacks, on_interrupt and compile_only. The
        history's seconds are sums over the workers.
        """
        check_swarm(swarm)
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings["progress"] = arguments.pop("progress", True) and self.progress
        settings["shard"] = self.shard and min(self.shard, len(swarm))
        _, data, fit_kwargs = validation.split_arguments((x, y), arguments)
        identity = fingerprint([validation.FORMAT, swarm, data, loss_fn, fit_kwargs, settings["shard"], versions()])
        settings["checkpoints"] = str(place(self.checkpoints) / identity[:16])
        results, history = driver.fit(swarm, (x, y), loss_fn, members=len(swarm), **settings, **arguments)
        trained = jax.device_put(results.swarm(), home(swarm.step))
        return trained, history.whole()
