"""Batches of an iterator, made to chunks that a call of the program trains on, by a thread that reads ahead."""

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

from turbanet.training.arrays import as_arrays
from turbanet.training.data import Data
from turbanet.training.interrupt import GivenUpError

CHUNK_BYTES = 64 * 2**20  # of the batches of a chunk, about
MOST_BATCHES = 256  # of a chunk
AHEAD = 2  # chunks that wait for their turn
PATIENCE = 0.1  # seconds between two looks at whether anybody still waits
LONGEST = 1.0  # seconds to wait for a source that is asked no more


class Chunk(NamedTuple):
    """Some batches of an epoch, one after the other.

    data : x, y [row, ...] of all of them, with room for more; where `is_masked`, y is (y, bool [member, row]): which
        rows a member sees
    batch_size : rows of a batch
    steps : how many batches there are
    ends : whether the last one is the epoch's last
    state : where the iterator is after it, as JSON holds it; None where it cannot say
    is_masked : whether y is such a pair
    """

    data: Data
    batch_size: int
    steps: int
    ends: bool
    state: Any
    is_masked: bool = False

    def trained_on(self) -> Data:
        """The rows that some member sees, without who does."""
        x, y = self.data.x, self.data.y
        length = self.steps * self.batch_size
        seen: Any = slice(length)
        if self.is_masked:
            y, by = y
            seen = np.flatnonzero(by[:, :length].any(axis=0))
            length = len(seen)
        x, y = jax.tree.map(lambda leaf: leaf[seen], (x, y))
        return Data(x, y, None, None, (False,) * len(jax.tree.leaves((x, y))), length, False)


