"""What a caller receives from a training: the history so far in callbacks, the swarm and its history at the end."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from turbanet.core import metrics, stopping
from turbanet.core.gather import gathered, home
from turbanet.core.interrupt import Interrupted, noted
from turbanet.core.state import State
from turbanet.training.callbacks import call
from turbanet.training.history import History, name_diverged
from turbanet.training.run import Training


@dataclasses.dataclass(frozen=True)
class Record:
    """The caller's side of one training.

    swarm : the members before the training
    metric : as `fit` takes it
    followed : see `History`
    callbacks : as `fit` takes them
    """

    swarm: State
    metric: Any
    followed: tuple[str, str, float]
    callbacks: Sequence[Callable]

    def history(self, run: Training, epochs: Any, recorded: Any) -> History:
        """Return the history of a run after `epochs` [member]; `recorded` is what `Training.losses_so_far` returns."""
        train_loss, validation_loss, values = recorded
        scores = values.get(metrics.ONE)
        if isinstance(self.metric, Mapping):
            scores = {name: values.get(name) for name in self.metric}
        names = np.array(self.swarm.seed), np.array(self.swarm.id)
        begun = np.array(self.swarm.epoch)
        seconds = run.compile_seconds, run.steady_seconds
        # An epoch whose metric failed is trained, but has no scores.
        trained = np.minimum(np.asarray(epochs) - begun, len(train_loss))
        return History(train_loss, validation_loss, *names, *seconds, run.plan, trained, scores, begun, self.followed)

    @property
    def between(self) -> Callable[[Training], None] | None:
        """The function that a run calls between its segments; None without callbacks."""
        if not self.callbacks:
            return None
        return lambda run: call(self.callbacks, run, self.history(run, run.everyone(_epochs), run.losses_so_far()))

    def finish(self, run: Training, *, progress: bool, on_interrupt: str) -> tuple[Any, History]:
        """Train to the end or to Ctrl-C, and return what `fit` returns or raise `Interrupted`.

        An exception of a callback, a loader or a full disk carries `swarm` and `history` as well.
        """
        failure, interrupted = None, False
        try:
            interrupted = run.finish(run.losses_now, progress=progress)
        except (Exception, KeyboardInterrupt) as error:
            if not run.holds_states or run.is_untrained:
                run.release()
                raise
            failure = error
        finally:
            run.close()
        with noted():
            try:
                state = run.end()
            except OSError as error:
                failure = failure or error
                state = run.last()
            state, history = self._result(run, state)
        if failure:
            vars(failure).update(swarm=state, history=history)
            failure.add_note("What was trained by then is this exception's swarm and history.")
            raise failure
        if interrupted and on_interrupt == "raise":
            raise Interrupted(state, history)
        return state, history

    def _result(self, run, state):
        """Return (swarm, history) for the caller."""
        history = self.history(run, state.epoch, run.losses_so_far())
        has_best = state._stopping is not None and state._stopping.patience is not None
        state = gathered(stopping.restored(state))
        may_see_none = getattr(run.program, "is_masked", False)
        name_diverged(state, history, restored=has_best, by_weights=may_see_none)
        return jax.device_put(state, jax.tree.map(home, self.swarm)), history


def _epochs(state):
    return state.epoch
