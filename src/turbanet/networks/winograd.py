"""3 x 3 convolution by minimal filtering: 16 products for a 2 x 2 tile of the output, where the window itself has 36.

Winograd's, as F(2 x 2, 3 x 3) in Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). Each of
its transforms is one product with a constant matrix: a program of few operations compiles fast.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from turbanet.networks.products import trilinear

CHUNK_BYTES = 2**23  # of tiles at a time
# Along one axis: what makes of 4 numbers of the input, 3 of the window and 4 products what is multiplied and what is
# the output.
INPUT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
WINDOW = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
OUTPUT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
TURNED = [3, 1, 2, 0]  # the rows of WINDOW for a window that is turned round


def convolve(x: jax.Array, kernel: jax.Array, padding: Sequence[tuple[int, int]], **settings: Any) -> jax.Array:
    """x [batch, height, width, channel], kernel [3, 3, channel, feature] -> [batch, height, width, feature].

    Equals `lax.conv_general_dilated` at stride 1 but for rounding. padding: (before, after) of the height and of the
    width; `settings` go to the products, as `jax.lax.dot_general` takes them.
    """
    return _convolution(x, kernel, padding=tuple(map(tuple, padding)), **settings)


def _forward(x, kernel, *, padding, **settings):
    return _filtered(x, kernel, kernel.shape[4], padding, "pmnc,pmcf->pmnf", INPUT, OUTPUT, settings)


def _backward_to_x(g, kernel, *, padding, **settings):
    """The convolution of g with the kernel turned round, whose transform is the kernel's own in another order."""
    padding = [(2 - before, 2 - after) for before, after in padding]
    return _filtered(g, kernel, kernel.shape[3], padding, "pmnf,pmcf->pmnc", INPUT[TURNED], OUTPUT[:, TURNED], settings)


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
    """What the 16 places of each tile see of x: [place, member, batch, tile down, tile across, channel]."""
    pads = [(before, after + (size + before + after) % 2, 0) for size, (before, after) in zip(x.shape[2:4], padding)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *pads, (0, 0, 0)])
    height, width = x.shape[2:4]
    rows = jnp.stack([lax.slice_in_dim(x, i, i + height - 3, 2, 2) for i in range(4)])
    places = jnp.stack([lax.slice_in_dim(rows, i, i + width - 3, 2, 4) for i in range(4)], 1)
    return places.reshape(16, *places.shape[2:])


def _transformed(matrix, x):
    """x [place, ...], its places along both axes transformed by `matrix`."""
    both = np.kron(matrix, matrix).astype(x.dtype)
    out = jnp.matmul(both, x.reshape(len(x), math.prod(x.shape[1:])), precision=lax.Precision.HIGHEST)
    return out.reshape(len(both), *x.shape[1:])


def _flat(tiles):
    """[place, member, batch, tile down, tile across, channel] -> [place, member, tile, channel]."""
    return tiles.reshape(*tiles.shape[:2], math.prod(tiles.shape[2:5]), tiles.shape[5])


def _chunks(x, height, width):
    """How many times as much as `CHUNK_BYTES` the tiles of x are, for an output of this size."""
    members, batch, *_, channels = x.shape
    tiles_bytes = members * 16 * -(-height // 2) * -(-width // 2) * channels * x.dtype.itemsize
    return max(1, -(-batch // max(1, CHUNK_BYTES // tiles_bytes)))


def _cut(x, chunks):
    """x in so many chunks of its batch, filled up with zeros, which add nothing to the gradient of the kernel."""
    members, batch, *image = x.shape
    size = -(-batch // chunks)
    x = jnp.pad(x, [(0, 0), (0, chunks * size - batch), *[(0, 0)] * len(image)])
    return jnp.moveaxis(x.reshape(members, chunks, size, *image), 1, 0)


_convolution = trilinear("winograd", _forward, _backward_to_x, _backward_to_kernel)
