"""Chunks of batches from an iterator, read ahead by a thread; one call of a program trains on one chunk."""

import base64
import contextlib
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from turbanet.core.arrays import as_arrays
from turbanet.data.examples import Data
from turbanet.core.interrupt import GivenUpError

CHUNK_BYTES = 64 * 2**20  # of a chunk, about
MOST_BATCHES = 256  # of a chunk
AHEAD = 2  # chunks in the queue
POLL_SECONDS = 0.1  # between two checks whether the other side has given up
JOIN_SECONDS = 1.0  # to wait for the thread to end its last read


class Chunk(NamedTuple):
    """Consecutive batches of an epoch.

    data : x, y [row, ...] of all batches, padded to the rows of a full chunk; with `is_masked`, y is
        (y, bool [member, row]), True for the rows that a member sees
    batch_size : rows of a batch
    steps : number of batches
    ends : whether the last batch is the last one of the epoch
    state : of the iterator after the chunk, as a JSON value; None if the iterator has none
    is_masked : whether y is a pair with a mask
    """

    data: Data
    batch_size: int
    steps: int
    ends: bool
    state: Any
    is_masked: bool = False

    def trained_on(self) -> Data:
        """Return the rows that at least one member sees, without the mask."""
        x, y = self.data.x, self.data.y
        length = self.steps * self.batch_size
        rows: Any = slice(length)
        if self.is_masked:
            y, mask = y
            rows = np.flatnonzero(mask[:, :length].any(axis=0))
            length = len(rows)
        x, y = jax.tree.map(lambda leaf: leaf[rows], (x, y))
        return Data(x, y, None, None, (False,) * len(jax.tree.leaves((x, y))), length, False)


class Batches:
    """The batches of `fit_batches`, iterated over once an epoch.

    source : an iterable that starts again with each `iter`, such as a DataLoader; or source(epoch) -> such an iterable
    members : number of members of the swarm
    """

    def __init__(self, source: Any, members: int):
        if not callable(source) and not hasattr(source, "__iter__"):
            valid = "an iterable of batches (x, y), such as a DataLoader, or a function of the epoch that returns one"
            raise ValueError(f"batches must be {valid}; got {source!r:.60}.")
        self.source = source
        self.members = members
        self.capacities: dict[Any, int] = {}  # batches of a full chunk, by their shapes

    def chunks(self, epoch: int, state: Any = None) -> Iterator[Chunk]:
        """Yield the chunks of an epoch, from the iterator's `state` on; ValueError for what are no batches."""
        source = self.source(epoch) if callable(self.source) else self.source
        _check_ends(source)
        iterator = iter(source) if state is None else _restored(source, state)
        has_state = any(_state_setter(each) for each in (iterator, source))
        number = 0
        pending = self._next(iterator, epoch, number)
        if pending is None and state is not None:
            message = f"This training was kept in the middle of epoch {epoch}, where these batches have ended"
            raise ValueError(f"{message}: go on with the batches that it began with.")
        if pending is None:
            advice = "what ends for good, as a generator does, must be a function of the epoch that returns a new one"
            raise ValueError(f"There was no batch in epoch {epoch}: {advice}.")
        while pending is not None:
            batches, shapes, capacity = [pending], _shapes(pending), self._capacity(pending)
            after = _state(iterator) if has_state else None
            number += 1
            while (pending := self._next(iterator, epoch, number)) is not None:
                if len(batches) == capacity or _shapes(pending) != shapes:
                    break
                batches.append(pending)
                after = _state(iterator) if has_state else None
                number += 1
            capacity = self.capacities.setdefault(shapes, len(batches) if pending is None else capacity)
            yield self._chunk(batches, capacity, ends=pending is None, state=after)

    def _next(self, iterator, epoch, number):
        """Return the next batch as (x, y, rows or None), or None at the end."""
        nothing = object()
        batch = next(iterator, nothing)
        if batch is nothing:
            return None
        which = f"Batch {number} of epoch {epoch}"
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
        if (shapes := _shapes(batch)) in self.capacities:
            return self.capacities[shapes]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
        return int(np.clip(CHUNK_BYTES // max(size, 1), 1, MOST_BATCHES))

    def _chunk(self, batches, capacity, *, ends, state):
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
        return Chunk(data, batch_size, len(batches), ends, state, is_masked=batches[0][2] is not None)


class Ahead:
    """A queue of an iterator's items, filled by a thread; an exception of the iterator is raised by `take`.

    make : make(wait) -> the iterator; its call of wait(until) blocks the thread until `until()` is true
    """

    def __init__(self, make: Callable[[Callable], Iterator]):
        self._items: queue.Queue = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(make,), name="turbanet-batches", daemon=True)
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

    def _wait(self, until):
        while not until():
            if self._closed.wait(POLL_SECONDS / 10):
                raise GivenUpError

    def _read(self, make):
        try:
            for item in make(self._wait):
                if not self._put(item, None):
                    return
            self._put(None, RuntimeError("There is nothing after the last epoch."))
        except BaseException as error:
            self._put(None, error)

    def _put(self, *item):
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=POLL_SECONDS)
                return True
        return False


def _shapes(batch):
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _state(iterator):
    """Return the state of an iterator as a JSON value, by grain's get_state or a loader's state_dict, or None."""
    read = getattr(iterator, "get_state", None) or getattr(iterator, "state_dict", None)
    if read is None:
        return None
    state = read()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return {"value": json.loads(json.dumps(state))}
    except TypeError:
        return None


def _check_ends(source):
    """Raise ValueError for a source whose length is infinite: a repeated pipeline of tf.data or grain."""
    try:
        endless = len(source) == sys.maxsize
    except TypeError as error:
        endless = "infinite" in str(error)
    if endless:
        advice = "leave .repeat() out, or say how many: lambda epoch: itertools.islice(stream, 100)"
        raise ValueError(f"These batches have no end, and an epoch goes once through them: {advice}.")


def _state_setter(iterable):
    """Return the method that sets the state of an iterator, or of a loader for its next iterator; None without one."""
    return getattr(iterable, "set_state", None) or getattr(iterable, "load_state_dict", None)


def _restored(source, state):
    """Return an iterator of `source` that continues from a `state`."""
    value = base64.b64decode(state["bytes"]) if "bytes" in state else state["value"]
    iterator = iter(source)
    if set_state := _state_setter(iterator):
        set_state(value)
        return iterator
    if set_state := _state_setter(source):
        set_state(value)
        return iter(source)
    message = "This training was kept in the middle of an epoch, by an iterator that could say where it was"
    raise ValueError(f"{message}; {type(iterator).__name__} cannot: go on with the batches that it began with.")
