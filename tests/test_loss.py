"""Each loss against NumPy, scikit-learn or PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import softmax
from sklearn.metrics import log_loss, mean_squared_error

import turbanet as tn
from turbanet import binary_cross_entropy, cross_entropy, l2_loss, mse, softmax_cross_entropy
from turbanet.data import sample_weight

rng = np.random.default_rng(1)
X = rng.normal(size=(6, 3)).astype(np.float32)
W = rng.normal(size=(3, 4)).astype(np.float32)
LABELS = np.array([0, 1, 2, 3, 1, 0])
ONE_HOT = np.eye(4, dtype=np.float32)[LABELS]


def linear(variables, x):
    return x @ variables["params"]


def probabilities(variables, x):
    return jax.nn.softmax(linear(variables, x))


def given(variables, x):
    return variables["params"]


def test_mse_equals_scikit_learn():
    np.testing.assert_allclose(mse(W, X, ONE_HOT, linear)[0], mean_squared_error(ONE_HOT, X @ W), rtol=1e-6)


def test_l2_loss_is_half_the_mean_squared_error():
    np.testing.assert_allclose(l2_loss(W, X, ONE_HOT, linear)[0], mean_squared_error(ONE_HOT, X @ W) / 2, rtol=1e-6)


@pytest.mark.parametrize("loss_fn", [mse, l2_loss])
def test_squared_losses_return_the_prediction(loss_fn):
    np.testing.assert_allclose(loss_fn(W, X, ONE_HOT, linear)[1], X @ W, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("y", [LABELS, ONE_HOT], ids=["integers", "one-hot"])
def test_softmax_cross_entropy_equals_pytorch(y):
    torch = pytest.importorskip("torch")
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(X @ W), torch.from_numpy(LABELS)).item()
    np.testing.assert_allclose(softmax_cross_entropy(W, X, jnp.asarray(y), linear)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("y", [[2], [[0.0, 0.0, 1.0]]], ids=["integers", "one-hot"])
def test_softmax_cross_entropy_takes_classes_ruled_out(y):
    logits = jnp.array([[0.0, -jnp.inf, jnp.log(3.0)]])
    value, grad = jax.value_and_grad(lambda p: softmax_cross_entropy(p, X, jnp.array(y), given)[0])(logits)
    np.testing.assert_allclose(value, -np.log(0.75), rtol=1e-6)
    np.testing.assert_allclose(grad, [[0.25, 0.0, -0.25]], rtol=1e-6)


def test_one_logit_a_row_is_no_choice_among_the_rows():
    with pytest.raises(ValueError, match=r"Logits are \[batch, class\], got shape \(3,\): one a row is for binary"):
        softmax_cross_entropy(jnp.zeros(3), X, jnp.array([0, 1, 0]), given)


def test_softmax_cross_entropy_equals_pytorch_on_sequences():
    torch = pytest.importorskip("torch")
    logits, labels = rng.normal(size=(5, 7, 4)).astype(np.float32), rng.integers(0, 4, (5, 7))
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(logits).movedim(-1, 1), torch.from_numpy(labels))
    np.testing.assert_allclose(softmax_cross_entropy(logits, X, jnp.asarray(labels), given)[0], expected, rtol=1e-6)


def test_cross_entropy_equals_scikit_learn():
    probability = np.asarray(probabilities({"params": W}, X), np.float64)
    expected = log_loss(LABELS, probability / probability.sum(1, keepdims=True))
    np.testing.assert_allclose(cross_entropy(W, X, ONE_HOT, probabilities)[0], expected, rtol=1e-6)


def test_cross_entropy_is_finite_at_probability_zero():
    probability = jnp.array([[0.0, 1.0], [0.5, 0.5]])
    value, grad = jax.value_and_grad(lambda p: cross_entropy(p, X, jnp.eye(2), given)[0])(probability)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_cross_entropy_ignores_a_zero_for_a_wrong_class():
    probability = jnp.array([[0.0, 1.0]])
    assert cross_entropy(probability, X, jnp.array([[0.0, 1.0]]), given)[0] == 0


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_binary_cross_entropy_equals_scikit_learn(shape):
    logits, y = X[:, :1].reshape(shape), (LABELS > 1).astype(np.int32)
    expected = log_loss(y, 1 / (1 + np.exp(-logits.ravel().astype(np.float64))))
    np.testing.assert_allclose(binary_cross_entropy(logits, X, jnp.asarray(y), given)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("row", [[3.0, -2.0], [0.5, 0.6], [1.2, -0.2]])
def test_cross_entropy_of_what_are_no_probabilities_is_nan(row):
    values = [cross_entropy(jnp.array([one]), X[:1], jnp.eye(2)[:1], given)[0] for one in (row, [0.6, 0.4])]
    np.testing.assert_allclose(values, [np.nan, -np.log(0.6)], rtol=1e-6)


def test_softmax_cross_entropy_of_targets_below_zero_and_of_nan():
    logits, y = rng.normal(size=(2, 3)), np.array([[0.0, -1.0, 0.5], [0.0, np.nan, 1.0]])
    expected = -(y[0] * np.log(softmax(logits[0]))).sum()
    np.testing.assert_allclose(softmax_cross_entropy(logits[:1], X, y[:1], given)[0], expected, rtol=1e-5)
    assert np.isnan(softmax_cross_entropy(logits, X, y, given)[0])


@pytest.mark.parametrize("loss_fn", [mse, l2_loss, softmax_cross_entropy, cross_entropy])
def test_a_target_of_another_shape_is_refused_not_broadcast(loss_fn):
    with pytest.raises(ValueError, match="make them equal"):
        loss_fn(W, X, jnp.ones((6, 1)), linear)


@pytest.mark.parametrize("loss_fn", [mse, softmax_cross_entropy])
def test_losses_work_under_jit_and_vmap(loss_fn):
    many = jax.jit(jax.vmap(lambda w: loss_fn(w, X, ONE_HOT, linear)[0]))(jnp.stack([W, 2 * W]))
    np.testing.assert_allclose(many[1], loss_fn(2 * W, X, ONE_HOT, linear)[0], rtol=1e-6)


def test_weighted_loss_by_hand():
    x, y, weight = np.ones((4, 1), np.float32), np.arange(4.0, dtype=np.float32)[:, None], np.array([0, 1, 2, 0.5])
    value, prediction = tn.weighted(tn.mse)(None, x, (y, weight), lambda variables, x: 2 * x)
    assert value == pytest.approx((0 * 4 + 1 * 1 + 2 * 0 + 0.5 * 1) / 3.5) and prediction.shape == (4, 1)
    nothing, _ = tn.weighted(tn.mse)(None, x, (y, np.zeros(4)), lambda variables, x: 2 * x)
    assert nothing == 0


@pytest.mark.parametrize("dtype, classes", [(np.uint8, 256), (np.int8, 128), (np.int32, 256)])
def test_labels_of_a_small_type_may_be_of_as_many_classes_as_it_has_numbers(dtype, classes):
    y = np.array([0, 97, classes - 1], dtype)
    logits = rng.normal(size=(3, classes)).astype(np.float32)
    for labels in (y, jnp.asarray(y)):
        loss, _ = softmax_cross_entropy(logits, np.zeros((3, 1)), labels, given)
        np.testing.assert_allclose(loss, log_loss(y, softmax(logits, axis=-1), labels=range(classes)), rtol=1e-5)
        assert tn.ensembles.scores(logits, labels)["accuracy"] == (logits.argmax(1) == y).mean()
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, classes)), optax.adam(0.01), 2, sample_input=X[:1])
    for labels in (y, jnp.asarray(y)):
        _, history = tn.fit(swarm, X[:3], labels, softmax_cross_entropy, epochs=1, progress=False)
        assert np.isfinite(history.train_loss).all()


def test_rows_of_weight_zero_keep_their_own_predictions_in_scores():
    x, weight = np.array([[1.0], [np.nan], [3.0], [4.0]], np.float32), np.array([0, 0, 1, 1], np.float32)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.sgd(0.1), 1, sample_input=x[:1])
    y = np.ones_like(x)
    loss, prediction = swarm.evaluate(x[None], (y[None], weight[None]), tn.weighted(tn.mse))
    np.testing.assert_array_equal(prediction, swarm.predict(x[None]))
    assert loss[0] == pytest.approx(((np.asarray(prediction)[0, 2:] - 1) ** 2).mean())
    trained, scored, _ = swarm.train(x[None], (y[None], weight[None]), tn.weighted(tn.mse))
    assert scored[0] == pytest.approx(float(loss[0])) and np.isfinite(trained.params["Dense_0"]["kernel"]).all()


@pytest.mark.parametrize("counts", [[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
@pytest.mark.parametrize("accelerator", [False, True])
def test_rows_that_do_not_count_are_filled_by_the_first_that_does(counts, accelerator, monkeypatch):
    monkeypatch.setattr(sample_weight, "on_accelerator", lambda: accelerator)
    counts = np.array(counts, bool)
    numbers = np.where(counts, [3, 4, 5, 6], 9)
    rows = {"float": np.where(counts, numbers, np.nan)[:, None].astype(np.float32), "bool": numbers > 4}
    rows |= {str(kind): numbers.astype(kind) for kind in (np.int32, np.uint8, np.float16)}
    found = sample_weight.only(jnp.asarray(counts), rows)
    for kind, before in rows.items():
        first = before[counts.argmax()] if counts.any() else np.zeros_like(before[0])
        np.testing.assert_array_equal(found[kind], [row if own else first for row, own in zip(before, counts)])
        assert found[kind].dtype == before.dtype
