"""The time of compilation, measured as in a new process on a machine without a compilation cache."""

import contextlib
import math
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from turbanet.training import compilation


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Compile every program anew inside the block, without programs in memory and without JAX's cache on disk.

    Afterwards programs compiled inside stay in memory, and the cache on disk is used again if it was before.
    """
    used = jax.config.jax_enable_compilation_cache
    compilation.forget()
    _use_disk(False)
    try:
        yield
    finally:
        _use_disk(used)


def compile_seconds(reported: float, first: float, warm: float) -> float:
    """Return the reported seconds of compilation or, where these are NaN, the first run's beyond a warm one's."""
    return max(0.0, first - warm) if math.isnan(reported) else reported


def _use_disk(used):
    jax.config.update("jax_enable_compilation_cache", used)
    compilation_cache.reset_cache()  # JAX reads this setting only once
