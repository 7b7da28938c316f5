"""What no training could use stops before it begins, in one sentence with the row that holds it."""

import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import turbanet as tn
from turbanet.training import run as training

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 3)).astype(np.float32)
CLASSES = rng.integers(0, 5, 12)
PLAN = tn.Plan(2, 1)


def made(outputs=5, members=2):
    return tn.TurbaTrainState.swarm(tn.MLP((4, outputs)), optax.adam(0.01), members, sample_input=X[:1])


def train(x=X, y=CLASSES, loss=tn.softmax_cross_entropy, outputs=5, **how):
    return tn.fit(made(outputs), x, y, loss, **{"epochs": 1, "progress": False, "plan": PLAN, **how})


def changed(array, *where, to):
    array = np.array(array)
    array[where] = to
    return array


@pytest.fixture
def untrained(monkeypatch):
    """Nothing may be trained."""

    def refuse(*_):
        raise AssertionError("It has begun to train.")

    monkeypatch.setattr(training.Training, "__init__", refuse)


ONE_HOT = np.eye(5, dtype=np.float32)[CLASSES]
BINARY = (CLASSES > 2).astype(int)
binary = {"loss": tn.binary_cross_entropy, "outputs": 1}


@pytest.mark.parametrize(
    "how, message",
    [
        ({"y": changed(CLASSES, 7, to=5)}, "y holds 5 in row 7, .* class from 0 to 4, as the model has 5 outputs"),
        ({"y": changed(CLASSES, 3, to=-1)}, "y holds -1 in row 3"),
        ({"y": torch.tensor(changed(CLASSES, 7, to=9))}, "y holds 9 in row 7"),
        ({"y": jnp.array(changed(CLASSES, 7, to=9))}, "y holds 9 in row 7"),
        ({"y": changed(ONE_HOT, 2, 4, to=1.5)}, "y holds 1.5 in row 2, .* 0, 1 or a probability"),
        ({"y": changed(ONE_HOT, 2, 4, to=-1), "loss": tn.cross_entropy}, "y holds -1.0 in row 2"),
        ({"y": CLASSES, **binary}, "y holds [234] in row [0-9]+, .* 0, 1 or a probability"),
        ({"y": changed(BINARY, 11, to=-1), **binary}, "y holds -1 in row 11"),
        (
            {"y": np.stack([CLASSES, changed(CLASSES, 4, to=8)]), "per_member": (False, True)},
            "y holds 8 in row 4 of member 1",
        ),
        ({"validation": (X, changed(CLASSES, 1, to=7))}, "validation y holds 7 in row 1"),
        (
            {"loss": tn.weighted(tn.softmax_cross_entropy), "y": (changed(CLASSES, 0, to=6), np.ones(12))},
            "y holds 6 in",
        ),
        (
            {"loss": tn.weighted(tn.mse), "y": (X[:, :1], changed(np.ones(12), 5, to=-2)), "outputs": 1},
            "holds -2.0 in row 5",
        ),
        (
            {"loss": tn.augmented(tn.softmax_cross_entropy, tn.RandomFlip()), "y": changed(CLASSES, 7, to=5)},
            "y holds 5 in row 7",
        ),
        ({"loss": partial(tn.softmax_cross_entropy), "y": changed(CLASSES, 7, to=5)}, "y holds 5 in row 7"),
        ({"x": changed(X, 3, 1, to=np.nan)}, "x holds nan in row 3, .* allow_nan=True"),
        ({"x": changed(X, 3, 1, to=np.inf)}, "x holds inf in row 3"),
        ({"x": {"a": X, "b": changed(X, 9, 0, to=-np.inf)}, "y": X}, "x holds -inf in row 9"),
        ({"y": changed(X, 6, 2, to=np.nan), "loss": tn.mse, "outputs": 3}, "y holds nan in row 6"),
        (
            {"x": np.stack([X, changed(X, 2, 0, to=np.nan)]), "per_member": (True, False)},
            "x holds nan in row 2 of member 1",
        ),
        ({"validation": (changed(X, 8, 1, to=np.nan), CLASSES)}, "validation x holds nan in row 8"),
        ({"x": X[:, :2]}, r"rows of shape \(2,\), as the swarm was made for \(3,\)"),
        ({"x": {"a": X}}, r"rows of shape \{'a': \(3,\)\}, as the swarm was made for \(3,\)"),
        ({"validation": (X, CLASSES[:7])}, "validation x and y must have the same number of rows"),
        ({"validation": 0.2}, r"the pair \(x, y\) of held-out rows, got float 0.2"),
        ({"validation": (X, CLASSES, CLASSES)}, r"the pair \(x, y\) of held-out rows, got 3 of them"),
        ({"loss": tn.weighted(tn.mse), "y": X}, r"takes y as \(y, weight\), in validation too; got (ndarray|Array) "),
        ({"loss": "softmax"}, r"A loss is loss\(params, x, y, apply_fn\), such as turbanet.mse; got 'softmax'"),
        ({"per_member": (True,)}, r"per_member must be a bool or a pair \(of x, of y\), got \(True,\)"),
        ({"y": (CLASSES, np.ones(12))}, r"takes y as one array, got a tuple: for \(y, weight\) take weighted"),
    ],
)
def test_bad_data_stop_before_the_training(untrained, how, message):
    with pytest.raises(ValueError, match=message):
        train(**how)


