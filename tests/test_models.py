"""The architectures, against NumPy and PyTorch."""

import subprocess
import sys

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
