"""Early stopping of each member by itself, with its best weights, and stopping at the request of a callback."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from turbanet.core.optimizers import has_averages
from turbanet.core.state import State, Swarm

LOSS = "validation_loss"  # what is monitored unless a metric is


@struct.dataclass
class Stopping:
    """The state of early stopping of each member: leaves [member, ...]; without patience, `active` alone."""

    active: Any  # whether it trains on
    best: Any = None  # best monitored value, negated if larger is better
    waited: Any = None  # epochs since the best one
    params: Any = None  # of the best epoch
    collections: Any = None  # of the best epoch
    opt_state: Any = None  # of the best epoch, where members are scored by parameters in it
    patience: int | None = struct.field(pytree_node=False, default=None)  # epochs
    min_delta: float = struct.field(pytree_node=False, default=0.0)  # by which an epoch must be better
    monitor: str | None = struct.field(pytree_node=False, default=None)  # LOSS, or the name of a metric
    mode: str = struct.field(pytree_node=False, default="min")  # "max" if larger is better

    @property
    def rule(self) -> str:
        """The rule by which a member stops, as text."""
        return f"{self.patience}, {self.min_delta}, {self.mode} {self.monitor}"


def prepared(swarm: Swarm, patience: int | None, min_delta: float, rule: tuple[str, str], callbacks: Any) -> Swarm:
    """Return `swarm` with the state of stopping that `fit` needs, if any; rule: (monitor, mode).

    With a patience each member trains until so many epochs in a row are not better by `min_delta`; with
    callbacks alone, until one of them stops it.
    """
    active = jnp.ones(len(swarm), bool)
    if patience is None:
        return swarm.replace(_stopping=Stopping(active)) if callbacks else swarm
    if not 0 <= min_delta < np.inf:
        raise ValueError(f"min_delta is by how much an epoch must be better, at least 0; got {min_delta!r}.")
    monitored = jnp.full(len(swarm), jnp.inf), jnp.zeros(len(swarm), jnp.int32)
    best = swarm.params, swarm.collections, _averages(swarm)
    return swarm.replace(_stopping=Stopping(active, *monitored, *best, patience, min_delta, *rule))


def is_by_callbacks(swarm: State) -> bool:
    """Whether members of `swarm` stop only at the request of callbacks."""
    return isinstance(swarm._stopping, Stopping) and swarm._stopping.patience is None


def after_epoch(before: Swarm, after: Swarm, metrics: Mapping[str, Any]) -> Swarm:
    """Return one member after an epoch from `before` to `after` with `metrics`; `before` if it had stopped.

    Where the host scores members, the program has no monitored value, and the host calls this after it.
    """
    stopping = before._stopping
    if stopping is None:
        return after
    value = metrics.get(stopping.monitor)
    return choose(stopping.active, after if value is None else judged(after, value), before)


def judged(state: Swarm, value: Any) -> Swarm:
    """Return one member after an epoch with the monitored `value`; NaN is never better.

    A member that had stopped before, as by a callback, stays stopped.
    """
    stopping = state._stopping
    value = value if stopping.mode == "min" else -value
    better = value < stopping.best - stopping.min_delta
    best = {"params": state.params, "collections": state.collections, "opt_state": _averages(state)}
    improved = stopping.replace(best=value, waited=0, **best)
    updated = choose(better, improved, stopping.replace(waited=stopping.waited + 1))
    return state.replace(_stopping=updated.replace(active=stopping.active & (updated.waited < stopping.patience)))


def restored(swarm: Swarm) -> Swarm:
    """Return `swarm` with every member's best weights, if there was patience, and without the state of stopping."""
    best = {name: getattr(swarm._stopping, name, None) for name in ("params", "collections", "opt_state")}
    return swarm.replace(**{name: part for name, part in best.items() if part is not None}, _stopping=None)


def _averages(state):
    return state.opt_state if has_averages(state.opt_state) else None


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Return the tree `yes` where `condition` holds, the tree `no` elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
