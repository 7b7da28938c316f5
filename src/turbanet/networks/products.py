"""Products that are linear in two arrays, with gradients of our own where JAX's are slow in a swarm."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def bilinear(name, function, of_first, of_second):
    """`function(a, b, **how)` of one member, linear in a and in b, as JAX is to differentiate it, in any mode.

    of_first(g, b, **how) and of_second(g, a, **how) are the gradients of a and b from g, the output's; the values in
    `how` are hashable. A primitive of JAX's, for `jax.custom_vjp` has no forward mode.
    """
    primitive = Primitive(name)

    def mapped(function, members, how):
        function = partial(function, **dict(how))
        for _ in range(members):
            function = jax.vmap(function)
        return function

    def compute(a, b, *, members, how):
        return mapped(function, members, how)(a, b)

    def shape(a, b, **rest):
        out = jax.eval_shape(partial(compute, **rest), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)))
        return jax.core.ShapedArray(out.shape, out.dtype)

    def first(g, a, b, *, members, how):
        return mapped(of_first, members, how)(g, b).astype(a.aval.dtype)

    def second(g, a, b, *, members, how):
        return mapped(of_second, members, how)(g, a).astype(b.aval.dtype)

    def vectorised(operands, axes, *, members, how):
        if None in axes:  # members share one of them: JAX makes one product of it
            return jax.vmap(partial(compute, members=members, how=how), axes)(*operands), 0
        moved = (jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes))
        return primitive.bind(*moved, members=members + 1, how=how), 0

    primitive.def_impl(compute)
    primitive.def_abstract_eval(shape)
    ad.defbilinear(primitive, first, second)
    batching.primitive_batchers[primitive] = vectorised
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return lambda a, b, **how: primitive.bind(a, b, members=0, how=tuple(how.items()))


def product(x, w, *, precision=None, preferred_element_type=None):
    """`jnp.matmul` of x [..., channel] and w [channel, feature].

    JAX takes the gradient of w as the transpose of [feature, channel]. With an axis of members XLA on a CPU leaves that
    to whatever reads the gradient next, which then reads it across: with 512 channels and features this took longer
    than the product.
    """
    how = {"precision": precision, "preferred_element_type": preferred_element_type}
    return _product(x.reshape(-1, x.shape[-1]), w, **how).reshape(*x.shape[:-1], w.shape[-1])


def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, **_):
    """`product` in the form that nn.Dense takes: `nn.Dense(1024, dot_general=dot_general)`. Raises ValueError else."""
    if dimension_numbers != (((lhs.ndim - 1,), (0,)), ((), ())) or rhs.ndim != 2:
        raise ValueError(
            "turbanet.dot_general multiplies [..., channel] by [channel, feature], as nn.Dense does, got the "
            f"shapes {lhs.shape} and {rhs.shape} with the dimension numbers {dimension_numbers}."
        )
    return product(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)


def _of_x(g, w, *, precision, **_):
    return jnp.einsum("nf,cf->nc", g, w, precision=precision)


def _of_w(g, x, *, precision, **_):
    return jnp.einsum("nc,nf->cf", x, g, precision=precision)


_product = bilinear("product", jnp.matmul, _of_x, _of_w)
