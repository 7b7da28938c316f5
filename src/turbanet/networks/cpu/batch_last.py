"""Images and convolutions with the batch as the last axis, which fills the vector units where channels are few."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import lax

from turbanet.networks.cpu.conv import default_conv
from turbanet.networks.cpu.products import bilinear

ROWS_BYTES = 5 * 2**18  # of patches copied at a time
FEW_FEATURES = 32  # up to this number a convolution is faster with the batch as the last axis


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """The order of axes in which a network's layers hold images, and its convolutions in that order.

    The order is that of the input, [..., height, width, channel], or has the batch last, [channel, height, width,
    batch]. A network calls `enter` before its first layer and `leave` before the first layer that needs the input's
    order.

    conv: the function that computes convolutions, None for the fastest. lead: the leading axes of the input.
    """

    conv: Callable | None
    batch_last: bool = False
    lead: tuple[int, ...] = ()

    @classmethod
    def enter(cls, x: jax.Array, conv: Callable | None, features: int) -> tuple[jax.Array, "ImageLayout"]:
        """Return x [..., height, width, channel] in the faster order for layers of `features`, and its layout.

        The batch becomes the last axis on a CPU, if features are few and `conv` is None.
        """
        if conv is not None or default_conv() is None or features > FEW_FEATURES:
            return x, cls(conv)
        return x.reshape(-1, *x.shape[-3:]).transpose(3, 1, 2, 0), cls(conv, batch_last=True, lead=x.shape[:-3])

    def leave(self, x: jax.Array) -> tuple[jax.Array, "ImageLayout"]:
        """Return x in the input's order, [..., height, width, channel], and that layout."""
        if not self.batch_last:
            return x, self
        images = x.transpose(3, 1, 2, 0)
        return images.reshape(*self.lead, *images.shape[1:]), ImageLayout(self.conv)

    @property
    def channel_axis(self) -> int:
        """The axis of the features."""
        return 0 if self.batch_last else -1

    def convolution(self, features: int, window: int, **settings: Any) -> nn.Conv:
        """Return an nn.Conv with a square window and these `settings`; with the batch last, stride and groups are 1."""
        if self.batch_last:
            return _BatchLastConv(features, (window, window), **settings)
        return nn.Conv(features, (window, window), conv_general_dilated=self.conv or default_conv(), **settings)


class _BatchLastConv(nn.Conv):
    """nn.Conv, with the same parameters, for x [channel, height, width, batch] (see `batch_last_conv`)."""

    kernel_size: tuple[int, int]
    padding: int = 0

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        if self.strides != 1 or self.feature_group_count != 1:
            raise ValueError("With the batch last a convolution moves by 1 and has one group: leave the layout first.")
        shape = (*self.kernel_size, inputs.shape[0], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        x = batch_last_conv(x, kernel, self.padding)
        return x if bias is None else x + bias[:, None, None, None]


def batch_last_conv(x: jax.Array, kernel: jax.Array, padding: int = 0) -> jax.Array:
    """Convolve with the batch as the last axis, which fills vector units that few channels leave half empty.

    x: [channel, height, width, batch], kernel: [row, column, channel, feature] -> [feature, height, width, batch], at
    stride 1 with `padding` zeros on each side. Patches are copied for as many rows of the image at a time as a core's
    cache holds, and again for the gradients. Raises ValueError for a window larger than the padded input.
    """
    keeps_size = 2 * padding + 1 == kernel.shape[0] == kernel.shape[1]
    return _same_size(x, kernel, padding=padding) if keeps_size else _convolve(x, kernel, padding=padding)


def _gradient_of_x(g, kernel, *, padding):
    """Gradient of x where the output is as large as x: a convolution with the flipped kernel."""
    return _convolve(g, kernel[::-1, ::-1].swapaxes(2, 3), padding=padding)


def _gradient_of_kernel(g, x, *, padding):
    x = jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    window = 2 * padding + 1
    shape = (window, window, len(x), len(g))
    rows = _rows_at_a_time(x, shape)

    def of_rows(i):
        x_rows = lax.dynamic_slice_in_dim(x, i * rows, rows + window - 1, 1)
        g_rows = lax.dynamic_slice_in_dim(g, i * rows, rows, 1)
        return jnp.einsum("kn,fn->kf", _patches(x_rows, shape), g_rows.reshape(len(g), -1))

    total = lax.fori_loop(1, g.shape[1] // rows, lambda i, total: total + of_rows(i), of_rows(0))
    return total.reshape(shape)


def _convolve(x, kernel, *, padding):
    """Convolve; JAX's gradient of it copies the patches again."""
    x = jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    size, _, _, features = kernel.shape
    height, width = _output_size(x, kernel.shape)
    if height < 1 or width < 1:
        raise ValueError(f"The window {kernel.shape[:2]} is larger than the padded input {x.shape[1:3]}.")
    rows = _rows_at_a_time(x, kernel.shape)

    def convolved(x_rows):
        out = jnp.einsum("kf,kn->fn", kernel.reshape(-1, features), _patches(x_rows, kernel.shape))
        return out.reshape(features, rows, width, -1)

    if rows == height:
        return convolved(x)
    parts = jnp.stack([x[:, i : i + rows + size - 1] for i in range(0, height, rows)])
    out = lax.map(jax.checkpoint(convolved), parts)
    return jnp.moveaxis(out, 0, 1).reshape(features, height, width, -1)


def _output_size(x, kernel_shape):
    """Return (height, width) of the output for padded x."""
    return x.shape[1] - kernel_shape[0] + 1, x.shape[2] - kernel_shape[1] + 1


def _rows_at_a_time(x, kernel_shape):
    """Return the rows of the output, a divisor of all, whose patches fit a core's cache; x is padded."""
    down, across, channels, _ = kernel_shape
    height, width = _output_size(x, kernel_shape)
    row_bytes = down * across * channels * width * x.shape[3] * x.dtype.itemsize
    return max(r for r in range(1, height + 1) if height % r == 0 and (r == 1 or r * row_bytes <= ROWS_BYTES))


def _patches(x, kernel_shape):
    """Return the patches of padded x: [window row x window column x channel, row x column x batch]."""
    down, across, channels, _ = kernel_shape
    height, width = _output_size(x, kernel_shape)
    batch = x.shape[3]
    rows = x.reshape(*x.shape[:2], -1)  # whole rows are copied faster than their pixels
    views = [rows[:, i : i + height, j * batch : (j + width) * batch] for i in range(down) for j in range(across)]
    return jnp.concatenate(views).reshape(down * across * channels, -1)


_same_size = bilinear("same_size", _convolve, _gradient_of_x, _gradient_of_kernel)
