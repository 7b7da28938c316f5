"""What a swarm is trained and scored on: checked once, then read by index, one member at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from turbanet.training.arrays import as_arrays
from turbanet.training.member import Swarm
from turbanet.training.plan import Plan
from turbanet.training.sampling import check_rows


class Data(struct.PyTreeNode):
    """Examples of a swarm's members, and which of them each member sees.

    x, y: pytrees of leaves [row, ...] that all members share or [member, row, ...] that are each member's own.
    rows: int32 [member, row], the rows that a member sees, padded at the end with -1; None: all of them.
    count: int32 [member], how many of those are no padding; None without `rows`.
    is_own: for each leaf of (x, y) whether it leads with the member axis.
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
        examples = self.x, self.y
        return examples if index is None else jax.tree.map(lambda leaf: leaf[index], examples)

    def _only(self, own: bool):
        leaves, tree = jax.tree.flatten((self.x, self.y))
        kept = [leaf if is_own == own else None for leaf, is_own in zip(leaves, self.is_own, strict=True)]
        x, y = jax.tree.unflatten(tree, kept)
        return self.replace(x=x, y=y) if own else self.replace(x=x, y=y, rows=None, count=None)


def prepare(swarm: Swarm, x: Any, y: Any = None, *, rows: Any = None, per_member: Any = False) -> Data:
    """x, y and rows as `fit` takes them, checked against the swarm and one another."""
    if jnp.ndim(swarm.step) != 1:
        raise ValueError("A swarm leads with a member axis; this is one network: make it one by TurbaTrainState.swarm.")
    members = len(swarm)
    examples = {"x": as_arrays(x, "x"), "y": as_arrays(y, "y")}
    said = per_member if isinstance(per_member, tuple) else (per_member, per_member)
    is_own = []
    lengths = set()
    for (name, tree), flags in zip(examples.items(), said, strict=True):
        for leaf, own in zip(jax.tree.leaves(tree), jax.tree.leaves(jax.tree.broadcast(flags, tree)), strict=True):
            if own and leaf.shape[:1] != (members,):
                raise ValueError(f"{name} has shape {leaf.shape}; per_member, it must lead with {members} members.")
            is_own.append(bool(own))
            lengths.add(leaf.shape[own : own + 1])
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        raise ValueError(f"x and y must have the same number of rows, at least one; got {sorted(lengths)}.")
    (length,) = lengths.pop()
    count = None
    ragged = False
    if rows is not None:
        rows, count = check_rows(rows, members=members, length=length)
        length = rows.shape[1]
        ragged = bool((count < length).any())
    return Data(**examples, rows=rows, count=count, is_own=tuple(is_own), length=length, ragged=ragged)


def split(data: Any) -> tuple[Any, Any]:
    """A tree of `Data` in two, what is each member's own and what all share; None stands for the other's leaves."""

    def only(own):
        return jax.tree.map(lambda each: each._only(own), data, is_leaf=lambda node: isinstance(node, Data))

    return only(True), only(False)


def join(own: Any, shared: Any) -> Any:
    """What `split` made two of."""
    return jax.tree.map(lambda a, b: b if a is None else a, own, shared, is_leaf=lambda leaf: leaf is None)


def of_members(data: Any, positions: Any) -> Any:
    """The data of the members at these positions, a slice or int [member]."""
    own, shared = split(data)
    return join(jax.tree.map(lambda leaf: np.asarray(leaf)[positions], own), shared)


def placed(data: Any, plan: Plan) -> Any:
    """The data where `plan` puts them: each member's with the member, what is shared once on each device."""
    own, shared = split(data)
    return join(plan.place(own), plan.share(shared))
