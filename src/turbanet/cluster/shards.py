"""One shard of a swarm: its training on a worker, and its results in the shared folder."""

import dataclasses
import importlib
import io
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from turbanet.checkpoints.checkpoint import Checkpoints, Folder, named_leaves
from turbanet.cluster import shard_data
from turbanet.cluster.engine import Unfit
from turbanet.cluster.folder import Marker
from turbanet.core import extras
from turbanet.core.plan import use_cores
from turbanet.core.storage import place, remove, write_whole
from turbanet.training.fit import fit, predict
from turbanet.training.history import History
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd

TRAINING, SWARM, ATTEMPTS, DONE = "training", "swarm", "attempts", "shard.json"  # of a shard's folder
SCORES, LOSSES, PREDICTIONS = "scores.parquet", "losses.parquet", "predictions.npy"


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings that all shards of a run share.

    make_swarm : make_swarm(ids) -> the swarm of those members, or the tree of a swarm whose states the driver sends
    of_ids : data(ids) -> the data of a shard by `shard_data.DATA_NAMES`, read by the worker; None: the driver sends it
    settings : other arguments of `fit`
    checkpoints : of `fit`, whose folder is the run's
    cores : CPU devices of a worker
    attempts : of a shard in one call
    resumes : whether an attempt resumes the one before; not where fingerprints cannot tell that it is the same training
    """

    make_swarm: Any
    loss_fn: Any
    of_ids: Callable | None
    settings: dict
    checkpoints: Checkpoints
    marker: Marker
    cores: int
    attempts: int
    resumes: bool = True

    def folder(self, number: int) -> Any:
        """Return the folder of a shard, with its checkpoints and then its results."""
        return place(self.checkpoints.folder) / "shards" / f"{number:06d}"

    def count(self, number: int) -> None:
        """Count an attempt at a shard; RuntimeError after the last one, as Ray does not count out-of-memory kills."""
        folder = self.folder(number) / ATTEMPTS
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"{self.marker.call}-*"))) >= self.attempts:
            raise RuntimeError(f"Shard {number} was killed {self.attempts} times: give memory=, or smaller shards.")
        (folder / f"{self.marker.call}-{uuid.uuid4().hex}").write_text(socket.gethostname())

    def result(self, number: int) -> dict | None:
        """Return a shard's row of the table, or None until it is done."""
        file = self.folder(number) / DONE
        return json.loads(file.read_text()) if file.exists() else None


def train(job: Job, shared: dict, number: int, ids: np.ndarray, states: list | None, own: list) -> dict | Unfit:
    """Train one shard, or resume it, write its results and return its row of the table of shards.

    states : the members before their training, the leaves [member, ...] of `job.make_swarm`; None if that makes them
    shared, own : data as split by `shard_data.split`
    """
    begin = time.time()
    if problem := job.marker.wrong():
        return Unfit(ray_node(), problem)
    if line := job.result(number):  # an earlier attempt was killed after its results and before its return
        return line
    job.count(number)
    use_cores(job.cores, cache=True)
    data = shard_data.as_dict(job.of_ids(ids)) if job.of_ids else shard_data.merge(shared, own)
    swarm = shard_data.members(job.make_swarm, ids) if states is None else shard_data.swarm_of(job.make_swarm, states)
    return _train(job, job.folder(number), number, swarm, data, begin)


def _train(job, folder, number, swarm, data, begin):
    x, y, inputs = data.pop("x"), data.pop("y"), data.pop("predict", None)
    training = folder / TRAINING
    if not job.resumes:
        remove(training)
    steps = [int(path.name) for path in training.glob("*") if path.name.isdigit()]
    # A node that died may hold a lock for minutes on a network's file system.
    checkpoints = dataclasses.replace(job.checkpoints, folder=str(training), exclusive=False)
    try:
        swarm, history = fit(swarm, x, y, job.loss_fn, checkpoints=checkpoints, progress=False, **data, **job.settings)
    except Exception as error:
        for name in ("swarm", "history"):  # they would travel to the driver
            vars(error).pop(name, None)
        raise
    ids = np.asarray(swarm.id)
    out = folder / f"out-{uuid.uuid4().hex[:8]}"  # one per attempt: an attempt given up with its node may still run
    out.mkdir(parents=True)
    swarm.save(str(out / SWARM))
    for table, name in ((history.frame(), LOSSES), (scores(history), SCORES)):
        (out / name).write_bytes(table.to_parquet(index=False))
    if inputs is not None:
        predicted = np.asarray(predict(swarm, inputs, per_member=shard_data.own_pair(data)[0]))
        _keep_predictions(predicted, out / PREDICTIONS)
    line = {"shard": number, "members": len(ids), "first": int(ids[0]), "last": int(ids[-1]), "out": out.name}
    line |= {"node": socket.gethostname(), "process": os.getpid(), "block": history.plan and history.plan.block}
    line |= {"attempts": len(list((folder / ATTEMPTS).iterdir())), "resumed_at": max(steps, default=0)}
    line |= {"begin": begin, "seconds": time.time() - begin}
    line |= {"compile_seconds": history.compile_seconds, "steady_seconds": history.steady_seconds}
    write_whole(folder / DONE, json.dumps(line))
    remove(training)
    return line


def warm(cores: int, make_swarm: Callable | None, ids: np.ndarray) -> None:
    """Import modules and compile `make_swarm` in a new worker; an error here occurs again in the shard."""
    use_cores(cores, cache=True)
    for module in ("orbax.checkpoint", "pandas", "pyarrow.parquet"):
        importlib.import_module(module)
    if make_swarm:
        make_swarm(ids)


def ray_node() -> str:
    """Return the id of the node that this task runs on."""
    import ray

    return ray.get_runtime_context().get_node_id()


def scores(history: History) -> Any:
    """Return a pandas table of each member's last epoch, in their order: seed, member, epoch, losses, metrics."""
    last = np.maximum(history.epochs, 1) - 1
    members = len(last)
    return history.frame().iloc[last * members + np.arange(members)].reset_index(drop=True)


def kept_table(file: Any) -> "pd.DataFrame":
    """Read a table that a shard wrote."""
    pd = extras.pandas()

    return pd.read_parquet(io.BytesIO(file.read_bytes()))


def _keep_predictions(values, file):
    with file.open("wb") as opened:  # a NumPy file has no bfloat16
        np.save(opened, values if values.dtype.kind in "biuf" else values.astype(np.float32))


def kept_predictions(file: Any) -> np.ndarray:
    """Read the predictions [member, ...] that a shard wrote."""
    with file.open("rb") as opened:
        return np.load(opened)


def kept_swarm(folder: Any, like: TurbaTrainState) -> TurbaTrainState:
    """Read the trained members that a shard wrote; `like` is a swarm with the same functions."""
    arrays = Folder(str(folder), None, what="A swarm").arrays()
    return named_leaves(arrays, like)
