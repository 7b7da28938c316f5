"""The usual ways beside a swarm over machines: a Ray task a network, joblib with PyTorch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import linen as nn

SHARDS, TASKS, JOBLIB = "TurbaNet, shards", "Ray, a task a network", "joblib, PyTorch"


def jobs(make: Callable, data: Callable, ids, *, epochs: int, batch_size: int) -> list[dict[str, Any]]:
    """What each member's network begins with, a dict a member: params, x, y, wanted, order int [step, batch].

    The weights and the batches of each epoch are those that `fit` gives to these ids.
    """
    import jax

    import turbanet as tn

    swarm, parts = make(ids), data(ids)
    order = tn.batch_order(swarm, parts["x"].shape[1], epochs=epochs, batch_size=batch_size)
    whole = {"params": jax.device_get(swarm.params), "x": parts["x"], "y": parts["y"], "wanted": parts["predict"]}
    whole["order"] = order.reshape(len(ids), -1, batch_size)
    return [jax.tree.map(lambda leaf, place=place: leaf[place], whole) for place in range(len(ids))]


def by_tasks(own: Sequence[dict], **how: Any) -> tuple[np.ndarray, np.ndarray]:
    """(losses [member, step], predictions [member, row, 1]) of a Ray task a network; how: of `trained_alone`."""
    import ray

    from turbanet.cluster.driver import environment

    # A shard's environment, with as few threads: workers of another one would begin anew, and be in each other's way.
    how_it_runs = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "runtime_env": environment(1, 0)}
    task = ray.remote(**how_it_runs)(trained_alone)
    return _stacked(ray.get([task.remote(job, **how) for job in own]))


def by_joblib(own: Sequence[dict], *, processes: int, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same by joblib's processes and PyTorch, a call a network; how: of `trained_by_pytorch`."""
    import joblib

    call = joblib.delayed(trained_by_pytorch)
    return _stacked(joblib.Parallel(n_jobs=processes, backend="loky")(call(job, **how) for job in own))


def trained_alone(job: dict, *, hidden: int, learning_rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(losses [step], predictions [row, 1]) of one network: Flax and Optax in a scan, compiled once a process."""
    import jax

    return jax.device_get(_compiled(hidden, learning_rate)(job))


def trained_by_pytorch(job: dict, *, learning_rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(losses [step], predictions [row, 1]) of one network by a PyTorch loop of one thread, with fused Adam."""
    import torch

    from study.baselines.twins import lstm_twin, tensor

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
        return torch.stack(losses).numpy(), twin(tensor(job["wanted"])).numpy()


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
        return losses, model.apply({"params": params}, job["wanted"])

    return train


def _stacked(found):
    losses, predictions = zip(*found, strict=True)
    return np.stack(losses), np.stack(predictions)


class Forecaster(nn.Module):
    """`tn.LSTM` as Flax has it, with the same parameters: x [batch, time, feature] -> [batch, 1]."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)[:, -1])