@pytest.mark.parametrize("y", [CLASSES.astype(np.float32), CLASSES > 2])
def test_class_labels_of_another_type_are_to_be_cast(y):
    with pytest.raises(ValueError, match="of type (float32|bool): cast them to int"):
        train(y=y)
    with pytest.raises(ValueError, match="of type (float32|bool): cast them to int"):
        made().train(np.tile(X, (2, 1, 1)), np.tile(y, (2, 1)), tn.softmax_cross_entropy)


def test_classes_in_a_column_are_told_to_lose_it():
    with pytest.raises(ValueError, match=r"the target \(.*1\): make them equal, or of classes give y\.squeeze\(\)"):
        train(y=CLASSES[:, None])


@pytest.mark.parametrize("y", [None, CLASSES])
def test_rows_of_each_members_own_are_not_read_as_shared_ones(y):
    def loss(params, x, y, apply_fn):
        out = apply_fn({"params": params}, x)
        return jnp.mean(out**2), out

    own, of_each = np.stack([X, X + 1]), None if y is None else np.stack([y, y])
    for call in (tn.fit, tn.evaluate):
        how = {"epochs": 1, "progress": False} if call is tn.fit else {}
        with pytest.raises(ValueError, match=r"x has shape \(2, 12, 3\), .* say per_member=True, else flatten"):
            call(made(), own, of_each, loss, **how)
    assert tn.predict(made(), own).shape[:3] == (2, 2, 12)  # any x with rows is predicted


def test_what_nobody_sees_may_hold_anything():
    rows = np.array([[0, 1, 2], [3, 4, -1]])
    x, y = changed(X, 11, 0, to=np.nan), changed(CLASSES, 10, to=99)
    _, history = train(x, y, rows=rows)
    assert np.isfinite(history.train_loss).all()
    with pytest.raises(ValueError, match="y holds 99 in row 10"):
        train(x, y, rows=np.array([[0, 1, 2], [3, 10, -1]]))
    own = np.stack([X, changed(X, 4, 0, to=np.nan)])
    with pytest.raises(ValueError, match="x holds nan in row 4 of member 1"):
        train(own, rows=rows, per_member=(True, False))
    train(own[::-1], rows=rows, per_member=(True, False))  # whose row 4 is whole


