"""Sums of many numbers, one after the other, from which rounding takes nothing (Kahan 1965)."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

Sum: TypeAlias = tuple[jax.Array, jax.Array]  # the sum, and by how much it is too large


def zero() -> Sum:
    """The sum of no numbers."""
    return jnp.zeros(()), jnp.zeros(())


def added(total: Sum, value: jax.Array) -> Sum:
    """The sum with one number more, in float32 off by a rounding or two after any number of them."""
    before, excess = total
    value = value.astype(before.dtype) - excess
    after = before + value
    excess = (after - before) - value
    return after, jnp.where(jnp.isfinite(excess), excess, 0)  # an infinite sum stays so
