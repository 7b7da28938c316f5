"""PyTorch twins: the same function of the same weights, forward and backward."""

import jax
import numpy as np
import optax
import pytest
import torch

import turbanet as tn
from turbanet.lab import twins

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(6, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, 6)
BLOCKS = ((8, 1), (16, 2), (16, 1))
SMALL = {"lenet5": X[..., :1], "alexnet": X[:, :28, :28, :1]}
PAIRS = {
    "lenet": (tn.LeNet(), twins.lenet_twin),
    "lenet5": (tn.LeNet5(), twins.lenet5_twin),
    "alexnet": (tn.AlexNet((4, 6, 8, 8, 6), (20, 12)), twins.alexnet_twin),
    "vgg": (tn.VGG(13, (4, 6, 8, 8, 8)), twins.vgg_twin),
    "mobilenet": (tn.MobileNet(BLOCKS), lambda params: twins.mobilenet_twin(params, BLOCKS)),
    "resnet": (tn.ResNet(14), twins.resnet_twin),
}


@pytest.fixture(scope="module", params=PAIRS)
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


DEPTHS = {
    "vgg11": (tn.VGG(11, (4, 6, 8, 8, 8)), twins.vgg_twin),
    "vgg16": (tn.VGG(16, (2, 2, 4, 4, 4)), twins.vgg_twin),
    "vgg19": (tn.VGG(19, (2, 2, 4, 4, 4)), twins.vgg_twin),
    "resnet20": (tn.ResNet(20), twins.resnet_twin),
    "resnet44": (tn.ResNet(44), twins.resnet_twin),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_a_twin_of_another_depth_predicts_the_same(name):
    model, make = DEPTHS[name]
    variables = model.init(jax.random.key(1), X[:1])
    twin = twins.with_statistics(make(variables["params"]).eval(), variables["batch_stats"])
    with jax.disable_jit():
        ours = np.asarray(model.apply(variables, X))
    np.testing.assert_allclose(run(twin, X), ours, rtol=1e-4, atol=1e-4 * np.abs(ours).max())


def test_lenet_twin_takes_one_member():
    with pytest.raises(ValueError, match="needs the params of one LeNet, got"):
        twins.lenet_twin({"Dense_0": {}})


def test_a_vgg_of_another_depth_is_refused():
    with pytest.raises(ValueError, match="depth of 11, 13, 16, 19, got 12"):
        tn.VGG(12).init(jax.random.key(0), X)


@pytest.mark.parametrize("depth", [2, 19])
def test_a_resnet_of_another_depth_is_refused(depth):
    with pytest.raises(ValueError, match="depth is 6 n"):
        tn.ResNet(depth).init(jax.random.key(0), X)


@pytest.mark.parametrize("model, name", [(tn.LeNet(), "LeNet"), (tn.LeNet5(), "LeNet5"), (tn.AlexNet(), "AlexNet")])
def test_a_shape_that_a_model_cannot_take_is_refused(model, name):
    with pytest.raises(ValueError, match=f"{name} needs x .*got shape"):
        model.init(jax.random.key(0), X[:, :7, :7])


@pytest.mark.parametrize("model", [tn.VGG(), tn.MobileNet(), tn.ResNet()])
def test_rows_of_features_are_no_images(model):
    with pytest.raises(ValueError, match="needs x .*got shape"):
        model.init(jax.random.key(0), np.zeros((1, 784), np.float32))
