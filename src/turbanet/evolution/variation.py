"""Crossover and mutation of one child's weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def uniform(key: jax.Array, first: Any, second: Any) -> Any:
    """Uniform crossover: take each weight from one parent or the other with equal probability (Syswerda 1989)."""
    coins = _like(first, lambda shape: jax.random.bernoulli(key, shape=shape))
    return jax.tree.map(jnp.where, coins, first, second)


def per_layer(key: jax.Array, first: Any, second: Any) -> Any:
    """Crossover by layer: take each layer, kernel and bias together, from one parent or the other.

    Leaves whose paths in params differ only in the last name form a layer.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(first)]
    layers = list(dict.fromkeys(path[:-1] for path in paths))
    of_first = jax.random.bernoulli(key, shape=(len(layers),))
    return jax.tree_util.tree_map_with_path(
        lambda path, a, b: jnp.where(of_first[layers.index(path[:-1])], a, b), first, second
    )


def gaussian(key: jax.Array, params: Any, scale: Any) -> Any:
    """Gaussian mutation: add noise of standard deviation `scale`, a number or a tree of them for layers or leaves."""
    noise = _like(params, lambda shape: jax.random.normal(key, shape))
    scales = jax.tree.broadcast(scale, params)
    return jax.tree.map(lambda leaf, noise, scale: (leaf + scale * noise).astype(leaf.dtype), params, noise, scales)


def _like(params, draw):
    """Return a tree like `params` of random numbers, from a single draw((size,)), which compiles faster than many."""
    leaves, tree = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])
    drawn = jnp.split(draw((int(ends[-1]),)), ends[:-1])
    return jax.tree.unflatten(tree, [part.reshape(leaf.shape) for part, leaf in zip(drawn, leaves, strict=True)])


CROSSOVERS = {"uniform": uniform, "layer": per_layer}