@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)])
def test_a_row_of_weight_0_may_hold_any_target(own):
    """own: whether each member has its own y, and its own weights."""
    y, weight = changed(CLASSES, 3, to=-1), changed(np.ones(12, np.float32), 3, to=0)
    stacked = [np.stack([leaf] * 2) if is_own else leaf for leaf, is_own in zip((y, weight), own, strict=True)]
    how = {"loss": tn.weighted(tn.softmax_cross_entropy), "per_member": (False, own), "epochs": 2}
    _, history = train(y=tuple(stacked), **how)
    assert np.isfinite(history.train_loss).all()
    with pytest.raises(ValueError, match="y holds -1 in row 3"):
        train(y=(stacked[0], np.ones_like(stacked[1])), **how)


@pytest.mark.parametrize("call", [tn.predict, lambda swarm, x: tn.fit(swarm, x, x[:, None], tn.mse, epochs=1)])
def test_rows_without_an_axis_are_no_rows_of_one_feature(call):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 1)), optax.sgd(0.1), 2, input_size=1)
    with pytest.raises(ValueError, match=r"cannot take x with rows of shape \(\), as the swarm was made for \(1,\)"):
        call(swarm, X[:, 0])


@pytest.mark.parametrize("loss", [tn.softmax_cross_entropy, tn.cross_entropy])
def test_one_output_is_no_distribution(loss):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 1)), optax.sgd(0.1), 2, sample_input=X[:1])
    with pytest.raises(ValueError, match="give it an output for each class, or take binary_cross_entropy"):
        tn.fit(swarm, X, np.ones((12, 1), np.float32), loss, epochs=1, progress=False)


def test_nan_goes_through_where_it_is_asked_for():
    _, history = train(changed(X, 3, 1, to=np.nan), allow_nan=True)
    assert np.isnan(history.train_loss).all()


def test_finite_numbers_whose_sum_is_not_are_taken():
    x = np.full((12, 3), 3e38, np.float32)
    assert np.isinf(jnp.asarray(x).sum())
    train(x)


def test_evaluate_names_a_label_that_the_model_has_not():
    with pytest.raises(ValueError, match="y holds 5 in row 7"):
        tn.evaluate(made(), X, changed(CLASSES, 7, to=5), tn.softmax_cross_entropy)


def test_a_loss_that_nobody_can_ask_is_nan_for_a_label_out_of_range():
    def mine(params, x, y, apply_fn):
        return tn.softmax_cross_entropy(params, x, y, apply_fn)

    def mine_binary(params, x, y, apply_fn):
        return tn.binary_cross_entropy(params, x, y, apply_fn)

    for y in (changed(CLASSES, 7, to=5), changed(CLASSES, 7, to=-1)):
        assert np.isnan(train(y=y, loss=mine)[1].train_loss).all()
        assert np.isnan(train(y=y, loss=mine_binary, outputs=1)[1].train_loss).all()
    assert np.isfinite(train(loss=mine)[1].train_loss).all()


def test_soft_binary_targets_are_taken():
    soft = np.linspace(0, 1 + 1e-6, 12).astype(np.float32)  # a softmax may round to more than 1
    _, history = train(y=soft, epochs=2, **binary)
    assert np.isfinite(history.train_loss).all()


@pytest.mark.parametrize("call", [tn.predict, lambda swarm, x: swarm.predict(np.tile(x, (2, 1, 1)))])
def test_another_number_of_features_is_named(call):
    with pytest.raises(ValueError, match=r"The model cannot take x .*2.*the swarm was made for \(.*3"):
        call(made(), X[:, :2])


class Product(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x["a"] * x["b"])


def test_inputs_of_other_names_are_named():
    swarm = tn.TurbaTrainState.swarm(Product(), optax.sgd(0.1), 2, sample_input={"a": X[:1], "b": X[:1]})
    expected = tn.predict(swarm, {"a": X, "b": X})
    np.testing.assert_array_equal(tn.predict(swarm, {"a": X, "b": X, "c": X}), expected)
    made_for = r"as the swarm was made for \{'a': \(3,\), 'b': \(3,\)\}"
    with pytest.raises(ValueError, match=rf"cannot take x with rows of shape \{{'a': .*'c': .*\}}, {made_for}"):
        tn.predict(swarm, {"a": X, "c": X})
    with pytest.raises(ValueError, match=rf"cannot take x with rows of shape \(\(3,\), \(3,\)\), {made_for}"):
        tn.predict(swarm, (X, X))


