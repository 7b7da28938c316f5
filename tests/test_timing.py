"""Timing: the order of calls, their spread, the line; no test asserts a duration."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from tiers import first

from study.measurement import timing


def test_interleave_warms_all_up_then_takes_turns_in_random_order():
    calls = []
    timing.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, repeats=20, warmup=2)
    turns = list(zip(calls[4::2], calls[5::2]))
    assert calls[:4] == ["a", "a", "b", "b"] and len(turns) == 20 and set(turns) == {("a", "b"), ("b", "a")}


def test_interleave_counts_seconds_of_each_way(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(seconds):
        clock[0] += seconds

    seconds = timing.interleave({"a": lambda: work(1.0), "b": lambda: work(4.0)}, repeats=3)
    assert seconds == {"a": [1.0] * 3, "b": [4.0] * 3}


def test_interleave_takes_the_mean_of_a_turns_calls(monkeypatch):
    clock, seconds = [0.0], iter([1.0, 3.0, 7.0, 5.0])

    def work():
        clock[0] += next(seconds)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.interleave({"a": work}, repeats=2, warmup=0, least=4) == {"a": [2.0, 7.0]}
    assert next(seconds) == 5


def test_interleave_waits_for_results_inside_the_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    class Pending:
        def block_until_ready(self):
            clock[0] += 5.0
            return self

    assert timing.interleave({"a": lambda: {"loss": Pending()}}, repeats=1) == {"a": [5.0]}


def test_interleave_passes_torch_and_none_through():
    methods = {"torch": lambda: torch.ones(2), "nothing": lambda: None, "jax": lambda: jnp.ones(2)}
    assert {method: len(s) for method, s in timing.interleave(methods, repeats=2).items()} == dict.fromkeys(methods, 2)


def test_interleave_hands_over_what_the_timed_calls_returned():
    count, results = iter(range(9)), {}
    timing.interleave({"a": lambda: next(count)}, repeats=3, warmup=1, results=results)
    assert results == {"a": [1, 2, 3]}


def test_interval_is_students():
    # 2.776445 is Student's t at 0.975 with 4 degrees of freedom, from a table
    low, high = timing.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (low, high) == (pytest.approx(3 - half, rel=1e-6), pytest.approx(3 + half, rel=1e-6))


def test_interval_of_equal_runs_is_their_value():
    assert timing.interval([2.5, 2.5, 2.5]) == (2.5, 2.5)


def test_interval_of_one_run_is_not_known():
    assert all(math.isnan(edge) for edge in timing.interval([2.0]))


def test_interleave_refuses_no_repeats():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        timing.interleave({}, repeats=0)


def test_summary_gives_median_and_spread():
    table = timing.summary({"a": [3.0, 1.0, 10.0], "b": [2.0, 4.0]})
    assert table.columns.tolist() == ["method", "median", "low", "high", "repeats"]
    assert table.to_numpy().tolist() == [["a", 3.0, 1.0, 10.0, 3], ["b", 3.0, 2.0, 4.0, 2]]


def test_linear_fit_equals_numpy():
    random = np.random.default_rng(0)
    x = np.array([1, 2, 4, 8, 16, 32, 64, 100, 128])
    y = 0.3 * x + 2 + random.normal(size=x.size)
    slope, intercept = np.polyfit(x, y, 1)
    r2 = 1 - np.sum((y - slope * x - intercept) ** 2) / np.sum((y - y.mean()) ** 2)
    np.testing.assert_allclose(timing.linear_fit(x, y), (slope, intercept, r2), rtol=1e-9)


def test_linear_fit_of_a_constant_has_no_r2():
    slope, intercept, r2 = timing.linear_fit([1, 2, 3], [0.1, 0.1, 0.1])  # whose mean is not 0.1 in binary
    np.testing.assert_allclose((slope, intercept), (0, 0.1), atol=1e-9)
    assert math.isnan(r2)


def test_linear_fit_needs_two_places():
    with pytest.raises(ValueError, match="two different x, got .3"):
        timing.linear_fit([3, 3], [1, 2])


def test_stopwatch_reads_after_an_error_too(monkeypatch):
    ticks = iter([10.0, 12.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    with pytest.raises(KeyError), timing.stopwatch() as watch:
        assert math.isnan(watch.seconds)
        raise KeyError
    assert watch.seconds == 2.5


@pytest.fixture
def clock(monkeypatch):
    """A clock that only what is timed moves on: clock(seconds)."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_extrapolate_reads_a_line_off_short_runs(clock):
    ran = []

    def run(steps):
        ran.append(steps)
        clock(0.3 + 0.01 * steps)  # a call costs 0.3 s by itself

    table = timing.extrapolate({"line": run}, 10_000)
    np.testing.assert_allclose(table.seconds, 0.3 + 0.01 * 10_000)
    assert list(table.repeat) == [0, 1, 2]
    assert max(ran) == table.steps[0] == 64  # of 2, 4, 8, ...: 0.6 s longer than one


def test_extrapolate_runs_to_the_end_what_is_short(clock):
    table = timing.extrapolate({"short": lambda steps: clock(0.001 * steps)}, 100, repeats=2)
    assert set(table.steps) == {100} and len(table) == 2
    np.testing.assert_allclose(table.seconds, 0.1)


