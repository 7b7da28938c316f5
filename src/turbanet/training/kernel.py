"""Train small members in one GPU kernel each, which holds a network from the first step of a call to the last."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.backend import on_accelerator
from turbanet.core import member
from turbanet.core.plan import Plan
from turbanet.core.state import State
from turbanet.data.examples import Data, join, split
from turbanet.kernels.reader import Refused, read
from turbanet.training.compilation import identity, refusals, remembered
from turbanet.training.parts import affordable_epochs
from turbanet.training.program import Train

MOST_EPOCHS = 4096  # of a call without validation
MOST_STEPS = 2**17  # likewise, as the smallest networks take about 10 us a step, however few they are
MOST_BYTES = 2**28  # of all members' losses and orders of the rows in such a call


@dataclasses.dataclass(frozen=True)
class Kernel(Train):
    """Train one member as `Train` does, all steps of a call, or of an epoch, in one kernel of `kernels.emitter`.

    A validation, a schedule by epoch and patience act between epochs: then a kernel trains one epoch.
    """

    def __call__(self, state, data, held_out=None, *, epochs):
        if acts_between_epochs(state, held_out):
            return super().__call__(state, data, held_out, epochs=epochs)
        order = None
        if not self._is_whole(data):
            numbers = state.epoch + jnp.arange(self.epochs)
            order = jax.vmap(lambda epoch: self._order(state.replace(epoch=epoch), data))(numbers)
        after, losses = self._train(state, data, order, epochs, self.epochs)
        return after.replace(epoch=state.epoch + epochs), (losses, None, {})

    def epoch(self, state, data):
        order = None if self._is_whole(data) else self._order(state, data)[None]
        after, losses = self._train(state, data, order, 1, 1)
        return after, losses[0]

    def _train(self, state, data, order, epochs, most_epochs):
        """Train with the rows of `order`, [epoch, step, batch] or None for all: -> (state, loss [epoch])."""
        from turbanet.kernels import emitter

        if order is None:
            rows = data.read()
        else:
            rows, order = (data.x, data.y), order.reshape(-1, self.batch_size)
            order = order if data.rows is None else data.rows[order]
        step, before = self._step(state)
        after, losses = emitter.train(
            step,
            before,
            rows,
            epochs,
            order,
            steps=self.steps(data.length),
            most_epochs=most_epochs,
            interpret=not on_accelerator(),
        )
        return state.replace(**after), losses

    def refusal(self, state: Any, data: Any) -> str:
        """Return why a kernel cannot hold the step of a member, given by shapes and types; "" if it can."""
        try:
            from turbanet.kernels import emitter
        except ImportError as error:
            return f"A kernel needs Pallas' Triton backend: {error}."
        order = None if self._is_whole(data) else jax.ShapeDtypeStruct((1, self.batch_size), jnp.int32)

        def traced(leaves):
            state, data = jax.tree.unflatten(tree, leaves)
            rows = data.read() if order is None else (data.x, data.y)
            step, before = self._step(state)
            read(step, before, *emitter.batch(rows, order))

        leaves, tree = jax.tree.flatten((state, data))
        try:
            jax.eval_shape(traced, leaves)
        except Refused as refused:
            return str(refused)
        return ""

    def _step(self, state):
        """Return (step(changing, x, y) -> (changing, loss), the fields of the state that a step changes)."""
        names = "step", "params", "opt_state", "collections"

        def step(changing, x, y):
            after, loss, _ = member.train_step(self.loss_fn, state.replace(**changing), x, y)
            return {name: getattr(after, name) for name in names}, loss

        return step, {name: getattr(state, name) for name in names}

    def _is_whole(self, data):
        """Whether one step uses every row, once."""
        return self.batch_size == data.length and not data.ragged


def acts_between_epochs(state: State, held_out: Any) -> bool:
    """Whether anything but training happens at the end of an epoch."""
    return held_out is not None or state.schedule is not None or state._stopping is not None


def in_kernel(program: Train, swarm: State, data: tuple, plan: Plan, epochs: int) -> Train:
    """Return the program that trains each member in a kernel; raise `Refused` if that is not possible.

    That follows from shapes and types alone, and not from the number of members.

    Parameters
    ----------
    program : a `Train`
    data : (training data, held-out data or None)
    epochs : of a segment
    """
    training, held_out = data
    if type(program) is not Train:
        raise Refused("A kernel trains whole epochs of rows in memory; these come from a loader, or take too long.")
    if not plan.has_kernels:
        raise Refused(f"A kernel needs an NVIDIA GPU; this is {plan.kind}.")
    if training.ragged and not program.equal_steps:
        raise Refused("The kernel needs members with equally many rows, or equal_steps=True.")
    kernel = Kernel(**vars(program))
    one = _of_one(swarm, training)
    if refusal := remembered(identity(kernel, plan, *one), partial(kernel.refusal, *one), refusals()):
        raise Refused(refusal)
    if acts_between_epochs(swarm, held_out) or program.epochs == 1:
        return kernel
    is_whole = kernel._is_whole(training)
    epoch_bytes = 4 * len(swarm) * (1 if is_whole else 1 + training.length)
    most = min(
        MOST_EPOCHS,
        MOST_STEPS // program.steps(training.length),
        affordable_epochs(program, swarm, training),
        MOST_BYTES // epoch_bytes,
    )
    needed = max(epochs, program.epochs) if is_whole else epochs  # orders are made for all epochs, also unused ones
    most = min(1 << max(1, int(most)).bit_length() - 1, 1 << (needed - 1).bit_length())  # powers of two
    return dataclasses.replace(kernel, epochs=most, together=most)


def remember_refusal(program: Train, swarm: State, data: Data, plan: Plan, reason: str) -> None:
    """Let `in_kernel` refuse this program from now on, whose kernel did not compile."""
    refusals()[identity(Kernel(**vars(program)), plan, *_of_one(swarm, data))] = reason


def _of_one(swarm, data):
    """Return the shapes and types of one member's state and data."""

    def shapes(tree, axes):
        kinds = jax.tree.map(jax.typeof, tree)
        return jax.tree.map(lambda kind: jax.ShapeDtypeStruct(kind.shape[axes:], kind.dtype), kinds)

    own, shared = split((data,))
    return shapes(swarm, 1), join(shapes(own, 1), shapes(shared, 0))[0]
