"""Train, evaluate and predict whole swarms: epochs compiled into one program, data shared by index."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from turbanet.training import autoplan, checkpoint, schedules, stopping
from turbanet.training.member import SHUFFLE, member_key
from turbanet.training.plan import Plan, choose, gathered, resized
from turbanet.training.program import Evaluate, Layout, Predict, Train, compiled
from turbanet.training.run import Training
from turbanet.training.sampling import check_rows, epoch_order


@dataclasses.dataclass(frozen=True)
class History:
    """What `fit` saw: losses [epoch, member] (validation_loss None without validation data), identities, seconds.

    validation_metric [epoch, member]: what `fit`'s metric was, None without one.

    epochs int [member]: how many each member trained for; its losses are NaN after that.
    """

    train_loss: np.ndarray
    validation_loss: np.ndarray | None
    seed: np.ndarray
    member: np.ndarray
    compile_seconds: float
    steady_seconds: float
    plan: Plan
    epochs: np.ndarray
    validation_metric: np.ndarray | None = None

    def frame(self):
        """A tidy pandas table: epoch, seed, member (its id), train_loss, validation_loss, validation_metric."""
        import pandas as pd

        epochs, members = self.train_loss.shape
        table = {
            "epoch": np.repeat(np.arange(epochs), members),
            "seed": np.tile(self.seed, epochs),
            "member": np.tile(self.member, epochs),
            "train_loss": self.train_loss.ravel(),
        }
        for name in ("validation_loss", "validation_metric"):
            if getattr(self, name) is not None:
                table[name] = getattr(self, name).ravel()
        return pd.DataFrame(table)


def fit(
    swarm,
    x,
    y,
    loss_fn=None,
    *,
    epochs,
    batch_size=None,
    rows=None,
    validation=None,
    validation_rows=None,
    metric=None,
    patience=None,
    min_delta=0.0,
    checkpoints=None,
    per_member=False,
    shuffle=True,
    plan=None,
    segment=None,
    progress=True,
):
    """Train every member for `epochs` epochs: -> (swarm, History).

    x [row, ...] and y [row, ...] are shared by all members, or lead with the member axis where `per_member` is true (a
    pair says it of x and y apart, a tree in it of their leaves); both may be pytrees. `rows` int [member, row] says
    which rows each member sees (see `sampling`; default: all). `batch_size` None is all rows in one step. `validation`
    is (x, y) of the same kind, its loss computed after each epoch on `validation_rows`, and `metric(prediction, y) -> a
    number` beside it, such as `accuracy`: a mean over rows. With `patience` a member stops
    after so many epochs in a row that did not better its best validation loss by more than `min_delta`; every member
    ends with its best weights, and stopped ones cost nothing from the next segment on that needs half as many blocks.
    `checkpoints` (a folder or `Checkpoints`) keeps the training after each segment: killed and called again as before,
    it ends bit for bit where it would have ended, by the plan and the segments it began with. `segment` is the number
    of epochs per compiled call. `plan` says where members run: a `Plan`, None for one by rule, "auto" for one measured
    after the first segment where the rest is long enough to spend 5 % of it (or in an earlier run: it is remembered);
    `history.plan` is the last one.
    Raises ValueError, before anything is trained, for data, rows or numbers that do not fit the swarm or one another.
    """
    loss_fn = swarm.loss(loss_fn)
    task = _Task(swarm, x, y, rows, per_member)
    held_out = None if validation is None else _Task(swarm, *validation, validation_rows, per_member)
    if validation is None and validation_rows is not None:
        raise ValueError("validation_rows came without validation=(x, y): give the data they index.")
    if validation is None and metric is not None:
        raise ValueError("metric came without validation=(x, y): give the data it is computed on.")
    if validation is None and (patience is not None or schedules.needs_validation(swarm)):
        raise ValueError('patience and the schedule "reduce" follow the validation loss: give validation=(x, y).')
    _check_whole(epochs=epochs, batch_size=batch_size, segment=segment, patience=patience)
    batch_size = min(batch_size or task.length, task.length)
    segment = min(segment or _segment(epochs), epochs)

    one = Train(loss_fn, segment, batch_size, shuffle, task.layout, held_out and held_out.layout, metric=metric)
    own = {"train": task.own, "validation": held_out and held_out.own}
    shared = {"train": task.shared, "validation": held_out and held_out.shared}
    auto, given, plan = plan == "auto", isinstance(plan, Plan), choose(plan, swarm)
    known = autoplan.recall(one, swarm, task.own, task.shared, devices=plan.devices) if auto else None
    start = swarm if patience is None else stopping.with_stopping(swarm, patience, min_delta)
    facts = None if checkpoints is None else checkpoint.facts(start, one, (own, shared))
    keeper = facts and checkpoint.Keeper(checkpoints, facts)
    kept = keeper and keeper.latest()
    if kept:
        segment = kept[1]["segment"]
        same = kept[1]["asked"] == plan.block  # less memory than it asks for may have made the block smaller
        known = Plan(plan.devices[: kept[1]["devices"]], kept[1]["block"]) if same or not given else None
    run = Training(one, start, own, shared, known or plan, asked=plan.block)
    if kept:
        run.resume(*kept)
    with tqdm(
        total=epochs, initial=min(run.done, epochs), unit="epoch", **({} if progress else {"disable": True})
    ) as bar:
        while run.done < epochs and len(run.training):
            run.segment(min(segment, epochs - run.done))
            bar.update(run.done - bar.n)
            if keeper:
                keeper.save(run.done, *run.kept(segment))
            bar.set_postfix(loss=f"{run.loss:.4g}")
            if auto and not known and run.done == segment < epochs and len(run.training):
                run.search(epochs)
    if keeper:
        keeper.close()
    train_loss, validation_loss, validation_metric = (
        None if part[0] is None else np.concatenate(part) for part in zip(*run.losses, strict=True)
    )
    identity = np.asarray(swarm.seed), np.asarray(swarm.id)
    state = run.everyone()
    seconds = run.compile_seconds, run.steady_seconds
    trained = np.asarray(state.epoch) - np.asarray(swarm.epoch)
    history = History(train_loss, validation_loss, *identity, *seconds, run.plan, trained, validation_metric)
    return _unplace(state if patience is None else stopping.restored(state), swarm), history


def measured_plan(
    swarm, x, y, loss_fn=None, *, batch_size=None, rows=None, per_member=False, devices=None, seconds=60.0
) -> Plan:
    """The fastest plan for training on these data (see `fit`), searched for at most about `seconds`, and remembered.

    `fit(plan="auto")` takes a remembered one, and searches itself where a run is long enough; `print` it to see why.
    """
    task = _Task(swarm, x, y, rows, per_member)
    _check_whole(batch_size=batch_size)
    batch_size = min(batch_size or task.length, task.length)
    one = Train(swarm.loss(loss_fn), 1, batch_size, True, task.layout, None)
    plan = choose(Plan(devices), swarm)
    return autoplan.search(one, swarm, task.own, task.shared, devices=plan.devices, start=plan.block, seconds=seconds)


def evaluate(swarm, x, y, loss_fn=None, *, rows=None, per_member=False, plan=None):
    """Every member's loss [member] on its rows of x, y (see `fit`), each row counted once."""
    task = _Task(swarm, x, y, rows, per_member)
    return _apply(Evaluate(swarm.loss(loss_fn), task.layout), swarm, task, plan)[0]


