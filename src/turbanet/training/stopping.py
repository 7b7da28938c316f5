"""Early stopping of each member by itself: its best weights kept, its training ended."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Stopping:
    """How a member stands: its best validation loss, the epochs since, the weights of then, whether it trains on."""

    best: Any
    waited: Any
    active: Any
    params: Any
    collections: Any
    patience: int = struct.field(pytree_node=False)
    min_delta: float = struct.field(pytree_node=False)


def with_stopping(swarm, patience: int, min_delta: float):
    """The swarm about to train until `patience` epochs in a row have not bettered the best loss by `min_delta`."""
    members = len(swarm)
    return swarm.replace(
        stopping=Stopping(
            best=jnp.full(members, jnp.inf),
            waited=jnp.zeros(members, jnp.int32),
            active=jnp.ones(members, bool),
            params=swarm.params,
            collections=swarm.collections,
            patience=patience,
            min_delta=min_delta,
        )
    )


def after_epoch(before, after, validation_loss):
    """One member after an epoch that led it from `before` to `after`: as it was, if it had stopped."""
    stop = before.stopping
    if stop is None or validation_loss is None:  # None: a few steps that only measure a plan
        return after
    better = validation_loss < stop.best - stop.min_delta  # no NaN is better
    waited = jnp.where(better, 0, stop.waited + 1)
    after = after.replace(
        stopping=stop.replace(
            best=jnp.where(better, validation_loss, stop.best).astype(stop.best.dtype),
            waited=waited,
            active=waited < stop.patience,
            params=_choose(better, after.params, stop.params),
            collections=_choose(better, after.collections, stop.collections),
        )
    )
    return _choose(stop.active, after, before)


def restored(swarm):
    """The swarm with every member's best weights, as it was before `with_stopping` otherwise."""
    stop = swarm.stopping
    return swarm.replace(params=stop.params, collections=stop.collections, stopping=None)


def _choose(condition, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
