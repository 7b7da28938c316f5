"""Optimizers: what they must be able to do, and those that keep parameters to predict by, against a plain loop."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.core.plan import say_once

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 3)).astype(np.float32)
Y = rng.normal(size=(12, 1)).astype(np.float32)
PLAN = tn.Plan(2, 1)
MODEL = tn.MLP((1,))


class Averaging(NamedTuple):
    inner: Any
    mean: Any

    def evaluation_params(self, params):
        return self.mean


def averaging(optimizer, keep=0.9):
    def update(updates, state, params):
        updates, inner = optimizer.update(updates, state.inner, params)
        new = optax.apply_updates(params, updates)
        return updates, Averaging(inner, optax.incremental_update(new, state.mean, 1 - keep))

    return optax.GradientTransformation(lambda params: Averaging(optimizer.init(params), params), update)


AVERAGING = {
    "schedule_free": (optax.contrib.schedule_free_sgd(0.2, b1=0.8), optax.contrib.schedule_free_eval_params),
    "chain": (optax.chain(optax.clip(1.0), averaging(optax.sgd(0.2))), lambda state, params: state[1].mean),
}


def made(optimizer, members=2):
    return tn.TurbaTrainState.swarm(MODEL, optimizer, members, sample_input=X[:1])


def alone(swarm, index, optimizer, by, steps):
    """What a member predicts after each step, by a plain loop: [step, row, 1]."""
    params = jax.tree.map(lambda leaf: leaf[index], swarm.params)
    state = optimizer.init(params)
    found = []
    for _ in range(steps):
        grads = jax.grad(lambda p: jnp.mean((MODEL.apply({"params": p}, X) - Y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(MODEL.apply({"params": by(state, params)}, X))
    return np.array(found)


@pytest.mark.parametrize("name", AVERAGING)
def test_members_are_scored_and_predict_by_what_their_optimizer_keeps_for_that(name):
    swarm = made(AVERAGING[name][0])
    how = {"epochs": 3, "validation": (X, Y), "plan": PLAN, "progress": False}
    trained, history = tn.fit(swarm, X, Y, tn.mse, **how)
    expected = np.stack([alone(swarm, index, *AVERAGING[name], 3) for index in range(2)], axis=1)
    np.testing.assert_allclose(history.validation_loss, ((expected - Y) ** 2).mean((2, 3)), rtol=1e-5)
    for predictions in (
        tn.predict(trained, X),
        trained.predict(np.stack([X] * 2)),
        tn.export(trained, kind="members")(X),
    ):
        np.testing.assert_allclose(predictions, expected[-1], rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(trained.replace(opt_state=()).predict(np.stack([X] * 2)), expected[-1], rtol=1e-4)


def test_the_best_epochs_weights_are_those_that_were_scored():
    optimizer, by = AVERAGING["schedule_free"][0], AVERAGING["schedule_free"][1]
    swarm = made(optimizer)
    halfway = alone(swarm, 0, optimizer, by, 4)[-1], alone(swarm, 1, optimizer, by, 4)[-1]
    held_out = np.stack([X] * 2), np.stack(halfway)  # each is at its best after four epochs
    how = {"epochs": 9, "patience": 2, "plan": PLAN, "progress": False, "per_member": True}
    trained, history = tn.fit(swarm, held_out[0], np.stack([Y] * 2), tn.mse, validation=held_out, **how)
    assert history.epochs.tolist() == [6, 6]
    np.testing.assert_allclose(tn.predict(trained, X), held_out[1], rtol=1e-4, atol=1e-6)


def test_a_saved_swarm_that_predicts_by_its_optimizer_is_loaded_with_it(tmp_path):
    optimizer = AVERAGING["schedule_free"][0]
    trained, _ = tn.fit(made(optimizer), X, Y, tn.mse, epochs=2, progress=False, plan=PLAN)
    trained.save(tmp_path)
    again = tn.TurbaTrainState.load(tmp_path, MODEL, optimizer)
    np.testing.assert_array_equal(tn.predict(again, X), tn.predict(trained, X))
    with pytest.raises(ValueError, match="predicts by parameters that its optimizer keeps: give the optimizer"):
        tn.TurbaTrainState.load(tmp_path, MODEL)


@pytest.mark.parametrize("train", [tn.federated.local_sgd, tn.federated.train])
def test_who_averages_members_refuses_averages_of_the_optimizer(train):
    how = {"workers": 2, "epochs": 1, "batch_size": 2}
    if train is tn.federated.train:
        how = {"clients": [[0, 1]], "rounds": 1, "sampled": 1}
    with pytest.raises(
        ValueError, match=rf"{train.__name__} uses the trained parameters, .* take an optimizer without averages"
    ):
        train(made(AVERAGING["chain"][0], 1), X, Y, tn.mse, **how)


class Whole(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", lambda key: jnp.ones((3, 1), jnp.int32))


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (MODEL, optax.lbfgs(), "must make a step with gradients, .* this one raises: .*'grad' and 'value_fn'"),
        (MODEL, optax.lookahead(optax.sgd(0.1), 2, 0.5), "must make a step .* no attribute 'fast'"),
        (MODEL, optax.contrib.sophia(0.1), "must make a step .* obj_fn must be provided"),
        (Whole(), optax.sgd(0.1), "The parameter kernel is int32, and only floats have gradients: cast it"),
        (nn.Sequential([nn.tanh]), optax.sgd(0.1), "The model has no parameters: there is nothing to train"),
        ((lambda key, x: {}, lambda params, x: x), optax.sgd(0.1), "The model has no parameters"),
    ],
)
def test_what_cannot_be_trained_is_refused_when_the_swarm_is_made(model, optimizer, message):
    with pytest.raises(ValueError, match=message):
        tn.TurbaTrainState.swarm(model, optimizer, 2, sample_input=X[:1])


@pytest.mark.parametrize("old, new", [(optax.sgd(0.1), optax.adam(0.1)), (optax.adam(0.1), optax.sgd(0.1, 0.9))])
def test_the_state_of_another_optimizer_is_refused(old, new):
    swarm = tn.TurbaTrainState.swarm(MODEL, old, 2, sample_input=X[:1]).replace(tx=new)
    with pytest.raises(ValueError, match=r"another one's, .*: replace opt_state with tx, by jax.vmap\(tx.init\)"):
        tn.fit(swarm, X, Y, tn.mse, epochs=1, progress=False)
    right = swarm.replace(opt_state=jax.vmap(new.init)(swarm.params))
    fresh = tn.TurbaTrainState.swarm(MODEL, new, 2, sample_input=X[:1])
    ours, expected = (tn.fit(each, X, Y, tn.mse, epochs=1, progress=False)[0].params for each in (right, fresh))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


VALUED = {
    "sam, which takes no value": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=False),
    "steps over batches of what takes one": lambda: optax.MultiSteps(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)), 2
    ),
}


@pytest.mark.parametrize("name", VALUED)
def test_an_optimizer_receives_the_loss_if_it_takes_it(name):
    optimizer = VALUED[name]()
    takes = "MultiSteps" in type(optimizer).__name__
    swarm, _ = tn.fit(made(optimizer), X, Y, tn.mse, epochs=8, shuffle=False, progress=False, plan=PLAN)
    params = made(optimizer).get_state(0).params
    state = optimizer.init(params)
    for _ in range(8):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((MODEL.apply({"params": p}, X) - Y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params, **({"value": loss} if takes else {}))
        params = optax.apply_updates(params, updates)
    for ours, theirs in zip(jax.tree.leaves(swarm.get_state(0).params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_an_optimizers_own_noise_is_each_members_own():
    """As of Langevin dynamics: chains that all draw alike are one chain."""
    optimizer = optax.noisy_sgd(0.1, key=0)
    swarm = tn.TurbaTrainState.swarm(MODEL, optimizer, 3, sample_input=X[:1], seed=5)
    still = jax.tree.map(jnp.zeros_like, swarm.params)
    moved = swarm.apply_gradients(grads=still)
    for number in range(3):
        state = swarm.get_state(number)
        keys = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 5), number)
        own = jax.tree.map(
            lambda leaf, keys=keys: keys if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, state.opt_state
        )
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, state.params), own, state.params)
        expected = optax.apply_updates(state.params, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), moved.get_state(number).params, expected)
    settings = {"epochs": 3, "progress": False}
    chains, _ = tn.fit(swarm[[1]].copies(4), X, Y, tn.mse, **settings)
    assert np.ptp(tn.predict(chains, X), axis=0).min() > 0
    together, _ = tn.fit(swarm, X, Y, tn.mse, **settings)
    alone, _ = tn.fit(swarm[[2]], X, Y, tn.mse, **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[2], b[0], rtol=1e-5), together.params, alone.params)


class Halves(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, param_dtype=jnp.bfloat16)(x) * self.param(
            "hyperparams", nn.initializers.ones, (1,), jnp.bfloat16
        )


def test_hyperparameters_in_16_bits_are_said_once(caplog):
    say_once.cache_clear()
    for dtype in (jnp.float32, None):
        adam = optax.inject_hyperparams(optax.adam, hyperparam_dtype=dtype)(0.001)
        tn.TurbaTrainState.swarm(Halves(), adam, 2, input_size=3)
        assert len(caplog.records) == (dtype is None)
    assert "The optimizer holds b1, b2, eps, eps_root, learning_rate in 16 bits" in caplog.text


def test_a_loss_of_whole_numbers_is_refused():
    def wrong(params, x, y, apply_fn):
        prediction = apply_fn({"params": params}, x)
        return (prediction > y).sum(), prediction

    with pytest.raises(ValueError, match="A loss to train by is a floating-point number, got int32: cast it"):
        tn.fit(made(optax.sgd(0.1)), X, Y, wrong, epochs=1)


@pytest.mark.parametrize("wrap", [lambda sam: optax.chain(optax.clip_by_global_norm(1.0), sam), optax.flatten])
def test_sharpness_aware_minimisation_trains_within_other_optimizers(wrap):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    optimizer = wrap(optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2))
    model = tn.MLP((4, 1))
    swarm = tn.TurbaTrainState.swarm(model, optimizer, 2, sample_input=X[:1])
    trained, _ = tn.fit(swarm, X, Y, tn.mse, epochs=4, progress=False)
    one = swarm.get_state(1)
    params, state = one.params, one.opt_state
    for _ in range(4):
        grads = jax.grad(lambda p: tn.mse(p, X, Y, model.apply)[0])(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    expected, found = jax.tree.leaves(params), jax.tree.leaves(trained.get_state(1).params)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_schedule_free_may_be_the_optimizer_of_some_parameters():
    def kinds(params):
        return jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "bias", params)

    free = optax.contrib.schedule_free_sgd(0.1, b1=0.5)
    optimizer = optax.multi_transform({"kernel": free, "bias": optax.sgd(0.1)}, kinds)
    model = tn.MLP((4, 1))
    swarm = tn.TurbaTrainState.swarm(model, optimizer, 2, sample_input=X[:1])
    trained, _ = tn.fit(swarm, X, Y, tn.mse, epochs=3, progress=False)
    one = trained.get_state(0)
    z = one.opt_state.inner_states["kernel"].inner_state.z
    averaged = {
        name: {"kernel": (layer["kernel"] - 0.5 * z[name]["kernel"]) / 0.5, "bias": layer["bias"]}
        for name, layer in one.params.items()
    }
    np.testing.assert_allclose(tn.predict(trained, X)[0], model.apply({"params": averaged}, X), rtol=1e-4, atol=1e-5)
