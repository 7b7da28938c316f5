"""Each member's training ended by itself: early, its best weights kept, or when a callback asks for it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from turbanet.training.optimizers import has_averages

LOSS = "validation_loss"  # what is monitored unless a metric is


@struct.dataclass
class Stopping:
    """How each member stands: leaves [member, ...]; without patience, only whether it trains on."""

    active: Any  # whether it trains on
    best: Any = None  # value of what is monitored, negative where it is to become large
    waited: Any = None  # epochs since then
    params: Any = None  # of the best epoch
    collections: Any = None  # of the best epoch
    opt_state: Any = None  # likewise, where members are scored by parameters that it keeps
    patience: int | None = struct.field(pytree_node=False, default=None)  # epochs
    min_delta: float = struct.field(pytree_node=False, default=0.0)  # by how much an epoch must be better
    monitor: str | None = struct.field(pytree_node=False, default=None)  # LOSS, or the name of a metric
    mode: str = struct.field(pytree_node=False, default="min")  # whether it is to become small, or large, "max"

    @property
    def rule(self) -> str:
        """When a member stops."""
        return f"{self.patience}, {self.min_delta}, {self.mode} {self.monitor}"


def with_stopping(swarm: Any, patience: int, min_delta: float, monitor: str, mode: str) -> Any:
    """`swarm` about to train each member until `patience` epochs in a row are not better by `min_delta`."""
    if not 0 <= min_delta < np.inf:
        raise ValueError(f"min_delta is by how much an epoch must be better, at least 0; got {min_delta!r}.")
    best = jnp.full(len(swarm), jnp.inf)
    waited = jnp.zeros(len(swarm), jnp.int32)
    rule = patience, min_delta, monitor, mode
    best_of = best, waited, swarm.params, swarm.collections, _averages(swarm)
    return swarm.replace(stopping=Stopping(_all_active(swarm), *best_of, *rule))


def prepared(swarm: Any, patience: int | None, min_delta: float, rule: tuple[str, str], callbacks: Any) -> Any:
    """`swarm` as `fit` trains it, with what its stopping needs; rule: (monitor, mode)."""
    if patience is not None:
        return with_stopping(swarm, patience, min_delta, *rule)
    return that_can_stop(swarm) if callbacks else swarm


def that_can_stop(swarm: Any) -> Any:
    """`swarm` about to train each member until it is told to stop."""
    return swarm.replace(stopping=Stopping(_all_active(swarm)))


def is_by_callbacks(swarm: Any) -> bool:
    """Whether members of `swarm` stop when callbacks say so, and only then."""
    return isinstance(swarm.stopping, Stopping) and swarm.stopping.patience is None


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
    """One member after an epoch, now that the `value` of what is monitored is known; NaN is never better.

    One that had stopped before, as by a callback, stays so.
    """
    stopping = state.stopping
    value = value if stopping.mode == "min" else -value
    better = value < stopping.best - stopping.min_delta
    now = {"params": state.params, "collections": state.collections, "opt_state": _averages(state)}
    now = stopping.replace(best=value, waited=0, **now)
    seen = choose(better, now, stopping.replace(waited=stopping.waited + 1))
    return state.replace(stopping=seen.replace(active=stopping.active & (seen.waited < stopping.patience)))


def restored(swarm: Any) -> Any:
    """`swarm` with every member's best weights, if there was patience, and without what was added."""
    stopping = swarm.stopping
    if stopping is None or stopping.patience is None:
        return swarm.replace(stopping=None)
    best = {"params": stopping.params, "collections": stopping.collections}
    if stopping.opt_state is not None:
        best["opt_state"] = stopping.opt_state
    return swarm.replace(**best, stopping=None)


def _averages(state):
    return state.opt_state if has_averages(state.opt_state) else None


def _all_active(swarm):
    return jnp.ones(len(swarm), bool)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """The tree `yes` or the tree `no`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
