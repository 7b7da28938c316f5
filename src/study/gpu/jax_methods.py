"""Methods that train a workload's networks in JAX on one device."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

import turbanet as tn
from study.figures.labels import USUAL


@dataclasses.dataclass
class Run:
    """A run of some steps: mean loss [network], seconds without compilation, `wall` seconds of the whole call."""

    loss: np.ndarray
    seconds: float
    wall: float
    compile_seconds: float = float("nan")


def train_ours(work, swarm, order, name):
    epoch = work.steps // work.epochs

    def run(steps):
        begin = time.perf_counter()
        settings = {"batch_size": work.batch_size, "per_member": work.per_member, "progress": False}
        settings |= {"plan": tn.Plan(kernel=False)} if name == USUAL else {}
        epochs = steps // epoch
        _, history = tn.fit(swarm, work.x, work.y, work.loss_fn, epochs=epochs, **settings)
        wall = time.perf_counter() - begin
        return Run(history.train_loss.mean(0), history.steady_seconds, wall, history.compile_seconds)

    return run


def _member_step(work):
    """Make one member's step in plain Flax and Optax: ((params, moments), (x, y)) -> ((params, moments), loss)."""
    optimizer = work.swarm().tx

    def step(state, batch):
        params, moments = state
        value = jax.value_and_grad(lambda params: work.loss_fn(params, *batch, work.model.apply)[0])
        loss, gradient = value(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), loss

    return step


def train_scan(work, swarm, order, name):
    step = jax.vmap(_member_step(work), (0, None if order is None else 0))
    x, y = jnp.asarray(work.x), jnp.asarray(work.y)

    def many(state, rows, length):
        def one(state, rows):
            return step(state, (x, y) if rows is None else (x[rows], y[rows]))

        return jax.lax.scan(one, state, rows, length=length)

    compiled = jax.jit(many, static_argnames="length")
    each = work.steps // work.epochs
    epochs = [None] if order is None else jnp.split(jnp.asarray(order.swapaxes(0, 1)), order.shape[1] // each)

    def run(steps):
        begin = time.perf_counter()
        calls = 1 if order is None else steps // each
        state, losses = (swarm.params, swarm.opt_state), []
        for number in range(calls):
            state, loss = compiled(state, epochs[number % len(epochs)], steps // calls)
            losses.append(loss)
        mean = np.asarray(jnp.concatenate(losses).mean(0))
        seconds = time.perf_counter() - begin
        return Run(mean, seconds, seconds)

    return run


def train_steps(work, swarm, order, name):
    step = jax.jit(jax.vmap(_member_step(work), (0, None if order is None else 0)), donate_argnums=0)
    x, y = jnp.asarray(work.x), jnp.asarray(work.y)

    def run(steps):
        state, losses = jax.tree.map(jnp.array, (swarm.params, swarm.opt_state)), []
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for number in range(steps):
            rows = None if order is None else order[:, number % order.shape[1]]
            state, loss = step(state, (x, y) if rows is None else (x[rows], y[rows]))
            losses.append(loss)
        mean = np.mean([np.asarray(loss) for loss in losses], axis=0)
        seconds = time.perf_counter() - begin
        return Run(mean, seconds, seconds)

    return run
