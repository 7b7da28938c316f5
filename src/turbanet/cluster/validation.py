"""What a run over a cluster is asked for: checked, and known by, before anything is trained."""

import inspect
import pickle
from typing import Any

import numpy as np

from turbanet.cluster import shard_data
from turbanet.training.arrays import check_ids, check_whole
from turbanet.training.checkpoint import versions
from turbanet.training.checks import check_data, check_fit
from turbanet.training.data import prepare
from turbanet.training.fingerprint import fingerprint
from turbanet.training.fit import fit
from turbanet.training.plan import Plan, check_plan, say_once
from turbanet.turba_train_state import TurbaTrainState

FORMAT = 3  # of what is kept of a run
NOT_HERE = "checkpoints", "progress", "on_interrupt", "compile_only", "callbacks"  # of fit's arguments


def ids_of(members: Any, make_swarm: Any) -> np.ndarray:
    """The members' ids, int32 [member]: of a swarm, whose number is given, they may be of several seeds and repeat."""
    if np.ndim(members) == 0:
        check_whole(members=members)
        if not isinstance(make_swarm, TurbaTrainState):
            return np.arange(members, dtype=np.int32)
        if np.shape(make_swarm.step) != (members,):
            came = f"members is {members}, make_swarm is of shape {np.shape(make_swarm.step)}"
            raise ValueError(f"{came}: give its number of members, or the ids of some.")
        return np.asarray(make_swarm.id)
    ids = check_ids(members, "members")
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"members must be ids that differ, got {ids!s:.60}.")
    return ids


def taken_apart(data: Any, fit_arguments: dict) -> tuple[Any, dict, dict]:
    """(data(ids) or None, {name: what `fit` takes of the data}, other arguments of `fit`)."""
    known = set(inspect.signature(fit).parameters) - {"swarm", "x", "y", "loss_fn", *NOT_HERE}
    if unknown := sorted(set(fit_arguments) - known - {"predict"}):
        raise TypeError(
            f"turbanet.cluster.fit hands on to fit {', '.join(sorted(known))}; it got {', '.join(unknown)}."
        )
    if "epochs" not in fit_arguments:
        raise TypeError("turbanet.cluster.fit needs epochs=, as fit does.")
    moved = {name: part for name, part in fit_arguments.items() if name in shard_data.OF_DATA}
    how = {name: value for name, value in fit_arguments.items() if name not in moved}
    if not callable(data):
        return None, shard_data.named(data, **moved), how
    if moved:
        raise ValueError(f"data(ids) came with {', '.join(moved)}: let it return a dict that holds them too.")
    return data, {}, how


def check_shard(swarm: TurbaTrainState, data: dict, loss_fn: Any, how: dict) -> None:
    """ValueError for a shard that `fit` would refuse, and for what it could not predict afterwards."""
    arguments = {name: part for name, part in data.items() if name not in ("x", "y", "predict")}
    check_fit(swarm, data["x"], data["y"], loss_fn, **arguments, **how)
    if "predict" in data:
        wanted = prepare(swarm, data["predict"], per_member=shard_data.own_pair(data)[0])
        check_data(swarm, wanted, None, part="predict's ", allow_nan=True)


def check_shipped(**things: Any) -> None:
    """ValueError for what cannot be sent to a worker."""
    from ray import cloudpickle

    for name, thing in things.items():
        try:
            cloudpickle.dumps(thing)
        except (TypeError, AttributeError, pickle.PicklingError, ValueError) as error:
            came = f"{name} cannot be sent to workers ({error})"
            raise ValueError(f"{came}: open files, locks and the like inside the function, not around it.") from None


def check_devices(plan: Any, cores: int, gpus: float) -> None:
    """ValueError for what is no plan, and for one of more devices than a worker has."""
    check_plan(plan)
    devices: Any = plan.devices if isinstance(plan, Plan) else ()
    if not gpus and len(devices) > cores:
        came = f"The plan is for {len(devices)} devices, a worker has {cores}"
        raise ValueError(f"{came}: take Plan({cores}, block={plan.block}), or more cpus.")


def facts(shard: int, **decides: Any) -> tuple[dict[str, str], bool]:
    """{name: text} of all that decides what comes out of a run, and whether all of it could be read."""
    found = {name.replace("_", " "): fingerprint(thing) for name, thing in decides.items()}
    for name, each in found.items():
        if each.opaque:
            say_once(f"{name} holds {each.opaque[0]}, which cannot be read: this run is kept, but not resumed.")
    digests = {name: each[:16] for name, each in found.items()}
    known = not any(each.opaque for each in found.values())
    return {"format": str(FORMAT), "shard": str(shard), **versions(), **digests}, known
