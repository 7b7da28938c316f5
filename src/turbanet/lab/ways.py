"""The ways of training one swarm, each a callable to be timed, from the same weights on the same data."""

from functools import partial

import numpy as np

from turbanet.lab import baselines, timing
from turbanet.training.fit import fit

OURS, STEPS, FUNC = "TurbaNet", "one step per dispatch", "torch.func vmap"
LOOP, FUSED, PROCESSES = "PyTorch loop", "PyTorch loop, fused Adam", "PyTorch, process per core"
SERIAL, SERIAL_ONE = "PyTorch, serial, all threads", "PyTorch, serial, one thread"
WAYS = (OURS, STEPS, FUNC, LOOP, FUSED, PROCESSES)


def full_batch_ways(swarm, x, y, loss_fn, *, loss, learning_rate, twin, plan, threads=None, names=WAYS):
    """{way: run}: one step of all rows an epoch, Adam, from the swarm's weights.

    run(epochs) -> (losses [epoch, member], seconds it spent compiling, NaN where that is not apart).

    `loss` is PyTorch's name for `loss_fn`; `twin` makes a PyTorch network of one member's params; `threads` PyTorch's.
    """
    device = "cuda" if plan.devices[0].platform == "gpu" else "cpu"
    members = range(len(swarm)) if set(names) - {OURS, STEPS} else ()
    copies = [twin(swarm.get_state(i).params).to(device) for i in members]
    start = [{name: weight.clone() for name, weight in copy.state_dict().items()} for copy in copies]

    def ours(epochs):
        history = fit(swarm, x, y, loss_fn, epochs=epochs, plan=plan, progress=False)[1]
        return history.train_loss, history.compile_seconds

    def steps(epochs):
        return baselines.train_steps(swarm, x, y, loss_fn, epochs=epochs)[1], np.nan

    def torch_way(train, epochs, **more):
        for copy, weights in zip(copies, start, strict=True):
            copy.load_state_dict(weights)
        return train(copies, x, y, epochs=epochs, loss=loss, learning_rate=learning_rate, **more), np.nan

    every = {
        OURS: ours,
        STEPS: steps,
        FUNC: partial(torch_way, baselines.train_func, threads=threads),
        LOOP: partial(torch_way, baselines.train_loop, threads=threads),
        FUSED: partial(torch_way, baselines.train_loop, threads=threads, fused=True),
        PROCESSES: partial(torch_way, baselines.train_processes),
    }
    return {name: every[name] for name in names}


def assert_equal_losses(ways, epochs, rtol=1e-3):
    """Raise AssertionError unless every way ends `epochs` epochs with the same losses."""
    losses = {name: np.asarray(run(epochs)[0]) for name, run in ways.items()}
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, losses[OURS], rtol=rtol, err_msg=f"{name} trains something else")


def time_ways(ways, epochs, *, repeats):
    """A list of {way, repeat, seconds, compile_seconds}, the ways in turn, each warm.

    Ours is warmed up by a whole run, for its program is compiled for that many epochs; the others by a few epochs.
    """
    compiled = {name: run(epochs if name == OURS else min(epochs, 4))[1] for name, run in ways.items()}
    seconds = timing.interleave({n: partial(run, epochs) for n, run in ways.items()}, repeats=repeats, warmup=0)
    return [
        {"way": name, "repeat": repeat, "seconds": second, "compile_seconds": compiled[name]}
        for name, all_of in seconds.items()
        for repeat, second in enumerate(all_of)
    ]
