"""float32 unless asked: bfloat16 arithmetic on float32 state, float64 where JAX's x64 is on."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.extend.core import jaxprs_in_params
from tiers import first

import turbanet as tn
from study.baselines.twins import mlp_twin
from turbanet.core.member import train_step

rng = np.random.default_rng(0)
ROWS, SERIES, IMAGES = (rng.normal(size=s).astype(np.float32) for s in ((6, 5), (6, 4, 2), (6, 32, 32, 3)))
LABELS = rng.integers(0, 3, 6)
NARROW = ((8, 1), (8, 2))
MODELS = {
    "mlp": (tn.MLP, {"widths": (7, 3)}, ROWS),
    "mlp, features first": (tn.MLP, {"widths": (7, 3), "features_first": True}, ROWS),
    "lstm": (tn.LSTM, {"hidden": 4, "outputs": 3}, SERIES),
    "lenet": (tn.networks.LeNet, {"classes": 3}, IMAGES),
    "vgg": (tn.networks.VGG, {"widths": (4, 4, 4, 4, 4), "classes": 3}, IMAGES),
    "mobilenet": (tn.networks.MobileNet, {"blocks": NARROW, "classes": 3}, IMAGES),
    "resnet": (tn.networks.ResNet, {"depth": 8, "classes": 3}, IMAGES),
}


def swarm_of(kind, **how):
    make, settings, x = MODELS[kind]
    return tn.TurbaTrainState.swarm(make(**settings, **how), optax.adam(0.001), 2, sample_input=x[:1], seed=1), x


@lru_cache
def history_of(kind, **how):
    swarm, x = swarm_of(kind, **how)
    return tn.fit(swarm, x, LABELS, tn.softmax_cross_entropy, epochs=3, batch_size=3, progress=False)[1]


def one_step(kind, **how):
    """(the trace of one step of one member, the types of what it returns)."""
    make, settings, x = MODELS[kind]
    model = make(**settings, **how)

    def begun():
        variables = model.init(jax.random.key(0), x)
        params, rest = variables["params"], {name: variables[name] for name in variables if name != "params"}
        return tn.TurbaTrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.001), collections=rest)

    step = partial(train_step, tn.softmax_cross_entropy)
    return jax.make_jaxpr(step, return_shape=True)(jax.eval_shape(begun), x, LABELS)


def float_types(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def product_types(jaxpr):
    """The input types of every matrix product and convolution in a trace."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            found |= {v.aval.dtype for v in equation.invars}
        for inner in jaxprs_in_params(equation.params):
            found |= product_types(inner)
    return found


OTHERS = ("vgg", "mobilenet")  # convolutions and normalisations as those of a ResNet
KINDS = first(len(MODELS) - 2, [*(kind for kind in MODELS if kind not in OTHERS), *OTHERS])


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_float32_by_default(kind):
    trace, out = one_step(kind)
    assert product_types(trace.jaxpr) == float_types(out) == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16_computes_products_and_keeps_float32_state(kind):
    trace, out = one_step(kind, dtype=jnp.bfloat16)
    assert product_types(trace.jaxpr) == {jnp.dtype("bfloat16")}
    assert float_types(out) == {jnp.dtype("float32")}  # the state, the loss, the prediction handed to it


@pytest.mark.parametrize("kind", first(1, ["mlp", "lstm", "mlp, features first", "lenet"]))
def test_bfloat16_trains_as_float32_within_its_digits(kind):
    half, full = history_of(kind, dtype=jnp.bfloat16).train_loss, history_of(kind).train_loss
    assert half.dtype == np.float32 and not np.array_equal(half, full)
    np.testing.assert_allclose(half, full, rtol=0.02)


def test_a_loss_of_bfloat16_predictions_is_computed_in_float32():
    logits = jnp.asarray(rng.normal(size=(64, 3)), jnp.bfloat16)
    y = rng.integers(0, 3, 64)
    loss, prediction = tn.softmax_cross_entropy({}, ROWS, y, lambda variables, x: logits)
    wide = np.asarray(logits, np.float64)
    expected = np.mean(np.log(np.exp(wide).sum(1)) - wide[np.arange(64), y])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert prediction.dtype == jnp.float32


@pytest.mark.parametrize("kind", KINDS)
def test_x64_makes_everything_float64(kind):
    with jax.enable_x64(True):
        trace, (state, loss, _) = one_step(kind)
        assert float_types((state.params, state.opt_state, loss)) == {jnp.dtype("float64")}
        assert product_types(trace.jaxpr) == {jnp.dtype("float64")}


def test_x64_trains_as_pytorch_does_in_float64():
    with jax.enable_x64(True):
        swarm, x = swarm_of("mlp")
        twins = [mlp_twin(one.params).double() for one in swarm]
        _, history = tn.fit(swarm, x.astype(np.float64), LABELS, tn.softmax_cross_entropy, epochs=20, progress=False)
    for member, twin in enumerate(twins):
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.001)
        for epoch in range(20):
            loss = torch.nn.functional.cross_entropy(twin(torch.from_numpy(x).double()), torch.from_numpy(LABELS))
            assert history.train_loss[epoch, member] == pytest.approx(loss.item(), rel=1e-11)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
