"""The machine's fingerprint and use: what the system and NVML say; no test asserts a duration."""

import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import psutil
import pynvml
import pytest

from study.measurement import machine

NAMES, BUSY, USED = ("NVIDIA H200", "NVIDIA L4"), (30, 50), (1, 2)  # percent, gigabytes


@pytest.fixture
def gpus(monkeypatch):
    """NVML with two GPUs, at work; what it is asked goes to the list."""
    asked = []
    answers = {
        "nvmlInit": lambda: asked.append("nvmlInit"),
        "nvmlShutdown": lambda: asked.append("nvmlShutdown"),
        "nvmlDeviceGetCount": lambda: len(NAMES),
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda gpu: NAMES[gpu],
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=BUSY[gpu]),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=USED[gpu] * 2**30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return asked


def fail(error):
    def raises(*_):
        raise error

    return raises


def test_machine_is_flat_text_and_numbers():
    here = machine.machine()
    hardware = ["cpu", "cores", "memory_gb", "gpu", "os", "python"]
    assert list(here) == [*hardware, *machine.PACKAGES, "jax_backend", "jax_devices"]
    assert all(isinstance(value, str | int | float) and value for value in here.values())
    assert here["cores"] <= os.cpu_count()


@pytest.mark.parametrize("package", ["jax", "jaxlib", "flax", "optax", "torch", "numpy"])
def test_machine_names_installed_versions(package):
    assert machine.machine()[package] == importlib.metadata.version(package)


def test_machine_names_jax_devices():
    here = machine.machine()
    assert here["jax_backend"] == jax.default_backend()
    assert here["jax_devices"].startswith(f"{jax.device_count()} x ")


def test_machine_names_the_gpus_and_lets_nvml_go(gpus):
    assert machine.machine()["gpu"] == "NVIDIA H200, NVIDIA L4"
    assert gpus == ["nvmlInit", "nvmlShutdown"]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_machine_without_a_driver_says_none(gpus, monkeypatch, code):
    monkeypatch.setattr(pynvml, "nvmlInit", fail(pynvml.NVMLError(code)))
    assert machine.machine()["gpu"] == "none"


def test_machine_without_a_gpu_says_none(gpus, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    assert machine.machine()["gpu"] == "none"


LINUX = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"


@pytest.mark.parametrize("info, said", [(LINUX, "AMD EPYC (family 25, model 17)"), ("model name\t: ARMv8\n", "ARMv8")])
def test_machine_tells_processors_of_one_name_apart(monkeypatch, tmp_path, info, said):
    (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(machine, "Path", lambda name: tmp_path / "cpuinfo")
    assert machine.machine()["cpu"] == said


def test_machine_line_is_a_caption(monkeypatch):
    here = {"cpu": "AMD EPYC", "cores": 2, "gpu": "none", "jax": "0.10.2", "torch": "2.13.0"}
    monkeypatch.setattr(machine, "machine", lambda: here)
    assert machine.machine_line() == "AMD EPYC, 2 cores, jax 0.10.2, torch 2.13.0"
    cpu = jax.devices("cpu")[0]
    assert machine.machine_line([cpu]) == "1 CPU device, AMD EPYC, 2 cores, jax 0.10.2, torch 2.13.0"
    assert machine.machine_line([cpu] * 2).startswith("2 CPU devices, AMD EPYC, 2 cores")
    here["gpu"] = "NVIDIA H200"
    assert machine.machine_line() == "AMD EPYC, 2 cores, NVIDIA H200, jax 0.10.2, torch 2.13.0"


def test_utilisation_sees_the_cores_work():
    begin = time.perf_counter()
    with machine.utilisation(0.05) as use:
        while time.perf_counter() - begin < 0.6:
            sum(range(10_000))
    cores = use.frame.filter(like="core_")
    assert len(use.frame) >= 4 and cores.shape[1] == psutil.cpu_count()
    assert 0.3 / psutil.cpu_count() < use.cpu() <= 1
    assert use.frame.seconds.is_monotonic_increasing and (use.frame.memory_gb > 0).all()
    assert not [thread for thread in threading.enumerate() if "_sample" in thread.name]


def test_utilisation_sums_over_the_gpus(gpus):
    with machine.utilisation(10) as use:
        pass
    assert use.frame[["gpu_percent", "gpu_memory_gb"]].to_numpy().tolist() == [[80, 3]]
    assert gpus == ["nvmlInit", "nvmlShutdown"]


def test_utilisation_leaves_out_a_gpu_that_does_not_tell(gpus, monkeypatch):
    def rates(gpu):
        if gpu == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=BUSY[gpu])

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", rates)
    with machine.utilisation(10) as use:
        pass
    assert use.frame[["gpu_percent", "gpu_memory_gb"]].to_numpy().tolist() == [[50, 2]]


def test_utilisation_without_a_driver_has_no_gpu_columns(gpus, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", fail(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    with machine.utilisation(10) as use:
        pass
    assert use.frame.filter(like="gpu").empty


def test_utilisation_of_a_moment_has_one_sample():
    with machine.utilisation(10) as use:
        pass
    assert len(use.frame) == 1 and 0 <= use.cpu() <= 1


def test_utilisation_takes_no_last_sample_of_a_moment():
    with machine.utilisation(0.5) as use:
        while not use.rows:
            time.sleep(0.001)
    assert len(use.frame) == 1


def test_utilisation_needs_a_time_between_samples():
    with pytest.raises(ValueError, match="every must be"):
        machine.utilisation(0)


def test_peak_memory_sees_what_is_taken():
    code = """
import numpy as np
from study.measurement.machine import peak_memory
with peak_memory() as peak:
    np.ones(2**23)  # 64 MB
print(peak())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 55 < float(done.stdout) < 200
