"""What a swarm over machines costs beside its training: tasks, memory of the driver, shards, checkpoints, gathering."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

SLEEP, INSTANT = "sleep", "instant"  # the kinds of tasks that do nothing
ONE, TWO = "one process", "two workers"  # the ways to use two cores
DAYS, WINDOW = 250, 10  # of a simulated series, and of what an LSTM sees of it


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
        lines += _apart("_sleeping", workers=count, shards=part, sleep_seconds=sleep_seconds, instant=instant)
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
        lines.append(_apart("_driver", members=count, shard=shard))
        print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def overhead(*, members=2000, hidden=8, epochs=300, block=50, shard=250, repeats=3, within=1e-3):
    """LSTMs by one process with two devices and by two workers with one, in turn: a table, a line a run.

    Each has an empty cache of programs and a process of its own, whose start is in `startup_seconds` alone.
    Workers keep checkpoints as `fit_on_cluster` does without being told, the one process keeps none.
    AssertionError where the two ways differ by more than `within` of the weights of any member. With two devices JAX
    compiles another program than with one, so that roundings differ.

    Columns: repeat, way, members, shards, startup_seconds, seconds; what the seconds of a worker are: compile_seconds,
    training_seconds, beside_seconds (checkpoints, data, what it keeps), idle_seconds (before its first shard, between
    two and after its last); overhead_percent, of its repeat's one process; difference, the largest of a member
    """
    import pandas as pd

    lines = []
    size = {"members": members, "hidden": hidden, "epochs": epochs, "block": block}
    for repeat in range(repeats):
        ways = [(ONE, "_one_process", {}), (TWO, "_two_workers", {"shard": shard})]
        found, kept = {}, {}
        for way, run, more in ways if repeat % 2 == 0 else ways[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                found[way] = _apart(run, folder=folder, **size, **more)
                kept[way] = dict(np.load(f"{folder}/weights.npz"))
        difference = _difference(kept[ONE], kept[TWO])
        assert difference <= within, f"The two ways differ by {difference:.2g} of the weights of a member."
        for way, line in found.items():
            more = 100 * (line["seconds"] / found[ONE]["seconds"] - 1)
            lines.append({"repeat": repeat, "way": way, "members": members, **line, "overhead_percent": more})
            lines[-1]["difference"] = difference
            print(lines[-1], flush=True)
    return pd.DataFrame(lines)


def unit_costs(*, members=512, shards=4, hidden=8, epochs=20, block=32):
    """What one of each costs on one worker with one core, LSTMs on simulated series: a table of cost, value, unit.

    The costs are the fields of `projection.Costs`. The first shard, of at least two, pays for imports and compilation.
    """
    import pandas as pd

    found = _apart("_unit_costs", members=members, shards=shards, hidden=hidden, epochs=epochs, block=block)
    return pd.DataFrame(found, columns=["cost", "value", "unit"])


PARTS = {
    "cluster_sleep": sleeping,
    "cluster_memory": memory,
    "cluster_overhead": overhead,
    "cluster_costs": unit_costs,
}


def series(ids):
    """Simulated series {x [member, row, window, 1], y [member, row, 1], per_member}: noisy waves of their ids alone."""
    noise = np.stack([np.random.default_rng(int(id)).normal(size=DAYS + 1) for id in ids])
    waves = np.sin(np.arange(DAYS) / (3 + abs(noise[:, :1]))) + 0.1 * noise[:, 1:]  # [member, day]
    windows = np.lib.stride_tricks.sliding_window_view(waves.astype(np.float32), WINDOW + 1, axis=1)
    return {"x": windows[..., :-1, None].copy(), "y": windows[..., -1:].copy(), "per_member": True}


def forecasters(ids, *, hidden):
    """The LSTMs of these ids, before their training."""
    import optax

    import turbanet as tn

    sample = np.zeros((1, WINDOW, 1), np.float32)
    return tn.TurbaTrainState.swarm(tn.LSTM(hidden), optax.adam(0.001), ids, sample_input=sample, seed=0)


def few_rows(ids):
    """Eight rows of three numbers for each member, of its id alone, and their sums: (x, y) of its own."""
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    x = rows + np.asarray(ids, np.float32)[:, None, None] % 7
    return {"x": x, "y": x.sum(-1, keepdims=True), "per_member": True}


def tiny(ids):
    """Networks with four hidden units, before their training."""
    import optax

    import turbanet as tn

    return tn.TurbaTrainState.swarm(tn.MLP((4, 1)), optax.adam(0.01), ids, input_size=3, seed=0)


def _apart(name, **arguments):
    """What a function of this module returns in a process of its own; RuntimeError with its last words if it fails."""
    with tempfile.TemporaryDirectory() as cache:  # of compiled programs, so that each compiles as the others do
        environment = os.environ | {"TURBANET_CACHE": cache}
        command = [sys.executable, "-m", __name__, name, json.dumps(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{name} with {arguments} ended with {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _begun(workers, *, cores=None):
    """Inside, (Ray of this machine's cores that keeps so many workers, seconds that it took to begin)."""
    import ray

    begin = time.perf_counter()
    keep = {"num_workers_soft_limit": workers}  # without it Ray ends all but one a core when they have nothing to do
    ray.init("local", num_cpus=cores, log_to_driver=False, include_dashboard=False, _system_config=keep)
    try:
        yield ray, time.perf_counter() - begin
    finally:
        ray.shutdown()


def _all_answer(ray, workers, *, modules=(), **needs):
    """Wait until so many workers, each a process of its own that has imported these, have answered: seconds."""
    from turbanet.cluster import engine

    def meet(folder, number):  # by value, so that a worker imports nothing that is not asked for
        import importlib
        import time
        from pathlib import Path

        for module in modules:
            importlib.import_module(module)
        (Path(folder) / str(number)).touch()
        while len(list(Path(folder).iterdir())) < workers:
            time.sleep(0.1)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = ((number, (folder, number)) for number in range(workers))
        for _, came in engine.run(ray, meet, jobs, at_once=lambda unfit: workers, **needs):
            if came is not None:
                raise came
    return time.perf_counter() - begin


def _sleeping(*, workers, shards, sleep_seconds, instant):
    """The lines of `sleeping` for one number of workers."""
    from turbanet.cluster import engine

    def nap(seconds):
        import time

        time.sleep(seconds)

    lines = []
    with _begun(workers) as (ray, startup):
        cpus = math.floor(10_000 * ray.cluster_resources()["CPU"] / workers) / 10_000  # Ray counts ten-thousandths
        startup += _all_answer(ray, workers, num_cpus=cpus)
        for kind, count, each in ((SLEEP, shards, sleep_seconds), (INSTANT, instant, 0.0)):
            begin = time.perf_counter()
            jobs = ((number, (each,)) for number in range(count))
            room = partial(engine.slots, ray, num_cpus=cpus)
            came = [result for _, result in engine.run(ray, nap, jobs, at_once=room, num_cpus=cpus)]
            seconds = time.perf_counter() - begin
            assert came == [None] * count, next(result for result in came if result is not None)
            line = {"kind": kind, "workers": workers, "shards": count, "sleep_seconds": each}
            line |= {"startup_seconds": startup, "seconds": seconds, "ideal_seconds": count * each / workers}
            line |= {"rounds_seconds": math.ceil(count / workers) * each}
            lines.append(line | {"tasks_per_second": count / seconds, "task_seconds": seconds / count})
    return lines


def _driver(*, members, shard):
    """The line of `memory` for one number of members."""
    import turbanet as tn

    before = _peak_mib()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        how = {"shard": shard, "epochs": 1, "batch_size": 8, "plan": tn.Plan(1, block=64), "progress": False}
        _, history = tn.fit_on_cluster(tiny, few_rows, tn.mse, members=members, checkpoints=f"{folder}/run", **how)
        seconds = time.perf_counter() - begin
        assert history.table.members.sum() == members
    line = {"members": members, "shard": int(history.table.members[0]), "shards": len(history.table)}
    return line | {"seconds": seconds, "before_mib": before, "driver_mib": _peak_mib()}


def _peak_mib():
    """The most memory that this process had at once, in MiB.

    As Linux has it for this program alone: getrusage counts what the process was a copy of before it began, too.
    """
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def _one_process(*, folder, members, hidden, epochs, block):
    """The line of `overhead` of one process with two devices; its weights lie in the folder."""
    import jax
    import psutil

    import turbanet as tn

    tn.use_cores(2, cache=True)
    jax.devices()
    startup = time.time() - psutil.Process().create_time()
    begin = time.perf_counter()
    ids = np.arange(members)
    data = series(ids)
    how = {"epochs": epochs, "batch_size": 32, "plan": tn.Plan(2, block=block), "progress": False}
    swarm, history = tn.fit(forecasters(ids, hidden=hidden), data["x"], data["y"], tn.mse, per_member=True, **how)
    seconds = time.perf_counter() - begin
    _keep_weights(swarm, folder)
    parts = {"compile_seconds": history.compile_seconds, "training_seconds": history.steady_seconds}
    beside = seconds - sum(parts.values())
    line = {"shards": 1, "startup_seconds": startup, "seconds": seconds}
    return line | parts | {"beside_seconds": beside, "idle_seconds": 0.0}


def _two_workers(*, folder, members, hidden, epochs, block, shard):
    """The line of `overhead` of two workers with a core each; their weights lie in the folder."""
    import psutil

    import turbanet as tn
    from turbanet.cluster.fit import environment

    make = partial(forecasters, hidden=hidden)
    how = {"epochs": epochs, "batch_size": 32, "plan": tn.Plan(1, block=block), "shard": shard, "progress": False}
    with _begun(2, cores=2) as (ray, _):
        modules = ("turbanet.cluster.shards", "turbanet.training.fit", "optax", "orbax.checkpoint", __spec__.name)
        _all_answer(ray, 2, modules=modules, num_cpus=1, runtime_env=environment(1, 0))
        startup = time.time() - psutil.Process().create_time()
        begin = time.perf_counter()
        to = f"{folder}/run"
        results, history = tn.fit_on_cluster(make, series, tn.mse, members=members, checkpoints=to, **how)
        seconds = time.perf_counter() - begin
        _keep_weights(results.swarm(), folder)
    table = history.table
    parts = {"compile_seconds": table.compile_seconds.sum() / 2, "training_seconds": table.steady_seconds.sum() / 2}
    beside = table.seconds.sum() / 2 - sum(parts.values())
    line = {"shards": len(table), "startup_seconds": startup, "seconds": seconds}
    return line | parts | {"beside_seconds": beside, "idle_seconds": seconds - table.seconds.sum() / 2}


def _difference(ours, theirs):
    """The largest |ours - theirs| / |theirs| of a member: both {name: [member, ...]}."""
    assert ours.keys() == theirs.keys(), f"{sorted(ours)} is not {sorted(theirs)}"
    squares = {
        name: [(part**2).reshape(len(part), -1).sum(1) for part in (ours[name] - theirs[name], theirs[name])]
        for name in ours
    }
    apart, size = np.sum(list(squares.values()), axis=0)  # [member]
    return float(np.sqrt(apart / size).max())


def _keep_weights(swarm, folder):
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(swarm.params)
    np.savez(f"{folder}/weights.npz", **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


def _unit_costs(*, members, shards, hidden, epochs, block):
    """The lines of `unit_costs`."""
    import turbanet as tn
    from turbanet.cluster.fit import environment

    make = partial(forecasters, hidden=hidden)
    how = {"epochs": epochs, "batch_size": 32, "plan": tn.Plan(1, block=block), "progress": False}
    one, all_of_it = make(np.arange(1)), series(np.arange(1))
    steps = epochs * math.ceil((DAYS - WINDOW) / 32)
    with tempfile.TemporaryDirectory() as folder, _begun(1, cores=1) as (ray, _):
        _all_answer(ray, 1, num_cpus=1, runtime_env=environment(1, 0))
        to = {"members": shards * members, "shard": members, "checkpoints": f"{folder}/run"}
        results, history = tn.fit_on_cluster(make, series, tn.mse, **to, **how)
        beside = (history.table.seconds - history.table.steady_seconds).to_numpy()
        training = history.table.steady_seconds.median()
        begin = time.perf_counter()
        results.scores()
        scored = time.perf_counter()
        swarm = results.swarm()
        gathered = time.perf_counter()
        kept = _disk_bytes(results.folder / "shards")
        part = swarm[list(range(members))]
        data = series(np.asarray(part.id))
        to = tn.Checkpoints(f"{folder}/training", keep=1)
        tn.fit(part, data["x"], data["y"], tn.mse, per_member=True, checkpoints=to, **how | {"epochs": 1})
        written = _disk_bytes(Path(folder) / "training")
    instant = _apart("_sleeping", workers=2, shards=2, sleep_seconds=0.0, instant=2000)[-1]
    return [
        ("member_step_seconds", training / (members * steps), "core seconds a member and step"),
        ("shard_seconds", np.median(beside[1:]), "seconds a shard, beside its training"),
        ("first_seconds", beside[0] - np.median(beside[1:]), "seconds a worker, once: its first shard beyond another"),
        ("task_seconds", instant["task_seconds"], "seconds of the driver a shard"),
        ("state_bytes", _bytes(one), "bytes a member: weights and optimizer"),
        ("data_bytes", _bytes(all_of_it), "bytes a member"),
        ("checkpoint_bytes", written / members, "bytes a member and checkpoint, on disk"),
        ("kept_bytes", kept / len(swarm), "bytes a member, on disk: what a shard leaves"),
        ("scores_seconds", (scored - begin) / len(swarm), "seconds of the driver a member"),
        ("swarm_seconds", (gathered - scored) / len(swarm), "seconds of the driver a member"),
    ]


def _bytes(tree):
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes"))


def _disk_bytes(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


if __name__ == "__main__":
    from turbanet.lab import cluster_costs  # whose functions the workers import, as they cannot those of a main program

    print(json.dumps(getattr(cluster_costs, sys.argv[1])(**json.loads(sys.argv[2])), default=float))
