"""Compile programs of one member for all members at once, and keep them by what they compute."""

import dataclasses
import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import numpy as np

from turbanet.core import cache
from turbanet.core.cache import read
from turbanet.data.examples import join, split
from turbanet.training.program import Train

TRACE_SETTINGS = "jax_enable_x64", "jax_default_matmul_precision"  # of JAX, that a traced program depends on


@dataclasses.dataclass(eq=False)
class Compiled:
    """A compiled program, (*arguments, **numbers) -> outputs; it holds no reference to the caller's functions."""

    executable: Any  # takes the leaves of the arguments
    updates: bool  # whether it takes the memory of its first argument, and returns that as its first output
    seconds: float  # of tracing and compiling
    pace: float = float("inf")  # seconds of an epoch, or of a step of a part, of one round in the last call

    @cached_property
    def bytes(self) -> tuple[int, int]:
        """Return the (temporary, returned) bytes of memory of a call; kept, as the analysis takes milliseconds."""
        sizes = self.executable.memory_analysis()
        returned = max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0) if sizes else 0
        return (sizes.temp_size_in_bytes if sizes else 0), returned

    def __call__(self, *arguments, **numbers):
        first, *others = arguments
        numbers = {name: np.int32(number) for name, number in numbers.items()}
        out = self.executable(jax.tree.leaves(first), jax.tree.leaves(tuple(others)), numbers)
        return (jax.tree.unflatten(jax.tree.structure(first), out[0]), *out[1:]) if self.updates else out


def compiled(program, plan, state, data) -> Compiled:
    """Return `program` compiled for all members of a round, from the cache if an equal one was compiled before.

    state: [member, ...]; data: a tuple of `Data`, None for missing data; both as the plan places them. Programs,
    models, optimizers and schedules are equal if their fingerprints are; what cannot be fingerprinted compiles again.
    A program that trains also takes how far: `epochs`, or the keywords of a `Part`.
    """
    return compile_in_thread(program, plan, state, data).result()


def compile_in_thread(program, plan, state, data) -> Future[Compiled]:
    """Trace as `compiled` does, and compile in a thread; the process exits only when that thread has ended."""
    names = inspect.getfullargspec(program).kwonlyargs

    def one_member(member, shared):
        state, own = member
        shared, numbers = shared
        return program(state, *join(own, shared), **dict(zip(names, numbers, strict=True)))

    def all_members(state, data, *numbers):
        own, shared = split(data)
        return plan.vectorise(one_member)((state, own), (shared, numbers))

    key = identity(program, plan, state, data)
    before = _programs().get(key)
    if before and before.done() and before.exception():  # such as too little memory, which may be free by now
        _programs().pop(key, None)
    state = state.replace(loss_fn=None, sample=None)  # which no program reads
    build = partial(_compile_in_thread, all_members, plan, (state, data), names, isinstance(program, Train))
    return remembered(key, build)


def on_devices(
    program: Any,
    function: Callable,
    plan: Any,
    first: Any,
    *others: Any,
    names: tuple = (),
    specs: Any = None,
    **options,
) -> Compiled:
    """Return `function(first, *others, *numbers)`, of all members of a device, compiled for the plan's devices; cached.

    It returns `first` updated, and further outputs. Members may communicate, on several devices over the axis "member".

    Parameters
    ----------
    program : what the function computes by, for the cache
    first, others : as the plan places them; `first` is a swarm's state, or a tuple that begins with one
    names : of the whole numbers that come with each call
    specs : (in_specs, out_specs) of `jax.shard_map` for several devices; None: XLA partitions the function
    options : of `jax.jit`
    """
    if specs and len(plan.devices) > 1:
        function = jax.shard_map(function, mesh=plan.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    state, *rest = first if isinstance(first, tuple) else (first,)
    key = identity(program, plan, state, (rest, others))
    build = partial(_compile_in_thread, function, plan, (first, *others), names, True, **options)
    return remembered(key, lambda: build().result())


def _compile_in_thread(function, plan, arguments, names, updates, **options):
    """Trace function(*arguments, *numbers) on leaves, and start compiling it in a thread."""
    first, *others = arguments
    trees = jax.tree.structure(first), jax.tree.structure(tuple(others))

    def on_leaves(first, others, numbers):
        first, others = map(jax.tree.unflatten, trees, (first, others))
        out = function(first, *others, *(numbers[name] for name in names))
        return (jax.tree.leaves(out[0]), *out[1:]) if updates else out

    begin = time.perf_counter()
    leaves = jax.tree.leaves(first), jax.tree.leaves(others)
    numbers = {name: jax.ShapeDtypeStruct((), np.int32) for name in names}
    lowered = plan.lower(on_leaves, *leaves, numbers, donate_argnums=(0,) if updates else (), **options)
    executor = ThreadPoolExecutor(1, "turbanet-compile")
    future = executor.submit(lambda: Compiled(lowered.compile(), updates, time.perf_counter() - begin))
    executor.shutdown(wait=False)
    return future


def identity(program: Any, plan: Any, state: Any, others: Any) -> tuple:
    """Return the cache key of `program` for these arguments, as the plan places them or as shapes and types."""
    schedule = state.schedule and state.schedule.replace(functions=())
    bare = state.replace(apply_fn=None, tx=None, loss_fn=None, sample=None, schedule=schedule)
    leaves, tree = jax.tree.flatten((bare, others))
    types = tuple((getattr(leaf, "aval", leaf), leaf.sharding) for leaf in leaves)
    kind = type(program) if vars(program) else program  # a function of ours, which has no fields
    settings = (getattr(jax.config, name) for name in TRACE_SETTINGS)
    # As a plain string: a fingerprint holds what it read, such as arrays of a loss, and the program does not need it.
    found = read(program, state.apply_fn, state.tx, state.schedule and state.schedule.functions)
    return kind, str(found), tree, types, plan, *settings


def remembered(key: Any, make: Callable, entries: dict | None = None) -> Any:
    """Return `cache.remembered` of these entries, by default of the programs."""
    return cache.remembered(_programs() if entries is None else entries, key, make)


def forget():
    """Clear all compiled programs: the next call compiles, or reads JAX's cache on disk, as in a new process."""
    cache.fingerprints.cache_clear()
    _programs.cache_clear()
    refusals.cache_clear()
    jax.clear_caches()


@lru_cache
def _programs():
    """Return the cache of `remembered`, {key: value}."""
    return {}


@lru_cache
def refusals() -> dict:
    """Return {identity of a program: why no kernel trains it, "" if one does}; see `kernel`."""
    return {}
