"""3 x 3 convolution by minimal filtering: 16 products for a 2 x 2 tile of the output, where the window itself has 36.

Winograd's, as F(2 x 2, 3 x 3) in Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016).
"""

import jax.numpy as jnp
from jax import lax

from turbanet.networks.products import product


def transformed(w):
    """The 16 products' right sides, [channel, feature] each, of w [3, 3, channel, feature]."""
    taps = [tap.reshape(w.shape[2:]) for tap in lax.split(w.reshape(9, *w.shape[2:]), [1] * 9)]
    return _both_axes(_window, [taps[i : i + 3] for i in range(0, 9, 3)])  # not w[i, j]: its gradients would be padded


def convolve(x, window, **how):
    """x [batch, height, width, channel], `transformed` w -> [batch, height - 2, width - 2, feature].

    Equals `lax.conv_general_dilated` at stride 1 but for rounding; `how` goes to `product`.
    """
    batch, height, width, channels = x.shape
    down, across = (height - 1) // 2, (width - 1) // 2  # tiles
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    tiles = _both_axes(_input, [_places(row, 2, across) for row in _places(x, 1, down)])
    products = [product(tile.reshape(-1, channels), w, **how) for tile, w in zip(tiles, window)]
    products = [product.reshape(batch, down, across, -1) for product in products]
    out = _both_axes(_output, [products[i : i + 4] for i in range(0, 16, 4)])
    out = jnp.stack([jnp.stack(out[:2], 3), jnp.stack(out[2:], 3)], 2)  # [batch, tile, row, tile, column, feature]
    return out.reshape(batch, 2 * down, 2 * across, -1)[:, : height - 2, : width - 2]


def _places(x, axis, tiles):
    """What each of the 4 places of a tile sees along one axis; the tiles begin at every other position."""
    return [lax.slice_in_dim(x, i, i + 2 * tiles - 1, 2, axis) for i in range(4)]


def _both_axes(transform, parts):
    """parts[row][column], transformed along the rows, then along the columns: a flat list, row by row."""
    columns = [transform([row[j] for row in parts]) for j in range(len(parts[0]))]
    return [out for row in zip(*columns) for out in transform(row)]


def _input(d):
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _window(w):
    ends, middle = (w[0] + w[2]) / 2, w[1] / 2
    return [w[0], ends + middle, ends - middle, w[2]]


def _output(m):
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]
