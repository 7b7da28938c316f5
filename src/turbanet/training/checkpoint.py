"""A training kept on disk after each segment, with Orbax, and taken up again where it was."""

import dataclasses
import functools
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from turbanet.training.arrays import check_whole, first_line, is_key
from turbanet.training.fingerprint import as_numbers, fingerprint
from turbanet.training.member import Swarm
from turbanet.training.plan import say_once
from turbanet.training.program import Train
from turbanet.training.storage import Mirror, is_address, place

FORMAT = 4
LOCK = ".lock"
OPAQUE = "what cannot be compared"


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where `fit` keeps a training, after each `every` segments, and how many of the last ones it keeps.

    With a `share`, those after the first are left out that would bring the writing above this share of the training's
    seconds: what dies costs a little more of them, what does not die runs faster.

    Another process that keeps a training in the same folder meanwhile is refused, unless `exclusive` is False, as where
    a file system keeps the locks of machines that are gone.

    `folder` is a path, or an address such as s3://bucket/run (by fsspec, which needs s3fs for that one).

    A `fit` that is called again with the same swarm, data, loss and metric and a folder that holds a training goes on
    from there; "the same" is by value (see `fingerprint`), so they may have been built anew. With others it is refused,
    so each training has a folder of its own.
    """

    folder: str | os.PathLike
    keep: int = 2
    every: int = 1
    share: float | None = None
    exclusive: bool = True

    def __post_init__(self):
        check_whole(keep=self.keep, every=self.every)
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share is of a training's seconds, above 0 and at most 1; got {self.share!r}.")


def facts(swarm: Swarm, program: Train, data: Any, metrics: dict) -> dict:
    """What a training is, {name: text}; one that differs in any of it does not go on from a checkpoint.

    program: a `program.Train`; data: a pytree of arrays; metrics: {name: metric} called beside the program.
    """

    def digest(tree):
        return fingerprint(jax.tree.leaves(tree))[:16]

    of_metrics = {f"metric {name}": metric for name, metric in (*program.metrics, *metrics.items())}
    stopping = "never" if swarm.stopping is None else swarm.stopping.rule
    found = {
        "format": str(FORMAT),
        **versions(),
        **identified(swarm, {"loss": program.loss_fn, **of_metrics, **program.computed}),
    }
    found |= {"members": digest((swarm.seed, swarm.id)), "batch size": str(program.batch_size)}
    found |= {"shuffling": str(program.shuffle), "equal steps": str(program.equal_steps)}
    found |= {"stopping": stopping, **types(swarm, "state"), **types(data, "data")}
    return found | {"what the state holds": digest(swarm), "what the data hold": digest(data)}


def differences(kept: dict, here: dict) -> dict[str, str]:
    """{name: what it was and is} of the facts that are not what they were when they were kept."""
    names = sorted(here | kept, key=lambda name: name.startswith("what "))  # at last, what only a digest tells
    both = {name: (kept.get(name, "not there"), here.get(name, "not there")) for name in names}
    return {name: f"{name} was {was} and is {now}" for name, (was, now) in both.items() if was != now}


def versions() -> dict[str, str]:
    """{name: version} of what a training computes with."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"Python": python, **{name: _version(name) for name in ("turbanet", "jax", "flax", "optax")}}


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from a folder on the path, without having been installed
        return "not installed"


def identified(swarm: Swarm, others: dict) -> dict[str, str]:
    """{name: what it is called, and its fingerprint} of what a swarm, and of `others` {name: thing}, computes with.

    Under OPAQUE is what of it cannot be read and so not be compared, "" if all can.
    """
    schedules = {f"schedule {i}": function for i, function in enumerate(getattr(swarm.schedule, "functions", ()))}
    things = {"model": swarm.apply_fn, "optimizer": swarm.tx, **others, **schedules}
    prints = {name: fingerprint(thing) for name, thing in things.items()}
    unread = "; ".join(f"{name} holds {what}" for name, each in prints.items() for what in each.opaque)
    digests = {name: "" if each.opaque else f" {each[:8]}" for name, each in prints.items()}
    return {OPAQUE: unread} | {name: f"{called(thing)}{digests[name]}" for name, thing in things.items()}


def called(thing: Any) -> str:
    """What a function, a model (by its `apply`) or an optimizer is called."""
    if isinstance(thing, functools.partial):
        return called(thing.func)
    if hasattr(thing, "update"):  # of Optax: only what made it has a name
        return called(thing.update).partition(".")[0]
    thing = type(thing.__self__) if hasattr(thing, "__self__") else thing
    return getattr(thing, "__qualname__", type(thing).__name__).replace(".<locals>", "")


