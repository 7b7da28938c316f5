"""Saving a swarm to a folder, whole or not at all, and loading it for the model and the optimizer that it had."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import freeze, unfreeze

from turbanet.checkpoints import checkpoint, identity
from turbanet.checkpoints.describe import model
from turbanet.core.arrays import as_arrays, without_x64
from turbanet.core.optimizers import has_averages
from turbanet.core.plan import say_once
from turbanet.core.schedules import PLATEAU, SCHEDULES, Schedule, learning_rates
from turbanet.core.state import State, Swarm, check_swarm
from turbanet.core.storage import is_address, place

FORMAT = 1
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of folders that Orbax has not finished
# Facts that do not affect predictions.
FOR_TRAINING = "optimizer", "schedule", ".opt_state", ".schedule", identity.OPAQUE


def no_optimizer(updates: Any, state: Any, params: Any = None) -> Any:
    """Raise ValueError in place of a step."""
    raise ValueError("This swarm was loaded without an optimizer, to predict: to train it, load it with its own.")


INFERENCE_ONLY = optax.GradientTransformation(lambda params: optax.EmptyState(), no_optimizer)


def save(swarm: State, folder: str | os.PathLike) -> None:
    """Save `swarm` to `folder`, in place of one that was saved there before; see `TurbaTrainState.save`."""
    if jnp.ndim(swarm.step):
        check_swarm(swarm)
    specifications = {name: _described(unfreeze(getattr(swarm, name)), name) for name in ("sample", "member")}
    store = checkpoint.Folder(folder, 1, what="A swarm", exclusive=True)
    try:
        _save(swarm, folder, store, specifications)
    finally:
        store.close()


def _save(swarm, folder, store, specifications):
    paths = store.there.iterdir() if store.there.exists() else ()
    names = sorted(path.name for path in paths if TEMPORARY not in path.name and path.name != checkpoint.LOCK)
    if names and _about(store) is None:
        (store.there / checkpoint.LOCK).unlink(missing_ok=True)
        problem = f"{folder} holds {', '.join(names[:3])}, which is no saved swarm"
        raise ValueError(f"A swarm is saved to a folder of its own, but {problem}: name a new folder.")
    swarm = jax.tree.map(jnp.asarray, swarm)
    schedules = {function: name for name, function in SCHEDULES.items()}
    about = {"format": FORMAT, "versions": identity.versions(), "facts": _facts(swarm), "members": swarm.step.shape}
    about["averages"] = has_averages(swarm.opt_state)
    about["schedules"] = [schedules.get(function) for function in getattr(swarm.schedule, "functions", ())]
    about |= specifications
    message = {"what": "The swarm", "advice": "make room, or name another"}
    store.write(1 + (store.manager.latest_step() or 0), identity.leaves_by_name(swarm), {"swarm": about}, **message)


def load(
    folder: str | os.PathLike,
    creator: Callable[[Any], Callable[[Any], Swarm]],
    *,
    schedule: Any,
    sample_input: Any,
    check: bool,
) -> Swarm:
    """Load the swarm that `save` wrote to `folder`; see `TurbaTrainState.load`.

    Parameters
    ----------
    folder : where it is
    creator : creator(sample) -> a function of {"seed": ..., "id": ...}, a member before its training: its shapes
    schedule, sample_input, check : as `TurbaTrainState.load` takes them
    """
    exists = is_address(folder) or place(folder).is_dir()
    store: Any = checkpoint.Folder(folder, None, what="A swarm") if exists else None
    while True:
        number = store and store.manager.latest_step()
        try:
            return _load(folder, store, creator, schedule, sample_input, check)
        except Exception:
            if store is None:
                raise
            store.manager.reload()
            if store.manager.latest_step() == number:  # else another process has saved the next one
                raise


def _load(folder, store, creator, schedule, sample_input, check):
    about = _about(store)
    if about is None:
        advice = "name the folder of one, or call fit again if it kept its checkpoints there"
        raise FileNotFoundError(f"{folder} holds no swarm that swarm.save wrote: {advice}.")
    if about["format"] != FORMAT:
        problem = f"{folder} holds a swarm in format {about['format']}, and this TurbaNet reads format {FORMAT}"
        raise ValueError(f"{problem}: load it with the turbanet {about['versions']['turbanet']} that wrote it.")
    if which := about["facts"].get(".schedule.which"):
        about["facts"].setdefault(".schedule.begin", which)  # in earlier files schedules count all epochs
    sample = _specification(about["sample"])
    if sample is None and sample_input is None:
        raise ValueError(f"The swarm in {folder} does not know its input: give a batch of it as sample_input=.")
    sample_input = as_arrays(sample_input, "sample_input")  # None stays None
    create = creator(jax.tree.map(jnp.zeros_like, unfreeze(sample)) if sample_input is None else sample_input)
    constants = unfreeze(_specification(about.get("member")))
    like = _like(about, create, schedule).replace(sample=sample, member=constants)
    if about.get("averages") and like.tx is INFERENCE_ONLY:
        raise ValueError(f"The swarm in {folder} predicts by parameters that its optimizer keeps: give the optimizer.")
    _check(folder, like, about, check)
    return checkpoint.named_leaves({".schedule.begin": np.zeros(about["members"], np.int32)} | store.arrays(), like)


def _about(store):
    """Return the metadata of the saved swarm in a folder; None if there is none."""
    try:
        return store and store.about()["swarm"]
    except (FileNotFoundError, KeyError, ValueError):  # nothing, a checkpoint of `fit`, files of another program
        return None


def _described(tree, name):
    """Return a tree with each array's type and shape as text; ValueError for a tree that JSON does not bring back."""
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {key: _described(part, name) for key, part in tree.items()}
    if type(tree) in (tuple, list):
        return [_described(part, name) for part in tree]
    if tree is None or hasattr(tree, "dtype"):
        return tree if tree is None else " ".join(map(str, (tree.dtype, *tree.shape)))
    kind = "a dict with other keys than text" if isinstance(tree, dict) else f"a {type(tree).__name__}"
    raise ValueError(
        f"The swarm's {name} holds {kind}, which no file brings back: make it a dict of names, or a tuple."
    )


