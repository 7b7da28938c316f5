"""Seconds measured fairly: ways in turn, their spread, the line through them."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import stats


def interleave(
    ways: dict[str, Callable[[], Any]], *, repeats: int = 3, warmup: int = 1, results: dict[str, list] | None = None
) -> dict[str, list[float]]:
    """Seconds of each way's calls: all ways warmed up first, then one call each in turn, `repeats` times.

    Turns spread a machine's slow minutes over all ways. A call ends when its JAX arrays are ready. What the timed calls
    returned is added to `results`, if that is given.
    """
    import jax

    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    for way in ways.values():
        for _ in range(warmup):
            jax.block_until_ready(way())
    seconds = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            with stopwatch() as watch:
                result = jax.block_until_ready(way())
            seconds[name].append(watch.seconds)
            if results is not None:
                results.setdefault(name, []).append(result)
    return seconds


def extrapolate(
    ways: dict[str, Callable[[int], Any]],
    steps: int,
    *,
    units: dict[str, int] | None = None,
    precision: float = 0.05,
    repeats: int = 3,
    most: int = 6,
    turn: float = 0.5,
):
    """Seconds that each way takes for `steps` steps, read off shorter runs, as its cost per step is constant.

    A turn times a run of one unit of steps and one of n units: their difference is what n - 1 units take, without what
    a call costs by itself. The ways take turns until Student's 95 % interval of each is within `precision` of its mean.

    Parameters
    ----------
    ways : {name: run(steps)}, each called before, so that what it compiles is there
    steps : of the whole training
    units : {name: steps} of the ways that run whole units of steps alone; 1 for the others
    precision : half the interval over the mean; reached or not, a way has no more than `most` turns
    repeats : turns of each way at the least; 1 is one turn, of whatever precision
    turn : seconds that n - 1 units are to take, and at least twice what a call costs by itself

    Returns
    -------
    pandas table : way, repeat, seconds (for all steps), steps (those of the longer run)
    """
    import pandas as pd

    units = dict.fromkeys(ways, 1) | (units or {})
    lengths = {name: _turn_length(run, steps, units[name], turn) for name, run in ways.items()}
    rows = []
    left = list(ways)
    repeat = 0
    while left:
        for name in left:
            length = lengths[name]
            seconds = _seconds(ways[name], length)
            if length < steps:
                short = _seconds(ways[name], units[name])
                seconds = short + (steps - units[name]) * (seconds - short) / (length - units[name])
            rows.append({"way": name, "repeat": repeat, "seconds": seconds, "steps": length})
        repeat += 1
        table = pd.DataFrame(rows)
        precise = {name for name, part in table.groupby("way") if _half_width(part.seconds) <= precision}
        left = [name for name in left if repeat < repeats or (name not in precise and 1 < repeats <= repeat < most)]
    return table


def _turn_length(run, steps, unit, turn):
    """Steps, in whole units, that take `turn` seconds longer than one unit, and twice what a call costs by itself."""
    length = 4 * unit
    if length >= steps:
        return steps
    short = _seconds(run, unit)
    while length < steps:
        longer = _seconds(run, length) - short
        call = short - unit * longer / (length - unit)
        if longer >= max(turn, 2 * call):
            return length
        length *= 2
    return steps


def _seconds(run, steps):
    import jax

    with stopwatch() as watch:
        jax.block_until_ready(run(steps))
    return watch.seconds


def _half_width(seconds):
    """Half of Student's 95 % interval over the mean."""
    if len(seconds) < 2:
        return math.inf
    return stats.t.ppf(0.975, len(seconds) - 1) * stats.sem(seconds) / np.mean(seconds)


def interval(seconds: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval for the mean of repeated runs, (low, high); (nan, nan) for a single run."""
    if len(seconds) < 2:
        return float("nan"), float("nan")
    low, high = stats.t.interval(level, len(seconds) - 1, np.mean(seconds), stats.sem(seconds))
    return float(low), float(high)


def summary(seconds: dict[str, list[float]]):
    """A table of `interleave`'s seconds: way, median, low (least), high (greatest), repeats."""
    import pandas as pd

    rows = [(way, float(np.median(s)), min(s), max(s), len(s)) for way, s in seconds.items()]
    return pd.DataFrame(rows, columns=["way", "median", "low", "high", "repeats"])


def linear_fit(x, y) -> tuple[float, float, float]:
    """The least-squares line (slope, intercept, r2) by scipy; r2, the squared correlation, is nan for a constant y."""
    if np.unique(x).size < 2:
        raise ValueError(f"A line needs at least two different x, got {np.unique(x).tolist()}.")
    line = stats.linregress(x, y)
    return float(line.slope), float(line.intercept), float(line.rvalue**2) if np.ptp(y) > 0 else float("nan")


@contextlib.contextmanager
def stopwatch() -> Iterator[SimpleNamespace]:
    """Time a block: `.seconds` of what it yields is nan inside, wall-clock time after it, error or not."""
    watch = SimpleNamespace(seconds=float("nan"))
    start = time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - start
