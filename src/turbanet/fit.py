"""Train, evaluate and predict whole swarms: epochs compiled into one program, data shared by index."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from turbanet import autoplan
from turbanet.plan import Plan, choose, resized, say_once
from turbanet.program import Evaluate, Layout, Predict, Train, compiled, fits
from turbanet.sampling import check_rows, epoch_order
from turbanet.turba_train_state import SHUFFLE, member_key


@dataclasses.dataclass(frozen=True)
class History:
    """What `fit` saw: losses [epoch, member] (validation_loss None without validation data), identities, seconds."""

    train_loss: np.ndarray
    validation_loss: np.ndarray | None
    seed: np.ndarray
    member: np.ndarray
    compile_seconds: float
    steady_seconds: float
    plan: Plan

    def frame(self):
        """A tidy pandas table: epoch, seed, member (its id), train_loss, validation_loss."""
        import pandas as pd

        epochs, members = self.train_loss.shape
        table = {
            "epoch": np.repeat(np.arange(epochs), members),
            "seed": np.tile(self.seed, epochs),
            "member": np.tile(self.member, epochs),
            "train_loss": self.train_loss.ravel(),
        }
        if self.validation_loss is not None:
            table["validation_loss"] = self.validation_loss.ravel()
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
    per_member=False,
    shuffle=True,
    plan=None,
    segment=None,
    progress=True,
):
    """Train every member for `epochs` epochs: -> (swarm, History).

    x [row, ...] and y [row, ...] are shared by all members, or lead with the member axis where `per_member` is true
    (a pair says it of x and y apart); both may be pytrees. `rows` int [member, row] says which rows each member sees
    (see `sampling`; default: all). `batch_size` None is all rows in one step. `validation` is (x, y) of the same kind,
    its loss computed after each epoch on `validation_rows`. `segment` is the number of epochs per compiled call. `plan`
    says where members run: a `Plan`, None for one by rule, "auto" for one measured after the first segment where the
    rest is long enough to spend 5 % of it (or in an earlier run: it is remembered); `history.plan` is the last one.
    Raises ValueError, before anything is trained, for data, rows or numbers that do not fit the swarm or one another.
    """
    loss_fn = swarm.loss(loss_fn)
    task = _Task(swarm, x, y, rows, per_member)
    held_out = None if validation is None else _Task(swarm, *validation, validation_rows, per_member)
    if validation is None and validation_rows is not None:
        raise ValueError("validation_rows came without validation=(x, y): give the data they index.")
    _check_whole(epochs=epochs, batch_size=batch_size, segment=segment)
    batch_size = min(batch_size or task.length, task.length)
    segment = min(segment or _segment(epochs), epochs)

    one = Train(loss_fn, segment, batch_size, shuffle, task.layout, held_out and held_out.layout)
    own = {"train": task.own, "validation": held_out and held_out.own}
    shared = {"train": task.shared, "validation": held_out and held_out.shared}
    auto, plan = plan == "auto", choose(plan, swarm)
    known = autoplan.recall(one, swarm, task.own, task.shared, devices=plan.devices) if auto else None
    run = _Training(one, swarm, own, shared, known or plan)
    with tqdm(total=epochs, unit="epoch", **({} if progress else {"disable": True})) as bar:
        while run.done < epochs:
            run.segment(min(segment, epochs - run.done))
            bar.update(run.done - bar.n)
            bar.set_postfix(loss=f"{run.losses[-1][0][-1].mean():.4g}")
            if auto and not known and run.done == segment < epochs:
                run.search(epochs)
    train_loss, validation_loss = (
        None if part[0] is None else np.concatenate(part) for part in zip(*run.losses, strict=True)
    )
    identity = np.asarray(swarm.seed), np.asarray(swarm.id)
    history = History(train_loss, validation_loss, *identity, run.compile_seconds, run.steady_seconds, run.plan)
    return _unplace(run.state, swarm), history


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
    return _apply(Evaluate(swarm.loss(loss_fn), task.layout), swarm, task, plan)


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
        own_x, own_y = per_member if isinstance(per_member, tuple) else (per_member, per_member)
        x, y = jax.tree.map(jnp.asarray, x), jax.tree.map(jnp.asarray, y)
        lengths = set()
        for name, data, own in (("x", x, own_x), ("y", y, own_y)):
            for leaf in jax.tree.leaves(data):
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
        self.own = {"x": x if own_x else None, "y": y if own_y else None, "rows": rows, "count": counts}
        self.shared = {"x": None if own_x else x, "y": None if own_y else y}


class _Training:
    """A training under way: where it stands, what it cost, under which plan."""

    def __init__(self, one, swarm, own, shared, plan):
        self.one, self.data, self.members = one, (own, shared), len(swarm)
        self.done, self.losses, self.compile_seconds, self.steady_seconds = 0, [], 0.0, 0.0
        self.start = swarm
        self._place(swarm, plan)

    def _place(self, state, plan):
        own, shared = self.data
        state = state if len(state) == self.members else resized(state, self.members)
        self.plan, self.state = plan, plan.place(state)
        self.own, self.shared = plan.place(own), plan.share(shared)
        self.fits_memory = False

    def segment(self, epochs):
        """Train on for some epochs; out of memory at the first, with half the block."""
        try:
            self._segment(epochs)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if self.done or self.plan.block == 1 or "RESOURCE_EXHAUSTED" not in repr(error):
                raise
            plan = dataclasses.replace(self.plan, block=self.plan.block // 2, candidates=())
            say_once(f"Out of memory with blocks of {self.plan.block} members; going on with {plan.block}.")
            self._place(self.start, plan)
            self.segment(epochs)

    def _segment(self, epochs):
        begin = time.perf_counter()
        program = compiled(dataclasses.replace(self.one, epochs=epochs), self.plan, self.state, self.own, self.shared)
        self.compile_seconds += time.perf_counter() - begin
        if not self.fits_memory and not (need := fits(program, self.plan)).enough:  # asked once: it takes milliseconds
            raise MemoryError(
                f"RESOURCE_EXHAUSTED: training needs {need.bytes / 2**30:.1f} GiB, more than is free; "
                "train fewer members at a time (Plan(block=...)) or smaller batches."
            )
        begin = time.perf_counter()
        self.state, loss = jax.block_until_ready(program(self.state, self.own, self.shared))
        self.steady_seconds += time.perf_counter() - begin
        self.fits_memory = True
        self.losses.append(jax.tree.map(lambda leaf: np.asarray(leaf)[: self.members].T, loss))
        self.done += epochs

    def search(self, epochs):
        """After the first segment its seconds are known, and so is what a search may cost."""
        plan, seconds = self.plan, autoplan.SHARE * self.steady_seconds * epochs / self.done
        job = {"devices": plan.devices, "start": plan.block, "seconds": seconds}
        own, shared = self.data
        data = own["train"], shared["train"]
        found = autoplan.search(self.one, self.start, *data, compile_seconds=self.compile_seconds, **job)
        if found.block != plan.block:
            self._place(self.state, found)
        self.plan = found


def _apply(one, swarm, task, plan):
    plan = choose(plan, swarm)
    state, own, shared = plan.place(swarm), plan.place(task.own), plan.share(task.shared)
    out = compiled(one, plan, state, own, shared)(state, own, shared)
    return jax.device_put(resized(out, len(swarm)), swarm.step.sharding)


def _unplace(state, like):
    """The members of `state` that `like` has, on the devices that `like` is on."""
    own = resized(state, len(like)) if len(state) > len(like) else state
    return jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), own, like)


def _check_whole(**numbers):
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int | np.integer) or number < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")


def _segment(epochs):
    """About a tenth of the epochs; a whole divisor where there is one near, for then one program serves all."""
    near = range(max(1, epochs // 20), max(1, epochs // 5) + 1)
    return min(near, key=lambda k: (epochs % k > 0, abs(k - epochs / 10)))
