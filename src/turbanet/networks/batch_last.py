"""Convolution with the batch as the last axis: few channels fill the vector units so."""

import jax
import jax.numpy as jnp
from jax import lax

from turbanet.networks.products import bilinear

ROWS_BYTES = 5 * 2**18  # of windows laid out at a time


def batch_last_conv(x, kernel, padding: int = 0):
    """A convolution with the batch as the last axis, which fills vectors that few channels leave half empty.

    x: [channel, height, width, batch], kernel: [row, column, channel, feature] -> [feature, height, width, batch], by
    stride 1 with `padding` zeros on each side. What the windows see is laid out for as many rows of the image at a time
    as a core's cache holds, and again for the gradients.
    """
    keeps_size = 2 * padding + 1 == kernel.shape[0] == kernel.shape[1]
    return _same_size(x, kernel, window=len(kernel)) if keeps_size else _slide(x, kernel, padding)


def _kept_size(x, kernel, *, window=None):
    """`_slide` whose output is as large as x: so is the gradient of x, by sliding the kernel over it the other way."""
    return _slide(x, kernel, len(kernel) // 2, differentiated=False)


def _of_image(g, kernel, *, window):
    return _kept_size(g, kernel[::-1, ::-1].swapaxes(2, 3))


def _of_kernel(g, x, *, window):
    x = _padded(x, window // 2)
    shape = (window, window, len(x), len(g))
    rows = _rows_at_a_time(x, shape)

    def some(i):
        part = lax.dynamic_slice_in_dim(x, i * rows, rows + window - 1, 1)
        own = lax.dynamic_slice_in_dim(g, i * rows, rows, 1)
        return jnp.einsum("kn,fn->kf", _windows_seen(part, shape), own.reshape(len(g), -1))

    total = lax.fori_loop(1, g.shape[1] // rows, lambda i, total: total + some(i), some(0))
    return total.reshape(shape)


def _slide(x, kernel, padding, *, differentiated=True):
    """The convolution; if JAX differentiates it, parts are cut before and laid out again for the gradients."""
    x, size, features = _padded(x, padding), len(kernel), kernel.shape[-1]
    height, width = x.shape[1] - size + 1, x.shape[2] - kernel.shape[1] + 1
    if height < 1 or width < 1:
        raise ValueError(f"The window {kernel.shape[:2]} is larger than the padded input {x.shape[1:3]}.")
    rows = _rows_at_a_time(x, kernel.shape)

    def convolved(part):
        out = jnp.einsum("kf,kn->fn", kernel.reshape(-1, features), _windows_seen(part, kernel.shape))
        return out.reshape(features, rows, width, -1)

    if rows == height:
        return convolved(x)
    starts = range(0, height, rows)
    if differentiated:
        out = lax.map(jax.checkpoint(convolved), jnp.stack([x[:, i : i + rows + size - 1] for i in starts]))
    else:
        out = lax.map(lambda i: convolved(lax.dynamic_slice_in_dim(x, i, rows + size - 1, 1)), jnp.array(starts))
    return jnp.moveaxis(out, 0, 1).reshape(features, height, width, -1)


def _padded(x, padding):
    return jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])


def _rows_at_a_time(x, shape):
    """Rows of the output, a divisor of all, so that what their windows see fits a core's cache; x is padded."""
    down, across, channels, _ = shape
    height, width = x.shape[1] - down + 1, x.shape[2] - across + 1
    of_row = down * across * channels * width * x.shape[3] * x.dtype.itemsize
    return max(r for r in range(1, height + 1) if height % r == 0 and (r == 1 or r * of_row <= ROWS_BYTES))


def _windows_seen(x, shape):
    """What each window over padded x sees: [row and column of the window and channel, row and column and batch]."""
    down, across, channels, _ = shape
    height, width = x.shape[1] - down + 1, x.shape[2] - across + 1
    rows, batch = x.reshape(*x.shape[:2], -1), x.shape[3]  # whole rows are copied faster than their pixels
    views = [rows[:, i : i + height, j * batch : (j + width) * batch] for i in range(down) for j in range(across)]
    return jnp.concatenate(views).reshape(down * across * channels, -1)


_same_size = bilinear("same_size", _kept_size, _of_image, _of_kernel)
