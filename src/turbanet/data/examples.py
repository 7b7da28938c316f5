"""Data that a swarm is trained and scored on: checked once, then read by index, one member at a time."""

from typing import Any

import jax
import numpy as np
from flax import struct

from turbanet.core.arrays import as_arrays
from turbanet.core.gather import ALIGNED_BYTES, taken
from turbanet.core.memory import free_memory
from turbanet.core.plan import Plan
from turbanet.core.state import State, check_swarm
from turbanet.data.sampling import check_rows, ragged


class Data(struct.PyTreeNode):
    """Examples of a swarm's members, and which of them each member sees.

    x, y: pytrees of leaves [row, ...] that all members share or [member, row, ...] that are each member's own.
    rows: int32 [member, row], the rows that a member sees, padded at the end with -1; None: all of them.
    count: int32 [member], how many of those are no padding; None without `rows`.
    is_own: for each leaf whether it leads with the member axis.
    length: the rows that a member sees, padding among them. ragged: whether there is any padding.
    """

    x: Any
    y: Any
    rows: Any
    count: Any
    is_own: tuple[bool, ...] = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)
    ragged: bool = struct.field(pytree_node=False)

    def read(self, index: Any = None) -> tuple[Any, Any]:
        """One member's (x, y) at `index` among the rows it sees; all of those for None."""
        if self.rows is not None:
            index = self.rows if index is None else self.rows[index]
        return (self.x, self.y) if index is None else jax.tree.map(lambda leaf: leaf[index], (self.x, self.y))


def prepare(
    swarm: State,
    x: Any,
    y: Any = None,
    *,
    rows: Any = None,
    per_member: Any = False,
    part: str = "",
    is_predicted: bool = False,
) -> Data:
    """Return x, y and rows, as `fit` takes them, as `Data`, checked against the swarm and one another.

    part : names the data in errors: "validation "; is_predicted : whether x is for `predict`, which takes rows of other
        shapes than the swarm's and keeps their padding
    """
    members = len(check_swarm(swarm))
    own_lists = isinstance(y, list) or (y is None and not isinstance(swarm.sample, list))
    if per_member in (True, (True, y is not None)) and isinstance(x, list) and own_lists:
        x, y, rows = one_a_member(x, [None] * len(x) if y is None else y, rows, members=members, part=part)
    examples = {name: as_arrays(tree, f"{part}{name}") for name, tree in (("x", x), ("y", y))}
    try:
        is_own = tuple(map(bool, jax.tree.leaves(jax.tree.broadcast(per_member, tuple(examples.values())))))
    except ValueError as error:
        advice = "each of them a bool, or a tree of bools like x or y"
        raise ValueError(f"per_member must be a bool or a pair (of x, of y), got {per_member}: {advice}.") from error
    lengths = set()
    for (path, leaf), own in zip(jax.tree.leaves_with_path(examples), is_own, strict=True):
        if own and leaf.shape[:1] != (members,):
            advice = "; a list, not a dict, has the rows of each" if isinstance(x, dict) else as_inputs(x)
            advice = advice or f", as np.broadcast_to(x, ({members}, *x.shape)) does" * bool(part)
            lead = f"per_member, it must lead with {members} members{advice}"
            raise ValueError(f"{part}{path[0].key} has shape {leaf.shape}; {lead}.")
        lengths.add(leaf.shape[own : own + 1])
    if not is_predicted and not any(is_own):
        _check_not_own(swarm, examples, part)
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        received = f"got {sorted(lengths)}{as_inputs(examples['x'])}"
        raise ValueError(f"{part}x and y must have the same number of rows, at least one; {received}.")
    (length,) = lengths.pop()
    if rows is None:
        return Data(**examples, rows=None, count=None, is_own=is_own, length=length, ragged=False)
    rows, count = check_rows(rows, members=members, length=length, name=f"{part}rows".replace(" ", "_"))
    rows = rows if is_predicted else rows[:, : count.max()]  # padding changes nothing but the width of predictions
    ragged = bool((count < rows.shape[1]).any())
    return Data(**examples, rows=rows, count=count, is_own=(*is_own, True, True), length=rows.shape[1], ragged=ragged)


def _check_not_own(swarm, examples, part):
    """Raise ValueError for x and y [member, row, ...] that would be read as one row for each member."""
    x, samples = jax.tree.leaves(examples["x"]), [leaf.shape for leaf in jax.tree.leaves(swarm.sample)]
    leads = {leaf.shape[:2] for leaf in jax.tree.leaves(examples)}
    lead = min(leads)
    read_as_one = [leaf.shape for leaf in x] == [(*lead, *shape[1:]) for shape in samples] and all(map(len, samples))
    if read_as_one and len(leads) == 1 and lead[:1] == (len(swarm),) != (1,):
        got = f"{part}x has shape {x[0].shape}, and a row of the swarm's has {samples[0][1:]}"
        raise ValueError(f"{got}: where each member has its own rows say per_member=True, else flatten two axes.")


