"""One run of what a cluster costs, in a process of its own: `python -m study.cluster.runs NAME ARGUMENTS`."""

import contextlib
import json
import math
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from study.cluster import suite as cluster_suite

SLEEP, INSTANT = "sleep", "instant"  # the kinds of tasks that do nothing
BATCH_SIZE, WINDOW = 32, 10  # windows in a step, days that an LSTM sees
MARKET = {"days": 260, "test_days": 10, "window": WINDOW, "seed": 0}
series = partial(cluster_suite.series, **MARKET)
networks = partial(cluster_suite.networks, window=WINDOW, learning_rate=0.001, seed=0)


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


@contextlib.contextmanager
def _begun(workers, *, cores=None):
    """Inside, (Ray of this machine's cores that keeps so many workers, seconds that it took to begin)."""
    import ray

    from turbanet.cluster.engine import started

    begin = time.perf_counter()
    keep = {"num_workers_soft_limit": workers}  # without it Ray ends all but one a core when they have nothing to do
    how = {"num_cpus": cores, "log_to_driver": False, "include_dashboard": False, "_system_config": keep}
    started(ray.init, "local", **how)
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


def sleeping(*, workers, shards, sleep_seconds, instant):
    """The lines of `cluster_costs.sleeping` for one number of workers."""
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


def driver(*, members, shard):
    """The line of `cluster_costs.memory` for one number of members."""
    import turbanet as tn

    before = _peak_mib()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        how = {"shard": shard, "epochs": 1, "batch_size": 8, "plan": tn.Plan(1, block=64), "progress": False}
        _, history = tn.cluster.fit(tiny, few_rows, tn.mse, members=members, checkpoints=f"{folder}/run", **how)
        seconds = time.perf_counter() - begin
        assert history.table.members.sum() == members
    line = {"members": members, "shard": int(history.table.members[0]), "shards": len(history.table)}
    return line | {"seconds": seconds, "before_mib": before, "driver_mib": _peak_mib()}


def _peak_mib():
    """The most memory that this process had at once, in MiB.

    As Linux has it for this program alone: getrusage counts what the process was a copy of before it began, too.
    """
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def one_process(*, folder, members, hidden, epochs, block):
    """The line of `cluster_costs.overhead` of one process with two devices; its weights lie in the folder."""
    import jax
    import psutil

    import turbanet as tn

    tn.use_cores(2, cache=True)
    jax.devices()
    startup = time.time() - psutil.Process().create_time()
    begin = time.perf_counter()
    how = {"epochs": epochs, "batch_size": BATCH_SIZE, "plan": tn.Plan(2, block=block)}
    make = partial(networks, hidden=hidden)
    swarm, history, _ = cluster_suite.one_process(make, series, np.arange(members), **how)
    seconds = time.perf_counter() - begin
    _keep_weights(swarm, folder)
    parts = {"compile_seconds": history.compile_seconds, "training_seconds": history.steady_seconds}
    beside = seconds - sum(parts.values())
    line = {"shards": 1, "startup_seconds": startup, "seconds": seconds}
    return line | parts | {"beside_seconds": beside, "idle_seconds": 0.0}


def two_workers(*, folder, members, hidden, epochs, block, shard):
    """The line of `cluster_costs.overhead` of two workers with a core each; their weights lie in the folder."""
    import psutil

    import turbanet as tn
    from turbanet.cluster.driver import environment

    make = partial(networks, hidden=hidden)
    how = {
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "plan": tn.Plan(1, block=block),
        "shard": shard,
        "progress": False,
    }
    with _begun(2, cores=2) as (ray, _):
        modules = ("turbanet.cluster.shards", "turbanet.training.fit", "optax", "orbax.checkpoint", __spec__.name)
        _all_answer(ray, 2, modules=modules, num_cpus=1, runtime_env=environment(1, 0))
        startup = time.time() - psutil.Process().create_time()
        begin = time.perf_counter()
        to = f"{folder}/run"
        results, history = tn.cluster.fit(make, series, tn.mse, members=members, checkpoints=to, **how)
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
    """The lines of `cluster_costs.unit_costs`, but for a task's."""
    import turbanet as tn
    from turbanet.cluster.driver import environment

    make = partial(networks, hidden=hidden)
    how = {"epochs": epochs, "batch_size": BATCH_SIZE, "plan": tn.Plan(1, block=block), "progress": False}
    one, all_of_it = make(np.arange(1)), series(np.arange(1))
    steps = epochs * math.ceil(all_of_it["x"].shape[1] / BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder, _begun(1, cores=1) as (ray, _):
        _all_answer(ray, 1, num_cpus=1, runtime_env=environment(1, 0))
        to = {"members": shards * members, "shard": members, "checkpoints": f"{folder}/run"}
        results, history = tn.cluster.fit(make, series, tn.mse, **to, **how)
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
    return [
        ("member_step_seconds", training / (members * steps), "core seconds a member and step"),
        ("shard_seconds", np.median(beside[1:]), "seconds a shard, beside its training"),
        ("first_seconds", beside[0] - np.median(beside[1:]), "seconds a worker, once: its first shard beyond another"),
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
    from study.cluster import runs  # whose functions the workers import, as they cannot those of a main program

    print(json.dumps(getattr(runs, sys.argv[1])(**json.loads(sys.argv[2])), default=float))
