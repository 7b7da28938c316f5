"""The convolution and the pooling against JAX's own and PyTorch, and LeNet, which is made of them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen as nn
from jax import lax
from tiers import first

from turbanet.networks.convnets import LeNet
from turbanet.networks.cpu import conv
from turbanet.networks.cpu.batch_last import ImageLayout, batch_last_conv
from turbanet.networks.cpu.conv import default_conv, matmul_conv
from turbanet.networks.cpu.pooling import max_pool

rng = np.random.default_rng(4)
CHANNELS_LAST = {n: (f"N{s}C", f"{s}IO", f"N{s}C") for n, s in {1: "W", 2: "HW", 3: "DHW"}.items()}
IMAGES = rng.normal(size=(2, 32, 32, 3)).astype(np.float32)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def both(x, w, strides=None, padding="VALID", **how):
    """matmul_conv and lax.conv_general_dilated as functions of x and w."""
    n = x.ndim - 2
    how = dict(window_strides=strides or (1,) * n, padding=padding, dimension_numbers=CHANNELS_LAST[n]) | how
    return partial(matmul_conv, **how), partial(lax.conv_general_dilated, **how)


def value_and_gradients(f, x, w):
    """The value of f, and the gradients to x and w of the value times fixed weights."""

    @jax.jit
    def run(x, w):
        out, pull = jax.vjp(f, x, w)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return run(x, w)


CASES = {  # shape of x, shape of the kernel, the rest; `make test` tries the first 14
    "1d same stride": ((2, 9, 3), (4, 3, 4), dict(strides=(2,), padding="SAME")),
    "1d causal dilated": ((2, 9, 3), (3, 3, 4), dict(padding=[(4, 0)], rhs_dilation=(2,))),
    "1d depthwise": ((2, 9, 4), (3, 1, 8), dict(feature_group_count=4, strides=(2,))),
    "1x1 stride": ((2, 5, 6, 3), (1, 1, 3, 4), dict(strides=(2, 2))),
    "same lower": ((2, 8, 7, 3), (3, 4, 3, 4), dict(padding="SAME_LOWER")),
    "same dilated stride": ((2, 9, 8, 3), (3, 2, 3, 4), dict(padding="SAME", strides=(2, 2), rhs_dilation=(2, 3))),
    "stride over window": ((2, 9, 8, 3), (2, 2, 3, 4), dict(strides=(4, 3))),
    "negative pairs": ((2, 8, 8, 3), (3, 3, 3, 4), dict(padding=[(-1, 0), (2, -2)])),
    "dilated input": ((2, 5, 4, 3), (3, 3, 3, 4), dict(padding=[(1, 1), (2, 1)], lhs_dilation=(2, 3), strides=(1, 2))),
    "groups": ((2, 6, 6, 6), (3, 3, 2, 9), dict(feature_group_count=3, padding="SAME", strides=(2, 1))),
    "multiplier": ((2, 6, 7, 4), (3, 2, 1, 12), dict(feature_group_count=4, rhs_dilation=(1, 2))),
    "many channels odd": ((2, 7, 5, 9), (3, 3, 9, 3), dict(padding="SAME")),
    "many channels pairs": ((2, 6, 7, 8), (3, 3, 8, 4), dict(padding=[(0, 3), (4, -1)])),
    "3d groups": ((1, 4, 4, 4, 4), (2, 2, 2, 2, 6), dict(feature_group_count=2, rhs_dilation=(1, 2, 1))),
    "1d": ((2, 9, 3), (3, 3, 4), {}),
    "1d groups": ((2, 9, 4), (3, 2, 6), dict(feature_group_count=2)),
    "1x1": ((2, 5, 6, 3), (1, 1, 3, 4), {}),
    "valid": ((2, 8, 7, 3), (5, 3, 3, 4), {}),
    "same": ((2, 8, 7, 3), (3, 4, 3, 4), dict(padding="SAME")),
    "same stride": ((2, 8, 7, 3), (3, 4, 3, 4), dict(padding="SAME", strides=(2, 3))),
    "pairs": ((2, 6, 6, 3), (3, 3, 3, 4), dict(padding=[(0, 2), (3, 1)], strides=(1, 2))),
    "one channel": ((2, 6, 6, 1), (3, 3, 1, 4), {}),
    "groups 1x1": ((2, 6, 6, 6), (1, 1, 3, 4), dict(feature_group_count=2)),
    "depthwise": ((2, 6, 7, 4), (3, 3, 1, 4), dict(feature_group_count=4, padding="SAME", strides=(2, 2))),
    "many channels": ((2, 8, 6, 8), (3, 3, 8, 4), dict(padding="SAME")),
    "many channels valid": ((4, 3, 8, 8), (3, 3, 8, 4), {}),
    "3d": ((2, 5, 4, 6, 3), (3, 2, 3, 3, 4), dict(padding="SAME", strides=(2, 1, 2))),
    "3d depthwise": ((1, 4, 4, 4, 3), (2, 3, 2, 1, 6), dict(feature_group_count=3)),
}


@pytest.mark.parametrize("name", first(14, CASES))
def test_values_and_gradients_equal_jax_whatever_the_chunk(name, monkeypatch):
    shape, kernel, how = CASES[name]
    with jax.enable_x64(True):
        x, w = normal(*shape, dtype=np.float64), normal(*kernel, dtype=np.float64)
        ours, jaxs = both(x, w, **how)
        expected, whole = value_and_gradients(jaxs, x, w), value_and_gradients(ours, x, w)
        monkeypatch.setattr(conv, "CHUNK_BYTES", 1)
        monkeypatch.setattr(conv, "CHUNK_PLACES", 1)
        in_chunks = value_and_gradients(both(x, w, **how)[0], x, w)
    for of_jax, *found in zip(expected, whole, in_chunks, strict=True):
        for one in found:
            assert one.dtype == of_jax.dtype
            np.testing.assert_allclose(one, of_jax, rtol=1e-10, atol=1e-9)


def test_forward_mode_goes_through():
    x, w = normal(2, 6, 6, 8), normal(3, 3, 8, 4)
    f, g = both(x, w, padding="SAME")
    found, expected = (jax.jvp(one, (x, w), (jnp.sin(x), jnp.cos(w))) for one in (f, g))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("members", first(1, [3, 1]))
def test_second_derivatives_of_members_equal_jax(members):
    with jax.enable_x64(True):
        x, w = normal(members, 2, 6, 5, 8, dtype=np.float64), normal(members, 3, 3, 8, 4, dtype=np.float64)

        def twice(f):
            def slope(x, w):
                return sum((g**2).sum() for g in jax.grad(lambda x, w: (f(x, w) ** 3).sum(), (0, 1))(x, w))

            return jax.jit(jax.vmap(jax.grad(slope, (0, 1))))(x, w)

        for ours, expected in zip(*map(twice, both(x[0], w[0], padding="SAME"))):
            np.testing.assert_allclose(ours, expected, rtol=1e-8)


@pytest.mark.parametrize("axes", [(None, 0), (0, None)])
def test_members_that_share_images_or_a_kernel(axes):
    x, w = (a if axis == 0 else a[0] for a, axis in zip((normal(3, 2, 6, 6, 8), normal(3, 3, 3, 8, 4)), axes))
    one_member = normal(2, 6, 6, 8), normal(3, 3, 8, 4)
    found, expected = (jax.vmap(f, axes)(x, w) for f in both(*one_member, padding="SAME"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


TORCH = [  # channels, groups, stride, padding, dilation
    (3, 1, 1, 0, 1),
    (3, 1, 2, 1, 2),
    (4, 2, (2, 1), (0, 2), 1),
    (4, 4, 1, 1, 1),
]


@pytest.mark.optimized
@pytest.mark.parametrize("channels, groups, stride, padding, dilation", TORCH)
def test_values_and_gradients_equal_pytorch(channels, groups, stride, padding, dilation):
    x, w = normal(2, 9, 8, channels), normal(3, 3, channels // groups, 8)
    a = torch.tensor(np.transpose(x, (0, 3, 1, 2)), requires_grad=True)
    b = torch.tensor(np.transpose(w, (3, 2, 0, 1)), requires_grad=True)
    out = torch.nn.functional.conv2d(a, b, None, stride, padding, dilation, groups)
    pairs = [(p, p) for p in np.broadcast_to(padding, 2)]
    how = dict(rhs_dilation=(dilation,) * 2, feature_group_count=groups)
    f, _ = both(x, w, tuple(np.broadcast_to(stride, 2)), pairs, **how)
    found, dx, dw = value_and_gradients(f, x, w)
    upstream = np.cos(np.arange(found.size, dtype=np.float32)).reshape(found.shape)
    out.backward(torch.tensor(upstream.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(found, out.detach().numpy().transpose(0, 2, 3, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, a.grad.numpy().transpose(0, 2, 3, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, b.grad.numpy().transpose(2, 3, 1, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups, features", first(2, [(2, 6), (4, 4), (1, 5)]))
def test_bfloat16_is_as_near_as_jax(groups, features):
    x, w = normal(2, 8, 8, 4, dtype=jnp.bfloat16), normal(5, 5, 4 // groups, features, dtype=jnp.bfloat16)
    f, g = both(x, w, feature_group_count=groups)
    assert f(x, w).dtype == jnp.bfloat16
    exact = np.asarray(g(x.astype(jnp.float32), w.astype(jnp.float32)))
    np.testing.assert_allclose(
        np.asarray(f(x, w), np.float32), exact, rtol=2**-8, atol=1e-6
    )  # one rounding, half a unit


@pytest.mark.parametrize("groups", first(1, [2, 1, 4]))
def test_preferred_element_type_is_the_result(groups):
    x, w = normal(2, 8, 8, 4, dtype=jnp.bfloat16), normal(3, 3, 4 // groups, 4, dtype=jnp.bfloat16)
    f, g = both(x, w, feature_group_count=groups, preferred_element_type=jnp.float32)
    assert f(x, w).dtype == jnp.float32
    np.testing.assert_allclose(f(x, w), g(x.astype(jnp.float32), w.astype(jnp.float32)), rtol=1e-5, atol=1e-5)


def test_precision_reaches_the_product_and_its_gradients():
    f, _ = both(IMAGES, w := normal(3, 3, 3, 4), precision="highest")
    program = jax.jit(jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1))).lower(IMAGES, w).as_text()
    assert program.count("stablehlo.dot_general") == program.count("precision = [HIGHEST, HIGHEST]") >= 3


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_xla_convolution_is_left_in_value_and_gradient(groups):
    x, w = normal(2, 6, 6, 4), normal(3, 3, 4 // groups, 4)
    f, _ = both(x, w, (2, 2), "SAME", feature_group_count=groups)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(partial(value_and_gradients, f))(x, w))


@pytest.mark.optimized
def test_swarm_in_a_scan_trains_like_each_member_alone():
    x, kernels = normal(4, 2, 9, 9, 3), normal(3, 3, 3, 3, 3)  # x: [step, batch, height, width, channel]
    mine, own = both(x[0], kernels[0], (2, 2), "SAME")

    def train(conv, w):
        def step(w, xb):
            return w - 0.01 * jax.grad(lambda w: (conv(xb, w) ** 2).mean())(w), conv(xb, w).sum()

        return lax.scan(step, w, x)

    found = jax.jit(jax.vmap(partial(train, mine)))(kernels)
    for i, kernel in enumerate(kernels):
        for a, b in zip(found, train(own, kernel)):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)


def test_a_depthwise_convolution_of_members_compiles_in_a_scan():
    """The XLA of jax 0.10.2 writes no machine code for slices that start where a table of constants says."""
    x, w = normal(2, 32, 16, 16, 128), normal(2, 3, 3, 1, 128)
    f, _ = both(x[0], w[0], padding="SAME", feature_group_count=128)

    def train(x, w):
        def step(both, _):
            return jax.tree.map(jnp.subtract, both, jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1))(*both)), None

        return lax.scan(step, (x, w), None, length=2)[0]

    jax.jit(jax.vmap(train)).lower(x, w).compile()


LAYERS = {
    "plain": nn.Conv(4, (3, 3)),
    "numbers": nn.Conv(4, (3, 3), strides=2, padding=1),
    "rows are a batch": nn.Conv(4, 3, padding="CAUSAL"),
    "circular": nn.Conv(4, (3, 3), padding="CIRCULAR", kernel_dilation=2),
    "depthwise": nn.Conv(6, (3, 3), feature_group_count=3, use_bias=False),
    "dilated input": nn.Conv(4, (3, 3), input_dilation=2, padding=((1, 2), (2, 1))),
    "bfloat16": nn.Conv(4, (3, 3), dtype=jnp.bfloat16),
    "highest": nn.Conv(4, (3, 3), precision="highest"),
}


ONCE = ["rows are a batch", "circular", "depthwise", "bfloat16"]  # and one image
OF_IMAGES = [("plain", IMAGES[0]), *((name, IMAGES) for name in sorted(LAYERS, key=lambda name: name not in ONCE))]


@pytest.mark.parametrize(
    "name, x",
    first(1 + len(ONCE), [*OF_IMAGES, ("rows are a batch", IMAGES[0])]),
    ids=lambda x: x if isinstance(x, str) else x.ndim,
)
def test_flax_takes_it_with_the_same_parameters(name, x):
    layer = LAYERS[name]
    mine = layer.clone(conv_general_dilated=matmul_conv)
    variables = layer.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, mine.init(jax.random.key(0), x), variables)
    rtol = 1e-2 if layer.dtype else 1e-5
    np.testing.assert_allclose(
        np.asarray(mine.apply(variables, x), np.float32),
        np.asarray(layer.apply(variables, x), np.float32),
        rtol=rtol,
        atol=rtol,
    )


@pytest.mark.parametrize(
    "how, sentence",
    [
        (dict(dimension_numbers=("NHWC", "OIHW", "NHWC")), "needs channels last"),
        (dict(dimension_numbers=None), "needs channels last"),
        (dict(batch_group_count=2), "batch_group_count 1, got"),
        (dict(rhs_dilation=(4, 4)), "larger than the padded input, got an input of"),
        (dict(feature_group_count=2), "feature_group_count"),  # from here on JAX's own sentences
        (dict(strides=(1,)), "window_strides"),
        (dict(padding="SAME", lhs_dilation=(2, 2)), "padding"),
    ],
)
def test_bad_input_gets_a_sentence(how, sentence):
    x, w = normal(4, 8, 8, 3), normal(3, 3, 3, 4)
    with pytest.raises((ValueError, TypeError), match=sentence):
        both(x, w, **how)[0](x, w)


def test_default_is_the_matmul_on_a_cpu_alone(monkeypatch):
    assert default_conv() is matmul_conv
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_conv() is None


@pytest.mark.parametrize(("shape",), first(2, [((2, 7, 5, 3),), ((6, 6, 1),), ((2, 6, 8, 3),), ((3, 2, 4, 4, 2),)]))
def test_max_pool_equals_flax(shape):
    x = np.random.default_rng(0).integers(0, 3, shape).astype(np.float32)  # many ties
    upstream = normal(*max_pool(x).shape)
    mine, own = (jax.vjp(f, x) for f in (max_pool, partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2))))
    np.testing.assert_array_equal(mine[0], own[0])
    np.testing.assert_array_equal(mine[1](upstream)[0], own[1](upstream)[0])


def test_max_pool_gives_ties_to_the_first_like_pytorch():
    x = np.random.default_rng(0).integers(0, 2, (2, 6, 6, 3)).astype(np.float32)
    a = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    torch.nn.functional.max_pool2d(a, 2).sum().backward()
    found = jax.grad(lambda x: max_pool(x).sum())(x)
    np.testing.assert_array_equal(found, a.grad.numpy().transpose(0, 2, 3, 1))


def test_max_pool_shows_nan():
    x = np.zeros((4, 4, 1), np.float32)
    x[1, 2] = np.nan
    value, grad = jax.value_and_grad(lambda x: max_pool(x).sum())(x)
    assert np.isnan(value)
    np.testing.assert_array_equal(grad.sum(), 4)


def test_max_pool_has_a_forward_gradient_in_a_swarm():
    x, dx = normal(3, 2, 6, 6, 2), normal(3, 2, 6, 6, 2)
    _, found = jax.jvp(jax.vmap(max_pool), (x,), (dx,))
    for i in range(3):
        _, own = jax.jvp(lambda x: nn.max_pool(x, (2, 2), (2, 2)), (x[i],), (dx[i],))
        np.testing.assert_array_equal(found[i], own)


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(model, variables, x):
    """((loss, prediction), gradients)."""

    def loss(variables):
        prediction = model.apply(variables, x)
        return jnp.mean(jnp.sin(prediction)), prediction

    return jax.value_and_grad(loss, has_aux=True)(variables)


@pytest.mark.parametrize(("shape",), first(1, [((2, 17, 16, 3),), ((2, 28, 28, 1),)]))
def test_lenet_equals_itself_with_the_convolution_of_xla(shape):
    x, model, own = normal(*shape), LeNet(4), LeNet(4, conv=lax.conv_general_dilated)
    variables = jax.jit(model.init)(jax.random.key(1), x)
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    found = loss_and_gradients(model, variables, x)
    assert found[0][1].shape == (shape[0], 4)
    jax.tree.map(near, found, loss_and_gradients(own, variables, x))


def test_lenet_on_a_cpu_has_no_xla_convolution_unless_asked():
    variables = jax.eval_shape(LeNet().init, jax.random.key(0), IMAGES)
    for chosen, found in (None, False), (lax.conv_general_dilated, True):
        jaxpr = jax.make_jaxpr(partial(loss_and_gradients, LeNet(conv=chosen)))(variables, IMAGES)
        assert ("conv_general_dilated" in str(jaxpr)) == found


def torch_lenet(params):
    """kuangliu's and the tutorial's LeNet with these weights."""
    t = torch.nn
    pool = [t.ReLU(), t.MaxPool2d(2)]
    dense = [t.Flatten(), t.Linear(400, 120), t.ReLU(), t.Linear(120, 84), t.ReLU(), t.Linear(84, 10)]
    net = t.Sequential(t.Conv2d(3, 6, 5), *pool, t.Conv2d(6, 16, 5), *pool, *dense)
    layers = [layer for layer in net if hasattr(layer, "weight")]
    with torch.no_grad():
        for layer, weight, bias in zip(layers, *to_torch(params)):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    return net, layers


def to_torch(params):
    """Weights, or their gradients, in PyTorch's order of axes, and the biases."""
    names = ["Conv_0", "Conv_1", "Dense_0", "Dense_1", "Dense_2"]
    kernels = [np.asarray(params[name]["kernel"]) for name in names]
    kernels[2] = kernels[2].reshape(5, 5, 16, 120).transpose(2, 0, 1, 3).reshape(400, 120)  # flattened channels first
    weights = [k.transpose(3, 2, 0, 1) if k.ndim == 4 else k.T for k in kernels]
    return weights, [np.asarray(params[name]["bias"]) for name in names]


