"""Programs of one member (train, evaluate, predict), compiled for all members at once."""

import dataclasses
import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.backend import on_accelerator
from turbanet.core import member, schedules, stopping
from turbanet.core.fingerprint import Fingerprint, fingerprint
from turbanet.core.sums import added, zero
from turbanet.data.examples import join, split
from turbanet.data.sampling import epoch_order, own_order, own_steps

ROWS = 1024  # of a member that a CPU scores or predicts at a time: the outputs of all layers may need gigabytes
ROWS_ON_ACCELERATOR = 16 * ROWS  # likewise; if even that is too much, blocks get smaller
KEPT = 64  # compiled programs in the cache
TRACE_SETTINGS = "jax_enable_x64", "jax_default_matmul_precision"  # of JAX, that a traced program depends on


@dataclasses.dataclass(frozen=True)
class Train:
    """Train one member for some `epochs`: (state, data, held_out) -> (state, (loss, validation, metrics) [epoch]).

    The validation loss and the metrics are those of `Evaluate`, None and {} without held-out data. This is a value and
    not a closure, so that equal ones share a compiled program. The number of epochs is an argument of the program: one
    program serves calls of any length, and the bits do not depend on how the epochs are split into calls.
    """

    loss_fn: Callable
    batch_size: int
    epochs: int = 256  # of one call at most: the size of the arrays of losses and metrics
    shuffle: bool = True
    metrics: tuple = ()  # see `Evaluate`
    masked: bool = False  # whether some members have fewer rows than a batch, and the loss takes a mask
    equal_steps: bool = False  # whether members with fewer rows repeat them, to make as many steps as others
    together: int = 1  # epochs of a loop of static length: in any other loop a GPU asks the host before each iteration

    @property
    def seen(self) -> list[str]:
        """The names of the metrics."""
        return list(dict(self.metrics))

    @property
    def computed(self) -> dict[str, Any]:
        """{name: object} that checkpoints compare, beside the loss and the metrics."""
        return {}

    def steps(self, length: int) -> int:
        """Return the steps of an epoch for a member with `length` rows."""
        return -(-length // self.batch_size)

    def __call__(self, state, data, held_out=None, *, epochs):
        @partial(jax.jit, inline=True)  # traced once, for its shapes and for the loop
        def epoch(before):
            after, loss = self._epoch(schedules.begin_epoch(before), data)
            return self._end(before, after, loss, held_out)

        def another(number, carry):
            state, every = carry
            state, metrics = epoch(state)
            return state, written(every, jax.tree.map(lambda one: one[None], metrics), number)

        def some(first, carry):
            """Train `together` epochs; those after the last one change nothing."""
            state, every = carry
            first *= self.together

            def one(state, number):
                after, metrics = epoch(state)
                return stopping.choose(number < epochs, after, state), metrics

            state, metrics = jax.lax.scan(one, state, first + jnp.arange(self.together))
            return state, written(every, metrics, first)

        metrics = room(jax.eval_shape(epoch, state)[1], self.epochs)
        if self.together == 1:
            return jax.lax.fori_loop(0, epochs, another, (state, metrics))
        return jax.lax.fori_loop(0, -(-epochs // self.together), some, (state, metrics))

    def _epoch(self, state, data):
        if self.batch_size == data.length and not data.ragged:  # one step uses every row: nothing to shuffle
            return member.train_step(self.loss_fn, state, *data.read())[:2]

        order = self._order(state, data)
        if self._is_own(data):
            return self._own_epoch(state, data, order)

        def step(state, index):
            return member.train_step(self.loss_fn, state, *data.read(index))[:2]

        state, losses = jax.lax.scan(step, state, order)
        return state, losses.mean()

    def _own_epoch(self, state, data, order):
        """Train an epoch of as many steps as the member would make alone; the member waits for those with more."""
        steps, mask = own_steps(data.count, self.batch_size), self._mask(data)

        def step(number, carry):
            state, total = carry
            state, loss, _ = member.train_step(self.loss_fn, state, *data.read(order[number]), mask)
            return state, added(total, loss)

        def step_or_wait(carry, number):
            return stopping.choose(number < steps, step(number, carry), carry), None

        if self.together == 1:
            state, (total, _) = jax.lax.fori_loop(0, steps, step, (state, zero()))
        else:
            (state, (total, _)), _ = jax.lax.scan(step_or_wait, (state, zero()), jnp.arange(len(order)))
        return state, total / steps

    def _is_own(self, data):
        """Whether the number of steps differs between members."""
        return data.ragged and not self.equal_steps

    def _mask(self, data):
        """Return the mask of the rows that count in each batch of a member, bool [batch]; None: all."""
        return jnp.arange(self.batch_size) < data.count if self.masked else None

    def _order(self, state, data):
        """Return the positions of the rows of each step, int32 [step, batch]."""
        count = data.length if data.count is None else data.count
        key = jax.random.fold_in(member.member_key(state.seed, state.id, member.SHUFFLE), state.epoch)
        order = own_order if self._is_own(data) else epoch_order
        return order(key if self.shuffle else None, count, length=data.length, batch_size=self.batch_size)

    def _end(self, before, after, loss, held_out):
        """Evaluate a member after an epoch and apply schedules and stopping: -> (state, (loss, *evaluation))."""
        evaluate = Evaluate(self.loss_fn, self.metrics)
        validation, metrics, _ = (None, {}, None) if held_out is None else evaluate(after, held_out)
        after = schedules.end_epoch(after, validation)
        after = stopping.after_epoch(
            before, after.replace(epoch=after.epoch + 1), {stopping.LOSS: validation} | metrics
        )
        values = loss, validation, metrics
        if before._stopping is not None:  # a stopped member has no loss
            values = jax.tree.map(lambda value: jnp.where(before._stopping.active, value, jnp.nan), values)
        return after, values


def written(every: Any, values: Any, first: Any) -> Any:
    """Return `every` [epoch, ...] with `values` [epoch, ...] written from the epoch `first` on."""
    return jax.tree.map(lambda all, some: jax.lax.dynamic_update_slice_in_dim(all, some, first, 0), every, values)


def room(values: Any, *epochs: int) -> Any:
    """Return zeros [*epochs, ...] of the shapes and types of the `values` of one epoch."""
    return jax.tree.map(lambda one: jnp.zeros((*epochs, *one.shape), one.dtype), values)


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Evaluate one member on its rows: (state, data) -> (loss, {name: metric}, predictions or None).

    Padding does not count. Where members have different numbers of rows the loss takes a mask, which is False on
    padding: see `scores`. metrics: ((name, metric(prediction, y, mask=mask)), ...).
    """

    loss_fn: Callable
    metrics: tuple = ()
    predictions: bool = False

    def __call__(self, state, data):
        position = jnp.arange(data.length)
        mask = position < (data.count if data.ragged else data.length)
        x, y = data.read(jnp.where(mask, position, 0) if data.ragged else None)
        padded = mask if data.ragged else None
        loss, prediction = member.evaluate(self.loss_fn, state, x, y, padded, rows_at_once=rows_at_once())
        metrics = {name: jnp.asarray(metric(prediction, y, mask=mask), loss.dtype) for name, metric in self.metrics}
        return loss, metrics, prediction if self.predictions else None


def predict_rows(state, data):
    """Return the prediction of one member for its rows."""
    return member.predict(state, data.read()[0], rows_at_once=rows_at_once())


@dataclasses.dataclass(eq=False)
class Compiled:
    """A compiled program, (*arguments, **numbers) -> outputs; it holds no reference to the caller's functions."""

    executable: Any  # takes the leaves of the arguments
    updates: bool  # whether it takes the memory of its first argument, and returns that as its first output
    seconds: float  # of tracing and compiling
    pace: float = float("inf")  # seconds of an epoch, or of a step of a part, of one round in the last call

    def __call__(self, *arguments, **numbers):
        first, *others = arguments
        numbers = {name: np.int32(number) for name, number in numbers.items()}
        out = self.executable(jax.tree.leaves(first), jax.tree.leaves(tuple(others)), numbers)
        return (jax.tree.unflatten(jax.tree.structure(first), out[0]), *out[1:]) if self.updates else out


def compiled(program, plan, state, data) -> Compiled:
    """Return `program` compiled for all members of a round, from the cache if an equal one was compiled before.

    state: [member, ...]; data: a tuple of `Data`, None for missing data; both as the plan places them. Programs,
    models, optimizers and schedules are equal if their fingerprints are; what cannot be fingerprinted compiles again.
    A program that trains also takes how far: `epochs`, or the keywords of a `Part`.
    """
    return compile_in_thread(program, plan, state, data).result()


def compile_in_thread(program, plan, state, data) -> Future[Compiled]:
    """Trace as `compiled` does, and compile in a thread; the process exits only when that thread has ended."""
    names = inspect.getfullargspec(program).kwonlyargs

    def one_member(member, shared):
        state, own = member
        shared, numbers = shared
        return program(state, *join(own, shared), **dict(zip(names, numbers, strict=True)))

    def all_members(state, data, *numbers):
        own, shared = split(data)
        return plan.vectorise(one_member)((state, own), (shared, numbers))

    key = identity(program, plan, state, data)
    before = _programs().get(key)
    if before and before.done() and before.exception():  # such as too little memory, which may be free by now
        del _programs()[key]
    state = state.replace(loss_fn=None, sample=None)  # which no program reads
    build = partial(_compile_in_thread, all_members, plan, (state, data), names, isinstance(program, Train))
    return remembered(key, build)


def on_devices(
    program: Any,
    function: Callable,
    plan: Any,
    first: Any,
    *others: Any,
    names: tuple = (),
    specs: Any = None,
    **options,
) -> Compiled:
    """Return `function(first, *others, *numbers)`, of all members of a device, compiled for the plan's devices; cached.

    It returns `first` updated, and further outputs. Members may communicate, on several devices over the axis "member".

    Parameters
    ----------
    program : what the function computes by, for the cache
    first, others : as the plan places them; `first` is a swarm's state, or a tuple that begins with one
    names : of the whole numbers that come with each call
    specs : (in_specs, out_specs) of `jax.shard_map` for several devices; None: XLA partitions the function
    options : of `jax.jit`
    """
    if specs and len(plan.devices) > 1:
        function = jax.shard_map(function, mesh=plan.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    state, *rest = first if isinstance(first, tuple) else (first,)
    key = identity(program, plan, state, (rest, others))
    build = partial(_compile_in_thread, function, plan, (first, *others), names, True, **options)
    return remembered(key, lambda: build().result())


def _compile_in_thread(function, plan, arguments, names, updates, **options):
    """Trace function(*arguments, *numbers) on leaves, and start compiling it in a thread."""
    first, *others = arguments
    trees = jax.tree.structure(first), jax.tree.structure(tuple(others))

    def on_leaves(first, others, numbers):
        first, others = map(jax.tree.unflatten, trees, (first, others))
        out = function(first, *others, *(numbers[name] for name in names))
        return (jax.tree.leaves(out[0]), *out[1:]) if updates else out

    begin = time.perf_counter()
    leaves = jax.tree.leaves(first), jax.tree.leaves(others)
    numbers = {name: jax.ShapeDtypeStruct((), np.int32) for name in names}
    lowered = plan.lower(on_leaves, *leaves, numbers, donate_argnums=(0,) if updates else (), **options)
    executor = ThreadPoolExecutor(1, "turbanet-compile")
    future = executor.submit(lambda: Compiled(lowered.compile(), updates, time.perf_counter() - begin))
    executor.shutdown(wait=False)
    return future


def identity(program: Any, plan: Any, state: Any, others: Any) -> tuple:
    """Return the cache key of `program` for these arguments, as the plan places them."""
    schedule = state.schedule and state.schedule.replace(functions=())
    bare = state.replace(apply_fn=None, tx=None, loss_fn=None, sample=None, schedule=schedule)
    leaves, tree = jax.tree.flatten((bare, others))
    types = tuple((leaf.aval, leaf.sharding) for leaf in leaves)
    kind = type(program) if vars(program) else program  # a function of ours, which has no fields
    settings = (getattr(jax.config, name) for name in TRACE_SETTINGS)
    return kind, program_fingerprint(program, state), tree, types, plan, *settings


def program_fingerprint(program: Any, state: Any) -> Fingerprint:
    """Return the fingerprint of a program with the model, optimizer and schedules of a swarm."""
    return read(program, state.apply_fn, state.tx, state.schedule and state.schedule.functions)


def read(*functions: Any) -> Fingerprint:
    """Return the fingerprint of the first one's fields and of the others, from the cache if nothing has changed."""
    cache = _fingerprints()
    try:
        cached = cache.get(functions)
    except TypeError:  # a function without a hash, such as an instance of a dataclass
        return _fingerprint(functions)
    if cached and cached.holds():
        return cached
    changed = {others: _fingerprint(others) for others, before in cache.items() if not before.holds()}
    if any(cache[others] != now for others, now in changed.items()):
        jax.clear_caches()  # JAX would reuse old traces of loops and inner jitted functions
    cache |= changed
    if functions not in cache:
        cache[functions] = _fingerprint(functions)
        if len(cache) > KEPT:
            del cache[next(iter(cache))]
    return cache[functions]


def remembered(key: Any, make: Callable) -> Any:
    """Return `make()`, from the cache of the last KEPT keys if this key is in it."""
    programs = _programs()
    if key not in programs:
        programs[key] = make()
        if len(programs) > KEPT:
            del programs[next(iter(programs))]
    return programs[key]


def forget():
    """Clear all compiled programs: the next call compiles, or reads JAX's cache on disk, as in a new process."""
    _fingerprints.cache_clear()
    _programs.cache_clear()
    jax.clear_caches()


def rows_at_once() -> int:
    """Return how many rows of a member the program being traced scores or predicts at a time."""
    return ROWS_ON_ACCELERATOR if on_accelerator() else ROWS


@lru_cache
def _programs():
    """Return the cache of `remembered`, {key: value}."""
    return {}


@lru_cache
def _fingerprints():
    """Return the cache of `read`, {functions: fingerprint}."""
    return {}


def _fingerprint(functions):
    """Return the fingerprint of a program's fields and of other functions."""
    program, *others = functions
    return fingerprint((vars(program), *others))
