"""3 x 3 convolution by Winograd's minimal filtering: 16 products per 2 x 2 tile of the output instead of 36.

It is F(2 x 2, 3 x 3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). Each transform is
one product with a constant matrix, as a program of few operations compiles fast.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from turbanet.networks.cpu.chunks import cut, in_chunks
from turbanet.networks.cpu.products import bilinear

CHUNK_BYTES = 2**23  # of a member's tiles at a time
# Transforms along one axis: of 4 numbers of the input, of 3 of the window, and of 4 products into 2 outputs.
INPUT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
WINDOW = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
OUTPUT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
FLIP = [3, 1, 2, 0]  # the rows of WINDOW for a flipped window


def convolve(x: jax.Array, kernel: jax.Array, padding: Sequence[tuple[int, int]], **settings: Any) -> jax.Array:
    """Convolve x [batch, height, width, channel] with kernel [3, 3, channel, feature].

    Returns [batch, height, width, feature], equal to `lax.conv_general_dilated` at stride 1 up to rounding. padding:
    (before, after) of the height and of the width; `settings` are arguments of `jax.lax.dot_general` for the products.
    """
    return _convolution(x, kernel, padding=tuple(map(tuple, padding)), **settings)


def _forward(x, kernel, *, padding, **settings):
    return _filtered(x, kernel, padding, "pnc,pcf->pnf", INPUT, OUTPUT, settings)


def _backward_to_x(g, kernel, *, padding, **settings):
    """Gradient of x: the convolution of g with the flipped kernel, whose transform is the kernel's, reordered."""
    padding = [(2 - before, 2 - after) for before, after in padding]
    return _filtered(g, kernel, padding, "pnf,pcf->pnc", INPUT[FLIP], OUTPUT[:, FLIP], settings)


def _backward_to_kernel(g, x, *, padding, **settings):
    def of_chunk(x, g):
        g = jnp.pad(g, [(0, 0), (0, g.shape[1] % 2), (0, g.shape[2] % 2), (0, 0)])
        corners = jnp.stack([g[:, i::2, j::2] for i in range(2) for j in range(2)])
        products = _flat(_transformed(OUTPUT.T, corners))
        tiles = _flat(_transformed(INPUT, _tiles(x, padding)))
        return jnp.einsum("pnc,pnf->pcf", tiles, products, **settings)

    most = _most(x, *g.shape[1:3])
    x, g = cut(x, most), cut(g, most)  # rows of zeros add nothing
    total = lax.fori_loop(1, len(x), lambda i, total: total + of_chunk(x[i], g[i]), of_chunk(x[0], g[0]))
    return _transformed(WINDOW.T, total).reshape(3, 3, *total.shape[1:])


def _filtered(x, kernel, padding, products, enter, leave, settings):
    height, width = (size + sum(pads) - 2 for size, pads in zip(x.shape[1:3], padding))
    window = _transformed(WINDOW, kernel.reshape(9, *kernel.shape[2:]))

    def of_chunk(x):
        tiles = _transformed(enter, _tiles(x, padding))
        _, batch, down, across, _ = tiles.shape
        corners = jnp.einsum(products, _flat(tiles), window, **settings)
        features = corners.shape[2]
        out = _transformed(leave, corners).reshape(2, 2, batch, down, across, features).transpose(2, 3, 0, 4, 1, 5)
        return out.reshape(batch, 2 * down, 2 * across, features)[:, :height, :width]

    return in_chunks(of_chunk, x, _most(x, height, width))


def _tiles(x, padding):
    """Return the overlapping 4 x 4 tiles of x: [position, batch, tile down, tile across, channel]."""
    pads = [(before, after + (size + before + after) % 2, 0) for size, (before, after) in zip(x.shape[1:3], padding)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    height, width = x.shape[1:3]
    rows = jnp.stack([lax.slice_in_dim(x, i, i + height - 3, 2, 1) for i in range(4)])
    tiles = jnp.stack([lax.slice_in_dim(rows, i, i + width - 3, 2, 3) for i in range(4)], 1)
    return tiles.reshape(16, *tiles.shape[2:])


def _transformed(matrix, x):
    """Transform x [position, ...] by `matrix` along both axes of the positions in a tile."""
    both = np.kron(matrix, matrix).astype(x.dtype)
    out = jnp.matmul(both, x.reshape(len(x), math.prod(x.shape[1:])), precision=lax.Precision.HIGHEST)
    return out.reshape(len(both), *x.shape[1:])


def _flat(tiles):
    """[position, batch, tile down, tile across, channel] -> [position, tile, channel]."""
    return tiles.reshape(len(tiles), math.prod(tiles.shape[1:4]), tiles.shape[4])


def _most(x, height, width):
    """Return the number of images of x whose tiles take `CHUNK_BYTES`, for an output of this size."""
    return max(1, CHUNK_BYTES // (16 * -(-height // 2) * -(-width // 2) * x.shape[3] * x.dtype.itemsize))


_convolution = bilinear("winograd", _forward, _backward_to_x, _backward_to_kernel)
