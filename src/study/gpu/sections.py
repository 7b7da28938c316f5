"""The sections of `make gpu`: each is a function that yields rows as they are measured, within its seconds."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax

import turbanet as tn
from study.agents.suite import CARTPOLE, CLEANRL
from study.baselines import twins
from study.baselines.workloads import Workload, workloads
from study.figures.labels import FUNC, FUNC_GRAPH, FUSED, GRAPH, LOOP, OURS, SCAN, STACKED, STEPS, USUAL
from study.gpu.ceilings import roofline
from study.gpu.compare import FLOAT32, Budget, compare
from study.gpu.methods import ONE_BY_ONE, methods
from study.gpu.torch_steps import TF32, multiplying_in

SUITE = (  # (workload, networks, seconds)
    *(("mnist", 50, 22), ("stocks", 500, 18), ("lenet", 8, 18), ("tabular", 2000, 10), ("stocks", 5000, 12)),
    *(("lenet", 64, 14), ("resnet", 4, 36), ("vgg11", 4, 34), ("resnet", 32, 34), ("mnist", 5000, 12)),
    *(("mnist", 500, 22), ("mobilenet", 4, 110)),
)
KERNELS = {  # networks that one kernel holds: {name: (features, rows, rows per step)}
    "2-16-2": (2, 128, None),
    "64-64-32-16": (64, 32, None),
    "10-32-32-2": (10, 64, None),
    "5-10-3": (5, 33, None),
    "20-32-2": (20, 512, 32),
    "4-64-64-2": (4, 512, 32),
}
FUNC_MOST = 16_384  # networks that torch.func is measured on at most


def sweep(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Measure the published sweep, 2-16-2 and 2-256-256-2 on 128 rows, from one network to the card's limit."""
    suite = workloads()
    small, wide = dataclasses.replace(suite["sweep-small"], epochs=256), suite["sweep-large"]  # fits the budget
    plans: list[tuple[Workload, int, str, float]] = []
    for precision, sizes in ((TF32, (1, 128, 1024, 4096, 16_384, 65_536)), (FLOAT32, (128, 4096))):
        plans += [(small, size, precision, 6 if precision == TF32 else 14) for size in sizes]
    for precision, sizes in ((TF32, (1, 128, 512, 4096)), (FLOAT32, (128,))):
        plans += [(wide, size, precision, 9 if precision == TF32 else 18) for size in sizes]
    if tiny:
        plans = [(small, 1, TF32, 0), (small, 3, FLOAT32, 0)]
    plans.sort(key=lambda plan: (plan[2] != TF32, plan[1] not in (1, 128)))  # published sizes first
    for work, size, precision, seconds in plans:
        names: list[str] = [OURS, SCAN]
        if size <= FUNC_MOST:
            names += [FUNC, FUNC_GRAPH]
        if size in (1, 128, 3):
            names += [STEPS, LOOP, FUSED, GRAPH]
        if size == 128 and precision == TF32 and work is small:
            names += [STACKED]
            seconds += 15
        if budget.allows(f"{work.name} of {size} in {precision}", seconds):
            yield compare(dataclasses.replace(work, members=size), tuple(names), precision)


