"""The one table of ways: each trains a swarm's networks from the same weights, on the same rows in the same order."""

import copy
from functools import cache, partial

import numpy as np
import torch

from study.baselines import trainers
from study.figures.labels import COMPILED, FUNC, FUSED, LOOP, OURS, PROCESSES, SCAN, SKLEARN, STEPS, WAYS
from study.measurement import timing
from study.measurement.compilation import cold, compile_seconds
from turbanet.core.plan import Plan
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
    segment=None,
    threads=None,
    names=WAYS,
):
    """{way: run} of the ways named; each run begins with the swarm's weights.

    Parameters
    ----------
    swarm, x, y, loss_fn, plan, epochs, batch_size, per_member, segment : as `fit` takes them; the swarm has Adam
    loss, learning_rate : the same for PyTorch, "cross_entropy" or "mse"
    twin : one member's params -> a PyTorch network with these weights
    threads : PyTorch's, where it trains in this process
    names : some of WAYS; scikit-learn is left out where it cannot train the same networks

    Returns
    -------
    runs : run(epochs), at most the job's where batches are drawn, -> (losses [epoch, member], seconds it spent
        compiling, NaN where that is not apart)
    """
    rows = x.shape[1] if per_member else len(x)
    order = None if batch_size is None else batch_order(swarm, rows, epochs=epochs, batch_size=batch_size)
    device = "cuda" if plan.devices[0].platform == "gpu" else "cpu"
    begin = restored(swarm, twin, device) if set(names) & IN_PYTORCH else None

    def job(epochs):
        return {"order": None if order is None else order[:, :epochs], "epochs": epochs}

    def ours(plan, epochs=epochs):
        how = {"batch_size": batch_size, "per_member": per_member, "segment": segment, "plan": plan}
        history = fit(swarm, x, y, loss_fn, epochs=epochs, progress=False, **how)[1]
        return history.train_loss, history.compile_seconds

    def steps(epochs=epochs):
        return trainers.train_steps(swarm, x, y, loss_fn, per_member=per_member, **job(epochs))[1], np.nan

    def pytorch(train, epochs=epochs, **more):
        how = {"loss": loss, "learning_rate": learning_rate, "per_member": per_member, **job(epochs)}
        return train(begin(), x, y, **how, **more), np.nan

    @cache
    def compiled():
        network = copy.deepcopy(begin()[0])
        return {"network": network, "compiled": torch.compile(network)}

    def train_compiled(*data, **how):
        return trainers.train_compiled(*data, **compiled(), **how)

    def sklearn(epochs=epochs):
        return trainers.train_sklearn(swarm, x, y, learning_rate=learning_rate, **job(epochs)), np.nan

    table = {
        OURS: partial(ours, plan),
        SCAN: partial(ours, Plan(plan.devices[:1], len(swarm))),
        STEPS: steps,
        FUNC: partial(pytorch, trainers.train_func, threads=threads),
        COMPILED: partial(pytorch, train_compiled, threads=threads),
        LOOP: partial(pytorch, trainers.train_loop, threads=threads),
        FUSED: partial(pytorch, trainers.train_loop, threads=threads, fused=True),
        PROCESSES: partial(pytorch, trainers.train_processes),
    }
    if order is not None and loss == "cross_entropy" and _known_to_sklearn(swarm):
        table[SKLEARN] = sklearn
    return {name: table[name] for name in names if name in table}


def fit_in_turns(swarm, x, y, loss_fn, *, epochs, turn, **settings):
    """`fit`, `turn` epochs at a time: yields (swarm, History) until `epochs` are trained."""
    for start in range(0, epochs, turn):
        swarm, history = fit(swarm, x, y, loss_fn, epochs=min(turn, epochs - start), **settings)
        yield swarm, history


def loop_in_turns(twins, x, y, *, order, turn, learning_rate, fused=False, **settings):
    """`baselines.train_loop` of copies of the twins, `turn` epochs at a time: yields (networks, losses)."""
    networks = copy.deepcopy(twins)
    optimizers = trainers.adams(networks, learning_rate=learning_rate, fused=fused)
    how = {"learning_rate": learning_rate, "optimizers": optimizers, **settings}
    for start in range(0, order.shape[1], turn):
        part = order[:, start : start + turn]
        yield networks, trainers.train_loop(networks, x, y, order=part, epochs=part.shape[1], **how)


def restored(swarm, twin, device="cpu"):
    """A function that gives the members' PyTorch networks, each time with the swarm's weights."""
    networks = [twin(state.params).to(device) for state in swarm]
    start = [{name: weight.clone() for name, weight in network.state_dict().items()} for network in networks]

    def begin():
        for network, weights in zip(networks, start, strict=True):
            network.load_state_dict(weights)
        return networks

    return begin


def assert_equal_losses(runs, epochs, rtol=1e-3):
    """Raise AssertionError unless every way ends `epochs` epochs with the same losses."""
    losses = {name: np.asarray(run(epochs)[0]) for name, run in runs.items()}
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, losses[OURS], rtol=rtol, err_msg=f"{name} trains something else")


def time_ways(runs, epochs, *, segment, repeats):
    """A table of way, repeat, seconds, steps and compile_seconds of full-batch ways, in turn, each warm.

    Seconds for all `epochs` are read off `steps` of them (`timing.extrapolate`); ours runs whole segments, for which
    its program is compiled. What that takes is measured as in a new process; of a way that does not say so itself, it
    is what its first step took beyond its second.
    """
    compiled = {}
    with cold():
        for name, run in runs.items():
            steps = segment if name == OURS else 1
            with timing.stopwatch() as first:
                apart = run(steps)[1]
            with timing.stopwatch() as warm:
                run(steps)
            compiled[name] = compile_seconds(apart, first.seconds, warm.seconds)
    table = timing.extrapolate(runs, epochs, units={OURS: segment} if OURS in runs else None, repeats=repeats)
    return table.assign(compile_seconds=table.way.map(compiled))


def _known_to_sklearn(swarm):
    """Whether it has such networks: it knows no convolution or recurrence, and gives two classes one output."""
    layers = swarm.params
    return all(name.startswith("Dense_") for name in layers) and len(layers[f"Dense_{len(layers) - 1}"]["bias"][0]) > 2
