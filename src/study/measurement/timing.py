"""Seconds measured fairly: ways in turn, their spread, ratios with intervals, the line through them."""

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
    repeats: int = 3,
    turn: float = 0.5,
):
    """Seconds that each way takes for `steps` steps, read off shorter runs, as its cost per step is constant.

    A turn times a run of one unit of steps and one of n units: their difference is what n - 1 units take, without what
    a call costs by itself.

    Parameters
    ----------
    ways : {name: run(steps)}, each called before, so that what it compiles is there
    steps : of the whole training
    units : {name: steps} of the ways that run whole units of steps alone; 1 for the others
    repeats : turns of each way
    turn : seconds that n - 1 units are to take, and at least twice what a call costs by itself

    Returns
    -------
    pandas table : way, repeat, seconds (for all steps), steps (those of the longer run)
    """
    import pandas as pd

    units = dict.fromkeys(ways, 1) | (units or {})
    lengths = {name: _turn_length(run, steps, units[name], turn) for name, run in ways.items()}
    rows = []
    for repeat in range(repeats):
        for name, run in ways.items():
            length = lengths[name]
            seconds = _seconds(run, length)
            if length < steps:
                short = _seconds(run, units[name])
                seconds = short + (steps - units[name]) * max(0.0, seconds - short) / (length - units[name])
            rows.append({"way": name, "repeat": repeat, "seconds": seconds, "steps": length})
    return pd.DataFrame(rows)


def _turn_length(run, steps, unit, turn):
    """Steps, in whole units, that take `turn` seconds longer than one unit, and twice what a call costs by itself."""
    length = 2 * unit
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


def interval(seconds: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval for the mean of repeated runs, (low, high); (nan, nan) for a single run."""
    if len(seconds) < 2:
        return float("nan"), float("nan")
    if np.ptp(seconds) == 0:  # which scipy has no interval for
        return float(seconds[0]), float(seconds[0])
    low, high = stats.t.interval(level, len(seconds) - 1, np.mean(seconds), stats.sem(seconds))
    return float(low), float(high)


def summary(seconds: dict[str, list[float]]):
    """A table of `interleave`'s seconds: way, median, low (least), high (greatest), repeats."""
    import pandas as pd

    rows = [(way, float(np.median(s)), min(s), max(s), len(s)) for way, s in seconds.items()]
    return pd.DataFrame(rows, columns=["way", "median", "low", "high", "repeats"])


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """How many times as long `one` takes as `other`, (ratio, low, high): geometric mean over pairs, 95 % interval.

    Both [repeat], run in turn: a slow minute hits both ways of a pair. What one of them has more of is left out. The
    interval is Student's for the mean of the logarithms, which also three repeats allow; of one it is (nan, nan).
    """
    count = min(len(one), len(other))
    logs = np.log(one[:count]) - np.log(other[:count])
    half = stats.t.ppf(0.975, count - 1) * stats.sem(logs) if count > 1 else math.nan
    return tuple(float(value) for value in np.exp(logs.mean() + np.array([0, -half, half])))


def beyond(run: Callable[[int], Any], length: int, whole: int) -> float:
    """Seconds of `whole` units of work, read off a run of `length` of them less a run of one: what a call costs by
    itself, as handing data to processes does, is left out, of runs so short that it is all there is but a thousandth.
    """
    short, long = _seconds(run, 1), _seconds(run, length)
    return max(long - short, long / 1000) * whole / (length - 1)


def against(each: dict[str, Sequence[float]], first: dict[str, float], *, base: str, units: int, unit: str) -> dict:
    """The best of the other ways beside `base`, as metrics: what it takes over what `base` does.

    Parameters
    ----------
    each : {way: seconds of the whole job [repeat]}, warm, in turn
    first : {way: seconds before its first step}, compilation above all; a way that is not in it has none
    units : steps or epochs of the job; `unit` is their name

    Returns
    -------
    metrics : warm_ratio, of the way that is best warm, and its interval, warm_ratio_low and _high, where there is one;
        cold_ratio, of the way that is best cold; break_even_<unit>, from which `base` is ahead of every way, if ever
    """
    others = {way: ratio(seconds, each[base]) for way, seconds in each.items() if way != base}
    own = float(np.median(each[base]))
    started = {way: first.get(way, 0.0) for way in each}
    seconds = {way: own * times[0] for way, times in others.items()}  # of the whole job
    warm, low, high = min(others.values())
    cold = min(started[way] + seconds[way] for way in others) / (started[base] + own)
    found = {"warm_ratio": warm, "cold_ratio": cold}
    found |= {"warm_ratio_low": low, "warm_ratio_high": high} if math.isfinite(low) else {}
    ahead = max(break_even(started[base], own / units, started[way], seconds[way] / units) for way in others)
    return found | ({f"break_even_{unit}": ahead} if math.isfinite(ahead) else {})


def break_even(first: float, each: float, other_first: float, other_each: float) -> float:
    """Units of work (steps, epochs) from which a way is ahead of another one for good: 0 from the start, inf never.

    A way costs `first` before it begins, compilation above all, and `each` for a unit of work.
    """
    if each >= other_each:
        return math.inf
    return max(0.0, (first - other_first) / (other_each - each))


def power_fit(x, y) -> tuple[float, float, float]:
    """The line through the logarithms, y = scale * x ** exponent: (exponent, scale, r2); exponent 1 is proportional."""
    exponent, scale, r2 = linear_fit(np.log(x), np.log(y))
    return exponent, math.exp(scale), r2


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
