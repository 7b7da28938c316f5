"""Long measurements of all frameworks' data-parallel training for `make peers`: throughput, accuracy, costs."""

import sys

import joblib

from study.data_parallel.scaling import launch
from study.data_parallel.scaling.job import cifar10_job
from study.figures.labels import FRAMEWORK_NAMES

BATCH, ROWS = 32, 64  # rows in a worker's step of weak scaling, in all workers' step of strong scaling
WORKERS = 2  # that train to an accuracy
STRONG = ("pytorch_ddp", "jax", "swarm")  # also measured in strong scaling
KERAS = "keras"  # its batch normalisation takes statistics over all workers' rows
TWICE = ("jax_processes", "pytorch_alone", "swarm_processes")  # learn the same as another framework in the list


def throughput(frameworks=None, *, workers=(1, 2, 4), batch_size=BATCH, strong=ROWS, steps=23, repeats=2, **kwargs):
    """Time the frameworks that can run here at each number of workers, in turn: a table, by quarters of each run.

    frameworks : names; None takes all
    batch_size : rows in a worker's step for any number of workers (weak scaling)
    strong : rows in a step of all workers, for the frameworks in STRONG (strong scaling); None for none
    kwargs : of `cifar10_job`
    """
    import pandas as pd

    lines = []
    for repeat in range(repeats):
        for name in launch.FRAMEWORKS if frameworks is None else frameworks:
            cases = {(each, batch_size) for each in workers}
            cases |= {(each, strong // each) for each in workers if strong and name in STRONG}
            for count, size in sorted(cases):
                found = _train(name, cifar10_job(batch_size=size, steps=steps, **kwargs), count)
                if found is None:
                    continue
                own = name, count, size, _oversubscribed(count), repeat
                begin = found.startup_seconds, found.loss[0]
                lines.extend((*own, part, rate, *begin) for part, rate in enumerate(found.throughputs()))
                print(
                    f"{name}, {count} workers, {size} rows each: {found.throughput():.0f} images per second", flush=True
                )
    columns = ["framework", "workers", "batch_size", "oversubscribed", "repeat", "part", "images_per_second"]
    return pd.DataFrame(lines, columns=[*columns, "startup_seconds", "first_loss"])


def compared(table, *, batch_size=None, rows=None):
    """Summarise a table of `throughput`: medians with their range, speed-up and efficiency.

    batch_size : selects the lines with so many rows in a worker's step (weak scaling); or
    rows : selects the lines with so many rows in a step of all workers (strong scaling)

    Raises AssertionError where frameworks that train one network differ in their first loss.
    """
    table = table.assign(rows=table.batch_size * table.workers)
    table = table[table.batch_size == batch_size] if rows is None else table[table.rows == rows]
    _agree(table)
    groups = table.groupby(["framework", "workers", "rows", "oversubscribed"], sort=False)
    found = groups.images_per_second.agg(["median", "min", "max"]).reset_index()
    found["startup (s)"] = groups.startup_seconds.median().to_numpy()
    single = found[found.workers == 1].set_index("framework")["median"]
    speed_up = found["median"] / found.framework.map(single)
    found.insert(7, "speed-up", speed_up)
    found.insert(8, "efficiency", speed_up / found.workers)
    found["framework"] = found.framework.map(FRAMEWORK_NAMES)
    names = {"rows": "rows per step", "median": "images per second", "min": "low", "max": "high"}
    columns = [name for name in found if name != "oversubscribed"]
    return found[[*columns, "oversubscribed"]].rename(columns=names)


def _agree(table):
    """Raise AssertionError where frameworks that train one network differ in their first loss."""
    one = table[~table.framework.map(lambda name: launch.FRAMEWORKS[name].networks)]
    for case, own in one.groupby(["workers", "batch_size"]):
        first = own.first_loss.iloc[0]
        tolerance = own.framework.map(lambda name: 0.02 if name == KERAS else 0.001)
        different = own[(own.first_loss / first - 1).abs() > tolerance].framework.unique()
        if len(different):
            problem = f"{', '.join(different)} begins at another loss than {own.framework.iloc[0]}'s {first:.4f}"
            raise AssertionError(f"With {case[0]} workers of {case[1]} rows {problem}.")


def accuracy(
    *, workers=WORKERS, batch_size=BATCH, epochs=2, evaluations=6, counts=(1, 4), batch_sizes=(16, 64, 128), **kwargs
):
    """Measure test accuracy during the training by every framework, and of a swarm's networks: a table.

    counts, batch_sizes : additional trainings by PyTorch's DistributedDataParallel. The learning rate is in proportion
    to the rows in a step.
    """
    import pandas as pd

    cases = [(name, workers, batch_size) for name in launch.FRAMEWORKS if name not in TWICE]
    cases += [("pytorch_ddp", count, batch_size) for count in counts]
    cases += [("pytorch_ddp", workers, size) for size in batch_sizes]
    lines = []
    for name, count, size in cases:
        networks = count if launch.FRAMEWORKS[name].networks else 1
        job = _job_of_epochs(size, count // networks, epochs, evaluations, swarm=networks > 1, **kwargs)
        found = _train(name, job, count)
        if found is None:
            continue
        own = name, count, size, networks, _oversubscribed(count)
        for step, share in zip(found.at, found.accuracy, strict=True):
            lines.append((*own, step, step * size * count // networks, found.seconds[step - 1], share))
        print(f"{name}, {count} x {size}: {found.accuracy[-1]:.3f} after {found.seconds[-1]:.0f} s", flush=True)
    columns = ["framework", "workers", "batch_size", "networks", "oversubscribed", "steps", "rows_seen", "seconds"]
    return pd.DataFrame(lines, columns=[*columns, "accuracy"])


def depths(*, depths=(20, 44), batch_size=BATCH, workers=(1, 2, 4), steps=13):
    """Measure PyTorch's throughput with and without summed gradients by depth of the network: a table."""
    import pandas as pd

    lines = []
    for depth in depths:
        job = cifar10_job(batch_size=batch_size, steps=steps, depth=depth)
        for name in ("pytorch_ddp", "pytorch_alone"):
            for count in workers:
                found = _train(name, job, count)
                if found is None:
                    continue
                lines.append((depth, job.gradient_bytes, name, count, batch_size, found.throughput()))
                print(f"ResNet-{depth}, {name}, {count} workers: {lines[-1][-1]:.0f} images per second", flush=True)
    columns = ["depth", "gradient_bytes", "framework", "workers", "batch_size", "images_per_second"]
    return pd.DataFrame(lines, columns=columns)


def sums(*, sizes=(256, 4096, 65_536, 262_144, 1_048_576), workers=2, repeats=50):
    """Time a sum of float32 over processes by its length: a table."""
    import pandas as pd

    seconds = launch.all_reduce_seconds(sizes, workers=workers, repeats=repeats)
    lines = [(4 * size, workers, *each) for size, own in zip(sizes, seconds, strict=True) for each in enumerate(own)]
    return pd.DataFrame(lines, columns=["bytes", "workers", "repeat", "seconds"])


def _train(name, job, count):
    """Call `launch.train`; on failure print the error and return None."""
    try:
        return launch.train(name, job, workers=count)
    except (FileNotFoundError, RuntimeError) as failure:
        print(f"{name}, {count} workers: {failure}", file=sys.stderr, flush=True)
        return None


def _job_of_epochs(batch_size, workers, epochs, evaluations, *, swarm, learning_rate=0.02, warm_up=100, test_rows=1000):
    """Make a job of so many epochs over a network's rows; a swarm is evaluated only after whole epochs."""
    job = cifar10_job(
        batch_size=batch_size, steps=1, learning_rate=learning_rate * batch_size / 32, test_rows=test_rows
    )
    epoch = -(-len(job.x) // (batch_size * workers))
    job.evaluate_every = epoch if swarm else max(1, epochs * epoch // evaluations)
    job.steps = epochs * epoch // job.evaluate_every * job.evaluate_every
    job.warm_up = warm_up * 32 // batch_size
    return job


def _oversubscribed(count):
    return count > joblib.cpu_count()


PARTS = {"throughput": throughput, "accuracy": accuracy, "depths": depths, "sums": sums}
