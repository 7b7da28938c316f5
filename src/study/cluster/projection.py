"""What a million members cost on many machines, from what one of each costs on one core: a model, not a measurement."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turbanet.cluster.engine import share

MEMBERS, STEPS = 1_000_000, 10_000  # that are projected if nobody asks for others
DISK = 1e9  # bytes a second that all machines together read from and write to the shared folder: an assumption
TOGETHER = "training_seconds", "shard_seconds", "first_seconds"  # one after the other on a worker
PARTS = (*TOGETHER, "dispatch_seconds", "disk_seconds", "gather_seconds")


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one of each costs, as `cluster_costs.unit_costs` measures it.

    member_step_seconds : seconds of one core, a member and step
    shard_seconds : seconds of its worker, a shard, beside its training
    first_seconds : seconds of a worker, once: what its first shard takes beyond another, such as compilation
    task_seconds : seconds of the driver, a shard that is handed out and taken back
    state_bytes : of a member in memory, weights and optimizer
    data_bytes : of a member, read once
    checkpoint_bytes : of a member on disk, a checkpoint
    kept_bytes : of a member on disk, what its shard leaves
    scores_seconds, swarm_seconds : seconds of the driver, a member whose scores, whose weights it reads
    """

    member_step_seconds: float
    shard_seconds: float
    first_seconds: float
    task_seconds: float
    state_bytes: float
    data_bytes: float
    checkpoint_bytes: float
    kept_bytes: float
    scores_seconds: float
    swarm_seconds: float

    @classmethod
    def of(cls, table: Any) -> "Costs":
        """From the table of `cluster_costs.unit_costs`: pandas, columns cost and value."""
        return cls(**table.set_index("cost").value.astype(float).to_dict())


def projected(
    costs: Costs,
    *,
    members: int = MEMBERS,
    machines: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    cores: int = 32,
    shard: int | None = None,
    steps: int = STEPS,
    checkpoints: int = 10,
    disk_bytes_per_second: float = DISK,
    weights: bool = False,
) -> Any:
    """What so many members cost on each number of machines: a table in pandas, a line a number.

    Workers train while the driver hands out shards and while others use the disk, so that the slowest of these three
    decides; the driver gathers when they are done. Every core is assumed to be as fast as the measured one.

    Parameters
    ----------
    cores : workers of a machine, one a core
    shard : members of a task; None: as `turbanet.cluster.fit` chooses
    steps : of each member
    checkpoints : of each shard, before its last
    disk_bytes_per_second : of the shared folder, for all machines together: an assumption
    weights : whether the driver gathers the trained weights, not the scores alone

    Returns
    -------
    Columns: machines, workers, shard, shards, rounds (shards that one worker trains, one after the other),
    training_seconds, shard_seconds, first_seconds, dispatch_seconds, disk_seconds, gather_seconds, seconds (of all),
    bottleneck (the largest of the parts), speedup (over one core that does nothing but train), efficiency (speedup by
    worker), driver_bytes (what is gathered with `weights`, 0 without)
    """
    import pandas as pd

    lines = []
    for count in machines:
        workers = count * cores
        size = shard or share(members, workers)  # members
        shards = math.ceil(members / size)
        rounds = math.ceil(shards / workers)
        on_disk = costs.data_bytes + checkpoints * costs.checkpoint_bytes + costs.kept_bytes  # bytes a member
        gather = costs.scores_seconds + weights * costs.swarm_seconds  # seconds a member
        parts = {
            "training_seconds": rounds * size * steps * costs.member_step_seconds,
            "shard_seconds": rounds * costs.shard_seconds,
            "first_seconds": costs.first_seconds,
            "dispatch_seconds": shards * costs.task_seconds,
            "disk_seconds": members * on_disk / disk_bytes_per_second,
            "gather_seconds": members * gather,
        }
        worker = sum(parts[name] for name in TOGETHER)
        seconds = max(worker, parts["dispatch_seconds"], parts["disk_seconds"]) + parts["gather_seconds"]
        speedup = members * steps * costs.member_step_seconds / seconds
        line = {"machines": count, "workers": workers, "shard": size, "shards": shards, "rounds": rounds, **parts}
        line |= {"seconds": seconds, "bottleneck": max(parts, key=parts.get), "speedup": speedup}
        lines.append(line | {"efficiency": speedup / workers, "driver_bytes": weights * members * costs.state_bytes})
    return pd.DataFrame(lines)


def sleeping_seconds(
    *, workers: Any, shards: Any, sleep_seconds: Any, task_seconds: float | Mapping[int, float]
) -> np.ndarray:
    """How long shards take that only sleep: whole rounds of workers, and for each round's first wave the driver's time.

    A round ends when its last worker wakes. The driver hands out one shard after the other, so that the last worker of
    the first round begins workers * task_seconds late; in later rounds the workers wake one after the other, as they
    began, and nobody waits unless the driver needs longer for a round than the shards sleep.

    workers, shards, sleep_seconds : numbers, or arrays [line]; task_seconds : of the driver a task, measured with tasks
    that end at once, or {workers: seconds}

    Returns seconds [line]: max(rounds * sleep + min(workers, shards) * task, shards * task + sleep)
    """
    workers, shards, sleep = np.asarray(workers), np.asarray(shards), np.asarray(sleep_seconds)
    by_workers = np.vectorize(task_seconds.get, otypes=[float]) if isinstance(task_seconds, Mapping) else None
    task = by_workers(workers) if by_workers else task_seconds
    rounds = np.ceil(shards / workers)
    workers_bound = rounds * sleep + np.minimum(workers, shards) * task
    driver_bound = shards * task + sleep
    return np.maximum(workers_bound, driver_bound)


def beside_measured(table: Any) -> Any:
    """Sleeping shards, measured and predicted from the tasks that end at once on as many workers: a table.

    table : of `cluster_costs.sleeping`

    Columns: workers, shards, seconds, ideal_seconds, predicted_seconds, above_ideal_percent, above_predicted_percent
    """
    instant = table[table.kind == "instant"]
    slept = table[table.kind == "sleep"].sort_values("workers")
    task = dict(zip(instant.workers.tolist(), instant.task_seconds.tolist(), strict=True))
    how = {"workers": slept.workers, "shards": slept.shards, "sleep_seconds": slept.sleep_seconds}
    found = slept[["workers", "shards", "seconds", "ideal_seconds"]].reset_index(drop=True)
    found["predicted_seconds"] = sleeping_seconds(**how, task_seconds=task)
    found["above_ideal_percent"] = 100 * (found.seconds / found.ideal_seconds - 1)
    found["above_predicted_percent"] = 100 * (found.seconds / found.predicted_seconds - 1)
    return found
