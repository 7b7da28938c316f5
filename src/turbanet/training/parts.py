"""Train an epoch that is too long for one call of a program in parts; the state carries the progress."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from turbanet.core import member, schedules, stopping
from turbanet.core.plan import Plan
from turbanet.core.state import Swarm
from turbanet.core.sums import added, zero
from turbanet.data.examples import Data
from turbanet.data.sampling import own_steps
from turbanet.training.program import Train, room

LONG = 2e11  # operations from which on an epoch is trained in parts: about two seconds on two cores
LONG_ON_ACCELERATOR = 2e13  # likewise
MAX_LOOP_STEPS = 64  # of the short epochs that an accelerator trains in one loop of static length
HOST_CHECK_STEPS = 1  # that a GPU could make while it asks the host whether another loop follows: 15 to 18 us
STEP = 2e7  # operations below which an accelerator's step gets no faster: launching its kernels takes the time
IMAGE_NDIM = 4  # axes: row, height, width, channel


@struct.dataclass
class Underway:
    """The progress of a member in an epoch: leaves [member, ...]."""

    order: Any  # of its rows: int32 [step, batch]; None if its data are in the order of the steps
    place: Any  # steps done
    loss: Any  # the sum over these steps, see `sums`


@dataclasses.dataclass(frozen=True)
class Part(Train):
    """Train one member for some `steps` of an epoch, as `Train` does for whole ones.

    The first part `starts` the epoch; only the part that `ends` it returns losses [1], the others zeros. The bits do
    not depend on how the epoch is split.
    """

    def __call__(self, state, data, held_out=None, *, steps, starts, ends):
        def start(state):
            return state.replace(_underway=Underway(self._begin(state, data), jnp.int32(0), zero()))

        def step(number, state):
            progress = state._underway
            batch, mask, is_step = self._batch(progress, number, data)
            after, loss, _ = member.train_step(self.loss_fn, state, *batch, mask)
            after = after.replace(_underway=progress.replace(place=progress.place + 1, loss=added(progress.loss, loss)))
            return after if is_step is None else stopping.choose(is_step, after, state)

        @partial(jax.jit, inline=True)  # traced once, for its shapes and for the last part
        def end(state):
            state, metrics = self._end(state, state, state._underway.loss[0] / state._underway.place, held_out)
            return state, jax.tree.map(lambda one: one[None], metrics)

        before = jax.lax.cond(starts, start, lambda state: state, state)
        after = jax.lax.fori_loop(0, steps, step, schedules.begin_epoch(before))
        after = after if before._stopping is None else stopping.choose(before._stopping.active, after, before)
        nothing = room(jax.eval_shape(end, after)[1])
        return jax.lax.cond(ends, end, lambda state: (state, nothing), after)

    def _begin(self, state, data):
        return self._order(state, data)

    def _batch(self, progress, number, data):
        """Return ((x, y), mask, is_step) of step `number` of this call.

        mask: bool [batch], None for all rows; is_step: whether the member makes this step, None for yes.
        """
        is_step = progress.place < own_steps(data.count, self.batch_size) if self._is_own(data) else None
        return data.read(progress.order[progress.place]), self._mask(data), is_step

    def begun(self, swarm: Swarm, length: int) -> Swarm:
        """Return the swarm before the first part of an epoch of `length` rows."""
        order = jnp.zeros((len(swarm), self.steps(length), self.batch_size), jnp.int32)
        return swarm.replace(_underway=underway(len(swarm), order))


def underway(members: int, order: Any = None) -> Underway:
    """Return the progress of so many members before an epoch."""
    loss = jax.tree.map(lambda leaf: jnp.tile(leaf, members), zero())
    return Underway(order, jnp.zeros(members, jnp.int32), loss)


def epochs_together(program: Train, swarm: Swarm, data: Data, plan: Plan, epochs: int) -> int:
    """Return how many short epochs a program trains in one loop of static length (see `Train.together`); 1 on a CPU.

    It is the power of two, as `Train.epochs` is, that trains `epochs` in the fewest steps; steps that the last loop
    makes in vain count.
    """
    if not plan.on_accelerator or type(program) is not Train:
        return 1
    steps = program.steps(data.length)
    most = min(MAX_LOOP_STEPS // steps, program.epochs, affordable_epochs(program, swarm, data))
    loops = [1 << power for power in range(max(1, int(most).bit_length()))]
    return min(loops, key=lambda together: -(-epochs // together) * (together * steps + HOST_CHECK_STEPS))


def affordable_epochs(program: Train, swarm: Swarm, data: Data) -> float:
    """Return for how many epochs an accelerator may be busy before the host looks for Ctrl-C, judged by sizes."""
    return LONG_ON_ACCELERATOR / 16 / _operations(program, swarm, data)


def members_at_least(program: Train, swarm: Swarm, data: Data) -> int:
    """Return how many members keep an accelerator busy: a step of fewer takes as long."""
    of_step = _operations(program, swarm, data) / program.steps(data.length) / len(swarm)
    return math.ceil(STEP / of_step)


def is_long(program: Train, swarm: Swarm, data: Data, plan: Plan) -> bool:
    """Return whether an epoch takes far longer than a call should, judged by sizes alone."""
    if program.batch_size == data.length:  # one step, which cannot be cut
        return False
    return _operations(program, swarm, data) >= (LONG_ON_ACCELERATOR if plan.on_accelerator else LONG)


def _operations(program, swarm, data):
    """Estimate the operations of an epoch of all members.

    The forward pass multiplies each weight once at each position of a row, the backward pass twice. The layers of a
    network for images shrink them: there it is about the square root of the positions.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(swarm.params)) // len(swarm)
    leaves = zip(jax.tree.leaves(data.x), data.is_own, strict=False)
    positions = max(_positions(leaf.shape[is_own + 1 :], leaf.dtype) for leaf, is_own in leaves)
    rows = program.steps(data.length) * program.batch_size * len(swarm)
    return 6 * weights * positions * rows


def _positions(shape, dtype):
    """Return how many positions a row has: of integers, which are looked up, or of [..., feature]."""
    positions = math.prod(shape[:-1] if jnp.issubdtype(dtype, jnp.inexact) else shape)
    return math.isqrt(positions) if len(shape) + 1 >= IMAGE_NDIM else positions
