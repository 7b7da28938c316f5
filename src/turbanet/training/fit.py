"""Train, evaluate and predict whole swarms: epochs compiled into one program, data shared by index."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from turbanet.training import memmap, metrics, processes, stopping
from turbanet.training.callbacks import check_callbacks
from turbanet.training.checkpoint import Checkpoints
from turbanet.training.checks import check_data, check_fit, short
from turbanet.training.data import prepare
from turbanet.training.history import TRAIN_LOSS, History
from turbanet.training.member import SHUFFLE, Swarm, member_key
from turbanet.training.plan import Plan, choose, say_once
from turbanet.training.program import Evaluate, Train, predict_rows
from turbanet.training.record import Record
from turbanet.training.run import Training
from turbanet.training.sampling import check_rows, epoch_order, own_order, own_steps
from turbanet.training.scores import apply, evaluated
from turbanet.training.streaming import Passing, Streaming

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
    plan: Plan | None = None,
    segment: int | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
    compile_only: bool = False,
    callbacks: Sequence[Callable] = (),
) -> tuple[Swarm, History]:
    """Train every member for some epochs, all of them at once.

    Parameters
    ----------
    swarm : TurbaTrainState
    x, y : arrays or pytrees of arrays, [row, ...] shared by all members, or [member, row, ...] where `per_member`. What
        lies on disk (np.load(mmap_mode="r")) as a type that JAX computes in is not copied: a CPU reads it where it
        lies, other devices in parts
    loss_fn : loss(params, x, y, apply_fn) -> (scalar, prediction) of one member; None: the swarm's own
    epochs : int, passes over the rows that a member sees
    batch_size : rows of one step, of a member with fewer rows all of its own; None: all of them
    rows : int [member, row], which rows each member sees (see `sampling`); None: all. A member makes the steps that it
        makes alone: as many as it has batches of its own rows, of which the last begins with the first ones again
    validation : (x, y) of the same kind, scored after each epoch
    validation_rows : int [member, row], the rows of it that each member is scored on; None: all
    metric : metric(prediction, y) -> a number for a member's own held-out rows, after each epoch, or {name: metric}.
        One that takes mask=, bool [row], as `accuracy` does, is compiled; any other one is called with NumPy's arrays,
        for each member and epoch, and before the training once; one of scikit-learn's in its order, (y_true, y_pred),
        and where y holds classes with the likeliest ones of the logits, or with probabilities, as it is for
    patience : epochs in a row without a better validation loss after which a member stops; every member then ends with
        its best weights, and stopped ones cost nothing from the next segment on that needs half as many blocks
    min_delta : by how much a validation loss must be below the best one to be better
    monitor : what patience follows in the validation loss's place, the name of a metric ("validation_metric" for one
        given without a name); one that is called with NumPy's arrays is waited for after each epoch
    mode : whether that metric is to become small, "min", or large, "max"
    checkpoints : a folder or `Checkpoints` that keeps the training after each segment: killed and called again as
        before, it ends bit for bit where it would have ended, by the plan it began with
    per_member : whether x and y lead with the member axis, or are two lists of arrays, an entry a member, which may
        differ in their rows; a pair says it of each, a tree in the pair of its leaves
    shuffle : whether each member draws a new order of its rows for each epoch
    equal_steps : whether members with fewer rows go through them again, until all have made as many steps of as many
        rows as the one that has most
    allow_nan : whether x and y may hold NaN and infinite numbers in rows that a member sees
    plan : where members run: a `Plan`, or None for the rule, which goes by platform
    segment : epochs from one checkpoint to the next, and from one look at who has stopped; None: about a tenth of them
    progress : whether a bar shows the epochs done and the mean losses of the last one
    on_interrupt : what Ctrl-C does within about two seconds, or at the end of an epoch that is not cut (one of fewer
        operations than `parts.LONG`): "raise" an `Interrupted`, whose `swarm` and `history` are what was trained so
        far, or "return" these
    compile_only : True trains nothing and returns the swarm as it came: the program that the same call would run
        compiles in a thread, while the caller does something else, such as another `fit`
    callbacks : functions, each called with a `TrainingView` after each segment: they see how the training stands, may
        stop members, set hyperparameters, and show or log; those that only look are `ProgressTable` and `LivePlot`

    Returns
    -------
    (swarm, History) : the trained members, on the devices they came from, and what was seen; `history.plan` says why

    Raises
    ------
    ValueError : before anything is trained, for data, rows or numbers that do not fit the swarm or one another, labels
        that are no class of the model's, what the loss takes for probabilities and is none, a metric that cannot score
        the predictions, NaN; for a member with fewer rows than a batch where the loss takes no mask=, bool [batch], or
        the model keeps statistics of its batches
    MemoryError : where not even one member at a time fits in memory
    Interrupted : a KeyboardInterrupt, for Ctrl-C and SIGTERM. What a callback raises, or a full disk, carries `swarm`
        and `history` likewise

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
    asked: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "segment": segment, "allow_nan": allow_nan}
    asked |= {"validation": validation, "validation_rows": validation_rows, "rows": rows, "per_member": per_member}
    asked |= {"metric": metric, "patience": patience, "monitor": monitor, "mode": mode, "equal_steps": equal_steps}
    loss_fn, data, held_out, in_program, on_host, rule = check_fit(swarm, x, y, loss_fn, **asked)
    start = stopping.prepared(swarm, patience, min_delta, rule, callbacks)
    segment = segment or max(1, epochs // 10)
    batch_size = min(batch_size or data.length, data.length)
    masked = not equal_steps and len(short(data, batch_size)) > 0
    orders: dict[str, Any] = {"shuffle": shuffle, "equal_steps": equal_steps}
    program = Train(loss_fn, batch_size, metrics=in_program, masked=masked, **orders)
    if monitor in on_host:
        say_once(f"Patience follows {monitor}, which NumPy computes: one epoch a call. With mask= it is compiled.")
    if on_host:
        program = dataclasses.replace(program, predictions=True, epochs=1 if monitor in on_host else metrics.EPOCHS)
    parts = start, (data, held_out)
    if shared := jax.process_count() > 1:
        parts = processes.own(*parts, checkpoints, callbacks)
        progress = progress and jax.process_index() == 0
    followed = TRAIN_LOSS if validation is None else monitor, rule[1], min_delta
    record = Record(swarm, metric, followed, callbacks)
    kept: dict[str, Any] = {"metrics": on_host, "checkpoints": checkpoints, "between": record.between}
    kept |= {"epochs": epochs, "segment": segment}
    run: Training
    if not shared and memmap.is_streamed(data, batch_size, choose(plan, swarm)):
        feed = memmap.Mapped(data, swarm, batch_size=batch_size, **orders)
        run = Streaming(Passing(**vars(program)), start, feed, held_out, known=data, plan=plan, **kept)
    else:
        run = Training(program, *parts, plan=plan, **kept)
    if compile_only:
        run.compile()
        return swarm, record.history(run, swarm.epoch, run.seen())
    how: dict[str, Any] = {"progress": progress, "on_interrupt": on_interrupt}
    if shared:
        how["of_all"] = partial(processes.everyone, members=len(swarm), epochs=epochs)
    return record.finish(run, **how)


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
    """Every member's loss [member] on its rows of x, y: of all its rows as one batch, whatever the loss is.

    Parameters
    ----------
    swarm, x, y, loss_fn, rows, per_member, plan : as `fit` takes them. Where members have different numbers of rows a
        loss that takes mask=, bool [batch], as all of this library do, is one program; any other one is a program for
        each number
    """
    loss_fn = swarm.loss(loss_fn)
    data = prepare(swarm, x, y, rows=rows, per_member=per_member)
    check_data(swarm, data, loss_fn, allow_nan=True)
    return evaluated(Evaluate(loss_fn), swarm, data, plan)[0]


def predict(
    swarm: Swarm, x: Any, *, rows: ArrayLike | None = None, per_member: PerMember = False, plan: Plan | None = None
) -> jax.Array:
    """Every member's prediction [member, row, ...] on x [row, ...], or on its `rows` of it.

    Parameters
    ----------
    swarm, x, per_member, plan : as `fit` takes them
    rows : int [member, row]; what pads it is predicted too, as the last row of x
    """
    data = prepare(swarm, x, rows=rows, per_member=per_member)
    check_data(swarm, data, None, allow_nan=True)
    return apply(predict_rows, swarm, data, plan)


def batch_order(
    swarm: Swarm, rows: ArrayLike, *, epochs: int, batch_size: int, equal_steps: bool = False
) -> np.ndarray:
    """The rows that `fit` would read: int32 [member, epoch, step, batch], for `rows` a number or [member, row].

    -1 stands for steps that a member does not make, and for what its own rows leave of a batch.
    """
    rows = jnp.tile(jnp.arange(rows), (len(swarm), 1)) if np.ndim(rows) == 0 else rows
    rows, counts = check_rows(rows, members=len(swarm), length=int(np.max(rows)) + 1)
    rows = rows[:, : counts.max()]
    how = {"length": rows.shape[1], "batch_size": min(batch_size, rows.shape[1])}
    wraps = equal_steps and bool((counts < rows.shape[1]).any())

    def one_epoch(seed, id, epoch, rows, count):
        key = jax.random.fold_in(member_key(seed, id, SHUFFLE), epoch)
        if wraps:
            return rows[epoch_order(key, count, **how)]
        order = own_order(key, count, **how)
        step, place = jnp.ogrid[: order.shape[0], : order.shape[1]]
        return jnp.where((step < own_steps(count, how["batch_size"])) & (place < count), rows[order], -1)

    each_epoch = jax.vmap(one_epoch, (None, None, 0, None, None))
    order = jax.vmap(each_epoch)(swarm.seed, swarm.id, swarm.epoch[:, None] + jnp.arange(epochs), rows, counts)
    return np.array(order)  # writable, as PyTorch wants its arrays
