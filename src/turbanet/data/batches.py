"""Chunks of batches from an iterator, read ahead by a thread; one call of a program trains on one chunk."""

import contextlib
import itertools
import operator
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from turbanet.core.arrays import as_arrays
from turbanet.core.interrupt import GivenUpError
from turbanet.data.examples import Data

CHUNK_BYTES = 64 * 2**20  # of a chunk, about
MOST_BATCHES = 256  # of a chunk
AHEAD = 2  # chunks in the queue
POLL_SECONDS = 0.1  # between two checks whether the other side has given up
ONCE = "builtins", "itertools", "torch.utils.data.dataloader"  # modules whose iterators do not start again
JOIN_SECONDS = 1.0  # to wait for the thread to end its last read


class Chunk(NamedTuple):
    """Consecutive batches of an epoch.

    data : x, y [row, ...] of all batches, padded to the rows of a full chunk; with `is_masked`, y is
        (y, bool [member, row]), True for the rows that a member sees
    batch_size : rows of a batch
    steps : number of batches
    ends : whether the last batch is the last one of the epoch
    """

    data: Data
    batch_size: int
    steps: int
    ends: bool

    @property
    def is_masked(self) -> bool:
        """Whether y is a pair with a mask."""
        return any(self.data.is_own)

    def trained_on(self) -> Data:
        """Return the rows that at least one member sees, each at its place, without the mask."""
        x, y = self.data.x, self.data.y
        length = self.steps * self.batch_size
        rows: Any = slice(length)
        if self.is_masked:
            y, mask = y
            seen = mask[:, :length].any(axis=0)
            length *= bool(seen.any())
            rows = np.where(seen, np.arange(len(seen)), seen.argmax())[:length]  # others are the first of them again
        x, y = jax.tree.map(lambda leaf: leaf[rows], (x, y))
        return Data(x, y, None, None, (False,) * len(jax.tree.leaves((x, y))), length, False)


