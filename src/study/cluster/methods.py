"""The usual methods to train many networks on a cluster: a Ray task a network, joblib with PyTorch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import linen as nn

SHARDS, TASKS, JOBLIB = "TurbaNet, shards", "Ray, a task a network", "joblib, PyTorch"


def jobs(make: Callable, data: Callable, ids, *, epochs: int, batch_size: int) -> list[dict[str, Any]]:
    """Prepare each member's job, a dict of params, x, y, predict and order int [step, batch].

    Weights and batches are those of `fit` for the same ids.
    """
    import jax

    import turbanet as tn

    swarm, parts = make(ids), data(ids)
    order = tn.batch_order(swarm, parts["x"].shape[1], epochs=epochs, batch_size=batch_size)
    whole = {"params": jax.device_get(swarm.params), "x": parts["x"], "y": parts["y"], "predict": parts["predict"]}
    whole["order"] = order.reshape(len(ids), -1, batch_size)
    return [jax.tree.map(lambda leaf, index=index: leaf[index], whole) for index in range(len(ids))]


def by_tasks(jobs: Sequence[dict], **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run `trained_alone(job, **kwargs)` in a Ray task each: (losses [member, step], predictions [member, row, 1])."""
    import ray

    from turbanet.cluster.driver import environment

    # A shard's environment limits threads; with another one Ray would start new workers beside the idle ones.
    options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "runtime_env": environment(1, 0)}
    task = ray.remote(**options)(trained_alone)
    return _stacked(ray.get([task.remote(job, **kwargs) for job in jobs]))


def by_joblib(jobs: Sequence[dict], *, processes: int, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run `trained_by_pytorch(job, **kwargs)` in joblib's processes; returns the same as `by_tasks`."""
    import joblib

    call = joblib.delayed(trained_by_pytorch)
    return _stacked(joblib.Parallel(n_jobs=processes, backend="loky")(call(job, **kwargs) for job in jobs))


def trained_alone(job: dict, *, hidden: int, learning_rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Train one network by Flax and Optax in a scan, compiled once a process: (losses [step], predictions [row, 1])."""
    import jax

    return jax.device_get(_compiled(hidden, learning_rate)(job))


def trained_by_pytorch(job: dict, *, learning_rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Train one network by a PyTorch loop with fused Adam in one thread: (losses [step], predictions [row, 1])."""
    import torch

    from study.baselines.layers import tensor
    from study.baselines.twins import lstm_twin

    torch.set_num_threads(1)
    twin = lstm_twin(job["params"])
    weights = [each for each in twin.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=learning_rate, fused=True)
    x, y, order = tensor(job["x"]), tensor(job["y"]), tensor(job["order"]).long()
    losses = []
    for rows in order:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(twin(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        return torch.stack(losses).numpy(), twin(tensor(job["predict"])).numpy()


@functools.cache
def _compiled(hidden, learning_rate):
    import jax
    import optax

    model, optimizer = Forecaster(hidden), optax.adam(learning_rate)

    def loss_of(params, x, y):
        return ((model.apply({"params": params}, x) - y) ** 2).mean()

    def step(state, rows, x, y):
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, x[rows], y[rows])
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    @jax.jit
    def train(job):
        begin = job["params"], optimizer.init(job["params"])
        one = functools.partial(step, x=job["x"], y=job["y"])
        (params, _), losses = jax.lax.scan(one, begin, job["order"])
        return losses, model.apply({"params": params}, job["predict"])

    return train


def _stacked(found):
    losses, predictions = zip(*found, strict=True)
    return np.stack(losses), np.stack(predictions)


class Forecaster(nn.Module):
    """`tn.LSTM` in plain Flax with the same parameters: x [batch, time, feature] -> [batch, 1]."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)[:, -1])