def _specification(saved):
    """Return an array's shape and type, or those of a tree's parts, from the text that `save` wrote."""
    if isinstance(saved, str):
        dtype, *shape = saved.split()
        return jax.ShapeDtypeStruct(tuple(map(int, shape)), dtype)
    if isinstance(saved, dict):
        return freeze({name: _specification(part) for name, part in saved.items()})
    return saved and tuple(map(_specification, saved))


def _like(about, create, schedule):
    """Return shapes and types of the swarm that `about` describes, its members made by `create`."""
    several = schedule if isinstance(schedule, list | tuple | np.ndarray) else [schedule]
    functions = dict.fromkeys(SCHEDULES.get(one, one) for one in (about["schedules"] if schedule is None else several))

    def untrained(identity):
        state = create(identity)
        rates = learning_rates(state)
        if schedule is not None and not rates and state.tx is not INFERENCE_ONLY:
            raise ValueError("schedule= came, and the optimizer has no learning rate as data: leave it out.")
        if not functions or not rates:
            return state
        if None in functions:
            raise ValueError("The swarm follows a schedule of your own: give schedule=, as with_schedule was given it.")
        zero = jnp.int32(0)
        return state.replace(schedule=Schedule(zero, rates, zero, PLATEAU.init(rates), tuple(functions)))

    number = jax.ShapeDtypeStruct(tuple(about["members"]), np.int32)
    return jax.eval_shape(jax.vmap(untrained) if about["members"] else untrained, {"seed": number, "id": number})


def _facts(swarm):
    """Return {name: text} of the functions in a swarm and of its arrays, whose names begin with a dot."""
    facts = identity.identified(swarm, {})
    if unread := facts[identity.OPAQUE]:
        say_once(f"The {unread}, which cannot be read: whether a loaded swarm has the same one is not checked.")
    facts["model"] = facts["model"].replace(identity.called(swarm.apply_fn), model(swarm.apply_fn), 1)
    return facts | identity.types(swarm)


def _check(folder, like, about, check):
    """Raise ValueError for a swarm that is not the saved one; only log it if code differs and versions do too."""
    old, new = about["versions"], identity.versions()
    for name, other in identity.differences(*map(_any_number, (about["facts"], _facts(like)))).items():
        is_code = not name.startswith(".")
        if (is_code and not check) or (like.tx is INFERENCE_ONLY and name.startswith(FOR_TRAINING)):
            continue
        if not is_code or old == new:
            advice = without_x64(other) * (not is_code) or "give what it was saved with"
            advice += ", or check=False if both compute the same" * is_code
            if name == "optimizer":
                advice += "; numbers such as a learning rate stay those saved, and with_hyperparameters sets others"
            raise ValueError(f"The swarm in {folder} is another one: {other}; {advice}.")
        say_once(f"Whether the swarm in {folder} computes the same by now is unknown: {other}, from {old} to {new}.")


def _any_number(facts):
    """Drop the types of hyperparameters from facts: where the optimizer has an int, members may have a float."""
    return {name: fact[fact.index("[") :] if ".hyperparams[" in name else fact for name, fact in facts.items()}