def as_inputs(x: Any) -> str:
    """Return what to do with a list or a tuple x that was meant as rows, to end an error; "" for any other x."""
    if not isinstance(x, list | tuple) or hasattr(x, "_fields"):
        return ""
    given = f"; x is a {type(x).__name__} of {len(x)} arrays, one for each input of a model"
    return f"{given}: np.stack(x) makes rows of them, and with per_member=True lists x and y have an entry a member"


def one_a_member(x: list, y: list, rows: Any, *, members: int, part: str = "") -> tuple[Any, Any, Any]:
    """Pad lists of each member's own x and y, of different lengths, to arrays for `prepare`: -> (x, y, rows)."""
    names = f"{part}x and y"
    if rows is not None:
        advice = "leave out what they do not see"
        raise ValueError(f"{names} came as lists of each member's own rows, and rows too: {advice}.")
    if not x or {len(x), len(y)} != {members}:
        raise ValueError(f"{names} as lists have an entry for each of {members} members, got {len(x)} and {len(y)}.")
    each = [(as_arrays(one, f"{part}x"), as_arrays(other, f"{part}y")) for one, other in zip(x, y, strict=True)]
    lengths = [{leaf.shape[:1] for leaf in jax.tree.leaves(one)} for one in each]
    for member, found in enumerate(lengths):
        if len(found) != 1 or () in found or (0,) in found:
            received = f"member {member} has {sorted(found)}"
            raise ValueError(f"{names} must have the same number of rows, at least one; {received}.")
    counts = [length for ((length,),) in lengths]
    kinds = {jax.tree.structure(one) for one in each} | {tuple(_kinds(one)) for one in each}
    if len(kinds) > 2:
        raise ValueError(f"Members' x and y must be of one shape and type but for their rows, got {kinds}.")

    def filled(*leaves):
        padded = np.zeros((len(leaves), max(counts), *leaves[0].shape[1:]), leaves[0].dtype)
        for own, leaf in zip(padded, leaves, strict=True):
            own[: len(leaf)] = leaf
        return padded

    x, y = jax.tree.map(filled, *each)
    return x, y, None if len(set(counts)) == 1 else np.asarray(ragged(map(np.arange, counts)))


def _kinds(tree):
    return [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]


def pair(validation: Any) -> Any:
    """Return `validation` if it is the pair (x, y); ValueError for a share of the rows, a loader and others."""
    several = isinstance(validation, tuple | list)
    if not several or len(validation) != 2:
        received = f"{len(validation)} of them" if several else f"{type(validation).__name__} {validation!s:.40}"
        raise ValueError(f"validation must be the pair (x, y) of held-out rows, got {received}: split the data first.")
    return validation


def split(data: Any) -> tuple[Any, Any]:
    """Split a tuple of `Data` (or None) in two: each member's own leaves and shared ones, with None for the others."""
    leaves, tree = jax.tree.flatten(data)
    is_own = sum((each.is_own for each in data if each is not None), ())
    own = [leaf if is_it else None for leaf, is_it in zip(leaves, is_own, strict=True)]
    shared = [None if is_it else leaf for leaf, is_it in zip(leaves, is_own, strict=True)]
    return jax.tree.unflatten(tree, own), jax.tree.unflatten(tree, shared)


def join(own: Any, shared: Any) -> Any:
    """Join what `split` has split."""
    return jax.tree.map(lambda a, b: b if a is None else a, own, shared, is_leaf=lambda leaf: leaf is None)


def of_members(data: Any, positions: Any) -> Any:
    """Return the data of the members at `positions`: a slice, or int or bool [member]."""
    own, shared = split(data)
    return join(taken(own, positions), shared)


def targets(data: Data, position: int) -> Any:
    """Return y of the rows that the member at `position` sees, without padding, in the host's memory."""
    (one,) = of_members((data,), position)
    rows = slice(None) if one.rows is None else one.rows[: one.count]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], one.y)


def placed(data: Any, plan: Plan, rounds: list[range]) -> list:
    """Return each round's data on devices: a member's own where the member is, shared data once on each device.

    Raises MemoryError for data that the devices cannot hold. A CPU uses aligned arrays in place, also those on disk.
    """
    own, shared = split(data)
    devices: Any = plan.devices
    needed = _copied_bytes(own, plan) / len(devices) + _copied_bytes(shared, plan)
    needed *= 1 if plan.on_accelerator else len(devices)  # the cores of a CPU share a memory
    if needed > 0 and needed > (free := free_memory(devices)):
        room = f"x and y need {needed / 2**30:.3g} GiB of memory, and {free / 2**30:.3g} GiB are free"
        raise MemoryError(f"{room}: take fewer rows, or read them batch by batch with fit_batches.")
    shared = plan.share(shared)
    return [join(plan.place(own, round), shared) for round in rounds]


def _copied_bytes(tree, plan):
    """Return the bytes of a tree's host arrays that its devices need a copy of."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray)]
    if not plan.on_accelerator:
        leaves = [leaf for leaf in leaves if not (leaf.flags.c_contiguous and leaf.ctypes.data % ALIGNED_BYTES == 0)]
    return sum(leaf.nbytes for leaf in leaves)
