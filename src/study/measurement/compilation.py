"""What compiling costs, measured as in a new process on a machine that compiled nothing before."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from turbanet.training import program


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Inside, whatever is called for the first time compiles: nothing from memory, nothing from JAX's cache on disk.

    What was compiled inside stays in memory after it, and the cache on disk is used again, if it was before.
    """
    used = jax.config.jax_enable_compilation_cache
    program.forget()
    _use_disk(False)
    try:
        yield
    finally:
        _use_disk(used)


def compile_seconds(apart: float, first: float, warm: float) -> float:
    """What compiling took: as the way says itself (apart; NaN: it does not), else its first run beyond a warm one."""
    return apart if apart == apart else max(0.0, first - warm)


def _use_disk(used):
    jax.config.update("jax_enable_compilation_cache", used)
    compilation_cache.reset_cache()  # JAX asks only once whether it uses the cache
