"""A constant of each member's own: what a loss or a model gets as `member` is the member's part."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiers import first

import turbanet as tn

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(400, 3)).astype(np.float32)
Y = X[:, :1] + RANDOM.normal(size=(400, 1)).astype(np.float32)
LEVELS = np.array([0.1, 0.5, 0.9], np.float32)


def pinball(params, x, y, apply_fn, *, member):
    prediction = apply_fn({"params": params}, x)
    error = y - prediction
    return jnp.maximum(member["level"] * error, (member["level"] - 1) * error).mean(), prediction


@tn.mean_over_rows
def pinball_of_rows(params, x, y, apply_fn, *, member):
    prediction = apply_fn({"params": params}, x)
    error = y - prediction
    return jnp.maximum(member["level"] * error, (member["level"] - 1) * error), prediction


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, member=None):
        hidden = nn.relu(nn.Dense(8)(x))
        return nn.Dense(1)(hidden if member is None else hidden * member)


def swarm(model=None, members=3):
    return tn.TurbaTrainState.swarm(model or tn.MLP((8, 1)), optax.adam(0.02), members, input_size=3)


def test_members_learn_their_own_quantile():
    trained, _ = tn.fit(swarm(), X, Y, pinball, epochs=150, member={"level": LEVELS}, progress=False)
    below = (np.asarray(tn.predict(trained, X)) >= Y).mean((1, 2))
    np.testing.assert_allclose(below, LEVELS, atol=0.06)


@pytest.mark.parametrize(
    "loss", first(2, [pinball, tn.weighted(pinball_of_rows), pinball_of_rows]), ids=["own", "weighted", "rows"]
)
def test_each_member_is_the_network_that_is_trained_alone_with_its_constant(loss):
    y = (Y, np.ones(len(Y), np.float32)) if loss not in (pinball, pinball_of_rows) else Y
    trained, history = tn.fit(swarm(), X, y, loss, epochs=3, batch_size=50, member={"level": LEVELS}, progress=False)

    def fixed(params, x, y, apply_fn):
        prediction = apply_fn({"params": params}, x)
        error = y - prediction
        return jnp.maximum(0.9 * error, -0.1 * error).mean(), prediction

    alone, expected = tn.fit(swarm()[[2]], X, Y, fixed, epochs=3, batch_size=50, progress=False)
    np.testing.assert_allclose(history.train_loss[:, 2], expected.train_loss[:, 0], rtol=1e-5)
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one[2], two[0], rtol=1e-4, atol=1e-6), trained.params, alone.params
    )


def test_a_model_gets_its_part_in_training_and_in_prediction():
    masks = np.zeros((3, 8), np.float32)
    masks[0, :4], masks[1, 4:] = 1, 1
    trained, _ = tn.fit(swarm(Masked()), X, Y, tn.mse, epochs=3, member=masks, progress=False)
    start = swarm(Masked())
    kernel, before = trained.params["Dense_0"]["kernel"], start.params["Dense_0"]["kernel"]
    np.testing.assert_array_equal(kernel[0, :, 4:], before[0, :, 4:])  # no gradient passes a mask
    assert (kernel[0, :, :4] != before[0, :, :4]).any() and (kernel[1, :, :4] == before[1, :, :4]).all()
    bias = trained.params["Dense_1"]["bias"]
    np.testing.assert_array_equal(tn.predict(trained, X)[2], np.broadcast_to(bias[2], (400, 1)))
    for position, state in enumerate(trained):
        expected = Masked().apply({"params": state.params}, X, masks[position])
        np.testing.assert_allclose(tn.predict(trained, X)[position], expected, rtol=1e-5, atol=1e-6)


def test_constants_go_where_their_members_go(tmp_path):
    trained, _ = tn.fit(swarm(), X, Y, pinball, epochs=1, member={"level": LEVELS}, progress=False)
    np.testing.assert_array_equal(trained[[2, 0]].member["level"], LEVELS[[2, 0]])
    np.testing.assert_array_equal(trained.append(trained).member["level"], np.tile(LEVELS, 2))
    again, _ = tn.fit(trained, X, Y, pinball, epochs=1, progress=False)
    np.testing.assert_array_equal(again.member["level"], LEVELS)


@pytest.mark.parametrize(
    "constants", first(1, [{"a": np.ones((3, 8)), "b": [np.ones(3)]}, np.ones((3, 8))]), ids=["tree", "array"]
)
def test_a_saved_swarm_has_its_constants(constants, tmp_path):
    class Taking(nn.Module):
        @nn.compact
        def __call__(self, x, member=None):
            return nn.Dense(1)(x) * (1 if member is None else jnp.sum(jax.tree.leaves(member)[0]))

    trained, _ = tn.fit(swarm(Taking()), X, Y, tn.mse, epochs=1, member=constants, progress=False)
    trained.save(tmp_path)
    again = tn.TurbaTrainState.load(tmp_path, Taking(), optax.adam(0.02))
    np.testing.assert_array_equal(tn.predict(again, X), tn.predict(trained, X))
    exported = tn.export(trained, kind="members")
    np.testing.assert_allclose(exported(X), tn.predict(trained, X), rtol=1e-6, atol=1e-6)  # a GPU fuses otherwise


def test_a_training_resumes_with_its_constants_and_another_one_is_refused(tmp_path):
    job = {"epochs": 4, "segment": 2, "checkpoints": tmp_path, "progress": False}
    first, _ = tn.fit(swarm(), X, Y, pinball, member={"level": LEVELS}, **job)
    again, _ = tn.fit(swarm(), X, Y, pinball, member={"level": LEVELS}, **job)
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    with pytest.raises(ValueError, match="what the state holds was"):
        tn.fit(swarm(), X, Y, pinball, member={"level": LEVELS / 2}, **job)


BAD = [
    ({"level": LEVELS[:2]}, pinball, r"member must lead with the 3 members; its arrays lead with \[\(2,\)\]"),
    ({"level": 0.5}, pinball, r"its arrays lead with \[\(\)\]"),
    ({"level": LEVELS}, tn.mse, "neither does"),
    (None, pinball, "The loss takes the keyword `member`"),
]


@pytest.mark.parametrize(("constants", "loss", "message"), BAD, ids=[message[:20] for *_, message in BAD])
def test_constants_that_fit_nothing_are_refused(constants, loss, message):
    with pytest.raises(ValueError, match=message):
        tn.fit(swarm(), X, Y, loss, epochs=1, member=constants, progress=False)


class OfNNX(nnx.Module):
    def __init__(self, *, rngs):
        self.first, self.second = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x, member=None):
        hidden = nnx.relu(self.first(x))
        return self.second(hidden if member is None else hidden * member)


def test_an_nnx_model_receives_the_constant_of_its_member():
    masks = jnp.array([[1.0] * 8, [0.0] * 8])
    trained, _ = tn.fit(
        swarm(nnx.bridge.ToLinen(OfNNX), 2), X, Y, tn.mse, epochs=1, batch_size=50, member=masks, progress=False
    )
    spread = np.asarray(tn.predict(trained, X)).std(axis=1).ravel()
    assert spread[0] > 0.01 and spread[1] < 1e-6  # all hidden units masked: the bias alone


def test_cross_validation_and_append_say_what_they_lack():
    job = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 8}
    with pytest.raises(ValueError, match="cross_validate has no member=: train the folds by fit"):
        tn.cross_validate(tn.MLP((1,)), X, Y, loss=pinball, folds=2, **job)
    with pytest.raises(ValueError, match="seeds must be a whole number of at least 1, got range"):
        tn.cross_validate(tn.MLP((1,)), X, Y, loss=tn.mse, folds=2, seeds=range(3), **job)
    trained, _ = tn.fit(swarm(), X, Y, pinball, epochs=1, member={"level": LEVELS}, progress=False)
    with pytest.raises(ValueError, match=r"their constants \(fit's member=\) differ"):
        trained.append(swarm())


def test_a_constant_that_a_partial_has_filled_in_is_the_partials():
    def loss(params, x, y, apply_fn, member):
        prediction = apply_fn({"params": params}, x)
        return member * jnp.mean((prediction - y) ** 2), prediction

    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.sgd(0.1), 2, input_size=3)
    x, y = np.ones((4, 3), np.float32), np.zeros((4, 1), np.float32)
    five = functools.partial(loss, member=5.0)
    plain = np.asarray(tn.evaluate(swarm, x, y, tn.mse))
    np.testing.assert_allclose(tn.evaluate(swarm, x, y, five), 5 * plain, rtol=1e-5)
    with pytest.raises(ValueError, match="member= is for a loss or a model that takes the keyword"):
        tn.fit(swarm, x, y, five, epochs=1, member=np.array([2.0, 3.0]))
