"""A swarm's predictions as a program of its own, with the weights inside: it runs without the model's code."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from flax.core import unfreeze
from flax.errors import ScopeParamShapeError

from turbanet.ensembles.combine import ensemble_mean
from turbanet.training.arrays import as_arrays, check_whole
from turbanet.training.member import Swarm, predict
from turbanet.training.plan import resized
from turbanet.training.program import ROWS

KINDS: dict[str, Any] = {  # what it makes of predictions [member, row, ...], and where that has the rows
    "members": (lambda predictions: predictions, 1),
    "mean": (partial(jax.tree.map, lambda leaf: leaf.mean(axis=0)), 0),
    "probability": (ensemble_mean, 0),
}


@dataclass(frozen=True, repr=False)
class Exported:
    """A program that `export` made: called with x [row, ...], any number of rows, it returns predictions.

    program: JAX's `jax.export.Exported`, whose `serialize` gives the bytes that `save` writes.
    """

    program: jax.export.Exported

    def __repr__(self) -> str:
        rows = f"{self.rows} rows at a time" if self.rows else "any number of rows"
        return f"Exported {self.kind} of x {self.signature}, {rows}, for {', '.join(self.program.platforms)}"

    @property
    def kind(self) -> str:
        """Of `export`'s."""
        return self.program.fun_name

    @property
    def rows(self) -> int | None:
        """How many rows each call computes, the last of them filled up; None where it computes as many as there are."""
        length = self.program.in_avals[0].shape[0]
        return length if isinstance(length, int) else None

    @property
    def signature(self) -> Any:
        """The type and shape of x, such as "float32[row, 28, 28, 1]", or the tree of those of its parts."""
        (x,), _ = jax.tree.unflatten(self.program.in_tree, self.program.in_avals)
        return jax.tree.map(_of_rows, x)

    def __call__(self, x: Any) -> Any:
        """The prediction for x [row, ...]: [row, ...], or [member, row, ...] of the kind "members"."""
        x = as_arrays(x, "x")
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(x)}
        if jax.tree.map(_of_rows, x) != self.signature or len(lengths) != 1 or () in lengths or (0,) in lengths:
            came = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", x)
            raise ValueError(f"This program takes x as {self.signature}, at least one row, got {came}: convert it.")
        (length,) = lengths.pop()
        size = self.rows or min(length, ROWS)
        parts = (jax.tree.map(itemgetter(slice(start, start + size)), x) for start in range(0, length, size))
        found = [self.program.call(resized(part, size)) for part in parts]
        _, axis = KINDS[self.kind]
        whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis), *found)
        return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, length, axis=axis), whole)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file that `load_exported` reads; it is there whole or not at all."""
        part = Path(f"{os.fspath(path)}.{os.getpid()}")
        part.write_bytes(self.program.serialize())
        part.replace(path)


def export(
    swarm: Swarm, *, kind: str, rows: int = 64, platforms: Sequence[str] | None = None, sample_input: Any = None
) -> Exported:
    """What `predict` computes, as StableHLO by `jax.export`: for a process that has JAX and TurbaNet, not the model.

    The weights are in it, so that a file of it is as large as they are (148 MB for four VGG-11); JAX promises to read
    it for half a year. Running statistics are used and nothing is random, as in `predict`.

    Parameters
    ----------
    swarm : TurbaTrainState
    kind : "members" for every member's prediction [member, row, ...], "mean" for their mean [row, ...], as regressors
        want it, "probability" for the mean of the probabilities of logits [row, class], as `ensemble_mean`
    rows : how many rows a call computes where their number must be fixed, as for most of our own networks, which choose
        layouts by it; fewer are filled up, more are taken in turn. `rows` of the result says which it is
    platforms : such as ("cpu", "cuda"); None: where this process computes
    sample_input : a batch of the input [row, ...]; None: as the swarm was made for

    Returns
    -------
    Exported : call it with x, or `save` it for `load_exported`

    Raises
    ------
    ValueError : for an unknown kind, one network, an input that the model cannot take, and a prediction without rows

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 3)), optax.adam(1e-3), swarm_size=5, input_size=4)
    >>> exported = tn.export(swarm, kind="probability")
    >>> exported.signature
    'float32[row, 4]'
    >>> exported(np.zeros((100, 4))).shape
    (100, 3)
    """
    if kind not in KINDS:
        raise ValueError(f"Unknown kind {kind!r}; known: {', '.join(KINDS)}.")
    if jnp.ndim(swarm.step) != 1:
        raise ValueError("export takes a swarm, this is one network: swarm[[id]] is a swarm of one.")
    check_whole(rows=rows)
    sample = swarm.sample if sample_input is None else as_arrays(sample_input, "sample_input")
    if sample is None:
        raise ValueError("The swarm does not know its input: give a batch of it as sample_input.")

    combine, axis = KINDS[kind]

    def program(x):
        return combine(jax.vmap(lambda state: predict(state, x))(swarm))

    def of_length(length):
        x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((length, *leaf.shape[1:]), leaf.dtype), unfreeze(sample))
        return jax.export.export(jax.jit(program), platforms=platforms)(x)

    program.__name__ = kind  # by which a loaded one knows it
    try:
        found = of_length(*jax.export.symbolic_shape("rows"))
    except Exception:  # whatever a model does with a number that is none
        try:
            found = of_length(rows)
        except ScopeParamShapeError as error:
            came = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(sample))
            raise ValueError(f"The model takes no rows of {came}: give a batch [row, ...] as sample_input.") from error
    if any(leaf.shape[axis : axis + 1] != found.in_avals[0].shape[:1] for leaf in found.out_avals):
        raise ValueError(f"A prediction must have the rows of x; this one is {', '.join(map(str, found.out_avals))}.")
    return Exported(found)


def load_exported(path: str | os.PathLike) -> Exported:
    """The program that `Exported.save` wrote; ValueError for another file."""
    held = bytearray(Path(path).read_bytes())
    try:
        exported = Exported(jax.export.deserialize(held))
        if exported.kind not in KINDS:
            raise KeyError(exported.kind)
    except Exception as error:  # in what is no program JAX may find anything
        raise ValueError(f"{path} holds no program of turbanet.export that this JAX reads: export it anew.") from error
    return exported


def _of_rows(leaf):
    return f"{leaf.dtype}[{', '.join(['row', *map(str, leaf.shape[1:])])}]"
