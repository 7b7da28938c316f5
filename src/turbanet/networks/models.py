"""Small dense and recurrent architectures in plain Flax (convolutional ones: `convnets`)."""

import copyreg
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from pkgutil import resolve_name
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.recurrent import DenseParams

from turbanet.networks.cpu.lstm import lstm

# Functions of each number, to which the order of axes is nothing.
ELEMENTWISE: tuple[Callable, ...] = (nn.relu, nn.relu6, nn.leaky_relu, nn.elu, nn.celu, nn.selu, nn.gelu, nn.silu)
ELEMENTWISE += (nn.sigmoid, nn.log_sigmoid, nn.hard_sigmoid, nn.softplus, nn.soft_sign, jnp.tanh, jnp.asarray)


def _by_public_name(function):
    """Reduce a function for pickle, which does not find JAX's own, such as nn.relu and nn.tanh, where they are made."""
    name = function.__name__
    for module in ("jax.nn", "jax.numpy"):
        if getattr(resolve_name(module), name, None) is function:
            return resolve_name, (f"{module}:{name}",)
    return function.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


for _kind in (type(nn.relu), type(nn.tanh)):  # so that a model can be pickled with its activation
    copyreg.pickle(_kind, _by_public_name)

FEATURES_FIRST_ROWS = 64  # from this number on rows fill the vector units that narrow layers leave half empty


class Precise(nn.Module, kw_only=True):
    """A module whose layers compute in `dtype` and hold parameters in `param_dtype`, as Flax's layers do.

    None is the promoted type of inputs and parameters; `float` is float32, or float64 where JAX's x64 is on.
    """

    dtype: Any = None
    param_dtype: Any = float

    @property
    def precision(self) -> dict[str, Any]:
        """Both types as keyword arguments of a layer."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


class MLP(Precise):
    """Dense layers, the hidden ones with `activation` and `dropout`: x [..., feature] -> [..., widths[-1]].

    activation : a function of a row's features, ReLU by default
    dropout : share of the hidden units that a training step leaves out

    Parameters, from `Dense_0` on, and `kernel_init` are those of nn.Dense. Narrow layers on many rows compute features
    first, [feature, row], which fills the vector units and changes results only by rounding, and the draws of dropout
    (`features_first` None: by the shapes).
    """

    widths: Sequence[int]
    features_first: bool | None = None
    kernel_init: Callable | None = None
    activation: Callable = nn.relu
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if isinstance(self.widths, int):
            raise ValueError(f"widths must be a sequence of layers' units, the last the outputs; got {self.widths}.")
        if not isinstance(self.dropout, Real) or not 0 <= self.dropout < 1:
            advice = "one a member is fit's member=, in a model of your own"
            raise ValueError(f"dropout must be a number from 0 to below 1, got {self.dropout!r}; {advice}.")
        rows = x.size // x.shape[-1]
        pays = rows >= FEATURES_FIRST_ROWS and 2 * rows >= max(x.shape[-1], *self.widths)
        features_first = pays if self.features_first is None else self.features_first
        dense = _FeaturesFirstDense if features_first else nn.Dense
        kernel_init = self.kernel_init or nn.Dense.kernel_init
        activation = self.activation
        if features_first:
            x = jnp.moveaxis(x, -1, 0)
            for _ in range(0 if activation in ELEMENTWISE else x.ndim - 1):
                activation = jax.vmap(activation, -1, -1)  # which costs relu some copies
        for i, width in enumerate(self.widths):
            x = nn.Dropout(self.dropout, deterministic=not train)(activation(x)) if i else x
            x = dense(width, kernel_init=kernel_init, name=f"Dense_{i}", **self.precision)(x)
        return jnp.moveaxis(x, 0, -1) if features_first else x


class _FeaturesFirstDense(nn.Dense):
    """nn.Dense, with the same parameters, for x [feature, ...]."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (inputs.shape[0], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        x, kernel, bias = promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return jnp.einsum("io,i...->o...", kernel, x) + bias.reshape(-1, *[1] * (x.ndim - 1))


class _LSTMWeights(nn.OptimizedLSTMCell):
    """Only the parameters of the cell, gates side by side: x -> (kernel, recurrent kernel, bias)."""

    @nn.compact
    def __call__(self, x):  # type: ignore[override]  # no carry comes in: nothing is computed here
        like_h = jax.ShapeDtypeStruct((self.features,), self.param_dtype)
        make = partial(DenseParams, self.features, param_dtype=self.param_dtype)
        of_x = [make(use_bias=False, kernel_init=self.kernel_init, name=f"i{gate}")(x)[0] for gate in "ifgo"]
        of_h = [make(kernel_init=self.recurrent_kernel_init, name=f"h{gate}")(like_h) for gate in "ifgo"]
        return tuple(jnp.concatenate(gates, axis=-1) for gates in (of_x, *zip(*of_h)))


class LSTM(Precise):
    """One LSTM layer and a linear read-out of its last state: x [batch, time, feature] -> [batch, outputs].

    Parameters are those of `nn.RNN(nn.OptimizedLSTMCell(hidden))`. Results differ by rounding: a gate below that, 1e-7
    in float32, may be 0 (see `cpu.lstm`).
    """

    hidden: int = 32
    outputs: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = _LSTMWeights(self.hidden, name="OptimizedLSTMCell_0", param_dtype=self.param_dtype)(x)
        last_state = lstm(*promote_dtype(jnp.moveaxis(x, -2, 0), *weights, dtype=self.dtype))
        return nn.Dense(self.outputs, **self.precision)(last_state)