class Batches:
    """What `fit_batches` is given: gone through once an epoch.

    given : what begins anew with each `iter`, such as a DataLoader; or given(epoch) -> such a thing
    members : of the swarm
    """

    def __init__(self, given: Any, members: int):
        if not callable(given) and not hasattr(given, "__iter__"):
            known = "an iterable of batches (x, y), such as a DataLoader, or a function of the epoch that returns one"
            raise ValueError(f"batches must be {known}; got {given!r:.60}.")
        self.given = given
        self.members = members
        self.rooms: dict[Any, int] = {}  # how many batches of these shapes a chunk has room for

    def chunks(self, epoch: int, state: Any = None) -> Iterator[Chunk]:
        """The chunks of an epoch, from where the iterator's `state` says; ValueError for what are no batches."""
        given = self.given(epoch) if callable(self.given) else self.given
        _check_ends(given)
        iterator = iter(given) if state is None else _gone_to(given, state)
        says_where = any(_takes_state(each) for each in (iterator, given))
        number = 0
        pending = self._next(iterator, epoch, number)
        if pending is None and state is not None:
            came = f"This training was kept in the middle of epoch {epoch}, where these batches have ended"
            raise ValueError(f"{came}: go on with the batches that it began with.")
        if pending is None:
            advice = "what ends for good, as a generator does, must be a function of the epoch that returns a new one"
            raise ValueError(f"There was no batch in epoch {epoch}: {advice}.")
        while pending is not None:
            some, shapes, room = [pending], _shapes(pending), self._room(pending)
            after = _state(iterator) if says_where else None
            number += 1
            while (pending := self._next(iterator, epoch, number)) is not None:
                if len(some) == room or _shapes(pending) != shapes:
                    break
                some.append(pending)
                after = _state(iterator) if says_where else None
                number += 1
            room = self.rooms.setdefault(shapes, len(some) if pending is None else room)
            yield self._chunk(some, room, ends=pending is None, state=after)

    def _next(self, iterator, epoch, number):
        """The next batch as (x, y, rows or None), None at the end."""
        nothing = object()
        batch = next(iterator, nothing)
        if batch is nothing:
            return None
        which = f"Batch {number} of epoch {epoch}"
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            several = isinstance(batch, tuple | list | dict)
            came = f"{type(batch).__name__} of {len(batch)}" if several else type(batch).__name__
            raise ValueError(f"{which} must be (x, y) or (x, y, rows), got {came}.")
        x, y = as_arrays(batch[0], "x"), as_arrays(batch[1], "y")
        x, y = jax.tree.map(lambda leaf: np.array(leaf, copy=True), (x, y))  # a generator may fill one array again
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
            came = f"{rows.dtype} of shape {rows.shape}"
            raise ValueError(f"{which}: rows must be bool [member, row], [{self.members}, {length}], got {came}.")
        return x, y, rows

    def _room(self, batch):
        if (shapes := _shapes(batch)) in self.rooms:
            return self.rooms[shapes]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
        return int(np.clip(CHUNK_BYTES // max(size, 1), 1, MOST_BATCHES))

    def _chunk(self, some, room, *, ends, state):
        batch_size = len(jax.tree.leaves(some[0][0])[0])

        def joined(*leaves):
            whole = np.zeros((room * batch_size, *leaves[0].shape[1:]), leaves[0].dtype)
            np.concatenate(leaves, out=whole[: len(leaves) * batch_size])
            return whole

        x, y = jax.tree.map(joined, *[batch[:2] for batch in some])
        is_own = [False] * len(jax.tree.leaves((x, y)))
        if some[0][2] is not None:
            seen = np.zeros((self.members, room * batch_size), bool)
            np.concatenate([batch[2] for batch in some], axis=1, out=seen[:, : len(some) * batch_size])
            y = y, seen
            is_own.append(True)
        data = Data(x, y, None, None, tuple(is_own), room * batch_size, False)
        return Chunk(data, batch_size, len(some), ends, state, is_masked=some[0][2] is not None)


class Ahead:
    """What an iterator yields, made by a thread before it is asked for; what it raises is raised where it is asked.

    make : make(wait) -> the iterator; where it calls wait(until), the thread waits until `until()` is true
    """

    def __init__(self, make: Callable[[Callable], Iterator]):
        self._made: queue.Queue = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(make,), name="turbanet-batches", daemon=True)
        self._thread.start()

    def take(self, given_up: Callable[[], bool]) -> Any:
        """The next item; GivenUpError where `given_up()` comes before it."""
        while not given_up():
            with contextlib.suppress(queue.Empty):
                item, error = self._made.get(timeout=PATIENCE)
                if error is not None:
                    raise error
                return item
        raise GivenUpError

    def close(self) -> None:
        """Have the thread end after the item that it is at, and wait for it a while: the source is then free."""
        self._closed.set()
        self._thread.join(LONGEST)

    def _wait(self, until):
        while not until():
            if self._closed.wait(PATIENCE / 10):
                raise GivenUpError

    def _read(self, make):
        try:
            for item in make(self._wait):
                if not self._put(item, None):
                    return
            self._put(None, RuntimeError("There is nothing after the last epoch."))
        except BaseException as error:
            self._put(None, error)

    def _put(self, *what):
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._made.put(what, timeout=PATIENCE)
                return True
        return False


def _shapes(batch):
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _state(iterator):
    """Where an iterator is, as JSON holds it, or None: by grain's get_state or a stateful loader's state_dict."""
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


def _check_ends(given):
    """ValueError for what tells by its length that it has no end: a repeated pipeline of tf.data's or grain's."""
    try:
        endless = len(given) == sys.maxsize
    except TypeError as error:
        endless = "infinite" in str(error)
    if endless:
        advice = "leave .repeat() out, or say how many: lambda epoch: itertools.islice(stream, 100)"
        raise ValueError(f"These batches have no end, and an epoch goes once through them: {advice}.")


def _takes_state(thing):
    """What sets the state of an iterator, or of the loader whose next iterator has it; None if nothing does."""
    return getattr(thing, "set_state", None) or getattr(thing, "load_state_dict", None)


def _gone_to(given, state):
    """An iterator of `given` that goes on from a `state`."""
    value = base64.b64decode(state["bytes"]) if "bytes" in state else state["value"]
    iterator = iter(given)
    if go := _takes_state(iterator):
        go(value)
        return iterator
    if go := _takes_state(given):
        go(value)
        return iter(given)
    kept = "This training was kept in the middle of an epoch, by an iterator that could say where it was"
    raise ValueError(f"{kept}; {type(iterator).__name__} cannot: go on with the batches that it began with.")
