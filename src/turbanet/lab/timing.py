"""Seconds measured fairly: ways in turn, their spread, the line through them."""

import contextlib
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
