"""plan="auto": a few blocks tried on the real data, the fastest that fits in memory remembered on disk."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import jax

from turbanet.training.plan import Candidate, Plan, resized, say_once
from turbanet.training.program import compiled, fits

SHARE = 0.05  # of a run's projected seconds that its search may take
PROBE_SECONDS, PROBE_STEPS = 0.1, 64  # of each candidate: at least these seconds, in calls of so many steps
FORMAT = 1  # of the file; another one is ignored


def search(one, swarm, own, shared, *, devices, start, seconds, compile_seconds=0.0) -> Plan:
    """The fastest block for `one` (a `program.Train`), climbing from `start`, within about `seconds`; remembered.

    own, shared: the training data as `fit` sorts them, not yet placed. compile_seconds: what one compilation is
    expected to take. Each candidate trains copies of the first members, one block a device; they are thrown away.
    """
    begin, compiling = time.perf_counter(), [compile_seconds]
    one, tried, front = one.probe(PROBE_STEPS), {}, [start, 2 * start, start // 2]

    def time_left(candidates=1):
        spent = time.perf_counter() - begin
        return spent + candidates * (max(compiling) + 2 * PROBE_SECONDS) < seconds

    def balanced(block):
        return Plan(devices, max(block, 1)).balanced(len(swarm))

    if not time_left(candidates=2):
        return Plan(devices, start)
    while front:
        for plan in map(balanced, front):
            if plan.block not in tried and time_left():
                tried[plan.block] = candidate = _probe(one, swarm, own, shared, plan)
                compiling.append(candidate.compile_seconds)
        best = min(tried, key=lambda block: (tried[block].seconds, block))
        front = [b for b in (2 * best, best // 2) if balanced(b).block not in tried] if time_left() else []
    candidates = tuple(tried[block] for block in sorted(tried))
    best = min(candidates, key=lambda candidate: candidate.seconds)
    if math.isinf(best.seconds):
        return Plan(devices, start)
    _remember(_file(one, swarm, own, shared, devices), candidates)
    return Plan(devices, best.block, candidates)


def recall(one, swarm, own, shared, *, devices) -> Plan | None:
    """The plan that an earlier search found for this model, these shapes and this machine; None if there is none."""
    try:
        found = json.loads(_file(one, swarm, own, shared, devices).read_text())
        candidates = tuple(Candidate(**candidate) for candidate in found["candidates"])
        if found["format"] != FORMAT or not all(isinstance(c.block, int) and c.block >= 1 for c in candidates):
            return None
        return Plan(devices, min(candidates, key=lambda candidate: candidate.seconds).block, candidates)
    except (OSError, ValueError, TypeError, KeyError):  # absent, unreadable, garbage or of another version
        return None


def _probe(one, swarm, own, shared, plan):
    """What `plan` costs, as a Candidate; infinite seconds where it does not fit in memory."""
    few = plan.block * len(plan.devices)
    state, data = plan.place(resized(swarm, few)), plan.place({"train": resized(own, few)})
    shared = plan.share({"train": shared})
    begin = time.perf_counter()
    program = compiled(one, plan, state, data, shared)
    compile_seconds = time.perf_counter() - begin
    need = fits(program, plan)
    seconds = []
    while need.enough and (len(seconds) < 2 or sum(seconds[1:]) < PROBE_SECONDS):  # the first call warms up
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(program(state, data, shared))
        seconds.append(time.perf_counter() - begin)
    filled = plan.padded(len(swarm)) / len(swarm)  # members that only fill a block cost as much as others
    each = filled * min(seconds[1:], default=math.inf) / (few * one.steps)
    return Candidate(plan.block, each, compile_seconds, need.bytes / 2**20)


def _file(one, swarm, own, shared, devices):
    """Where the plan for this task is kept: named by all that may change which block is best."""
    model = getattr(swarm.apply_fn, "__self__", swarm.apply_fn)
    facts = [
        FORMAT,
        repr(model) if model is not swarm.apply_fn else getattr(model, "__qualname__", type(model).__name__),
        getattr(one.loss_fn, "__qualname__", repr(one.loss_fn)),
        one.batch_size,
        repr(one.layout),
        repr(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), (swarm.params, swarm.opt_state, own, shared))),
        [device.device_kind for device in devices],
        [platform.node(), platform.machine(), os.cpu_count()],
        [version(package) for package in ("turbanet", "jax", "jaxlib", "flax", "optax")],
    ]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    home = os.environ.get("TURBANET_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "turbanet"
    return Path(home).expanduser() / "plans" / f"{name}.json"


def _remember(file, candidates):
    """Write the file whole or not at all; a cache that cannot be written costs a search next time, nothing else."""
    text = json.dumps({"format": FORMAT, "candidates": [dataclasses.asdict(c) for c in candidates]}, indent=1)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(file)
    except OSError as error:
        say_once(f"The measured plan could not be kept ({error}); TURBANET_CACHE names another folder.")
