"""Train, evaluate and predict whole swarms: epochs compiled into one program, data shared by index."""

import dataclasses
import time
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from turbanet.plan import choose
from turbanet.sampling import check_rows, epoch_order
from turbanet.turba_train_state import SHUFFLE, checked, member_key, train_step


@dataclasses.dataclass(frozen=True)
class History:
    """What `fit` saw: losses [epoch, member] (validation_loss None without validation data), identities, seconds."""

    train_loss: np.ndarray
    validation_loss: np.ndarray | None
    seed: np.ndarray
    member: np.ndarray
    compile_seconds: float
    steady_seconds: float

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
    its loss computed after each epoch on `validation_rows`. `segment` is the number of epochs per compiled call.
    Raises ValueError, before anything is trained, for data, rows or numbers that do not fit the swarm or one another.
    """
    loss_fn = swarm.loss(loss_fn)
    task = _Task(swarm, x, y, rows, per_member)
    held_out = None if validation is None else _Task(swarm, *validation, validation_rows, per_member)
    if validation is None and validation_rows is not None:
        raise ValueError("validation_rows came without validation=(x, y): give the data they index.")
    for name, number in {"epochs": epochs, "batch_size": batch_size, "segment": segment}.items():
        if number is not None and (not isinstance(number, int | np.integer) or number < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")
    batch_size = min(batch_size or task.length, task.length)
    segment = min(segment or _segment(epochs), epochs)
    plan = choose(plan, swarm)

    one = _Train(loss_fn, segment, batch_size, shuffle, task.layout, held_out and held_out.layout)
    own = plan.place({"train": task.own, "validation": held_out and held_out.own})
    shared = plan.share({"train": task.shared, "validation": held_out and held_out.shared})
    state, losses, compile_seconds, steady_seconds = plan.place(swarm), [], 0.0, 0.0
    with tqdm(total=epochs, unit="epoch", **({} if progress else {"disable": True})) as bar:
        for start in range(0, epochs, segment):
            length = min(segment, epochs - start)
            begin = time.perf_counter()
            program = _compile(dataclasses.replace(one, epochs=length), plan, state, own, shared)
            compiled = time.perf_counter()
            state, loss = jax.block_until_ready(program(state, own, shared))
            compile_seconds += compiled - begin
            steady_seconds += time.perf_counter() - compiled
            losses.append(jax.tree.map(lambda leaf: np.asarray(leaf)[: len(swarm)].T, loss))
            bar.update(length)
            bar.set_postfix(loss=f"{losses[-1][0][-1].mean():.4g}")
    train_loss, validation_loss = (
        None if part[0] is None else np.concatenate(part) for part in zip(*losses, strict=True)
    )
    identity = np.asarray(swarm.seed), np.asarray(swarm.id)
    history = History(train_loss, validation_loss, *identity, compile_seconds, steady_seconds)
    return _unplace(state, swarm), history


def evaluate(swarm, x, y, loss_fn=None, *, rows=None, per_member=False, plan=None):
    """Every member's loss [member] on its rows of x, y (see `fit`), each row counted once."""
    task = _Task(swarm, x, y, rows, per_member)
    return _run(_Evaluate(swarm.loss(loss_fn), task.layout), swarm, task, plan)


def predict(swarm, x, *, rows=None, per_member=False, plan=None):
    """Every member's prediction [member, row, ...] on x [row, ...], or on its `rows` of it (padding predicts row 0)."""
    task = _Task(swarm, x, None, rows, per_member)
    return _run(_Predict(task.layout), swarm, task, plan)


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


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How one member's data are read: through an index or not, of equal lengths or not."""

    length: int
    indexed: bool
    ragged: bool


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
        self.layout = _Layout(length, rows is not None, rows is not None and bool((counts < length).any()))
        self.own = {"x": x if own_x else None, "y": y if own_y else None, "rows": rows, "count": counts}
        self.shared = {"x": None if own_x else x, "y": None if own_y else y}


def _read(own, shared, index):
    """Rows `index` of one member's (x, y); all of them for None."""
    data = [shared[name] if own[name] is None else own[name] for name in "xy"]
    return data if index is None else jax.tree.map(lambda leaf: leaf[index], data)


