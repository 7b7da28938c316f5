"""Methods that train a workload's networks on one device, each a function of a number of steps."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import torch

from study.baselines.layers import tensor
from study.baselines.trainers import LOSSES
from study.baselines.workloads import Workload
from study.figures.labels import FUNC, FUNC_GRAPH, FUSED, GRAPH, LOOP, OURS, SCAN, STACKED, STEPS, USUAL
from study.gpu import torch_steps
from study.gpu.jax_methods import Run, train_ours, train_scan, train_steps
from turbanet.training.fit import batch_order

CHECKED = 20  # steps after which losses must agree; later epochs repeat the order of those that these take
ONE_BY_ONE = (LOOP, FUSED, GRAPH)  # train one network; time for all is in proportion to their number


def methods(work: Workload, names: tuple[str, ...]) -> dict[str, Callable[[int], Run]]:
    """Make {method: run(steps)} of the named methods; all start from the same weights and rows.

    Steps are whole epochs. Methods with CUDA graphs are left out on a CPU.
    """
    swarm = work.swarm()
    order = None
    if work.batch_size:
        epochs = -(-CHECKED * work.epochs // work.steps)
        order = batch_order(swarm, work.rows, epochs=epochs, batch_size=work.batch_size)
        order = order.reshape(len(swarm), -1, order.shape[-1])
    makers = {
        OURS: train_ours,
        USUAL: train_ours,
        SCAN: train_scan,
        STEPS: train_steps,
        LOOP: _loop,
        FUSED: _loop,
        GRAPH: _loop,
    }
    makers |= {FUNC: _func, FUNC_GRAPH: _func, STACKED: _stacked}
    on_gpu = torch.cuda.is_available()
    return {
        name: makers[name](work, swarm, order, name)
        for name in names
        if on_gpu or name not in (GRAPH, FUNC_GRAPH, STACKED)
    }


def _device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def _data(work, network=None):
    """Return x and y as tensors on the device; with `network`, its own rows where networks have their own."""
    x, y = (work.x, work.y) if network is None or not work.per_member else (work.x[network], work.y[network])
    y = tensor(y).to(_device())
    return tensor(x).to(_device()), y if y.is_floating_point() else y.long()


def _timed(make, order):
    """Return run(steps) of the `torch_steps.Training` from `make()`, made once and reset; order [step, ...]."""
    make = cache(make)

    def run(steps):
        training = make()
        training.reset()
        rows = _rows(order)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(steps):
            training.step(None if rows is None else rows[number % len(rows)])
        mean = (training.total / steps).cpu().numpy()
        seconds = time.perf_counter() - begin
        return Run(mean, seconds, seconds)

    return run


def _first(work, swarm):
    """Make the first network in PyTorch, with its weights, on the device."""
    return work.twin(jax.tree.map(lambda leaf: np.asarray(leaf[0]), swarm.params)).to(_device())


def _rows(order):
    return None if order is None else torch.as_tensor(order, device=_device()).long()


def _loop(work, swarm, order, name):
    first = None if order is None else order[0]

    def make():
        adam: dict[str, Any] = {LOOP: {}, FUSED: {"fused": True}, GRAPH: {"fused": True, "capturable": True}}[name]
        x, y = _data(work, 0)
        training = torch_steps.one_network(
            _first(work, swarm), x, y, LOSSES[work.loss], learning_rate=work.learning_rate, **adam
        )
        if name == GRAPH:
            training.capture(None if first is None else _rows(first[0]))
        return training

    return _timed(make, first)


def _stacked_params(work, swarm):
    """Return all MLPs' parameters by PyTorch's names, {name: [network, ...]}, with transposed kernels."""
    params = {}
    for number in range(len(swarm.params)):
        layer = swarm.params[f"Dense_{number}"]
        params[f"{2 * number}.weight"] = tensor(np.asarray(layer["kernel"]).swapaxes(1, 2).copy()).to(_device())
        params[f"{2 * number}.bias"] = tensor(np.asarray(layer["bias"])).to(_device())
    return params


def _func(work, swarm, order, name):
    def make():
        adam = {"fused": True, "capturable": name == FUNC_GRAPH, "learning_rate": work.learning_rate}
        x, y = _data(work)
        training = torch_steps.all_networks(
            _first(work, swarm), _stacked_params(work, swarm), x, y, LOSSES[work.loss], **adam
        )
        if name == FUNC_GRAPH:
            training.capture(None if order is None else _rows(order[:, 0]))
        return training

    return _timed(make, None if order is None else order.swapaxes(0, 1))


def _stacked(work, swarm, order, name):
    def make():
        settings = {"learning_rate": work.learning_rate, "fused": True}
        return torch_steps.stacked_products(_stacked_params(work, swarm), *_data(work), **settings)

    return _timed(make, None)
