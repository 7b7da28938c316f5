"""Arrays on disk, read chunk by chunk as `fit` would read them in memory: each member its own rows in its own order."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.training import batches
from turbanet.training.batches import Chunk
from turbanet.training.data import Data
from turbanet.training.member import SHUFFLE, Swarm, member_key
from turbanet.training.memory import memory
from turbanet.training.plan import ALIGNED_BYTES, Plan
from turbanet.training.sampling import epoch_order, own_order, own_steps

OF_TOTAL, OF_FREE = 1 / 8, 1 / 2  # of the devices' memory: what lies on disk and is smaller than both is copied into it


def is_streamed(data: Data, batch_size: int, plan: Plan) -> bool:
    """Whether `fit` is to read these data as it goes: they lie on disk, and are much for the devices' memory.

    A CPU reads most arrays where they lie, through the system's cache of files: JAX copies nothing of what is aligned.
    """
    devices: Any = plan.devices
    on_cpu = devices[0].platform == "cpu"
    mapped = filter(_is_mapped, jax.tree.leaves((data.x, data.y)))
    size = sum(leaf.nbytes for leaf in mapped if not (on_cpu and _is_aligned(leaf)))
    if not size:
        return False
    total, free = memory(devices)
    is_much = size > min(OF_TOTAL * total, OF_FREE * free)
    return is_much and (batch_size < data.length or data.ragged)  # a step of all rows needs them all


class Mapped:
    """The rows of `data` in chunks: what the members of a swarm read in some steps of an epoch.

    swarm : the members, whose epochs so far count
    batch_size, shuffle, equal_steps : as `fit` takes them
    """

    def __init__(self, data: Data, swarm: Swarm, *, batch_size: int, shuffle: bool, equal_steps: bool = False):
        self.data = data
        self.swarm = swarm
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.is_masked = data.ragged and not equal_steps
        self.steps = -(-data.length // batch_size)
        own = data.is_own[: len(jax.tree.leaves((data.x, data.y)))]
        row = sum(leaf[0].nbytes // (len(leaf[0]) if its else 1) for leaf, its in zip(self._leaves(), own, strict=True))
        most = batches.CHUNK_BYTES // max(row * batch_size * len(swarm), 1)
        self.room = int(np.clip(most, 1, min(self.steps, batches.MOST_BATCHES)))  # steps of a chunk
        self.own = own if not any(own) else (True,) * len(own)

    def chunks(self, epoch: int, where: Any = None) -> Iterator[Chunk]:
        """The chunks of an epoch, from the step that `where` names."""
        order = self._order(epoch)
        for begin in range(where or 0, self.steps, self.room):
            some = order[:, begin : begin + self.room].reshape(len(order), -1)
            steps = some.shape[1] // self.batch_size
            filled = np.pad(some, ((0, 0), (0, self.room * self.batch_size - some.shape[1])), mode="edge")
            end = begin + steps
            data = self._read(filled)
            if self.is_masked:
                is_own = (*self.own, True, *data.is_own[len(self.own) :])
                data = data.replace(y=(data.y, self._seen(begin)), is_own=is_own)
            yield Chunk(data, self.batch_size, steps, end == self.steps, end, self.is_masked)

    def _leaves(self):
        return jax.tree.leaves((self.data.x, self.data.y))

    def _read(self, rows):
        """The data of these rows [member, row], which each member reads from first to last."""
        tree = jax.tree.structure((self.data.x, self.data.y))
        if any(self.own):
            was = self.data.is_own
            each = [_gathered(leaf, rows, its) for leaf, its in zip(self._leaves(), was, strict=False)]
            x, y = jax.tree.unflatten(tree, each)
            return Data(x, y, None, None, self.own, rows.shape[1], False)
        needed, there = np.unique(rows, return_inverse=True)  # in the order in which they lie on disk
        room = min(self.data.length if self.data.rows is None else len(self._leaves()[0]), rows.size)
        filled = np.pad(needed, (0, room - len(needed)), mode="edge")
        x, y = jax.tree.unflatten(tree, [np.asarray(leaf[filled]) for leaf in self._leaves()])
        there = there.reshape(rows.shape).astype(np.int32)
        count = np.full(len(rows), rows.shape[1], np.int32)
        return Data(x, y, there, count, (*self.own, True, True), rows.shape[1], False)

    def _seen(self, begin):
        """Which rows of a chunk's batches are the members' own steps', bool [member, row]: from the step `begin` on."""
        count = np.asarray(self.data.count)[:, None, None]
        step, place = np.ogrid[begin : begin + self.room, : self.batch_size]
        seen = (step < own_steps(count, self.batch_size)) & (place < count)
        return seen.reshape(len(count), -1)

    def _order(self, epoch):
        """The rows of each step, int32 [member, step, batch]."""
        data, swarm = self.data, self.swarm
        count = np.full(len(swarm), data.length, np.int32) if data.count is None else data.count
        how = {"length": data.length, "batch_size": self.batch_size, "shuffle": self.shuffle, "own": self.is_masked}
        places = np.asarray(_orders(swarm.seed, swarm.id, jnp.asarray(swarm.epoch) + epoch, count, **how))
        if data.rows is None:
            return places
        rows = np.asarray(data.rows)
        return np.take_along_axis(rows, places.reshape(len(rows), -1), axis=1).reshape(places.shape)


@partial(jax.jit, static_argnames=("length", "batch_size", "shuffle", "own"))
def _orders(seed, id, epoch, count, *, length, batch_size, shuffle, own):
    def of_member(member):
        seed, id, epoch, count = member
        key = jax.random.fold_in(member_key(seed, id, SHUFFLE), epoch) if shuffle else None
        return (own_order if own else epoch_order)(key, count, length=length, batch_size=batch_size)

    return jax.lax.map(of_member, (seed, id, epoch, count))  # one after the other: sorting takes room


def _gathered(leaf, rows, is_own):
    """Rows [member, row] of a leaf [row, ...], or [member, row, ...] where it is each member's own."""
    return np.stack([np.asarray((leaf[member] if is_own else leaf)[own]) for member, own in enumerate(rows)])


def _is_aligned(leaf):
    """Whether JAX takes over an array where it lies."""
    return leaf.flags.c_contiguous and leaf.ctypes.data % ALIGNED_BYTES == 0


def _is_mapped(leaf):
    while leaf is not None and not isinstance(leaf, np.memmap):
        leaf = getattr(leaf, "base", None)
    return leaf is not None
