"""Save a training with Orbax after each segment, and resume it."""

import dataclasses
import os
import time
import weakref
from typing import Any

import jax

from turbanet.checkpoints.identity import OPAQUE, differences
from turbanet.core.arrays import check_whole, first_line
from turbanet.core.fingerprint import as_numbers, from_numbers
from turbanet.core.plan import say_once
from turbanet.core.storage import Mirror, is_address, place

LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where and how often `fit` saves checkpoints: every `every` segments, the last `keep` of them.

    With a `share`, a checkpoint after the first is skipped if it would bring the writing above this share of the
    training's seconds: a training that dies loses a little more, any other one runs faster.

    A second training that saves to the same folder at the same time is refused, unless `exclusive` is False, for file
    systems that keep the locks of machines that are gone.

    `folder` is a path, or an address such as s3://bucket/run (opened with fsspec, which needs s3fs for this one).

    A `fit` called again with the same swarm, data, loss and metric and with the folder of a training resumes it. "The
    same" is by value (see `fingerprint`), so these may be new objects. Another training is refused: each needs a folder
    of its own.
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


class Folder:
    """A folder of Orbax checkpoints, each of arrays and a JSON value and each written completely or not at all."""

    def __init__(self, folder: str | os.PathLike, keep: int | None, *, what: str, exclusive: bool = False):
        """Open the folder for the last `keep` checkpoints of `what`; None only reads. An address is mirrored.

        exclusive : whether nobody else may open the folder so until it is closed
        """
        import orbax.checkpoint as ocp

        if jax.process_count() > 1:  # Orbax has them wait for one another, and the first alone write
            problem = f"{what} cannot be kept by one of the {jax.process_count()} processes of jax.distributed"
            raise ValueError(f"{problem}: leave jax.distributed out, as each process trains members of its own.")
        self.args = ocp.args
        self.unlock: Any = None
        kwargs = {"max_to_keep": keep, "enable_async_checkpointing": False, "cleanup_tmp_directories": keep is not None}
        try:
            self.mirror = Mirror(folder) if is_address(folder) else None
            self.there = self.mirror.there if self.mirror else place(folder)
            here = self.mirror.here if self.mirror else self.there
            here.mkdir(parents=True, exist_ok=True)
            # Before Orbax removes what is half written, which another process may be writing.
            if exclusive and not self.mirror and (lock := _locked(here)) is not None:
                self.unlock = weakref.finalize(self, _unlocked, lock)  # also where nobody closes it
            self.manager = ocp.CheckpointManager(here, options=ocp.CheckpointManagerOptions(**kwargs))
        except OSError as error:
            if self.unlock:
                self.unlock()
            raise OSError(f"{what} cannot be kept in {folder} ({first_line(error)}): name another folder.") from error

    def close(self) -> None:
        """Wait until everything is written, and release the folder."""
        self.manager.close()
        if self.unlock:
            self.unlock()

    def about(self) -> dict:
        """Return the JSON value of the last checkpoint; FileNotFoundError without one."""
        return self.manager.restore(None, args=self.args.Composite(about=self.args.JsonRestore())).about

    def arrays(self) -> dict:
        """Return the arrays of the last checkpoint, {name: array}."""
        return self.manager.restore(None, args=self.args.Composite(arrays=self.args.StandardRestore())).arrays

    def write(self, number: int, arrays: dict, about: dict, *, what: str, advice: str) -> None:
        """Save {name: array} and a JSON value under a number above the last one; OSError if that fails."""
        numbers = self.args.StandardSave({name: as_numbers(array) for name, array in arrays.items()})
        try:
            items = self.args.Composite(arrays=numbers, about=self.args.JsonSave(about))
            self.manager.save(number, args=items, force=True)
            if self.mirror:
                self.mirror.send(number)
        except (OSError, ValueError) as error:
            raise OSError(f"{what} could not be written to {self.there} ({first_line(error)}): {advice}.") from error


class Keeper(Folder):
    """The checkpoints of one training in a folder."""

    def __init__(self, checkpoints, facts):
        self.settings = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        folder, keep, exclusive = (getattr(self.settings, name) for name in ("folder", "keep", "exclusive"))
        super().__init__(folder, keep, what="Checkpoints", exclusive=exclusive)
        self.facts = facts
        self.segments = 0
        self.begin = time.monotonic()
        self.seconds = []  # of writing each checkpoint

    def latest(self) -> tuple[dict, dict] | None:
        """Return the last checkpoint, ({name: array}, {name: value}), or None; ValueError for another training's."""
        if self.manager.latest_step() is None:
            if self.facts[OPAQUE]:
                say_once(f"The {self.facts[OPAQUE]}, which cannot be read: this training is kept, but not resumed.")
            return None
        about = self._read(self.about)
        if "facts" not in about:
            content = "a swarm that swarm.save wrote" if "swarm" in about else "what fit did not write"
            raise ValueError(f"{self.there} holds {content}: checkpoints have a folder of their own, name another one.")
        if opaque := self.facts[OPAQUE] or about["facts"].get(OPAQUE):
            message = f"This training cannot be compared with the one that was kept in {self.there}: the {opaque}"
            raise ValueError(f"{message}, which cannot be read; leave it out, and begin in another folder.")
        for difference in differences(about["facts"], self.facts).values():
            message = f"The checkpoint in {self.there} is of another training: {difference}"
            raise ValueError(f"{message}; name another folder, or remove this one.")
        return self._read(self.arrays), about["progress"]

    def _read(self, read):
        """Return `read()`, which is `about` or `arrays`; ValueError if the folder holds no checkpoint."""
        try:
            return read()
        except Exception as error:  # Orbax raises many types, for foreign and for incomplete files
            message = f"What lies in {self.there} cannot be read as a checkpoint ({first_line(error)})"
            raise ValueError(f"{message}: name another folder, or remove this one.") from error

    def save(self, done: int, arrays: dict, progress: dict) -> None:
        """Save {name: array} and a JSON value after `done` epochs."""
        what = f"The checkpoint of epoch {done}"
        advice = "the ones before are whole, and the same call goes on from the last"
        begin = time.monotonic()
        self.write(done, arrays, {"facts": self.facts, "progress": progress}, what=what, advice=advice)
        self.seconds.append(time.monotonic() - begin)

    def is_due(self) -> bool:
        """Count a segment that has ended, and return whether to save it."""
        self.segments += 1
        if self.segments % self.settings.every:
            return False
        if self.settings.share is None:
            return True
        with_another = sum(self.seconds) + max(self.seconds[-1:], default=0)
        return with_another <= self.settings.share * (time.monotonic() - self.begin)


def _locked(folder):
    """Lock a folder, and return the lock's file descriptor; None on Windows.

    The lock is of the open file: it also keeps out another training of this process.
    """
    try:
        import fcntl
    except ImportError:  # on Windows
        return None
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        message = f"Another training or process writes to {folder} now"
        raise ValueError(f"{message}: wait until it has ended, or name another folder.") from None
    except OSError:  # a file system without locks
        pass
    return file


def _unlocked(file):
    """Unlock and close a lock's file, which forked processes may hold open as well."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def named_leaves(arrays: dict, like: Any) -> Any:
    """Return the pytree `like` with the leaves of {path: leaf}; leaves of random keys are made from their numbers."""
    return jax.tree_util.tree_map_with_path(
        lambda path, old: from_numbers(arrays[jax.tree_util.keystr(path)], old), like
    )
