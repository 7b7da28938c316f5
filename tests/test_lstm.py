"""The LSTM with a gradient of its own, against Flax's and JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from tiers import first

from turbanet import LSTM
from turbanet.networks.cpu.lstm import lstm

rng = np.random.default_rng(0)
TIME, BATCH, FEATURES, HIDDEN = 6, 4, 3, 5


class FlaxLSTM(nn.Module):
    """`tn.LSTM` as Flax writes it."""

    hidden: int = HIDDEN
    dtype: type | None = None

    @nn.compact
    def __call__(self, x):
        (_, last), _ = nn.RNN(nn.OptimizedLSTMCell(self.hidden, dtype=self.dtype), return_carry=True)(x)
        return nn.Dense(1, dtype=self.dtype)(last)


@pytest.mark.parametrize("types", [(np.int32, np.float32), (np.float16, np.float32), (bool, bool)])
def test_one_floating_type_is_asked_for(types):
    x, *weights = np.zeros((2, 1, 3)), np.zeros((3, 8)), np.zeros((2, 8)), np.zeros(8)
    with pytest.raises(ValueError, match="lstm takes x and weights of one floating-point type, got "):
        lstm(jnp.asarray(x, types[0]), *(jnp.asarray(each, types[1]) for each in weights))


def drawn(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.fixture
def weights():
    return drawn(FEATURES, 4 * HIDDEN), drawn(HIDDEN, 4 * HIDDEN), drawn(4 * HIDDEN)


def by_flax(x, kernel, recurrent_kernel, bias):
    """`lstm` by Flax's cell and JAX's gradient."""
    parts = (jnp.split(part, 4, axis=-1) for part in (kernel, recurrent_kernel, bias))
    params = {}
    for gate, of_x, of_h, b in zip("ifgo", *parts):
        params |= {f"i{gate}": {"kernel": of_x}, f"h{gate}": {"kernel": of_h, "bias": b}}
    cell = nn.OptimizedLSTMCell(recurrent_kernel.shape[0])
    network = nn.RNN(cell, return_carry=True, time_major=True)
    return network.apply({"params": {"cell": params}}, x)[0][1]


def close(ours, theirs, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), ours, theirs)


@pytest.mark.parametrize(("batch",), first(2, [((2, BATCH),), ((),), ((BATCH,),)]), ids=str)
def test_value_and_gradients_are_flax_s(weights, batch):
    x = drawn(TIME, *batch, FEATURES)
    every = tuple(range(4))
    values = [jax.value_and_grad(lambda *a, f=f: (f(*a) ** 2).sum(), every)(x, *weights) for f in (lstm, by_flax)]
    assert values[0][0].shape == () and lstm(x, *weights).shape == (*batch, HIDDEN)
    close(*values)


def test_forward_mode_and_second_derivatives_are_jax_s(weights):
    arguments = (drawn(TIME, BATCH, FEATURES), *weights)
    tangents = tuple(drawn(*a.shape) for a in arguments)
    close(*(jax.jit(lambda *a, f=f: jax.jvp(f, a[:4], a[4:]))(*arguments, *tangents) for f in (lstm, by_flax)))

    def curvature(f):
        loss = jax.grad(lambda *a: (f(*a) ** 2).sum(), range(4))
        return jax.jit(lambda a, da: (jax.jvp(loss, a, da)[1], jax.vjp(loss, *a)[1](da)))(arguments, tangents)

    close(curvature(lstm), curvature(by_flax), 2e-4)


def test_each_member_of_a_swarm_has_its_own(weights):
    members = [drawn(2, *a.shape) for a in (jnp.zeros((TIME, BATCH, FEATURES)), *weights)]

    @jax.jit
    def gradients(*a):
        return jax.grad(lambda *a: (lstm(*a) ** 2).sum(), range(4))(*a)

    alone = [gradients(*(a[m] for a in members)) for m in range(2)]
    close(jax.vmap(gradients)(*members), jax.tree.map(lambda *a: jnp.stack(a), *alone))


def test_the_gradient_of_the_weights_is_one_product_after_the_loop(weights):
    gradient = jax.grad(lambda *a: lstm(*a).sum(), range(1, 4))
    text = jax.jit(gradient).lower(drawn(TIME, BATCH, FEATURES), *weights).as_text()
    assert text.count(f"tensor<{TIME * BATCH}x{HIDDEN}xf32>, tensor<{TIME * BATCH}x{4 * HIDDEN}xf32>") == 1


@pytest.mark.parametrize("dtype", first(2, [None, jnp.bfloat16, jnp.float16]), ids=str)
def test_the_network_is_flax_s(dtype):
    x = drawn(BATCH, TIME, FEATURES)
    ours, theirs = LSTM(HIDDEN, dtype=dtype), FlaxLSTM(dtype=dtype)
    params = theirs.init(jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, params, ours.init(jax.random.key(1), x))
    out = [model.apply(params, x) for model in (ours, theirs)]
    assert out[0].dtype == out[1].dtype
    close(*(o.astype(jnp.float32) for o in out), 2e-5 if dtype is None else 2e-2)


def test_half_precision_keeps_gates_and_cell_state_in_float32(weights):
    x, *weights = (a.astype(jnp.bfloat16) for a in (drawn(TIME, BATCH, FEATURES), *weights))
    text = str(jax.make_jaxpr(lstm)(x, *weights))
    assert lstm(x, *weights).dtype == jnp.bfloat16
    assert text.count(":f32[4,20] = tanh ") == text.count(":f32[4,5] = tanh ") == 1


@pytest.mark.parametrize("dtype", first(1, [jnp.bfloat16, jnp.float16]), ids=str)
def test_half_precision_gradients_are_near_float32_s(weights, dtype):
    arguments = (drawn(TIME, BATCH, FEATURES), *weights)
    exact = jax.grad(lambda *a: lstm(*a).sum(), range(4))(*arguments)
    rough = jax.grad(lambda *a: lstm(*a).sum(), range(4))(*(a.astype(dtype) for a in arguments))
    assert all(leaf.dtype == dtype for leaf in rough)
    for ours, wanted in zip(rough, exact):
        assert np.abs(ours.astype(jnp.float32) - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("hidden, features", [(HIDDEN, FEATURES + 1), (HIDDEN + 1, FEATURES)])
def test_parameters_of_other_sizes_are_refused(hidden, features):
    params = LSTM(HIDDEN).init(jax.random.key(0), drawn(BATCH, TIME, FEATURES))
    with pytest.raises(ScopeParamShapeError):
        LSTM(hidden).apply(params, drawn(BATCH, TIME, features))


def test_no_time_steps_leave_the_state_at_zero():
    out, variables = LSTM(HIDDEN).init_with_output(jax.random.key(0), drawn(BATCH, 0, FEATURES))
    np.testing.assert_array_equal(out, np.zeros((BATCH, 1)))
    assert variables["params"]["OptimizedLSTMCell_0"]["ii"]["kernel"].shape == (FEATURES, HIDDEN)
