"""The architectures, against NumPy and PyTorch."""

import copy
import pickle
import subprocess
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbanet import LSTM, MLP

KEY = jax.random.key(0)
X = np.random.default_rng(3).normal(size=(5, 7, 2)).astype(np.float32)


def test_mlp_is_dense_relu_dense():
    params = MLP((3, 4)).init(KEY, X[:, 0])["params"]
    hidden = np.maximum(X[:, 0] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"], 0)
    expected = hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    np.testing.assert_allclose(MLP((3, 4)).apply({"params": params}, X[:, 0]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [nn.relu, nn.tanh, nn.silu, nn.gelu], ids=lambda each: each.__name__)
def test_a_model_is_pickled_with_its_activation(activation):
    kept = pickle.loads(pickle.dumps(MLP((3, 4), activation=activation)))
    assert kept == MLP((3, 4), activation=activation) and kept.activation is activation
    own = jax.jit(lambda x: x + 1)
    assert copy.deepcopy(own)(1) == 2


@pytest.mark.parametrize("shape", [(100, 3), (3,), (4, 30, 3)], ids=str)
def test_features_first_is_the_same_network(shape):
    x = np.random.default_rng(0).normal(size=shape)
    rows, first = MLP((5, 2), features_first=False), MLP((5, 2), features_first=True)
    params = rows.init(KEY, x)
    jax.tree.map(np.testing.assert_array_equal, params, first.init(KEY, x))

    def loss(model, params):
        prediction = model.apply(params, x)
        return (prediction**2).sum(), prediction

    slopes = (jax.jit(jax.grad(partial(loss, model), has_aux=True)) for model in (rows, first))
    (gradient, prediction), (other_gradient, other) = (slope(params) for slope in slopes)
    np.testing.assert_allclose(prediction, other, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradient, other_gradient)


@pytest.mark.parametrize("shape", [(100, 3), (4, 30, 3)], ids=str)
def test_an_activation_is_of_a_rows_features_in_either_order(shape):
    x = np.random.default_rng(0).normal(size=shape)
    rows, first = (MLP((5, 2), features_first=order, activation=jax.nn.softmax) for order in (False, True))
    params = rows.init(KEY, x)
    np.testing.assert_allclose(rows.apply(params, x), first.apply(params, x), rtol=1e-5, atol=1e-6)
    one = rows.apply(params, x.reshape(-1, 3)[:1])
    np.testing.assert_allclose(first.apply(params, x).reshape(-1, 2)[:1], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows, expected", [(128, True), (8, False)])
def test_narrow_layers_on_many_rows_compute_features_first(rows, expected):
    model, x = MLP((16, 2)), np.zeros((rows, 2), np.float32)
    params = model.init(KEY, x)
    text = str(jax.make_jaxpr(lambda x: model.apply(params, x))(x))
    assert (f"[16,{rows}]" in text) == expected and (f"[{rows},16]" in text) != expected


def test_wide_inputs_stay_rows_first():
    model, x = MLP((16, 2)), np.zeros((128, 784), np.float32)
    params = model.init(KEY, x)
    assert "[16,128]" not in str(jax.make_jaxpr(lambda x: model.apply(params, x))(x))


def test_lstm_equals_the_equations():
    model = LSTM(3, 2)
    params = model.init(KEY, X)["params"]
    cell = jax.tree.map(np.asarray, next(p for name, p in params.items() if "LSTM" in name))
    h = c = np.zeros((5, 3))
    for t in range(7):
        gate = {
            g: X[:, t] @ cell[f"i{g}"]["kernel"] + h @ cell[f"h{g}"]["kernel"] + cell[f"h{g}"]["bias"] for g in "ifgo"
        }
        i, f, o = (1 / (1 + np.exp(-gate[g])) for g in "ifo")
        c = f * c + i * np.tanh(gate["g"])
        h = o * np.tanh(c)
    expected = h @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    np.testing.assert_allclose(model.apply({"params": params}, X), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [MLP((3, 2)), LSTM(3, 2)])
def test_outputs_have_the_last_width(model):
    x = jnp.asarray(X)
    assert model.apply(model.init(KEY, x), x).shape[-1] == 2


def test_many_lstms_are_initialised_without_a_deadlock():
    code = """
import numpy as np, optax, turbanet as tn
tn.use_cores(2)
swarm = tn.TurbaTrainState.swarm(tn.LSTM(32), optax.sgd(0.1), 500, sample_input=np.zeros((1, 2, 1)))
print(np.isfinite(swarm.params["Dense_0"]["kernel"]).shape[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90)
    assert done.stdout.strip() == "500", done.stderr


@pytest.mark.parametrize("features_first", [False, True])
def test_mlp_draws_its_kernels_as_told(features_first):
    x = np.zeros((1, 6), np.float32)
    told = MLP((5, 3), features_first, kernel_init=jax.nn.initializers.constant(0.25)).init(jax.random.key(0), x)
    assert all((layer["kernel"] == 0.25).all() and (layer["bias"] == 0).all() for layer in told["params"].values())


@pytest.mark.parametrize("dropout", [20, -0.5, 1.0, [0.0, 0.2], "half"])
def test_a_rate_of_dropout_is_a_number_from_0_to_below_1(dropout):
    with pytest.raises(ValueError, match="dropout must be a number from 0 to below 1, got"):
        MLP((4, 2), dropout=dropout).init(jax.random.key(0), X)
