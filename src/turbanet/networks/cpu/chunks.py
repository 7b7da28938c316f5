"""A function of a batch, computed for as much of it at a time as a core's cache holds."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def in_chunks(function: Callable, x: jax.Array, most: int) -> jax.Array:
    """Return function(x) for at most so many rows of x at a time; it is computed again for its gradients."""
    if len(x) <= most:
        return function(x)
    out = lax.map(jax.checkpoint(function), cut(x, most))
    return out.reshape(-1, *out.shape[2:])[: len(x)]


def cut(x: jax.Array, most: int) -> jax.Array:
    """Return x as equal chunks of at most so many rows: [chunk, row, ...], with rows of zeros at the end."""
    chunks = max(1, -(-len(x) // most))
    size = -(-len(x) // chunks)
    x = jnp.pad(x, [(0, chunks * size - len(x)), *[(0, 0)] * (x.ndim - 1)])
    return x.reshape(chunks, size, *x.shape[1:])
