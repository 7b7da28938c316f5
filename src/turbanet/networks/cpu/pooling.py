"""Max pooling by comparison, for CPUs, where XLA's own is slow in a swarm."""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def max_pool(x: jax.Array) -> jax.Array:
    """Maximum of each 2 x 2 window: x [..., height, width, channel] -> [..., height // 2, width // 2, channel].

    Equals `nn.max_pool(x, (2, 2), (2, 2))`: an odd last row or column is left out, and the gradient goes to the first
    of equal values.
    """
    return _split(x).max((-4, -2))


@max_pool.defjvp
def _max_pool_jvp(primals, tangents):
    x = _split(primals[0])
    largest = max_pool(primals[0])
    first = jnp.full(largest.shape, 3, jnp.int8)  # the first position in the window whose value is no smaller
    for position in (2, 1, 0):
        # A comparison with NaN is false, so that a NaN gets the gradient and shows.
        first = jnp.where(x[..., position // 2, :, position % 2, :] < largest, first, jnp.int8(position))
    row = lax.broadcasted_iota(jnp.int8, x.shape, x.ndim - 4)
    column = lax.broadcasted_iota(jnp.int8, x.shape, x.ndim - 2)
    selected = 2 * row + column == first[..., :, None, :, None, :]
    return largest, jnp.where(selected, _split(tangents[0]), 0).sum((-4, -2))


def _split(x):
    """Split x [..., height, width, channel] into 2 x 2 windows [..., height // 2, 2, width // 2, 2, channel]."""
    *lead, height, width, channel = x.shape
    x = x[..., : height // 2 * 2, : width // 2 * 2, :]
    return x.reshape(*lead, height // 2, 2, width // 2, 2, channel)
