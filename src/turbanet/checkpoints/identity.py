"""What tells one training or swarm from another: its functions, its arrays, the versions that it stands on, as text."""

import functools
import importlib
import sys
from typing import Any

import jax

from turbanet.core.fingerprint import fingerprint
from turbanet.core.state import State

FORMAT = 5
OPAQUE = "what cannot be compared"


def facts(swarm: State, program: Any, data: Any, metrics: dict) -> dict:
    """Return the identity of a training, {name: text}; it resumes only from a checkpoint with an equal one.

    program: a `program.Train`; data: a pytree of arrays; metrics: {name: metric} called on the host.
    """

    def digest(tree):
        return fingerprint(jax.tree.leaves(tree))[:16]

    of_metrics = {f"metric {name}": metric for name, metric in (*program.metrics, *metrics.items())}
    stopping = "never" if swarm._stopping is None else swarm._stopping.rule
    result = {"format": str(FORMAT), **versions()}
    result |= identified(swarm, {"loss": program.loss_fn, **of_metrics, **program.computed})
    result |= {"members": digest((swarm.seed, swarm.id)), "batch size": str(program.batch_size)}
    result |= {"shuffling": str(program.shuffle), "equal steps": str(program.equal_steps)}
    result |= {"stopping": stopping, **types(swarm, "state"), **types(data, "data")}
    return result | {"what the state holds": digest(swarm), "what the data hold": digest(data)}


def differences(saved: dict, current: dict) -> dict[str, str]:
    """Return {name: sentence with the old and new value} of the facts that differ from the saved ones."""
    names = sorted(current | saved, key=lambda name: name.startswith("what "))  # digests, which say least, come last
    both = {name: (saved.get(name, "not there"), current.get(name, "not there")) for name in names}
    return {name: f"{name} was {was} and is {now}" for name, (was, now) in both.items() if was != now}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a training depends on, {name: version}."""
    python = ".".join(map(str, sys.version_info[:2]))
    packages = "turbanet", "jax", "flax", "optax"
    return {"Python": python, **{name: importlib.import_module(name).__version__ for name in packages}}


def identified(swarm: State, others: dict) -> dict[str, str]:
    """Return {name: "its name fingerprint"} of the functions of a swarm and of `others` {name: object}.

    The entry OPAQUE lists what cannot be fingerprinted and so not be compared; "" if there is nothing.
    """
    schedules = {f"schedule {i}": function for i, function in enumerate(getattr(swarm.schedule, "functions", ()))}
    things = {"model": swarm.apply_fn, "optimizer": swarm.tx, **others, **schedules}
    fingerprints = {name: fingerprint(thing) for name, thing in things.items()}
    opaque = "; ".join(f"{name} holds {what}" for name, each in fingerprints.items() for what in each.opaque)
    digests = {name: "" if each.opaque else f" {each[:8]}" for name, each in fingerprints.items()}
    return {OPAQUE: opaque} | {name: f"{called(thing)}{digests[name]}" for name, thing in things.items()}


def called(thing: Any) -> str:
    """Return the name of a function, a model (given its `apply`) or an optimizer."""
    if isinstance(thing, functools.partial):
        return called(thing.func)
    if hasattr(thing, "update"):  # an Optax transformation: only the function that made it has a name
        return called(thing.update).partition(".")[0]
    thing = type(thing.__self__) if hasattr(thing, "__self__") else thing
    return getattr(thing, "__qualname__", type(thing).__name__).replace(".<locals>", "")


def types(tree: Any, name: str = "") -> dict[str, str]:
    """Return {path: "type[shape]"} of the leaves of a pytree; each path begins with `name`."""
    return {f"{name}{path}": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_by_name(tree).items()}


def leaves_by_name(tree: Any) -> dict:
    """Return the leaves of a pytree, {path: leaf}."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
