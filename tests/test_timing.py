"""Timing: the order of calls, the line, the machine's fingerprint; no test asserts a duration."""

import importlib.metadata
import math
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from scipy import stats

from turbanet.lab import timing


def test_interleave_warms_all_up_then_takes_turns():
    calls = []
    timing.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, repeats=2, warmup=2)
    assert calls == ["a", "a", "b", "b", "a", "b", "a", "b"]


def test_interleave_counts_seconds_of_each_way(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(seconds):
        clock[0] += seconds

    seconds = timing.interleave({"a": lambda: work(1.0), "b": lambda: work(4.0)}, repeats=3)
    assert seconds == {"a": [1.0] * 3, "b": [4.0] * 3}


def test_interleave_waits_for_results_inside_the_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    class Pending:
        def block_until_ready(self):
            clock[0] += 5.0
            return self

    assert timing.interleave({"a": lambda: {"loss": Pending()}}, repeats=1) == {"a": [5.0]}


def test_interleave_passes_torch_and_none_through():
    ways = {"torch": lambda: torch.ones(2), "nothing": lambda: None, "jax": lambda: jnp.ones(2)}
    assert {way: len(s) for way, s in timing.interleave(ways, repeats=2).items()} == dict.fromkeys(ways, 2)


def test_interleave_hands_over_what_the_timed_calls_returned():
    count, results = iter(range(9)), {}
    timing.interleave({"a": lambda: next(count)}, repeats=3, warmup=1, results=results)
    assert results == {"a": [1, 2, 3]}


def test_interval_is_students():
    # 2.776445 is Student's t at 0.975 with 4 degrees of freedom, from a table
    low, high = timing.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (low, high) == (pytest.approx(3 - half, rel=1e-6), pytest.approx(3 + half, rel=1e-6))


def test_interval_of_one_run_is_not_known():
    assert all(math.isnan(edge) for edge in timing.interval([2.0]))


def test_interleave_refuses_no_repeats():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        timing.interleave({}, repeats=0)


def test_summary_gives_median_and_spread():
    table = timing.summary({"a": [3.0, 1.0, 10.0], "b": [2.0, 4.0]})
    assert table.columns.tolist() == ["way", "median", "low", "high", "repeats"]
    assert table.to_numpy().tolist() == [["a", 3.0, 1.0, 10.0, 3], ["b", 3.0, 2.0, 4.0, 2]]


def test_linear_fit_equals_scipy():
    random = np.random.default_rng(0)
    x = np.array([1, 2, 4, 8, 16, 32, 64, 100, 128])
    y = 0.3 * x + 2 + random.normal(size=x.size)
    expected = stats.linregress(x, y)
    np.testing.assert_allclose(
        timing.linear_fit(x, y), (expected.slope, expected.intercept, expected.rvalue**2), rtol=1e-9
    )


def test_linear_fit_of_a_constant_has_no_r2():
    slope, intercept, r2 = timing.linear_fit([1, 2, 3], [5, 5, 5])
    np.testing.assert_allclose((slope, intercept), (0, 5), atol=1e-9)
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


def test_machine_is_flat_text_and_numbers():
    here = timing.machine()
    hardware = ["cpu", "cores", "memory_gb", "gpu", "os", "python"]
    assert list(here) == [*hardware, *timing.PACKAGES, "jax_backend", "jax_devices"]
    assert all(isinstance(value, str | int | float) and value for value in here.values())
    assert here["cores"] <= os.cpu_count()


@pytest.mark.parametrize("package", ["jax", "jaxlib", "flax", "optax", "torch", "numpy"])
def test_machine_names_installed_versions(package):
    assert timing.machine()[package] == importlib.metadata.version(package)


def test_machine_names_jax_devices():
    here = timing.machine()
    assert here["jax_backend"] == jax.default_backend()
    assert here["jax_devices"].startswith(f"{jax.device_count()} x ")


def test_machine_says_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(timing, "PACKAGES", ("no-such-package-here",))
    assert timing.machine()["no-such-package-here"] == "not installed"


def test_machine_reads_gpu_names(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA L4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert timing.machine()["gpu"] == "NVIDIA H200, NVIDIA L4"


@pytest.mark.parametrize("script", ["echo NVIDIA-SMI has failed; exit 9", ""])
def test_machine_without_a_gpu_says_none(monkeypatch, tmp_path, script):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert timing.machine()["gpu"] == "none"


def test_machine_line_is_a_caption(monkeypatch):
    here = {"cpu": "AMD EPYC", "cores": 2, "gpu": "none", "jax": "0.10.2", "torch": "2.13.0"}
    monkeypatch.setattr(timing, "machine", lambda: here)
    assert timing.machine_line() == "AMD EPYC, 2 cores, jax 0.10.2, torch 2.13.0"
    here["gpu"] = "NVIDIA H200"
    assert timing.machine_line() == "AMD EPYC, 2 cores, NVIDIA H200, jax 0.10.2, torch 2.13.0"


def test_utilisation_sees_the_cores_work():
    begin = time.perf_counter()
    with timing.utilisation(0.05) as use:
        while time.perf_counter() - begin < 0.6:
            sum(range(10_000))
    cores = use.frame.filter(like="core_")
    assert len(use.frame) >= 4 and cores.shape[1] == psutil.cpu_count()
    assert 0.3 / psutil.cpu_count() < use.cpu() <= 1
    assert use.frame.seconds.is_monotonic_increasing and (use.frame.memory_gb > 0).all()
    assert not [thread for thread in threading.enumerate() if "_sample" in thread.name]


def test_utilisation_reads_nvidia_smi_where_there_is_one(tmp_path, monkeypatch):
    lines = "for i in 1 2 3 4 5 6 7 8; do echo '0, 30, 1024'; echo '1, 50, 2048'; echo '2, [N/A], 0'; sleep 0.05; done"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with timing.utilisation(0.05) as use:
        time.sleep(0.5)
    assert use.frame.gpu_percent.iloc[-1] == 80 and use.frame.gpu_memory_gb.iloc[-1] == 3


def test_utilisation_of_a_moment_has_one_sample():
    with timing.utilisation(10) as use:
        pass
    assert len(use.frame) == 1 and 0 <= use.cpu() <= 1


def test_utilisation_needs_a_time_between_samples():
    with pytest.raises(ValueError, match="every must be"):
        timing.utilisation(0)
