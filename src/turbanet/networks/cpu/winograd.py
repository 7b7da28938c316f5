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

from turbanet.networks.cpu.products import trilinear

CHUNK_BYTES = 2**23  # of tiles at a time
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
    return _filtered(x, kernel, kernel.shape[4], padding, "pmnc,pmcf->pmnf", INPUT, OUTPUT, settings)


def _backward_to_x(g, kernel, *, padding, **settings):
    """Gradient of x: the convolution of g with the flipped kernel, whose transform is the kernel's, reordered."""
    padding = [(2 - before, 2 - after) for before, after in padding]
    return _filtered(g, kernel, kernel.shape[3], padding, "pmnf,pmcf->pmnc", INPUT[FLIP], OUTPUT[:, FLIP], settings)


def _backward_to_kernel(g, x, *, padding, **settings):
    height, width = g.shape[2:4]

    def of_chunk(x, g):
        g = jnp.pad(g, [(0, 0), (0, 0), (0, height % 2), (0, width % 2), (0, 0)])
        corners = jnp.stack([g[:, :, i::2, j::2] for i in range(2) for j in range(2)])
        products = _flat(_transformed(OUTPUT.T, corners))
        tiles = _flat(_transformed(INPUT, _tiles(x, padding)))
        return jnp.einsum("pmnc,pmnf->pmcf", tiles, products, **settings)

    chunks = _chunks(x, height, width)
    x, g = _cut(x, chunks), _cut(g, chunks)
    total = of_chunk(x[0], g[0])
    if chunks > 1:
        total = lax.fori_loop(1, chunks, lambda i, total: total + of_chunk(x[i], g[i]), total)
    gradient = jnp.moveaxis(_transformed(WINDOW.T, total), 0, 1)
    return gradient.reshape(len(gradient), 3, 3, *gradient.shape[2:])


def _filtered(x, kernel, features, padding, products, enter, leave, settings):
    members, batch = x.shape[:2]
    height, width = (size + sum(pads) - 2 for size, pads in zip(x.shape[2:4], padding))
    window = _transformed(WINDOW, jnp.moveaxis(kernel.reshape(members, 9, *kernel.shape[3:]), 1, 0))

    def of_chunk(x):
        tiles = _transformed(enter, _tiles(x, padding))
        _, _, batch, down, across, _ = tiles.shape
        corners = _transformed(leave, jnp.einsum(products, _flat(tiles), window, **settings))
        out = corners.reshape(2, 2, members, batch, down, across, features).transpose(2, 3, 4, 0, 5, 1, 6)
        return out.reshape(members, batch, 2 * down, 2 * across, features)[:, :, :height, :width]

    chunks = _chunks(x, height, width)
    if chunks == 1:
        return of_chunk(x)
    out = jnp.moveaxis(lax.map(of_chunk, _cut(x, chunks)), 0, 1)
    return out.reshape(members, -1, height, width, features)[:, :batch]


def _tiles(x, padding):
    """Return the overlapping 4 x 4 tiles of x: [position, member, batch, tile down, tile across, channel]."""
    pads = [(before, after + (size + before + after) % 2, 0) for size, (before, after) in zip(x.shape[2:4], padding)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *pads, (0, 0, 0)])
    height, width = x.shape[2:4]
    rows = jnp.stack([lax.slice_in_dim(x, i, i + height - 3, 2, 2) for i in range(4)])
    tiles = jnp.stack([lax.slice_in_dim(rows, i, i + width - 3, 2, 4) for i in range(4)], 1)
    return tiles.reshape(16, *tiles.shape[2:])


def _transformed(matrix, x):
    """Transform x [position, ...] by `matrix` along both axes of the positions in a tile."""
    both = np.kron(matrix, matrix).astype(x.dtype)
    out = jnp.matmul(both, x.reshape(len(x), math.prod(x.shape[1:])), precision=lax.Precision.HIGHEST)
    return out.reshape(len(both), *x.shape[1:])


def _flat(tiles):
    """[position, member, batch, tile down, tile across, channel] -> [position, member, tile, channel]."""
    return tiles.reshape(*tiles.shape[:2], math.prod(tiles.shape[2:5]), tiles.shape[5])


def _chunks(x, height, width):
    """Return the number of chunks of at most `CHUNK_BYTES` of tiles of x, for an output of this size."""
    members, batch, *_, channels = x.shape
    tiles_bytes = members * 16 * -(-height // 2) * -(-width // 2) * channels * x.dtype.itemsize
    return max(1, -(-batch // max(1, CHUNK_BYTES // tiles_bytes)))


def _cut(x, chunks):
    """Split x into chunks of its batch, padded with zeros, which add nothing to the gradient of the kernel."""
    members, batch, *image = x.shape
    size = -(-batch // chunks)
    x = jnp.pad(x, [(0, 0), (0, chunks * size - batch), *[(0, 0)] * len(image)])
    return jnp.moveaxis(x.reshape(members, chunks, size, *image), 1, 0)


_convolution = trilinear("winograd", _forward, _backward_to_x, _backward_to_kernel)