def test_lenet_equals_pytorch():
    variables = jax.jit(LeNet().init)(jax.random.key(2), IMAGES)
    net, layers = torch_lenet(variables["params"])
    out = net(torch.tensor(IMAGES.transpose(0, 3, 1, 2)))
    (loss, found), grads = loss_and_gradients(LeNet(), variables, IMAGES)
    np.testing.assert_allclose(found, out.detach().numpy(), rtol=1e-4, atol=1e-4)
    torch.sin(out).mean().backward()
    np.testing.assert_allclose(loss, torch.sin(out).mean().item(), rtol=1e-4)
    for layer, weight, bias in zip(layers, *to_torch(grads["params"])):
        np.testing.assert_allclose(weight, layer.weight.grad.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(bias, layer.bias.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 8, 3), (1, 32, 15, 3), (32, 32)])
def test_lenet_says_what_image_it_needs(shape):
    with pytest.raises(ValueError, match=r"at least 16 x 16, got shape \("):
        LeNet().init(jax.random.key(0), np.zeros(shape, np.float32))


@pytest.mark.parametrize("batch", first(2, [0, 7, 1]))
def test_any_batch_goes_in_chunks(batch, monkeypatch):
    monkeypatch.setattr(conv, "CHUNK_BYTES", 2**12)
    monkeypatch.setattr(conv, "CHUNK_PLACES", 1)
    x, w = normal(batch, 9, 9, 8), normal(3, 3, 8, 4)
    f, g = both(x, w, padding="SAME")
    np.testing.assert_allclose(f(x, w), g(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size, window, padding, batch", first(2, [(9, 3, 1, 4), (32, 5, 0, 64), (7, 2, 0, 1)]))
def test_a_convolution_with_the_batch_last_is_pytorchs(size, window, padding, batch):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(3, size, size, batch)), rng.normal(size=(window, window, 3, 5))
    given = [torch.tensor(x.transpose(3, 0, 1, 2), requires_grad=True), torch.tensor(kernel.transpose(3, 2, 0, 1))]
    given[1].requires_grad_()
    expected = torch.nn.functional.conv2d(*given, padding=padding)
    weights = rng.normal(size=expected.shape)
    (expected * torch.tensor(weights)).sum().backward()

    @jax.jit
    def value_and_pulled(x, kernel, weights):
        out, pull = jax.vjp(lambda x, kernel: batch_last_conv(x, kernel, padding), x, kernel)
        return out, *pull(weights)

    with jax.enable_x64(True):
        out, dx, dkernel = value_and_pulled(x, kernel, weights.transpose(1, 2, 3, 0))
    np.testing.assert_allclose(out.transpose(3, 0, 1, 2), expected.detach(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(dx.transpose(3, 0, 1, 2), given[0].grad, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(dkernel.transpose(3, 2, 0, 1), given[1].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", first(1, [1, 0]))
def test_forward_mode_and_members_go_through_with_the_batch_last(padding):
    x, kernel = normal(2, 3, 20, 10, 64), normal(2, 3, 3, 3, 4)  # [member, ...]; several parts of the image

    def by_jax(x, kernel):
        how = {"padding": [(padding, padding)] * 2, "dimension_numbers": CHANNELS_LAST[2]}
        return lax.conv_general_dilated(x.transpose(3, 1, 2, 0), kernel, (1, 1), **how).transpose(3, 1, 2, 0)

    @partial(jax.jit, static_argnums=0)
    def tangents(conv, x, kernel):
        derivative = jax.jvp(lambda x, kernel: conv(x, kernel), (x[0], kernel[0]), (jnp.sin(x[0]), jnp.cos(kernel[0])))
        return *derivative, *jax.vmap(jax.grad(lambda x, kernel: jnp.sin(conv(x, kernel)).sum(), (0, 1)))(x, kernel)

    found = tangents(partial(batch_last_conv, padding=padding), x, kernel)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), found, tangents(by_jax, x, kernel))


@pytest.mark.parametrize("settings", [{"strides": 2}, {"feature_group_count": 3}])
def test_what_cannot_be_done_with_the_batch_last_is_refused(settings):
    layer = ImageLayout(None, batch_last=True).convolution(3, 3, name="Conv_0", padding=1, **settings)
    with pytest.raises(ValueError, match="moves by 1 and has one group"):
        layer.init(jax.random.key(0), np.zeros((3, 8, 8, 1), np.float32))


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_images_leave_the_layout_as_they_entered_it(lead, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    x = normal(*lead, 5, 6, 3)
    inside, layout = ImageLayout.enter(x, None, features=6)
    assert inside.shape == (3, 5, 6, math.prod(lead)) and layout.channel_axis == 0
    out, plain = layout.leave(inside)
    np.testing.assert_array_equal(out, x)
    assert plain.channel_axis == -1 and plain.leave(out)[0] is out


def test_a_window_larger_than_the_image_is_refused_with_the_batch_last():
    with pytest.raises(ValueError, match="larger than the padded input"):
        batch_last_conv(np.zeros((1, 3, 3, 1)), np.zeros((5, 5, 1, 1)))
