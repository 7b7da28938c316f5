"""Read arrays on disk chunk by chunk, in the order in which `fit` would read them in memory."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.data import batches
from turbanet.data.batches import Chunk
from turbanet.data.examples import Data
from turbanet.core.member import SHUFFLE, member_key
from turbanet.core.state import State
from turbanet.core.memory import memory
from turbanet.core.plan import ALIGNED_BYTES, Plan
from turbanet.data.sampling import epoch_order, own_order, own_steps

OF_TOTAL, OF_FREE = 1 / 8, 1 / 2  # of the devices' memory: arrays on disk that are smaller than both are copied into it


def is_streamed(data: Data, batch_size: int, plan: Plan) -> bool:
    """Return whether `fit` streams these data: they are on disk, and large for the devices' memory.

    A CPU reads aligned arrays in place, through the system's page cache: JAX does not copy them.
    """
    devices: Any = plan.devices
    on_cpu = devices[0].platform == "cpu"
    mapped = filter(_is_mapped, jax.tree.leaves((data.x, data.y)))
    size = sum(leaf.nbytes for leaf in mapped if not (on_cpu and _is_aligned(leaf)))
    if not size:
        return False
    total, free = memory(devices)
    is_much = size > min(OF_TOTAL * total, OF_FREE * free)
    return is_much and (batch_size < data.length or data.ragged)  # a step of all rows needs all in memory


class Mapped:
    """The rows of `data` in chunks: those that the members read in some steps of an epoch.

    swarm : the members; their epochs before this training count
    batch_size, shuffle, equal_steps : as `fit` takes them
    """

    def __init__(self, data: Data, swarm: State, *, batch_size: int, shuffle: bool, equal_steps: bool = False):
        self.data = data
        self.swarm = swarm
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.is_masked = data.ragged and not equal_steps
        self.steps = -(-data.length // batch_size)
        own = data.is_own[: len(jax.tree.leaves((data.x, data.y)))]
        leaves = zip(self._leaves(), own, strict=True)
        row_bytes = sum(leaf[0].nbytes // (len(leaf[0]) if is_own else 1) for leaf, is_own in leaves)
        most = batches.CHUNK_BYTES // max(row_bytes * batch_size * len(swarm), 1)
        self.chunk_steps = int(np.clip(most, 1, min(self.steps, batches.MOST_BATCHES)))
        self.own = own if not any(own) else (True,) * len(own)

    def chunks(self, epoch: int, first: Any = None) -> Iterator[Chunk]:
        """Yield the chunks of an epoch, from the step `first` on."""
        order = self._order(epoch)
        for begin in range(first or 0, self.steps, self.chunk_steps):
            rows = order[:, begin : begin + self.chunk_steps].reshape(len(order), -1)
            steps = rows.shape[1] // self.batch_size
            filled = np.pad(rows, ((0, 0), (0, self.chunk_steps * self.batch_size - rows.shape[1])), mode="edge")
            end = begin + steps
            data = self._read(filled)
            if self.is_masked:
                is_own = (*self.own, True, *data.is_own[len(self.own) :])
                data = data.replace(y=(data.y, self._mask(begin)), is_own=is_own)
            yield Chunk(data, self.batch_size, steps, end == self.steps, end, self.is_masked)

    def _leaves(self):
        return jax.tree.leaves((self.data.x, self.data.y))

    def _read(self, rows):
        """Return the data of these rows [member, row], in the order in which each member reads them."""
        tree = jax.tree.structure((self.data.x, self.data.y))
        if any(self.own):
            leaves = zip(self._leaves(), self.data.is_own, strict=False)
            x, y = jax.tree.unflatten(tree, [_gathered(leaf, rows, is_own) for leaf, is_own in leaves])
            return Data(x, y, None, None, self.own, rows.shape[1], False)
        needed, positions = np.unique(rows, return_inverse=True)  # in the order on disk
        size = min(self.data.length if self.data.rows is None else len(self._leaves()[0]), rows.size)
        filled = np.pad(needed, (0, size - len(needed)), mode="edge")
        x, y = jax.tree.unflatten(tree, [np.asarray(leaf[filled]) for leaf in self._leaves()])
        positions = positions.reshape(rows.shape).astype(np.int32)
        count = np.full(len(rows), rows.shape[1], np.int32)
        return Data(x, y, positions, count, (*self.own, True, True), rows.shape[1], False)

    def _mask(self, begin):
        """Return which rows of the chunk from step `begin` on count for a member, bool [member, row]."""
        count = np.asarray(self.data.count)[:, None, None]
        step, position = np.ogrid[begin : begin + self.chunk_steps, : self.batch_size]
        mask = (step < own_steps(count, self.batch_size)) & (position < count)
        return mask.reshape(len(count), -1)

    def _order(self, epoch):
        """Return the rows of each step, int32 [member, step, batch]."""
        data, swarm = self.data, self.swarm
        count = np.full(len(swarm), data.length, np.int32) if data.count is None else data.count
        settings = {"length": data.length, "batch_size": self.batch_size, "shuffle": self.shuffle}
        epochs = jnp.asarray(swarm.epoch) + epoch
        positions = np.asarray(_orders(swarm.seed, swarm.id, epochs, count, **settings, own=self.is_masked))
        if data.rows is None:
            return positions
        rows = np.asarray(data.rows)
        return np.take_along_axis(rows, positions.reshape(len(rows), -1), axis=1).reshape(positions.shape)


@partial(jax.jit, static_argnames=("length", "batch_size", "shuffle", "own"))
def _orders(seed, id, epoch, count, *, length, batch_size, shuffle, own):
    def of_member(member):
        seed, id, epoch, count = member
        key = jax.random.fold_in(member_key(seed, id, SHUFFLE), epoch) if shuffle else None
        return (own_order if own else epoch_order)(key, count, length=length, batch_size=batch_size)

    return jax.lax.map(of_member, (seed, id, epoch, count))  # one member at a time: sorting needs memory


def _gathered(leaf, rows, is_own):
    """Return the rows [member, row] of a leaf [row, ...], or [member, row, ...] if it is each member's own."""
    return np.stack([np.asarray((leaf[member] if is_own else leaf)[own]) for member, own in enumerate(rows)])


def _is_aligned(leaf):
    """Return whether JAX uses an array in place, without a copy."""
    return leaf.flags.c_contiguous and leaf.ctypes.data % ALIGNED_BYTES == 0


def _is_mapped(leaf):
    while leaf is not None and not isinstance(leaf, np.memmap):
        leaf = getattr(leaf, "base", None)
    return leaf is not None
