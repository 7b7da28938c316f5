"""Small architectures of one network, in plain Flax."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import linen as nn

from turbanet.conv import default_conv, max_pool

FEATURES_FIRST_ROWS = 64  # from here on a row axis fills vectors that narrow layers leave half empty


class MLP(nn.Module):
    """Dense layers with ReLU between them: x [..., feature] -> [..., widths[-1]], no activation at the end.

    Parameters are nn.Dense's, `Dense_0` and on. Narrow layers on many rows compute features first, [feature, row]
    (`features_first` None: decided by the shapes), which fills the vector units; results change by rounding only.
    """

    widths: Sequence[int]
    features_first: bool | None = None

    @nn.compact
    def __call__(self, x):
        first = self._pays(x) if self.features_first is None else self.features_first
        if not first:
            for width in self.widths[:-1]:
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(self.widths[-1])(x)
        x = jnp.moveaxis(x, -1, 0)
        for i, width in enumerate(self.widths):
            x = _FeaturesFirstDense(width, name=f"Dense_{i}")(nn.relu(x) if i else x)
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
        return jnp.einsum("io,i...->o...", kernel, x) + bias.reshape(-1, *[1] * (x.ndim - 1))


class LSTM(nn.Module):
    """One LSTM layer and a linear read-out of its last state: x [batch, time, feature] -> [batch, outputs]."""

    hidden: int = 32
    outputs: int = 1

    @nn.compact
    def __call__(self, x):
        (_, last), _ = nn.RNN(nn.OptimizedLSTMCell(self.hidden), return_carry=True)(x)
        return nn.Dense(self.outputs)(last)


class LeNet(nn.Module):
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
            conv = nn.Conv(features, (5, 5), padding="VALID", conv_general_dilated=self.conv or default_conv())
            x = max_pool(nn.relu(conv(x)))
        x = x.reshape(*x.shape[:-3], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.classes)(x)
