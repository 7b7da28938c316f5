"""Members of a [member, ...] tree: taken, filled up, gathered, on the host by NumPy and elsewhere where they lie."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core.arrays import is_key

ALIGNED_BYTES = 64  # JAX uses arrays in place that begin at a multiple of it


def resized(tree: Any, members: int, begin: int = 0) -> Any:
    """Return `members` members of a [member, ...] tree from `begin` on, filled up with copies of the last one.

    NumPy resizes arrays on the host, as it has nothing to compile.
    """
    if all(map(is_on_host, jax.tree.leaves(tree))):
        return _resized(gathered(tree), members, begin, xp=np)
    whole = begin == 0 and all(len(leaf) == members for leaf in jax.tree.leaves(tree))
    return tree if whole else _resized_on_devices(tree, members, begin)


def _resized(tree, members, begin, xp=jnp):
    def resize(leaf):
        leaf = leaf[begin : begin + members]
        extra = members - len(leaf)
        return xp.concatenate([leaf, xp.repeat(leaf[-1:], extra, axis=0)]) if extra > 0 else leaf

    return jax.tree.map(resize, tree)


_resized_on_devices = jax.jit(_resized, static_argnums=(1, 2))


def gathered(*rounds: Any, members: int | None = None) -> Any:
    """Return the trees of several rounds as one, of the first `members` or of all.

    Arrays on the host become NumPy arrays, which are then moved in one piece.
    """
    if all(map(is_on_host, jax.tree.leaves(rounds))):
        return jax.tree.map(partial(_joined, members), *rounds)
    tree = _concatenated(*rounds) if rounds[1:] else rounds[0]
    return tree if members is None else resized(tree, members)


@jax.jit
def _concatenated(*rounds):
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rounds)


def _joined(members, *parts):
    """Concatenate leaves; those of several rounds or devices in aligned memory, which JAX uses without a copy.

    The states of 429 MB take .11 s a call and not .31.
    """
    first = parts[0]
    if len(parts) == 1 and (not isinstance(first, jax.Array) or len(first.devices()) == 1):
        return np.asarray(first)[:members]
    shape = (len(parts) * len(first) if members is None else members, *first.shape[1:])
    size = math.prod(shape) * first.dtype.itemsize
    buffer = np.empty(size + ALIGNED_BYTES, np.uint8)
    begin = -buffer.ctypes.data % ALIGNED_BYTES
    whole = buffer[begin : begin + size].view(first.dtype).reshape(shape)
    for number, part in enumerate(parts):
        of_round = whole[number * len(first) : (number + 1) * len(first)]
        for shard in part.addressable_shards:
            target = of_round[shard.index]
            target[...] = np.asarray(shard.data)[: len(target)]
    return whole


def taken(tree: Any, positions: Any) -> Any:
    """Return the members of a [member, ...] tree at these positions: int or bool [member], or a slice.

    Leaves stay on their devices. On the host NumPy is faster than XLA: it copies whole rows.
    """
    leaves, structure = jax.tree.flatten(tree)
    on_devices = [leaf for leaf in leaves if not is_on_host(leaf)]
    if on_devices:
        selected = iter(_taken_on_devices(on_devices, np.arange(len(on_devices[0]))[positions]))
    out = [np.asarray(leaf)[positions] if is_on_host(leaf) else next(selected) for leaf in leaves]
    return jax.tree.unflatten(structure, out)


@jax.jit
def _taken_on_devices(leaves, positions):
    return [leaf[positions] for leaf in leaves]


def home(leaf: jax.Array | np.ndarray) -> Any:
    """Return the sharding of an array; for a NumPy array, the one that JAX would give it."""
    return leaf.sharding if isinstance(leaf, jax.Array) else jnp.zeros(0).sharding


def is_on_host(leaf: Any) -> bool:
    """Return whether NumPy can read an array in place."""
    return not isinstance(leaf, jax.Array) or (not is_key(leaf) and all(d.platform == "cpu" for d in leaf.devices()))
