"""`fit` for a swarm that outgrows one machine: shards of its members, each a Ray task with its own checkpoints."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from turbanet.checkpoints.checkpoint import Checkpoints
from turbanet.cluster import engine, shard_data, shards, validation
from turbanet.cluster.folder import Marker, claim, claimed
from turbanet.cluster.results import ClusterHistory, ClusterResults, ShardsFailed
from turbanet.core import extras
from turbanet.core.arrays import check_whole
from turbanet.core.member import with_constants
from turbanet.core.progress import progress_bar
from turbanet.core.storage import place

if TYPE_CHECKING:
    import pandas as pd

PROCESS_BYTES = 2**29  # of a worker before it holds any member
SHARE = 0.01  # share of a shard's seconds that its checkpoints may take


def fit(
    make_swarm: Any,
    data: Any,
    loss_fn: Callable | None = None,
    *,
    members: int | ArrayLike,
    checkpoints: str | os.PathLike | Checkpoints,
    shard: int | None = None,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    memory: int | None = None,
    attempts: int = 3,
    progress: bool = True,
    **fit_arguments: Any,
) -> tuple[ClusterResults, ClusterHistory]:
    """Train every member as `fit` does, on the machines of a Ray cluster, some hundreds of members per task.

    A worker or node that dies is replaced, and its shard resumes from its last checkpoint. A shard writes one after its
    first segment, and later as many as take at most a hundredth of its seconds. Calling again with the same arguments
    resumes an unfinished run.

    Parameters
    ----------
    make_swarm : make_swarm(ids) -> the swarm of those members (`TurbaTrainState.swarm(..., swarm_size=ids)`), called
        on the workers; or a swarm of all members
    data : (x, y) as `fit` takes them, or a dict of x, y and optionally rows, validation, validation_rows, per_member,
        member and predict (inputs that every member predicts after its training), each for all members; or
        data(ids) -> one of these for the members of a shard, which its worker then reads itself
    loss_fn : as `fit` takes it
    members : number of members, or their ids int [member]
    checkpoints : a folder that every node sees, by its path or an address such as s3://bucket/run (which needs s3fs on
        every node), for this run only; or `Checkpoints`
    shard : members of a task; None: as in an earlier call, or about four tasks per worker, of at most 1 024 members
    address : of a Ray cluster, "auto" for the one that this machine belongs to; None: the one that this process is
        connected to, or a new one on this machine
    cpus, gpus : of a worker; each CPU is a device of its own
    memory : bytes of a worker; None: estimated from the members and the data of a shard
    attempts : number of attempts at a shard before it fails
    progress : whether to show a bar of the finished members
    fit_arguments : of `fit`, such as epochs

    Returns
    -------
    (ClusterResults, ClusterHistory) : scores, predictions and weights, read from the folder on request

    Raises
    ------
    ImportError : without Ray (extra "cluster"); ConnectionError where no cluster answers
    ValueError : before any training, for what `fit` refuses in the first shard, a folder of another run, and resources
        that no node has; RuntimeError for nodes that do not see the folder or have other versions
    ShardsFailed : after all other shards have ended
    """
    ids = validation.ids_of(members, make_swarm)
    check_whole(attempts=attempts, **({} if shard is None else {"shard": shard}))
    for name, number in {"cpus": cpus, "memory": 1 if memory is None else memory}.items():
        if not isinstance(number, Real) or not number > 0:
            raise ValueError(f"{name} must be a number above 0, of a worker's CPUs or bytes; got {number!r}.")
    if not isinstance(gpus, Real) or gpus < 0:
        raise ValueError(f"gpus must be a number of at least 0, of a worker's GPUs; got {gpus!r}.")
    of_ids, whole, fit_kwargs = validation.split_arguments(data, fit_arguments)
    cores = max(1, int(cpus))
    validation.check_devices(fit_kwargs.get("plan"), cores, gpus)
    policy = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints, share=SHARE)
    folder = place(policy.folder)
    policy = dataclasses.replace(policy, folder=str(folder))
    with engine.connected(address) as ray:
        needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        workers = engine.check_room(ray, **needs)
        shard = shard or int(claimed(folder).get("shard", 0)) or engine.share(len(ids), workers)
        if shard > len(ids):
            raise ValueError(f"A shard of {shard} members is more than the {len(ids)} there are: make it smaller.")
        positions = np.split(np.arange(len(ids)), np.arange(shard, len(ids), shard))
        devices = environment(cores, gpus)
        maker, states = shard_data.states(make_swarm, members)
        validation.check_shipped(make_swarm=maker, loss_fn=loss_fn, data=of_ids, fit_arguments=fit_kwargs)
        first_ids = ids[positions[0]]
        warm_up = min(workers, len(positions)), shards.warm, cores, None if states else maker, first_ids
        engine.begin(ray, *warm_up, runtime_env=devices, **needs)  # while the driver prepares the run
        shared, own = shard_data.split(whole)
        first = shard_data.as_dict(of_ids(first_ids)) if of_ids else shard_data.merge(shared, own(positions[0]))
        like = shard_data.swarm_of(maker, states(positions[0])) if states else shard_data.members(maker, first_ids)
        if not states:
            shard_data.members(maker, ids[-1:])  # of the last shard, too
        like = with_constants(like, first.get("member"), loss_fn or like.loss_fn)  # which the results have, too
        followed = validation.check_shard(like, first, loss_fn, fit_kwargs)
        copies = 3 if fit_kwargs.get("patience") is None else 4  # of a member's state
        needs["memory"] = memory or PROCESS_BYTES + copies * _bytes(like) + 2 * _bytes(first)
        engine.check_room(ray, **needs)
        inputs = {"make_swarm": make_swarm, "loss": loss_fn, "data": of_ids or whole}
        inputs["first_shards_data"] = first if of_ids else None
        facts, readable = validation.facts(shard, members=ids, fit_arguments=fit_kwargs, **inputs)
        claim(folder, facts)
        marker = Marker(str(folder))
        job = shards.Job(maker, loss_fn, of_ids, fit_kwargs, policy, marker, cores, attempts, resumes=readable)
        lines = {number: line for number in range(len(positions)) if (line := job.result(number))}
        pending = [number for number in range(len(positions)) if number not in lines]
        try:
            common = ray.put(job), ray.put(shared)

            def shard_arguments(number):
                here = positions[number]
                return number, ids[here], states and states(here), own(here)

            jobs = ((number, (*common, *shard_arguments(number))) for number in pending)
            retries: dict = {"max_retries": attempts - 1, "retry_exceptions": True, "runtime_env": devices}
            room = partial(engine.slots, ray, **needs)
            with contextlib.closing(engine.run(ray, shards.train, jobs, at_once=room, **needs, **retries)) as ended:
                failed = _collect(ended, lines, job, len(ids), len(positions), progress)
        finally:
            marker.remove()
    table = _table(lines, resumed=set(lines) - set(pending))
    like = jax.tree.map(lambda leaf: leaf[:1], like)
    results = ClusterResults(table, folder, like), ClusterHistory(table, folder, followed)
    if failed:
        raise ShardsFailed(*results, {number: (ids[positions[number]], text) for number, text in failed.items()})
    return results


def _collect(ended, lines, job, members, shards, progress):
    """Fill the lines of the table as shards end, and return {shard: traceback} of those that failed."""
    failed = {}
    done = sum(line["members"] for line in lines.values())
    with progress_bar(progress, total=members, initial=done, unit="member") as bar:
        for number, outcome in ended:
            # An earlier attempt, given up with its node, may have finished the shard all the same.
            line = job.result(number) if isinstance(outcome, Exception) else outcome
            if line is None:
                failed[number] = str(outcome)
            else:
                lines[number] = line
                bar.update(line["members"])
            bar.set_postfix(shards_left=shards - len(lines) - len(failed))
    return failed


def environment(cores: int, gpus: float) -> dict[str, dict[str, str]]:
    """Return a worker's devices as Ray's runtime_env, which is set before the worker unpickles, and may start JAX."""
    # NPROC is the number of XLA's threads. With a thread for each core of the node, workers would slow each other down,
    # and rounding would depend on the node.
    variables = {"JAX_NUM_CPU_DEVICES": str(cores), "NPROC": str(cores)}
    if not gpus:
        variables["JAX_PLATFORMS"] = "cpu"
    elif gpus < 1:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * gpus:.3f}"  # workers that share a GPU share its memory
    return {"env_vars": variables}


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def _table(lines: dict[int, dict], resumed: set[int]) -> "pd.DataFrame":
    pd = extras.pandas()

    table = pd.DataFrame([lines[number] for number in sorted(lines)])
    return table.assign(resumed=[number in resumed for number in sorted(lines)])
