"""Methods that train a swarm's networks without PyTorch: scikit-learn, and JAX's own transformations by hand."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from study.baselines.trainers import check
from turbanet.core.member import train_step
from turbanet.core.plan import Plan


def train_sklearn(swarm, x, y, *, order, epochs: int, learning_rate: float) -> np.ndarray:
    """Train a swarm's MLPs by scikit-learn's MLPClassifier, one after the other, and return losses [epoch, member].

    x : [row, feature]; y : int [row] of three classes or more; order : int [member, epoch, step, batch]
    """
    from sklearn.neural_network import MLPClassifier

    losses = np.empty((epochs, len(swarm)))
    size = order.shape[-1]
    for member, state in enumerate(swarm):
        layers = [state.params[f"Dense_{i}"] for i in range(len(state.params))]
        *hidden, classes = (len(layer["bias"]) for layer in layers)
        kwargs = {"batch_size": size, "learning_rate_init": learning_rate, "alpha": 0.0, "shuffle": False}
        net = MLPClassifier(hidden, random_state=0, **kwargs)
        net.partial_fit(x[:size], y[:size], classes=np.arange(classes))
        for coefs, intercepts, layer in zip(net.coefs_, net.intercepts_, layers, strict=True):
            coefs[...] = layer["kernel"]
            intercepts[...] = layer["bias"]
        adam = net._optimizer  # reset: the step that made the network has moved it
        adam.t = 0
        for moment in (*adam.ms, *adam.vs):
            moment[...] = 0
        for epoch in range(epochs):
            rows = order[member, epoch].ravel()
            net.partial_fit(x[rows], y[rows])
            losses[epoch, member] = net.loss_
    return losses


def train_steps(swarm, x, y, loss_fn: Callable, *, order=None, epochs: int, per_member: bool = False):
    """Train as the public TurbaNet does: batches replicated on the host, one jitted vmapped step per dispatch.

    Data, order, losses and errors as in `train_loop`; `loss_fn(params, x, y, apply_fn) -> (scalar, ...)`.
    Returns (swarm, losses float64 [epoch, member]).
    """
    x = np.asarray(x)
    y = np.asarray(y)
    order = check(len(swarm), x, y, order, epochs, per_member)
    members = np.arange(len(swarm))[:, None]
    swarm = swarm.set_loss_fn(loss_fn)
    if order is None:
        copies = [a if per_member else np.broadcast_to(a, (len(swarm), *a.shape)) for a in (x, y)]
        whole = jax.device_put(copies)
    losses = np.empty((epochs, len(swarm)))
    for epoch in range(epochs):
        steps = []
        for rows in [None] if order is None else order[:, epoch].swapaxes(0, 1):
            batch = (members, rows) if per_member else rows
            swarm, values, _ = swarm.train(*(whole if rows is None else (x[batch], y[batch])))
            steps.append(values)
        losses[epoch] = np.mean(jax.device_get(steps), axis=0, dtype=np.float64)
    return swarm, losses


def train_scan(swarm, x, y, loss_fn: Callable, *, order=None, epochs: int, per_member: bool = False, devices=None):
    """Train as one writes it in plain JAX: a jitted `lax.scan` over the steps of `jax.vmap` over the networks.

    With several `devices`, each has as many networks (`jax.shard_map`). Data, order, losses and errors as in
    `train_loop`. The step and the compiler's options are `fit`'s, of the same Flax model: blocks and placement are what
    `fit` adds.
    Returns (swarm, losses float64 [epoch, member]).
    """
    x, y = np.asarray(x), np.asarray(y)
    order = check(len(swarm), x, y, order, epochs, per_member)
    devices = tuple(devices or jax.devices()[:1])
    if len(swarm) % len(devices):
        raise ValueError(f"{len(swarm)} networks cannot be split equally over {len(devices)} devices.")
    steps = epochs if order is None else order.shape[1] * order.shape[2]
    rows = None if order is None else order.reshape(len(swarm), steps, -1)
    swarm, losses = _scanned(loss_fn, devices, steps, per_member)(swarm, rows, x, y)
    return swarm, np.asarray(losses, np.float64).reshape(len(swarm), epochs, -1).mean(2).T


@cache
def _scanned(loss_fn, devices, steps, per_member):
    """Return the compiled function of `train_scan` for these arguments: (swarm, rows, x, y) -> (swarm, losses)."""

    def train(state, rows, x, y):
        def step(state, rows):
            batch = (x, y) if rows is None else (x[rows], y[rows])
            state, loss, _ = train_step(loss_fn, state, *batch)
            return state, loss

        return lax.scan(step, state, rows, length=steps)

    def every(swarm, rows, x, y):
        own = 0 if per_member else None
        return jax.vmap(train, (0, None if rows is None else 0, own, own))(swarm, rows, x, y)

    member, shared = PartitionSpec("member"), PartitionSpec()
    data = member if per_member else shared
    specs = {"in_specs": (member, member, data, data), "out_specs": member, "check_vma": False}
    mapped = jax.shard_map(every, mesh=Mesh(np.array(devices), ("member",)), **specs)
    return jax.jit(mapped, compiler_options=Plan(devices).compiler_options)


def shares(swarm, x, y, loss_fn: Callable, *, order=None, epochs: int, per_member: bool = False) -> list[bytes]:
    """Deal out the networks to a process per core: the pickled arguments of each one's `train_scan`."""
    import cloudpickle
    import joblib

    x, y = np.asarray(x), np.asarray(y)
    order = check(len(swarm), x, y, order, epochs, per_member)
    count = min(joblib.cpu_count(), len(swarm))
    dealt = []
    for share in (np.arange(first, len(swarm), count) for first in range(count)):
        data = (x[share], y[share]) if per_member else (x, y)
        rows = None if order is None else order[share]
        own = jax.tree.map(np.asarray, swarm[share]), *data, loss_fn
        dealt.append(cloudpickle.dumps((own, {"order": rows, "epochs": epochs, "per_member": per_member})))
    return dealt


def scan_in_processes(dealt: list[bytes]) -> np.ndarray:
    """Run `train_scan` of each of `shares` in a process of its own, on a core of its own; losses [epoch, member].

    The processes stay, with their data and compiled programs.
    """
    futures = [_process(number).submit(_scan_share, share) for number, share in enumerate(dealt)]
    parts = [future.result()[1] for future in futures]
    losses = np.empty((len(parts[0]), sum(part.shape[1] for part in parts)))
    for first, part in enumerate(parts):
        losses[:, first :: len(dealt)] = part
    return losses


@cache
def _process(number):
    """Return the executor of a process that stays."""
    settings = {"initializer": _keep_to_core, "initargs": (number,)}
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), **settings)


def _keep_to_core(number):
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def _scan_share(share):
    arguments, settings = _unpickled(share)
    swarm, losses = train_scan(*arguments, **settings)
    return jax.tree.map(np.asarray, (swarm.params, swarm.opt_state)), losses


@cache
def _unpickled(share):
    import cloudpickle

    return cloudpickle.loads(share)
