"""Early stopping of each member by itself: its best weights kept, its training ended."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Stopping:
    """How each member stands: leaves [member, ...]."""

    best: Any  # validation loss
    waited: Any  # epochs since then
    active: Any  # whether it trains on
    params: Any  # of the best loss
    collections: Any  # of the best loss
    patience: int = struct.field(pytree_node=False)  # epochs
    min_delta: float = struct.field(pytree_node=False)  # by how much a loss must be better


def with_stopping(swarm: Any, patience: int, min_delta: float) -> Any:
    """`swarm` about to train each member until `patience` epochs in a row have not bettered its loss by `min_delta`."""
    best = jnp.full(len(swarm), jnp.inf)
    waited = jnp.zeros(len(swarm), jnp.int32)
    active = jnp.ones(len(swarm), bool)
    return swarm.replace(stopping=Stopping(best, waited, active, swarm.params, swarm.collections, patience, min_delta))


def after_epoch(before: Any, after: Any, validation_loss: Any) -> Any:
    """One member after an epoch from `before` to `after`, with its `validation_loss`; `before` if it had stopped."""
    stopping = before.stopping
    if stopping is None or validation_loss is None:  # None: a few steps that only measure a plan
        return after
    better = validation_loss < stopping.best - stopping.min_delta  # no NaN is better
    waited = jnp.where(better, 0, stopping.waited + 1)
    best = jnp.where(better, validation_loss, stopping.best).astype(stopping.best.dtype)
    params = _choose(better, after.params, stopping.params)
    collections = _choose(better, after.collections, stopping.collections)
    seen = stopping.replace(best=best, waited=waited, active=waited < stopping.patience)
    after = after.replace(stopping=seen.replace(params=params, collections=collections))
    return _choose(stopping.active, after, before)


def restored(swarm: Any) -> Any:
    """`swarm` with every member's best weights, and without what `with_stopping` added."""
    stopping = swarm.stopping
    return swarm.replace(params=stopping.params, collections=stopping.collections, stopping=None)


def _choose(condition, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
