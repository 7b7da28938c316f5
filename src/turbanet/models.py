"""Small architectures of one network, in plain Flax."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from turbanet.conv import default_conv, max_pool

FEATURES_FIRST_ROWS = 64  # from here on a row axis fills vectors that narrow layers leave half empty


class _Precise(nn.Module, kw_only=True):
    """A module whose layers compute in `dtype` and keep their parameters in `param_dtype`, as Flax's own layers.

    None is the type of inputs and parameters together; `float` is float32, or float64 where JAX's x64 is on.
    """

    dtype: Any = None
    param_dtype: Any = float

    @property
    def precision(self):
        """Both, as keyword arguments for a layer."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


class MLP(_Precise):
    """Dense layers with ReLU between them: x [..., feature] -> [..., widths[-1]], no activation at the end.

    Parameters are nn.Dense's, `Dense_0` and on, and so is `kernel_init`. Narrow layers on many rows compute features
    first, [feature, row] (`features_first` None: decided by the shapes), which fills the vector units; results change
    by rounding only.
    """

    widths: Sequence[int]
    features_first: bool | None = None
    kernel_init: Callable | None = None

    @nn.compact
    def __call__(self, x):
        first = self._pays(x) if self.features_first is None else self.features_first
        how = self.precision | ({} if self.kernel_init is None else {"kernel_init": self.kernel_init})
        if not first:
            for width in self.widths[:-1]:
                x = nn.relu(nn.Dense(width, **how)(x))
            return nn.Dense(self.widths[-1], **how)(x)
        x = jnp.moveaxis(x, -1, 0)
        for i, width in enumerate(self.widths):
            x = _FeaturesFirstDense(width, name=f"Dense_{i}", **how)(nn.relu(x) if i else x)
        return jnp.moveaxis(x, 0, -1)

    def _pays(self, x):
        rows = x.size // x.shape[-1]
        return rows >= FEATURES_FIRST_ROWS and 2 * rows >= max(x.shape[-1], *self.widths)


class _FeaturesFirstDense(nn.Dense):
    """nn.Dense, parameters and all, for x [feature, ...]."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", self.kernel_init, (x.shape[0], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        return jnp.einsum("io,i...->o...", kernel, x) + bias.reshape(-1, *[1] * (x.ndim - 1))


class LSTM(_Precise):
    """One LSTM layer and a linear read-out of its last state: x [batch, time, feature] -> [batch, outputs]."""

    hidden: int = 32
    outputs: int = 1

    @nn.compact
    def __call__(self, x):
        (_, last), _ = nn.RNN(nn.OptimizedLSTMCell(self.hidden, **self.precision), return_carry=True)(x)
        return nn.Dense(self.outputs, **self.precision)(last)


class LeNet(_Precise):
    """LeNet as PyTorch's CIFAR-10 tutorial has it: x [..., height, width, channel] -> [..., classes], from 16 x 16 up.

    `conv` computes the convolutions: None is `default_conv()`, `jax.lax.conv_general_dilated` is XLA's own.
    """

    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x):
        if x.ndim < 3 or min(x.shape[-3:-1]) < 16:
            raise ValueError(f"LeNet needs x [..., height, width, channel] of at least 16 x 16, got shape {x.shape}.")
        for features in (6, 16):
            how = {"conv_general_dilated": self.conv or default_conv(), **self.precision}
            conv = nn.Conv(features, (5, 5), padding="VALID", **how)
            x = max_pool(nn.relu(conv(x)))
        x = x.reshape(*x.shape[:-3], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width, **self.precision)(x))
        return nn.Dense(self.classes, **self.precision)(x)


class _ConvNorm(_Precise):
    """Convolution without bias, batch normalisation by PyTorch's constants, ReLU unless told otherwise."""

    features: int
    window: int = 3
    stride: int = 1
    groups: int = 1
    relu: bool = True
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(
            self.features,
            (self.window, self.window),
            (self.stride, self.stride),
            padding=self.window // 2,
            feature_group_count=self.groups,
            use_bias=False,
            conv_general_dilated=self.conv or default_conv(),
            **self.precision,
        )(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, **self.precision)(x)
        return nn.relu(x) if self.relu else x


VGG_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(_Precise):
    """VGG with batch normalisation for 32 x 32 images: x [batch, height, width, channel] -> [batch, classes].

    `depth` 11, 13, 16 or 19 layers (Simonyan and Zisserman, 2015, one Dense layer at the end, as is usual for
    small images); `widths` are the features of the five stages of 3 x 3 convolutions, each ended by a 2 x 2 max pool.
    `conv`: see `LeNet`. Raises ValueError for another depth.
    """

    depth: int = 11
    widths: Sequence[int] = (64, 128, 256, 512, 512)
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.depth not in VGG_STAGES:
            raise ValueError(f"VGG has a depth of {', '.join(map(str, VGG_STAGES))}, got {self.depth}.")
        layer = partial(_ConvNorm, conv=self.conv, **self.precision)
        for layers, width in zip(VGG_STAGES[self.depth], self.widths, strict=True):
            for _ in range(layers):
                x = layer(width)(x, train)
            x = max_pool(x)
        return nn.Dense(self.classes, **self.precision)(x.reshape(*x.shape[:-3], -1))


class MobileNet(_Precise):
    """MobileNet for small images: x [batch, height, width, channel] -> [batch, classes].

    Depthwise and pointwise 3 x 3 and 1 x 1 convolutions (Howard et al., 2017), the first with stride 1; `blocks` are
    (features, stride). `conv`: see `LeNet`.
    """

    blocks: Sequence[tuple[int, int]] = (
        *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
        *((512, 1),) * 5,
        *((1024, 2), (1024, 1)),
    )
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        layer = partial(_ConvNorm, conv=self.conv, **self.precision)
        x = layer(32)(x, train)
        for features, stride in self.blocks:
            channels = x.shape[-1]
            x = layer(channels, stride=stride, groups=channels)(x, train)
            x = layer(features, window=1)(x, train)
        return nn.Dense(self.classes, **self.precision)(x.mean((-3, -2)))


class ResNet(_Precise):
    """The residual network for 32 x 32 images: x [batch, height, width, channel] -> [batch, classes].

    `depth` is 6 n + 2 layers (20, 32, 44, 56, 110 in He et al., 2015), of 16, 32 and 64 features; where a block changes
    shape, its shortcut takes every other pixel and fills up with zeros (option A). `conv`: see `LeNet`. Raises
    ValueError for another depth.
    """

    depth: int = 20
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.depth < 8 or self.depth % 6 != 2:
            raise ValueError(f"ResNet's depth is 6 n + 2, 8 and up (20, 32, 44, ...), got {self.depth}.")
        layer = partial(_ConvNorm, conv=self.conv, **self.precision)
        x = layer(16)(x, train)
        for features in (16, 32, 64):
            for _ in range(self.depth // 6):
                more = features - x.shape[-1]
                out = layer(features, stride=2 if more else 1)(x, train)
                out = layer(features, relu=False)(out, train)
                if more:
                    x = jnp.pad(x[..., ::2, ::2, :], [(0, 0)] * (x.ndim - 1) + [(0, more)])
                x = nn.relu(x + out)
        return nn.Dense(self.classes, **self.precision)(x.mean((-3, -2)))
