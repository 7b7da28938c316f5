"""`fit` for a swarm that outgrows one machine: shards of its members, each a task of Ray's with its own checkpoints."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from turbanet.cluster import engine, shard_data, shards, validation
from turbanet.cluster.folder import Marker, claim, claimed
from turbanet.cluster.results import ClusterHistory, ClusterResults, ShardsFailed
from turbanet.training.arrays import check_whole
from turbanet.training.checkpoint import Checkpoints
from turbanet.training.storage import place

if TYPE_CHECKING:
    import pandas as pd

PROCESS_BYTES = 2**29  # of a worker that holds no member yet
SHARE = 0.01  # of a shard's seconds that its checkpoints may take


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
    """Train every member as `fit` does, on the machines of a Ray cluster, some hundreds of them a task.

    A worker or a node that dies is replaced, and its shard goes on from its last checkpoint: there is one of its first
    segment, and of later ones as many as take no more than a hundredth of its seconds. The same call goes on with what
    an earlier one has left.

    Parameters
    ----------
    make_swarm : make_swarm(ids) -> the swarm of those members (`TurbaTrainState.swarm(..., swarm_size=ids)`), called
        on the workers; or a swarm of all
    data : (x, y) as `fit` takes them, or a dict of x, y and, if there are any, rows, validation, validation_rows,
        per_member and predict (what every member predicts after its training), each of all members; or
        data(ids) -> one of these of the members of a shard, which its worker then reads itself
    loss_fn : as `fit` takes it
    members : how many, or their ids int [member]
    checkpoints : a folder that every node sees, by its path or an address such as s3://bucket/run (which needs s3fs on
        every node), for this run alone; or `Checkpoints`
    shard : members of a task; None: as many as an earlier call took, or about four tasks a worker, of 1 024 members at
        the most
    address : of a Ray cluster, "auto" for the one that this machine belongs to; None: the one that this process is
        connected to, or one of this machine alone
    cpus, gpus : of a worker; each CPU is a device of its own
    memory : bytes of a worker; None: by the members and the data of a shard
    attempts : how often a shard is tried before it is given up
    progress : whether a bar shows the members done
    fit_arguments : of `fit`, such as epochs

    Returns
    -------
    (ClusterResults, ClusterHistory) : scores, predictions and weights, read from the folder when they are asked for

    Raises
    ------
    ImportError : without Ray (extra "cluster"); ConnectionError where no cluster answers
    ValueError : before anything is trained, for what `fit` refuses in the first shard, a folder of another run, needs
        that no node has; RuntimeError for nodes that do not see the folder or have other versions
    ShardsFailed : after all others have ended
    """
    ids = validation.ids_of(members, make_swarm)
    check_whole(attempts=attempts, **({} if shard is None else {"shard": shard}))
    of_ids, whole, how = validation.taken_apart(data, fit_arguments)
    cores = max(1, int(cpus))
    validation.check_devices(how.get("plan"), cores, gpus)
    kept = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints, share=SHARE)
    folder = place(kept.folder)
    kept = dataclasses.replace(kept, folder=str(folder))
    with engine.connected(address) as ray:
        needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        workers = engine.check_room(ray, **needs)
        shard = shard or int(claimed(folder).get("shard", 0)) or engine.share(len(ids), workers)
        if shard > len(ids):
            raise ValueError(f"A shard of {shard} members is more than the {len(ids)} there are: make it smaller.")
        places = np.split(np.arange(len(ids)), np.arange(shard, len(ids), shard))
        devices = environment(cores, gpus)
        made, states = shard_data.states(make_swarm, members)
        validation.check_shipped(make_swarm=made, loss_fn=loss_fn, data=of_ids, fit_arguments=how)
        begun = min(workers, len(places)), shards.warm, cores, None if states else made, ids[places[0]]
        engine.begin(ray, *begun, runtime_env=devices, **needs)  # while the driver gets ready
        shared, own = shard_data.parts(whole)
        first = shard_data.named(of_ids(ids[places[0]])) if of_ids else shard_data.joined(shared, own(places[0]))
        like = shard_data.swarm_of(made, states(places[0])) if states else shard_data.members(made, ids[places[0]])
        validation.check_shard(like, first, loss_fn, how)
        copies = 3 if how.get("patience") is None else 4  # of a member's state
        needs["memory"] = memory or PROCESS_BYTES + copies * _bytes(like) + 2 * _bytes(first)
        engine.check_room(ray, **needs)
        decides = {"make_swarm": make_swarm, "loss": loss_fn, "data": of_ids or whole}
        decides["first_shards_data"] = first if of_ids else None
        facts, known = validation.facts(shard, members=ids, fit_arguments=how, **decides)
        claim(folder, facts)
        marker = Marker(str(folder))
        job = shards.Job(made, loss_fn, of_ids, how, kept, marker, cores, attempts, resumes=known)
        lines = {number: line for number in range(len(places)) if (line := job.kept(number))}
        left = [number for number in range(len(places)) if number not in lines]
        try:
            for_all = ray.put(job), ray.put(shared)

            def own_of(number):
                """Of a shard's task, what no other one gets."""
                at = places[number]
                return number, ids[at], states and states(at), own(at)

            jobs = ((number, (*for_all, *own_of(number))) for number in left)
            again: dict = {"max_retries": attempts - 1, "retry_exceptions": True, "runtime_env": devices}
            room = partial(engine.slots, ray, **needs)
            with contextlib.closing(engine.run(ray, shards.train, jobs, at_once=room, **needs, **again)) as ended:
                failed = _followed(ended, lines, job, len(ids), len(places), progress)
        finally:
            marker.remove()
    table = _table(lines, resumed=set(lines) - set(left))
    found = ClusterResults(table, folder, jax.tree.map(lambda leaf: leaf[:1], like)), ClusterHistory(table, folder)
    if failed:
        raise ShardsFailed(*found, {number: (ids[places[number]], told) for number, told in failed.items()})
    return found


def _followed(ended, lines, job, members, shards, progress):
    """Fill the lines of the table as shards end: {shard: what it said} of those that have failed."""
    failed = {}
    done = sum(line["members"] for line in lines.values())
    with tqdm(total=members, initial=done, unit="member", disable=not progress) as bar:
        for number, came in ended:
            # An attempt that was given up with its node may have ended it.
            line = job.kept(number) if isinstance(came, Exception) else came
            if line is None:
                failed[number] = str(came)
            else:
                lines[number] = line
                bar.update(line["members"])
            bar.set_postfix(shards_left=shards - len(lines) - len(failed))
    return failed


def environment(cores: int, gpus: float) -> dict[str, dict[str, str]]:
    """A worker's devices as Ray's runtime_env, which is there before it starts: what it unpickles may start JAX."""
    # NPROC is how many threads XLA begins. A node's cores, in each of its workers, would be in each other's way, and
    # roundings would depend on the node.
    found = {"JAX_NUM_CPU_DEVICES": str(cores), "NPROC": str(cores)}
    if not gpus:
        found["JAX_PLATFORMS"] = "cpu"
    elif gpus < 1:
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * gpus:.3f}"  # workers that share a GPU share its memory
    return {"env_vars": found}


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def _table(lines: dict[int, dict], resumed: set[int]) -> "pd.DataFrame":
    import pandas as pd

    table = pd.DataFrame([lines[number] for number in sorted(lines)])
    return table.assign(resumed=[number in resumed for number in sorted(lines)])