@pytest.mark.parametrize("sample", [[X[0]], [X[:1]], {"a": X[:1]}])
def test_a_sample_in_a_container_that_the_model_does_not_take_is_named(sample):
    with pytest.raises(ValueError, match=r"cannot take a sample_input of the shapes .*3.*: for one array give that"):
        tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, sample_input=sample)


def test_a_loss_of_ones_own_may_hand_the_model_a_part_of_x():
    def loss(params, x, y, apply_fn, columns=None):
        prediction = apply_fn({"params": params}, x if columns is None else x[:, :columns])
        return jnp.mean((prediction[:, 0] - y) ** 2), prediction

    wide = np.concatenate([X, X], axis=1)
    weights = [train(x=x, loss=partial(loss, columns=columns))[0].params for x, columns in ((X, None), (wide, 3))]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    with pytest.raises(ValueError, match=r"cannot take x with rows of shape \(6,\), as the swarm was made for \(3,\)"):
        train(x=wide, loss=loss)
    with pytest.raises(ValueError, match=r"cannot take x with rows of shape \[\(3,\), \(3,\)\], as .* per_member=True"):
        train(x=[X, X], loss=loss)


def test_a_loss_of_nothing_but_a_number_is_told_what_is_missing():
    def bare(params, x, y, apply_fn):
        return jnp.mean(apply_fn({"params": params}, x))

    def whole(params, x, y, apply_fn):
        out = apply_fn({"params": params}, x)
        return out, out

    with pytest.raises(ValueError, match="return the prediction beside it"):
        train(loss=bare)
    with pytest.raises(ValueError, match="take the loss's mean"):
        train(loss=whole)


def test_apply_fn_without_the_name_of_the_params_says_how():
    def bare(params, x, y, apply_fn):
        out = apply_fn(params, x)
        return jnp.mean(out), out

    with pytest.raises(ValueError, match=r'apply_fn\({"params": params}, x\)'):
        train(loss=bare)


@pytest.mark.parametrize(
    "loss",
    [
        optax.softmax_cross_entropy,
        partial(optax.l2_loss),
        lambda params, apply_fn, x, y: (0.0, x),
        lambda params, x, y, apply_fn, key: (0.0, x),
        partial(lambda params, x, y, apply_fn, *, strength, key: (0.0, x), strength=1),
    ],
)
def test_a_loss_of_other_arguments_is_told_its_own(loss):
    with pytest.raises(ValueError, match=r"A loss is loss\(params, x, y, apply_fn\); got .*: in this order"):
        train(loss=loss)


def test_a_loss_that_fills_in_an_argument_of_another_is_taken():
    def hot(params, x, y, apply_fn, *, temperature):
        return tn.softmax_cross_entropy(params, x, y, lambda *inputs: apply_fn(*inputs) / temperature)

    @functools.wraps(hot)
    def loss(params, x, y, apply_fn):
        return hot(params, x, y, apply_fn, temperature=2.0)

    train(loss=loss)


def test_rows_of_each_member_are_not_taken_for_a_row_of_each():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.sgd(0.1), 3, input_size=2)
    x = np.ones((3, 5, 2), np.float32)
    y = x[..., :1]
    with pytest.raises(ValueError, match=r"^x has shape \(3, 5, 2\), and .* \(2,\): where each .* per_member=True"):
        tn.evaluate(swarm, x, y, tn.mse)
    with pytest.raises(ValueError, match="^validation x has shape"):
        tn.fit(swarm, x[0], y[0], tn.mse, epochs=1, validation=(x, y))
    tn.evaluate(swarm, x, y, tn.mse, per_member=True)
    tn.evaluate(swarm, x[:2], y[:2], tn.mse)


