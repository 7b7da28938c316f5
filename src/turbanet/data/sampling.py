"""Rows of a shared data set that each member sees: int32 [member, row], padded at the end with -1 where ragged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core.arrays import as_array, check_seed, check_whole, seeded


def all_rows(*, members: int, rows: int) -> jax.Array:
    """Return all `rows` rows, in order, for each of `members`: int32 [member, row]."""
    check_whole(members=members, rows=rows)
    return jnp.tile(jnp.arange(rows, dtype=jnp.int32), (members, 1))


@seeded
def subset(seed: int | jax.Array, *, members: int, rows: int, portion: float) -> jax.Array:
    """Draw a random part of the rows for each member, without repetition (Bühlmann and Yu 2002).

    Parameters
    ----------
    seed : an int or a JAX random key
    members : the number of members
    rows : the number of rows
    portion : the share that each sees, above 0 and up to 1

    Returns
    -------
    int32 [member, row].

    Raises
    ------
    ValueError : for a portion that leaves no row.
    """
    check_whole(members=members, rows=rows)
    if not 0 < portion <= 1 or round(portion * rows) < 1:
        raise ValueError(f"portion must be in (0, 1] and leave at least one of {rows} rows, got {portion}.")
    keys = jax.random.split(seed, members)
    return jax.vmap(lambda k: jax.random.permutation(k, rows)[: round(portion * rows)])(keys).astype(jnp.int32)


@seeded
def bootstrap(seed: int | jax.Array, *, members: int, rows: int, size: int | None = None) -> jax.Array:
    """Draw rows with repetition for each member (Breiman 1996).

    Parameters
    ----------
    seed : an int or a JAX random key
    members : the number of members
    rows : the number of rows
    size : how many rows each draws; None for as many as there are

    Returns
    -------
    int32 [member, row].

    Raises
    ------
    ValueError : for numbers below 1.

    Examples
    --------
    >>> from turbanet import bootstrap
    >>> rows = bootstrap(0, members=3, rows=100)
    >>> rows.shape, bool((rows < 100).all())
    ((3, 100), True)
    """
    size = rows if size is None else size
    check_whole(rows=rows, members=members, size=size)
    return jax.random.randint(seed, (members, size), 0, rows, jnp.int32)


@seeded
def k_fold(seed: int | jax.Array, *, folds: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Split `rows` rows into shuffled folds: -> (train, held-out) rows, each int32 [fold, row].

    seed: an int or a JAX random key. The first `rows % folds` folds hold out one row more. Raises ValueError for fewer
    than 2 folds or more than rows.
    """
    check_whole(folds=folds, rows=rows)
    if not 2 <= folds <= rows:
        raise ValueError(f"folds must be from 2 to the {rows} rows, got {folds}.")
    parts = np.array_split(np.asarray(jax.random.permutation(seed, rows)), folds)
    train = [np.concatenate(parts[:i] + parts[i + 1 :]) for i in range(folds)]
    return ragged(train), ragged(parts)


@seeded
def shards(seed: int | jax.Array, *, labels: Any, clients: int, per_client: int = 2) -> jax.Array:
    """Sort rows by class, cut them into equal shards, and give `per_client` to each client (McMahan et al. 2017).

    Parameters
    ----------
    seed : an int or a JAX random key
    labels : int [row], the class of each row
    clients : the number of clients
    per_client : shards of each; with two, most clients have rows of two classes

    Returns
    -------
    int32 [client, row]. Rows left over by the division go to no client.

    Raises
    ------
    ValueError : for fewer rows than shards
    """
    labels = _labels(labels, clients)
    check_whole(per_client=per_client)
    pieces = clients * per_client
    if len(labels) < pieces:
        raise ValueError(f"{clients} clients of {per_client} shards each need {pieces} rows, got {len(labels)}.")
    size = len(labels) // pieces
    by_class = np.argsort(labels, kind="stable")[: pieces * size].reshape(pieces, size)
    dealt = np.asarray(jax.random.permutation(seed, pieces)).reshape(clients, per_client)
    return jnp.asarray(by_class[dealt].reshape(clients, -1), jnp.int32)


@seeded
def dirichlet(seed: int | jax.Array, *, labels: Any, clients: int, alpha: float) -> jax.Array:
    """Divide the rows of each class among clients by shares drawn from a Dirichlet distribution (Yurochkin 2019).

    Parameters
    ----------
    seed : an int or a JAX random key
    labels : int [row], the class of each row
    clients : the number of clients
    alpha : above 0; the smaller, the fewer clients have most of a class

    Returns
    -------
    int32 [client, row], every row with one client, padded at the end with -1. A client without rows gets one from the
    client with most.

    Raises
    ------
    ValueError : for an alpha that is not above 0, and for fewer rows than clients
    """
    labels = _labels(labels, clients)
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be a number above 0, got {alpha!r}.")
    random = np.random.default_rng(np.asarray(jax.random.bits(seed, (4,), jnp.uint32)))
    owned: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        cuts = np.round(np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)).astype(int)
        for client, part in zip(owned, np.split(rows, cuts), strict=True):
            client.extend(part.tolist())
    for client in owned:
        if not client:
            client.append(max(owned, key=len).pop())
    return ragged(np.sort(client) for client in owned)


