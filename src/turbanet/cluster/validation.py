"""Arguments of a run over a cluster, checked and fingerprinted before anything is trained."""

import inspect
import pickle
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from turbanet.checkpoints.identity import versions
from turbanet.cluster import shard_data
from turbanet.core.arrays import check_ids, check_whole
from turbanet.core.fingerprint import fingerprint
from turbanet.core.member import with_constants
from turbanet.core.plan import Plan, check_plan, say_once
from turbanet.data.checks import check_data, one_prediction
from turbanet.data.examples import prepare
from turbanet.training.checks import check_fit
from turbanet.training.fit import fit
from turbanet.turba_train_state import TurbaTrainState

FORMAT = 4  # of a run's folder
EXCLUDED = "checkpoints", "progress", "on_interrupt", "compile_only", "callbacks"  # arguments of fit


def ids_of(members: Any, make_swarm: Any) -> np.ndarray:
    """Return the members' ids, int32 [member]; those of a swarm, given its number of members, may repeat over seeds."""
    is_function = callable(make_swarm) and not isinstance(make_swarm, nn.Module | type)
    if not (is_function or isinstance(make_swarm, TurbaTrainState)):
        received = make_swarm.__name__ if isinstance(make_swarm, type) else type(make_swarm).__name__
        raise ValueError(f"make_swarm is a swarm, or a function of ids, int [member], that makes one; got {received}.")
    if np.ndim(members) == 0:
        check_whole(members=members)
        if not isinstance(make_swarm, TurbaTrainState):
            return np.arange(members, dtype=np.int32)
        if np.shape(make_swarm.step) != (members,):
            problem = f"members is {members}, make_swarm is of shape {np.shape(make_swarm.step)}"
            raise ValueError(f"{problem}: give its number of members, or the ids of some.")
        return np.asarray(make_swarm.id)
    ids = check_ids(members, "members")
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"members must be ids that differ, got {ids!s:.60}.")
    return ids


def split_arguments(data: Any, fit_arguments: dict) -> tuple[Any, dict, dict]:
    """Split arguments into (data(ids) or None, {name: data of `fit`}, other arguments of `fit`)."""
    known = set(inspect.signature(fit).parameters) - {"swarm", "x", "y", "loss_fn", *EXCLUDED}
    if unknown := sorted(set(fit_arguments) - known - {"predict"}):
        raise TypeError(
            f"turbanet.cluster.fit hands on to fit {', '.join(sorted(known))}; it got {', '.join(unknown)}."
        )
    if "epochs" not in fit_arguments:
        raise TypeError("turbanet.cluster.fit needs epochs=, as fit does.")
    more_data = {name: part for name, part in fit_arguments.items() if name in shard_data.DATA_NAMES}
    fit_kwargs = {name: value for name, value in fit_arguments.items() if name not in more_data}
    if not callable(data):
        return None, shard_data.as_dict(data, **more_data), fit_kwargs
    if more_data:
        raise ValueError(f"data(ids) came with {', '.join(more_data)}: let it return a dict that holds them too.")
    return data, {}, fit_kwargs


def check_shard(swarm: TurbaTrainState, data: dict, loss_fn: Any, fit_kwargs: dict) -> tuple[str, str, float]:
    """Raise ValueError for a shard that `fit` would refuse, and for inputs that it could not predict afterwards.

    Returns (name, mode, min_delta) of what `History.best` goes by.
    """
    arguments = {name: part for name, part in data.items() if name not in ("x", "y", "predict")}
    swarm = with_constants(swarm, data.get("member"), loss_fn or swarm.loss_fn)
    checked = check_fit(swarm, data["x"], data["y"], loss_fn, **arguments, **fit_kwargs)
    if "predict" in data:
        inputs = prepare(swarm, data["predict"], per_member=shard_data.own_pair(data)[0])
        check_data(swarm, inputs, None, part="predict's ", allow_nan=True)
        shapes = [leaf.shape[own + 1 :] for leaf, own in zip(jax.tree.leaves(inputs.x), inputs.is_own, strict=False)]
        if not hasattr(one_prediction(swarm, inputs.x, shapes), "shape"):
            raise ValueError("The model predicts several arrays; predict= stores one: leave it out, and predict later.")
    return checked.followed(data.get("validation"), fit_kwargs.get("min_delta", 0.0))


def check_shipped(**things: Any) -> None:
    """Raise ValueError for anything that cannot be sent to a worker."""
    from ray import cloudpickle

    for name, thing in things.items():
        try:
            cloudpickle.dumps(thing)
        except (TypeError, AttributeError, pickle.PicklingError, ValueError) as error:
            problem = f"{name} cannot be sent to workers ({error})"
            raise ValueError(f"{problem}: open files, locks and the like inside the function, not around it.") from None


def check_devices(plan: Any, cores: int, gpus: float) -> None:
    """Raise ValueError for an argument that is no plan, and for a plan of more devices than a worker has."""
    check_plan(plan)
    devices: Any = plan.devices if isinstance(plan, Plan) else ()
    if not gpus and len(devices) > cores:
        problem = f"The plan is for {len(devices)} devices, a worker has {cores}"
        raise ValueError(f"{problem}: take Plan({cores}, block={plan.block}), or more cpus.")


def facts(shard: int, **inputs: Any) -> tuple[dict[str, str], bool]:
    """Return {name: text} of all that determines the results of a run, and whether all of it could be fingerprinted."""
    fingerprints = {name.replace("_", " "): fingerprint(value) for name, value in inputs.items()}
    for name, digest in fingerprints.items():
        if digest.opaque:
            say_once(f"{name} holds {digest.opaque[0]}, which cannot be read: this run is kept, but not resumed.")
    digests = {name: digest[:16] for name, digest in fingerprints.items()}
    readable = not any(digest.opaque for digest in fingerprints.values())
    return {"format": str(FORMAT), "shard": str(shard), **versions(), **digests}, readable