class Batches:
    """The batches of `fit_batches`, iterated over once an epoch.

    source : an iterable that starts again with each `iter`, such as a DataLoader; or source(epoch) -> such an iterable
    members : number of members of the swarm
    epochs : how often they are read
    check : check(chunk) raises ValueError for a chunk that cannot be trained on
    """

    def __init__(self, source: Any, members: int, epochs: int, check: Callable[[Chunk], None]):
        if not callable(source) and not hasattr(source, "__iter__"):
            valid = "an iterable of batches (x, y), such as a DataLoader, or a function of the epoch that returns one"
            raise ValueError(f"batches must be {valid}; got {source!r:.60}.")
        _check_ends(source)
        if epochs > 1 and isinstance(source, Iterator) and type(source).__module__ in ONCE:
            problem = f"batches of type {type(source).__name__} can be read once, and there are {epochs} epochs"
            raise ValueError(f"{problem}; give a function of the epoch that returns a new one.")
        self.source = source
        self.members = members
        self.check = check
        self.capacities: dict[Any, int] = {}  # batches of a full chunk, by their shapes

    def chunks(self, epoch: int) -> Iterator[Chunk]:
        """Yield the chunks of an epoch; ValueError for what are no batches."""
        batches = self._batches(epoch)
        first = next(batches, None)
        if first is None:
            advice = "what ends for good, as a generator does, must be a function of the epoch that returns a new one"
            raise ValueError(f"There was no batch in epoch {epoch}: {advice}.")
        number = 0
        while first is not None:
            group, following, shapes = [first], next(batches, None), _shapes(first)
            capacity = self._capacity(first)
            while following is not None and len(group) < capacity and _shapes(following) == shapes:
                group.append(following)
                following = next(batches, None)
            capacity = self.capacities.setdefault(shapes, len(group) if following is None else capacity)
            chunk = self._chunk(group, capacity, ends=following is None)
            try:
                self.check(chunk)
            except ValueError:  # batch by batch, to name the one
                for place, batch in enumerate(group, number):
                    try:
                        self.check(self._chunk([batch], 1, ends=False))
                    except ValueError as error:
                        raise ValueError(f"In epoch {epoch}, batch {place}: {error}") from error
                raise
            yield chunk
            number += len(group)
            first = following

    def _batches(self, epoch):
        """Yield the batches of an epoch, each as (x, y, rows or None)."""
        source = self.source(epoch) if callable(self.source) else self.source
        if not hasattr(source, "__iter__"):
            problem = f"batches({epoch}) must return an iterable of batches (x, y)"
            raise ValueError(f"{problem}; got {source!r:.60}: does the function lack a return or a yield?")
        _check_ends(source)
        for number, batch in enumerate(source):
            yield self._checked(batch, f"Batch {number} of epoch {epoch}")

    def _checked(self, batch, which):
        """Return a batch as (x, y, rows or None); ValueError, with its name `which`, for what is none."""
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            several = isinstance(batch, tuple | list | dict)
            received = f"{type(batch).__name__} of {len(batch)}" if several else type(batch).__name__
            raise ValueError(f"{which} must be (x, y) or (x, y, rows), got {received}.")
        x, y = as_arrays(batch[0], "x"), as_arrays(batch[1], "y")
        x, y = jax.tree.map(lambda leaf: np.array(leaf, copy=True), (x, y))  # a generator may reuse its arrays
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves((x, y))}
        if len(lengths) != 1 or () in lengths or (0,) in lengths:
            raise ValueError(
                f"{which}: x and y must have the same number of rows, at least one; got {sorted(lengths)}."
            )
        ((length,),) = lengths
        if len(batch) == 2:
            return x, y, None
        rows = np.array(batch[2], copy=True)
        if rows.dtype != bool or rows.shape != (self.members, length):
            received = f"{rows.dtype} of shape {rows.shape}"
            raise ValueError(f"{which}: rows must be bool [member, row], [{self.members}, {length}], got {received}.")
        return x, y, rows

    def _capacity(self, batch):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
        most = int(np.clip(CHUNK_BYTES // max(size, 1), 1, MOST_BATCHES))
        return self.capacities.get(_shapes(batch), most)

    def _chunk(self, batches, capacity, *, ends):
        batch_size = len(jax.tree.leaves(batches[0][0])[0])

        def joined(*leaves):
            whole = np.zeros((capacity * batch_size, *leaves[0].shape[1:]), leaves[0].dtype)
            np.concatenate(leaves, out=whole[: len(leaves) * batch_size])
            return whole

        x, y = jax.tree.map(joined, *[batch[:2] for batch in batches])
        is_own = [False] * len(jax.tree.leaves((x, y)))
        if batches[0][2] is not None:
            mask = np.zeros((self.members, capacity * batch_size), bool)
            np.concatenate([batch[2] for batch in batches], axis=1, out=mask[:, : len(batches) * batch_size])
            y = y, mask
            is_own.append(True)
        data = Data(x, y, None, None, tuple(is_own), capacity * batch_size, False)
        return Chunk(data, batch_size, len(batches), ends)


class Ahead:
    """A queue of an iterator's items, filled by a thread; an exception of the iterator is raised by `take`."""

    def __init__(self, items: Iterator):
        self._items: queue.Queue = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(items,), name="turbanet-batches", daemon=True)
        self._thread.start()

    def take(self, given_up: Callable[[], bool]) -> Any:
        """Return the next item; GivenUpError if `given_up()` turns true before it arrives."""
        while not given_up():
            with contextlib.suppress(queue.Empty):
                item, error = self._items.get(timeout=POLL_SECONDS)
                if error is not None:
                    raise error
                return item
        raise GivenUpError

    def close(self) -> None:
        """Stop the thread after its current item, and wait up to JOIN_SECONDS for it to release the source."""
        self._closed.set()
        self._thread.join(JOIN_SECONDS)

    def _read(self, items):
        try:
            for item in items:
                self._put(item, None)
                if self._closed.is_set():
                    return
        except BaseException as error:
            self._put(None, error)

    def _put(self, *item):
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=POLL_SECONDS)
                return


def _shapes(batch):
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _check_ends(source):
    """Raise ValueError for a source whose length is infinite: a repeated pipeline of tf.data or grain."""
    try:
        endless = len(source) == sys.maxsize
    except TypeError as error:
        endless = "infinite" in str(error)
        if isinstance(source, itertools.cycle | itertools.repeat):
            endless = operator.length_hint(source, -1) < 0  # repeat(batch, 100) has one
    if endless:
        advice = "leave .repeat() out, or say how many: lambda epoch: itertools.islice(stream, 100)"
        raise ValueError(f"These batches have no end, and an epoch goes once through them: {advice}.")
