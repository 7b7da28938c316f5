"""Export a swarm's predictions as a program that holds the weights and runs without the model's code."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.errors import ScopeParamShapeError

from turbanet.core.arrays import as_arrays, check_whole, first_line, floating, without_x64
from turbanet.core.gather import resized
from turbanet.core.member import ROWS, predict
from turbanet.core.state import State, check_swarm
from turbanet.core.storage import place, save_file
from turbanet.ensembles.combine import ensemble_mean
from turbanet.ensembles.predictions import are_probabilities


def _probability(logits):
    if not hasattr(logits, "shape"):
        got = f"this model returns a {type(logits).__name__}"
        raise ValueError(f'"probability" is of one array of logits [row, class], {got}: take "mean" or "members".')
    return ensemble_mean(logits)


PLATFORMS = {"cpu", "cuda", "rocm", "tpu"}  # `jax.export` writes programs for any other name, which run nowhere
KINDS: dict[str, Any] = {  # functions of predictions [member, row, ...]
    "members": lambda predictions: predictions,
    "mean": partial(jax.tree.map, lambda leaf: leaf.mean(axis=0)),
    "probability": _probability,
}
FORECAST = "forecast"  # of a forecaster
POLICIES = "turbanet.networks.policies"  # whose types agents predict


@dataclass(frozen=True, repr=False)
class Exported:
    """An exported program: a function of x [row, ...], with any number of rows, that returns predictions.

    program: the `jax.export.Exported`, whose `serialize` gives the bytes that `save` writes.
    """

    program: jax.export.Exported

    def __repr__(self) -> str:
        rows = f"{self.rows} rows at a time" if self.rows else "any number of rows"
        return f"Exported {self.kind} of x {self.signature}, {rows}, for {', '.join(self.program.platforms)}"

    @property
    def kind(self) -> str:
        """The `kind` that was passed to `export`."""
        return self.program.fun_name

    @property
    def rows(self) -> int | None:
        """Rows that each call computes, the last call padded; None for a program of any number of rows."""
        length = self.program.in_avals[0].shape[0]
        return length if isinstance(length, int) else None

    @property
    def signature(self) -> Any:
        """Type and shape of x, such as "float32[row, 28, 28, 1]", or a tree of these where x is a tree."""
        (x,), _ = jax.tree.unflatten(self.program.in_tree, self.program.in_avals)
        return jax.tree.map(_of_rows, x)

    def __call__(self, x: Any) -> Any:
        """Return the prediction for x [row, ...]: [row, ...], or [member, row, ...] of the kind "members"."""
        x = as_arrays(x, "x")
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(x)}
        if jax.tree.map(_of_rows, x) != self.signature or len(lengths) != 1 or () in lengths or (0,) in lengths:
            got = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", x)
            advice = without_x64(str(self.signature)) or "convert it"
            raise ValueError(f"This program takes x as {self.signature}, at least one row, got {got}: {advice}.")
        (length,) = lengths.pop()
        size = self.rows or min(length, ROWS)
        chunks = (jax.tree.map(itemgetter(slice(start, start + size)), x) for start in range(0, length, size))
        outputs = [self.program.call(resized(chunk, size)) for chunk in chunks]
        axis = int(self.kind == "members")
        whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *outputs)
        return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, length, axis=axis), whole)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file that `load_exported` reads, atomically; its folder is made, and may be an address (s3://...).

        Raises ValueError for a folder in its place, and for x or predictions in types of your own, which a process
        without the model's code lacks.
        """
        try:
            content = bytes(self.program.serialize())
        except ValueError as error:  # of a named tuple
            advice = "let the model take and return arrays, dicts or tuples"
            raise ValueError(f"No file holds these x or predictions: {advice} ({first_line(error)}).") from error
        save_file(path, content, "a program")


