"""The history of a training: losses and metrics of each member in each epoch, its best epochs, and its cost."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core import extras, metrics, stopping
from turbanet.core.plan import Plan
from turbanet.core.tables import Shown, count, spread

if TYPE_CHECKING:
    import pandas as pd

TRAIN_LOSS = "train_loss"
MAX_NAMED = 5  # diverged members that a message names


@dataclasses.dataclass(frozen=True, repr=False)
class History(Shown):
    """Losses and metrics of each member in each epoch of `fit`, and the seconds it took.

    `first + second` is the history of two calls, of which the second trained the swarm that the first returned.

    train_loss: [epoch, member]; validation_loss, validation_metric: likewise, None where not requested; of several
    metrics {name: [epoch, member]}.
    seed, member: int [member], the members' names, as `swarm.seed` and `swarm.id`.
    compile_seconds, steady_seconds: spent waiting for compilation, and training without it.
    plan: where the members ran at first; None in an unpickled history.
    epochs: int [member], how many each member trained for; its losses are NaN after that.
    begun: int [member], how many it had trained for before, from which `frame` counts on.
    followed: (monitor, mode, min_delta), by which `best` finds an epoch by default.
    """

    train_loss: np.ndarray
    validation_loss: np.ndarray | Any  # None is not named: who asked for it need not check
    seed: np.ndarray
    member: np.ndarray
    compile_seconds: float
    steady_seconds: float
    plan: Plan | None
    epochs: np.ndarray
    validation_metric: Any = None
    begun: np.ndarray | int = 0
    followed: tuple[str, str, float] = (TRAIN_LOSS, "min", 0.0)

    def _shown(self):
        epochs = np.broadcast_to(self.epochs, len(self.member))
        low, high = int(epochs.min(initial=len(self.train_loss))), int(epochs.max(initial=0))
        length = count(high, "epoch") if low >= high else f"{low} to {high} epochs"
        cost = f"{self.steady_seconds:.3g} s of training, {self.compile_seconds:.3g} s of compilation"
        ends = {"first epoch": np.zeros_like(epochs), "last epoch": np.maximum(epochs - 1, 0)}
        rows = [["median (range) of the members", *ends]]
        for name, values in self.recorded().items() if high else ():
            rows.append([name, *(spread(values[epoch, np.arange(len(epoch))]) for epoch in ends.values())])
        return f"History: {count(len(epochs), 'member')}, {length}, {cost}", rows

    def frame(self) -> "pd.DataFrame":
        """Return a tidy pandas table: epoch, seed, member (its id), train_loss, validation_loss, metrics by name."""
        pd = extras.pandas()

        epochs, members = self.train_loss.shape
        epoch = np.arange(epochs)[:, None] + np.broadcast_to(self.begun, members)
        names = {"seed": np.tile(self.seed, epochs), "member": np.tile(self.member, epochs)}
        recorded = {name: values.ravel() for name, values in self.recorded().items()}
        return pd.DataFrame({"epoch": epoch.ravel(), **names, **recorded})

    def recorded(self) -> dict[str, np.ndarray]:
        """Return {name: [epoch, member]} of the losses and metrics that were recorded."""
        metric = self.validation_metric
        losses = {TRAIN_LOSS: self.train_loss, stopping.LOSS: self.validation_loss}
        recorded = {**losses, **(metric if isinstance(metric, Mapping) else {metrics.ONE: metric})}
        return {name: values for name, values in recorded.items() if values is not None}

    def best(self, monitor: str | None = None, mode: str | None = None) -> "pd.DataFrame":
        """Return each member's best epoch, as a row of `frame`; of one call with `patience`, that of its weights.

        monitor, mode : the name of a loss or metric, and whether its best is the smallest, "min", or largest, "max",
            which a metric needs; None: what patience followed, else the validation loss, else the training loss. A
            member without any number of that name has the row of its first epoch.
        """
        followed, its_mode, min_delta = self.followed
        monitor = followed if monitor is None else monitor
        if monitor != followed or mode not in (None, its_mode):
            min_delta = 0.0
            its_mode = "min" if monitor in (TRAIN_LOSS, stopping.LOSS) else ""
        mode = its_mode if mode is None else mode
        recorded = self.recorded()
        if monitor not in recorded or mode not in ("min", "max"):
            known = f'one of {", ".join(recorded)}, and mode "min" or "max"'
            raise ValueError(f"best takes {known}; got {monitor!r} and {mode!r}.")
        compared = jnp.promote_types(self.train_loss.dtype, jnp.zeros(()).dtype)  # as patience compared
        values = np.asarray(recorded[monitor], compared) * (1 if mode == "min" else -1)
        best = np.full(values.shape[1], np.inf, values.dtype)
        epoch = np.zeros(values.shape[1], int)
        for number, value in enumerate(values):
            better = value < best - min_delta
            best[better], epoch[better] = value[better], number
        rows = epoch * len(epoch) + np.arange(len(epoch))
        return self.frame().iloc[rows].reset_index(drop=True)

    def __add__(self, other: "History") -> Self:
        if not isinstance(other, History):
            return NotImplemented
        first = dict(zip(("seed", "member"), (self.seed, self.member), strict=True))
        if any(not np.array_equal(names, getattr(other, name)) for name, names in first.items()):
            raise ValueError("These histories are of other members: add those of calls that train one swarm on.")
        wrong = np.broadcast_to(self.begun + self.epochs != other.begun, len(self.member))
        if wrong.any():
            one = int(wrong.argmax())
            ended, begun = (np.broadcast_to(n, wrong.shape)[one] for n in (self.begun + self.epochs, other.begun))
            gap = f"member {self.member[one]} ended the first after {ended} epochs and began the second after {begun}"
            raise ValueError(f"These histories do not follow one another: {gap}.")
        empty = [not len(each.train_loss) for each in (self, other)]  # interrupted before the first epoch
        if not any(empty) and self.recorded().keys() != other.recorded().keys():
            received = f"{list(self.recorded())} and {list(other.recorded())}"
            raise ValueError(f"Histories to be added must hold the same metrics, got {received}: pass equal metric=.")

        length = max(len(self.train_loss), int((self.epochs + other.epochs).max(initial=0)))

        def joined(one, two):
            return _one_after_the_other(one, two, self.epochs, length)

        def both(name):
            one, two = getattr(self, name), getattr(other, name)
            if isinstance(one, Mapping) or isinstance(two, Mapping):
                one, two = (each if isinstance(each, Mapping) else {name: each} for each in (one, two))
                return {key: joined(one[key], two[key]) for key in one}
            return None if one is None else joined(one, two)

        names = [TRAIN_LOSS, stopping.LOSS, "validation_metric"]
        recorded: dict[str, Any]
        if any(empty):
            recorded = {name: getattr(other if empty[0] else self, name) for name in names}
        else:
            recorded = {name: both(name) for name in names}
        costs = ("compile_seconds", "steady_seconds", "epochs")
        sums = {name: getattr(self, name) + getattr(other, name) for name in costs}
        return dataclasses.replace(self, **recorded, **sums, plan=other.plan, followed=other.followed)


def diverged(swarm: Any, history: History, *, by_weights: bool = False) -> np.ndarray:
    """Whether each member's last training loss, or any of its weights, is NaN or infinite, bool [member].

    by_weights : whether a loss may be NaN because it had no rows, so that only NaN weights count
    """
    epochs = np.broadcast_to(history.epochs, len(swarm))
    is_diverged = np.zeros(len(swarm), bool)
    if len(history.train_loss):
        last = np.take_along_axis(history.train_loss, np.maximum(epochs - 1, 0)[None], axis=0)[0]
        is_diverged |= (np.isinf(last) if by_weights else ~np.isfinite(last)) & (epochs > 0)
    for leaf in jax.tree.leaves(swarm.params):
        xp = np if isinstance(leaf, np.ndarray) else jnp  # computed where the leaf is
        with np.errstate(all="ignore"):
            of_members = leaf.reshape(len(leaf), -1)
            finite = np.asarray(xp.isfinite(of_members.sum(axis=1)))
            is_diverged |= False if finite.all() else ~np.asarray(xp.isfinite(of_members).all(axis=1))
    return is_diverged


def name_diverged(swarm: Any, history: History, *, restored: bool, by_weights: bool = False) -> None:
    """Log which members have diverged, if any; `restored`: they have the weights of their best epoch again."""
    positions = np.flatnonzero(diverged(swarm, history, by_weights=by_weights))
    if not len(positions):
        return
    ids = history.member[positions].tolist()
    of_seeds = zip(history.seed[positions].tolist(), ids, strict=True)
    names = [f"{name}" for name in (ids if (history.seed == history.seed[0]).all() else of_seeds)]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    which = f"{len(positions)} of {len(swarm)} members"
    if len(set(zip(history.seed.tolist(), history.member.tolist(), strict=True))) == len(swarm):
        which += f" ({', '.join(names[:MAX_NAMED])}{more})"  # names are ambiguous in several trainings in one
    problem = f"{which} diverged, with a NaN or infinite loss or weight"
    note = "; they have the weights of their best epoch again, or the first ones if none was good" if restored else ""
    advice = "take a smaller learning rate, clip gradients, or leave them out of what follows"
    logging.getLogger("turbanet").warning(f"{problem}{note}: {advice}.")


def _one_after_the_other(first, second, epochs, length):
    """Join [epoch, member]: each member's first `epochs` [member] of `first`, then `second`, then NaN to `length`."""
    joined = np.full((max(length, epochs.max(initial=0) + len(second)), first.shape[1]), np.nan, first.dtype)
    joined[: len(first)] = first
    number = np.arange(len(second))[:, None] + epochs
    np.put_along_axis(joined, number, second, axis=0)
    return joined[:length]
