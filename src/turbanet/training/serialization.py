"""A swarm kept in a folder, whole or not at all, and loaded again for the model and the optimizer that it had."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import freeze, unfreeze

from turbanet.training import checkpoint
from turbanet.training.arrays import as_arrays
from turbanet.training.describe import model
from turbanet.training.member import Swarm
from turbanet.training.optimizers import has_averages
from turbanet.training.plan import say_once
from turbanet.training.schedules import NAMED, PLATEAU, Schedule, learning_rates
from turbanet.training.storage import is_address, place

FORMAT = 1
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of what Orbax has not written to its end
# Facts that predictions do without.
FOR_TRAINING = "optimizer", "schedule", ".opt_state", ".schedule", checkpoint.OPAQUE


def no_optimizer(updates: Any, state: Any, params: Any = None) -> Any:
    raise ValueError("This swarm was loaded without an optimizer, to predict: to train it, load it with its own.")


PREDICTS = optax.GradientTransformation(lambda params: optax.EmptyState(), no_optimizer)


def save(swarm: Swarm, folder: str | os.PathLike) -> None:
    """Keep `swarm` in `folder`, in place of the one that was saved there before; see `TurbaTrainState.save`."""
    kept = checkpoint.Folder(folder, 1, what="A swarm")
    there = kept.there.iterdir() if kept.there.exists() else ()
    there = sorted(path.name for path in there if TEMPORARY not in path.name)
    if there and _about(kept) is None:
        came = f"{folder} holds {', '.join(there[:3])}, which is no saved swarm"
        raise ValueError(f"A swarm is saved to a folder of its own, but {came}: name a new folder.")
    swarm = jax.tree.map(jnp.asarray, swarm)
    names = {function: name for name, function in NAMED.items()}
    about = {"format": FORMAT, "versions": checkpoint.versions(), "facts": _facts(swarm), "members": swarm.step.shape}
    about["averages"] = has_averages(swarm.opt_state)
    about["schedules"] = [names.get(function) for function in getattr(swarm.schedule, "functions", ())]
    about["sample"] = jax.tree.map(lambda leaf: " ".join(map(str, (leaf.dtype, *leaf.shape))), unfreeze(swarm.sample))
    told = {"what": "The swarm", "advice": "make room, or name another"}
    kept.write(1 + (kept.manager.latest_step() or 0), checkpoint.leaves_by_name(swarm), {"swarm": about}, **told)


def load(folder: str | os.PathLike, creator: Callable, *, schedule: Any, sample_input: Any, check: bool) -> Swarm:
    """The swarm that `save` kept in `folder`; see `TurbaTrainState.load`.

    Parameters
    ----------
    folder : where it is
    creator : creator(sample) -> a function of {"seed": ..., "id": ...}, a member before its training: its shapes
    schedule, sample_input, check : as `TurbaTrainState.load` takes them
    """
    there = is_address(folder) or place(folder).is_dir()
    kept: Any = checkpoint.Folder(folder, None, what="A swarm") if there else None
    about = _about(kept)
    if about is None:
        advice = "name the folder of one, or call fit again if it kept its checkpoints there"
        raise FileNotFoundError(f"{folder} holds no swarm that swarm.save wrote: {advice}.")
    if about["format"] != FORMAT:
        came = f"{folder} holds a swarm in format {about['format']}, and this TurbaNet reads format {FORMAT}"
        raise ValueError(f"{came}: load it with the turbanet {about['versions']['turbanet']} that wrote it.")
    sample = _sample(about["sample"])
    if sample is None and sample_input is None:
        raise ValueError(f"The swarm in {folder} does not know its input: give a batch of it as sample_input=.")
    given = as_arrays(sample_input, "sample_input")  # None stays None
    create = creator(jax.tree.map(jnp.zeros_like, sample) if given is None else given)
    like = _like(about, create, schedule).replace(sample=sample)
    if about.get("averages") and like.tx is PREDICTS:
        raise ValueError(f"The swarm in {folder} predicts by parameters that its optimizer keeps: give the optimizer.")
    _check(folder, like, about, check)
    return checkpoint.named_leaves(kept.arrays(), like)


def _about(kept):
    """What `save` said of the swarm that it kept; None where there is none."""
    try:
        return kept and kept.about()["swarm"]
    except (FileNotFoundError, KeyError, ValueError):  # nothing, a checkpoint of `fit`, what somebody else wrote
        return None


def _sample(told):
    """An input's shape and type, or those of its parts, of which `save` told."""
    if isinstance(told, str):
        dtype, *shape = told.split()
        return jax.ShapeDtypeStruct(tuple(map(int, shape)), dtype)
    if isinstance(told, dict):
        return freeze({name: _sample(part) for name, part in told.items()})
    return told and tuple(map(_sample, told))


def _like(about, create, schedule):
    """The swarm that `about` tells of, its members made by `create`, known by shapes and types."""
    given = schedule if isinstance(schedule, list | tuple | np.ndarray) else [schedule]
    functions = dict.fromkeys(NAMED.get(each, each) for each in (about["schedules"] if schedule is None else given))

    def untrained(identity):
        state = create(identity)
        rates = learning_rates(state)
        if not functions or not rates:
            return state
        if None in functions:
            raise ValueError("The swarm follows a schedule of your own: give schedule=, as with_schedule was given it.")
        return state.replace(schedule=Schedule(jnp.int32(0), rates, PLATEAU.init(rates), tuple(functions)))

    number = jax.ShapeDtypeStruct(tuple(about["members"]), np.int32)
    return jax.eval_shape(jax.vmap(untrained) if about["members"] else untrained, {"seed": number, "id": number})


def _facts(swarm):
    """{name: text} of what computes in a swarm, and of its arrays, whose names begin with a dot."""
    facts = checkpoint.identified(swarm, {})
    if unread := facts[checkpoint.OPAQUE]:
        say_once(f"The {unread}, which cannot be read: whether a loaded swarm has the same one is not checked.")
    facts["model"] = facts["model"].replace(checkpoint.called(swarm.apply_fn), model(swarm.apply_fn), 1)
    return facts | checkpoint.types(swarm)


def _check(folder, like, about, check):
    """ValueError for a swarm that is not the saved one; said, where its code differs as versions do."""
    old, new = about["versions"], checkpoint.versions()
    for name, other in checkpoint.differences(*map(_any_number, (about["facts"], _facts(like)))).items():
        is_code = not name.startswith(".")
        if (is_code and not check) or (like.tx is PREDICTS and name.startswith(FOR_TRAINING)):
            continue
        if not is_code or old == new:
            advice = "give what it was saved with" + ", or check=False if both compute the same" * is_code
            raise ValueError(f"The swarm in {folder} is another one: {other}; {advice}.")
        say_once(f"Whether the swarm in {folder} computes the same by now is unknown: {other}, from {old} to {new}.")


def _any_number(facts):
    """The same facts but for the types of hyperparameters: where the optimizer has an int, members may have a float."""
    return {name: fact[fact.index("[") :] if ".hyperparams[" in name else fact for name, fact in facts.items()}
