"""plan="auto": a few blocks tried on the real data, the fastest that fits in memory remembered on disk."""

import dataclasses
import json
import os
import platform
import time
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import jax

from turbanet.training.data import placed
from turbanet.training.fingerprint import fingerprint
from turbanet.training.plan import Candidate, Plan, cache_folder, say_once
from turbanet.training.program import Train, compiled, fits

SHARE = 0.05  # of a run's projected seconds that its search may take
PROBE_SECONDS, PROBE_STEPS = 0.1, 64  # of each candidate: at least these seconds, in calls of so many steps
FORMAT = 3  # of the file, and in its name
FOLDER = "TURBANET_PLANS"  # the variable that names where plans are kept, if not in the cache folder


def search(program, swarm, data, start, *, seconds, compile_seconds=0.0) -> Plan:
    """The fastest block for a training, climbing from that of the plan `start`, remembered.

    Parameters
    ----------
    program : `program.Train`
    swarm : the members in training
    data : their training `Data`, not placed
    start : the plan with the devices to train on and the block that is tried first
    seconds : about how long the search may take
    compile_seconds : what one compilation is expected to take

    Each candidate trains copies of the first members, one block a device; they are thrown away.
    """
    begin = time.perf_counter()
    program = Train(program.loss_fn, program.batch_size, most_steps=PROBE_STEPS)
    tried = {}
    front = [start.block, 2 * start.block, start.block // 2]

    def time_left(candidates=1):
        compiling = max([compile_seconds, *(candidate.compile_seconds for candidate in tried.values())])
        return time.perf_counter() - begin + candidates * (compiling + 2 * PROBE_SECONDS) < seconds

    def balanced(block):
        return Plan(start.devices, max(block, 1)).balanced(len(swarm))

    if not time_left(candidates=2):
        return start
    while front:
        for plan in map(balanced, front):
            if plan.block not in tried and time_left():
                tried[plan.block] = _probe(program, swarm, data, plan)
        best = min(tried, key=lambda block: (tried[block].seconds, block))
        front = [b for b in (2 * best, best // 2) if balanced(b).block not in tried] if time_left() else []
    if tried[best].seconds == float("inf"):
        return start
    candidates = tuple(tried[block] for block in sorted(tried))
    _remember(program, swarm, data, start.devices, candidates)
    return Plan(start.devices, best, candidates)


def recall(program, swarm, data, *, devices) -> Plan | None:
    """The plan that an earlier search found for this model, these shapes and this machine; None if there is none."""
    try:
        found = json.loads(_file(program, swarm, data, devices).read_text())
        candidates = tuple(Candidate(**candidate) for candidate in found)
        return Plan(devices, min(candidates, key=lambda candidate: candidate.seconds).block, candidates)
    except (OSError, ValueError, TypeError):  # absent, unreadable or garbage
        return None


def _probe(program, swarm, data, plan):
    """What `plan` costs, as a Candidate; infinite seconds where it does not fit in memory."""
    few = plan.block * len(plan.devices)
    steps = program.steps(data.length)
    epochs = -(-PROBE_STEPS // steps)
    state = plan.place(swarm, range(few))
    (data,) = placed((data,), plan, [range(few)])
    begin = time.perf_counter()
    ready = compiled(program, plan, state, data)
    compile_seconds = time.perf_counter() - begin
    need = fits(ready, plan)
    seconds = []
    while need.enough and (len(seconds) < 2 or sum(seconds[1:]) < PROBE_SECONDS):  # the first call warms up
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(ready(state, data, epochs=epochs))
        seconds.append(time.perf_counter() - begin)
    filled = plan.padded(len(swarm)) / len(swarm)  # members that only fill a block cost as much as others
    each = filled * min(seconds[1:], default=float("inf")) / (few * epochs * steps)
    return Candidate(plan.block, each, compile_seconds, need.bytes / 2**20)


def _file(program, swarm, data, devices):
    """Where the plan for this task is kept: named by all that may change which block is best.

    ValueError if part of it cannot be read, as its name would never come again.
    """
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), (swarm.params, swarm.opt_state, data))
    machine = [_processor(), os.cpu_count(), [device.device_kind for device in devices]]
    versions = [version(package) for package in ("turbanet", "jax", "jaxlib", "flax", "optax")]
    task = fingerprint([FORMAT, swarm.apply_fn, program.loss_fn, program.batch_size, shapes, machine, versions])
    if task.opaque:
        raise ValueError(f"{', '.join(task.opaque)} cannot be read: leave it out")
    return Path(os.environ.get(FOLDER) or cache_folder("plans")) / f"{task}.json"


@lru_cache
def _processor():
    """What kind of processor this machine has: machines of one kind, such as nodes of a cluster, share their plans."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    return platform.machine(), next((line for line in lines if line.startswith("model name")), lines[0])


def _remember(program, swarm, data, devices, candidates):
    """Keep the candidates for `recall`; where that cannot be, a search next time is all it costs."""
    try:
        file = _file(program, swarm, data, devices)
        part = file.with_suffix(f".{os.getpid()}")  # a file is there whole or not at all
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps([dataclasses.asdict(candidate) for candidate in candidates]))
        part.replace(file)
    except (OSError, ValueError) as error:
        say_once(f"The measured plan could not be kept ({error}); for another folder, set TURBANET_CACHE.")
