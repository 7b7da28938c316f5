"""A cluster as something to hand around: where members are trained, for whoever else would train them by `fit`."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from turbanet.cluster import driver, validation
from turbanet.training.checkpoint import versions
from turbanet.training.fingerprint import fingerprint
from turbanet.training.fit import History
from turbanet.training.plan import home
from turbanet.training.storage import place
from turbanet.turba_train_state import TurbaTrainState


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The machines of a Ray cluster, as `cross_validate` and the estimators take them.

    Each training has a folder of its own in `checkpoints`, called by all that decides what comes out of it: the same
    call goes on with what an earlier one has left, others do not meet it. Nothing there is removed.

    Parameters
    ----------
    checkpoints : a folder that every node sees, by its path or an address
    shard : members of a task, or all that a swarm has; None as of `turbanet.cluster.fit`
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
        """As `turbanet.fit`, on the cluster; all members come back to this process.

        Arguments are `turbanet.fit`'s, without checkpoints, on_interrupt and compile_only. The history's seconds are
        the sums of all workers'.
        """
        arguments.pop("progress", None)  # the cluster's own
        how = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        how["shard"] = self.shard and min(self.shard, len(swarm))
        _, data, others = validation.taken_apart((x, y), arguments)
        decides = fingerprint([validation.FORMAT, swarm, data, loss_fn, others, how["shard"], versions()])
        how["checkpoints"] = str(place(self.checkpoints) / decides[:16])
        results, history = driver.fit(swarm, (x, y), loss_fn, members=len(swarm), **how, **arguments)
        trained = jax.device_put(results.swarm(), jax.tree.map(home, swarm))
        return trained, history.whole()
