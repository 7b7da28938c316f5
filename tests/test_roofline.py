"""Operations against counts by hand; the peaks are positive and of the right order, no time is asserted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import turbanet as tn
from study.measurement import roofline

A, B = jnp.ones((3, 4)), jnp.ones((4, 5))


def test_a_product_counts_two_operations_for_each_term():
    assert roofline.operations(jnp.matmul, A, B) == 2 * 3 * 4 * 5


def test_a_batched_product_counts_every_one():
    assert roofline.operations(jax.vmap(jnp.matmul, (0, None)), jnp.ones((7, 3, 4)), B) == 7 * 2 * 3 * 4 * 5


def test_a_scan_counts_every_round():
    def run(a):
        return jax.lax.scan(lambda carry, _: (carry @ jnp.ones((4, 4)), None), a, length=6)

    assert roofline.operations(run, A) == 6 * 2 * 3 * 4 * 4


def test_what_is_jitted_or_given_a_gradient_of_its_own_is_looked_into():
    assert roofline.operations(jax.jit(lambda a: jax.nn.relu(a @ B)), A) == 2 * 3 * 4 * 5


def test_a_network_forward_and_backward():
    model = tn.MLP((16, 2))
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    x = jnp.ones((8, 3))
    # forward, gradient by the weights, gradient by the input: the first layer needs none by its input
    expected = 2 * 8 * (2 * 3 * 16 + 3 * 16 * 2)
    assert roofline.operations(jax.value_and_grad(lambda p: model.apply(p, x).sum()), params) == expected


@pytest.mark.parametrize("groups", [1, 3])
def test_a_convolution_counts_its_window(groups):
    conv = nn.Conv(6, (5, 5), padding="VALID", feature_group_count=groups)
    x = jnp.ones((2, 9, 9, 3))
    params = conv.init(jax.random.key(0), x)
    assert roofline.operations(conv.apply, params, x) == 2 * (2 * 5 * 5 * 6) * (5 * 5 * 3 // groups)


def test_nothing_elementwise_is_counted():
    assert roofline.operations(jnp.tanh, A) == 0


def test_peak_and_bandwidth_are_positive():
    assert np.isfinite(roofline.matmul_peak(64, repeats=1)) and roofline.matmul_peak(64, repeats=1) > 0
    assert roofline.bandwidth(0.25, repeats=1) > 0


def test_a_product_that_nothing_uses_is_not_counted():
    assert roofline.operations(lambda a: (a @ B, 2 * a)[1], A) == 0
