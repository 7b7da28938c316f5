"""The machine of a measurement: its description for captions, its use and peak memory during a block."""

import contextlib
import importlib.metadata
import os
import platform
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pynvml

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "numpy")


def machine() -> dict[str, str | int | float]:
    """Describe the machine: hardware, versions, JAX's devices; {name: text or number}.

    Starts JAX's backend: the number of its devices cannot change afterwards.
    """
    import jax

    kinds = [device.device_kind for device in jax.devices()]
    with _gpus() as gpus:
        names = [pynvml.nvmlDeviceGetName(gpu) for gpu in gpus]
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": ", ".join(names) or "none",
        "os": platform.platform(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
        "jax_backend": jax.default_backend(),
        "jax_devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
    }


def machine_line(devices: Sequence = ()) -> str:
    """Describe the machine in one line for a caption: CPU, cores, GPU if there is one, versions of jax and torch.

    devices : JAX's devices that were used, if any; they come first
    """
    here = machine()
    used = [f"{len(devices)} {devices[0].platform.upper()} device{'s' * (len(devices) > 1)}"] if devices else []
    gpu = [] if here["gpu"] == "none" else [here["gpu"]]
    versions = [f"jax {here['jax']}", f"torch {here['torch']}"]
    return ", ".join([*used, here["cpu"], f"{here['cores']} cores", *gpu, *versions])


class utilisation:
    """Context manager that samples the machine's use every `every` seconds in a thread; `frame` holds it afterwards.

    `frame` is a pandas table: seconds, core_0, core_1, ... (percent busy, by any program), memory_gb (used on the
    machine) and, where NVML finds GPUs, gpu_percent and gpu_memory_gb, summed over them.
    """

    def __init__(self, every: float = 0.2):
        if not every > 0:
            raise ValueError(f"every must be a number of seconds above 0, got {every!r}.")
        self.every = every
        self.rows = []
        self._done = threading.Event()

    def __enter__(self):
        psutil.cpu_percent(percpu=True)
        self._begin = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure):
        import pandas as pd

        self._done.set()
        self._thread.join()
        self.frame = pd.DataFrame(self.rows)

    def _sample(self):
        ended = False
        with _gpus() as gpus:
            while not ended:
                ended = self._done.wait(self.every)
                if ended and self.rows and self._seconds() - self.rows[-1]["seconds"] < self.every / 2:
                    return  # too short a time to sample the cores
                cores = {f"core_{i}": busy for i, busy in enumerate(psutil.cpu_percent(percpu=True))}
                memory = psutil.virtual_memory()
                now = {"seconds": self._seconds(), **cores}
                now["memory_gb"] = (memory.total - memory.available) / 2**30
                self.rows.append(now | _gpu_use(gpus))

    def _seconds(self):
        return time.perf_counter() - self._begin

    def cpu(self) -> float:
        """Return the mean share of busy core time, 0 to 1, without the first and the last sample."""
        inner = self.frame.iloc[1:-1] if len(self.frame) > 2 else self.frame
        return float(inner.filter(like="core_").to_numpy().mean() / 100)


class peak_memory:
    """Context manager that yields a function: the process's peak memory in MB beyond its initial; NaN off Linux."""

    def __enter__(self):
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        except OSError:
            self.before = float("nan")
        else:
            self.before = peak_mib()
        self.peak = float("nan")
        return lambda: self.peak

    def __exit__(self, *failure):
        self.peak = max(0.0, peak_mib() - self.before) if self.before == self.before else self.before


def peak_mib() -> float:
    """Return this process's peak memory in MiB; NaN off Linux.

    Linux's VmHWM counts this program only; getrusage also counts the process that it was forked from.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else float("nan")


@contextlib.contextmanager
def _gpus():
    """Yield the handles of the GPUs that NVML finds; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu_use(gpus):
    """Return percent busy and gigabytes used, summed over the GPUs; a MIG partition reports neither."""
    found = []
    for gpu in gpus:
        with contextlib.suppress(pynvml.NVMLError):
            busy = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            found.append((busy, pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30))
    return dict(zip(("gpu_percent", "gpu_memory_gb"), map(sum, zip(*found))))


def _cpu():
    """Return the processor's name, on Linux with family and model, as different processors share a name."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    named, family, model = (
        re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE) for key in ("model name", "cpu family", "model")
    )
    name = named[1].strip() if named else platform.processor() or platform.machine()
    return f"{name} (family {family[1]}, model {model[1]})" if family and model else name


def _cores():
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable else os.cpu_count()
