"""Convolutional networks for small images, in plain Flax: LeNet, LeNet5, AlexNet, VGG, MobileNet, ResNet."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from flax import linen as nn
from jax import numpy as jnp

from turbanet.networks.cpu.batch_last import FEW_FEATURES, ImageLayout
from turbanet.networks.cpu.pooling import max_pool
from turbanet.networks.cpu.products import dot_general
from turbanet.networks.models import Precise


class LeNet(Precise):
    """LeNet as in PyTorch's CIFAR-10 tutorial: x [..., height, width, channel] -> [..., classes], from 16 x 16 up.

    Two 5 x 5 convolutions of `features` with 2 x 2 max pools, then Dense layers of `hidden` units. With (32, 64),
    padding=2 and hidden=(512,) it is the network of McMahan et al. (2017) for MNIST. `conv` computes the convolutions:
    None for the fastest on this platform, `jax.lax.conv_general_dilated` for XLA's own.
    """

    classes: int = 10
    conv: Callable | None = None
    features: Sequence[int] = (6, 16)
    padding: int = 0
    hidden: Sequence[int] = (120, 84)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        _check_images(x, "LeNet", 16)
        x, layout = ImageLayout.enter(x, self.conv, features=self.features[0])
        for i, features in enumerate(self.features):
            conv = layout.convolution(features, 5, padding=self.padding, name=f"Conv_{i}", **self.precision)
            x = max_pool(nn.relu(conv(x)))
        return _dense(self, layout.leave(x)[0], self.hidden)


class LeNet5(LeNet):
    """LeNet-5 with batch normalisation: x [batch, height, width, channel] -> [batch, classes], for MNIST in 32 x 32.

    The layers of LeCun et al. (1998) with ReLU and max pools, as in the published k-fold study: `LeNet` with each
    convolution normalised. `conv`: see `LeNet`.
    """

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        _check_images(x, "LeNet5", 16)
        x, layout = ImageLayout.enter(x, self.conv, features=self.features[0])
        for features in self.features:
            x = max_pool(ConvNorm(features, layout, window=5, padding=self.padding, **self.precision)(x, train))
        return _dense(self, layout.leave(x)[0], self.hidden)


class AlexNet(Precise):
    """AlexNet for 28 x 28 images of MNIST: x [batch, height, width, channel] -> [batch, classes].

    Five 3 x 3 convolutions of `widths` features with 2 x 2 max pools after the first, second and last, then Dense
    layers of `hidden` units; the original has larger windows and dropout. `conv`: see `LeNet`.
    """

    widths: Sequence[int] = (32, 64, 128, 256, 256)
    hidden: Sequence[int] = (1024, 512)
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        _check_images(x, "AlexNet", 8)
        layout = ImageLayout(self.conv)
        for i, width in enumerate(self.widths):
            x = nn.relu(layout.convolution(width, 3, padding=1, name=f"Conv_{i}", **self.precision)(x))
            if i in (0, 1, len(self.widths) - 1):
                x = max_pool(x)
        return _dense(self, x, self.hidden)


class ConvNorm(Precise):
    """Convolution without bias, batch normalisation with PyTorch's constants, and ReLU unless `relu` is False.

    Its name is in the parameters of the networks below, from `ConvNorm_0` on. With the batch last (see `layout`),
    stride and groups must be 1.
    """

    features: int
    layout: ImageLayout
    window: int = 3
    stride: int = 1
    groups: int = 1
    relu: bool = True
    padding: int | None = None  # None: padding that preserves the size

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        padding = self.window // 2 if self.padding is None else self.padding
        settings = {"strides": self.stride, "padding": padding, "feature_group_count": self.groups, "use_bias": False}
        conv = self.layout.convolution(self.features, self.window, name="Conv_0", **settings, **self.precision)
        norm = nn.BatchNorm(not train, axis=self.layout.channel_axis, momentum=0.9, epsilon=1e-5, **self.precision)
        x = norm(conv(x))
        return nn.relu(x) if self.relu else x


MOBILENET_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
VGG_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(Precise):
    """VGG with batch normalisation for 32 x 32 images: x [batch, height, width, channel] -> [batch, classes].

    `depth` is 11, 13, 16 or 19 layers (Simonyan and Zisserman, 2015, with one Dense layer at the end, as is usual for
    small images); `widths` are the features of the five stages of 3 x 3 convolutions, each before a 2 x 2 max pool.
    `conv`: see `LeNet`. Raises ValueError for another depth.
    """

    depth: int = 11
    widths: Sequence[int] = (64, 128, 256, 512, 512)
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if self.depth not in VGG_STAGES:
            raise ValueError(f"VGG has a depth of {', '.join(map(str, VGG_STAGES))}, got {self.depth}.")
        _check_images(x, "VGG", 32)
        x, layout = ImageLayout.enter(x, self.conv, features=self.widths[0])
        for layers, width in zip(VGG_STAGES[self.depth], self.widths, strict=True):
            if width > FEW_FEATURES:
                x, layout = layout.leave(x)
            for _ in range(layers):
                x = ConvNorm(width, layout, **self.precision)(x, train)
            x = max_pool(x)
        return _dense(self, layout.leave(x)[0], ())


class MobileNet(Precise):
    """MobileNet v1 for small images: x [batch, height, width, channel] -> [batch, classes].

    Depthwise 3 x 3 and pointwise 1 x 1 convolutions (Howard et al., 2017) after a first convolution of `stem` features
    with stride 1; `blocks` are (features, stride). `conv`: see `LeNet`.
    """

    blocks: Sequence[tuple[int, int]] = MOBILENET_BLOCKS
    stem: int = 32
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        _check_images(x, "MobileNet", 1)
        layer = partial(ConvNorm, layout=ImageLayout(self.conv), **self.precision)
        x = layer(features=self.stem)(x, train)
        for features, stride in self.blocks:
            x = layer(features=x.shape[-1], stride=stride, groups=x.shape[-1])(x, train)
            x = layer(features=features, window=1)(x, train)
        return nn.Dense(self.classes, **self.precision)(x.mean((-3, -2)))


class ResNet(Precise):
    """The residual network for 32 x 32 images: x [batch, height, width, channel] -> [batch, classes].

    `depth` is 6 n + 2 layers (20, 32, 44, 56, 110 in He et al., 2015), of 16, 32 and 64 features. Where a block changes
    the shape, its shortcut takes every other pixel and pads with zeros (option A). `conv`: see `LeNet`. Raises
    ValueError for another depth.
    """

    depth: int = 20
    classes: int = 10
    conv: Callable | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if self.depth < 8 or self.depth % 6 != 2:
            raise ValueError(f"ResNet's depth is 6 n + 2, 8 and up (20, 32, 44, ...), got {self.depth}.")
        _check_images(x, "ResNet", 1)
        x, layout = ImageLayout.enter(x, self.conv, features=16)
        x = ConvNorm(16, layout, **self.precision)(x, train)
        for stage, features in enumerate((16, 32, 64)):
            if stage > 0:  # such a stage begins with stride 2
                x, layout = layout.leave(x)
            for block in range(self.depth // 6):
                halves = stage > 0 and block == 0
                layer = partial(ConvNorm, features, layout, **self.precision)
                out = layer(stride=2 if halves else 1)(x, train)
                out = layer(relu=False)(out, train)
                if halves:
                    x = jnp.pad(x[..., ::2, ::2, :], [(0, 0)] * (x.ndim - 1) + [(0, features // 2)])
                x = nn.relu(x + out)
        return nn.Dense(self.classes, **self.precision)(x.mean((-3, -2)))


def _dense(model, x, widths):
    """Apply the Dense layers after the convolutions, with ReLU between them; called within `model.__call__`."""
    x = x.reshape(*x.shape[:-3], -1)
    for width in widths:
        x = nn.relu(nn.Dense(width, dot_general=dot_general, **model.precision)(x))
    return nn.Dense(model.classes, **model.precision)(x)


def _check_images(x, name, smallest):
    """Raise ValueError unless x is [..., height, width, channel] of at least `smallest` pixels a side."""
    if x.ndim < 3 or min(x.shape[-3:-1]) < smallest:
        side = f"{smallest} x {smallest}"
        raise ValueError(f"{name} needs x [..., height, width, channel] of at least {side}, got shape {x.shape}.")
