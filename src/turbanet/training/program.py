"""What one member computes over its rows (train, evaluate, predict), compiled for all members at once."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import psutil

from turbanet.training import member, schedules, stopping
from turbanet.training.sampling import epoch_order

RAGGED_ROWS = 256  # held-out rows of a member that are scored at a time, where members have different numbers of them


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one member's data are read: through an index or not, of equal lengths or not."""

    length: int
    indexed: bool
    ragged: bool


def _read(own, shared, index):
    """Rows `index` of one member's (x, y); all of them for None."""

    def either(own, shared):
        return shared if own is None else own

    data = [jax.tree.map(either, own[name], shared[name], is_leaf=lambda leaf: leaf is None) for name in "xy"]
    return data if index is None else jax.tree.map(lambda leaf: leaf[index], data)


@dataclasses.dataclass(frozen=True)
class Train:
    """Some epochs of one member: ((state, data), shared) -> (state, (loss, validation loss, metric) [epoch]).

    A value, not a closure: equal ones share one compiled program.
    """

    loss_fn: object
    epochs: int
    batch_size: int
    shuffle: bool
    layout: Layout
    held_out: Layout | None
    most_steps: int | None = None
    metric: object = None
    donates = True

    @property
    def steps(self):
        """Steps of one call."""
        length = self.layout.length
        whole = -(-length // self.batch_size)
        return self.epochs * min(whole, self.most_steps or whole)

    def probe(self, steps):
        """A call of about so many steps, for timing; their rows are drawn, as a whole shuffle would weigh on so few."""
        whole = dataclasses.replace(self, epochs=1, most_steps=None, held_out=None)
        return dataclasses.replace(whole, epochs=-(-steps // whole.steps), most_steps=min(steps, whole.steps))

    def __call__(self, own, shared):
        state, data = own

        def epoch(before, _):
            state, loss = self._epoch(schedules.begin_epoch(before), data["train"], shared["train"])
            validation = metric = None
            if self.held_out:
                held_out = Evaluate(self.loss_fn, self.held_out, self.metric)
                validation, metric = held_out((state, data["validation"]), shared["validation"])
            state = schedules.end_epoch(state, validation)
            state = stopping.after_epoch(before, state.replace(epoch=state.epoch + 1), validation)
            if self.held_out and before.stopping is not None:  # a stopped member has no loss
                active = before.stopping.active
                seen = loss, validation, metric
                loss, validation, metric = jax.tree.map(lambda one: jnp.where(active, one, jnp.nan), seen)
            return state, (loss, validation, metric)

        return jax.lax.scan(epoch, state, length=self.epochs)

    def _epoch(self, state, own, shared):
        length = self.layout.length
        if self.batch_size == length and not self.layout.ragged:  # one step sees every row: nothing to shuffle
            return member.train_step(self.loss_fn, state, *_read(own, shared, own["rows"]))[:2]
        count = own["count"] if self.layout.indexed else length
        key = jax.random.fold_in(member.member_key(state.seed, state.id, member.SHUFFLE), state.epoch)
        if self.most_steps:
            order = jax.random.randint(key, (self.most_steps, self.batch_size), 0, count)
        else:
            order = epoch_order(key if self.shuffle else None, count, length=length, batch_size=self.batch_size)

        def step(state, index):
            index = own["rows"][index] if self.layout.indexed else index
            return member.train_step(self.loss_fn, state, *_read(own, shared, index))[:2]

        state, losses = jax.lax.scan(step, state, order)
        return state, losses.mean()


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """The loss of one member over its rows, and `metric(prediction, y)` if there is one; padding does not count."""

    loss_fn: object
    layout: Layout
    metric: object = None
    donates = False

    def __call__(self, own, shared):
        state, data = own

        def scores(rows):
            x, y = _read(data, shared, rows)
            loss, prediction = member.evaluate(self.loss_fn, state, x, y)
            return loss, None if self.metric is None else jnp.asarray(self.metric(prediction, y), loss.dtype)

        if not self.layout.ragged:
            return scores(data["rows"])
        # Row by row, as a loss cannot be told which rows are padding; some at a time, as a swarm multiplies them.
        each = jax.lax.map(lambda row: scores(row[None]), data["rows"], batch_size=RAGGED_ROWS)
        real = jnp.arange(self.layout.length) < data["count"]
        return jax.tree.map(lambda one: jnp.where(real, one, 0).sum() / data["count"], each)


@dataclasses.dataclass(frozen=True)
class Predict:
    """The prediction of one member for its rows."""

    layout: Layout
    donates = False

    def __call__(self, own, shared):
        state, data = own
        return member.predict(state, _read(data, shared, data["rows"])[0])


def compiled(one, plan, *args):
    """The compiled program of `one` over all members, from memory if it was compiled before."""
    leaves, tree = jax.tree.flatten(args)

    def described(leaf):  # random keys are never weakly typed
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)

    return _program(one, plan, tree, tuple(map(described, leaves)))


def forget():
    """Drop every compiled program, so that the next call compiles anew, as in a new process."""
    _program.cache_clear()
    _memory.cache_clear()
    jax.clear_caches()


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory in bytes that a program needs beside its arguments, and whether its devices have it."""

    bytes: int
    enough: bool


def fits(program, plan) -> Need:
    """What a compiled program needs against what is free: XLA's own count, the device's, the system's for a CPU."""
    sizes = _memory(program)
    if sizes is None:
        return Need(0, True)
    need = sizes.temp_size_in_bytes + max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0)
    if plan.devices[0].platform == "cpu":  # the devices share one memory, and running out of it ends the process
        need *= len(plan.devices)
        return Need(need, need < psutil.virtual_memory().available)
    stats = plan.devices[0].memory_stats() or {}
    free = stats.get("bytes_limit", float("inf")) - stats.get("bytes_in_use", 0)
    return Need(need, need < free)


@lru_cache(maxsize=64)
def _memory(program):
    return program.memory_analysis()  # takes XLA milliseconds each time


@lru_cache(maxsize=64)
def _program(one, plan, tree, types):
    def every(state, own, shared):
        return plan.vectorise(one)((state, own), shared)

    donated = (0,) if one.donates else ()
    jitted = jax.jit(every, donate_argnums=donated, compiler_options=plan.compiler_options)
    return jitted.lower(*jax.tree.unflatten(tree, types)).compile()
