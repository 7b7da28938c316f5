"""`fit` on batches that an iterator yields: what is too large for the memory, made on the way, or loaded elsewhere."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from turbanet.training import stopping
from turbanet.training.batches import Batches, Chunk
from turbanet.training.callbacks import check_callbacks
from turbanet.training.checkpoint import Checkpoints
from turbanet.training.checks import check_data, check_fit, check_masks
from turbanet.training.history import TRAIN_LOSS, History
from turbanet.training.member import Swarm
from turbanet.training.plan import Plan
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
    plan: Plan | None = None,
    segment: int | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
    callbacks: Sequence[Callable] = (),
) -> tuple[Swarm, History]:
    """Train every member on batches as they come, in that order: each epoch goes once through them.

    A thread reads ahead, so that the next batches are ready when the last ones are trained on. Batches of one shape
    compile once; a shorter last one is a program of its own.

    Parameters
    ----------
    swarm, loss_fn : as `fit` takes them
    batches : an iterable of (x, y), [row, ...] shared by all members, that begins anew when it is gone through again: a
        DataLoader of PyTorch's, a grain or tf.data pipeline, a list; or batches(epoch), which returns such a thing, as
        a generator; of a stream without end, lambda epoch: itertools.islice(stream, 100). Of (x, y, rows) each member
        sees the rows where its line of rows, bool [member, row], says so, by a loss that takes mask=, bool [batch], as
        all of this library do; what it does not see may hold anything, and a batch of which it sees none is no step;
        of an epoch in which it sees none its loss is NaN
    epochs : how often to go through them
    validation, validation_rows, metric, patience, min_delta, monitor, mode : as `fit` takes them
    checkpoints : as `fit` takes them. A training that is resumed goes on in the middle of an epoch where the iterator
        can say where it is (grain's `get_state`, a stateful loader's `state_dict`), else at the epoch's beginning, with
        whatever order the batches then come in. Batches are not compared with those that it began with
    allow_nan, plan, segment, progress, on_interrupt, callbacks : as `fit` takes them

    Returns
    -------
    (swarm, History) : as `fit`

    Raises
    ------
    ValueError : before anything is trained for what `fit` refuses; for what is no batch, labels that are no class of
        the model's and NaN, when they come, with the epoch and the batch

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
    if jax.process_count() > 1:
        raise ValueError("fit_batches trains in one process: under jax.distributed, fit shares members out.")
    given = Batches(batches, len(swarm))
    asked: dict[str, Any] = {"epochs": epochs, "segment": segment, "allow_nan": allow_nan, "metric": metric}
    asked |= {"validation": validation, "validation_rows": validation_rows}
    asked |= {"patience": patience, "monitor": monitor, "mode": mode}
    loss_fn, _, held_out, in_program, on_host, rule = check_fit(swarm, None, None, loss_fn, of_batches=True, **asked)

    def check(chunk: Chunk) -> None:
        if chunk.is_masked:
            check_masks(swarm, loss_fn, "Batches with rows of each member's own", "leave them out")
        check_data(swarm, chunk.trained_on(), loss_fn, allow_nan=allow_nan)

    start = stopping.prepared(swarm, patience, min_delta, rule, callbacks)
    program = Passing(loss_fn, 0, metrics=in_program, predictions=bool(on_host), masked=True)
    record = Record(swarm, metric, (TRAIN_LOSS if validation is None else monitor, rule[1], min_delta), callbacks)
    how: dict[str, Any] = {"epochs": epochs, "segment": segment or max(1, epochs // 10), "plan": plan}
    how |= {"metrics": on_host, "checkpoints": checkpoints, "between": record.between}
    run = Streaming(program, start, given, held_out, check=check, **how)
    return record.finish(run, progress=progress, on_interrupt=on_interrupt)
