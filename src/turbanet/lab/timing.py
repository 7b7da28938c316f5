"""Seconds measured fairly, the line through them, and the machine they were measured on."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "numpy")


def machine() -> dict[str, str | int | float]:
    """The machine's fingerprint: hardware, versions, JAX's devices; flat, of text and numbers.

    Starts JAX's backend: the number of its devices cannot change afterwards.
    """
    import jax
    import psutil

    kinds = [device.device_kind for device in jax.devices()]
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "os": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "jax_backend": jax.default_backend(),
        "jax_devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
    }


def machine_line() -> str:
    """The machine in one line for a caption: CPU, cores, GPU if there is one, versions of jax and torch."""
    here = machine()
    gpu = [] if here["gpu"] == "none" else [here["gpu"]]
    versions = [f"jax {here['jax']}", f"torch {here['torch']}"]
    return ", ".join([here["cpu"], f"{here['cores']} cores", *gpu, *versions])


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
    from scipy import stats

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
    """The least-squares line (slope, intercept, r2); r2 = 1 - residual / total squares; constant y: nan."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if np.unique(x).size < 2:
        raise ValueError(f"A line needs at least two different x, got {np.unique(x).tolist()}.")
    slope, intercept = np.polyfit(x, y, 1)
    residual, total = np.sum((y - slope * x - intercept) ** 2), np.sum((y - y.mean()) ** 2)
    return float(slope), float(intercept), float(1 - residual / total) if total > 0 else float("nan")


@contextlib.contextmanager
def stopwatch() -> Iterator[SimpleNamespace]:
    """Time a block: `.seconds` of what it yields is nan inside, wall-clock time after it, error or not."""
    watch = SimpleNamespace(seconds=float("nan"))
    start = time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - start


class utilisation:
    """With it: the machine's use, sampled every `every` seconds by a thread of its own; `frame` after it.

    `frame` is a pandas table: seconds, core_0, core_1, ... (busy, in percent, whoever keeps it so), memory_gb (used, of
    the machine), and where nvidia-smi is, gpu_percent and gpu_memory_gb, summed over GPUs: NVML's numbers.
    """

    def __init__(self, every: float = 0.2):
        if not every > 0:
            raise ValueError(f"every must be a number of seconds above 0, got {every!r}.")
        self.every, self.rows, self._done = every, [], threading.Event()

    def __enter__(self):
        import psutil

        self._gpu = _GpuSampler(self.every)
        psutil.cpu_percent(percpu=True)
        self._begin, self._thread = time.perf_counter(), threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure):
        import pandas as pd

        self._done.set()
        self._thread.join()
        self._gpu.close()
        self.frame = pd.DataFrame(self.rows)

    def _sample(self):
        import psutil

        ended = False
        while not ended:
            ended = self._done.wait(self.every)  # and once more at the end
            cores = {f"core_{i}": busy for i, busy in enumerate(psutil.cpu_percent(percpu=True))}
            memory = psutil.virtual_memory()
            now = {"seconds": time.perf_counter() - self._begin, **cores}
            self.rows.append(now | {"memory_gb": (memory.total - memory.available) / 2**30} | self._gpu.latest())

    def cpu(self) -> float:
        """The mean share of the cores' time that was busy, 0 to 1, without the first and the last sample."""
        inner = self.frame.iloc[1:-1] if len(self.frame) > 2 else self.frame
        return float(inner.filter(like="core_").to_numpy().mean() / 100)


class _GpuSampler:
    """nvidia-smi in a process of its own, a line for each GPU at each sample; nothing where there is none."""

    def __init__(self, every):
        self._process, self._lines = None, []
        if shutil.which("nvidia-smi") is None:
            return
        query = ["--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", *query, f"--loop-ms={max(int(1000 * every), 1)}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            index, busy, used = (part.strip() for part in line.split(","))
            if busy.isdigit() and used.isdigit():
                self._lines.append((int(index), float(busy), float(used) / 1024))

    def latest(self):
        last = {index: (busy, used) for index, busy, used in self._lines[-64:]}
        if not last:
            return {}
        return {"gpu_percent": sum(b for b, _ in last.values()), "gpu_memory_gb": sum(u for _, u in last.values())}

    def close(self):
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()


def _cpu():
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()


def _cores():
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable else os.cpu_count()


def _gpu():
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    names = found.stdout.strip().splitlines() if found.returncode == 0 else []
    return ", ".join(name.strip() for name in names) or "none"


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
