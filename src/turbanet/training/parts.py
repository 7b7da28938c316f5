"""An epoch that is too long for one call of a program, trained in parts: the state says how far it is."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from turbanet.training import member, schedules, stopping
from turbanet.training.data import Data
from turbanet.training.member import Swarm
from turbanet.training.plan import Plan
from turbanet.training.program import Train, known, remembered, room
from turbanet.training.sampling import own_steps
from turbanet.training.sums import added, zero

LONG = 2e11  # operations of an epoch from which on it is trained in parts: about two seconds of two cores
LONG_ON_ACCELERATOR = 2e13  # likewise
TOGETHER = 64  # steps, at the most, of the short epochs that an accelerator trains in one loop of known length
ROUND = 3  # steps that it could make while it asks the host whether another such loop follows
STEP = 2e7  # operations below which an accelerator's step takes as long with fewer: its kernels' launches bind it
IMAGES = 4  # axes: row, height, width, channel


@struct.dataclass
class Underway:
    """How far a member is in an epoch: leaves [member, ...]."""

    order: Any  # of its rows: int32 [step, batch]; None where its data are in the order of the steps
    place: Any  # steps that are done
    loss: Any  # the sum over the steps before, see `sums`


@dataclasses.dataclass(frozen=True)
class Part(Train):
    """Some `steps` of an epoch of one member: (state, data, held_out) -> (state, what was seen [1]).

    The first part `starts` the epoch, and only the one that `ends` it has seen something. No bit depends on the cuts.
    """

    def __call__(self, state, data, held_out=None, *, steps, starts, ends):
        def start(state):
            return state.replace(underway=Underway(self._begin(state, data), jnp.int32(0), zero()))

        def step(number, state):
            way = state.underway
            batch, mask, goes_on = self._batch(way, number, data)
            after, loss, _ = member.train_step(self.loss_fn, state, *batch, mask)
            after = after.replace(underway=way.replace(place=way.place + 1, loss=added(way.loss, loss)))
            return after if goes_on is None else stopping.choose(goes_on, after, state)

        @partial(jax.jit, inline=True)  # is traced once, for its shapes and for the last part
        def end(state):
            state, seen = self._end(state, state, state.underway.loss[0] / state.underway.place, held_out)
            return state, jax.tree.map(lambda one: one[None], seen)

        before = jax.lax.cond(starts, start, lambda state: state, state)
        after = jax.lax.fori_loop(0, steps, step, schedules.begin_epoch(before))
        after = after if before.stopping is None else stopping.choose(before.stopping.active, after, before)
        nothing = room(jax.eval_shape(end, after)[1])
        return jax.lax.cond(ends, end, lambda state: (state, nothing), after)

    def _begin(self, state, data):
        return self._order(state, data)

    def _batch(self, way, number, data):
        """((x, y), mask, whether it is a step) of the step that comes `number`th in this call; None: all, and it is."""
        goes_on = way.place < own_steps(data.count, self.batch_size) if self._is_own(data) else None
        return data.read(way.order[way.place]), self._mask(data), goes_on

    def begun(self, swarm: Swarm, length: int) -> Swarm:
        """The swarm as it enters the first part of an epoch of so many rows."""
        order = jnp.zeros((len(swarm), self.steps(length), self.batch_size), jnp.int32)
        return swarm.replace(underway=underway(len(swarm), order))


def underway(members: int, order: Any = None) -> Underway:
    """Where so many members are as they enter an epoch."""
    loss = jax.tree.map(lambda leaf: jnp.tile(leaf, members), zero())
    return Underway(order, jnp.zeros(members, jnp.int32), loss)


def epochs_together(program: Train, swarm: Swarm, data: Data, plan: Plan, epochs: int) -> int:
    """How many short epochs a program trains in one loop of known length (see `Train.together`); 1 on a CPU.

    Of the powers of two, as is the room for what was seen, the one that trains so many `epochs` in the fewest steps:
    those that the last loop makes in vain are among them.
    """
    if not plan.on_accelerator or type(program) is not Train:
        return 1
    operations = _reckoned(program, swarm, data)[1]
    steps = program.steps(data.length)
    most = min(TOGETHER // steps, program.epochs, LONG_ON_ACCELERATOR / 16 / operations)
    loops = [1 << power for power in range(max(1, int(most).bit_length()))]
    return min(loops, key=lambda together: -(-epochs // together) * (together * steps + ROUND))


def members_at_least(program: Train, swarm: Swarm, data: Data) -> int:
    """Members that keep an accelerator busy: fewer of them take as long a step."""
    operations = _reckoned(program, swarm, data)[1] / program.steps(data.length) / len(swarm)
    return math.ceil(STEP / operations)


def is_long(program: Train, swarm: Swarm, data: Data, plan: Plan) -> bool:
    """Whether an epoch takes far longer than a call should, by sizes alone.

    Each weight is multiplied twice on the way back, and once on the way forth at each position of a row. How often in
    an image, whose layers shrink it, is XLA's count; which is asked where once is not long and everywhere is.
    """
    if program.batch_size == data.length:  # one step, which cannot be cut
        return False
    once, everywhere, x = _reckoned(program, swarm, data)
    long = LONG_ON_ACCELERATOR if plan.on_accelerator else LONG
    if once >= long or everywhere < long or max(leaf.ndim for leaf in jax.tree.leaves(x)) < IMAGES:
        return everywhere >= long
    return 3 * _rows(program, swarm, data) * _operations(program, swarm, x) >= long


def _reckoned(program, swarm, data):
    """Operations of an epoch of all members, a weight used once a row and at each position of it; a row's shape."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(swarm.params)) // len(swarm)
    leaves, tree = jax.tree.flatten(data.x)
    shapes = [(1, *leaf.shape[own + 1 :]) for leaf, own in zip(leaves, data.is_own, strict=False)]
    x = jax.tree.unflatten(tree, map(jax.ShapeDtypeStruct, shapes, [leaf.dtype for leaf in leaves]))
    once = 6 * weights * _rows(program, swarm, data)
    return once, once * max(map(_positions, jax.tree.leaves(x))), x


def _rows(program, swarm, data):
    """Rows of all steps of an epoch, of all members."""
    return program.steps(data.length) * program.batch_size * len(swarm)


def _operations(program, swarm, x):
    """XLA's count of the operations of one member's prediction for x, one row known by shape and type."""
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), swarm.replace(loss_fn=None))

    def count():
        try:
            lowered = jax.jit(member.predict).lower(state, x)
            return (lowered.cost_analysis() or lowered.compile().cost_analysis())["flops"]
        except Exception:  # it predicts in its loss alone
            return math.inf

    shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((state, x)))
    return remembered(("operations", known(program, swarm), shapes), count)


def _positions(rows):
    """How many positions each of these rows has: numbers that are looked up, or [..., feature]."""
    return math.prod(rows.shape[1:-1] if jnp.issubdtype(rows.dtype, jnp.inexact) else rows.shape[1:])
