"""The table of methods: each trains a swarm's networks from the same weights, on the same rows in the same order."""

import copy
from functools import cache, partial

import numpy as np
import torch

from study.baselines import processes, swarm_trainers, trainers
from study.figures.labels import (
    COMPILED,
    FUNC,
    FUSED,
    LOOP,
    METHODS,
    OURS,
    PROCESSES,
    SCAN,
    SCAN_ALL,
    SCAN_PROCESSES,
    SKLEARN,
    STEPS,
)
from study.measurement import timing
from study.measurement.compilation import cold
from turbanet.training.fit import batch_order, fit

IN_PYTORCH = {FUNC, COMPILED, LOOP, FUSED, PROCESSES}


def runs(
    swarm,
    x,
    y,
    loss_fn,
    *,
    loss,
    learning_rate,
    twin,
    plan,
    epochs=1,
    batch_size=None,
    per_member=False,
    threads=None,
    names=METHODS,
):
    """Make {method: run} of the named methods; each run starts from the swarm's weights.

    Parameters
    ----------
    swarm, x, y, loss_fn, plan, epochs, batch_size, per_member : arguments of `fit`; the swarm has Adam
    loss, learning_rate : PyTorch's loss, "cross_entropy" or "mse", and the rate of Adam
    twin : one member's params -> a PyTorch network with these weights
    threads : PyTorch's threads in this process
    names : a selection of METHODS; scikit-learn is left out where it cannot train the same networks

    Returns
    -------
    runs : run(epochs) -> (losses [epoch, member], compile seconds, NaN where the method does not report them); with
        batches, at most `epochs` epochs
    """
    rows = x.shape[1] if per_member else len(x)
    order = None if batch_size is None else batch_order(swarm, rows, epochs=epochs, batch_size=batch_size)
    device = "cuda" if plan.devices[0].platform == "gpu" else "cpu"
    begin = restored(swarm, twin, device) if set(names) & IN_PYTORCH else None

    def job(epochs):
        return {"order": None if order is None else order[:, :epochs], "epochs": epochs}

    def ours(epochs=epochs):
        kwargs = {"batch_size": batch_size, "per_member": per_member, "plan": plan}
        history = fit(swarm, x, y, loss_fn, epochs=epochs, progress=False, **kwargs)[1]
        return history.train_loss, history.compile_seconds

    def in_jax(train, epochs=epochs, **more):
        return train(swarm, x, y, loss_fn, per_member=per_member, **job(epochs), **more)[1], np.nan

    @cache
    def shares(epochs):
        return swarm_trainers.shares(swarm, x, y, loss_fn, per_member=per_member, **job(epochs))

    def scan_in_processes(epochs=epochs):
        return swarm_trainers.scan_in_processes(shares(epochs)), np.nan

    def pytorch(train, epochs=epochs, **more):
        kwargs = {"loss": loss, "learning_rate": learning_rate, "per_member": per_member, **job(epochs)}
        return train(begin(), x, y, **kwargs, **more), np.nan

    @cache
    def compiled():
        network = copy.deepcopy(begin()[0])
        return {"network": network, "compiled": torch.compile(network)}

    def train_compiled(*data, **kwargs):
        return trainers.train_compiled(*data, **compiled(), **kwargs)

    def sklearn(epochs=epochs):
        return swarm_trainers.train_sklearn(swarm, x, y, learning_rate=learning_rate, **job(epochs)), np.nan

    table = {
        OURS: ours,
        SCAN: partial(in_jax, swarm_trainers.train_scan, devices=plan.devices[:1]),
        SCAN_ALL: partial(in_jax, swarm_trainers.train_scan, devices=plan.devices),
        SCAN_PROCESSES: scan_in_processes,
        STEPS: partial(in_jax, swarm_trainers.train_steps),
        FUNC: partial(pytorch, trainers.train_func, threads=threads, fused=True),
        COMPILED: partial(pytorch, train_compiled, threads=threads, fused=True),
        LOOP: partial(pytorch, trainers.train_loop, threads=threads),
        FUSED: partial(pytorch, trainers.train_loop, threads=threads, fused=True),
        PROCESSES: partial(pytorch, processes.train_processes, fused=True),
    }
    if order is not None and loss == "cross_entropy" and _known_to_sklearn(swarm):
        table[SKLEARN] = sklearn
    return {name: table[name] for name in names if name in table}


def restored(swarm, twin, device="cpu"):
    """Return a function that resets the members' PyTorch networks to the swarm's weights and returns them."""
    networks = [twin(state.params).to(device) for state in swarm]
    start = [{name: weight.clone() for name, weight in network.state_dict().items()} for network in networks]

    def begin():
        for network, weights in zip(networks, start, strict=True):
            network.load_state_dict(weights)
        return networks

    return begin


def assert_equal_losses(runs, epochs, rtol=1e-3):
    """Raise AssertionError unless all methods have the same losses after `epochs` epochs."""
    losses = {name: np.asarray(run(epochs)[0]) for name, run in runs.items()}
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, losses[OURS], rtol=rtol, err_msg=f"{name} trains something else")


def time_methods(runs, epochs, *, repeats):
    """Time full-batch methods warm and in turn: a table of method, repeat, seconds, steps and compile_seconds.

    Seconds for all `epochs` are extrapolated from `steps` of them (`timing.extrapolate`). Compilation, measured as in a
    new process, is the first step's time beyond the second's, for all methods alike.
    """
    compiled = {}
    with cold():
        for name, run in runs.items():
            with timing.stopwatch() as first:
                run(1)
            with timing.stopwatch() as warm:
                run(1)
            compiled[name] = max(0.0, first.seconds - warm.seconds)
    table = timing.extrapolate(runs, epochs, repeats=repeats)
    return table.assign(compile_seconds=table.method.map(compiled))


def _known_to_sklearn(swarm):
    """Whether MLPClassifier has such networks: only dense layers, and at least three classes, each with an output."""
    layers = swarm.params
    return all(name.startswith("Dense_") for name in layers) and len(layers[f"Dense_{len(layers) - 1}"]["bias"][0]) > 2
