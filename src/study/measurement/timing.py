"""Fair timing: methods in turn, their spread, ratios with intervals, fitted lines."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import stats


def interleave(
    methods: dict[str, Callable[[], Any]],
    *,
    repeats: int = 3,
    warmup: int = 1,
    least: float = 0.0,
    results: dict[str, list] | None = None,
) -> dict[str, list[float]]:
    """Time all methods: warm-up calls first, then each in turn, `repeats` times; {method: seconds [repeat]}.

    Turns, each in its own random order, spread a machine's slow minutes over all methods. A method's turn is one call,
    or as many as take `least` seconds together, of which it is the mean. A call ends when its JAX arrays are ready.
    With `results`, the timed calls' results are appended to its lists.
    """
    import jax

    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    for method in methods.values():
        for _ in range(warmup):
            jax.block_until_ready(method())
    seconds = {name: [] for name in methods}
    for order in orders(methods, repeats):
        for name in order:
            calls = []
            while not calls or sum(calls) < least:
                with stopwatch() as watch:
                    result = jax.block_until_ready(methods[name]())
                calls.append(watch.seconds)
                if results is not None:
                    results.setdefault(name, []).append(result)
            seconds[name].append(float(np.mean(calls)))
    return seconds


def best(call: Callable[[], Any], repeats: int) -> float:
    """Return the least seconds of `repeats` calls after one that warms up."""
    return min(interleave({"call": call}, repeats=repeats)["call"])


def orders(names, repeats: int) -> list[list]:
    """Draw the order of `names` in each turn, [repeat][name]."""
    names, rng = list(names), np.random.default_rng(0)
    return [[names[place] for place in rng.permutation(len(names))] for _ in range(repeats)]


def extrapolate(
    methods: dict[str, Callable[[int], Any]],
    steps: int,
    *,
    repeats: int = 3,
    turn: float = 0.5,
):
    """Estimate each method's seconds for `steps` steps from shorter runs; its cost per step must be constant.

    A turn times runs of 1 and n steps; their difference is the time of n - 1 steps without a call's overhead.

    Parameters
    ----------
    methods : {name: run(steps)}, each already called, so that it is compiled
    steps : of the whole training
    repeats : turns of each method
    turn : seconds for n - 1 steps; they also take at least twice a call's overhead

    Returns
    -------
    pandas table : method, repeat, seconds (for all steps), steps (those of the longer run)
    """
    import pandas as pd

    lengths = {name: _turn_length(run, steps, turn) for name, run in methods.items()}
    rows = []
    for repeat, order in enumerate(orders(methods, repeats)):
        for name in order:
            run, length = methods[name], lengths[name]
            seconds = _seconds(run, length)
            if length < steps:
                short = _seconds(run, 1)
                seconds = short + (steps - 1) * max(0.0, seconds - short) / (length - 1)
            rows.append({"method": name, "repeat": repeat, "seconds": seconds, "steps": length})
    return pd.DataFrame(rows)


def _turn_length(run, steps, turn):
    """Find the number of steps whose time beyond the first one's is `turn` seconds and twice a call's overhead.

    Each length is run once before it is timed, as a method may compile for each.
    """
    length = 2
    while length < steps:
        short, longer = _seconds(run, 1), _warm_seconds(run, length)
        overhead = short - (longer - short) / (length - 1)
        if longer - short >= max(turn, 2 * overhead):
            return length
        length *= 2
    _warm_seconds(run, steps)
    return steps


def _warm_seconds(run, steps):
    _seconds(run, steps)
    return _seconds(run, steps)


def _seconds(run, steps):
    import jax

    with stopwatch() as watch:
        jax.block_until_ready(run(steps))
    return watch.seconds


def interval(seconds: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Compute Student's interval for the mean of repeated runs, (low, high); (nan, nan) for a single run."""
    if len(seconds) < 2:
        return float("nan"), float("nan")
    if np.ptp(seconds) == 0:  # SciPy gives NaN
        return float(seconds[0]), float(seconds[0])
    low, high = stats.t.interval(level, len(seconds) - 1, np.mean(seconds), stats.sem(seconds))
    return float(low), float(high)


