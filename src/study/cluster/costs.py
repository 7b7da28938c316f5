"""Costs of a swarm over machines beside its training: tasks, driver memory, shards, checkpoints, gathering."""

import json
import os
import sys
import tempfile

import numpy as np

from study.pipeline import programs

ONE, TWO = "one process", "two workers"  # two methods to use two cores


def sleeping(*, workers=(8, 16, 32, 64), shards=2000, sleep_seconds=2.0, instant=5000):
    """Time shards that only sleep, and tasks that end at once, on workers that have started: a table.

    Shards are in proportion to workers, so that each line takes as long. `startup_seconds` end when every worker has
    answered; `ideal_seconds` assume that workers never wait, `rounds_seconds` that they work in whole rounds.

    Columns: kind, workers, shards, sleep_seconds, startup_seconds, seconds, ideal_seconds, rounds_seconds,
    tasks_per_second, task_seconds (seconds / shards)
    """
    import pandas as pd

    lines = []
    for count in workers:
        part = round(shards * count / max(workers))
        lines += _apart("sleeping", workers=count, shards=part, sleep_seconds=sleep_seconds, instant=instant)
        print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def memory(*, members=(1000, 10_000, 100_000), shard=None):
    """Measure a driver's peak memory for numbers of members of a tiny network, each in a new process: a table.

    Columns: members, shard, shards, seconds, before_mib (MiB of the driver before the call), driver_mib (its peak).
    Memory of Ray's own processes and of the workers is not included.
    """
    import pandas as pd

    lines = []
    for count in members:
        lines.append(_apart("driver", members=count, shard=shard))
        print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def overhead(*, members=2000, hidden=8, epochs=300, block=50, shard=250, repeats=3, within=1e-3):
    """Time LSTMs by one process with two devices and by two workers with one each, in turn: a table, a line a run.

    Each run has a new process, whose start counts only in `startup_seconds`, and an empty compilation cache. Workers
    keep checkpoints, as is `turbanet.cluster.fit`'s default, the one process keeps none. Raises AssertionError where
    more than a hundredth of the members differ by more than `within` of their weights. Members may differ: with two
    devices JAX compiles another program than with one, and thousands of steps amplify roundings in some of them.

    Columns: repeat, method, members, shards, startup_seconds, seconds; of a worker's seconds, compile_seconds,
    training_seconds, beside_seconds (checkpoints, data, results), idle_seconds (before, between and after its shards);
    overhead_percent over the one process of the same repeat; median_difference and largest_difference of the members'
    weights
    """
    import pandas as pd

    lines = []
    size = {"members": members, "hidden": hidden, "epochs": epochs, "block": block}
    for repeat in range(repeats):
        methods = [(ONE, "one_process", {}), (TWO, "two_workers", {"shard": shard})]
        found, weights = {}, {}
        for method, run, more in methods if repeat % 2 == 0 else methods[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                found[method] = _apart(run, folder=folder, **size, **more)
                weights[method] = dict(np.load(f"{folder}/weights.npz"))
        differences = _differences(weights[ONE], weights[TWO])
        problem = f"{(differences > within).mean():.1%} of the members differ by more than {within:g} of their weights"
        assert (differences > within).mean() <= 0.01, f"{problem}, the worst by {differences.max():.2g}."
        shown = {"median_difference": np.median(differences), "largest_difference": differences.max()}
        for method, line in found.items():
            line |= {"overhead_percent": 100 * (line["seconds"] / found[ONE]["seconds"] - 1)} | shown
            lines.append({"repeat": repeat, "method": method, "members": members} | line)
            print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def unit_costs(*, members=512, shards=4, hidden=8, epochs=20, block=32):
    """Measure unit costs of LSTMs on simulated series on one worker with one core: a table of cost, value, unit.

    The costs are the fields of `projection.Costs`. Of at least two shards the first includes imports and compilation.
    """
    import pandas as pd

    found = _apart("unit_costs", members=members, shards=shards, hidden=hidden, epochs=epochs, block=block)
    task = _apart("sleeping", workers=2, shards=2, sleep_seconds=0.0, instant=2000)[-1]["task_seconds"]
    found.append(("task_seconds", task, "seconds of the driver a shard"))
    return pd.DataFrame(found, columns=["cost", "value", "unit"])


PARTS = {
    "cluster_sleep": sleeping,
    "cluster_memory": memory,
    "cluster_overhead": overhead,
    "cluster_costs": unit_costs,
}


def _apart(name, **arguments):
    """Call a function of `runs` in a new process and return its result; RuntimeError with its last line of errors."""
    with tempfile.TemporaryDirectory() as cache:  # empty, so that each call compiles
        environment = os.environ | {"TURBANET_CACHE": cache}
        command = [sys.executable, "-m", "study.cluster.runs", name, json.dumps(arguments)]
        printed = programs.output(command, f"{name} with {arguments}", env=environment)
    return json.loads(printed.splitlines()[-1])


def _differences(one, other):
    """Compute |one - other| / |other| of each member, [member], for weights {name: [member, ...]}."""
    assert one.keys() == other.keys(), f"{sorted(one)} is not {sorted(other)}"
    squares = [
        [(part**2).reshape(len(part), -1).sum(1) for part in (one[name] - other[name], other[name])] for name in one
    ]
    difference, size = np.sum(squares, axis=0)  # [member]
    return np.sqrt(difference / size)
