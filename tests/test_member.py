"""Members with collections, random streams and modes end where the same network trained alone ends."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEVICES
from flax import nnx
from tiers import first

import turbanet as tn
from turbanet.core import member
from turbanet.core.plan import say_once

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40).astype(np.int32)
PLANS = [tn.Plan(1, 2), tn.Plan(DEVICES, 3), tn.Plan(DEVICES, 1)]


class Normed(nn.Module):
    """Batch normalisation and dropout; no bias before it, which has no gradient and drifts."""

    rate: float = 0.3

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8)(nn.Dense(5, use_bias=False)(x)))
        return nn.Dense(2)(nn.Dropout(self.rate, deterministic=not train)(x))


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x, training: bool):
        return nn.Dense(2)(nn.relu(nn.SpectralNorm(nn.Dense(4))(x, update_stats=training)))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=deterministic)(nn.relu(nn.Dense(6)(x))))


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dense(2)(nn.relu(x))


class NNX(nnx.Module):
    def __init__(self, *, rngs):
        self.first, self.norm = nnx.Linear(3, 5, use_bias=False, rngs=rngs), nnx.BatchNorm(5, momentum=0.8, rngs=rngs)
        self.second = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


MODELS = {"train": Normed(), "training": Spectral(), "deterministic": Dropped(), "none": Sowing()}
TRAINING = {"train": {"train": True}, "training": {"training": True}, "deterministic": {"deterministic": False}}
EVALUATING = {"train": {"train": False}, "training": {"training": False}, "deterministic": {"deterministic": True}}


def made(model, size=5, **more):
    return tn.TurbaTrainState.swarm(model, optax.adam(0.05), size, sample_input=X[:1], seed=4, **more)


def train(swarm, **more):
    how = {"epochs": 4, "batch_size": 8, "progress": False, **more}
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **how)


def alone(name, id, order):
    """A plain Optax loop on the plain model: (losses [step], variables)."""
    model = MODELS[name]
    rest = model.init(member.member_key(4, id, member.INIT), X[:1], **EVALUATING.get(name, {}))
    rest.pop("intermediates", None)
    params, optimizer, losses = rest.pop("params"), optax.adam(0.05), []
    state = optimizer.init(params)

    @jax.jit
    def step(number, params, rest, state, x, y):
        def loss(params):
            rngs = member.streams(4, id, number)
            how = {"rngs": rngs, "mutable": list(rest), **TRAINING.get(name, {})}
            out, changed = model.apply({"params": params, **rest}, x, **how)
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), changed

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), rest, state

    for number, rows in enumerate(order):
        value, params, rest, state = step(number, params, rest, state, X[rows], Y[rows])
        losses.append(float(value))
    return np.array(losses), {"params": params, **rest}


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "plan"), [*((name, PLANS[1]) for name in MODELS), *(("train", plan) for plan in (PLANS[0], PLANS[2]))]
)
def test_a_member_ends_where_it_ends_alone(name, plan):
    swarm = made(MODELS[name])
    order = tn.batch_order(swarm, 40, epochs=4, batch_size=8)
    trained, history = train(swarm, plan=plan)
    prediction = tn.predict(trained, X)
    for index in (0, 4):
        losses, variables = alone(name, index, order[index].reshape(-1, 8))
        np.testing.assert_allclose(history.train_loss[:, index], losses.reshape(4, -1).mean(1), rtol=1e-4)
        expected = MODELS[name].apply(variables, X, **EVALUATING.get(name, {}))
        np.testing.assert_allclose(prediction[index], expected, rtol=1e-3, atol=1e-4)


def test_one_step_a_call_equals_fit():
    swarm = made(Normed())
    order = tn.batch_order(swarm, 40, epochs=1, batch_size=8)
    stepped = swarm
    for rows in order[:, 0].swapaxes(0, 1):
        stepped, _, _ = stepped.train(X[rows], Y[rows], tn.softmax_cross_entropy)
    trained, _ = train(swarm, epochs=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), trained.collections, stepped.collections)
    loss, prediction = stepped.evaluate(np.tile(X, (5, 1, 1)), np.tile(Y, (5, 1)), tn.softmax_cross_entropy)
    np.testing.assert_allclose(prediction, tn.predict(trained, X), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(loss, tn.evaluate(trained, X, Y, tn.softmax_cross_entropy), rtol=1e-4)


def test_validation_uses_running_statistics_and_changes_nothing():
    trained, history = train(made(Normed()), validation=(X[:7], Y[:7]))
    without, _ = train(made(Normed()))
    jax.tree.map(np.testing.assert_array_equal, trained.collections, without.collections)
    np.testing.assert_allclose(
        history.validation_loss[-1], tn.evaluate(trained, X[:7], Y[:7], tn.softmax_cross_entropy), rtol=1e-5
    )


def test_a_members_randomness_is_its_own():
    few, many = (train(made(Normed(), size), plan=tn.Plan(DEVICES, 2))[1].train_loss for size in (4, 8))
    np.testing.assert_array_equal(few, many[:, :4])
    assert len(np.unique(few[0])) == 4


def test_a_second_call_in_a_step_goes_on_from_the_first():
    state = made(Normed(), 1).get_state(0)
    bound = member.Bound(state, train=True)
    first, second = (bound({"params": state.params}, X) for _ in range(2))
    assert not np.array_equal(first, second)  # other dropout
    mean = state.collections["batch_stats"]["BatchNorm_0"]["mean"]
    batch = (X @ state.params["Dense_0"]["kernel"]).mean(0)
    once = 0.8 * mean + 0.2 * batch
    np.testing.assert_allclose(
        bound.state.collections["batch_stats"]["BatchNorm_0"]["mean"], 0.8 * once + 0.2 * batch, rtol=1e-5
    )


def test_what_the_caller_says_comes_first():
    def calm(params, x, y, apply_fn):
        out = apply_fn({"params": params}, x, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), out

    swarm = made(Normed())
    trained, _ = tn.fit(swarm, X, Y, calm, epochs=2, batch_size=8, progress=False)
    jax.tree.map(np.testing.assert_array_equal, trained.collections, swarm.collections)


def test_what_a_model_sows_is_not_carried():
    swarm = made(Sowing())
    assert swarm.collections == {}
    _, sown = swarm.predict(np.tile(X, (5, 1, 1)), capture_intermediates=True)
    assert sown["intermediates"]["hidden"][0].shape == (5, 40, 4)


def test_what_a_model_sows_by_a_sum_begins_anew_in_each_call():
    """As experts report what they cost, which the loss adds."""

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            hidden = nn.Dense(3)(x)
            self.sow("losses", "cost", (hidden**2).mean(), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            return nn.Dense(2)(hidden)

    def loss(params, x, y, apply_fn):
        out, sown = apply_fn({"params": params}, x, mutable=["losses"])
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean() + sown["losses"]["cost"], out

    model = Experts()
    swarm = made(model)
    assert swarm.collections == {} and "sow" not in vars(model)
    expected = [
        loss(one.params, X, Y, lambda variables, x, **kwargs: Experts().apply(variables, x, **kwargs))[0]
        for one in swarm
    ]
    np.testing.assert_allclose(tn.evaluate(swarm, X, Y, loss), expected, rtol=1e-5)


ASKED = [
    ("losses", {"losses"}),
    (["losses", "batch_stats"], {"losses", "batch_stats"}),
    (True, {"losses", "batch_stats", "params"}),
]


@pytest.mark.parametrize(("asked", "found"), ASKED)
def test_running_statistics_follow_where_a_loss_asks_for_what_a_model_sows(asked, found):
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            h = nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
            self.sow("losses", "cost", 1e-3 * (h**2).mean())
            return nn.Dense(2)(h)

    def loss(params, x, y, apply_fn):
        out, changed = apply_fn({"params": params}, x, mutable=asked)
        assert set(changed) == found
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean() + changed["losses"]["cost"][0], out

    model, tx = Both(), optax.sgd(0.1)
    swarm = tn.TurbaTrainState.swarm(model, tx, 2, sample_input=X[:1])
    trained, _ = tn.fit(swarm, X + 5, Y, loss, epochs=6, progress=False)
    alone = swarm.get_state(0)
    params, stats, state = alone.params, alone.collections["batch_stats"], tx.init(alone.params)

    def value(params, stats):
        variables = {"params": params, "batch_stats": stats}
        out, changed = model.apply(variables, X + 5, train=True, mutable=["losses", "batch_stats"])
        cost = optax.softmax_cross_entropy_with_integer_labels(out, Y).mean() + changed["losses"]["cost"][0]
        return cost, changed["batch_stats"]

    for _ in range(6):
        grads, stats = jax.grad(value, has_aux=True)(params, stats)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    ours = trained.get_state(0).collections["batch_stats"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), ours, stats)


def test_an_evaluation_with_an_array_by_keyword_is_not_cut():
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return nn.Dense(1)(x) * mask[:, None]

    x = rng.normal(size=(1100, 3)).astype(np.float32)
    y = x[:, :1], (x[:, 0] > 0).astype(np.float32)

    def loss(params, x, y, apply_fn):
        prediction = apply_fn({"params": params}, x, mask=y[1])
        return ((prediction - y[0]) ** 2).mean(), prediction

    model = (
        (lambda key, x: Masked().init(key, x, x[:, 0])["params"]),
        (lambda params, x, mask: Masked().apply({"params": params}, x, mask)),
    )
    swarm = tn.TurbaTrainState.swarm(model, optax.sgd(0.1), 2, sample_input=x[:1])
    expected = [loss(one.params, x, y, lambda v, x, mask: Masked().apply(v, x, mask))[0] for one in swarm]
    np.testing.assert_allclose(tn.evaluate(swarm, x, y, loss), expected, rtol=1e-5)


def test_parameters_of_two_types_train_with_hyperparameters_as_data():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.relu(nn.Dense(4, param_dtype=jnp.bfloat16)(x)))

    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.01)
    swarm = tn.TurbaTrainState.swarm(Mixed(), adam, 2, sample_input=X[:1])
    trained, history = tn.fit(swarm, X, Y, tn.softmax_cross_entropy, epochs=3, batch_size=8, progress=False)
    assert np.isfinite(history.train_loss).all()
    assert [leaf.dtype for leaf in jax.tree.leaves(trained)] == [leaf.dtype for leaf in jax.tree.leaves(swarm)]


def test_a_loss_in_half_precision_is_recorded_and_scored_in_full():
    def loss(params, x, y, apply_fn):
        logits = apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    swarm = made(tn.MLP((4, 2), dtype=jnp.bfloat16))
    how = {"validation": (X, Y), "metric": {"accuracy": tn.accuracy}, "progress": False}
    trained, history = tn.fit(swarm, X, Y, loss, epochs=2, batch_size=8, **how)
    assert history.train_loss.dtype == history.validation_loss.dtype == np.float32
    right = (np.asarray(tn.predict(trained, X)).argmax(-1) == Y).mean(1)
    np.testing.assert_allclose(history.validation_metric["accuracy"][-1], right, rtol=1e-6)
    assert len(history.best("accuracy", "max")) == len(swarm)


def test_collections_go_with_their_members():
    swarm, _ = train(made(Normed()))
    both = swarm.append(made(Normed(), 2)).remove_state(0)
    mean = both.collections["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_array_equal(mean[:4], swarm.collections["batch_stats"]["BatchNorm_0"]["mean"][1:])
    np.testing.assert_array_equal(mean[4:], np.zeros((2, 5)))
    merged = swarm.merge().collections["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(merged[0], swarm.collections["batch_stats"]["BatchNorm_0"]["mean"].mean(0), rtol=1e-6)
    assert both.shape == (6, 3, 2) and swarm.cost_analysis(X)["flops"] > 0


def test_swarms_with_other_collections_do_not_append():
    with pytest.raises(ValueError, match="one architecture"):
        made(Normed()).append(made(Dropped()))


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit])
def test_a_transformation_inside_the_loss_is_refused_in_a_sentence(transform):
    def inner(params, x, y, apply_fn):
        out = transform(lambda x: apply_fn({"params": params}, x[None])[0])(x if transform is jax.vmap else x[0])
        return jnp.mean(out), out

    with pytest.raises(ValueError, match=r"changes its \['batch_stats'\] in training, which cannot leave"):
        tn.fit(made(Normed()), X, Y, inner, epochs=1, batch_size=8, progress=False)


def test_a_pair_of_functions_is_a_model():
    def init(key, x):
        return {"w": jax.random.normal(key, (x.shape[-1], 2))}

    swarm = made((init, lambda params, x: x @ params["w"]), 3)
    expected = [init(member.member_key(4, id, member.INIT), X)["w"] for id in range(3)]
    np.testing.assert_allclose(tn.predict(swarm, X), np.einsum("rf,mfo->mro", X, expected), rtol=1e-5, atol=1e-6)
    trained, history = train(swarm)
    assert (history.train_loss[-1] < history.train_loss[0]).all() and trained.shape == (3, 3, 2)


def test_an_nnx_module_trains_as_it_trains_alone():
    swarm = made(nnx.bridge.ToLinen(NNX), 2)
    plain = NNX(rngs=nnx.Rngs(0))
    start = swarm.get_state(1)
    nnx.update(plain, nnx.State({**start.params}))
    optimizer = nnx.Optimizer(plain, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(plain, optimizer, x, y):
        def loss(plain):
            return optax.softmax_cross_entropy_with_integer_labels(plain(x), y).mean()

        value, gradients = nnx.value_and_grad(loss)(plain)
        optimizer.update(plain, gradients)
        return value

    order = tn.batch_order(swarm, 40, epochs=4, batch_size=8)[1].reshape(-1, 8)
    losses = np.array([float(step(plain, optimizer, X[rows], Y[rows])) for rows in order]).reshape(4, -1).mean(1)
    trained, history = train(swarm)
    np.testing.assert_allclose(history.train_loss[:, 1], losses, rtol=1e-4)
    plain.eval()
    np.testing.assert_allclose(tn.predict(trained, X)[1], plain(X), rtol=1e-3, atol=1e-4)


@pytest.mark.optimized
def test_float64_members_end_where_they_end_alone():
    with jax.enable_x64(True):
        x, y = jnp.asarray(X, float), jnp.asarray(Y)
        swarm = tn.TurbaTrainState.swarm(Normed(), optax.sgd(0.05), 3, sample_input=x[:1])
        swarm = swarm.replace(params=jax.tree.map(lambda leaf: leaf.astype(float), swarm.params))  # Flax makes float32
        order = jnp.asarray(tn.batch_order(swarm, 40, epochs=20, batch_size=8)[2].reshape(-1, 8))
        _, history = tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=20, batch_size=8, progress=False)
        params, stats, losses = swarm.get_state(2).params, swarm.get_state(2).collections, []

        @jax.jit
        def step(number, params, stats, rows):
            def loss(params):
                how = {"rngs": member.streams(0, 2, number), "mutable": ["batch_stats"], "train": True}
                out, changed = Normed().apply({"params": params, **stats}, x[rows], **how)
                return optax.softmax_cross_entropy_with_integer_labels(out, y[rows]).mean(), changed

            (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            return value, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), stats

        for number, rows in enumerate(order):
            value, params, stats = step(number, params, stats, rows)
            losses.append(float(value))
        assert params["Dense_0"]["kernel"].dtype == np.float64
        np.testing.assert_allclose(history.train_loss[:, 2], np.reshape(losses, (20, -1)).mean(1), rtol=1e-9)


def test_a_weight_changes_no_draw():
    swarm, x = made(Dropped(), size=1), np.ones((1, 16, *X.shape[1:]), np.float32)
    _, _, plain = swarm.train(x, Y[None, :16], tn.softmax_cross_entropy)
    _, _, prediction = swarm.train(x, (Y[None, :16], np.ones((1, 16))), tn.weighted(tn.softmax_cross_entropy))
    np.testing.assert_allclose(prediction, plain, rtol=1e-6)
    assert len(np.unique(np.asarray(prediction)[0], axis=0)) > 1


def test_batch_statistics_go_with_weights_above_0_alone():
    weights, how = np.ones(len(X), np.float32), {"epochs": 2, "batch_size": 16, "progress": False}
    _, plain = tn.fit(made(Normed(), 3), X, Y, tn.softmax_cross_entropy, **how)
    _, ones = tn.fit(made(Normed(), 3), X, (Y, weights), tn.weighted(tn.softmax_cross_entropy), **how)
    np.testing.assert_allclose(ones.train_loss, plain.train_loss, rtol=1e-5)
    weights[5] = 0
    with pytest.raises(ValueError, match=r"y holds 0.0 in row 5, .* above 0, as the model's \['batch_stats'\] count"):
        tn.fit(made(Normed(), 3), X, (Y, weights), tn.weighted(tn.softmax_cross_entropy), **how)
    held_out = X, (Y, weights)
    tn.fit(made(Normed(), 3), X, (Y, weights + 1), tn.weighted(tn.softmax_cross_entropy), validation=held_out, **how)


def test_a_loss_that_would_score_in_training_mode_is_refused():
    def loss(params, x, y, apply_fn):
        logits = apply_fn({"params": params}, x, deterministic=False)
        return tn.softmax_cross_entropy({}, x, y, lambda *_: logits)

    how = {"epochs": 1, "batch_size": 16, "progress": False}
    tn.fit(made(Dropped(), 2), X, Y, loss, **how)  # in training it is the mode
    with pytest.raises(ValueError, match=r"x, deterministic=False\) would score in training mode: leave deterministic"):
        tn.fit(made(Dropped(), 2), X, Y, loss, validation=(X, Y), **how)


def test_a_model_of_two_arguments_is_told_that_it_gets_one():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, first, second):
            return nn.Dense(2)(first + second)

    with pytest.raises(ValueError, match="missing 1 required positional argument: 'second'.: it takes one, x"):
        tn.TurbaTrainState.swarm(Two(), optax.sgd(0.1), 2, sample_input=(np.ones((1, 3)), np.ones((1, 3))))


class Noisy(nnx.Module):
    """Dropout, and noise from a stream of a name of its own."""

    def __init__(self, *, rngs):
        self.first, self.second = nnx.Linear(3, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
        self.drop, self.noise = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs, rng_collection="noise")

    def __call__(self, x):
        return self.second(self.noise(self.drop(nnx.relu(self.first(x)))))


def twins_of(swarm):
    return swarm.replace(params=jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * 2), swarm.params))


def seen(state):
    ones = np.ones((2, 6, 3), np.float32)
    return np.asarray(state.train(ones, np.zeros((2, 6), np.int32), tn.softmax_cross_entropy)[2])


def test_an_nnx_module_draws_anew_for_each_member_step_and_call():
    model = nnx.bridge.ToLinen(Noisy)
    swarm = made(model, 2)
    assert swarm.collections == {}
    plain = made(nnx.bridge.ToLinen(Noisy), 2)
    jax.tree.map(np.testing.assert_array_equal, swarm.params, plain.params)
    state = twins_of(swarm)
    once = seen(state)
    assert (once[0] != once[1]).any()  # of equal weights: other members draw other numbers
    assert (once != seen(state.replace(step=state.step + 1))).any()
    np.testing.assert_array_equal(once, seen(state))
    trained, history = train(swarm)
    assert np.isfinite(history.train_loss).all()
    np.testing.assert_array_equal(tn.predict(trained, X), tn.predict(trained, X))


@pytest.mark.parametrize("only", first(1, ["noise", "drop"]))
def test_each_layer_of_an_nnx_module_draws_for_itself(only):
    class One(Noisy):
        def __call__(self, x, only=only):
            return self.second(getattr(self, only)(nnx.relu(self.first(x))))

    of_one = twins_of(made(nnx.bridge.ToLinen(One), 2))
    once = seen(of_one)
    assert (once[0] != once[1]).any()
    assert (once != seen(of_one.replace(step=of_one.step + 1))).any()


def advice(model, caplog):
    """What `swarm` says of a model."""
    say_once.cache_clear()
    caplog.clear()
    made(model)
    return [record.message for record in caplog.records]


class Flagged(nnx.Module):
    """An NNX module that is told by a keyword whether it trains."""

    def __init__(self, rngs):
        self.layer, self.drop = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, train: bool = False):
        return self.drop(self.layer(x), deterministic=not train)


def test_an_nnx_module_is_told_by_its_keyword_that_it_trains():
    still = tn.TurbaTrainState.swarm(nnx.bridge.ToLinen(Flagged), optax.sgd(0.0), 2, sample_input=X[:1])
    losses = still.train(X[None].repeat(2, 0), Y[None].repeat(2, 0), tn.softmax_cross_entropy)[1]
    scores = [tn.evaluate(still, X, Y, tn.softmax_cross_entropy) for _ in range(2)]
    np.testing.assert_array_equal(*scores)
    assert (np.abs(losses - scores[0]) > 1e-4).all()


@pytest.mark.parametrize(
    "keyword",  # MODELS have the others
    first(
        4, ["is_training", "use_running_average", "inference", "inference_mode", "train", "training", "deterministic"]
    ),
)
def test_a_mode_by_any_usual_name_is_set(keyword, caplog):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x, **mode):
            trains = mode[keyword] == (keyword in ("train", "training", "is_training"))
            x = nn.BatchNorm(use_running_average=not trains)(nn.Dense(5)(x))
            return nn.Dense(2)(nn.Dropout(0.5, deterministic=not trains)(x))

    parameter = inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.signature(Named.__call__)
    Named.__call__.__signature__ = signature.replace(parameters=[*list(signature.parameters.values())[:2], parameter])
    assert advice(Named(), caplog) == []
    swarm = made(Named())
    trained, _ = train(swarm)
    before, after = (s.collections["batch_stats"]["BatchNorm_0"]["mean"] for s in (swarm, trained))
    assert (np.asarray(before) != np.asarray(after)).all()
    np.testing.assert_array_equal(tn.predict(trained, X), tn.predict(trained, X))


def test_statistics_and_dropout_that_never_act_are_said_once(caplog):
    class Off(nn.Module):
        normed: bool = False
        attends: bool = False

        @nn.compact
        def __call__(self, x, is_train: bool = False):
            x = nn.Dense(4)(x)
            if self.normed:
                return nn.Dense(2)(nn.BatchNorm(use_running_average=not is_train)(x))
            if self.attends:
                return nn.Dense(2)(nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not is_train)(x))
            return nn.Dense(2)(nn.Dropout(0.5, deterministic=not is_train)(x))

    known = "a keyword of its __call__ must say whether it trains, by one of the names train, training, is_training,"
    assert advice(Off(normed=True), caplog)[0].startswith(f"Off has batch_stats that no training step changes: {known}")
    assert advice(Off(), caplog)[0].startswith(f"Off has dropout that never draws: {known}")
    assert advice(Off(attends=True), caplog)[0].startswith("Off has dropout that never draws")
    made(Off())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("model", [*MODELS.values(), Normed(rate=0.0), tn.MLP((4, 2)), NNX])
def test_models_that_act_are_said_nothing_of(model, caplog):
    model = nnx.bridge.to_linen(NNX) if model is NNX else model
    assert advice(model, caplog) == []


@pytest.mark.parametrize("accelerator, rows", [(False, member.ROWS), (True, 16 * member.ROWS)])
def test_an_accelerator_scores_more_rows_at_a_time(accelerator, rows, monkeypatch):
    monkeypatch.setattr(member, "on_accelerator", lambda: accelerator)
    assert member.rows_at_once() == rows
