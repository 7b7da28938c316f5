"""A training kept on disk after each segment, with Orbax, and taken up again where it was."""

import dataclasses
import functools
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from turbanet.training.arrays import check_whole, is_key
from turbanet.training.fingerprint import as_numbers, fingerprint
from turbanet.training.member import Swarm
from turbanet.training.plan import say_once
from turbanet.training.program import Train

FORMAT = 3
OPAQUE = "what cannot be compared"


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where `fit` keeps a training, after each `every` segments, and how many of the last ones it keeps.

    A `fit` that is called again with the same swarm, data, loss and metric and a folder that holds a training goes on
    from there; "the same" is by value (see `fingerprint`), so they may have been built anew. With others it is refused,
    so each training has a folder of its own.
    """

    folder: str | os.PathLike
    keep: int = 2
    every: int = 1

    def __post_init__(self):
        check_whole(keep=self.keep, every=self.every)


def facts(swarm: Swarm, program: Train, data: Any, metrics: dict) -> dict:
    """What a training is, {name: text}; one that differs in any of it does not go on from a checkpoint.

    program: a `program.Train`; data: a pytree of arrays; metrics: {name: metric} called beside the program. Under
    OPAQUE is what cannot be compared, "" if all can.
    """

    def digest(tree):
        return fingerprint(jax.tree.leaves(tree))[:16]

    schedules = () if swarm.schedule is None else swarm.schedule.functions
    computed = {"model": swarm.apply_fn, "optimizer": swarm.tx, "loss": program.loss_fn}
    computed |= {f"metric {name}": metric for name, metric in (*program.metrics, *metrics.items())}
    computed |= {f"schedule {i}": function for i, function in enumerate(schedules)}
    identities, unread = identified(computed)
    stopping = "never" if swarm.stopping is None else f"{swarm.stopping.patience}, {swarm.stopping.min_delta}"
    found = {"format": str(FORMAT), **versions(), OPAQUE: unread, **identities}
    found |= {"members": digest((swarm.seed, swarm.id)), "batch size": str(program.batch_size)}
    found |= {"shuffling": str(program.shuffle), "stopping": stopping}
    for name, tree in (("state", swarm), ("data", data)):
        found |= {f"{name}{path}": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_by_name(tree).items()}
    return found | {"what the state holds": digest(swarm), "what the data hold": digest(data)}


def versions() -> dict[str, str]:
    """{name: version} of what a training computes with."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"Python": python, **{name: version(name) for name in ("turbanet", "jax", "flax", "optax")}}


def identified(things: dict) -> tuple[dict[str, str], str]:
    """({name: what a thing is called, and its fingerprint}, what of the things cannot be read, "" if all can)."""
    prints = {name: fingerprint(thing) for name, thing in things.items()}
    unread = "; ".join(f"{name} holds {what}" for name, each in prints.items() for what in each.opaque)
    digests = {name: "" if each.opaque else each[:8] for name, each in prints.items()}
    return {name: f"{called(thing)} {digests[name]}".strip() for name, thing in things.items()}, unread


def called(thing: Any) -> str:
    """What a function, a model (by its `apply`) or an optimizer is called."""
    if isinstance(thing, functools.partial):
        return called(thing.func)
    if hasattr(thing, "update"):  # of Optax: only what made it has a name
        return called(thing.update).partition(".")[0]
    thing = type(thing.__self__) if hasattr(thing, "__self__") else thing
    return getattr(thing, "__qualname__", type(thing).__name__).replace(".<locals>", "")


class Keeper:
    """The checkpoints of one training in a folder."""

    def __init__(self, checkpoints, known):
        self.where = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        self.folder = Path(self.where.folder).resolve()
        self.facts = known
        self.segments = 0
        self.manager, self.args = opened(self.folder, self.where.keep, what="Checkpoints")

    def latest(self) -> tuple[dict, dict] | None:
        """The last checkpoint, ({name: array}, {name: value}), or None; ValueError if it is of another training."""
        step = self.manager.latest_step()
        if step is None:
            if self.facts[OPAQUE]:
                say_once(f"The {self.facts[OPAQUE]}, which cannot be read: this training is kept, but not resumed.")
            return None
        parts = self.args.Composite(about=self.args.JsonRestore(), arrays=self.args.StandardRestore())
        kept = self.manager.restore(step, args=parts)
        said = kept.about["facts"]
        if unread := self.facts[OPAQUE] or said.get(OPAQUE):
            other = f"This training cannot be compared with the one that was kept in {self.folder}"
            raise ValueError(f"{other}: the {unread}, which cannot be read; leave it out, and begin in another folder.")
        for name in self.facts | said:
            old, new = said.get(name, "not there"), self.facts.get(name, "not there")
            if old != new:
                other = f"The checkpoint in {self.folder} is of another training: {name} was {old} and is {new}"
                raise ValueError(f"{other}; name another folder, or remove this one.")
        return kept.arrays, kept.about["progress"]

    def save(self, done: int, arrays: dict, progress: dict) -> None:
        """Keep {name: array} and what JSON can hold after `done` epochs; whole or not at all."""
        self.segments += 1
        if self.segments % self.where.every:
            return
        about = self.args.JsonSave({"facts": self.facts, "progress": progress})
        numbers = self.args.StandardSave({name: as_numbers(array) for name, array in arrays.items()})
        try:
            self.manager.save(done, args=self.args.Composite(arrays=numbers, about=about), force=True)
        except (OSError, ValueError) as error:
            failed = f"The checkpoint of epoch {done} could not be written to {self.folder} ({error})"
            raise OSError(f"{failed}; the ones before are whole, and the same call goes on from the last.") from error


def opened(folder: Path, keep: int | None, *, what: str) -> tuple[Any, Any]:
    """(Orbax's manager of a folder, its arguments), to keep the last `keep` of `what` in it; None only reads."""
    import orbax.checkpoint as ocp

    how = {"max_to_keep": keep, "enable_async_checkpointing": False, "cleanup_tmp_directories": keep is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**how)), ocp.args
    except OSError as error:
        raise OSError(f"{what} cannot be kept in {folder} ({error}): name another folder.") from error


def leaves_by_name(tree: Any) -> dict:
    """{path: leaf} of a pytree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def named_leaves(arrays: dict, like: Any) -> Any:
    """The pytree `like` with the leaves of {path: leaf}; where it has random keys, the leaf's numbers become keys."""

    def impl(old):  # of keys that may be known by type alone
        return jax.random.key_impl(jax.numpy.empty((), old.dtype))

    def named(path, old):
        leaf = jax.numpy.asarray(arrays[jax.tree_util.keystr(path)])
        return jax.random.wrap_key_data(leaf, impl=impl(old)) if is_key(old) else leaf

    return jax.tree_util.tree_map_with_path(named, like)
