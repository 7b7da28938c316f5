"""Early stopping of each member by itself: its best weights kept, its training ended."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

LOSS = "validation_loss"  # what is monitored unless a metric is


@struct.dataclass
class Stopping:
    """How each member stands: leaves [member, ...]."""

    best: Any  # value of what is monitored, negative where it is to become large
    waited: Any  # epochs since then
    active: Any  # whether it trains on
    params: Any  # of the best epoch
    collections: Any  # of the best epoch
    patience: int = struct.field(pytree_node=False)  # epochs
    min_delta: float = struct.field(pytree_node=False)  # by how much an epoch must be better
    monitor: str = struct.field(pytree_node=False)  # LOSS, or the name of a metric
    mode: str = struct.field(pytree_node=False)  # whether it is to become small, "min", or large, "max"

    @property
    def rule(self) -> str:
        """When a member stops."""
        return f"{self.patience}, {self.min_delta}, {self.mode} {self.monitor}"


def with_stopping(swarm: Any, patience: int, min_delta: float, monitor: str, mode: str) -> Any:
    """`swarm` about to train each member until `patience` epochs in a row are not better by `min_delta`."""
    best = jnp.full(len(swarm), jnp.inf)
    waited = jnp.zeros(len(swarm), jnp.int32)
    active = jnp.ones(len(swarm), bool)
    rule = patience, min_delta, monitor, mode
    return swarm.replace(stopping=Stopping(best, waited, active, swarm.params, swarm.collections, *rule))


def after_epoch(before: Any, after: Any, seen: Mapping[str, Any]) -> Any:
    """One member after an epoch from `before` to `after` that has `seen` {name: value}; `before` if it had stopped.

    What is monitored is not among them where a plan is measured, and where the host computes it: see `judged`.
    """
    stopping = before.stopping
    if stopping is None:
        return after
    value = seen.get(stopping.monitor)
    return choose(stopping.active, after if value is None else judged(after, value), before)


def judged(state: Any, value: Any) -> Any:
    """One member after an epoch, now that the `value` of what is monitored is known; NaN is never better."""
    stopping = state.stopping
    value = value if stopping.mode == "min" else -value
    better = value < stopping.best - stopping.min_delta
    now = stopping.replace(best=value, waited=0, params=state.params, collections=state.collections)
    seen = choose(better, now, stopping.replace(waited=stopping.waited + 1))
    return state.replace(stopping=seen.replace(active=seen.waited < stopping.patience))


def restored(swarm: Any) -> Any:
    """`swarm` with every member's best weights, and without what `with_stopping` added."""
    return swarm.replace(params=swarm.stopping.params, collections=swarm.stopping.collections, stopping=None)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """The tree `yes` or the tree `no`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
