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
    now = stopping.replace(best=validation_loss, waited=0, params=after.params, collections=after.collections)
    seen = choose(better, now, stopping.replace(waited=stopping.waited + 1))
    after = after.replace(stopping=seen.replace(active=seen.waited < stopping.patience))
    return choose(stopping.active, after, before)


def restored(swarm: Any) -> Any:
    """`swarm` with every member's best weights, and without what `with_stopping` added."""
    return swarm.replace(params=swarm.stopping.params, collections=swarm.stopping.collections, stopping=None)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """The tree `yes` or the tree `no`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
