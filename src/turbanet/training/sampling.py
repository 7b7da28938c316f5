"""Which rows of a shared data set each member sees: int32 [member, row], padded at the end with -1 where ragged."""

import jax
import jax.numpy as jnp
import numpy as np

TOP_BIT = np.uint32(1 << 31)


def all_rows(*, members: int, rows: int):
    """Every member sees all `rows` rows in their order."""
    return jnp.tile(jnp.arange(_at_least_one(rows, "rows"), dtype=jnp.int32), (_at_least_one(members, "members"), 1))


def subset(key, *, members: int, rows: int, portion: float):
    """Each member sees its own random `portion` (0 to 1) of the rows, without repetition (Bühlmann and Yu 2002)."""
    if not 0 < portion <= 1 or round(portion * rows) < 1:
        raise ValueError(f"portion must be in (0, 1] and leave at least one of {rows} rows, got {portion}.")
    keys = jax.random.split(key, _at_least_one(members, "members"))
    size = round(portion * rows)
    return jax.vmap(lambda k: jax.random.permutation(k, rows)[:size])(keys).astype(jnp.int32)


def bootstrap(key, *, members: int, rows: int, size: int | None = None):
    """Each member sees `size` rows (default: as many as there are) drawn with repetition (Breiman 1996)."""
    shape = (_at_least_one(members, "members"), _at_least_one(rows if size is None else size, "size"))
    return jax.random.randint(key, shape, 0, _at_least_one(rows, "rows"), jnp.int32)


def k_fold(key, *, folds: int, rows: int):
    """Shuffled k-fold: (train, held-out) rows [fold, row]; the first `rows % folds` folds hold out one row more."""
    if not 2 <= folds <= rows:
        raise ValueError(f"folds must be from 2 to the {rows} rows, got {folds}.")
    parts = np.array_split(np.asarray(jax.random.permutation(key, rows)), folds)
    train = [np.concatenate(parts[:i] + parts[i + 1 :]) for i in range(folds)]
    return ragged(train), ragged(parts)


def ragged(rows):
    """Index arrays of different lengths, one a member (as scikit-learn's splitters give them) -> [member, row]."""
    arrays = [np.asarray(r) for r in rows]
    width = max(map(len, arrays), default=0)
    if min(map(len, arrays), default=0) < 1:
        raise ValueError("Every member needs at least one row.")
    return jnp.asarray([np.pad(a, (0, width - len(a)), constant_values=-1) for a in arrays], jnp.int32)


def check_rows(rows, *, members: int, length: int):
    """`rows` as int32 [member, row] and the number of real rows of each member; errors for anything out of range."""
    rows = np.asarray(rows)
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows must be integers [member, row], got {rows.dtype} of shape {rows.shape}.")
    if len(rows) != members:
        raise ValueError(f"rows has {len(rows)} members, the swarm has {members}.")
    counts = (rows >= 0).sum(1)
    padded_at_end = (np.arange(rows.shape[1]) < counts[:, None]) == (rows >= 0)
    if rows.min(initial=0) < -1 or rows.max(initial=0) >= length or not padded_at_end.all() or not counts.all():
        raise ValueError(
            f"rows must lie in 0..{length - 1}, at least one a member, padded only at the end with -1; "
            f"got values from {rows.min(initial=0)} to {rows.max(initial=0)}, {counts.min(initial=0)} at the fewest."
        )
    return rows.astype(np.int32), counts.astype(np.int32)


def epoch_order(key, count, *, length: int, batch_size: int):
    """One member's epoch: positions 0..count-1, shuffled unless key is None, to fill ceil(length / batch_size) steps.

    Returns int32 [step, batch]. A last, partial batch, or a member with count < length, wraps into its own order.
    """
    steps = -(-length // batch_size)
    position = jnp.arange(length)
    if key is not None:
        bits = jax.random.bits(key, (length,), jnp.uint32) >> 1
        position = jnp.argsort(jnp.where(position < count, bits, bits | TOP_BIT))  # padding sorts behind all real rows
    return position[jnp.arange(steps * batch_size) % count].reshape(steps, batch_size).astype(jnp.int32)


def _at_least_one(number, name):
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}.")
    return number