@pytest.mark.parametrize("call", [tn.fit, tn.evaluate])
def test_a_loss_of_prediction_and_y_is_told_its_arguments(call):
    def squared(prediction, y):
        return ((prediction - y) ** 2).mean()

    how = {"epochs": 1} if call is tn.fit else {}
    with pytest.raises(
        ValueError, match=r"A loss is loss\(params, x, y, apply_fn\); got squared\(prediction, y\): in this order"
    ):
        call(made(), X, CLASSES, squared, **how)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5, deterministic=False), nn.BatchNorm(use_running_average=False)])
def test_a_model_that_always_trains_is_told_of_its_mode(layer):
    swarm = tn.TurbaTrainState.swarm(nn.Sequential([nn.Dense(2), layer]), optax.sgd(0.1), 2, sample_input=X[:1])
    swarm, _ = tn.fit(swarm, X, X[:, :2], tn.mse, epochs=1, progress=False)
    for score in (lambda: tn.predict(swarm, X), lambda: tn.evaluate(swarm, X, X[:, :2], tn.mse)):
        with pytest.raises(ValueError, match="In evaluation mode the model draws or .*, by one of the names train"):
            score()


def test_members_by_a_slice_are_told_how():
    with pytest.raises(TypeError, match="Members go by id, swarm"):
        made()[0:1]


def test_a_width_in_place_of_widths_is_told_how():
    with pytest.raises(ValueError, match="widths must be a sequence of layers' units, .* got 16"):
        tn.TurbaTrainState.swarm(tn.MLP(16), optax.adam(0.01), 2, sample_input=X[:1])


class Noisy(nn.Module):
    """It draws in training and in evaluation, and takes rows of any length."""

    @nn.compact
    def __call__(self, x):
        x = x.mean(1, keepdims=True)
        return nn.Dense(5)(x + jax.random.normal(self.make_rng("noise"), x.shape))


def test_a_model_that_always_draws_is_left_to_its_loss():
    made_for = {"sample_input": X[:1]}
    swarm = tn.TurbaTrainState.swarm(Noisy(), optax.adam(0.01), 2, **made_for)
    for x in (X, X[:, :2]):
        _, history = tn.fit(swarm, x, CLASSES, tn.softmax_cross_entropy, epochs=1, progress=False, plan=PLAN)
        assert np.isfinite(history.train_loss).all()


@pytest.mark.parametrize("optimizer", [0.001, optax.adam])
def test_an_optimizer_is_one_of_optax(optimizer):
    with pytest.raises(ValueError, match=r"one of Optax's, such as optax.adam\(0.001\); got"):
        tn.TurbaTrainState.swarm(tn.MLP((2,)), optimizer, 2, input_size=3)


class Probable(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.softmax(nn.Dense(5)(x))


HALVES = np.full((12, 5), 0.5, np.float32)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"y": ONE_HOT, "loss": tn.cross_entropy}, r"predicts \[.*\] in a row, .* softmax_cross_entropy takes logits"),
        ({"y": (ONE_HOT, np.ones(12)), "loss": tn.weighted(tn.cross_entropy)}, "softmax_cross_entropy takes logits"),
        ({"y": HALVES}, "y holds 0.5 in row 0, .* sum to one over classes; binary_cross_entropy"),
        ({"y": HALVES, "loss": tn.cross_entropy}, "y holds 0.5 in row 0, .* sum to one over classes"),
        ({"y": 2 * ONE_HOT.astype(int)}, "y holds 2 in row 0, .* 0, 1 or a probability"),
        ({"y": np.ones((12, 5), int)}, "y holds 1 in row 0, .* sum to one over classes"),
        ({"y": np.stack([ONE_HOT, HALVES]), "per_member": (False, True)}, "y holds 0.5 in row 0 of member 1"),
    ],
)
def test_what_are_no_probabilities_stops_before_the_training(untrained, how, message):
    with pytest.raises(ValueError, match=message):
        train(**how)


