"""Convolution as matrix products, for CPUs, where XLA's own convolutions are slow in a swarm."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from turbanet.backend import on_accelerator
from turbanet.networks.cpu.products import bilinear, product

CHUNK_BYTES = 2**20  # of patches copied at a time, as a core's cache holds them ...
CHUNK_PLACES = 1024  # ... but at least so many positions of the window


def matmul_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` with channels last: `nn.Conv(16, (5, 5), conv_general_dilated=matmul_conv)`.

    Patches are copied side by side (im2col) and multiplied by the kernel once, for as much of the batch at a time as
    a core's cache holds. A depthwise convolution adds weighted shifted copies. The gradients follow from that.

    Parameters
    ----------
    lhs : [batch, *space, channel], in any number of dimensions
    rhs : [*window, channel / groups, feature]
    window_strides, padding, lhs_dilation, rhs_dilation : for each dimension of the space, as in JAX
    dimension_numbers : channels last, as nn.Conv names them: ("NHWC", "HWIO", "NHWC") in two dimensions
    feature_group_count : groups of channels
    batch_group_count : 1
    precision, preferred_element_type : as in JAX

    Returns
    -------
    [batch, *space, feature]

    Raises
    ------
    ValueError : for other layouts, groups of the batch and a window larger than the input; and what JAX itself raises
    """
    *window, _, features = rhs.shape
    groups = feature_group_count
    _check_layout(lhs, rhs, dimension_numbers, batch_group_count)
    types = {"precision": precision, "preferred_element_type": preferred_element_type}
    settings = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, groups)
    out = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, *settings, **types), lhs, rhs)
    if 0 in out.shape[1:-1]:
        raise ValueError(f"The window {window} is larger than the padded input, got an input of {lhs.shape}.")

    lhs_dilation = lhs_dilation or [1] * len(window)
    rhs_dilation = rhs_dilation or [1] * len(window)
    if isinstance(padding, str):
        dilated = [d * (k - 1) + 1 for k, d in zip(window, rhs_dilation)]
        padding = lax.padtype_to_pads(lhs.shape[1:-1], dilated, window_strides, padding)
    moves = tuple(zip(range(1, lhs.ndim - 1), window, window_strides, rhs_dilation))
    pads = [(0, 0, 0)] * lhs.ndim  # up to the last element that a window covers
    for (axis, size, stride, by), (low, _), spread in zip(moves, padding, lhs_dilation):
        covered = (out.shape[axis] - 1) * stride + by * (size - 1)
        pads[axis] = (low, covered - low - (lhs.shape[axis] - 1) * spread, spread - 1)

    def padded(x):
        return lax.pad(x, jnp.zeros((), x.dtype), pads)

    def convolved(x):
        x = padded(x)
        if groups > 1:
            x = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        for move in reversed(moves):  # the last axis first, as in the reshape of the kernel
            x = lax.concatenate(_views(x, *move), x.ndim - 1)
        if groups == 1:
            return product(x, rhs.reshape(-1, features), **types)
        x = jnp.einsum("...gk,kgo->...go", x, rhs.reshape(x.shape[-1], groups, features // groups), **types)
        return x.reshape(*x.shape[:-2], features)

    if 1 < groups == lhs.shape[-1]:
        # bfloat16 is summed in float32.
        sum_type = jnp.promote_types(out.dtype, jnp.float32) if jnp.issubdtype(out.dtype, jnp.floating) else out.dtype
        x = jnp.repeat(padded(lhs), features // lhs.shape[-1], axis=-1)
        return _depthwise(x.astype(sum_type), rhs.astype(sum_type), moves=moves).astype(out.dtype)
    if math.prod(window) == 1:
        return convolved(lhs)
    image_bytes = max(1, math.prod(window) * math.prod(lhs.shape[1:]) * lhs.dtype.itemsize)
    return _in_chunks(convolved, lhs, max(CHUNK_BYTES // image_bytes, -(-CHUNK_PLACES // math.prod(out.shape[1:-1]))))


def default_conv() -> Callable | None:
    """Return `matmul_conv` in a program for a CPU, else None, for which `nn.Conv` uses XLA's own convolution."""
    return None if on_accelerator() else matmul_conv


def _in_chunks(function, x, most):
    """Return function(x) for at most so many rows of x at a time; it is computed again for its gradients."""
    if len(x) <= most:
        return function(x)
    chunks = -(-len(x) // most)
    size = -(-len(x) // chunks)
    padded = jnp.pad(x, [(0, chunks * size - len(x)), *[(0, 0)] * (x.ndim - 1)])
    out = lax.map(jax.checkpoint(function), padded.reshape(chunks, size, *x.shape[1:]))
    return out.reshape(-1, *out.shape[2:])[: len(x)]


def _check_layout(lhs, rhs, dimension_numbers, batch_group_count):
    """Raise ValueError unless channels are last in input, kernel and output, and the batch is one group."""
    channels_last = (0, lhs.ndim - 1, *range(1, lhs.ndim - 1))
    kernel = (rhs.ndim - 1, rhs.ndim - 2, *range(rhs.ndim - 2))
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if layout != (channels_last, kernel, channels_last) or batch_group_count != 1:
        got = f"dimension_numbers {dimension_numbers} and {batch_group_count}"
        needs = "channels last as flax.linen.Conv has them, ('NHWC', 'HWIO', 'NHWC'), and batch_group_count 1"
        raise ValueError(f"matmul_conv needs {needs}, got {got}.")


def _weighted(x, kernel, *, moves):
    """Depthwise convolution: the weighted sum of the views of x from each tap of the window."""
    return sum(view * tap for view, tap in zip(_all_views(x, moves), kernel.reshape(-1, x.shape[-1])))


def _weighted_to_x(g, kernel, *, moves):
    """Gradient of x: the convolution with the flipped kernel of g, with zeros at positions that strides skipped."""
    reach = [(dilation * (size - 1), dilation * (size - 1), stride - 1) for _, size, stride, dilation in moves]
    g = lax.pad(g, jnp.zeros((), g.dtype), [(0, 0, 0), *reach, (0, 0, 0)])
    flipped = jnp.flip(kernel, range(len(moves)))
    return _weighted(g, flipped, moves=[(axis, size, 1, dilation) for axis, size, _, dilation in moves])


def _weighted_to_kernel(g, x, *, moves):
    """Gradient of the kernel: the view from each tap times g, in a loop over the taps, which compiles faster.

    Positions are computed from the number of the tap: XLA (jax 0.10.2) writes no code for slices of a wide swarm whose
    starts come from a table of constants.
    """
    _, sizes, strides, dilations = zip(*moves)
    covered = [(size - 1) * stride + 1 for size, stride in zip(g.shape[1:-1], strides)]

    def of_tap(number):
        start = [dilation * i for dilation, i in zip(dilations, jnp.unravel_index(number, sizes))]
        view = lax.dynamic_slice(x, [0, *start, 0], [len(x), *covered, x.shape[-1]])
        return (lax.slice(view, [0] * x.ndim, view.shape, [1, *strides, 1]) * g).sum(range(g.ndim - 1))

    return lax.map(of_tap, jnp.arange(math.prod(sizes))).reshape(*sizes, 1, g.shape[-1])


def _all_views(x, moves):
    """Return the view of x from each tap of a window over several axes."""
    views = [x]
    for move in moves:
        views = [view for wider in views for view in _views(wider, *move)]
    return views


def _views(x, axis, size, stride, dilation):
    """Return the views of x from the `size` taps of a window along one axis, at every position by `stride`."""
    length = x.shape[axis] - dilation * (size - 1)
    return [lax.slice_in_dim(x, i, i + length, stride, axis) for i in range(0, size * dilation, dilation)]


_depthwise = bilinear("depthwise", _weighted, _weighted_to_x, _weighted_to_kernel)