@dataclasses.dataclass(frozen=True)
class _Train:
    """Some epochs of one member: ((state, data), shared) -> (state, (loss [epoch], validation loss [epoch])).

    A value, not a closure: equal ones share one compiled program.
    """

    loss_fn: object
    epochs: int
    batch_size: int
    shuffle: bool
    layout: _Layout
    held_out: _Layout | None
    donates = True

    def __call__(self, own, shared):
        state, data = own

        def epoch(state, _):
            state, loss = self._epoch(state, data["train"], shared["train"])
            validation = None
            if self.held_out:
                held_out = _Evaluate(self.loss_fn, self.held_out)
                validation = held_out((state, data["validation"]), shared["validation"])
            return state.replace(epoch=state.epoch + 1), (loss, validation)

        return jax.lax.scan(epoch, state, length=self.epochs)

    def _epoch(self, state, own, shared):
        length = self.layout.length
        if self.batch_size == length and not self.layout.ragged:  # one step sees every row: nothing to shuffle
            return train_step(self.loss_fn, state, *_read(own, shared, own["rows"]))[:2]
        count = own["count"] if self.layout.indexed else length
        key = jax.random.fold_in(member_key(state.seed, state.id, SHUFFLE), state.epoch)
        order = epoch_order(key if self.shuffle else None, count, length=length, batch_size=self.batch_size)

        def step(state, index):
            index = own["rows"][index] if self.layout.indexed else index
            return train_step(self.loss_fn, state, *_read(own, shared, index))[:2]

        state, losses = jax.lax.scan(step, state, order)
        return state, losses.mean()


@dataclasses.dataclass(frozen=True)
class _Evaluate:
    """The loss of one member over its rows; padding does not count."""

    loss_fn: object
    layout: _Layout
    donates = False

    def __call__(self, own, shared):
        state, data = own

        def loss(rows):
            x, y = _read(data, shared, rows)
            return checked(self.loss_fn)(state.params, x, y, state.apply_fn)[0]

        if not self.layout.ragged:
            return loss(data["rows"])
        real = jnp.arange(self.layout.length) < data["count"]
        each = jax.vmap(lambda row: loss(row[None]))(data["rows"])
        return jnp.where(real, each, 0).sum() / data["count"]


@dataclasses.dataclass(frozen=True)
class _Predict:
    """The prediction of one member for its rows."""

    layout: _Layout
    donates = False

    def __call__(self, own, shared):
        state, data = own
        return state.apply_fn({"params": state.params}, _read(data, shared, data["rows"])[0])


def _run(one, swarm, task, plan):
    plan = choose(plan, swarm)
    state, own, shared = plan.place(swarm), plan.place(task.own), plan.share(task.shared)
    out = _compile(one, plan, state, own, shared)(state, own, shared)
    return jax.device_put(out[: len(swarm)], swarm.step.sharding)


def _unplace(state, like):
    """The members of `state` that `like` has, on the devices that `like` is on."""

    def unplace(leaf, old):
        return jax.device_put(leaf if len(leaf) == len(old) else leaf[: len(old)], old.sharding)

    return jax.tree.map(unplace, state, like)


def _segment(epochs):
    """About a tenth of the epochs; a whole divisor where there is one near, for then one program serves all."""
    near = range(max(1, epochs // 20), max(1, epochs // 5) + 1)
    return min(near, key=lambda k: (epochs % k > 0, abs(k - epochs / 10)))


def _compile(one, plan, *args):
    """The compiled program of `one` over all members, from memory if it was compiled before."""
    leaves, tree = jax.tree.flatten(args)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding, weak_type=a.weak_type) for a in leaves]
    return _program(one, plan, tree, tuple(types))


@lru_cache(maxsize=64)
def _program(one, plan, tree, types):
    def every(state, own, shared):
        return plan.vectorise(one)((state, own), shared)

    donated = (0,) if one.donates else ()
    jitted = jax.jit(every, donate_argnums=donated, compiler_options=plan.compiler_options)
    return jitted.lower(*jax.tree.unflatten(tree, types)).compile()
