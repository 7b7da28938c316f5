"""Local SGD: workers train copies of one network on rows of their own, and every few steps the copies are averaged."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from turbanet.training import member, program
from turbanet.training.arrays import check_whole, floating
from turbanet.training.checks import check_data
from turbanet.training.data import prepare
from turbanet.training.member import Swarm
from turbanet.training.optimizers import check_plain
from turbanet.training.plan import Plan
from turbanet.training.sampling import deal

CALLS = 20  # of the program in a training: after each of them the clock is read
WORKERS = "worker"  # the axis that the average runs over, of those on one device


@dataclasses.dataclass(frozen=True)
class LocalHistory:
    """What the workers saw.

    loss: float32 [step, worker], of each one's own batch. seconds: float64 [step], from the first step on; read off the
    clock a few times in a training, evenly in between. startup_seconds: from the call to the first step, compilation
    above all.
    """

    loss: np.ndarray
    seconds: np.ndarray
    startup_seconds: float


def local_sgd(
    swarm: Swarm,
    x: Any,
    y: Any,
    loss_fn: Callable | None = None,
    *,
    workers: int,
    epochs: int,
    batch_size: int,
    every: int = 16,
    outer: optax.GradientTransformation | None = None,
    seed: int = 0,
    devices: int | None = None,
    allow_nan: bool = False,
) -> tuple[Swarm, LocalHistory]:
    """Train ONE network by a swarm of workers, all at once (local SGD: Stich 2019).

    Each worker has a copy of the network and of its optimizer and trains on rows of its own; every few steps the
    copies' weights, and what else of the model changes in training, are averaged. Moments stay each worker's own.

    Parameters
    ----------
    swarm : TurbaTrainState of one member
    x, y : arrays or pytrees of arrays, [row, ...]
    loss_fn : loss(params, x, y, apply_fn) -> (scalar, prediction); None: the swarm's own
    workers : how many copies; as many of the devices as divide them are used
    epochs : passes over all rows, which are dealt out anew in each (see `deal`)
    batch_size : rows of a worker's step
    every : steps between two averages; the last steps are averaged too
    outer : an Optax optimizer that takes the copies' mean less the weights before as its downhill direction, in place
        of the mean itself: optax.sgd(0.7, momentum=0.9, nesterov=True) is DiLoCo's (Douillard et al. 2023)
    seed : of the rows' order, which a second call goes on with
    devices : how many of JAX's; None: all
    allow_nan : whether x and y may hold NaN and infinite numbers

    Returns
    -------
    (swarm, LocalHistory) : of one member again, and what the workers saw

    Raises
    ------
    ValueError : for more than one member, more workers than rows, a schedule by epochs, and what `fit` refuses
    FloatingPointError : for a loss that becomes NaN or infinite, with the first step that it did so at

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> x = np.eye(8, dtype=np.float32)
    >>> net = tn.TurbaTrainState.swarm(tn.MLP((8, 8)), optax.sgd(0.1), 1, sample_input=x[:1])
    >>> how = {"workers": 2, "epochs": 3, "batch_size": 2}
    >>> net, seen = tn.federated.local_sgd(net, x, np.arange(8), tn.softmax_cross_entropy, **how)
    >>> len(net), seen.loss.shape
    (1, (6, 2))
    """
    called = time.perf_counter()
    check_whole(every=every)
    data = prepare(swarm, x, y)
    if len(swarm) != 1:
        raise ValueError(f"local_sgd trains one network by many workers, got a swarm of {len(swarm)}: swarm[[id]].")
    check_plain(swarm, "local_sgd")
    if swarm.schedule is not None:
        raise ValueError("local_sgd counts steps, not epochs: give the optimizer an Optax schedule of steps instead.")
    loss_fn = swarm.loss(loss_fn)
    check_data(swarm, data, loss_fn, allow_nan=allow_nan)
    begin = int(swarm.epoch[0])
    order = deal(rows=data.length, workers=workers, epochs=epochs, batch_size=batch_size, seed=seed, begin=begin)
    order = order.reshape(workers, -1, order.shape[-1])
    plan = _plan(workers, devices)
    averaging = _Averaging(loss_fn, every, outer or optax.sgd(1.0))

    copies = swarm.replace(loss_fn=None, sample=None).copies(workers)
    moments = averaging.outer.init(swarm.get_state(0).params)
    own = plan.place((copies, order, jnp.zeros(order.shape[:2], jnp.float32)))
    shared = plan.share((moments, data.x, data.y))
    run = averaging.compiled(plan, own, shared)
    startup = time.perf_counter() - called
    (state, _, losses), seconds = _run(run, own, shared, steps=order.shape[1], every=every)
    losses = np.asarray(losses).T
    if not np.isfinite(losses).all():
        step, worker = np.argwhere(~np.isfinite(losses))[0]
        came = f"The loss of worker {worker} is {losses[step, worker]} at step {step}"
        raise FloatingPointError(f"{came}: take a smaller learning rate, or average more often than every {every}.")
    merged = jax.device_put(_merge(state.replace(apply_fn=None, tx=None)), swarm.step.sharding)
    same = {name: getattr(swarm, name) for name in ("apply_fn", "tx", "loss_fn", "sample", "seed", "id")}
    return merged.replace(epoch=swarm.epoch + epochs, **same), LocalHistory(losses, seconds, startup)


@dataclasses.dataclass(frozen=True)
class _Averaging:
    """Rounds of `every` steps of each worker with an average at their end."""

    loss_fn: Callable
    every: int
    outer: optax.GradientTransformation

    def of_worker(self, own, shared, first, last, axes):
        """The rounds from `first` to `last` of one worker, beside the others on `axes`."""
        state, order, losses = own
        moments, x, y = shared
        steps = order.shape[0]

        def step(number, carry):
            state, losses = carry
            batch = jax.tree.map(lambda leaf: leaf[order[number]], (x, y))
            state, loss, _ = member.train_step(self.loss_fn, state, *batch)
            return state, losses.at[number].set(loss.astype(losses.dtype))

        def round(number, carry):
            before, moments, losses = carry
            begin = number * self.every
            after, losses = jax.lax.fori_loop(begin, jnp.minimum(begin + self.every, steps), step, (before, losses))
            params, collections = _mean((after.params, after.collections), axes)
            downhill = jax.tree.map(jnp.subtract, before.params, params)  # what an optimizer takes for a gradient
            updates, moments = self.outer.update(downhill, moments, before.params)
            after = after.replace(params=optax.apply_updates(before.params, updates), collections=collections)
            return after, moments, losses

        state, moments, losses = jax.lax.fori_loop(first, last, round, (state, moments, losses))
        return (state, order, losses), moments

    def compiled(self, plan, own, shared):
        """(own, shared, first, last) -> own and moments, as leaves; from memory if an equal one was compiled."""
        key = program.identity(self, plan, own[0], (own[1:], shared))
        return program.remembered(key, partial(self._compile, plan, own, shared))

    def _compile(self, plan, own, shared):
        trees = jax.tree.structure(own), jax.tree.structure(shared)
        here = len(own[2]) // len(plan.devices)
        several = len(plan.devices) > 1
        axes = (WORKERS,) * (here > 1) + ("member",) * several

        def of_device(own, shared, first, last):
            one = partial(self.of_worker, axes=axes)
            if here > 1:
                own, moments = jax.vmap(one, (0, None, None, None), axis_name=WORKERS)(own, shared, first, last)
                return own, jax.tree.map(lambda leaf: leaf[0], moments)
            own, moments = one(jax.tree.map(lambda leaf: leaf[0], own), shared, first, last)
            return jax.tree.map(lambda leaf: leaf[None], own), moments

        rounds: Any = of_device
        if several:
            mine, all_read = PartitionSpec("member"), PartitionSpec()
            reads = mine, all_read, all_read, all_read
            mesh = own[2].sharding.mesh
            rounds = jax.shard_map(of_device, mesh=mesh, in_specs=reads, out_specs=(mine, all_read), check_vma=False)

        def of_leaves(own, shared, first, last):
            return jax.tree.leaves(rounds(*map(jax.tree.unflatten, trees, (own, shared)), first, last))

        number = jax.ShapeDtypeStruct((), np.int32)
        leaves = jax.tree.leaves(own), jax.tree.leaves(shared)
        return plan.lower(of_leaves, *leaves, number, number, donate_argnums=0).compile()


def _mean(tree, axes):
    """The workers' mean of what are no whole numbers: one vector, as a sum over devices costs more than its numbers."""
    floats, put = floating(tree)
    flat, split = ravel_pytree(floats)
    return put(split(jax.lax.pmean(flat, axes) if axes else flat))


@jax.jit
def _merge(state):
    return state.merge()


def _plan(workers, devices):
    """As many devices as divide the workers."""
    known: Any = Plan(devices).devices
    count = max(count for count in range(1, len(known) + 1) if workers % count == 0)
    return Plan(known[:count], block=workers // count)


def _run(run, own, shared, *, steps, every):
    """Call after call: (own, seconds [step])."""
    rounds = -(-steps // every)
    ends = np.unique(np.linspace(0, rounds, min(rounds, CALLS) + 1).round().astype(np.int32))
    leaves, read = jax.tree.leaves(own), jax.tree.leaves(shared)
    moments = len(jax.tree.leaves(shared[0]))
    ticks = [0.0]
    began = time.perf_counter()
    for first, last in itertools.pairwise(ends):
        out = jax.block_until_ready(run(leaves, read, np.int32(first), np.int32(last)))
        leaves, read = out[: len(leaves)], out[len(leaves) :] + read[moments:]
        ticks.append(time.perf_counter() - began)
    seconds = np.interp(np.arange(1, steps + 1), np.minimum(ends * every, steps), ticks)
    return jax.tree.unflatten(jax.tree.structure(own), leaves), seconds
