"""One shard of a swarm, on the worker that trains it: its members, its data, what it keeps in the shared folder."""

import dataclasses
import importlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from turbanet.cluster.engine import Unfit
from turbanet.cluster.folder import Marker
from turbanet.training import autoplan
from turbanet.training.arrays import as_arrays, is_key
from turbanet.training.checkpoint import Checkpoints, Folder, named_leaves
from turbanet.training.data import join, pair
from turbanet.training.fingerprint import as_numbers
from turbanet.training.fit import History, fit, predict
from turbanet.training.places import is_address, place, remove, write_whole
from turbanet.training.plan import use_cores
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd

TRAINING, SWARM, ATTEMPTS, DONE = "training", "swarm", "attempts", "shard.json"  # of a shard's folder
SCORES, LOSSES, PREDICTIONS = "scores.parquet", "losses.parquet", "predictions.parquet"
OF_DATA = "x", "y", "rows", "validation", "validation_rows", "per_member", "predict"  # what may be each shard's own


@dataclasses.dataclass(frozen=True)
class Job:
    """What all shards of a run share.

    make_swarm : make_swarm(ids) -> the swarm of those members, or the tree of a swarm whose states each shard is given
    of_ids : data(ids) -> what `fit` takes of OF_DATA, read by the worker; None where the driver has given it
    how : other arguments of `fit`
    checkpoints : of `fit`, whose folder is the run's
    cores : CPU devices of a worker
    attempts : of a shard in one call
    resumes : whether an attempt goes on from the one before; not where it could not tell that it is the same training
    """

    make_swarm: Any
    loss_fn: Any
    of_ids: Callable | None
    how: dict
    checkpoints: Checkpoints
    marker: Marker
    cores: int
    attempts: int
    resumes: bool = True

    def folder(self, number: int) -> Any:
        """The `place` where a shard keeps its training, and then what came out."""
        return place(self.checkpoints.folder) / "shards" / f"{number:06d}"

    def count(self, number: int) -> None:
        """Note that a shard is tried; RuntimeError where it was often enough: Ray does not count what memory killed."""
        folder = self.folder(number) / ATTEMPTS
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"{self.marker.call}-*"))) >= self.attempts:
            raise RuntimeError(f"Shard {number} was killed {self.attempts} times: give memory=, or smaller shards.")
        (folder / f"{self.marker.call}-{uuid.uuid4().hex}").write_text(socket.gethostname())

    def kept(self, number: int) -> dict | None:
        """A shard's line of the table, None while it is not done."""
        file = self.folder(number) / DONE
        return json.loads(file.read_text()) if file.exists() else None


def train(job: Job, shared: dict, number: int, ids: np.ndarray, states: list | None, own: list) -> dict | Unfit:
    """Train one shard, or go on with it, and keep what comes out: its line of the table of shards.

    states : the members before their training, the leaves [member, ...] of `job.make_swarm`; None where that makes them
    shared, own : the data that all have and the shard's own, as `parts` has made them
    """
    begin = time.time()
    if sentence := job.marker.wrong():
        return Unfit(ray_node(), sentence)
    if line := job.kept(number):  # it was killed between its last line and its answer
        return line
    job.count(number)
    use_cores(job.cores, cache=True)
    if not is_address(job.checkpoints.folder):  # nodes of a kind measure a plan once
        os.environ[autoplan.FOLDER] = str(place(job.checkpoints.folder) / "plans")
    data = named(job.of_ids(ids)) if job.of_ids else joined(shared, own)
    swarm = members(job.make_swarm, ids) if states is None else swarm_of(job.make_swarm, states)
    return _train(job, job.folder(number), number, swarm, data, begin)