class Folder:
    """A folder that keeps, with Orbax, arrays and what JSON can hold beside them: each time whole, or not at all."""

    def __init__(self, folder: str | os.PathLike, most: int | None, *, what: str):
        """Open it, to keep `what` there, the last `most` times; None only reads. An address is kept in step."""
        import orbax.checkpoint as ocp

        self.args = ocp.args
        how = {"max_to_keep": most, "enable_async_checkpointing": False, "cleanup_tmp_directories": most is not None}
        try:
            self.mirror = Mirror(folder) if is_address(folder) else None
            self.there = self.mirror.there if self.mirror else place(folder)
            here = self.mirror.here if self.mirror else self.there
            here.mkdir(parents=True, exist_ok=True)
            self.manager = ocp.CheckpointManager(here, options=ocp.CheckpointManagerOptions(**how))
        except OSError as error:
            raise OSError(f"{what} cannot be kept in {folder} ({first_line(error)}): name another folder.") from error

    def close(self) -> None:
        """Wait until all is written, and let others have the folder."""
        self.manager.close()

    def about(self) -> dict:
        """What was last kept beside the arrays; FileNotFoundError if nothing was."""
        return self.manager.restore(None, args=self.args.Composite(about=self.args.JsonRestore())).about

    def arrays(self) -> dict:
        """The arrays that were last kept, {name: array}."""
        return self.manager.restore(None, args=self.args.Composite(arrays=self.args.StandardRestore())).arrays

    def write(self, number: int, arrays: dict, about: dict, *, what: str, advice: str) -> None:
        """Keep {name: array} and what JSON can hold under a number above the last one's; OSError if that fails."""
        numbers = self.args.StandardSave({name: as_numbers(array) for name, array in arrays.items()})
        try:
            parts = self.args.Composite(arrays=numbers, about=self.args.JsonSave(about))
            self.manager.save(number, args=parts, force=True)
            if self.mirror:
                self.mirror.send(number)
        except (OSError, ValueError) as error:
            raise OSError(f"{what} could not be written to {self.there} ({first_line(error)}): {advice}.") from error


class Keeper(Folder):
    """The checkpoints of one training in a folder."""

    def __init__(self, checkpoints, known):
        self.where = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        super().__init__(self.where.folder, self.where.keep, what="Checkpoints")
        self.facts = known
        self.lock = _locked(self.there) if self.where.exclusive and not self.mirror else None
        self.segments = 0
        self.begin = time.monotonic()
        self.wrote = []  # seconds of each checkpoint

    def close(self) -> None:
        super().close()
        if self.lock:
            self.lock.close()

    def latest(self) -> tuple[dict, dict] | None:
        """The last checkpoint, ({name: array}, {name: value}), or None; ValueError if it is of another training."""
        if self.manager.latest_step() is None:
            if self.facts[OPAQUE]:
                say_once(f"The {self.facts[OPAQUE]}, which cannot be read: this training is kept, but not resumed.")
            return None
        about = self._read(self.about)
        if "facts" not in about:
            came = "a swarm that swarm.save wrote" if "swarm" in about else "what fit did not write"
            raise ValueError(f"{self.there} holds {came}: checkpoints have a folder of their own, name another one.")
        if unread := self.facts[OPAQUE] or about["facts"].get(OPAQUE):
            other = f"This training cannot be compared with the one that was kept in {self.there}"
            raise ValueError(f"{other}: the {unread}, which cannot be read; leave it out, and begin in another folder.")
        for other in differences(about["facts"], self.facts).values():
            came = f"The checkpoint in {self.there} is of another training: {other}"
            raise ValueError(f"{came}; name another folder, or remove this one.")
        return self._read(self.arrays), about["progress"]

    def _read(self, read):
        """What is kept, by about or arrays; ValueError where it is nothing that they can read."""
        try:
            return read()
        except Exception as error:  # Orbax raises many kinds, for what it did not write and for what is not whole
            came = f"What lies in {self.there} cannot be read as a checkpoint ({first_line(error)})"
            raise ValueError(f"{came}: name another folder, or remove this one.") from error

    def save(self, done: int, arrays: dict, progress: dict) -> None:
        """Keep {name: array} and what JSON can hold after `done` epochs; whole or not at all."""
        what = f"The checkpoint of epoch {done}"
        advice = "the ones before are whole, and the same call goes on from the last"
        begin = time.monotonic()
        self.write(done, arrays, {"facts": self.facts, "progress": progress}, what=what, advice=advice)
        self.wrote.append(time.monotonic() - begin)

    def is_due(self) -> bool:
        """Whether a segment that has ended is to be kept."""
        self.segments += 1
        if self.segments % self.where.every:
            return False
        if self.where.share is None:
            return True
        another = sum(self.wrote) + max(self.wrote[-1:], default=0)
        return another <= self.where.share * (time.monotonic() - self.begin)


def _locked(folder):
    """A file in the folder, open as long as no other process may keep a training there."""
    try:
        import fcntl
    except ImportError:  # on Windows
        return None
    file = (folder / LOCK).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        came = f"Another process keeps a training in {folder} now"
        raise ValueError(f"{came}: wait until it has ended, or name another folder.") from None
    except OSError:  # a file system without locks
        pass
    return file


def leaves_by_name(tree: Any) -> dict:
    """{path: leaf} of a pytree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def types(tree: Any, name: str = "") -> dict[str, str]:
    """{path: type and shape} of the leaves of a pytree of this name."""
    return {f"{name}{path}": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_by_name(tree).items()}


def named_leaves(arrays: dict, like: Any) -> Any:
    """The pytree `like` with the leaves of {path: leaf}; where it has random keys, the leaf's numbers become keys."""

    def named(path, old):
        leaf = jax.numpy.asarray(arrays[jax.tree_util.keystr(path)])
        known = jax.numpy.empty((), old.dtype)  # as `old` may be known by its type alone
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(known)) if is_key(old) else leaf

    return jax.tree_util.tree_map_with_path(named, like)
