"""A swarm kept in a folder, whole or not at all, and loaded again for the model and the optimizer that it had."""

from collections.abc import Callable
from pathlib import Path
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
from turbanet.training.plan import say_once
from turbanet.training.schedules import NAMED, PLATEAU, Schedule, hyperparameters

FORMAT = 1
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of what Orbax has not written to its end
FOR_TRAINING = "optimizer", "schedule", ".opt_state", ".schedule"  # facts that predictions do without


def no_optimizer(updates: Any, state: Any, params: Any = None) -> Any:
    raise ValueError("This swarm was loaded without an optimizer, to predict: to train it, load it with its own.")


PREDICTS = optax.GradientTransformation(lambda params: optax.EmptyState(), no_optimizer)


def save(swarm: Swarm, folder: Path) -> None:
    """Keep `swarm` in `folder`, in place of the one that was saved there before; see `TurbaTrainState.save`."""
    manager, args = checkpoint.opened(folder, 1, what="A swarm")
    there = sorted(path.name for path in folder.iterdir() if TEMPORARY not in path.name)
    if there and _about(manager, args) is None:
        came = f"{folder} holds {', '.join(there[:3])}, which is no saved swarm"
        raise ValueError(f"A swarm is saved to a folder of its own, but {came}: name a new folder.")
    swarm = jax.tree.map(jnp.asarray, swarm)
    names = {function: name for name, function in NAMED.items()}
    about = {"format": FORMAT, "versions": checkpoint.versions(), "facts": _facts(swarm), "members": swarm.step.shape}
    about["schedules"] = [names.get(function) for function in _functions(swarm)]
    about["sample"] = jax.tree.map(lambda leaf: " ".join(map(str, (leaf.dtype, *leaf.shape))), unfreeze(swarm.sample))
    arrays = {name: checkpoint.as_numbers(leaf) for name, leaf in checkpoint.leaves_by_name(swarm).items()}
    kept = args.Composite(swarm=args.JsonSave(about), leaves=args.StandardSave(arrays))
    try:
        manager.save(1 + (manager.latest_step() or 0), args=kept, force=True)
    except (OSError, ValueError) as error:
        raise OSError(f"The swarm could not be written to {folder} ({error}): make room, or name another.") from error


def load(folder: Path, creator: Callable, *, schedule: Any, sample_input: Any, check: bool) -> Swarm:
    """The swarm that `save` kept in `folder`; see `TurbaTrainState.load`.

    Parameters
    ----------
    folder : where it is
    creator : creator(sample) -> a function of (seed, id), a member before its training, of which only shapes are used
    schedule, sample_input, check : as `TurbaTrainState.load` takes them
    """
    found: Any = checkpoint.opened(folder, None, what="A swarm") if folder.is_dir() else (None, None)
    about = _about(*found)
    if about is None:
        advice = "name the folder of one, or call fit again if it kept its checkpoints there"
        raise FileNotFoundError(f"{folder} holds no swarm that swarm.save wrote: {advice}.")
    if about["format"] != FORMAT:
        came = f"{folder} holds a swarm in format {about['format']}, and this TurbaNet reads format {FORMAT}"
        raise ValueError(f"{came}: load it with the turbanet {about['versions']['turbanet']} that wrote it.")
    sample = _sample(about["sample"])
    if sample is None and sample_input is None:
        raise ValueError(f"The swarm in {folder} does not know its input: give a batch of it as sample_input=.")
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sample)
    create = creator(zeros if sample_input is None else as_arrays(sample_input, "sample_input"))
    like = _like(about, create, schedule)
    _check(folder, like, about, check)
    manager, args = found
    leaves = manager.restore(manager.latest_step(), args=args.Composite(leaves=args.StandardRestore())).leaves
    return checkpoint.named_leaves(leaves, like.replace(sample=sample))


def _about(manager, args):
    """What `save` said of the swarm that it kept; None where there is none."""
    try:
        return manager and manager.restore(None, args=args.Composite(swarm=args.JsonRestore())).swarm
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


def _functions(swarm):
    return () if swarm.schedule is None else swarm.schedule.functions


def _like(about, create, schedule):
    """The swarm that `about` tells of, its members made by `create`, known by shapes and types."""
    given = schedule if isinstance(schedule, list | tuple | np.ndarray) else [schedule]
    functions = dict.fromkeys(NAMED.get(each, each) for each in (about["schedules"] if schedule is None else given))

    def untrained(identity):
        state = create(identity)
        rate = hyperparameters(state).get("learning_rate")
        if not functions or rate is None:
            return state
        if None in functions:
            raise ValueError("The swarm follows a schedule of your own: give schedule=, as with_schedule was given it.")
        return state.replace(schedule=Schedule(jnp.int32(0), rate, PLATEAU.init(rate), tuple(functions)))

    identity = jax.ShapeDtypeStruct(tuple(about["members"]), np.int32)
    return jax.eval_shape(jax.vmap(untrained) if about["members"] else untrained, (identity, identity))


def _facts(swarm):
    """{name: text} of what computes in a swarm, and of its arrays, whose names begin with a dot."""
    schedules = {f"schedule {i}": function for i, function in enumerate(_functions(swarm))}
    facts, unread = checkpoint.identified({"model": swarm.apply_fn, "optimizer": swarm.tx, **schedules})
    if unread:
        say_once(f"The {unread}, which cannot be read: whether a loaded swarm has the same one is not checked.")
    facts["model"] = f"{model(swarm.apply_fn)} {facts['model'].rpartition(' ')[2]}"
    return facts | {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in checkpoint.leaves_by_name(swarm).items()}


def _check(folder, like, about, check):
    """ValueError for a swarm that is not the saved one; said, where its code differs as versions do."""
    saved, here = about["facts"], _facts(like)
    old, new = about["versions"], checkpoint.versions()
    for name in saved | here:
        was, now = saved.get(name, "not there"), here.get(name, "not there")
        is_code = not name.startswith(".")
        if was == now or (is_code and not check) or (like.tx is PREDICTS and name.startswith(FOR_TRAINING)):
            continue
        other = f"{name} was {was} and is {now}"
        if not is_code or old == new:
            advice = "give what it was saved with" + ", or check=False if both compute the same" * is_code
            raise ValueError(f"The swarm in {folder} is another one: {other}; {advice}.")
        say_once(f"Whether the swarm in {folder} computes the same by now is unknown: {other}, from {old} to {new}.")