def export(
    swarm: Any,
    *,
    kind: str | None = None,
    rows: int = 64,
    platforms: Sequence[str] | None = None,
    sample_input: Any = None,
) -> Exported:
    """Export what `predict` computes as StableHLO, for a process that has JAX and TurbaNet but not the model.

    The program holds the weights, and its file is as large as they are (148 MB for four VGG-11); JAX promises to read
    it for half a year. As in `predict`, running statistics are used and nothing is random.

    Parameters
    ----------
    swarm : TurbaTrainState, or a fitted estimator or `Forecaster`, whose scaling is in the program
    kind : "members" for each member's prediction [member, row, ...], "mean" for their mean [row, ...] (regression),
        "probability" for the mean probabilities [row, class] of logits, as `ensemble_mean`. Of a classifier None is
        "probability" (columns as `classes_`), and "members" are probabilities; of a regressor None is "mean", and
        both are in y's unit; a table's columns are taken in their order, not by `feature_names_in_`. A forecaster has
        one kind, "forecast": it maps a dict of "window" [row, time], the last values, and "series" int [row], positions
        in `series_`, to [row, step] in y's unit; NaN for unknown positions
    rows : rows that a call computes where their number must be fixed, as for most of our own networks, which choose
        layouts by it; fewer rows are padded, more are computed in chunks. `rows` of the result tells which it is
    platforms : some of "cpu", "cuda", "rocm" and "tpu"; None: the one of this process
    sample_input : a batch of the input [row, ...]; None: the one that the swarm was created with

    Returns
    -------
    Exported : call it with x, or `save` it for `load_exported`

    Raises
    ------
    ValueError : for an unknown kind or platform, a single network, an input that the model cannot take, a prediction
        without rows, an estimator that is not fitted, targets that float32 cannot tell apart; for a mean with a member
        whose weights are NaN, and for the "probability" of a model that ends in a softmax or returns several arrays

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
    check_whole(rows=rows)
    platforms = [platforms] if isinstance(platforms, str) else platforms
    if unknown := sorted({*(platforms or ())} - PLATFORMS):
        raise ValueError(f"platforms are of {', '.join(sorted(PLATFORMS))}; got {unknown[0]!r}.")
    of_fitted = getattr(swarm, "_to_export", None)  # of estimators and forecasters
    kind, program, sample = of_fitted(kind) if of_fitted else _of_swarm(swarm, kind)
    sample = sample if sample_input is None else as_arrays(sample_input, "sample_input")
    if sample is None:
        raise ValueError("The swarm does not know its input: give a batch of it as sample_input.")

    def of_length(length):
        x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((length, *leaf.shape[1:]), leaf.dtype), unfreeze(sample))
        return jax.export.export(jax.jit(program), platforms=platforms)(x)

    program.__name__ = kind  # which is in the file, and from which `Exported.kind` reads it
    try:
        built = of_length(*jax.export.symbolic_shape("rows"))
    except Exception:  # a model may raise anything for a symbolic number of rows
        try:
            built = of_length(rows)
        except ScopeParamShapeError as error:
            got = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(sample))
            raise ValueError(f"The model takes no rows of {got}: give a batch [row, ...] as sample_input.") from error
    axis = int(kind == "members")
    if any(leaf.shape[axis : axis + 1] != built.in_avals[0].shape[:1] for leaf in built.out_avals):
        raise ValueError(f"A prediction must have the rows of x; this one is {', '.join(map(str, built.out_avals))}.")
    if not of_fitted and kind == "probability" and _ends_in_softmax(swarm, sample):
        raise ValueError('The model ends in a softmax, and "probability" is of logits: "mean" is its outputs\' mean.')
    return Exported(built)


def load_exported(path: str | os.PathLike) -> Exported:
    """Read the program that `Exported.save` wrote; ValueError for another file, and for a folder."""
    file = place(path)
    if file.is_dir():
        raise ValueError(f"{path} is a folder: of a swarm that was saved there, take TurbaTrainState.load.")
    serialized = bytearray(file.read_bytes())
    if POLICIES.encode() in serialized:
        importlib.import_module(POLICIES)
    try:
        exported = Exported(jax.export.deserialize(serialized))
        if exported.kind not in (*KINDS, FORECAST):
            raise KeyError(exported.kind)
    except Exception as error:  # JAX may raise anything for a file of another kind
        raise ValueError(f"{path} holds no program of turbanet.export that this JAX reads: export it anew.") from error
    return exported


def _of_swarm(swarm, kind):
    """Return (kind, function of x, such an x) of a swarm."""
    if not isinstance(swarm, State):
        advice = "for a pipeline, pass its last step, which takes the transformed x; for a search, its best_estimator_"
        raise ValueError(f"export takes a swarm, an estimator or a forecaster, got {type(swarm).__name__}: {advice}.")
    if kind not in KINDS:
        raise ValueError(f"Of a swarm give kind={' or '.join(map(repr, KINDS))}; got {kind!r}.")
    check_swarm(swarm)
    for leaf in floating(swarm.params)[0] if kind != "members" else ():
        if diverged := np.flatnonzero(jnp.isnan(leaf).reshape(len(leaf), -1).any(axis=1)).tolist():
            raise ValueError(f"The members at positions {diverged} have weights that are NaN: leave them out.")
    return kind, lambda x: KINDS[kind](jax.vmap(predict, (0, None))(swarm, x)), swarm.sample


def _ends_in_softmax(swarm, sample):
    """Whether a swarm predicts probabilities of rows like a sample's, of random numbers or zeros."""

    def drawn(leaf):
        normal = jax.random.normal(jax.random.key(0), (16, *leaf.shape[1:]))
        return (normal * jnp.issubdtype(leaf.dtype, jnp.floating)).astype(leaf.dtype)

    return are_probabilities(jax.jit(jax.vmap(predict, (0, None)))(swarm, jax.tree.map(drawn, unfreeze(sample))))


def _of_rows(leaf):
    return f"{leaf.dtype}[{', '.join(['row', *map(str, leaf.shape[1:])])}]"