def summary(seconds: dict[str, list[float]]):
    """Summarise `interleave`'s seconds: a table of method, median, low (least), high (greatest), repeats."""
    import pandas as pd

    rows = [(method, float(np.median(s)), min(s), max(s), len(s)) for method, s in seconds.items()]
    return pd.DataFrame(rows, columns=["method", "median", "low", "high", "repeats"])


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Compute the time of `one` over `other`, geometric mean over pairs, with a 95 % interval: (ratio, low, high).

    Both are [repeat], run in turn, so that a slow minute hits both of a pair; surplus repeats are left out. The
    interval is Student's for the mean logarithm, which works for three repeats; for one it is (nan, nan).
    """
    count = min(len(one), len(other))
    logs = np.log(one[:count]) - np.log(other[:count])
    half = stats.t.ppf(0.975, count - 1) * stats.sem(logs) if count > 1 else math.nan
    return tuple(float(value) for value in np.exp(logs.mean() + np.array([0, -half, half])))


def with_interval(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """Name a number and its interval as metrics: name, name_low and name_high; without an interval that is NaN."""
    found = {name: value, f"{name}_low": low, f"{name}_high": high}
    return found if math.isfinite(low) else {name: value}


def beyond(run: Callable[[int], Any], length: int, whole: int) -> float:
    """Estimate the seconds of `whole` units of work from a run of `length` units less a run of one, without overhead.

    Overhead is, for example, data sent to processes; in very short runs the difference is at least a thousandth.
    """
    short, long = _seconds(run, 1), _seconds(run, length)
    return max(long - short, long / 1000) * whole / (length - 1)


def against(each: dict[str, Sequence[float]], first: dict[str, float], *, base: str, units: int, unit: str) -> dict:
    """Compare the best of the other methods with `base`: metrics of its time over that of `base`.

    Parameters
    ----------
    each : {method: seconds of the whole job [repeat]}, warm, in turn
    first : {method: seconds before its first step}, mostly compilation; 0 for methods that are not in it
    units, unit : the job's number of steps or epochs, and their name

    Returns
    -------
    metrics : warm_ratio of the best warm method with its interval, warm_ratio_low and warm_ratio_high, if there is one;
        cold_ratio of the best cold method; break_even_<unit> from which `base` is ahead of all methods, if ever
    """
    others = {method: ratio(seconds, each[base]) for method, seconds in each.items() if method != base}
    own = float(np.median(each[base]))
    started = {method: first.get(method, 0.0) for method in each}
    seconds = {method: own * times[0] for method, times in others.items()}  # of the whole job
    warm, low, high = min(others.values())
    cold = min(started[method] + seconds[method] for method in others) / (started[base] + own)
    found = with_interval("warm_ratio", warm, low, high) | {"cold_ratio": cold}
    ahead = max(break_even(started[base], own / units, started[method], seconds[method] / units) for method in others)
    return found | ({f"break_even_{unit}": ahead} if math.isfinite(ahead) else {})


def break_even(first: float, each: float, other_first: float, other_each: float) -> float:
    """Return the units of work (steps, epochs) from which a method stays ahead of another: 0 from the start, inf never.

    A method costs `first` seconds before it begins, mostly compilation, and `each` seconds a unit of work.
    """
    if each >= other_each:
        return math.inf
    return max(0.0, (first - other_first) / (other_each - each))


def power_fit(x, y) -> tuple[float, float, float]:
    """Fit a line through the logarithms, y = scale * x ** exponent: (exponent, scale, r2)."""
    exponent, scale, r2 = linear_fit(np.log(x), np.log(y))
    return exponent, math.exp(scale), r2


def linear_fit(x, y) -> tuple[float, float, float]:
    """Fit a least-squares line: (slope, intercept, r2); r2, the squared correlation, is NaN for a constant y."""
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
