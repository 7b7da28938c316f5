"""Products with gradients of our own: NumPy's values, JAX's derivatives in every mode, no transposed gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from turbanet.networks.cpu.products import bilinear, dot_general, product

rng = np.random.default_rng(0)
X, W = rng.normal(size=(3, 5, 4)).astype(np.float32), rng.normal(size=(3, 4, 2)).astype(np.float32)  # [member, ...]


def total(multiply):
    return lambda x, w: jnp.sin(multiply(x, w)).sum()


def test_a_product_is_numpys():
    np.testing.assert_allclose(product(jnp.array(X), jnp.array(W[0])), X @ W[0], rtol=1e-6)
    np.testing.assert_allclose(product(jnp.array(X[0, 0]), jnp.array(W[0])), X[0, 0] @ W[0], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(product)(X, W), X @ W, rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None), (1, 2)])
def test_gradients_of_members_are_jaxs(axes):
    arrays = [a[0] if axis is None else np.moveaxis(a, 0, axis) for a, axis in zip((X, W), axes)]
    ours, jaxs = (jax.jit(jax.vmap(jax.grad(total(f), (0, 1)), axes))(*arrays) for f in (product, jnp.matmul))
    for found, expected in zip(ours, jaxs):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev, jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)])
def test_every_mode_of_differentiation(mode):
    for argument in (0, 1):
        found, expected = (mode(total(f), argument)(X[0], W[0]) for f in (product, jnp.matmul))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_members_weights_is_not_the_transpose_of_another():
    programs = {f: str(jax.make_jaxpr(jax.vmap(jax.grad(total(f), 1)))(X, W)) for f in (product, jnp.matmul)}
    assert "transpose" in programs[jnp.matmul] and "transpose" not in programs[product]


def test_bfloat16_may_be_summed_in_float32():
    x, w = jnp.asarray(X[0], jnp.bfloat16), jnp.asarray(W[0], jnp.bfloat16)
    out, pull = jax.vjp(lambda x, w: product(x, w, preferred_element_type=jnp.float32), x, w)
    assert out.dtype == jnp.float32 and [g.dtype for g in pull(out)] == [jnp.bfloat16] * 2
    np.testing.assert_allclose(out, np.asarray(x, np.float32) @ np.asarray(w, np.float32), rtol=1e-6)


def test_a_dense_layer_takes_it():
    ours, flaxs = nn.Dense(2, dot_general=dot_general), nn.Dense(2)
    params = flaxs.init(jax.random.key(0), X)
    np.testing.assert_allclose(ours.apply(params, X), flaxs.apply(params, X), rtol=1e-6)


def test_another_contraction_is_refused():
    with pytest.raises(ValueError, match=r"multiplies \[\.\.\., channel\] by \[channel, feature\].*\(5, 4\)"):
        dot_general(X[0], W[0], (((0,), (0,)), ((), ())))


def test_the_gradients_handed_in_are_the_ones_used():
    twice = bilinear("twice", lambda a, b: a * b, lambda g, b: 2 * g * b, lambda g, a: 3 * g * a)
    found = jax.vmap(jax.grad(twice, (0, 1)))(jnp.array([1.0, 2.0]), jnp.array([5.0, 7.0]))
    np.testing.assert_array_equal(found, [[10, 14], [3, 6]])
