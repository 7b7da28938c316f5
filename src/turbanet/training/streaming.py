"""Training on batches from an iterator, chunk by chunk."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.checkpoints.identity import types
from turbanet.core.state import Swarm
from turbanet.data.batches import Ahead, Batches, Chunk
from turbanet.data.examples import of_members, placed
from turbanet.data.sample_weight import only
from turbanet.training.parts import Part, underway
from turbanet.training.run import Training


@dataclasses.dataclass(frozen=True)
class Passing(Part):
    """Train one member for some `steps` of an epoch, over the first batches of its data in their order.

    is_masked : whether y is (y, bool [row]), with True for the rows that the member sees. A batch of which it sees no
        row is no step; the loss gets the mask of a batch if `masked`
    """

    is_masked: bool = False

    def _begin(self, state, data):
        return None

    def _batch(self, progress, number, data):
        index = number * self.batch_size + jnp.arange(self.batch_size)
        if not self.is_masked:
            return data.read(index), None, None
        y, mask = data.y
        batch, mask = data.replace(y=y).read(index), mask[index]
        return (only(mask, batch), mask, mask.any()) if self.masked else (batch, None, mask.any())

    def begun(self, swarm: Swarm, length: int = 0) -> Swarm:
        """Return the swarm before the first batch of an epoch."""
        return swarm.replace(_underway=underway(len(swarm)))


class Streaming(Training):
    """A training on batches from an iterator."""

    def __init__(self, program: Passing, swarm: Swarm, batches: Batches, held_out: Any, **settings: Any):
        self.batches = batches
        self.ahead: Ahead | None = None
        self.chunk: Chunk | None = None  # being trained on
        self.kind: Any = None  # of the chunk that the program was compiled for
        super().__init__(program, swarm, (None, held_out), **settings)

    @property
    def progress(self) -> float:
        """The epochs done, in whole epochs: their length is unknown."""
        return self.done

    def close(self) -> None:
        """Stop the thread that reads ahead."""
        if self.ahead:
            self.ahead.close()
            self.ahead = None

    def _cut(self):
        self.start = self.program.begun(self.start)

    def _place(self, state):
        super()._place(state)
        self.held_out = [of_round[1] for of_round in self.placed]
        if self.chunk:  # blocks were halved before it was trained on
            self._place_chunk(self.chunk)

    def _place_chunk(self, chunk):
        """Put a chunk on the devices of the states, beside the held-out data."""
        of_rounds = placed(of_members((chunk.data,), self.training), self.current, self._rounds())
        self.placed = [(of_round, held_out) for (of_round,), held_out in zip(of_rounds, self.held_out, strict=True)]

    def _train(self, most):
        if self.start._stopping is not None and not self.steps_done and not self._active().any():
            return self._skip()
        chunk = self.chunk = self.chunk or self._next()
        self.program = dataclasses.replace(self.program, batch_size=chunk.batch_size, is_masked=chunk.is_masked)
        if (kind := (self.program, str(types(chunk.data)))) != self.kind:
            self.kind, self.ready = kind, None
        self._place_chunk(chunk)
        self._compiled_program()
        extent = {"steps": chunk.steps, "starts": self.steps_done == 0, "ends": chunk.ends}
        recorded = self._call(chunk.steps, extent)
        if recorded is None:
            return self._train(most)
        self.chunk = None
        self.steps_done += chunk.steps
        if chunk.ends:
            self._record(recorded, 1)

    def _skip(self):
        """Record an epoch of a segment without reading it: all members have stopped."""
        self.losses.append(jax.tree.map(lambda leaf: np.full_like(leaf[-1:], np.nan), self.losses[-1]))
        self.done += 1

    def _next(self):
        """Return the next chunk; where members may stop, a thread reads ahead within an epoch alone."""
        may_stop = self.start._stopping is not None
        if may_stop and self.steps_done == 0:
            self.close()
        if self.ahead is None:
            epochs = range(self.done, self.done + 1 if may_stop else self.epochs)
            self.ahead = Ahead(chunk for epoch in epochs for chunk in self.batches.chunks(epoch))
        return self.ahead.take(self.interrupted)

    def _checkpoint_number(self):
        return self.done

    def _save(self, *, is_due=False):
        if self.steps_done == 0:  # only whole epochs can be resumed
            super()._save(is_due=is_due)
