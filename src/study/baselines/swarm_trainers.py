"""Methods that train a swarm's networks without PyTorch: scikit-learn, and one step per dispatch in JAX."""

from collections.abc import Callable

import jax
import numpy as np

from study.baselines.trainers import check


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
