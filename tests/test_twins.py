"""PyTorch twins: the same function of the same weights, forward and backward."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
import torch
from tiers import first

import turbanet as tn
from study.baselines import twins

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(6, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, 6)
BLOCKS = ((8, 1), (16, 2), (16, 1))
SMALL = {"mcmahan": X[:, :28, :28, :1], "lenet5": X[..., :1], "alexnet": X[:, :28, :28, :1]}
PAIRS = {
    "lenet": (tn.networks.LeNet(), twins.lenet_twin),
    "mcmahan": (tn.networks.LeNet(features=(3, 4), padding=2, hidden=(12,)), partial(twins.lenet_twin, padding=2)),
    "lenet5": (tn.networks.LeNet5(), twins.lenet5_twin),
    "alexnet": (tn.networks.AlexNet((4, 6, 8, 8, 6), (20, 12)), twins.alexnet_twin),
    "vgg": (tn.networks.VGG(11, (4, 6, 8, 8, 8)), twins.vgg_twin),
    "mobilenet": (tn.networks.MobileNet(BLOCKS), lambda params: twins.mobilenet_twin(params, BLOCKS)),
    "resnet": (tn.networks.ResNet(8), twins.resnet_twin),
}
PLAIN = {
    "mlp": (tn.MLP((8, 5, 4)), twins.mlp_twin, rng.normal(size=(24, 6)).astype(np.float32)),
    "lstm": (tn.LSTM(hidden=5, outputs=2), twins.lstm_twin, rng.normal(size=(24, 7, 3)).astype(np.float32)),
}


@pytest.fixture(scope="module", params=first(1, PAIRS))
def pair(request):
    """(a swarm of one after one step, its PyTorch twin after the same step, their losses, images, the maker)."""
    model, make = PAIRS[request.param]
    x = SMALL.get(request.param, X)
    swarm = tn.TurbaTrainState.swarm(model, optax.adam(0.001), 1, sample_input=x[:1], seed=3)
    moved = jax.tree.map(lambda leaf: leaf + 0.01, swarm.params)  # biases that are not zero
    swarm = swarm.replace(params=moved)
    twin = make(swarm.get_state(0).params).train()
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.001)
    loss = torch.nn.functional.cross_entropy(twin(torch.from_numpy(x)), torch.from_numpy(Y))
    loss.backward()
    optimizer.step()
    trained, ours, _ = swarm.train(x, Y, tn.softmax_cross_entropy)
    return trained, twin.eval(), float(ours[0]), float(loss.detach()), x, make


def run(twin, x):
    with torch.no_grad():
        return twin(torch.from_numpy(x)).numpy()


def test_a_twin_has_the_same_loss(pair):
    assert pair[2] == pytest.approx(pair[3], rel=1e-4)


def test_a_twin_moves_by_the_same_gradients(pair):
    trained, twin, _, _, x, _ = pair
    ours = tn.predict(trained, x)[0]
    theirs = run(twin, x)
    assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()  # running variances: divided by n, and by n - 1


def test_a_twin_of_trained_weights_and_statistics_predicts_the_same(pair):
    trained, _, _, _, x, make = pair
    state = trained.get_state(0)
    twin = make(state.params).eval()
    if state.collections:
        twins.with_statistics(twin, state.collections["batch_stats"])
    ours = np.asarray(tn.predict(trained, x)[0])
    np.testing.assert_allclose(run(twin, x), ours, rtol=1e-4, atol=1e-4 * np.abs(ours).max())


def test_weights_come_back_from_a_twin(pair):
    trained, _, _, _, _, make = pair
    state = trained.get_state(0)
    twin = make(state.params)
    if state.collections:
        twins.with_statistics(twin, state.collections["batch_stats"])
    expected = {"params": state.params, **state.collections}
    back = twins.variables(twin)
    assert jax.tree.structure(back) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, back, expected)


def test_weights_of_dense_layers_alone_come_back_too():
    params = tn.TurbaTrainState.swarm(tn.MLP((5, 2)), optax.adam(0.1), 1, 3).get_state(0).params
    back = twins.variables(twins.mlp_twin(params))
    assert back.keys() == {"params"}
    jax.tree.map(np.testing.assert_array_equal, back["params"], params)


DEPTHS = {
    "vgg13": (tn.networks.VGG(13, (2, 2, 4, 4, 4)), twins.vgg_twin),
    "vgg16": (tn.networks.VGG(16, (2, 2, 4, 4, 4)), twins.vgg_twin),
    "vgg19": (tn.networks.VGG(19, (2, 2, 4, 4, 4)), twins.vgg_twin),
    "resnet20": (tn.networks.ResNet(20), twins.resnet_twin),
}


def drawn(leaf):
    """Weights, norms or statistics of this shape: Flax's own would compile for seconds to be drawn."""
    if leaf.ndim == 1:
        return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
    return rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, leaf.shape).astype(np.float32)


