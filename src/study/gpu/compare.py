"""Timing of methods beside each other on one device, within a budget of seconds."""

import time
from typing import Any

import numpy as np

from study.baselines.workloads import Workload
from study.gpu.methods import CHECKED, ONE_BY_ONE, methods
from study.gpu.torch_steps import TF32, multiplying_in
from study.measurement.compilation import compile_seconds

REPEATS = 5
TURN = 0.15  # seconds of a timed run, approximately
FLOAT32 = "float32"
TOLERANCE = {TF32: 2e-2, FLOAT32: 1e-3}  # relative, of their mean losses


class Budget:
    """A section's seconds; measurements that do not fit are left out and recorded in `left_out`."""

    def __init__(self, seconds: float):
        self.end = time.perf_counter() + seconds
        self.left_out: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left for `what`."""
        if time.perf_counter() + seconds <= self.end:
            return True
        self.left_out.append(what)
        return False


def compare(work: Workload, names: tuple[str, ...], precision: str, *, repeats: int = REPEATS) -> list[dict]:
    """Check equal losses and time methods in turns of random order: a row for each, seconds per step of all networks.

    A serial method is timed on one network.
    """
    with multiplying_in(precision):
        return _compare(work, names, precision, repeats)


def _compare(work, names, precision, repeats):
    epoch = work.steps // work.epochs
    runs = methods(work, names)
    pace, first, failed = {}, {}, {}
    expected = None
    for name, run in list(runs.items()):
        steps = epoch * -(-CHECKED // epoch)
        begin = time.perf_counter()
        try:
            found = run(steps)
        except Exception as error:  # that a method fails is a result too
            failed[name] = " ".join(str(error).split())[:150]
            del runs[name]
            continue
        first[name] = time.perf_counter() - begin, found.compile_seconds
        expected = found.loss if expected is None else expected
        same = expected[: len(found.loss)]
        np.testing.assert_allclose(
            found.loss, same, rtol=TOLERANCE[precision], err_msg=f"{work.name}: {name} trains something else"
        )
        pace[name] = run(steps).seconds / steps
    lengths = {name: epoch * max(1, round(TURN / each / epoch)) for name, each in pace.items()}
    for name, run in runs.items():
        run(lengths[name])  # a method may compile for each length
    timed: dict[str, list] = {name: [] for name in runs}
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for name in rng.permutation(list(runs)):
            timed[name].append(runs[name](lengths[name]))
    rows = []
    for name in names:
        row: dict[str, Any] = {"workload": work.name, "method": name, "networks": work.members, "precision": precision}
        if name in timed:
            times = work.members if name in ONE_BY_ONE else 1
            each = [times * run.seconds / lengths[name] for run in timed[name]]
            row |= {"seconds_per_step": np.median(each), "low": min(each), "high": max(each), "repeats": repeats}
            row |= {"steps": lengths[name], "networks_timed": work.members // times}
            row |= {"wall_per_step": np.median([times * run.wall / lengths[name] for run in timed[name]])}
            warm = pace[name] * epoch * -(-CHECKED // epoch)
            first_wall, reported = first[name]
            row |= {"compile_seconds": compile_seconds(reported, first_wall, warm)}
        rows.append(row | {"error": failed.get(name, "")})
    return rows
