"""Train on batches from an iterator: data too large for memory, generated on the fly, or read by another loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from turbanet.checkpoints.checkpoint import Checkpoints
from turbanet.core import stopping
from turbanet.core.member import with_constants
from turbanet.core.plan import Plan
from turbanet.core.state import Swarm, check_swarm
from turbanet.data.batches import Batches, Chunk
from turbanet.data.checks import check_data, check_masks
from turbanet.training.callbacks import check_callbacks
from turbanet.training.checks import check_fit
from turbanet.training.history import History
from turbanet.training.record import Record
from turbanet.training.streaming import Passing, Streaming


def fit_batches(
    swarm: Swarm,
    batches: Any,
    loss_fn: Callable | None = None,
    *,
    epochs: int,
    validation: tuple[Any, Any] | None = None,
    validation_rows: ArrayLike | None = None,
    metric: Callable | Mapping[str, Callable] | None = None,
    patience: int | None = None,
    min_delta: float = 0.0,
    monitor: str = stopping.LOSS,
    mode: str | None = None,
    checkpoints: str | os.PathLike | Checkpoints | None = None,
    allow_nan: bool = False,
    member: Any = None,
    plan: Plan | None = None,
    segment: int | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
    callbacks: Sequence[Callable] = (),
) -> tuple[Swarm, History]:
    """Train all members of a swarm at once on batches from an iterator, in its order, each once an epoch.

    A thread reads ahead, so that the next batches are ready when the last ones have been trained on. Batches of one
    shape compile once; a shorter last batch compiles to another program.

    Parameters
    ----------
    swarm, loss_fn : as `fit` takes them
    batches : an iterable of (x, y), [row, ...] shared by all members, that starts again each time it is iterated over:
        a PyTorch DataLoader, a grain or tf.data pipeline, a list. Or a function batches(epoch) that returns such an
        iterable or a generator; epoch counts from 0 in each call: to go on with other orders add int(swarm.epoch[0]).
        For an endless stream, lambda epoch: itertools.islice(stream, 100). With (x, y, rows), rows bool [member, row],
        each member sees the rows that are True for it. The loss must then take mask=, bool [batch], as all losses of
        this library do. Rows that no member sees may hold anything. A batch of which a member sees no row is no step
        for it; its loss is NaN in an epoch in which it sees no row
    epochs : passes over the batches
    validation, validation_rows, metric, patience, min_delta, monitor, mode : as `fit` takes them
    checkpoints : as `fit` takes them. A training resumes at the beginning of an epoch, with the batches that then come;
        they are not compared with those of the first call
    allow_nan, member, plan, segment, progress, on_interrupt, callbacks : as `fit` takes them

    Returns
    -------
    (swarm, History) : as `fit` returns them

    Raises
    ------
    ValueError : before anything is trained, for what `fit` refuses; when the batch arrives, with its epoch and number,
        for what is no batch, labels outside the model's classes, and NaN
    Exception : of the batches; its `swarm` and `history` are what was trained, and `swarm.step` counts the steps of an
        epoch that did not end, too

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> x, y = np.eye(4, dtype=np.float32), np.arange(4)
    >>> swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 4)), optax.adam(0.01), swarm_size=3, sample_input=x[:1])
    >>> def pairs(epoch):
    ...     for begin in (0, 2):
    ...         yield x[begin : begin + 2], y[begin : begin + 2]
    >>> swarm, history = tn.fit_batches(swarm, pairs, tn.softmax_cross_entropy, epochs=5, progress=False)
    >>> history.train_loss.shape
    (5, 3)
    """
    check_callbacks(callbacks, on_interrupt)
    check_swarm(swarm)
    swarm = with_constants(swarm, member, loss_fn or swarm.loss_fn)
    checked = check_fit(
        swarm,
        None,
        None,
        loss_fn,
        of_batches=True,
        epochs=epochs,
        validation=validation,
        validation_rows=validation_rows,
        metric=metric,
        patience=patience,
        min_delta=min_delta,
        monitor=monitor,
        mode=mode,
        allow_nan=allow_nan,
        segment=segment,
    )

    def check(chunk: Chunk) -> None:
        if chunk.is_masked:
            check_masks(swarm, checked.loss_fn, "Batches with rows of each member's own", "leave them out")
        check_data(swarm, chunk.trained_on(), checked.loss_fn, allow_nan=allow_nan, trains=True)

    record = Record(swarm, metric, checked.followed(validation, min_delta), callbacks)
    run = Streaming(
        Passing(checked.loss_fn, 0, metrics=checked.in_program, masked=True),
        stopping.prepared(swarm, patience, min_delta, checked.rule, callbacks),
        Batches(batches, len(swarm), epochs, check),
        checked.held_out,
        epochs=epochs,
        segment=segment or max(1, epochs // 10),
        plan=plan,
        metrics=checked.on_host,
        checkpoints=checkpoints,
        between=record.between,
    )
    return record.finish(run, progress=progress, on_interrupt=on_interrupt)
