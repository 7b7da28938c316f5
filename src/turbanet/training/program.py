"""What one member computes over its rows (train, evaluate, predict), compiled for all members at once."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import psutil

from turbanet.training import member, schedules, stopping
from turbanet.training.data import join, split
from turbanet.training.sampling import epoch_order

ROWS = 1024  # of a member that are scored or predicted at a time: the layers' outputs of all of them need gigabytes
RAGGED_ROWS = 256  # likewise, where members have different numbers of them
Need = namedtuple("Need", "bytes enough")  # of memory, beside a program's arguments; whether its devices have it


@dataclasses.dataclass(frozen=True)
class Train:
    """Some epochs of one member: (state, data, held_out) -> (state, (loss, validation loss, metric) [epoch]).

    A value, not a closure: equal ones share one compiled program.
    """

    loss_fn: Callable
    epochs: int
    batch_size: int
    shuffle: bool = True
    most_steps: int | None = None  # of an epoch, of rows drawn anew for each: for timing
    metric: Callable | None = None

    def steps(self, length: int) -> int:
        """Steps of one call for a member that sees `length` rows."""
        whole = -(-length // self.batch_size)
        return self.epochs * min(whole, self.most_steps or whole)

    def probe(self, steps: int, length: int) -> "Train":
        """A call of about so many steps, for timing; their rows are drawn, as a whole shuffle would weigh on so few."""
        epoch = dataclasses.replace(self, epochs=1, most_steps=None).steps(length)
        return dataclasses.replace(self, epochs=-(-steps // epoch), most_steps=min(steps, epoch), metric=None)

    def __call__(self, state, data, held_out=None):
        def epoch(before, _):
            state, loss = self._epoch(schedules.begin_epoch(before), data)
            evaluate = Evaluate(self.loss_fn, self.metric)
            validation, metric = (None, None) if held_out is None else evaluate(state, held_out)
            state = schedules.end_epoch(state, validation)
            state = stopping.after_epoch(before, state.replace(epoch=state.epoch + 1), validation)
            seen = loss, validation, metric
            if held_out is not None and before.stopping is not None:  # a stopped member has no loss
                seen = jax.tree.map(lambda value: jnp.where(before.stopping.active, value, jnp.nan), seen)
            return state, seen

        return jax.lax.scan(epoch, state, length=self.epochs)

    def _epoch(self, state, data):
        if self.batch_size == data.length and not data.ragged:  # one step sees every row: nothing to shuffle
            return member.train_step(self.loss_fn, state, *data.read())[:2]
        count = data.length if data.count is None else data.count
        key = jax.random.fold_in(member.member_key(state.seed, state.id, member.SHUFFLE), state.epoch)
        if self.most_steps:
            order = jax.random.randint(key, (self.most_steps, self.batch_size), 0, count)
        else:
            order = epoch_order(key if self.shuffle else None, count, length=data.length, batch_size=self.batch_size)

        def step(state, index):
            return member.train_step(self.loss_fn, state, *data.read(index))[:2]

        state, losses = jax.lax.scan(step, state, order)
        return state, losses.mean()


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """The loss of one member over its rows, and `metric(prediction, y)` if there is one; padding does not count."""

    loss_fn: Callable
    metric: Callable | None = None

    def __call__(self, state, data):
        def scores(index=None):
            x, y = data.read(index)
            loss, prediction = member.evaluate(self.loss_fn, state, x, y, rows_at_once=ROWS)
            return loss, None if self.metric is None else jnp.asarray(self.metric(prediction, y), loss.dtype)

        if not data.ragged:
            return scores()
        # Row by row, as a loss cannot be told which rows are padding; some at a time, as a swarm multiplies them.
        position = jnp.arange(data.length)
        each = jax.lax.map(lambda index: scores(index[None]), position, batch_size=RAGGED_ROWS)
        return jax.tree.map(lambda value: jnp.where(position < data.count, value, 0).sum() / data.count, each)


def predict_rows(state, data):
    """The prediction of one member for its rows."""
    return member.predict(state, data.read()[0], rows_at_once=ROWS)


def compiled(program, plan, state, data):
    """`program` compiled for all members, from memory if it was compiled before: (state, data) -> what it returns.

    state: [member, ...]; data: a tuple of `Data`, None for one that is not there; both as the plan places them.
    """
    leaves, tree = jax.tree.flatten((state, data))

    def described(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type)

    return _program(program, plan, tree, tuple(map(described, leaves)))


def forget():
    """Drop every compiled program: the next call compiles, or reads JAX's cache on disk, as in a new process."""
    _program.cache_clear()
    jax.clear_caches()


def fits(program, plan) -> Need:
    """What a compiled program needs against what is free: XLA's own count, the device's, the system's for a CPU."""
    need = _bytes(program)
    if plan.devices[0].platform == "cpu":  # the devices share one memory, and running out of it ends the process
        need *= len(plan.devices)
        return Need(need, need < psutil.virtual_memory().available)
    stats = plan.devices[0].memory_stats() or {}
    free = stats.get("bytes_limit", float("inf")) - stats.get("bytes_in_use", 0)
    return Need(need, need < free)


@lru_cache(maxsize=64)
def _bytes(program):
    """What XLA says that a compiled program needs beside its arguments; it takes XLA milliseconds to say so."""
    sizes = program.memory_analysis()
    if sizes is None:
        return 0
    return sizes.temp_size_in_bytes + max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0)


@lru_cache(maxsize=64)
def _program(program, plan, tree, types):
    def one_member(member, shared):
        state, own = member
        return program(state, *join(own, shared))

    def all_members(state, data):
        own, shared = split(data)
        return plan.vectorise(one_member)((state, own), shared)

    donated = (0,) if isinstance(program, Train) else ()
    jitted = jax.jit(all_members, donate_argnums=donated, compiler_options=plan.compiler_options)
    return jitted.lower(*jax.tree.unflatten(tree, types)).compile()
