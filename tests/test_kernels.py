"""The kernel against the same step by JAX: interpreted for its numbers, lowered for an H100 for what it can express."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from tiers import first

import turbanet as tn
from turbanet.data import sample_weight
from turbanet.kernels import emitter, reader

pytestmark = pytest.mark.cpu  # interpreted; test_kernel.py trains in the kernels of a GPU
ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu, "silu": nn.silu, "elu": nn.elu, "sigmoid": nn.sigmoid}
SINGLE = tuple(ACTIVATIONS.values())
ACTIVATIONS["every"] = lambda x: sum(activation(x) for activation in SINGLE) / len(SINGLE)


class MLP(nn.Module):
    widths: tuple
    activation: str = "relu"

    @nn.compact
    def __call__(self, x):
        for number, width in enumerate(self.widths):
            x = nn.Dense(width)(ACTIVATIONS[self.activation](x) if number else x)
        return x


def cross_entropy(prediction, y):
    hot = (y[:, None] == jnp.arange(prediction.shape[1])).astype(prediction.dtype)
    return -(hot * jax.nn.log_softmax(prediction)).sum(1).mean()


def binary(prediction, y):
    return optax.sigmoid_binary_cross_entropy(prediction[:, 0], (y > 0).astype(prediction.dtype)).mean()


@pytest.fixture(autouse=True)
def traced_for_a_gpu(monkeypatch):
    monkeypatch.setattr(sample_weight, "on_accelerator", lambda: True)


def weighted(prediction, y):
    y = y, (y > 0) * 0.5  # rows of weight 0 among them
    return tn.weighted(tn.softmax_cross_entropy)({}, prediction, y, lambda _, x: x)[0]


def probabilities(prediction, y):
    hot = (y[:, None] == jnp.arange(prediction.shape[1])).astype(prediction.dtype)
    return tn.cross_entropy({}, prediction, hot, lambda _, x: nn.softmax(x))[0]


LOSSES = {
    "classes": cross_entropy,
    "weighted": weighted,
    "probabilities": probabilities,
    "squares": lambda prediction, y: ((prediction - y[:, None]) ** 2).mean(),
    "binary": binary,
}
OPTIMIZERS = {
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "own rate": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}


def make_step(model, loss, tx):
    def step(state, x, y):
        params, moments = state
        value, grads = jax.value_and_grad(lambda params: loss(model.apply(params, x), y))(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def problem(widths=(6, 2), features=3, rows=9, members=2, activation="relu", loss="classes", optimizer="adam"):
    """A step of one member, the states of all of them, and data."""
    model, tx, rng = MLP(widths, activation), OPTIMIZERS[optimizer], np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, features)), jnp.float32)
    y = jnp.asarray(rng.integers(0, widths[-1], rows), jnp.int32)
    params = jax.vmap(lambda key: model.init(key, x))(jax.random.split(jax.random.key(1), members))
    moments = jax.vmap(tx.init)(params)
    if optimizer == "own rate":
        moments.hyperparams["learning_rate"] = jnp.linspace(1e-3, 1e-1, members)
    return make_step(model, LOSSES[loss], tx), (params, moments), (x, y)


@partial(jax.jit, static_argnums=(0, 3))
def usual(step, state, data, steps, order=None):
    """The same steps by vmap and scan: -> (state, losses [member, step])."""

    def one(state, rows):
        if rows is None:
            return jax.vmap(step, (0, None, None))(state, *data)
        return jax.vmap(lambda state, rows: step(state, *(array[rows] for array in data)))(state, rows)

    state, losses = lax.scan(one, state, None if order is None else order.swapaxes(0, 1), length=steps)
    return state, losses.T


def train_all(step, state, data, epochs, order=None, **kwargs):
    """The kernel of all members: each with its own state and order, all with the same data."""
    train = partial(emitter.train, step, **kwargs)
    return jax.vmap(train, (0, None, None, None if order is None else 0))(state, data, epochs, order)


def kernel(step, steps=1, **kwargs):
    return jax.jit(partial(train_all, step, steps=steps, interpret=True, **kwargs))


def assert_close(ours, theirs, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def lowered(step, state, data, **kwargs):
    """The kernel's program for an H100 that is not here, as text."""
    device = jax._src.mesh.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, data))
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(partial(train_all, step, epochs=8, most_epochs=8, **kwargs)).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "widths, features, rows, activation, loss, optimizer",
    first(
        6,
        [
            ((12, 3), 5, 17, "every", "classes", "adamw"),
            ((9, 3), 5, 17, "relu", "weighted", "adam"),
            ((4, 11), 3, 9, "relu", "probabilities", "adam"),
            ((18, 1), 10, 16, "tanh", "squares", "clipped"),
            ((3, 5, 1), 1, 2, "gelu", "binary", "momentum"),
            ((1, 3), 4, 9, "relu", "classes", "own rate"),
            ((12, 1), 9, 3, "silu", "squares", "adam"),
        ],
    ),
)
def test_kernel_trains_as_vmap_and_scan_do(widths, features, rows, activation, loss, optimizer):
    step, state, data = problem(widths, features, rows, 2, activation, loss, optimizer)
    assert_close(kernel(step, most_epochs=8)(state, data, 8), usual(step, state, data, 8))


