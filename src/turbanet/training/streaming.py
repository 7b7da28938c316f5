"""Training on batches from an iterator, chunk by chunk."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.checkpoints.checkpoint import types
from turbanet.core.plan import say_once
from turbanet.core.state import Swarm
from turbanet.data.batches import Ahead, Batches, Chunk
from turbanet.data.examples import of_members, placed
from turbanet.data.memmap import Mapped
from turbanet.training.parts import Part, underway
from turbanet.training.run import Training
from turbanet.training.sample_weight import only


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
    """A training on `batches`, each chunk of which is checked by check(chunk) first.

    batches : of an iterator, or of arrays on disk
    identity : the data that checkpoints are compared by; None: they are not compared
    """

    def __init__(
        self,
        program: Passing,
        swarm: Swarm,
        batches: Batches | Mapped,
        held_out: Any,
        *,
        check: Callable[[Chunk], None] = lambda chunk: None,
        identity: Any = None,
        **settings: Any,
    ):
        self.batches = batches
        self.check = check
        self.total_steps = 0  # done, of the whole training
        self.iterator_state = None  # after the last chunk; None if the iterator has none
        self.next_epoch = 0  # that a chunk has been requested of
        self.ahead: Ahead | None = None
        self.chunk: Chunk | None = None  # being trained on
        self.kind: Any = None  # of the chunk that the program was compiled for
        self.identity = (identity, held_out)
        super().__init__(program, swarm, (None, held_out), **settings)

    def compile(self) -> None:
        """Do nothing: the program depends on the batches."""

    @property
    def progress(self) -> float:
        """The epochs done, in whole epochs: their length is unknown."""
        return self.done

    def close(self) -> None:
        """Stop the thread that reads ahead."""
        if self.ahead:
            self.ahead.close()

    def _cut(self):
        self.start = self.program.begun(self.start)

    def _place(self, state):
        super()._place(state)
        self.held_out = [of_round[1] for of_round in self.placed]
        if self.chunk:  # blocks were halved before it was trained on
            self._place_chunk(self.chunk)

    def _place_chunk(self, chunk):
        """Put a chunk on the devices of the states, beside the held-out data."""
        data = of_members((chunk.data,), self.training) if any(chunk.data.is_own) else (chunk.data,)
        of_rounds = placed(data, self.current, self._rounds())
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
        self.total_steps += chunk.steps
        self.iterator_state = chunk.state
        if self.keeper and chunk.state is None:
            kind = type(getattr(self.batches, "source", None)).__name__
            say_once(
                f"{kind} cannot say where it is: checkpoints are of whole epochs, and a new one begins as it begins."
            )
        if chunk.ends:
            self._record(recorded, 1)

    def _skip(self):
        """Record an epoch of a segment without reading it: all members have stopped."""
        self.losses.append(jax.tree.map(lambda leaf: np.full_like(leaf[-1:], np.nan), self.losses[-1]))
        self.done += 1

    def _next(self):
        self.next_epoch = self.done
        if self.ahead is None:
            self.ahead = Ahead(self._chunks)
        return self.ahead.take(self.interrupted)

    def _chunks(self, wait):
        """Yield the chunks from here to the end; do not read the next epoch while this one may be the last."""
        state = self.iterator_state if self.steps_done else None
        for epoch in range(self.done, self.epochs):
            if self.start._stopping is not None:
                wait(lambda epoch=epoch: self.next_epoch >= epoch)
            number = self.steps_done if state else 0
            for chunk in self.batches.chunks(epoch, state):
                try:
                    self.check(chunk)
                except ValueError as error:
                    position = f"In epoch {epoch}, among batches {number} to {number + chunk.steps - 1}"
                    raise ValueError(f"{position}: {error}") from error
                yield chunk
                number += chunk.steps
            state = None

    def _checkpoint_number(self):
        return self.total_steps

    def _more_progress(self):
        return {"taken": self.total_steps, "where": self.iterator_state if self.steps_done else None}

    def _save(self, *, is_due=False):
        if self.steps_done and self.iterator_state is None:  # without its state only whole epochs can be resumed
            return
        super()._save(is_due=is_due)

    def _resume(self, arrays, progress, *, is_given):
        self.total_steps, self.iterator_state = progress["taken"], progress["where"]
        super()._resume(arrays, progress, is_given=is_given)
