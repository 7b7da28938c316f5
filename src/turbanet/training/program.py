"""What one member computes over its rows (train, evaluate, predict), compiled for all members at once."""

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
from turbanet.training import member, schedules, stopping
from turbanet.training.data import join, split
from turbanet.training.fingerprint import Fingerprint, fingerprint
from turbanet.training.sampling import epoch_order, own_order, own_steps
from turbanet.training.sums import added, zero

ROWS = 1024  # of a member that a CPU scores or predicts at a time: the layers' outputs of all of them need gigabytes
ROWS_ON_ACCELERATOR = 16 * ROWS  # likewise; where even that is too much, blocks get smaller
KEPT = 64  # compiled programs
NUMBERS = "jax_enable_x64", "jax_default_matmul_precision"  # JAX's settings that a program is traced under


@dataclasses.dataclass(frozen=True)
class Train:
    """Some `epochs` of one member: (state, data, held_out) -> (state, what was seen [epoch]).

    Seen are the loss and what `Evaluate` returns. A value, not a closure: equal ones share one compiled program. How
    many epochs is said when it runs, so that one program serves calls of any length, and no bit depends on the calls.
    """

    loss_fn: Callable
    batch_size: int
    epochs: int = 256  # of a call at the most, for which there is room in what was seen
    shuffle: bool = True
    metrics: tuple = ()  # see `Evaluate`
    predictions: bool = False  # likewise
    masked: bool = False  # whether some have fewer rows than a batch, of which a mask tells the loss
    equal_steps: bool = False  # whether those with fewer rows go through theirs again, to make as many steps as others
    together: int = 1  # epochs of a loop whose length XLA knows: a GPU asks the host before each round of another one

    @property
    def seen(self) -> list[str]:
        """The names of what is seen beside the losses."""
        return list(dict(self.metrics))

    @property
    def computed(self) -> dict[str, Any]:
        """{name: thing} that a training is known by, beside its loss and metrics."""
        return {}

    def steps(self, length: int) -> int:
        """Steps of an epoch for a member that sees `length` rows."""
        return -(-length // self.batch_size)

    def __call__(self, state, data, held_out=None, *, epochs):
        @partial(jax.jit, inline=True)  # is traced once, for its shapes and for the loop
        def epoch(before):
            after, loss = self._epoch(schedules.begin_epoch(before), data)
            return self._end(before, after, loss, held_out)

        def another(number, carry):
            state, every = carry
            state, seen = epoch(state)
            return state, written(every, jax.tree.map(lambda one: one[None], seen), number)

        def some(first, carry):
            """`together` epochs, of which those after the last one change nothing."""
            state, every = carry
            first *= self.together

            def one(state, number):
                after, seen = epoch(state)
                return stopping.choose(number < epochs, after, state), seen

            state, seen = jax.lax.scan(one, state, first + jnp.arange(self.together))
            return state, written(every, seen, first)

        seen = room(jax.eval_shape(epoch, state)[1], self.epochs)
        if self.together == 1:
            return jax.lax.fori_loop(0, epochs, another, (state, seen))
        return jax.lax.fori_loop(0, -(-epochs // self.together), some, (state, seen))

    def _epoch(self, state, data):
        if self.batch_size == data.length and not data.ragged:  # one step sees every row: nothing to shuffle
            return member.train_step(self.loss_fn, state, *data.read())[:2]

        order = self._order(state, data)
        if self._is_own(data):
            return self._own_epoch(state, data, order)

        def step(state, index):
            return member.train_step(self.loss_fn, state, *data.read(index))[:2]

        state, losses = jax.lax.scan(step, state, order)
        return state, losses.mean()

    def _own_epoch(self, state, data, order):
        """An epoch of as many steps as the member makes alone; beside members that make more, it waits."""
        steps, mask = own_steps(data.count, self.batch_size), self._mask(data)

        def step(number, carry):
            state, total = carry
            state, loss, _ = member.train_step(self.loss_fn, state, *data.read(order[number]), mask)
            return state, added(total, loss)

        def or_waits(carry, number):
            return stopping.choose(number < steps, step(number, carry), carry), None

        if self.together == 1:
            state, (total, _) = jax.lax.fori_loop(0, steps, step, (state, zero()))
        else:
            (state, (total, _)), _ = jax.lax.scan(or_waits, (state, zero()), jnp.arange(len(order)))
        return state, total / steps

    def _is_own(self, data):
        """Whether each member makes a number of steps of its own."""
        return data.ragged and not self.equal_steps

    def _mask(self, data):
        """Which rows of each batch of a member count, bool [batch]; None: all."""
        return jnp.arange(self.batch_size) < data.count if self.masked else None

    def _order(self, state, data):
        """The positions of the rows of each step, int32 [step, batch]."""
        count = data.length if data.count is None else data.count
        key = jax.random.fold_in(member.member_key(state.seed, state.id, member.SHUFFLE), state.epoch)
        order = own_order if self._is_own(data) else epoch_order
        return order(key if self.shuffle else None, count, length=data.length, batch_size=self.batch_size)

    def _end(self, before, after, loss, held_out):
        """What follows the steps of an epoch that took a member from `before` to `after`: -> (state, what was seen)."""
        evaluate = Evaluate(self.loss_fn, self.metrics, self.predictions)
        validation, metrics, predictions = (None, {}, None) if held_out is None else evaluate(after, held_out)
        after = schedules.end_epoch(after, validation)
        after = stopping.after_epoch(
            before, after.replace(epoch=after.epoch + 1), {stopping.LOSS: validation} | metrics
        )
        seen = loss, validation, metrics
        if before.stopping is not None:  # a stopped member has no loss
            seen = jax.tree.map(lambda value: jnp.where(before.stopping.active, value, jnp.nan), seen)
        return after, (*seen, predictions)


def written(every: Any, seen: Any, first: Any) -> Any:
    """`every` [epoch, ...] with what was `seen` [epoch, ...] from the epoch `first` on."""
    return jax.tree.map(lambda all, some: jax.lax.dynamic_update_slice_in_dim(all, some, first, 0), every, seen)


def room(seen: Any, *epochs: int) -> Any:
    """Zeros for what so many epochs will have seen."""
    return jax.tree.map(lambda one: jnp.zeros((*epochs, *one.shape), one.dtype), seen)


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """The loss of one member over its rows, {name: metric} and, if asked for, the predictions; padding does not count.

    Where members have different numbers of rows the loss takes a mask, which says which are no padding: see `scores`.
    metrics: ((name, metric(prediction, y, mask=mask)), ...).
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
    """The prediction of one member for its rows."""
    return member.predict(state, data.read()[0], rows_at_once=rows_at_once())


@dataclasses.dataclass(eq=False)
class Compiled:
    """A program ready to run, (state, data) -> what it returns; it holds no function of whoever compiled it.

    One that trains is also told how much: `epochs`, or what a `Part` takes.
    """

    executable: Any  # of leaves
    trains: bool  # whether the first of what it returns are the leaves of the states after training
    seconds: float  # of tracing and compiling
    pace: float = float("inf")  # seconds of an epoch, or of a step of a part, in a round when it ran last

    def __call__(self, state, data, **said):
        said = {name: np.int32(number) for name, number in said.items()}
        out = self.executable(jax.tree.leaves(state), jax.tree.leaves(data), said)
        return (jax.tree.unflatten(jax.tree.structure(state), out[0]), out[1]) if self.trains else out


def compiled(program, plan, state, data) -> Compiled:
    """`program` compiled for all members of a round, from memory if an equal one was compiled before.

    state: [member, ...]; data: a tuple of `Data`, None for one that is not there; both as the plan places them. Equal
    are programs, models, optimizers and schedules of one fingerprint; one that cannot be read compiles anew.
    """
    return begun(program, plan, state, data).result()


def begun(program, plan, state, data) -> Future[Compiled]:
    """`compiled`, for whoever has something else to do meanwhile: traced here, compiled in a thread.

    A process ends only when that has ended.
    """
    key = identity(program, plan, state, data)
    state = state.replace(loss_fn=None, sample=None)  # of which a program reads nothing
    before = _programs().get(key)
    if before and before.done() and before.exception():  # such as too little memory, which may be there by now
        del _programs()[key]
    return remembered(key, partial(_begin, program, plan, state, data))


def identity(program: Any, plan: Any, state: Any, others: Any) -> tuple:
    """What `program` for these arguments, as the plan places them, is remembered by: equal ones compile once."""
    schedule = state.schedule and state.schedule.replace(functions=())
    bare = state.replace(apply_fn=None, tx=None, loss_fn=None, sample=None, schedule=schedule)
    leaves, tree = jax.tree.flatten((bare, others))
    types = tuple((leaf.aval, leaf.sharding) for leaf in leaves)
    kind = type(program) if vars(program) else program  # a function of ours, which has no fields
    return kind, known(program, state), tree, types, plan, *(getattr(jax.config, name) for name in NUMBERS)


def known(program: Any, state: Any) -> Fingerprint:
    """What a program computes by the functions in it and in a swarm: its model's, its optimizer's, its schedules'."""
    return read(program, state.apply_fn, state.tx, state.schedule and state.schedule.functions)


def read(*functions: Any) -> Fingerprint:
    """The fingerprint of what the first of them holds and of the others, from memory if nothing of it changed."""
    known = _fingerprints()
    try:
        found = known.get(functions)
    except TypeError:  # a function of no hash, such as an instance of a dataclass
        return _fingerprint(functions)
    if found and found.holds():
        return found
    changed = {others: _fingerprint(others) for others, before in known.items() if not before.holds()}
    if any(known[others] != now for others, now in changed.items()):
        jax.clear_caches()  # of loops and inner jitted functions JAX would take the traces of before
    known |= changed
    if functions not in known:
        known[functions] = _fingerprint(functions)
        if len(known) > KEPT:
            del known[next(iter(known))]
    return known[functions]


def remembered(key: Any, make: Callable) -> Any:
    """What `make()` returned when it was last asked for under this key, if that is not too long ago."""
    programs = _programs()
    if key not in programs:
        programs[key] = make()
        if len(programs) > KEPT:
            del programs[next(iter(programs))]
    return programs[key]


def forget():
    """Drop every compiled program: the next call compiles, or reads JAX's cache on disk, as in a new process."""
    _fingerprints.cache_clear()
    _programs.cache_clear()
    jax.clear_caches()


def rows_at_once() -> int:
    """Rows of a member that the program traced now is to score or predict at a time."""
    return ROWS_ON_ACCELERATOR if on_accelerator() else ROWS


@lru_cache
def _programs():
    """{key: what was made}, the last ones of `remembered`."""
    return {}


@lru_cache
def _fingerprints():
    """{functions: their fingerprint}, the last ones of `read`."""
    return {}


def _fingerprint(functions):
    """The fingerprint of what a program holds and of a model's functions."""
    program, *others = functions
    return fingerprint((vars(program), *others))


def _begin(program, plan, state, data):
    """The program, being compiled."""
    trains = isinstance(program, Train)
    tree = jax.tree.structure((state, data))
    said = {name: jax.ShapeDtypeStruct((), np.int32) for name in inspect.getfullargspec(program).kwonlyargs}

    def one_member(member, shared):
        state, own = member
        shared, said = shared
        return program(state, *join(own, shared), **said)

    def all_members(state, data, said):
        state, data = jax.tree.unflatten(tree, [*state, *data])
        own, shared = split(data)
        out = plan.vectorise(one_member)((state, own), (shared, said))
        return (jax.tree.leaves(out[0]), out[1]) if trains else out

    began = time.perf_counter()
    leaves = jax.tree.leaves(state), jax.tree.leaves(data)
    lowered = plan.lower(all_members, *leaves, said, donate_argnums=(0,) if trains else ())
    with_thread = ThreadPoolExecutor(1, "turbanet-compile")
    found = with_thread.submit(lambda: Compiled(lowered.compile(), trains, time.perf_counter() - began))
    with_thread.shutdown(wait=False)
    return found
