"""Callbacks between the segments of a training: the view that they get, and what they may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from turbanet.core.arrays import as_array, is_key


class TrainingView:
    """The state of a training between two segments, for callbacks: read-only except for `stop` and `set`.

    Attributes
    ----------
    epoch : int, epochs of this call of `fit` that are done
    epochs : int, requested epochs of this call
    history : the `History` so far
    train_loss : [member], of the last epoch, NaN for a member that has stopped
    validation_loss : likewise, None without validation
    validation_metric : likewise, {name: [member]} with several metrics
    training : bool [member], whether a member has not stopped
    """

    def __init__(self, run: Any, history: Any):
        self.history = history
        self.epoch = run.done
        self.epochs = run.epochs
        self.training = np.isin(np.arange(len(run.start)), run.still_training())
        self.wanted: dict[str, Any] = {}  # requested hyperparameters, by name
        self._run = run

    @property
    def train_loss(self) -> np.ndarray:
        return self.history.train_loss[-1]

    @property
    def validation_loss(self) -> np.ndarray | None:
        return _last(self.history.validation_loss)

    @property
    def validation_metric(self) -> Any:
        return _last(self.history.validation_metric)

    @cached_property
    def swarm(self) -> Any:
        """All members in their current state, also with `patience` not the best one: a copy, made when first read."""
        self._check_open("read view.swarm")
        now = self._run.everyone().replace(_underway=None, _stopping=None)
        return jax.tree.map(lambda leaf: leaf.copy() if is_key(leaf) else jnp.array(leaf, copy=True), now)

    def stop(self, members: ArrayLike | None = None) -> None:
        """Stop these members, bool [member] or int positions, after this segment; None: all members.

        They keep their current state, or with `patience` their best one. The others end with the same bits as without.
        """
        self._check_open("call view.stop")
        count = len(self.training)
        stopped = np.ones(count, bool) if members is None else as_array(members, "members")
        if stopped.shape == (0,):  # an empty list
            return
        if stopped.dtype == bool:
            if stopped.shape != (count,):
                raise ValueError(f"stop takes bool [member] of the {count} members, got shape {stopped.shape}.")
        else:
            inside = np.issubdtype(stopped.dtype, np.integer) and ((stopped >= 0) & (stopped < count)).all()
            if not inside:
                raise ValueError(f"stop takes positions from 0 to {count - 1}, or bool [member]; got {members!s:.60}.")
            stopped = np.isin(np.arange(count), stopped)
        self.training = self.training & ~np.asarray(stopped)

    def set(self, **hyperparameters: Any) -> None:
        """Set hyperparameters, each a number or [member], for the next segments; see `with_hyperparameters`."""
        self._check_open("call view.set")
        self.wanted |= hyperparameters

    def close(self) -> None:
        """End this view: the training goes on and may overwrite its states."""
        self._run = None

    def _check_open(self, action):
        if self._run is None:
            raise RuntimeError(f"The training has gone on from epoch {self.epoch}: {action} in the callback.")


def check_callbacks(callbacks: Any, on_interrupt: str) -> None:
    """Raise ValueError if `callbacks` is no list of functions or `on_interrupt` is unknown."""
    if on_interrupt not in ("raise", "return"):
        raise ValueError(f'on_interrupt must be "raise" or "return", got {on_interrupt!r}.')
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ValueError(f"callbacks must be a list of functions of a TrainingView, got {callbacks!r:.80}.")


def call(callbacks: Sequence[Callable], run: Any, history: Any) -> None:
    """Call all `callbacks` between two segments, then stop members and set hyperparameters as they requested."""
    view = TrainingView(run, history)
    try:
        for callback in callbacks:
            callback(view)
    finally:
        view.close()
    if not view.training[run.still_training()].all():
        run.stop(~view.training)
    if view.wanted and view.training.any():
        run.set(view.wanted)


def _last(values):
    return jax.tree.map(lambda of_epochs: of_epochs[-1], values)