@settings(max_examples=12, deadline=None)
@pytest.mark.slow
@pytest.mark.thorough
@given(
    st.lists(st.integers(1, 18), min_size=1, max_size=2),
    st.integers(1, 10),
    st.integers(2, 17),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_kernel_trains_as_vmap_and_scan_do(widths, features, rows, activation, loss, optimizer):
    classes = 3 if loss in ("classes", "weighted", "probabilities") else 1
    step, state, data = problem((*widths, classes), features, rows, 2, activation, loss, optimizer)
    assert_close(kernel(step, most_epochs=8)(state, data, 8), usual(step, state, data, 8))


@pytest.mark.parametrize(
    "widths, features, rows",
    first(1, [((20, 10), 17, 33), ((10, 3), 5, 33), ((20, 10), 17, 16), ((8, 8, 2), 8, 12)]),
)
def test_padding_never_counts(widths, features, rows):
    step, state, data = problem(widths, features, rows)
    assert_close(kernel(step, most_epochs=8)(state, data, 8), usual(step, state, data, 8))


@pytest.mark.parametrize("batch", first(1, [10, 4]))
def test_minibatches_come_in_the_members_own_order(batch):
    step, state, data = problem(rows=20)
    order = jnp.asarray(np.random.default_rng(2).integers(0, 20, (2, 6, batch)), jnp.int32)
    ours, losses = kernel(step, steps=3, most_epochs=2)(state, data, 2, order)
    theirs, of_steps = usual(step, state, data, 6, order)
    assert_close((ours, losses), (theirs, of_steps.reshape(2, 2, 3).mean(2)))


@pytest.mark.parametrize("rows", [16, 20])
def test_a_nan_stays_in_a_largest_number(rows):
    def step(state, x):
        return state * 0.5, jnp.max(jnp.abs(x * state)) + jnp.min(x * state)

    x = jnp.ones(rows).at[3].set(jnp.nan)
    _, losses = kernel(step, most_epochs=1)(jnp.ones((2, rows)), (x,), 1)
    assert np.isnan(losses).all()
    text = lowered(step, jnp.ones((2, rows)), (x,))
    assert "__gpu$xla.gpu.triton" in text


def test_fewer_epochs_compile_nothing():
    step, state, data = problem(members=3)
    train = kernel(step, most_epochs=8)
    whole, half = train(state, data, 8), train(train(state, data, 5)[0], data, 3)
    assert train._cache_size() == 1
    for a, b in zip(jax.tree.leaves(whole[0]), jax.tree.leaves(half[0])):
        np.testing.assert_array_equal(a, b)


def test_a_diverged_member_touches_no_neighbour():
    step, (params, moments), data = problem(members=3)
    train = kernel(step, most_epochs=8)
    well = train((params, moments), data, 8)
    ill = train((jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), params), moments), data, 8)
    for a, b in zip(jax.tree.leaves(well), jax.tree.leaves(ill)):
        np.testing.assert_array_equal(a[jnp.array([0, 2])], b[jnp.array([0, 2])])
    assert all(np.isnan(leaf[1]).all() for leaf in jax.tree.leaves(ill[0][0]))