def suite(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Measure the suite's workloads at its own sizes and at sizes that fill a card."""
    works = workloads(quick=tiny)
    rng = np.random.default_rng(0)
    x, y = rng.random((512, 20), np.float32), rng.integers(0, 2, 512).astype(np.int32)
    works["tabular"] = Workload("tabular", tn.MLP((32, 2)), 2000, x, y, works["mnist"].twin, epochs=20, batch_size=32)
    plans = SUITE
    if tiny:
        plans = [("mnist", 2, 0)]
    for name, members, seconds in plans:
        if budget.allows(f"{name} of {members}", seconds):
            yield compare(_resized(works[name], members), _methods_for(name, members), TF32, repeats=3)


def kernel(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Measure trainings in one kernel beside the same by XLA, where a kernel holds a network."""
    plans = [("2-16-2", 128, TF32), ("2-16-2", 16_384, TF32), *((name, 4096, TF32) for name in KERNELS)]
    plans += [("2-16-2", 4096, FLOAT32), ("5-10-3", 4096, FLOAT32), *((name, 128, TF32) for name in list(KERNELS)[1:])]
    for name, size, precision in [("5-10-3", 2, FLOAT32)] if tiny else plans:
        if budget.allows(f"{name} of {size} in {precision}", 0 if tiny else 15):
            work = dataclasses.replace(_small_network(name), members=size)
            yield compare(work, (OURS, USUAL), precision, repeats=3)


def _small_network(name):
    """Make the workload of a network of `KERNELS` on random numbers."""
    features, rows, batch_size = KERNELS[name]
    widths = tuple(map(int, name.split("-")[1:]))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, features)).astype(np.float32), rng.integers(0, widths[-1], rows).astype(np.int32)
    return Workload(name, tn.MLP(widths), 1, x, y, twins.mlp_twin, epochs=16, batch_size=batch_size)


def _methods_for(name, members):
    """List the methods for a workload; torch.func only trains MLPs of limited number."""
    loops = (LOOP, FUSED, GRAPH) if members <= 500 else ()
    scan = (SCAN,) if name in ("mnist", "tabular") else ()
    return (OURS, *scan, *loops, *((FUNC, FUNC_GRAPH) if name == "mnist" and 1 < members <= 500 else ()))


def _resized(work, members):
    if members <= work.members:
        return work.first(members)
    copies = -(-members // work.members)
    data = {"x": np.tile(work.x, (copies, 1, 1, 1))[:members], "y": np.tile(work.y, (copies, 1, 1))[:members]}
    return dataclasses.replace(work, members=members, **(data if work.per_member else {}))


def mnist(budget: Budget, x: Any, y: Any, source: str, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Train 50 and 500 networks 784-64-32-10 to the end at the published settings, and one network in PyTorch.

    x float32 [row, 784], y int [row]: the first 80 % train, the last 10 % test. The 50 train under both precisions, so
    that the effect of TF32 shows in accuracies.
    """
    epochs = 1 if tiny else 10
    train, held = int(0.8 * len(x)), int(0.9 * len(x))
    adam = optax.adam(5e-5)
    for members, precision in ((50, TF32), (50, FLOAT32), (500, TF32)) if not tiny else ((2, TF32),):
        if not budget.allows(f"{members} networks on MNIST in {precision}", 0 if tiny else 12 + members / 50):
            continue
        swarm = tn.TurbaTrainState.swarm(tn.MLP((64, 32, 10)), adam, members, sample_input=x[:1], seed=0)
        settings = {"epochs": epochs, "batch_size": 8, "progress": False}
        begin = time.perf_counter()
        with multiplying_in(precision):
            trained, history = tn.fit(swarm, x[:train], y[:train], tn.softmax_cross_entropy, **settings)
            seconds = time.perf_counter() - begin
            logits = tn.predict(trained, x[held:])
        each = np.asarray(tn.accuracy(logits, y[held:]))
        row = {"method": OURS, "networks": members, "precision": precision, "seconds": seconds, "source": source}
        row |= {"compile_seconds": history.compile_seconds, "epochs": epochs, "rows": train, "accuracy": each.mean()}
        row |= {"loss": history.train_loss[-1].mean(), "accuracy_deviation": each.std(ddof=1)}
        yield [row | {"ensemble_accuracy": float(tn.accuracy(tn.ensemble_mean(logits), y[held:]))}]
    work = Workload("mnist", tn.MLP((64, 32, 10)), 1, x[:train], y[:train], workloads()["mnist"].twin, batch_size=8)
    work = dataclasses.replace(work, learning_rate=5e-5)
    for name in (GRAPH, FUSED, LOOP):
        if budget.allows(f"one network on MNIST by {name}", 0 if tiny else 8):
            steps = work.steps if tiny else 2 * work.steps // 10  # of ten epochs, which cost the same each
            for run in methods(work, (name,)).values():
                run(min(200, work.steps))
                seconds = run(steps).seconds * epochs * work.steps / steps
                yield [{"method": name, "networks": 1, "seconds": seconds, "epochs": epochs, "rows": train}]


def stocks(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Train an LSTM of 32 units on each of 500 series at the published settings: 1 000 epochs, 14 steps, 32 rows."""
    networks, epochs, rows = (3, 2, 64) if tiny else (500, 1000, 436)
    rng = np.random.default_rng(0)
    series = rng.random((networks, rows, 21, 1), dtype=np.float32)
    lstm = workloads(quick=tiny)["stocks"]
    settings = {"x": series[:, :, :-1], "y": series[:, :, -1], "members": networks, "learning_rate": 1e-5}
    work = dataclasses.replace(lstm, epochs=1, **settings)
    for name in (OURS, GRAPH, FUSED, LOOP):
        if budget.allows(f"LSTMs by {name}", 0 if tiny else {OURS: 34}.get(name, 3)):
            for run in methods(work, (name,)).values():
                run(work.steps)
                steps = epochs * work.steps if name == OURS else 10 * work.steps
                seconds = run(steps).wall * epochs * work.steps / steps * (networks if name in ONE_BY_ONE else 1)
                row = {"method": name, "networks": networks, "seconds": seconds, "epochs": epochs, "rows": rows}
                yield [row | {"precision": TF32}]


def agents(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Train CartPole agents by PPO at CleanRL's settings, 500 000 timesteps each."""
    import gymnax

    env, _ = gymnax.make(CARTPOLE)
    config = CLEANRL._replace(total_timesteps=2048) if tiny else CLEANRL
    for members, seconds in ((2, 0),) if tiny else ((64, 20), (2048, 38)):
        if budget.allows(f"{members} agents", seconds):
            swarm, history = tn.rl.train_agents(env, config, members, progress=False)
            returns = tn.rl.evaluate_agents(env, swarm, episodes=2 if tiny else 20).mean(axis=1)
            row = {"networks": members, "timesteps": config.total_timesteps, "seconds": history.steady_seconds}
            row |= {"compile_seconds": history.compile_seconds, "mean_return": returns.mean()}
            yield [row | {"solved": float((returns >= 475).mean())}]


def federated(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Train a CNN in pfl-research's CIFAR-10 sizes: 1 000 clients of 50 rows, 50 a round, batches of 10."""
    clients, sampled, rounds = (6, 2, 2) if tiny else (1000, 50, 100)
    rng = np.random.default_rng(0)
    x = rng.random((50 * clients, 32, 32, 3), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    net = tn.TurbaTrainState.swarm(tn.networks.LeNet(), optax.sgd(0.1), 1, sample_input=x[:1])
    rows = np.arange(len(x)).reshape(clients, 50)
    settings = {"clients": rows, "sampled": sampled, "batch_size": 10, "progress": False}
    if budget.allows(f"{rounds} rounds", 0 if tiny else 9):
        _, history = tn.federated.train(net, x, y, tn.softmax_cross_entropy, rounds=rounds, **settings)
        row = {"clients": clients, "sampled": sampled, "rounds": rounds, "seconds": history.steady_seconds}
        yield [row | {"startup_seconds": history.startup_seconds, "seconds_per_round": history.steady_seconds / rounds}]


SECTIONS = {
    "sweep": (sweep, 150),
    "mnist": (mnist, 60),
    "stocks": (stocks, 44),
    "suite": (suite, 70),
    "kernel": (kernel, 70),
    "agents": (agents, 62),
    "federated": (federated, 14),
    "roofline": (roofline, 10),
}  # {name: (function, its seconds)}