def _train(job, folder, number, swarm, data, begin):
    x, y, wanted = data.pop("x"), data.pop("y"), data.pop("predict", None)
    training = folder / TRAINING
    if not job.resumes:
        remove(training)
    before = [int(path.name) for path in training.glob("*") if path.name.isdigit()]
    kept = dataclasses.replace(job.checkpoints, folder=str(training))
    swarm, history = fit(swarm, x, y, job.loss_fn, checkpoints=kept, progress=False, **data, **job.how)
    ids = np.asarray(swarm.id)
    out = folder / f"out-{uuid.uuid4().hex[:8]}"  # an attempt's own: a node that was given up may still be at work
    out.mkdir(parents=True)
    swarm.save(str(out / SWARM))
    _keep_table(history.frame(), out / LOSSES)
    _keep_table(scores(history), out / SCORES)
    if wanted is not None:
        predicted = np.asarray(predict(swarm, wanted, per_member=own_pair(data)[0]))
        _keep_predictions(predicted, ids, out / PREDICTIONS)
    line = {"shard": number, "members": len(ids), "first": int(ids[0]), "last": int(ids[-1]), "out": out.name}
    line |= {"node": socket.gethostname(), "process": os.getpid(), "block": history.plan and history.plan.block}
    line |= {"attempts": len(list((folder / ATTEMPTS).iterdir())), "resumed_at": max(before, default=0)}
    line |= {"begin": begin, "seconds": time.time() - begin}
    line |= {"compile_seconds": history.compile_seconds, "steady_seconds": history.steady_seconds}
    write_whole(folder / DONE, json.dumps(line))
    remove(training)
    return line


def warm(cores: int, make_swarm: Callable | None, ids: np.ndarray) -> None:
    """Import, and compile what makes a shard's members, in a new worker; what fails here fails again in its shard."""
    use_cores(cores, cache=True)
    for module in ("orbax.checkpoint", "pandas", "pyarrow.parquet"):
        importlib.import_module(module)
    if make_swarm:
        make_swarm(ids)


def ray_node() -> str:
    """The id of the node that this task runs on."""
    import ray

    return ray.get_runtime_context().get_node_id()


def states(make_swarm: Any, members: Any) -> tuple[Any, Callable | None]:
    """Of a swarm, its tree and a function of positions in `members` of these members' states; else (it, None).

    members : their number, for all, or ids
    """
    if not isinstance(make_swarm, TurbaTrainState):
        return make_swarm, None
    if np.ndim(make_swarm.step) != 1:
        raise ValueError("make_swarm is one member's state: give a swarm, of a member axis, or make_swarm(ids).")
    its = np.asarray(make_swarm.id).tolist()
    asked = np.asarray(its if np.ndim(members) == 0 else members).tolist()
    where = {id: position for position, id in enumerate(its)}
    if unknown := [id for id in asked if id not in where]:
        raise ValueError(f"make_swarm has no member {unknown[0]}: name as members ids of its own.")
    if np.ndim(members) and len(where) < len(its):
        raise ValueError("make_swarm has members of equal ids: name as members how many it has, for all of them.")
    order = np.arange(len(its)) if np.ndim(members) == 0 else np.asarray([where[id] for id in asked])
    leaves, tree = jax.tree.flatten(make_swarm)
    return tree, lambda positions: [_shipped(leaf, order[positions]) for leaf in leaves]


def _shipped(leaf, positions):
    """Those members of a leaf as what pickle can hold: (numbers, the kind of the random keys that they are or None)."""
    kind = jax.random.key_impl(leaf) if is_key(leaf) else None
    return as_numbers(leaf)[positions], kind and str(kind)


def swarm_of(tree: Any, states: list) -> TurbaTrainState:
    """The swarm of what `states` has taken apart."""
    leaves = [numbers if kind is None else jax.random.wrap_key_data(numbers, impl=kind) for numbers, kind in states]
    return jax.tree.map(jax.numpy.asarray, jax.tree.unflatten(tree, leaves))


def members(make_swarm: Callable, ids: np.ndarray) -> TurbaTrainState:
    """The members of these ids, as they begin; ValueError if `make_swarm` makes others."""
    swarm = make_swarm(ids)
    if not isinstance(swarm, TurbaTrainState) or np.ndim(swarm.step) != 1:
        raise ValueError(f"make_swarm(ids) must make a TurbaTrainState with a member axis, got {type(swarm).__name__}.")
    if not np.array_equal(swarm.id, ids):
        came = f"{np.asarray(swarm.id)[:5].tolist()} for the ids {ids[:5].tolist()}"
        raise ValueError(f"make_swarm(ids) must make the members of those ids, got {came}: hand ids on as swarm_size.")
    return swarm


