"""Local SGD: workers train copies of one network on their own rows; the copies are averaged every few steps."""

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

from turbanet.core import member
from turbanet.core.arrays import check_whole, floating
from turbanet.core.interrupt import Interrupted, noted
from turbanet.core.optimizers import check_outer, check_plain
from turbanet.core.plan import dividing
from turbanet.core.state import updated
from turbanet.core.tables import Shown, count, spread
from turbanet.data.checks import check_data
from turbanet.data.examples import prepare
from turbanet.data.sampling import deal
from turbanet.training import compilation
from turbanet.turba_train_state import TurbaTrainState

CALLS = 20  # of the program in a training; the clock is read after each
WORKERS = "worker"  # name of the axis of the workers on one device, over which they are averaged


@dataclasses.dataclass(frozen=True, repr=False)
class LocalHistory(Shown):
    """Losses of the workers and wall-clock times of a training by `local_sgd`.

    loss : float32 [step, worker], of each worker's own batch
    seconds : float64 [step], since the first step began; measured a few times in a training, interpolated in between
    startup_seconds : from the call to the first step, mostly compilation
    """

    loss: np.ndarray
    seconds: np.ndarray
    startup_seconds: float

    def _shown(self):
        steps, workers = self.loss.shape
        rows = [["median (range) of the workers", "first step", "last step"]]
        rows.append(["loss", spread(self.loss[0]), spread(self.loss[-1])])
        cost = f"{self.startup_seconds:.3g} s to begin, {self.seconds[-1]:.3g} s of steps"
        return f"LocalHistory: {count(workers, 'worker')}, {count(steps, 'step')}, {cost}", rows


