"""Ray on this machine: its start, the start of its workers, and shards that only sleep."""

import contextlib
import math
import tempfile
import time
from functools import partial
from pathlib import Path

SLEEP, INSTANT = "sleep", "instant"  # kinds of tasks that do nothing


@contextlib.contextmanager
def started_ray(workers, *, cores=None):
    """Start Ray on this machine for the block, with so many workers: yields (ray, seconds of the start)."""
    import ray

    from turbanet.cluster.engine import started

    begin = time.perf_counter()
    keep = {"num_workers_soft_limit": workers}  # else Ray ends all idle workers but one a core
    kwargs = {"num_cpus": cores, "log_to_driver": False, "include_dashboard": False, "_system_config": keep}
    started(ray.init, "local", **kwargs)
    try:
        yield ray, time.perf_counter() - begin
    finally:
        ray.shutdown()


def wait_for_workers(ray, workers, *, modules=(), **needs):
    """Wait until all workers have started and imported the modules: seconds."""
    from turbanet.cluster import engine

    def meet(folder, number):  # pickled by value, so that a worker imports only `modules`
        import importlib
        import time

        for module in modules:
            importlib.import_module(module)
        (Path(folder) / str(number)).touch()
        while len(list(Path(folder).iterdir())) < workers:
            time.sleep(0.1)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        jobs = ((number, (folder, number)) for number in range(workers))
        for _, error in engine.run(ray, meet, jobs, at_once=lambda unfit: workers, **needs):
            if error is not None:
                raise error
    return time.perf_counter() - begin


def sleeping(*, workers, shards, sleep_seconds, instant):
    """Measure the lines of `costs.sleeping` for one number of workers."""
    from turbanet.cluster import engine

    def nap(seconds):
        import time

        time.sleep(seconds)

    lines = []
    with started_ray(workers) as (ray, startup):
        cpus = math.floor(10_000 * ray.cluster_resources()["CPU"] / workers) / 10_000  # Ray counts ten-thousandths
        startup += wait_for_workers(ray, workers, num_cpus=cpus)
        for kind, count, each in ((SLEEP, shards, sleep_seconds), (INSTANT, instant, 0.0)):
            begin = time.perf_counter()
            jobs = ((number, (each,)) for number in range(count))
            room = partial(engine.slots, ray, num_cpus=cpus)
            results = [result for _, result in engine.run(ray, nap, jobs, at_once=room, num_cpus=cpus)]
            seconds = time.perf_counter() - begin
            assert results == [None] * count, next(result for result in results if result is not None)
            line = {"kind": kind, "workers": workers, "shards": count, "sleep_seconds": each}
            line |= {"startup_seconds": startup, "seconds": seconds, "ideal_seconds": count * each / workers}
            line |= {"rounds_seconds": math.ceil(count / workers) * each}
            lines.append(line | {"tasks_per_second": count / seconds, "task_seconds": seconds / count})
    return lines