@pytest.mark.parametrize(("each", "length"), [(0.2, 4), (1e-4, 100)])
def test_extrapolate_times_no_compilation_of_a_method_that_compiles_for_each_length(clock, each, length):
    compiled = {1}

    def run(steps):
        clock(5.0 * (steps not in compiled) + each * steps)
        compiled.add(steps)

    table = timing.extrapolate({"scan": run}, 100)
    np.testing.assert_allclose(table.seconds, each * 100)
    assert set(table.steps) == {length}


def test_extrapolate_takes_turns(clock):
    order = []
    methods = {name: lambda steps, name=name: (order.append(name), clock(steps)) for name in "ab"}
    timing.extrapolate(methods, 2, repeats=2)
    assert order[-4:] == ["a", "b", "a", "b"]


def test_ratio_is_the_geometric_mean_over_pairs():
    found = timing.ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found == pytest.approx((2, 2, 2))
    assert timing.ratio([1.0, 4.0], [1.0, 1.0])[0] == pytest.approx(2)


def test_ratio_draws_whole_pairs():
    rng = np.random.default_rng(0)
    slow = rng.lognormal(0, 1, 12)  # what the machine does to both methods of one turn
    paired = timing.ratio(3 * slow, slow)
    apart = timing.ratio(3 * slow, rng.permutation(slow))
    assert paired[2] - paired[1] < 1e-9 < apart[2] - apart[1]


@pytest.mark.parametrize("count", first(1, [3, 2, 8]))
def test_the_interval_of_a_ratio_holds_the_truth_nineteen_times_of_twenty(count):
    rng = np.random.default_rng(1)
    one, other = (np.exp(rng.normal(mean, 0.2, (1000, count))) for mean in (np.log(1.5), 0))
    found = np.array([timing.ratio(*pair) for pair in zip(one, other)])
    assert np.mean((found[:, 1] <= 1.5) & (found[:, 2] >= 1.5)) == pytest.approx(0.95, abs=0.024)  # 3.5 standard errors
    expected = stats.ttest_rel(np.log(one[0]), np.log(other[0])).confidence_interval()
    np.testing.assert_allclose(found[0, 1:], np.exp(expected))


def test_ratio_leaves_out_what_has_no_pair():
    assert timing.ratio([2.0, 2.0, 8.0, 8.0, 8.0], [1.0, 1.0]) == pytest.approx((2, 2, 2))
    ratio, low, high = timing.ratio([3.0], [2.0, 2.0])
    assert ratio == pytest.approx(1.5) and math.isnan(low) and math.isnan(high)


def test_an_interval_goes_with_its_number():
    assert timing.with_interval("ratio", 2.0, 1.5, 2.5) == {"ratio": 2.0, "ratio_low": 1.5, "ratio_high": 2.5}
    assert timing.with_interval("ratio", *timing.ratio([2.0], [1.0])) == {"ratio": 2.0}  # one run has none


def test_break_even_by_hand():
    assert timing.break_even(10.0, 1.0, 0.0, 3.0) == 5  # 10 + 5 = 15
    assert timing.break_even(10.0, 1.0, 4.0, 3.0) == 3
    assert timing.break_even(1.0, 1.0, 4.0, 3.0) == 0  # cheaper from the start
    assert timing.break_even(0.0, 3.0, 10.0, 3.0) == timing.break_even(10.0, 3.0, 0.0, 1.0) == math.inf


def test_power_fit_finds_the_exponent():
    x = np.array([1.0, 4, 16, 64])
    np.testing.assert_allclose(timing.power_fit(x, 0.5 * x**1.5), (1.5, 0.5, 1))


def test_beyond_leaves_out_what_a_call_costs_by_itself(monkeypatch):
    monkeypatch.setattr(timing, "_seconds", lambda run, length: 5 + 2 * length)
    assert timing.beyond(None, 4, 100) == pytest.approx(2 * 100)
    monkeypatch.setattr(timing, "_seconds", lambda run, length: 5 - length)  # noise: the longer run was the faster one
    assert timing.beyond(None, 4, 3) == pytest.approx(0.001)


def test_against_takes_the_best_method_warm_and_the_best_method_cold():
    each = {"ours": [9.0, 10, 11], "compiled": [18.0, 20, 22], "loop": [36.0, 40, 44]}
    found = timing.against(each, {"ours": 50.0, "compiled": 60.0}, base="ours", units=10, unit="steps")
    assert found["warm_ratio"] == pytest.approx(2)  # of the compiled method
    assert (found["warm_ratio_low"], found["warm_ratio_high"]) == pytest.approx((2, 2))
    assert found["cold_ratio"] == pytest.approx(40 / 60)  # of the loop, as 80 is more
    # The loop's; from the compiled method it is ahead at once.
    assert found["break_even_steps"] == pytest.approx(50 / 3)


def test_against_says_neither_an_interval_nor_a_break_even_that_is_none():
    found = timing.against({"ours": [10.0], "loop": [9.0]}, {}, base="ours", units=2, unit="epochs")
    assert found == {"warm_ratio": pytest.approx(0.9), "cold_ratio": pytest.approx(0.9)}
