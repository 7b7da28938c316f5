"""Train, evaluate and predict with whole swarms: epochs are one compiled program, members share data by index."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from turbanet.checkpoints.checkpoint import Checkpoints
from turbanet.core import stopping
from turbanet.core.arrays import check_whole
from turbanet.core.member import SHUFFLE, member_key, with_constants
from turbanet.core.plan import Plan
from turbanet.core.state import Swarm, check_swarm
from turbanet.data.checks import check_data, short
from turbanet.data.examples import prepare
from turbanet.data.sampling import check_rows, epoch_order, own_order, own_steps
from turbanet.training.callbacks import check_callbacks
from turbanet.training.checks import check_fit
from turbanet.training.history import History
from turbanet.training.program import Evaluate, Train, predict_rows
from turbanet.training.record import Record
from turbanet.training.run import Training
from turbanet.training.scores import apply, evaluated

PerMember: TypeAlias = bool | tuple[Any, Any]  # see `fit`


def fit(
    swarm: Swarm,
    x: Any,
    y: Any,
    loss_fn: Callable | None = None,
    *,
    epochs: int,
    batch_size: int | None = None,
    rows: ArrayLike | None = None,
    validation: tuple[Any, Any] | None = None,
    validation_rows: ArrayLike | None = None,
    metric: Callable | Mapping[str, Callable] | None = None,
    patience: int | None = None,
    min_delta: float = 0.0,
    monitor: str = stopping.LOSS,
    mode: str | None = None,
    checkpoints: str | os.PathLike | Checkpoints | None = None,
    per_member: PerMember = False,
    shuffle: bool = True,
    equal_steps: bool = False,
    allow_nan: bool = False,
    member: Any = None,
    plan: Plan | None = None,
    segment: int | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
    compile_only: bool = False,
    callbacks: Sequence[Callable] = (),
) -> tuple[Swarm, History]:
    """Train all members of a swarm at once, for a number of epochs.

    Parameters
    ----------
    swarm : TurbaTrainState
    x, y : arrays or pytrees of arrays: [row, ...], shared by all members, or [member, row, ...] with `per_member`.
        Without targets y is None. On a CPU, memory-mapped arrays (np.load(mmap_mode="r")) of a type that JAX computes
        in are read in place
    loss_fn : loss(params, x, y, apply_fn) -> (scalar, prediction) of one member; None: the swarm's own
    epochs : int, passes over the rows of a member
    batch_size : rows of one step; a member with fewer rows uses all of its own; None: all rows
    rows : int [member, row], the rows of each member (see `sampling`); None: all. A member makes as many steps as it
        would alone: one for each batch of its own rows, the last one filled up from the beginning of its order
    validation : (x, y) of the same kind, scored after each epoch, as `evaluate` does
    validation_rows : int [member, row], the held-out rows that each member is scored on; None: all
    metric : metric(prediction, y) -> number, of a member's own held-out rows after each epoch, or {name: metric}. The
        prediction is what the loss returns: logits, but probabilities from `binary_cross_entropy` and `cross_entropy`.
        A metric that takes mask=, bool [row], as `accuracy` does, is compiled. Any other one is called with NumPy
        arrays for each member after each epoch, and once before the training. A metric whose first argument is named
        y, y_true, target, label or truth, as scikit-learn's, is called as metric(y, prediction); where y holds classes
        scikit-learn's get the likeliest classes or the probabilities, as they expect. A member whose validation loss
        is NaN or infinite has the score NaN, which is never better
    patience : a member stops after this many epochs in a row without a better validation loss. Every member then ends
        with its best weights, and the optimizer's state of its last epoch. Stopped members are set aside between
        segments, as soon as that halves the work
    min_delta : a validation loss is better if it is lower than the best one by more than this
    monitor : the name of a metric that patience follows instead of the validation loss ("validation_metric" for one
        given without a name)
    mode : whether that metric is better when small, "min", or large, "max"
    checkpoints : a folder or `Checkpoints` in which the training is saved after each segment. A training that was
        killed and is called again as before resumes with the plan it began with, and ends with the same bits
    per_member : whether x and y lead with the member axis, or are lists of an array for each member, whose numbers of
        rows may differ; a pair of bool for x and y separately, where a tree of bool stands for those of the leaves
    shuffle : whether each member draws a new order of its rows for each epoch
    equal_steps : whether members with fewer rows go through them again, until all have made as many full steps as the
        member with the most rows
    allow_nan : whether x and y may hold NaN and infinite numbers in rows that a member sees
    member : constants of each member's own, a tree of arrays [member, ...], such as {"quantile": levels}. A loss and a
        model whose __call__ take the keyword `member` get the member's part; the swarm keeps it, for `predict` and the
        next call. A model is initialised without it
    plan : where members run: a `Plan`, or None for the default of the platform
    segment : epochs between two checkpoints, two calls of callbacks and two checks for stopped members; None: about a
        tenth of all
    progress : whether a bar shows the epochs done and the mean losses of the last one
    on_interrupt : what Ctrl-C does within about two seconds, or at the end of an epoch that is not split (one of fewer
        operations than `parts.LONG`): "raise" an `Interrupted`, whose `swarm` and `history` are what was trained so
        far, or "return" these
    compile_only : whether to train nothing and return the untrained swarm; the program that the same call would run
        compiles in a thread, while the caller does something else, such as another `fit`
    callbacks : functions, each called with a `TrainingView` after each segment: they see the state of the training, may
        stop members, set hyperparameters, and show or log; `ProgressTable` and `LivePlot` only show

    Returns
    -------
    (swarm, History) : the trained members, on the devices they came from, and their losses and metrics;
        `history.plan` is the plan that was used

    Raises
    ------
    ValueError : before anything is trained, for data, rows or numbers that do not fit the swarm or one another, labels
        outside the model's classes, values that the loss takes for probabilities and are none, a metric that cannot
        score the predictions, NaN; for a member with fewer rows than a batch if the loss takes no mask=, bool [batch],
        or the model keeps statistics of its batches
    MemoryError : if not even one member at a time fits in memory
    Interrupted : a KeyboardInterrupt, for Ctrl-C and SIGTERM. An exception of a callback or of a full disk carries
        `swarm` and `history` as well

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> x = np.eye(4, dtype=np.float32)
    >>> swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 4)), optax.adam(0.01), swarm_size=3, sample_input=x[:1])
    >>> swarm, history = tn.fit(swarm, x, np.arange(4), tn.softmax_cross_entropy, epochs=5, progress=False)
    >>> history.train_loss.shape
    (5, 3)
    """
    check_callbacks(callbacks, on_interrupt)
    check_swarm(swarm)
    swarm = with_constants(swarm, member, loss_fn or swarm.loss_fn)
    checked = check_fit(
        swarm,
        x,
        y,
        loss_fn,
        epochs=epochs,
        batch_size=batch_size,
        rows=rows,
        validation=validation,
        validation_rows=validation_rows,
        metric=metric,
        patience=patience,
        min_delta=min_delta,
        monitor=monitor,
        mode=mode,
        per_member=per_member,
        equal_steps=equal_steps,
        allow_nan=allow_nan,
        segment=segment,
    )
    data = checked.data
    batch_size = min(batch_size or data.length, data.length)
    program = Train(
        checked.loss_fn,
        batch_size,
        shuffle=shuffle,
        metrics=checked.in_program,
        masked=not equal_steps and len(short(data, batch_size)) > 0,
        equal_steps=equal_steps,
    )
    record = Record(swarm, metric, checked.followed(validation, min_delta), callbacks)
    run = Training(
        program,
        stopping.prepared(swarm, patience, min_delta, checked.rule, callbacks),
        (data, checked.held_out),
        epochs=epochs,
        segment=segment or max(1, epochs // 10),
        plan=plan,
        metrics=checked.on_host,
        checkpoints=checkpoints,
        between=record.between,
    )
    if compile_only:
        run.compile()
        return swarm, record.history(run, swarm.epoch, run.losses_so_far())
    return record.finish(run, progress=progress, on_interrupt=on_interrupt)


def evaluate(
    swarm: Swarm,
    x: Any,
    y: Any,
    loss_fn: Callable | None = None,
    *,
    rows: ArrayLike | None = None,
    per_member: PerMember = False,
    plan: Plan | None = None,
) -> jax.Array:
    """Return the loss [member] of each member on its rows of x and y.

    All rows of a member are one batch, also for a loss that is not a mean over rows. The model computes at most 1,024
    of them at a time on a CPU and 16,384 on an accelerator: where a row's prediction depends on the others, as in a
    graph, call `swarm.evaluate` and `swarm.predict`, which take all rows at once.

    Parameters
    ----------
    swarm, x, y, loss_fn, rows, per_member, plan : as `fit` takes them. Where members have different numbers of rows, a
        loss that takes mask=, bool [batch], as all losses of this library do, compiles to one program; any other loss
        compiles to one program for each number of rows
    """
    loss_fn = check_swarm(swarm).loss(loss_fn)
    data = prepare(swarm, x, y, rows=rows, per_member=per_member)
    check_data(swarm, data, loss_fn, allow_nan=True)
    return evaluated(Evaluate(loss_fn), swarm, data, plan)[0]


def predict(
    swarm: Swarm, x: Any, *, rows: ArrayLike | None = None, per_member: PerMember = False, plan: Plan | None = None
) -> jax.Array:
    """Return the prediction [member, row, ...] of each member on x [row, ...], or on its `rows` of x.

    The model computes so many rows at a time as in `evaluate`, each row for itself. Padding of `rows`, or of members
    with fewer rows in a list, has the prediction NaN.

    Parameters
    ----------
    swarm, x, per_member, plan : as `fit` takes them; x may be a list of each member's own rows. Where only some arrays
        of a tree x are the members' own, per_member is the pair (tree of bool, False)
    rows : int [member, row]
    """
    data = prepare(swarm, x, rows=rows, per_member=per_member, is_predicted=True)
    check_data(swarm, data, None, allow_nan=True)
    predictions = apply(predict_rows, swarm, data, plan)
    if not data.ragged:
        return predictions
    is_padding = jnp.arange(data.length) >= jnp.asarray(data.count)[:, None]

    def marked(leaf):
        where = is_padding.reshape(*is_padding.shape, *[1] * (leaf.ndim - 2))
        return jnp.where(where, jnp.nan, leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(marked, predictions)


def batch_order(
    swarm: Swarm, rows: ArrayLike, *, epochs: int, batch_size: int | None = None, equal_steps: bool = False
) -> np.ndarray:
    """Return the rows that `fit` would read in each step, int32 [member, epoch, step, batch].

    Parameters
    ----------
    swarm, epochs, batch_size, equal_steps : as `fit` takes them
    rows : the number of rows, or int [member, row]

    Returns
    -------
    The rows; -1 marks steps that a member does not make, and entries of a batch that its own rows do not fill.
    """
    whole = {"epochs": epochs, "batch_size": batch_size, "rows": rows if np.ndim(rows) == 0 else None}
    check_whole(**{name: number for name, number in whole.items() if number is not None})
    rows = jnp.tile(jnp.arange(rows), (len(check_swarm(swarm)), 1)) if np.ndim(rows) == 0 else rows
    rows, counts = check_rows(rows, members=len(swarm), length=int(np.max(rows)) + 1)
    rows = rows[:, : counts.max()]
    wraps = equal_steps and bool((counts < rows.shape[1]).any())
    sizes = {"wraps": wraps, "batch_size": min(batch_size or rows.shape[1], rows.shape[1])}
    order = _orders(swarm.seed, swarm.id, swarm.epoch[:, None] + jnp.arange(epochs), rows, counts, **sizes)
    return np.array(order)  # a writable copy, which PyTorch needs


@partial(jax.jit, static_argnames=("wraps", "batch_size"))
def _orders(seed, id, epoch, rows, count, *, wraps, batch_size):
    """Return `batch_order`'s result: seed, id, count [member], epoch [member, epoch], rows [member, row]."""

    def of_epoch(seed, id, epoch, rows, count):
        key = jax.random.fold_in(member_key(seed, id, SHUFFLE), epoch)
        sizes = {"length": len(rows), "batch_size": batch_size}
        if wraps:
            return rows[epoch_order(key, count, **sizes)]
        order = own_order(key, count, **sizes)
        step, position = jnp.ogrid[: order.shape[0], : order.shape[1]]
        return jnp.where((step < own_steps(count, batch_size)) & (position < count), rows[order], -1)

    every = jax.lax.map(lambda epoch: jax.vmap(of_epoch)(seed, id, epoch, rows, count), epoch.T)
    return every.swapaxes(0, 1)