def test_probabilities_in_half_precision_rows_of_zeros_and_what_nobody_sees_are_taken():
    swarm = tn.TurbaTrainState.swarm(Probable(), optax.sgd(0.01), 2, sample_input=X[:1])
    y = jnp.asarray(changed(ONE_HOT * 0.9 + 0.02, 1, to=0), jnp.bfloat16)
    y = y.at[2].set(0.5)
    tn.fit(swarm, X, y, tn.cross_entropy, rows=[[0, 1, 3]] * 2, epochs=1, progress=False, plan=PLAN)


SWARMS = [
    lambda swarm: tn.fit(swarm, X, CLASSES, tn.softmax_cross_entropy, epochs=1),
    lambda swarm: tn.fit_batches(swarm, None, tn.softmax_cross_entropy, epochs=1),
    lambda swarm: tn.evaluate(swarm, X, CLASSES, tn.softmax_cross_entropy),
    lambda swarm: tn.predict(swarm, X),
    lambda swarm: tn.batch_order(swarm, 12, epochs=1, batch_size=4),
    lambda swarm: tn.with_schedule(swarm, "cosine"),
    lambda swarm: made().append(swarm),
]
OF_NETWORKS = [lambda swarm: tn.hyperparameters(swarm), lambda swarm: tn.with_hyperparameters(swarm, learning_rate=0.1)]


@pytest.mark.parametrize("call", SWARMS + OF_NETWORKS)
def test_what_is_no_swarm_is_refused(call):
    for swarm, said in [
        (LogisticRegression(), "got LogisticRegression: .* as swarm_"),
        (LogisticRegression, "got the class LogisticRegression"),
        (tn.MLP((5,)), "got MLP: make one of a model by TurbaTrainState.swarm"),
        (None, "got NoneType"),
    ]:
        with pytest.raises(ValueError, match=f"The swarm is a TurbaTrainState; {said}"):
            call(swarm)


@pytest.mark.parametrize("call", SWARMS)
def test_arrays_of_other_members_are_refused(call):
    swarm, few = made(), jax.tree.map(lambda leaf: leaf[:1], made())
    for name, replaced in [
        (r".params\['Dense_0'\]\['bias'\]", {"params": few.params}),
        (r".params\['Dense_0'\]\['bias'\]", {"params": swarm.get_state(0).params}),
        (r".opt_state", {"opt_state": few.opt_state}),
        (r".id", {"id": few.id}),
    ]:
        with pytest.raises(ValueError, match=rf"swarm{name}.* has shape .*, the swarm 2 members: stack"):
            call(swarm.replace(**replaced))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tn.predict(made(), x),
        lambda x: tn.predict(made(), tuple(x)),
        lambda x: train(x=x),
    ],
)
def test_a_list_of_rows_as_arrays_is_told_to_be_stacked(call):
    with pytest.raises(ValueError, match=r"x is a (list|tuple) of 12 arrays, .*: np.stack\(x\) makes rows of them"):
        call(list(X))


def test_lists_of_each_members_own_rows_are_predicted():
    own = [X[:7], X[7:]]
    got = tn.predict(made(), own, per_member=True)
    for member, rows in enumerate(own):
        np.testing.assert_allclose(got[member, : len(rows)], tn.predict(made(), rows)[member], rtol=1e-5, atol=1e-6)
    nested = tn.predict(made(), [rows.tolist() for rows in own], per_member=True)
    np.testing.assert_array_equal(nested, got)


LOSSES = [tn.mse, tn.softmax_cross_entropy, tn.binary_cross_entropy, tn.cross_entropy, tn.quantile_loss(0.5)]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_of_several_outputs_needs_a_loss_that_chooses(loss):
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x), nn.Dense(1)(x)

    swarm = tn.TurbaTrainState.swarm(Both(), optax.sgd(0.1), 2, input_size=3)
    with pytest.raises(ValueError, match="The model returns a tuple, and this loss compares one array: take a loss of"):
        tn.fit(swarm, np.ones((4, 3), np.float32), np.zeros(4, int), loss, epochs=1, progress=False)