def local_sgd(
    swarm: TurbaTrainState,
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
) -> tuple[TurbaTrainState, LocalHistory]:
    """Train ONE network by a swarm of parallel workers (local SGD: Stich 2019).

    Each worker trains a copy of the network, with an optimizer state of its own, on its own rows. Every few steps the
    copies' weights and collections are averaged; optimizer states are not until the end.

    Parameters
    ----------
    swarm : TurbaTrainState of one member
    x, y : arrays or pytrees of arrays, [row, ...]
    loss_fn : loss(params, x, y, apply_fn) -> (scalar, prediction); None: the swarm's own
    workers : number of copies; the largest number of devices that divides it is used
    epochs : passes over all rows, which are dealt to the workers anew in each (see `deal`)
    batch_size : rows of a worker's step, at most those that it has in an epoch
    every : steps between two averages; the copies are also averaged after the last step
    outer : an Optax optimizer of the averaged weights, whose gradient is the weights before a round less the copies'
        mean; None: the mean replaces the weights. DiLoCo's is optax.sgd(0.7, momentum=0.9, nesterov=True) (Douillard
        et al. 2023)
    seed : seed of the rows' order, which a second call continues
    devices : number of JAX devices; None: all
    allow_nan : whether x and y may hold NaN and infinite numbers

    Returns
    -------
    (swarm, LocalHistory) : a swarm of one member, and the workers' losses

    Raises
    ------
    ValueError : for more than one member, more workers than rows, a schedule by epochs, and what `fit` refuses
    FloatingPointError : for a loss that becomes NaN or infinite; it names the first such step
    Interrupted : a KeyboardInterrupt, for Ctrl-C; it has the network and the history so far

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> x = np.eye(8, dtype=np.float32)
    >>> net = tn.TurbaTrainState.swarm(tn.MLP((8, 8)), optax.sgd(0.1), 1, sample_input=x[:1])
    >>> settings = {"workers": 2, "epochs": 3, "batch_size": 2}
    >>> net, history = tn.federated.local_sgd(net, x, np.arange(8), tn.softmax_cross_entropy, **settings)
    >>> len(net), history.loss.shape
    (1, (6, 2))
    """
    called = time.perf_counter()
    check_whole(every=every)
    data = prepare(swarm, x, y)
    if len(swarm) != 1:
        raise ValueError(f"local_sgd trains one network by many workers, got a swarm of {len(swarm)}: use swarm[[id]].")
    check_plain(swarm, "local_sgd")
    if swarm.schedule is not None:
        raise ValueError("local_sgd counts steps, not epochs: give the optimizer an Optax schedule of steps instead.")
    loss_fn = swarm.loss(loss_fn)
    check_data(swarm, data, loss_fn, allow_nan=allow_nan, trains=True)
    begin = int(swarm.epoch[0])
    order = deal(rows=data.length, workers=workers, epochs=epochs, batch_size=batch_size, seed=seed, begin=begin)
    order = order.reshape(workers, -1, order.shape[-1])
    plan = dividing(devices, workers)
    outer = outer or optax.sgd(1.0)
    check_outer(outer, swarm.get_state(0).params, "outer")
    averaging = _Averaging(loss_fn, every, outer)

    copies = swarm.replace(loss_fn=None, sample=None).copies(workers)
    moments = averaging.outer.init(swarm.get_state(0).params)
    own = plan.place((copies, order, jnp.zeros(order.shape[:2], jnp.float32)))
    shared = plan.share((moments, data.x, data.y))
    run = averaging.compiled(plan, own, shared)
    startup = time.perf_counter() - called
    steps = order.shape[1]
    (state, _, losses), seconds = _run(run, own, shared, steps=steps, every=every)
    losses = np.asarray(losses).T[: len(seconds)]
    if not np.isfinite(losses).all():
        step, worker = np.argwhere(~np.isfinite(losses))[0]
        found = f"The loss of worker {worker} is {losses[step, worker]} at step {step}"
        raise FloatingPointError(f"{found}: take a smaller learning rate, or average more often than every {every}.")
    merged = jax.device_put(_merge(state.replace(apply_fn=None, tx=None)), swarm.step.sharding)
    unchanged = {name: getattr(swarm, name) for name in ("apply_fn", "tx", "loss_fn", "sample", "seed", "id")}
    trained = merged.replace(epoch=swarm.epoch + len(seconds) * epochs // steps, **unchanged)
    history = LocalHistory(losses, seconds, startup)
    if len(seconds) < steps:
        raise Interrupted(trained, history, f"{len(seconds)} step(s)")
    return trained, history


@dataclasses.dataclass(frozen=True)
class _Averaging:
    """Rounds of `every` steps of each worker, each followed by an average of the workers."""

    loss_fn: Callable
    every: int
    outer: optax.GradientTransformation

    def of_worker(self, own, shared, first, last, axes):
        """Run the rounds from `first` to before `last` of one worker, averaged with the others over `axes`."""
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
            pseudo_gradient = jax.tree.map(jnp.subtract, before.params, params)
            updates, moments = updated(self.outer, pseudo_gradient, moments, before.params)
            after = after.replace(params=optax.apply_updates(before.params, updates), collections=collections)
            return after, moments, losses

        state, moments, losses = jax.lax.fori_loop(first, last, round, (state, moments, losses))
        return (state, order, losses), moments

    def compiled(self, plan, own, shared):
        """Return the compiled (own, shared, first=, last=) -> (own, moments), cached."""
        workers = len(own[2]) // len(plan.devices)  # on each device
        axes = (WORKERS,) * (workers > 1) + ("member",) * (len(plan.devices) > 1)
        one = partial(self.of_worker, axes=axes)

        def on_device(own, shared, first, last):
            if workers > 1:
                own, moments = jax.vmap(one, (0, None, None, None), axis_name=WORKERS)(own, shared, first, last)
                return own, jax.tree.map(lambda leaf: leaf[0], moments)
            own, moments = one(jax.tree.map(lambda leaf: leaf[0], own), shared, first, last)
            return jax.tree.map(lambda leaf: leaf[None], own), moments

        split, whole = PartitionSpec("member"), PartitionSpec()
        specs = (split, whole, whole, whole), (split, whole)
        return compilation.on_devices(self, on_device, plan, own, shared, names=("first", "last"), specs=specs)


def _mean(tree, axes):
    """Average the floating-point leaves over the workers, as one vector: a small all-reduce is mostly latency.

    Sums are at least of float32.
    """
    floats, put = floating(tree)
    flat, split = ravel_pytree([leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in floats])
    means = split(jax.lax.pmean(flat, axes) if axes else flat)
    return put([mean.astype(leaf.dtype) for mean, leaf in zip(means, floats, strict=True)])


@jax.jit
def _merge(state):
    return state.merge()


def _run(run, own, shared, *, steps, every):
    """Call the program until all rounds are done, or Ctrl-C has come: -> (own, seconds [step])."""
    rounds = -(-steps // every)
    ends = np.unique(np.linspace(0, rounds, min(rounds, CALLS) + 1).round().astype(np.int32))
    moments, *data = shared
    ticks = [0.0]
    began = time.perf_counter()
    with noted() as interrupted:
        for first, last in itertools.pairwise(ends):
            if first and interrupted():
                break
            own, moments = jax.block_until_ready(run(own, (moments, *data), first=first, last=last))
            ticks.append(time.perf_counter() - began)
    done = np.minimum(ends[: len(ticks)] * every, steps)
    return own, np.interp(np.arange(1, done[-1] + 1), done, ticks)
