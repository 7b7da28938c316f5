"""Bilinear products with custom gradients, where JAX's are slow in a swarm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike


def bilinear(name: str, function: Callable, gradient_of_first: Callable, gradient_of_second: Callable) -> Callable:
    """Make a JAX primitive with custom gradients of `function(a, b, **static)`, which is linear in a and in b.

    It is a primitive because `jax.custom_vjp` has no forward mode.

    Parameters
    ----------
    name : of the primitive, as JAX prints it
    function : function(a, b, **static) of one member; the values in `static` are hashable
    gradient_of_first : (g, b, **static) -> the gradient of a, from the output's gradient g
    gradient_of_second : (g, a, **static) -> the gradient of b

    Returns
    -------
    `function`, for one member or, by `jax.vmap`, for many, differentiable in any mode
    """
    primitive = Primitive(name)

    def mapped(function, members, static):
        function = partial(function, **dict(static))
        for _ in range(members):
            function = jax.vmap(function)
        return function

    def compute(a, b, *, members, static):
        return mapped(function, members, static)(a, b)

    def shape(a, b, **settings):
        out = jax.eval_shape(partial(compute, **settings), a, b)
        return jax.core.ShapedArray(out.shape, out.dtype)

    def first(g, a, b, *, members, static):
        return mapped(gradient_of_first, members, static)(g, b).astype(a.aval.dtype)

    def second(g, a, b, *, members, static):
        return mapped(gradient_of_second, members, static)(g, a).astype(b.aval.dtype)

    def vectorised(operands, axes, *, members, static):
        if None in axes:  # members share one operand: JAX computes one product
            return jax.vmap(partial(compute, members=members, static=static), axes)(*operands), 0
        members_first = (jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes))
        return primitive.bind(*members_first, members=members + 1, static=static), 0

    primitive.def_impl(compute)
    primitive.def_abstract_eval(shape)
    ad.defbilinear(primitive, first, second)
    batching.primitive_batchers[primitive] = vectorised
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return lambda a, b, **static: primitive.bind(a, b, members=0, static=tuple(static.items()))


def product(
    x: jax.Array, w: jax.Array, *, precision: Any = None, preferred_element_type: DTypeLike | None = None
) -> jax.Array:
    """`jnp.matmul` with a gradient of w that has the memory layout of w.

    JAX computes that gradient as the transpose of [feature, channel]. With a member axis, XLA on a CPU leaves the
    transposition to the operation that reads the gradient next, whose reads are then strided: with 512 channels and
    features this took longer than the product.

    Parameters
    ----------
    x : [..., channel]
    w : [channel, feature]
    precision, preferred_element_type : as `jax.lax.dot_general` takes them

    Returns
    -------
    [..., feature]
    """
    rows = x.reshape(-1, x.shape[-1])
    out = _product(rows, w, precision=precision, preferred_element_type=preferred_element_type)
    return out.reshape(*x.shape[:-1], w.shape[-1])


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    **_: Any,
) -> jax.Array:
    """`product` in the form that nn.Dense takes: `nn.Dense(1024, dot_general=dot_general)`.

    Parameters
    ----------
    lhs : [..., channel]
    rhs : [channel, feature]
    dimension_numbers : the contracted axes, as nn.Dense names them: the last of `lhs` and the first of `rhs`
    precision, preferred_element_type : as `jax.lax.dot_general` takes them; its other arguments are ignored

    Returns
    -------
    [..., feature]

    Raises
    ------
    ValueError : for other shapes and other dimension numbers
    """
    if dimension_numbers != (((lhs.ndim - 1,), (0,)), ((), ())) or rhs.ndim != 2:
        got = f"shapes {lhs.shape} and {rhs.shape} with dimension numbers {dimension_numbers}"
        raise ValueError(f"turbanet.networks.dot_general multiplies [..., channel] by [channel, feature], got {got}.")
    return product(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)


def _gradient_of_x(g, w, *, precision, **_):
    return jnp.einsum("nf,cf->nc", g, w, precision=precision)


def _gradient_of_w(g, x, *, precision, **_):
    return jnp.einsum("nc,nf->cf", x, g, precision=precision)


_product = bilinear("product", jnp.matmul, _gradient_of_x, _gradient_of_w)
