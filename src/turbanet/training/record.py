"""What a caller gets of a training: its history so far for callbacks, and at the end the members and all of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from turbanet.training import metrics, stopping
from turbanet.training.batches import Batches
from turbanet.training.callbacks import call
from turbanet.training.history import History, name_diverged
from turbanet.training.interrupt import Interrupted, noted
from turbanet.training.member import Swarm
from turbanet.training.plan import gathered, home
from turbanet.training.run import Training


@dataclasses.dataclass(frozen=True)
class Record:
    """Of one training.

    swarm : the members as the caller gave them
    metric : as the caller gave it
    followed : see `History`
    callbacks : of the caller
    """

    swarm: Swarm
    metric: Any
    followed: tuple[str, str, float]
    callbacks: Sequence[Callable]

    def history(self, run: Training, epochs: Any, seen: Any) -> History:
        """What was `seen` of a run by now, after so many `epochs` [member]; the metrics as they were asked for."""
        train_loss, validation_loss, found = seen
        asked = found.get(metrics.ONE)
        if isinstance(self.metric, Mapping):
            asked = {name: found.get(name) for name in self.metric}
        names = np.array(self.swarm.seed), np.array(self.swarm.id)
        begun = np.array(self.swarm.epoch)
        costs = run.compile_seconds, run.steady_seconds
        trained = np.minimum(np.asarray(epochs) - begun, len(train_loss))  # where a metric failed the last is not noted
        return History(train_loss, validation_loss, *names, *costs, run.plan, trained, asked, begun, self.followed)

    @property
    def between(self) -> Callable[[Training], None] | None:
        """What a run calls between its segments, if there is anything to call."""
        if not self.callbacks:
            return None
        return lambda run: call(self.callbacks, run, self.history(run, run.everyone(_epochs), run.seen()))

    def finish(
        self, run: Training, *, progress: bool, on_interrupt: str, of_all: Callable | None = None
    ) -> tuple[Swarm, History]:
        """Train to the end, or to Ctrl-C: what `fit` returns, or `Interrupted`.

        What a callback, a loader or a full disk raises carries `swarm` and `history` likewise.

        of_all : of_all(states, what was seen) of this process -> of all members; None where this one has all
        """
        failure, interrupted = None, False
        try:
            interrupted = run.finish(run.losses_now, progress=progress)
        except (Exception, KeyboardInterrupt) as error:
            if of_all or not run.holds_states or not run.progress:
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
            state, seen = of_all(state, run.seen()) if of_all else (state, run.seen())
            state, history = self._finished(run, state, seen)
        if failure:
            vars(failure).update(swarm=state, history=history)
            failure.add_note("What was trained by then is this exception's swarm and history.")
            raise failure
        if interrupted and on_interrupt == "raise":
            raise Interrupted(state, history)
        return state, history

    def _finished(self, run, state, seen):
        """(swarm, history) as the caller gets them."""
        history = self.history(run, state.epoch, seen)
        has_best = state.stopping is not None and state.stopping.patience is not None
        state = gathered(stopping.restored(state))
        of_batches = isinstance(getattr(run, "batches", None), Batches)
        may_see_none = of_batches and getattr(run.program, "is_masked", False)
        name_diverged(state, history, restored=has_best, by_weights=may_see_none)
        return jax.device_put(state, jax.tree.map(home, self.swarm)), history


def _epochs(state):
    return state.epoch