def named(data: Any, **more: Any) -> dict:
    """(x, y), or a dict of OF_DATA, and more as a dict of the arrays that there are; ValueError for anything else."""
    if not isinstance(data, dict) and not (isinstance(data, tuple | list) and len(data) == 2):
        known = f"(x, y), a dict of {', '.join(OF_DATA)}, or data(ids)"
        raise ValueError(f"data must be {known}; got {type(data).__name__}.")
    data = {**(data if isinstance(data, dict) else dict(zip("xy", data, strict=True))), **more}
    if unknown := sorted(set(data) - set(OF_DATA)):
        raise ValueError(f"data may hold {', '.join(OF_DATA)}, and holds {', '.join(unknown)} too.")
    if missing := [name for name in "xy" if name not in data]:
        raise ValueError(f"data holds no {' and no '.join(missing)}: give (x, y), or a dict with both.")
    if "validation" in data and data["validation"] is not None:
        data["validation"] = tuple(pair(data["validation"]))
    there = {name: part for name, part in data.items() if part is not None}
    return {name: part if name == "per_member" else as_arrays(part, name) for name, part in there.items()}


def own_pair(data: dict) -> tuple[Any, Any]:
    """Whether x and y lead with the member axis, as `fit` takes per_member for each."""
    own = data.get("per_member", False)
    return own if isinstance(own, tuple) else (own, own)


def parts(data: dict) -> tuple[dict, Callable[[Any], list]]:
    """Data of `named` in two: what all shards share, and a function of positions of what is a shard's own."""
    of_x, of_y = own_pair(data)
    is_own = {"x": of_x, "y": of_y, "rows": True, "validation": (of_x, of_y), "validation_rows": True, "predict": of_x}
    arrays = {name: part for name, part in data.items() if name in is_own}
    leaves, tree = jax.tree.flatten(arrays)
    owned = jax.tree.leaves(jax.tree.broadcast({name: is_own[name] for name in arrays}, arrays))
    leaves = [np.asarray(leaf) for leaf in leaves]
    shared = [None if own else leaf for leaf, own in zip(leaves, owned, strict=True)]

    def own(positions):
        return [leaf[positions] if own else None for leaf, own in zip(leaves, owned, strict=True)]

    return {"leaves": shared, "tree": tree, "per_member": (of_x, of_y)}, own


def joined(shared: dict, own: list) -> dict:
    """What `parts` has made two of."""
    return jax.tree.unflatten(shared["tree"], join(own, shared["leaves"])) | {"per_member": shared["per_member"]}


def scores(history: History) -> Any:
    """A pandas table of each member's last epoch, in their order: seed, member, epoch, losses, metrics."""
    last = np.maximum(history.epochs, 1) - 1
    members = len(last)
    return history.frame().iloc[last * members + np.arange(members)].reset_index(drop=True)


def _keep_table(table, file):
    with file.open("wb") as opened:
        table.to_parquet(opened, index=False)


def kept_table(file: Any) -> "pd.DataFrame":
    """The table that a shard has kept."""
    import pandas as pd

    with file.open("rb") as opened:
        return pd.read_parquet(opened)


def _keep_predictions(values, ids, file):
    import pyarrow
    from pyarrow import parquet

    known = values.dtype.kind in "biuf"  # bfloat16 is of no kind that Parquet has
    flat = pyarrow.array((values if known else values.astype(np.float32)).reshape(-1))
    column = pyarrow.FixedSizeListArray.from_arrays(flat, values[0].size)
    table = pyarrow.table({"member": ids, "prediction": column})
    with file.open("wb") as opened:
        parquet.write_table(table.replace_schema_metadata({"shape": json.dumps(values.shape[1:])}), opened)


def kept_predictions(file: Any) -> np.ndarray:
    """The predictions [member, ...] that a shard has kept."""
    from pyarrow import parquet

    with file.open("rb") as opened:
        table = parquet.read_table(opened)
    shape = json.loads(table.schema.metadata[b"shape"])
    return table["prediction"].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, *shape)


def kept_swarm(folder: Any, like: TurbaTrainState) -> TurbaTrainState:
    """The trained members that a shard has kept; `like`: a swarm of the same functions."""
    arrays = Folder(str(folder), None, what="A swarm").arrays()
    return named_leaves(arrays, like)
