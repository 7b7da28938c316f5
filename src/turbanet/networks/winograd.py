"""3 x 3 convolution by minimal filtering: 16 products for a 2 x 2 tile of the output, where the window itself has 36.

Winograd's, as F(2 x 2, 3 x 3) in Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from turbanet.networks.products import product


def transformed(kernel: jax.Array) -> list[jax.Array]:
    """The right sides of the 16 products, [channel, feature] each, of a kernel [3, 3, channel, feature]."""
    # Split, not indexed: the gradients of kernel[i, j] would be padded with zeros and added.
    taps = [tap.reshape(kernel.shape[2:]) for tap in lax.split(kernel.reshape(9, *kernel.shape[2:]), [1] * 9)]
    return _both_axes(_transformed_window, [taps[i : i + 3] for i in range(0, 9, 3)])


def convolve(x: jax.Array, kernel: list[jax.Array], **settings: Any) -> jax.Array:
    """x [batch, height, width, channel], `transformed` kernel -> [batch, height - 2, width - 2, feature].

    Equals `lax.conv_general_dilated` at stride 1 but for rounding; `settings` go to `product`.
    """
    batch, height, width, _ = x.shape
    tiles_down = (height - 1) // 2
    tiles_across = (width - 1) // 2
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    places = [_places(row, 2, tiles_across) for row in _places(x, 1, tiles_down)]
    tiles = _both_axes(_transformed_input, places)
    products = [product(tile, side, **settings) for tile, side in zip(tiles, kernel)]
    out = _both_axes(_transformed_output, [products[i : i + 4] for i in range(0, 16, 4)])
    out = jnp.stack([jnp.stack(out[:2], 3), jnp.stack(out[2:], 3)], 2)  # [batch, tile, row, tile, column, feature]
    return out.reshape(batch, 2 * tiles_down, 2 * tiles_across, -1)[:, : height - 2, : width - 2]


def _places(x, axis, tiles):
    """What each of the 4 places of a tile sees along one axis; the tiles begin at every other position."""
    return [lax.slice_in_dim(x, i, i + 2 * tiles - 1, 2, axis) for i in range(4)]


def _both_axes(transform, parts):
    """parts[row][column], transformed along the rows, then along the columns: a flat list, row by row."""
    columns = [transform([row[j] for row in parts]) for j in range(len(parts[0]))]
    return [out for row in zip(*columns) for out in transform(row)]


def _transformed_input(d):
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _transformed_window(w):
    ends = (w[0] + w[2]) / 2
    middle = w[1] / 2
    return [w[0], ends + middle, ends - middle, w[2]]


def _transformed_output(m):
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]
