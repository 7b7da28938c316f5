"""Memory that a compiled program needs and its devices have free, and the block size that fits."""

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import psutil

UNLIMITED = 2**60  # bytes of a limit that is none: the group's statistics, which take the longest, are not read
HEADROOM = 0.9  # share of an accelerator's free memory that a block may use
LIMITS = {  # of a control group, by version: file of the limit, file of the use, entry of the file cache in memory.stat
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
Need = namedtuple("Need", "bytes free")  # that a program needs beside its arguments; that its devices have free


def free_memory(devices: Sequence[jax.Device]) -> float:
    """Return the free bytes of memory of a device, or of the system for the cores of a CPU."""
    if devices[0].platform == "cpu":
        return min(psutil.virtual_memory().available, container())
    stats = devices[0].memory_stats() or {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)


def container(root: Path = Path("/")) -> float:
    """Return the bytes that this process's control groups (v1 or v2) leave free; inf without any.

    Cached files count as free, as the kernel drops them first. root : the directory of /proc and /sys.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    free = [math.inf]
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers in LIMITS:
            top = root / "sys/fs/cgroup" / controllers
            inner = top / path.lstrip("/")
            above = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
            free += [_free(folder, *LIMITS[controllers]) for folder in (above if inner.is_dir() else [top])]
    return min(free)


def _free(folder, limit, used, cached):
    """Return the free bytes of one control group."""
    try:
        allowed = float((folder / limit).read_text())
        if allowed >= UNLIMITED:
            return math.inf
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return allowed - int((folder / used).read_text()) + int(statistics.get(cached, 0))
    except (OSError, ValueError):  # the root group has none of these files, and "max" is no limit
        return math.inf


def needs(program: Any, plan: Any, rounds: int = 1) -> Need:
    """Return the memory that `rounds` calls of a `Compiled` program need, and what is free."""
    temporary, returned = program.bytes
    sharing = 1 if plan.on_accelerator else len(plan.devices)  # a CPU's share a memory; without any, the process dies
    need = sharing * (temporary + rounds * returned)
    return Need(need, free_memory(plan.devices))


def fitting(compile: Callable, plan: Any, rounds: int = 1) -> tuple[Any, int]:
    """Return (`compile()`, the plan's block), or a smaller block if the program needs more memory than is free.

    On an accelerator the compiler runs products and may itself lack memory: then the program is None.
    """
    try:
        program = compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error) or plan.block == 1:
            raise
        return None, max(1, plan.block // 4)
    return program, fitting_block(program, plan, rounds)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device had too little memory."""
    message = repr(error)
    return "RESOURCE_EXHAUSTED" in message and "hared memory" not in message  # which belongs to a multiprocessor


def fitting_block(program: Any, plan: Any, rounds: int = 1) -> int:
    """Return the plan's block, or a smaller one if this program needs more memory than is free.

    A CPU's block is halved. An accelerator's is computed from the needs of this program, of which the temporary memory
    grows with the block. Raises MemoryError if not even one member at a time fits.
    """
    need = needs(program, plan, rounds)
    if need.bytes < need.free:
        return plan.block
    temporary, returned = program.bytes
    available = HEADROOM * need.free - rounds * returned
    proportional = int(plan.block * available / max(temporary, 1))
    block = min(proportional, plan.block - 1) if plan.on_accelerator else plan.block // 2
    if block >= 1:
        return block
    message = f"Out of memory: {need.bytes / 2**30:.1f} GiB are needed, more than is free"
    raise MemoryError(f"{message}; take fewer members, fewer at a time (Plan(block=...)) or smaller batches.")
