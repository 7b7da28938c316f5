"""A model of the time of a million members on many machines, computed from unit costs measured on one core."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turbanet.cluster.engine import share

MEMBERS, STEPS = 1_000_000, 10_000  # defaults of a projection
DISK = 1e9  # bytes per second of the shared folder for all machines together: an assumption
TOGETHER = "training_seconds", "shard_seconds", "first_seconds"  # one after the other on a worker
PARTS = (*TOGETHER, "dispatch_seconds", "disk_seconds", "gather_seconds")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Unit costs, as `costs.unit_costs` measures them.

    member_step_seconds : seconds of one core, a member and step
    shard_seconds : seconds of its worker, a shard, beside its training
    first_seconds : seconds of a worker, once, for its first shard beyond another one: imports, compilation
    task_seconds : seconds of the driver to assign a shard and receive its result
    state_bytes : of a member in memory, weights and optimizer
    data_bytes : of a member, read once
    checkpoint_bytes : of a member on disk, a checkpoint
    kept_bytes : of a member on disk, its shard's results
    scores_seconds, swarm_seconds : seconds of the driver to read a member's scores, a member's weights
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
        """Make costs of the table of `costs.unit_costs`, with columns cost and value."""
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
    """Project the time of so many members on each number of machines: a pandas table, a line a number.

    Workers train while the driver assigns shards and the disk is in use, so the slowest of the three decides; the
    driver gathers afterwards. Every core is assumed to be as fast as the measured one.

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
    bottleneck (the largest part), speedup (over one core that only trains), efficiency (speedup a worker), driver_bytes
    (gathered with `weights`, 0 without)
    """
    import pandas as pd

    lines = []
    for count in machines:
        workers = count * cores
        size = shard or share(members, workers)  # members
        shards = math.ceil(members / size)
        rounds = math.ceil(shards / workers)
        on_disk = costs.data_bytes + checkpoints * costs.checkpoint_bytes + costs.kept_bytes  # bytes per member
        gather = costs.scores_seconds + weights * costs.swarm_seconds  # seconds per member
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
    """Predict the seconds of shards that only sleep: whole rounds of workers, and the driver's time in the first round.

    A round ends when its last worker wakes. The driver assigns one shard after the other, so the last worker of the
    first round starts workers * task_seconds late; in later rounds workers wake in the order of their starts, and none
    waits unless the driver needs longer for a round than the shards sleep.

    workers, shards, sleep_seconds : numbers, or arrays [line]; task_seconds : seconds of the driver a task, measured
    with tasks that end at once, or {workers: seconds}

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
    """Compare sleeping shards with the prediction from tasks that end at once on as many workers: a table.

    table : from `costs.sleeping`

    Columns: workers, shards, seconds, ideal_seconds, predicted_seconds, above_ideal_percent, above_predicted_percent
    """
    instant = table[table.kind == "instant"]
    slept = table[table.kind == "sleep"].sort_values("workers")
    task = dict(zip(instant.workers.tolist(), instant.task_seconds.tolist(), strict=True))
    shape = {"workers": slept.workers, "shards": slept.shards, "sleep_seconds": slept.sleep_seconds}
    found = slept[["workers", "shards", "seconds", "ideal_seconds"]].reset_index(drop=True)
    found["predicted_seconds"] = sleeping_seconds(**shape, task_seconds=task)
    found["above_ideal_percent"] = 100 * (found.seconds / found.ideal_seconds - 1)
    found["above_predicted_percent"] = 100 * (found.seconds / found.predicted_seconds - 1)
    return found