def predict(swarm, x, *, rows=None, per_member=False, plan=None):
    """Every member's prediction [member, row, ...] on x [row, ...], or on its `rows` of it (padding predicts row 0)."""
    task = _Task(swarm, x, None, rows, per_member)
    return _apply(Predict(task.layout), swarm, task, plan)


def batch_order(swarm, rows, *, epochs, batch_size):
    """The rows that `fit` would read: int32 [member, epoch, step, batch], for `rows` a number or [member, row]."""
    if np.ndim(rows) == 0:
        rows = jnp.tile(jnp.arange(rows), (len(swarm), 1))
    rows, counts = check_rows(rows, members=len(swarm), length=int(np.max(rows)) + 1)

    def one(seed, id, epoch, rows, count):
        key = jax.random.fold_in(member_key(seed, id, SHUFFLE), epoch)
        return rows[epoch_order(key, count, length=rows.shape[0], batch_size=batch_size)]

    each_epoch = jax.vmap(one, (None, None, 0, None, None))
    order = jax.vmap(each_epoch)(swarm.seed, swarm.id, swarm.epoch[:, None] + jnp.arange(epochs), rows, counts)
    return np.array(order)  # writable, as PyTorch wants its arrays


class _Task:
    """Data checked and sorted into what each member owns and what all share."""

    def __init__(self, swarm, x, y, rows, per_member):
        if jnp.ndim(swarm.step) != 1:
            raise ValueError(
                "A swarm leads with a member axis; this is one network: make it one by TurbaTrainState.swarm."
            )
        both = per_member if isinstance(per_member, tuple) else (per_member, per_member)
        data = {"x": jax.tree.map(jnp.asarray, x), "y": jax.tree.map(jnp.asarray, y)}
        owned = {name: jax.tree.broadcast(flag, data[name]) for name, flag in zip("xy", both, strict=True)}
        lengths = set()
        for name in data:
            for leaf, own in zip(jax.tree.leaves(data[name]), jax.tree.leaves(owned[name]), strict=True):
                if own and leaf.shape[:1] != (len(swarm),):
                    raise ValueError(
                        f"{name} has shape {leaf.shape}; per_member, it must lead with {len(swarm)} members."
                    )
                lengths.add(leaf.shape[own : own + 1])
        if len(lengths) != 1 or () in lengths or (0,) in lengths:
            raise ValueError(f"x and y must have the same number of rows, at least one; got {sorted(lengths)}.")
        length = lengths.pop()[0]
        counts = None
        if rows is not None:
            rows, counts = check_rows(rows, members=len(swarm), length=length)
            length = rows.shape[1]
        self.length = length
        self.layout = Layout(length, rows is not None, rows is not None and bool((counts < length).any()))
        self.own = jax.tree.map(lambda leaf, own: leaf if own else None, data, owned) | {"rows": rows, "count": counts}
        self.shared = jax.tree.map(lambda leaf, own: None if own else leaf, data, owned)


def _apply(one, swarm, task, plan):
    plan = choose(plan, swarm)
    state, own, shared = plan.place(swarm), plan.place(task.own), plan.share(task.shared)
    out = compiled(one, plan, state, own, shared)(state, own, shared)
    return jax.device_put(resized(out, len(swarm)), swarm.step.sharding)


def _unplace(state, like):
    """`state` on the devices that `like` is on."""
    return jax.device_put(gathered(state), jax.tree.map(lambda old: old.sharding, like))


def _check_whole(**numbers):
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int | np.integer) or number < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")


def _segment(epochs):
    """About a tenth of the epochs; a whole divisor where there is one near, for then one program serves all."""
    near = range(max(1, epochs // 20), max(1, epochs // 5) + 1)
    return min(near, key=lambda k: (epochs % k > 0, abs(k - epochs / 10)))
