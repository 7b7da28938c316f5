"""Compensated summation of many numbers, one after the other (Kahan 1965)."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

Sum: TypeAlias = tuple[jax.Array, jax.Array]  # the sum, and its excess over the exact one


def zero() -> Sum:
    """Return the sum of no numbers."""
    return jnp.zeros(()), jnp.zeros(())


def added(total: Sum, value: jax.Array) -> Sum:
    """Return the sum with one more number; in float32 it is off by a rounding or two after any number of them."""
    before, excess = total
    value = value.astype(before.dtype) - excess
    after = before + value
    excess = (after - before) - value
    return after, jnp.where(jnp.isfinite(excess), excess, 0)  # an infinite sum stays so
