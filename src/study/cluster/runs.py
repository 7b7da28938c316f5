"""Runs that measure a cluster's costs, each in its own process: `python -m study.cluster.runs NAME ARGUMENTS`."""

import json
import math
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from study.cluster import idle, suite as cluster_suite
from study.measurement.machine import peak_mib

BATCH_SIZE, WINDOW = 32, 10  # windows in a step, days that an LSTM sees
MARKET = {"days": 260, "test_days": 10, "window": WINDOW, "seed": 0}
series = partial(cluster_suite.series, **MARKET)
networks = partial(cluster_suite.networks, window=WINDOW, learning_rate=0.001, seed=0)


def few_rows(ids):
    """Make eight rows of three numbers for each member, which depend only on its id, and their sums: x and y."""
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    x = rows + np.asarray(ids, np.float32)[:, None, None] % 7
    return {"x": x, "y": x.sum(-1, keepdims=True), "per_member": True}


def tiny(ids):
    """Make untrained networks with four hidden units."""
    import optax

    import turbanet as tn

    return tn.TurbaTrainState.swarm(tn.MLP((4, 1)), optax.adam(0.01), ids, input_size=3, seed=0)


def driver(*, members, shard):
    """Measure the line of `costs.memory` for one number of members."""
    import turbanet as tn

    before = peak_mib()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kwargs = {"shard": shard, "epochs": 1, "batch_size": 8, "plan": tn.Plan(1, block=64), "progress": False}
        _, history = tn.cluster.fit(tiny, few_rows, tn.mse, members=members, checkpoints=f"{folder}/run", **kwargs)
        seconds = time.perf_counter() - begin
        assert history.table.members.sum() == members
    line = {"members": members, "shard": int(history.table.members[0]), "shards": len(history.table)}
    return line | {"seconds": seconds, "before_mib": before, "driver_mib": peak_mib()}


def one_process(*, folder, members, hidden, epochs, block):
    """Measure the line of `costs.overhead` for one process with two devices; write its weights into the folder."""
    import jax
    import psutil

    import turbanet as tn

    tn.use_cores(2, cache=True)
    jax.devices()
    startup = time.time() - psutil.Process().create_time()
    begin = time.perf_counter()
    kwargs = {"epochs": epochs, "batch_size": BATCH_SIZE, "plan": tn.Plan(2, block=block)}
    make = partial(networks, hidden=hidden)
    swarm, history, _ = cluster_suite.one_process(make, series, np.arange(members), **kwargs)
    seconds = time.perf_counter() - begin
    _keep_weights(swarm, folder)
    parts = {"compile_seconds": history.compile_seconds, "training_seconds": history.steady_seconds}
    beside = seconds - sum(parts.values())
    line = {"shards": 1, "startup_seconds": startup, "seconds": seconds}
    return line | parts | {"beside_seconds": beside, "idle_seconds": 0.0}


def two_workers(*, folder, members, hidden, epochs, block, shard):
    """Measure the line of `costs.overhead` for two workers with a core each; write their weights into the folder."""
    import psutil

    import turbanet as tn
    from turbanet.cluster.driver import environment

    make = partial(networks, hidden=hidden)
    kwargs = {
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "plan": tn.Plan(1, block=block),
        "shard": shard,
        "progress": False,
    }
    with idle.started_ray(2, cores=2) as (ray, _):
        modules = ("turbanet.cluster.shards", "turbanet.training.fit", "optax", "orbax.checkpoint", __spec__.name)
        idle.wait_for_workers(ray, 2, modules=modules, num_cpus=1, runtime_env=environment(1, 0))
        startup = time.time() - psutil.Process().create_time()
        begin = time.perf_counter()
        directory = f"{folder}/run"
        results, history = tn.cluster.fit(make, series, tn.mse, members=members, checkpoints=directory, **kwargs)
        seconds = time.perf_counter() - begin
        _keep_weights(results.swarm(), folder)
    table = history.table
    parts = {"compile_seconds": table.compile_seconds.sum() / 2, "training_seconds": table.steady_seconds.sum() / 2}
    beside = table.seconds.sum() / 2 - sum(parts.values())
    line = {"shards": len(table), "startup_seconds": startup, "seconds": seconds}
    return line | parts | {"beside_seconds": beside, "idle_seconds": seconds - table.seconds.sum() / 2}


def _keep_weights(swarm, folder):
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(swarm.params)
    np.savez(f"{folder}/weights.npz", **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


def unit_costs(*, members, shards, hidden, epochs, block):
    """Measure the lines of `costs.unit_costs` without the task's."""
    import turbanet as tn
    from turbanet.cluster.driver import environment

    make = partial(networks, hidden=hidden)
    kwargs = {"epochs": epochs, "batch_size": BATCH_SIZE, "plan": tn.Plan(1, block=block), "progress": False}
    one, data = make(np.arange(1)), series(np.arange(1))
    steps = epochs * math.ceil(data["x"].shape[1] / BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder, idle.started_ray(1, cores=1) as (ray, _):
        idle.wait_for_workers(ray, 1, num_cpus=1, runtime_env=environment(1, 0))
        run = {"members": shards * members, "shard": members, "checkpoints": f"{folder}/run"}
        results, history = tn.cluster.fit(make, series, tn.mse, **run, **kwargs)
        beside = (history.table.seconds - history.table.steady_seconds).to_numpy()
        training = history.table.steady_seconds.median()
        begin = time.perf_counter()
        results.scores()
        scored = time.perf_counter()
        swarm = results.swarm()
        gathered = time.perf_counter()
        results_bytes = _disk_bytes(results.folder / "shards")
        part = swarm[list(range(members))]
        of_part = series(np.asarray(part.id))
        checkpoints = tn.Checkpoints(f"{folder}/training", keep=1)
        short = kwargs | {"epochs": 1, "checkpoints": checkpoints}
        tn.fit(part, of_part["x"], of_part["y"], tn.mse, per_member=True, **short)
        written = _disk_bytes(Path(folder) / "training")
    return [
        ("member_step_seconds", training / (members * steps), "core seconds per member and step"),
        ("shard_seconds", np.median(beside[1:]), "seconds per shard, beside its training"),
        (
            "first_seconds",
            beside[0] - np.median(beside[1:]),
            "seconds per worker, once: its first shard beyond another",
        ),
        ("state_bytes", _bytes(one), "bytes per member: weights and optimizer"),
        ("data_bytes", _bytes(data), "bytes per member"),
        ("checkpoint_bytes", written / members, "bytes per member and checkpoint, on disk"),
        ("kept_bytes", results_bytes / len(swarm), "bytes per member, on disk: what a shard leaves"),
        ("scores_seconds", (scored - begin) / len(swarm), "seconds of the driver a member"),
        ("swarm_seconds", (gathered - scored) / len(swarm), "seconds of the driver a member"),
    ]


def _bytes(tree):
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes"))


def _disk_bytes(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


RUNS = {
    "sleeping": idle.sleeping,
    "driver": driver,
    "one_process": one_process,
    "two_workers": two_workers,
    "unit_costs": unit_costs,
}

if __name__ == "__main__":
    from study.cluster import runs  # workers can import functions of this module, not those of __main__

    print(json.dumps(runs.RUNS[sys.argv[1]](**json.loads(sys.argv[2])), default=float))
