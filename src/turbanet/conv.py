"""Convolution as matrix products, and max pooling by comparison: fast on a CPU where XLA's own are slow in a swarm."""

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from turbanet import winograd
from turbanet.products import bilinear, product

ROWS_BYTES = 5 * 2**18  # laid out at a time where the batch is the last axis
CHUNK_BYTES, CHUNK_PLACES = 2**20, 1024  # laid out at a time: so much, as a core's cache holds, but places enough
WINOGRAD_CHANNELS = 8  # from here on the products of a tile outweigh its transforms


def matmul_conv(
    lhs,
    rhs,
    window_strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count=1,
    batch_group_count=1,
    precision=None,
    preferred_element_type=None,
):
    """`jax.lax.conv_general_dilated` with channels last: `nn.Conv(16, (5, 5), conv_general_dilated=matmul_conv)`.

    lhs: [batch, *space, channel], rhs: [*window, channel / groups, feature] -> [batch, *space, feature], in any number
    of dimensions. What each window sees is laid side by side and multiplied by the kernel once, for as much of the
    batch at a time as a core's cache holds; a 3 x 3 window that moves by 1 takes fewer products (see `winograd`). Where
    each channel is a group of its own (depthwise), shifted copies are weighted and added. The gradients follow from
    that. Raises ValueError on other layouts, groups of the batch and a window larger than the input; else what JAX's
    own raises.
    """
    *window, _, features = rhs.shape
    space, groups, ones = range(1, lhs.ndim - 1), feature_group_count, [1] * len(window)
    outer = (0, lhs.ndim - 1, *space)
    given = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if given != (outer, (rhs.ndim - 1, rhs.ndim - 2, *range(len(window))), outer) or batch_group_count != 1:
        raise ValueError(
            "matmul_conv needs channels last as flax.linen.Conv has them, ('NHWC', 'HWIO', 'NHWC'), and "
            f"batch_group_count 1, got dimension_numbers {dimension_numbers} and {batch_group_count}."
        )
    how = dict(precision=precision, preferred_element_type=preferred_element_type)
    rest = (lhs_dilation, rhs_dilation, dimension_numbers, groups)
    out = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, window_strides, padding, *rest, **how), lhs, rhs)
    if 0 in out.shape[1:-1]:
        raise ValueError(f"The window {tuple(window)} is larger than the padded input, got an input of {lhs.shape}.")

    stretch, dilation = lhs_dilation or ones, rhs_dilation or ones
    if isinstance(padding, str):
        seen = [d * (k - 1) + 1 for k, d in zip(window, dilation)]
        padding = lax.padtype_to_pads(lhs.shape[1:-1], seen, window_strides, padding)
    pads = [(0, 0, 0), *((low, high, d - 1) for (low, high), d in zip(padding, stretch)), (0, 0, 0)]

    def padded(x):
        return lax.pad(x, jnp.zeros((), x.dtype), pads)

    moves = list(zip(space, window, window_strides, dilation))

    if 1 < groups == lhs.shape[-1]:
        wide = jnp.promote_types(out.dtype, jnp.float32) if jnp.issubdtype(out.dtype, jnp.floating) else out.dtype
        views = [jnp.repeat(padded(lhs), features // groups, axis=-1).astype(wide)]  # bfloat16 is summed in float32
        for move in moves:
            views = [view for wider in views for view in _views(wider, *move)]
        return sum(view * tap for view, tap in zip(views, rhs.reshape(-1, features))).astype(out.dtype)

    def windows(x):
        x = padded(x)
        if groups > 1:
            x = x.reshape(*x.shape[:-1], groups, -1)
        for move in reversed(moves):  # the last axis first: the order of the kernel's own reshape
            x = lax.concatenate(_views(x, *move), x.ndim - 1)
        if groups == 1:
            return product(x, rhs.reshape(-1, features), **how)
        x = jnp.einsum("...gk,kgo->...go", x, rhs.reshape(x.shape[-1], groups, -1), **how)
        return x.reshape(*x.shape[:-2], features)

    plain = window == [3, 3] and all(set(by) == {1} for by in (window_strides, dilation, stretch, [groups]))
    if plain and lhs.shape[-1] >= WINOGRAD_CHANNELS and lhs.dtype == rhs.dtype in (jnp.float32, jnp.float64):
        w = winograd.transformed(rhs)
        return _in_chunks(lambda x: winograd.convolve(padded(x), w, **how), lhs, out, 4)
    if math.prod(window) == 1:
        return windows(lhs)
    return _in_chunks(windows, lhs, out, math.prod(window))


def _in_chunks(function, x, out, copies):
    """function(x), for some of the batch at a time where `copies` of it are made; they are made again for gradients."""
    batch, *shape = x.shape
    if batch == 0:
        return jnp.zeros(out.shape, out.dtype)
    one, places = max(1, copies * math.prod(shape) * x.dtype.itemsize), math.prod(out.shape[1:-1])
    most = max(CHUNK_BYTES // one, -(-CHUNK_PLACES // places))
    if batch <= most:
        return function(x)
    chunks = -(-batch // most)
    size = -(-batch // chunks)
    x = jnp.pad(x, [(0, chunks * size - batch), *[(0, 0)] * len(shape)])
    done = lax.map(jax.checkpoint(function), x.reshape(chunks, size, *shape))
    return done.reshape(-1, *out.shape[1:])[:batch]


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


def default_conv():
    """`matmul_conv` where JAX's default backend is the CPU, else None, with which `nn.Conv` takes XLA's own."""
    return matmul_conv if jax.default_backend() == "cpu" else None


@jax.custom_jvp
def max_pool(x):
    """The largest of each 2 x 2 window: x [..., height, width, channel] -> [..., height // 2, width // 2, channel].

    Equals `nn.max_pool(x, (2, 2), (2, 2))`: an odd last row or column is left out, of equal values the first has the
    gradient.
    """
    return _windows(x).max((-4, -2))


@max_pool.defjvp
def _max_pool_jvp(primals, tangents):
    x, best = _windows(primals[0]), max_pool(primals[0])
    first = jnp.full(best.shape, 3, jnp.int8)  # the place in its window of the first value that is no smaller
    for place, (i, j) in reversed(list(enumerate(itertools.product(range(2), range(2))))[:3]):
        first = jnp.where(x[..., i, :, j, :] < best, first, jnp.int8(place))  # NaN is no smaller: its gradient is seen
    row, column = (lax.broadcasted_iota(jnp.int8, x.shape, x.ndim + axis) for axis in (-4, -2))
    taken = 2 * row + column == first[..., :, None, :, None, :]
    return best, jnp.where(taken, _windows(tangents[0]), 0).sum((-4, -2))


def _windows(x):
    """x [..., height, width, channel] -> [..., height // 2, 2, width // 2, 2, channel]."""
    *lead, height, width, channel = x.shape
    x = x[..., : height // 2 * 2, : width // 2 * 2, :]
    return x.reshape(*lead, height // 2, 2, width // 2, 2, channel)


def _views(x, axis, size, stride, dilation):
    """What each of the `size` places of a window sees along one axis as the window moves by `stride`."""
    last = (x.shape[axis] - dilation * (size - 1) - 1) // stride * stride
    return [lax.slice_in_dim(x, i * dilation, i * dilation + last + 1, stride, axis) for i in range(size)]