def test_slices_and_pieces_are_exact():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(12, 7)), jnp.float32)

    def step(state, x):
        def loss(w):
            out = x * w
            left, right = jnp.split(out[:, 1:], 2, axis=1)
            three = jnp.concatenate([left[:, :2], right[:, 1:], jnp.pad(out[:, :3], ((0, 0), (1, 0)))], axis=1)
            return (three * jnp.arange(three.shape[1])).sum() / 100

        value, gradient = jax.value_and_grad(loss)(state)
        return state - 0.1 * gradient, value

    state = jnp.ones((2, 7))
    ours = kernel(step, most_epochs=2)(state, (x,), 2)
    theirs = lax.scan(lambda s, _: jax.vmap(step, (0, None))(s, x), state, None, length=2)
    assert_close(ours, (theirs[0], theirs[1].T))


def test_a_quotient_by_one_number_keeps_its_special_values():
    numbers, by = jnp.array([0, 1, -2, jnp.inf, jnp.nan]), jnp.array([0, -jnp.inf, jnp.nan, 3])
    state = jnp.tile(numbers, (4, 1)), by
    (ours, _), _ = kernel(lambda state, x: ((state[0] / state[1], state[1]), x.sum()), most_epochs=1)(state, (by,), 1)
    np.testing.assert_allclose(ours, numbers / by[:, None], rtol=1e-6)


@pytest.mark.skipif(not hasattr(lax, "one_minus_square"), reason="came with jax 0.11")
def test_one_minus_square_is_exact_near_one():
    step, near = lambda w, x: (lax.one_minus_square(w), x.sum()), jnp.float32([[1 - 2**-20, 0.5, 0, 3]])
    ours, _ = kernel(step, most_epochs=1)(near, (near[0],), 1)
    np.testing.assert_allclose(ours, 1 - np.float64(near) ** 2, rtol=1e-6)


def test_products_keep_their_order():
    step, state, data = problem((20, 10), 30, 16)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
    products = [op for op in reader.read(step, one, *data).operations if op.name == "dot_general"]
    shapes = [op.outputs[0].shape for op in products]
    assert shapes == [(16, 20), (16, 10), (10, 20), (16, 20), (20, 30)]


@pytest.mark.parametrize(
    "widths, features, rows",
    first(2, [((64, 32, 16), 64, 32), ((20, 10), 30, 16), ((16, 2), 2, 128), ((10, 3), 5, 33)]),
)
def test_kernel_lowers_for_an_h100(widths, features, rows):
    assert "__gpu$xla.gpu.triton" in lowered(*problem(widths, features, rows))


@jax.default_matmul_precision("highest")
def test_in_float32_products_have_a_short_side():
    assert "__gpu$xla.gpu.triton" in lowered(*problem((16, 2), 2, 128))
    with pytest.raises(reader.Refused, match=r"matrices of \[32, 64\] and \[64, 64\] in TF32, not in float32"):
        lowered(*problem((64, 32, 16), 64, 32))


@pytest.mark.parametrize("activation", first(1, sorted(ACTIVATIONS, key=lambda name: name != "every")))
def test_activations_lower_for_an_h100(activation):
    assert "__gpu$xla.gpu.triton" in lowered(*problem(activation=activation, loss="binary"))


