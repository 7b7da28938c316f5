"""Training by several processes of `jax.distributed`: each trains a share of the members; an all-gather joins them."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from turbanet.core.arrays import is_key
from turbanet.core.fingerprint import as_numbers
from turbanet.core.state import Swarm
from turbanet.data.examples import of_members


def own(swarm: Swarm, data: Any, checkpoints: Any, callbacks: Any) -> tuple[Swarm, Any]:
    """Return the members that this process trains, and their data; ValueError for fewer members than processes."""
    count = jax.process_count()
    if checkpoints is not None:
        advice = "leave checkpoints out, or train by turbanet.cluster.fit, whose shards keep theirs"
        raise ValueError(f"The {count} processes of jax.distributed keep no checkpoints: {advice}.")
    if callbacks:
        raise ValueError(f"A callback would see the members of one of {count} processes alone: leave callbacks out.")
    if len(swarm) < count:
        raise ValueError(f"{count} processes cannot share {len(swarm)} members: start as many processes at the most.")
    multihost_utils.process_allgather(np.int32(0))  # connects now: one process may have long ended when another ends
    ends = np.cumsum([0, *_shares(len(swarm))])
    here = slice(*ends[jax.process_index() :][:2].tolist())
    return jax.tree.map(lambda leaf: leaf[here], swarm), of_members(data, here)


def everyone(state: Swarm, metrics: Any, members: int, *, epochs: int) -> tuple[Swarm, Any]:
    """All-gather the members' states and `metrics` [epoch, member], which are NaN after a process's last epoch."""

    def whole(leaf):
        missing = np.full((epochs - len(leaf), *leaf.shape[1:]), np.nan, leaf.dtype)
        return np.swapaxes(np.concatenate([leaf, missing]), 0, 1)

    done = int(multihost_utils.process_allgather(np.int32(len(metrics[0]))).max())
    state, metrics = jax.tree.map(partial(_gathered, members=members), (state, jax.tree.map(whole, metrics)))
    return state, jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1)[:done], metrics)


def _shares(members):
    """How many members each process trains."""
    return [len(part) for part in np.array_split(np.arange(members), jax.process_count())]


def _gathered(leaf, members):
    """All-gather each process's [own member, ...] to one array [member, ...] in the host's memory."""
    numbers = as_numbers(leaf)
    sizes = _shares(members)
    filled = np.concatenate([numbers, np.repeat(numbers[-1:], max(sizes) - len(numbers), axis=0)])  # equal shapes
    # As bytes, which are not cast: metrics of the host are float64, which JAX may have disabled.
    each = multihost_utils.process_allgather(np.ravel(filled).view(np.uint8))
    each = [np.ascontiguousarray(one).view(filled.dtype).reshape(filled.shape) for one in each]
    whole = np.concatenate([part[:size] for part, size in zip(each, sizes, strict=True)])
    return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(leaf)) if is_key(leaf) else whole
