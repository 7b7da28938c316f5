"""What a swarm over machines costs beside its training: tasks, memory of the driver, shards, checkpoints, gathering."""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np

ONE, TWO = "one process", "two workers"  # the ways to use two cores


def sleeping(*, workers=(8, 16, 32, 64), shards=2000, sleep_seconds=2.0, instant=5000):
    """Shards that only sleep, and tasks that end at once, on some workers that have started: a table.

    The most workers have all the shards, fewer have fewer, so that each takes as long. `startup_seconds` end when every
    worker has answered; `ideal_seconds` are those of workers that never wait, of which `rounds_seconds` are whole ones.

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
    """The most memory that a driver takes for so many members of a tiny network, each in a process of its own: a table.

    Columns: members, shard, shards, seconds, before_mib (MiB of the driver before the call), driver_mib (its peak).
    What Ray's own processes and the workers take is not in them.
    """
    import pandas as pd

    lines = []
    for count in members:
        lines.append(_apart("driver", members=count, shard=shard))
        print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def overhead(*, members=2000, hidden=8, epochs=300, block=50, shard=250, repeats=3, within=1e-3):
    """LSTMs by one process with two devices and by two workers with one, in turn: a table, a line a run.

    Each has an empty cache of programs and a process of its own, whose start is in `startup_seconds` alone.
    Workers keep checkpoints as `turbanet.cluster.fit` does without being told, the one process keeps none.
    AssertionError where more than a hundredth of the members differ by more than `within` of their weights. With two
    devices JAX compiles another program than with one, and in thousands of steps some members make much of a rounding.

    Columns: repeat, way, members, shards, startup_seconds, seconds; what the seconds of a worker are: compile_seconds,
    training_seconds, beside_seconds (checkpoints, data, what it keeps), idle_seconds (before its first shard, between
    two and after its last); overhead_percent, of its repeat's one process; median_difference and largest_difference, of
    the members' weights
    """
    import pandas as pd

    lines = []
    size = {"members": members, "hidden": hidden, "epochs": epochs, "block": block}
    for repeat in range(repeats):
        ways = [(ONE, "one_process", {}), (TWO, "two_workers", {"shard": shard})]
        found, kept = {}, {}
        for way, run, more in ways if repeat % 2 == 0 else ways[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                found[way] = _apart(run, folder=folder, **size, **more)
                kept[way] = dict(np.load(f"{folder}/weights.npz"))
        differences = _differences(kept[ONE], kept[TWO])
        apart = f"{(differences > within).mean():.1%} of the members differ by more than {within:g} of their weights"
        assert (differences > within).mean() <= 0.01, f"{apart}, the worst by {differences.max():.2g}."
        shown = {"median_difference": np.median(differences), "largest_difference": differences.max()}
        for way, line in found.items():
            more = 100 * (line["seconds"] / found[ONE]["seconds"] - 1)
            lines.append({"repeat": repeat, "way": way, "members": members, **line, "overhead_percent": more, **shown})
            print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def unit_costs(*, members=512, shards=4, hidden=8, epochs=20, block=32):
    """What one of each costs on one worker with one core, LSTMs on simulated series: a table of cost, value, unit.

    The costs are the fields of `projection.Costs`. The first shard, of at least two, pays for imports and compilation.
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
    """What a function of `cluster_runs` returns in a process of its own; RuntimeError with its last words."""
    with tempfile.TemporaryDirectory() as cache:  # of compiled programs, so that each compiles as the others do
        environment = os.environ | {"TURBANET_CACHE": cache}
        command = [sys.executable, "-m", "study.cluster.runs", name, json.dumps(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{name} with {arguments} ended with {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _differences(ours, theirs):
    """|ours - theirs| / |theirs| of each member, [member]: both {name: [member, ...]}."""
    assert ours.keys() == theirs.keys(), f"{sorted(ours)} is not {sorted(theirs)}"
    squares = {
        name: [(part**2).reshape(len(part), -1).sum(1) for part in (ours[name] - theirs[name], theirs[name])]
        for name in ours
    }
    apart, size = np.sum(list(squares.values()), axis=0)  # [member]
    return np.sqrt(apart / size)