def ragged(rows: Iterable[Any]) -> jax.Array:
    """Join `rows`, an index array for each member (as from scikit-learn's splitters), into one: int32 [member, row].

    Shorter ones are padded at the end with -1. Raises ValueError for a member without rows, and for a mask of rows.
    """
    arrays = [as_array(_positions(array), "rows") for array in rows]
    if several := [array.shape for array in arrays if array.ndim != 1]:
        raise ValueError(f"rows must be int [row] for each member, got shape {several[0]}: give a list of such arrays.")
    width = max(map(len, arrays), default=0)
    if min(map(len, arrays), default=0) < 1:
        raise ValueError("Every member needs at least one row.")
    if wrong := [array.dtype for array in arrays if array.dtype.kind not in "iu"]:
        raise ValueError(f"rows must be int [row] for each member, got {wrong[0]}: of a mask take np.flatnonzero.")
    return jnp.asarray([np.pad(a, (0, width - len(a)), constant_values=-1) for a in arrays], jnp.int32)


def deal(*, rows: int, workers: int, epochs: int, batch_size: int, seed: int = 0, begin: int = 0) -> np.ndarray:
    """Shuffle the rows in each epoch and deal them out to workers that train one network together.

    Parameters
    ----------
    rows : the number of rows; each goes to one worker in an epoch
    workers : the number of workers
    epochs : the number of epochs
    batch_size : rows of a worker's step, at most those of the worker with most
    seed : of the shuffles, an int
    begin : the number of epochs before, whose shuffles are others

    Returns
    -------
    int32 [worker, epoch, step, batch]. A worker with a row fewer, and a last, partial batch, repeat the worker's first
    rows of that epoch, so that all workers have as many steps, of as many rows.

    Raises
    ------
    ValueError : for numbers below 1 and for more workers than rows
    """
    check_whole(rows=rows, workers=workers, epochs=epochs, batch_size=batch_size)
    if workers > rows:
        raise ValueError(f"Each worker needs a row of its own: {workers} workers, {rows} rows.")
    seed = int(check_seed(seed))
    share = -(-rows // workers)  # rows of the worker with most
    batch_size = min(batch_size, share)
    steps = -(-share // batch_size)
    order = np.empty((workers, epochs, steps, batch_size), np.int32)
    for epoch in range(epochs):
        shuffled = np.random.default_rng((seed, begin + epoch)).permutation(rows)
        for worker in range(workers):
            order[worker, epoch] = np.resize(shuffled[worker::workers], (steps, batch_size))
    return order


def check_rows(rows: Any, *, members: int, length: int, name: str = "rows") -> tuple[np.ndarray, np.ndarray]:
    """Return `rows` of `length` examples as int32 [member, row], and how many of them are no padding, int32 [member].

    Raises ValueError, which calls them `name`, for anything out of range.
    """
    rows = np.asarray(as_array(list(map(_positions, rows)) if isinstance(rows, list | tuple) else rows, name))
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"{name} must be integers [member, row], got {rows.dtype} of shape {rows.shape}.")
    if len(rows) != members:
        raise ValueError(f"{name} has {len(rows)} members, the swarm has {members}.")
    counts = (rows >= 0).sum(1)
    padded_at_end = (np.arange(rows.shape[1]) < counts[:, None]) == (rows >= 0)
    if rows.min(initial=0) < -1 or rows.max(initial=0) >= length or not padded_at_end.all() or not counts.all():
        got = f"{rows.min()} to {rows.max()}, {counts.min()} at the fewest" if rows.size else "none"
        raise ValueError(f"{name} must lie in 0..{length - 1}, at least one a member, -1 only at the end, got {got}.")
    return rows.astype(np.int32), counts.astype(np.int32)


def epoch_order(key: jax.Array | None, count: Any, *, length: int, batch_size: int) -> jax.Array:
    """Return the positions 0..count-1 of one member's rows in the order of an epoch.

    Parameters
    ----------
    key : a JAX random key to shuffle by, or None
    count : how many rows this member has
    length : how many the longest member has, which sets the number of steps, ceil(length / batch_size)
    batch_size : rows of a step

    Returns
    -------
    int32 [step, batch]. A last, partial batch, or a member with count < length, wraps into its own order.
    """
    steps = -(-length // batch_size)
    position = jnp.arange(length)
    if key is not None:
        bits = jax.random.bits(key, (length,), jnp.uint32) >> 1
        position = jnp.argsort(jnp.where(position < count, bits, bits | np.uint32(1 << 31)))  # padding sorts last
    return position[jnp.arange(steps * batch_size) % count].reshape(steps, batch_size).astype(jnp.int32)


def own_steps(count: Any, batch_size: int) -> Any:
    """Return the steps of an epoch of a member with `count` rows: one where these are fewer than a batch."""
    return -(-count // batch_size)


def own_order(key: jax.Array | None, count: Any, *, length: int, batch_size: int) -> jax.Array:
    """Return `epoch_order` for a member that makes only the first `own_steps` of the steps.

    As when trained alone, it does not shuffle a batch that holds all its rows. Of a batch that it fills in part, the
    first `count` positions are its rows, the others some of them again.
    """
    sizes = {"length": length, "batch_size": batch_size}
    return jnp.where(count <= batch_size, epoch_order(None, count, **sizes), epoch_order(key, count, **sizes))


def _positions(rows):
    """Return rows as they came; ValueError for an index of pandas, whose labels are no positions."""
    if hasattr(rows, "get_indexer"):
        advice = "give those, such as table.groupby(...).indices, or table.index.get_indexer(labels)"
        raise ValueError(f"rows are positions, counted from 0, and got the labels of pandas: {advice}.")
    return rows


def _labels(labels, clients):
    labels = np.asarray(as_array(labels, "labels"))
    check_whole(clients=clients)
    if labels.ndim != 1 or len(labels) < clients:
        raise ValueError(f"labels must be [row], at least one for each of {clients} clients, got {labels.shape}.")
    if np.isnan(labels).any():
        raise ValueError(f"labels holds NaN in row {np.isnan(labels).argmax()}: leave such rows out.")
    return labels
