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
PAIRS = {
    "lenet": (tn.LeNet(), twins.lenet_twin),
    "vgg": (tn.VGG(13, (4, 6, 8, 8, 8)), twins.vgg_twin),
    "mobilenet": (tn.MobileNet(BLOCKS), lambda params: twins.mobilenet_twin(params, BLOCKS)),
    "resnet": (tn.ResNet(14), twins.resnet_twin),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    """(a swarm of one after one step, its PyTorch twin from the same weights after the same step, their losses)."""
    model, make = PAIRS[request.param]
    swarm = tn.TurbaTrainState.swarm(model, optax.adam(0.01), 1, sample_input=X[:1], seed=3)
    moved = jax.tree.map(lambda leaf: leaf + 0.01, swarm.params)  # biases that are not zero
    swarm = swarm.replace(params=moved)
    twin = make(swarm.get_state(0).params).train()
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    loss = torch.nn.functional.cross_entropy(twin(torch.from_numpy(X)), torch.from_numpy(Y))
    loss.backward()
    optimizer.step()
    trained, ours, _ = swarm.train(X, Y, tn.softmax_cross_entropy)
    return trained, twin.eval(), float(ours[0]), float(loss.detach())


def test_a_twin_has_the_same_loss(pair):
    assert pair[2] == pytest.approx(pair[3], rel=1e-4)


def test_a_twin_moves_by_the_same_gradients(pair):
    trained, twin, _, _ = pair
    ours = tn.predict(trained, X)[0]
    with torch.no_grad():
        theirs = twin(torch.from_numpy(X)).numpy()
    assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()  # running variances: divided by n, and by n - 1


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