@pytest.mark.parametrize("name", first(2, ["vgg13", "resnet20", "vgg16", "vgg19"]))
def test_a_twin_of_another_depth_predicts_the_same(name):
    model, make = DEPTHS[name]
    variables = jax.tree.map(drawn, jax.eval_shape(model.init, jax.random.key(1), X[:1]))
    twin = twins.with_statistics(make(variables["params"]).eval(), variables["batch_stats"])
    with jax.disable_jit():
        ours = np.asarray(model.apply(variables, X))
    np.testing.assert_allclose(run(twin, X), ours, rtol=1e-4, atol=1e-4 * np.abs(ours).max())


def test_lenet_twin_takes_one_member():
    with pytest.raises(ValueError, match="needs the params of one LeNet, got"):
        twins.lenet_twin({"Dense_0": {}})


def test_a_vgg_of_another_depth_is_refused():
    with pytest.raises(ValueError, match="depth of 11, 13, 16, 19, got 12"):
        tn.networks.VGG(12).init(jax.random.key(0), X)


@pytest.mark.parametrize("depth", [2, 19])
def test_a_resnet_of_another_depth_is_refused(depth):
    with pytest.raises(ValueError, match="depth is 6 n"):
        tn.networks.ResNet(depth).init(jax.random.key(0), X)


@pytest.mark.parametrize(
    "model, name",
    [(tn.networks.LeNet(), "LeNet"), (tn.networks.LeNet5(), "LeNet5"), (tn.networks.AlexNet(), "AlexNet")],
)
def test_a_shape_that_a_model_cannot_take_is_refused(model, name):
    with pytest.raises(ValueError, match=f"{name} needs x .*got shape"):
        model.init(jax.random.key(0), X[:, :7, :7])


@pytest.mark.parametrize("model", [tn.networks.VGG(), tn.networks.MobileNet(), tn.networks.ResNet()])
def test_rows_of_features_are_no_images(model):
    with pytest.raises(ValueError, match="needs x .*got shape"):
        model.init(jax.random.key(0), np.zeros((1, 784), np.float32))


@cache
def plain_params(name):
    model, _, x = PLAIN[name]
    return model.init(jax.random.key(0), x[:1])["params"]


def plain_twin(name):
    return PLAIN[name][1](plain_params(name))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_twin_predicts_the_same(name):
    model, make, x = PLAIN[name]
    params = plain_params(name)
    np.testing.assert_allclose(run(make(params), x), model.apply({"params": params}, x), rtol=1e-5, atol=1e-5)


def test_mlp_twin_sorts_layers_by_number():
    model, x = tn.MLP((3,) * 12), np.ones((2, 3), np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    shifted = jax.tree.map(lambda leaf: leaf + 0.1, params)
    twin = twins.mlp_twin(dict(sorted(shifted.items())))
    np.testing.assert_allclose(run(twin, x), model.apply({"params": shifted}, x), rtol=1e-5)


def test_lstm_twin_copies_biases():
    model, x = tn.LSTM(hidden=4), np.ones((2, 3, 1), np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    noise = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + noise.normal(size=leaf.shape).astype(np.float32), params)
    np.testing.assert_allclose(run(twins.lstm_twin(params), x), model.apply({"params": params}, x), rtol=1e-5)


def test_twins_want_one_member():
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), plain_params("mlp"))
    with pytest.raises(ValueError, match="pass one member's params"):
        twins.mlp_twin(stacked)


def test_twins_name_layers_they_do_not_know():
    with pytest.raises(ValueError, match="OptimizedLSTMCell_0"):
        twins.mlp_twin(plain_params("lstm"))
    with pytest.raises(ValueError, match="Dense_2"):
        twins.lstm_twin(plain_params("mlp"))


@pytest.mark.parametrize("name", PLAIN)
def test_reinitialise_changes_weights_and_repeats(name):
    twin, x = plain_twin(name), PLAIN[name][2]
    first, again, other = (run(twins.reinitialise(twin, seed=seed), x) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.parametrize("name", PLAIN)
def test_reinitialise_leaves_its_argument(name):
    twin, x = plain_twin(name), PLAIN[name][2]
    before = run(twin, x)
    assert not np.allclose(run(twins.reinitialise(twin, seed=0), x), before)
    np.testing.assert_array_equal(run(twin, x), before)


def test_reinitialise_is_pytorchs_own():
    twin = twins.reinitialise(plain_twin("mlp"), seed=3)
    torch.manual_seed(3)
    own = [torch.nn.Linear(6, 8), torch.nn.Linear(8, 5), torch.nn.Linear(5, 4)]
    for layer, expected in zip(twin[::2], own, strict=True):
        torch.testing.assert_close(layer.weight, expected.weight, rtol=0, atol=0)
        torch.testing.assert_close(layer.bias, expected.bias, rtol=0, atol=0)


def test_reinitialise_keeps_lstm_bounds():
    twin = twins.reinitialise(plain_twin("lstm"), seed=0)
    bound = 1 / np.sqrt(5)
    trained = {name: p for name, p in twin.lstm.named_parameters() if p.requires_grad}
    assert set(trained) == {"weight_ih_l0", "weight_hh_l0", "bias_hh_l0"}
    assert all(bound / 2 < p.abs().max() <= bound for p in trained.values())
    assert not twin.lstm.bias_ih_l0.any()


def test_reinitialise_leaves_the_global_generator():
    before = torch.random.get_rng_state()
    twins.reinitialise(plain_twin("mlp"), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
