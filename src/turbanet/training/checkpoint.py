"""A training kept on disk after each segment, with Orbax, and taken up again where it was."""

import dataclasses
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where `fit` keeps a training, after each `every` segments, and how many of the last ones it keeps.

    A `fit` that is called again with the same swarm and data and a folder that holds a training goes on from there;
    with others it is refused, so each training has a folder of its own.
    """

    folder: str | os.PathLike
    keep: int = 2
    every: int = 1

    def __post_init__(self):
        for name in ("keep", "every"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}.")


def facts(swarm, program, data) -> dict:
    """What a training is, {name: text}; one that differs in any of it does not go on from a checkpoint."""

    def shapes(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}

    def digest(tree):
        whole = hashlib.sha256()
        for leaf in jax.tree.leaves(tree):
            whole.update(np.ascontiguousarray(leaf))
        return whole.hexdigest()[:16]

    model = getattr(swarm.apply_fn, "__self__", None)
    names = np.stack([np.asarray(swarm.seed), np.asarray(swarm.id)])
    return {
        "format": str(FORMAT),
        "turbanet": version("turbanet"),
        "model": type(model).__name__ if model is not None else getattr(swarm.apply_fn, "__qualname__", "?"),
        "loss": getattr(program.loss_fn, "__qualname__", repr(program.loss_fn)),
        "members": digest(names),
        "batch size": str(program.batch_size),
        "shuffling": str(program.shuffle),
        "metric": getattr(program.metric, "__qualname__", repr(program.metric)),
        "stopping": "never" if swarm.stopping is None else f"{swarm.stopping.patience}, {swarm.stopping.min_delta}",
        **{f"state{path}": shape for path, shape in shapes(swarm).items()},
        **{f"data{path}": shape for path, shape in shapes(data).items()},
        "what the state holds": digest(swarm),
        "what the data hold": digest(data),
    }


class Keeper:
    """The checkpoints of one training in a folder."""

    def __init__(self, checkpoints, known):
        import orbax.checkpoint as ocp

        self.where = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        self.folder, self.facts, self.args, self.segments = Path(self.where.folder).resolve(), known, ocp.args, 0
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.where.keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise OSError(f"Checkpoints cannot be kept in {self.folder} ({error}): name another folder.") from error

    def latest(self):
        """The last checkpoint, ({name: array}, {name: value}), or None; ValueError if it is of another training."""
        step = self.manager.latest_step()
        if step is None:
            return None
        said = self.manager.restore(step, args=self.args.Composite(about=self.args.JsonRestore()))["about"]
        for name in dict.fromkeys([*self.facts, *said["facts"]]):
            old, new = said["facts"].get(name, "not there"), self.facts.get(name, "not there")
            if old != new:
                raise ValueError(
                    f"The checkpoint in {self.folder} is of another training: {name} was {old} and is {new}; "
                    "name another folder, or remove this program."
                )
        like = {name: np.zeros(shape, dtype) for name, (shape, dtype) in said["arrays"].items()}
        arrays = self.args.Composite(arrays=self.args.StandardRestore(like))
        return self.manager.restore(step, args=arrays)["arrays"], said["progress"]

    def save(self, done, arrays, progress):
        """Keep {name: array} and what JSON can hold after `done` epochs; whole or not at all."""
        self.segments += 1
        if self.segments % self.where.every:
            return
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        shapes = {name: [list(array.shape), array.dtype.name] for name, array in arrays.items()}
        about = {"facts": self.facts, "arrays": shapes, "progress": progress}
        try:
            saved = self.args.Composite(arrays=self.args.StandardSave(arrays), about=self.args.JsonSave(about))
            self.manager.save(done, args=saved, force=True)
        except (OSError, ValueError) as error:
            raise OSError(
                f"The checkpoint of epoch {done} could not be written to {self.folder} ({error}); the ones before are "
                "whole, and the same call goes on from the last."
            ) from error

    def close(self):
        self.manager.close()


def leaves_by_name(tree) -> dict:
    """{path: leaf} of a pytree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def named_leaves(arrays, like):
    """The pytree `like` with the leaves of {path: leaf}."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
    return jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(arrays[path]) for path in paths])
