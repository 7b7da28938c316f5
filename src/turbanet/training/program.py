"""Programs of one member: train, evaluate, predict."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.core import member, schedules, stopping
from turbanet.core.metrics import ordered
from turbanet.core.sums import added, zero
from turbanet.data.sampling import epoch_order, own_order, own_steps


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
    def metric_names(self) -> list[str]:
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
            after, loss = self.epoch(schedules.begin_epoch(before), data)
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

    def epoch(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Train one member for one epoch: -> (state, the mean loss of its steps)."""
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
    padding: see `scores`. metrics: ((name, metric(prediction, y, mask=mask)), ...), NaN where the loss is not finite.
    """

    loss_fn: Callable
    metrics: tuple = ()
    predictions: bool = False

    def __call__(self, state, data):
        position = jnp.arange(data.length)
        mask = position < (data.count if data.ragged else data.length)
        x, y = data.read(jnp.where(mask, position, 0) if data.ragged else None)
        padded = mask if data.ragged else None
        loss, prediction = member.evaluate(self.loss_fn, state, x, y, padded, rows_at_once=member.rows_at_once())
        metrics = {
            name: jnp.asarray(ordered(metric)(prediction, y, mask=mask), loss.dtype) for name, metric in self.metrics
        }
        metrics = jax.tree.map(lambda value: jnp.where(jnp.isfinite(loss), value, jnp.nan), metrics)
        return loss, metrics, prediction if self.predictions else None


def predict_rows(state, data):
    """Return the prediction of one member for its rows."""
    return member.predict(state, data.read()[0], rows_at_once=member.rows_at_once())
