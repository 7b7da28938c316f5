"""Memory: what a compiled program needs, what is free on its devices, and the block that fits."""

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import psutil

HEADROOM = 0.9  # of an accelerator's free memory, that a block is made for
KEPT = 64  # programs whose bytes are remembered
LIMITS = {  # of a control group, by its version: files of the limit, of what is used, the cached part of that
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
Need = namedtuple("Need", "bytes free")  # of memory, beside a program's arguments; what its devices have


def memory(devices: Sequence[jax.Device]) -> tuple[float, float]:
    """Bytes of memory, all and free: a device's own, the system's for the cores of a CPU."""
    if devices[0].platform == "cpu":
        system = psutil.virtual_memory()
        limit, left = container()
        return min(system.total, limit), min(system.available, left)
    stats = devices[0].memory_stats() or {}
    most = stats.get("bytes_limit", math.inf)
    return most, most - stats.get("bytes_in_use", 0)


def container(root: Path = Path("/")) -> tuple[float, float]:
    """Bytes of memory that this process's control groups (v1 or v2) allow, and what is left of them; inf without any.

    Files that are cached count as left, as the kernel drops them first. root : where /proc and /sys are.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf, math.inf
    found = [(math.inf, math.inf)]
    for group in groups:
        _, kinds, path = group.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        place = root / "sys/fs/cgroup" / kinds
        inner = place / path.lstrip("/")
        names = LIMITS[kinds]
        above = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(place)]
        found += [_allowed(folder, *names) for folder in (above if inner.is_dir() else [place])]
    return min(limit for limit, _ in found), min(left for _, left in found)


def _allowed(folder, limit, used, cached):
    """(bytes allowed, bytes left) of one control group."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return math.inf, math.inf
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        held = int((folder / used).read_text()) - int(statistics.get(cached, 0))
        return float(most), float(most) - held
    except (OSError, ValueError):  # the root has none of these files
        return math.inf, math.inf


def needs(executable: Any, plan: Any, rounds: int = 1) -> Need:
    """What so many rounds of a compiled program need against what is free."""
    while_it_runs, returned = _bytes(executable)
    sharing = 1 if plan.on_accelerator else len(plan.devices)  # a CPU's share one memory; without any, processes end
    need = sharing * (while_it_runs + rounds * returned)
    return Need(need, memory(plan.devices)[1])


def fitting(compile: Callable, plan: Any, rounds: int = 1) -> tuple[Any, int]:
    """(What `compile()` returns, the plan's block), or a smaller block where that program needs more than is free.

    On an accelerator compiling itself runs products, and may lack the memory for one of them: then there is no program.
    """
    try:
        found = compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error) or plan.block == 1:
            raise
        return None, max(1, plan.block // 4)
    return found, fitting_block(getattr(found, "executable", found), plan, rounds)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had too little memory."""
    return "RESOURCE_EXHAUSTED" in repr(error)


def fitting_block(executable: Any, plan: Any, rounds: int = 1) -> int:
    """The plan's block, or a smaller one where this program of it needs more memory than is free.

    A CPU's is halved. An accelerator's is reckoned from what this one needs: what grows with a block is what the
    program uses while it runs. Raises MemoryError where not even one member at a time fits.
    """
    need = needs(executable, plan, rounds)
    if need.bytes < need.free:
        return plan.block
    while_it_runs, returned = _bytes(executable)
    left = HEADROOM * need.free - rounds * returned
    reckoned = int(plan.block * left / max(while_it_runs, 1))
    block = min(reckoned, plan.block - 1) if plan.on_accelerator else plan.block // 2
    if block >= 1:
        return block
    most = f"Out of memory: {need.bytes / 2**30:.1f} GiB are needed, more than is free"
    raise MemoryError(f"{most}; take fewer members, fewer at a time (Plan(block=...)) or smaller batches.")


@lru_cache(maxsize=KEPT)
def _bytes(executable):
    """What a program needs beside its arguments, and what it returns, which it takes XLA milliseconds to say."""
    sizes = executable.memory_analysis()
    if sizes is None:
        return 0, 0
    return sizes.temp_size_in_bytes, max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0)
