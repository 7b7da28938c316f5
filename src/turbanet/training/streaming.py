"""A training on batches that come from an iterator: chunk by chunk, each epoch once through them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from turbanet.training.batches import Ahead, Batches, Chunk
from turbanet.training.checkpoint import types
from turbanet.training.data import of_members, placed
from turbanet.training.member import Swarm
from turbanet.training.memmap import Mapped
from turbanet.training.parts import Part, underway
from turbanet.training.plan import say_once
from turbanet.training.run import Training
from turbanet.training.sample_weight import only


@dataclasses.dataclass(frozen=True)
class Passing(Part):
    """Some `steps` of an epoch of one member, over the batches that its data begin with, one after the other.

    is_masked : whether y comes as (y, bool [row]), which says of each row whether the member sees it; a batch of which
        it sees none is no step of it, of one of which it sees a part the loss is told where this is `masked`
    """

    is_masked: bool = False

    def _begin(self, state, data):
        return None

    def _batch(self, way, number, data):
        index = number * self.batch_size + jnp.arange(self.batch_size)
        if not self.is_masked:
            return data.read(index), None, None
        y, seen = data.y
        batch, seen = data.replace(y=y).read(index), seen[index]
        return (only(seen, batch), seen, seen.any()) if self.masked else (batch, None, seen.any())

    def begun(self, swarm: Swarm, length: int = 0) -> Swarm:
        """The swarm as it enters the first batch of an epoch."""
        return swarm.replace(underway=underway(len(swarm)))


class Streaming(Training):
    """A training whose data come as `batches`, and are looked at by check(chunk) before they are trained on.

    batches : an iterator's, or those of arrays on disk
    known : the data that they are of, by which checkpoints know the training; None where they are not compared
    """

    def __init__(
        self,
        program: Passing,
        swarm: Swarm,
        batches: Batches | Mapped,
        held_out: Any,
        *,
        check: Callable[[Chunk], None] = lambda chunk: None,
        known: Any = None,
        **how: Any,
    ):
        self.batches = batches
        self.check = check
        self.taken = 0  # steps, of the whole training
        self.where = None  # the iterator is, after the last chunk; None where it cannot say
        self.ahead: Ahead | None = None
        self.chunk: Chunk | None = None  # that is trained on
        self.kind: Any = None  # of the chunk that the program was compiled for
        self.known = (known, held_out)
        super().__init__(program, swarm, (None, held_out), **how)

    def compile(self) -> None:
        """Nothing: what compiles depends on the batches."""

    @property
    def progress(self) -> float:
        """The epochs done: how long one is, nobody knows."""
        return self.done

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self.ahead:
            self.ahead.close()

    def _cut(self):
        self.start = self.program.begun(self.start)

    def _place(self, state):
        super()._place(state)
        self.held_out = [of_round[1] for of_round in self.placed]
        if self.chunk:  # blocks are halved while it waits
            self._place_chunk(self.chunk)

    def _place_chunk(self, chunk):
        """Put a chunk where the states are, beside the held-out data."""
        data = of_members((chunk.data,), self.training) if any(chunk.data.is_own) else (chunk.data,)
        parts = placed(data, self.current, self._rounds())
        self.placed = [(part, held_out) for (part,), held_out in zip(parts, self.held_out, strict=True)]

    def _train(self, most):
        chunk = self.chunk = self.chunk or self._next()
        self.program = dataclasses.replace(self.program, batch_size=chunk.batch_size, is_masked=chunk.is_masked)
        if (kind := (self.program, str(types(chunk.data)))) != self.kind:
            self.kind, self.ready = kind, None
        self._place_chunk(chunk)
        self._made_ready()
        seen = self._call(chunk.steps, {"steps": chunk.steps, "starts": self.place == 0, "ends": chunk.ends})
        if seen is None:
            return self._train(most)
        self.chunk = None
        self.place += chunk.steps
        self.taken += chunk.steps
        self.where = chunk.state
        if self.keeper and chunk.state is None:
            kind = type(getattr(self.batches, "given", None)).__name__
            say_once(
                f"{kind} cannot say where it is: checkpoints are of whole epochs, and a new one begins as it begins."
            )
        if chunk.ends:
            self._saw(seen, 1)

    def _next(self):
        if self.ahead is None:
            self.ahead = Ahead(self._chunks)
        return self.ahead.take(self.interrupted)

    def _chunks(self, wait):
        """The chunks from here to the end; of the next epoch none is taken where this one may be the last."""
        where = self.where if self.place else None
        for epoch in range(self.done, self.epochs):
            if self.start.stopping is not None:
                wait(lambda epoch=epoch: self.done >= epoch)
            number = self.place if where else 0
            for chunk in self.batches.chunks(epoch, where):
                try:
                    self.check(chunk)
                except ValueError as error:
                    there = f"In epoch {epoch}, among batches {number} to {number + chunk.steps - 1}"
                    raise ValueError(f"{there}: {error}") from error
                yield chunk
                number += chunk.steps
            where = None

    def _number(self):
        return self.taken

    def _elsewhere(self):
        return {"taken": self.taken, "where": self.where if self.place else None}

    def _keep(self, *, anyway=False):
        if self.place and self.where is None:  # an iterator that cannot say where it is goes on from whole epochs alone
            return
        super()._keep(anyway=anyway)

    def _resume(self, arrays, progress, *, given):
        self.taken, self.where = progress["taken"], progress["where"]
        super()._resume(arrays, progress, given=given)
