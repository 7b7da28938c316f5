"""Checks of the arguments of `fit`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from turbanet.core import metrics, schedules, stopping
from turbanet.core.arrays import check_whole
from turbanet.data.checks import check_data, check_masks, predicted_by_first, short
from turbanet.data.examples import pair, prepare, targets
from turbanet.training.history import TRAIN_LOSS


class Checked(NamedTuple):
    """The checked arguments of `fit`: the loss, `Data`, compiled metrics, those of the host, (monitor, mode)."""

    loss_fn: Callable
    data: Any
    held_out: Any
    in_program: tuple
    on_host: dict
    rule: tuple

    def followed(self, validation: Any, min_delta: float) -> tuple[str, str, float]:
        """Return (name, mode, min_delta) of what `History.best` goes by."""
        monitor, mode = self.rule
        return TRAIN_LOSS if validation is None else monitor, mode, min_delta


def check_fit(
    swarm: Any,
    x: Any,
    y: Any,
    loss_fn: Callable | None,
    *,
    epochs: int,
    batch_size: int | None = None,
    rows: Any = None,
    validation: Any = None,
    validation_rows: Any = None,
    metric: Any = None,
    patience: int | None = None,
    min_delta: float = 0.0,
    monitor: str = stopping.LOSS,
    mode: str | None = None,
    per_member: Any = False,
    allow_nan: bool = False,
    equal_steps: bool = False,
    segment: int | None = None,
    of_batches: bool = False,
    **_: Any,
) -> Checked:
    """Check the arguments of `fit` and return what it needs of them; ValueError for those that it refuses.

    of_batches : whether x and y come later, batch by batch
    """
    if validation is None and (validation_rows is not None or metric is not None):
        raise ValueError("validation_rows or metric came without validation=(x, y): give the data they are for.")
    if validation is None and (patience is not None or schedules.needs_validation(swarm)):
        raise ValueError('patience and the schedule "reduce" follow the validation loss: give validation=(x, y).')
    if patience is None and min_delta != 0:
        raise ValueError(f"min_delta={min_delta!r} came without patience, which it is for: give both, or none.")
    loss_fn = swarm.loss(loss_fn)
    data = held_out = None
    if not of_batches:
        data = prepare(swarm, x, y, rows=rows, per_member=per_member)
        check_data(swarm, data, loss_fn, allow_nan=allow_nan, trains=True)
    if validation is not None:
        part = "validation "
        held_out = prepare(swarm, *pair(validation), rows=validation_rows, per_member=per_member, part=part)
        check_data(swarm, held_out, loss_fn, allow_nan=allow_nan, part=part)
    optional = {"batch_size": batch_size, "segment": segment, "patience": patience}
    check_whole(epochs=epochs, **{name: number for name, number in optional.items() if number is not None})
    if data is not None and not equal_steps and len(members := short(data, batch_size)):
        one, least = members[0], int(np.min(data.count))
        which = f"member {one} (seed {swarm.seed[one]}, id {swarm.id[one]}), which sees {data.count[one]}"
        batch = f"Batches of {min(batch_size or data.length, data.length)} rows for {which},"
        check_masks(swarm, loss_fn, batch, f"batch_size={least} at the most, or equal_steps=True")
    in_program, on_host = metrics.split(metric)
    rule = metrics.monitored(monitor, mode, [*dict(in_program), *on_host], patience)
    if held_out and on_host:
        for prediction in predicted_by_first(swarm, held_out, loss_fn):
            metrics.check(on_host, prediction, targets(held_out, 0))
    return Checked(loss_fn, data, held_out, in_program, on_host, rule)
