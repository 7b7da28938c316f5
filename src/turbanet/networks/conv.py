"""Convolution as matrix products: fast on a CPU where XLA's own is slow in a swarm."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from turbanet.networks import winograd
from turbanet.networks.products import product

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


def default_conv():
    """`matmul_conv` where JAX's default backend is the CPU, else None, with which `nn.Conv` takes XLA's own."""
    return matmul_conv if jax.default_backend() == "cpu" else None


def _views(x, axis, size, stride, dilation):
    """What each of the `size` places of a window sees along one axis as the window moves by `stride`."""
    last = (x.shape[axis] - dilation * (size - 1) - 1) // stride * stride
    return [lax.slice_in_dim(x, i * dilation, i * dilation + last + 1, stride, axis) for i in range(size)]