@pytest.mark.parametrize("loss", ["weighted", "probabilities"])
def test_losses_lower_for_an_h100(loss):
    assert "__gpu$xla.gpu.triton" in lowered(*problem(widths=(6, 11), loss=loss))


@pytest.mark.parametrize("optimizer", first(3, ["adamw", "clipped", "own rate", "adam", "momentum"]))
def test_optimizers_lower_for_an_h100(optimizer):
    assert "__gpu$xla.gpu.triton" in lowered(*problem(loss="squares", optimizer=optimizer))


def test_minibatches_lower_for_an_h100():
    order = jax.ShapeDtypeStruct((2, 24, 8), jnp.int32)
    step, state, data = problem(rows=128)
    text = lowered(lambda state, x, y: step(state, x, y), state, data, steps=3, order=jnp.zeros(order.shape, jnp.int32))
    assert "__gpu$xla.gpu.triton" in text


def refusal(step, state, *batch):
    with pytest.raises(reader.Refused) as refused:
        reader.read(step, state, *batch)
    return str(refused.value)


X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


@pytest.mark.parametrize(
    "function, sentence",
    [
        (lambda w, x: lax.conv(x[None, None], w[None, None], (1, 1), "SAME").sum(), "does not take a convolution"),
        (lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c + r), None), w[0], x)[0].sum(), "a recurrence (scan)"),
        (lambda w, x: w[x[:, 0].astype(jnp.int32)].sum(), "a gather: compare class labels with jnp.arange(classes)"),
        (lambda w, x: (jax.random.normal(jax.random.key(0), x.shape) * w).sum(), "random numbers, as dropout does"),
        (lambda w, x: jnp.sort(w * x).sum(), "does not take sort"),
        (lambda w, x: (w * x).reshape(16, 2).sum(), "does not reshape [8, 4] to [16, 2]"),
        (lambda w, x: (w * x)[1:].sum(), "does not slice along axes of 8, but of up to 4"),
        (lambda w, x: jnp.pad(w * x, ((1, 0), (0, 0)))[1:].sum(), "does not pad along axes of 9, but of up to 4"),
    ],
)
def test_refusals_name_what_is_off_the_list(function, sentence):
    def step(w, x):
        return w, function(w, x)

    assert sentence in refusal(step, X, X)


def test_too_many_bytes_are_refused_by_shapes_alone():
    step, state, data = problem((32, 10), features=784, rows=8)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
    assert "at most 131072 bytes" in refusal(step, one, *data)


def test_states_that_change_are_refused():
    assert "keep shape and dtype; float32[8, 4] became float32[8]" in refusal(lambda w, x: (w[:, 0], x.sum()), X, X)
    assert "scalar loss; this one has shape [8]" in refusal(lambda w, x: (w, x.sum(1)), X, X)


def test_dead_random_keys_are_no_reason():
    def step(w, x):
        jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), x.shape)
        return w * 0.5, x.sum()

    assert {op.name for op in reader.read(step, X, X).operations} == {"mul", "reduce_sum"}


@pytest.mark.parametrize("name, sign", [("max", -1), ("min", 1)])
def test_the_extremes_of_a_padded_axis_are_of_its_numbers(name, sign):
    def step(w, x):
        return getattr(jnp, name)(w) + 0 * w, x.sum()

    numbers = sign * jnp.arange(1.0, 12)
    (ours,), _ = kernel(step, most_epochs=1)(numbers[None], (numbers,), 1)
    np.testing.assert_allclose(ours, np.full(11, sign))


def test_a_step_of_one_byte_more_than_the_limit_is_refused(monkeypatch):
    step, state, data = problem((20, 10), 30, 16)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
    size = reader.read(step, one, *data).bytes
    monkeypatch.setattr(reader, "LIMIT", size)
    assert reader.read(step, one, *data).bytes == size
    monkeypatch.setattr(reader, "LIMIT", size - 1)
    assert f"at most {size - 1} bytes" in refusal(step, one, *data)
