"""Watching and steering a training between its segments: what a callback is shown, and what it may ask for."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from turbanet.training.arrays import as_array, is_key


class TrainingView:
    """A training between two segments, as a callback is shown it: to be read, but for `stop` and `set`.

    Attributes
    ----------
    epoch : int, epochs of this call of `fit` that are done
    epochs : int, epochs that were asked for
    history : the `History` so far
    train_loss : [member] of the last epoch, NaN for a member that has stopped
    validation_loss : likewise, None without validation
    validation_metric : likewise, of several metrics {name: [member]}
    training : bool [member], who trains on
    """

    def __init__(self, run: Any, history: Any):
        self.history = history
        self.epoch = run.done
        self.epochs = run.epochs
        self.training = np.isin(np.arange(len(run.start)), run.still_training())
        self.wanted: dict[str, Any] = {}  # hyperparameters, by name
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
        """All members as they are now (with `patience`, not their best weights): a copy, made when it is asked for."""
        self._check_open("read view.swarm")
        now = self._run.everyone().replace(underway=None, stopping=None)
        return jax.tree.map(lambda leaf: leaf.copy() if is_key(leaf) else jnp.array(leaf, copy=True), now)

    def stop(self, members: ArrayLike | None = None) -> None:
        """End the training of these members, bool [member] or int positions, after this segment; None: of all.

        They stay as they are now, or with `patience` as they were best; the others keep their bits.
        """
        self._check_open("call view.stop")
        count = len(self.training)
        asked = np.ones(count, bool) if members is None else as_array(members, "members")
        if asked.shape == (0,):  # a list of nobody
            return
        if asked.dtype == bool:
            if asked.shape != (count,):
                raise ValueError(f"stop takes bool [member] of the {count} members, got shape {asked.shape}.")
        else:
            inside = np.issubdtype(asked.dtype, np.integer) and ((asked >= 0) & (asked < count)).all()
            if not inside:
                raise ValueError(f"stop takes positions from 0 to {count - 1}, or bool [member]; got {members!s:.60}.")
            asked = np.isin(np.arange(count), asked)
        self.training = self.training & ~np.asarray(asked)

    def set(self, **hyperparameters: Any) -> None:
        """Train on with these hyperparameters, each a number or [member]; see `with_hyperparameters`."""
        self._check_open("call view.set")
        self.wanted |= hyperparameters

    def close(self) -> None:
        """The training goes on, and its states are its own again."""
        self._run = None

    def _check_open(self, what):
        if self._run is None:
            raise RuntimeError(f"The training has gone on from epoch {self.epoch}: {what} in the callback.")


def check_callbacks(callbacks: Any, on_interrupt: str) -> None:
    """ValueError for what is no list of functions, and for what `fit` does not do on Ctrl-C."""
    if on_interrupt not in ("raise", "return"):
        raise ValueError(f'on_interrupt must be "raise" or "return", got {on_interrupt!r}.')
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ValueError(f"callbacks must be a list of functions of a TrainingView, got {callbacks!r:.80}.")


def call(callbacks: Sequence[Callable], run: Any, history: Any) -> None:
    """Show all `callbacks` a training between two segments, then do what they asked for."""
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


def _last(seen):
    return jax.tree.map(lambda of_epochs: of_epochs[-1], seen)
