"""Hyperparameters and schedules of one member each, against plain Optax and PyTorch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import turbanet as tn
from turbanet.core import schedules

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(24, 3)).astype(np.float32), rng.integers(0, 2, 24).astype(np.int32)
ADAMW = optax.inject_hyperparams(optax.adamw)


def made(size=3, optimizer=None):
    optimizer = optimizer or ADAMW(learning_rate=0.01, weight_decay=0.1)
    return tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optimizer, size, sample_input=X[:1])


def train(swarm, epochs=3, **more):
    return tn.fit(
        swarm,
        X,
        Y,
        tn.softmax_cross_entropy,
        epochs=epochs,
        batch_size=8,
        progress=False,
        plan=tn.Plan(1, 2),
        **more,
    )


@partial(jax.jit, static_argnums=3)
def loss_and_gradient(params, x, y, apply_fn):
    return jax.value_and_grad(lambda params: tn.softmax_cross_entropy(params, x, y, apply_fn)[0])(params)


def alone(swarm, index, optimizer, epochs):
    """A plain Optax loop: the loss of each epoch. optimizer: epoch -> the transformation of that epoch."""
    order = tn.batch_order(swarm, 24, epochs=epochs, batch_size=8)[index]
    params = swarm.get_state(index).params
    state, losses = optimizer(0).init(params), []
    for epoch in range(epochs):
        steps = []
        for rows in order[epoch]:
            value, gradients = loss_and_gradient(params, X[rows], Y[rows], swarm.apply_fn)
            updates, state = optimizer(epoch).update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            steps.append(float(value))
        losses.append(np.mean(steps))
    return np.array(losses)


def test_each_member_trains_with_its_own_hyperparameters():
    rates, decays = [0.1, 0.01, 0.001], [0.0, 0.1, 1.0]
    swarm = tn.with_hyperparameters(made(), learning_rate=rates, weight_decay=decays)
    np.testing.assert_allclose(tn.hyperparameters(swarm)["learning_rate"], rates)
    _, history = train(swarm)
    for index, (rate, decay) in enumerate(zip(rates, decays, strict=True)):
        expected = alone(swarm, index, lambda _, r=rate, d=decay: optax.adamw(r, weight_decay=d), 3)
        np.testing.assert_allclose(history.train_loss[:, index], expected, rtol=1e-4)


def test_hyperparameters_may_be_tensors():
    swarm = tn.with_hyperparameters(made(), learning_rate=torch.tensor([0.5, 0.25, 0.125], requires_grad=True))
    assert tn.hyperparameters(swarm)["learning_rate"].tolist() == [0.5, 0.25, 0.125]


def test_what_was_given_as_an_int_may_become_any_number():
    swarm = made(optimizer=ADAMW(learning_rate=1, weight_decay=0))
    rates, decays = [0.1, 0.01, 1.0], [0.0, 0.1, 0.5]
    changed = tn.with_hyperparameters(swarm, learning_rate=rates, weight_decay=decays)
    _, history = train(changed)
    _, expected = train(tn.with_hyperparameters(made(), learning_rate=rates, weight_decay=decays))
    np.testing.assert_array_equal(history.train_loss, expected.train_loss)


def test_an_int_that_is_set_to_an_int_stays_one():
    every = optax.inject_hyperparams(lambda k: optax.apply_every(k))(k=3)
    assert tn.hyperparameters(tn.with_hyperparameters(made(optimizer=every), k=[1, 2, 3]))["k"].dtype == jnp.int32


def test_a_schedule_of_a_rate_that_was_given_as_an_int():
    swarm = tn.with_schedule(made(optimizer=optax.inject_hyperparams(optax.sgd)(1)), "cosine")
    trained, history = train(swarm, epochs=4)
    np.testing.assert_allclose(tn.hyperparameters(trained)["learning_rate"], (1 + np.cos(0.3 * np.pi)) / 2, rtol=1e-5)
    expected = alone(swarm, 1, lambda epoch: optax.sgd(float(schedules.cosine(epoch, 1.0))), 4)
    np.testing.assert_allclose(history.train_loss[:, 1], expected, rtol=1e-4)


def two_rates(head, body):
    """SGD with a learning rate for each of two layers."""

    def layer_of(params):
        return {name: "body" if name == "Dense_0" else "head" for name in params}

    return optax.multi_transform({"head": head, "body": body}, layer_of)


def of_two_rates():
    sgd = optax.inject_hyperparams(optax.sgd)
    return made(optimizer=optax.chain(optax.clip(1.0), two_rates(sgd(0.5), sgd(0.1))))


def test_two_learning_rates_are_told_apart_by_where_they_are():
    swarm = tn.with_hyperparameters(of_two_rates(), **{"head.learning_rate": [1.0, 2.0, 3.0]})
    found = {name: value.tolist() for name, value in tn.hyperparameters(swarm).items()}
    assert found == {"1.head.learning_rate": [1.0, 2.0, 3.0], "1.body.learning_rate": pytest.approx([0.1] * 3)}


def test_a_schedule_changes_each_of_two_learning_rates_from_its_own():
    swarm = tn.with_hyperparameters(of_two_rates(), **{"1.head.learning_rate": [0.2, 0.3, 0.4]})
    swarm = tn.with_schedule(swarm, "cosine")
    swarm = tn.with_hyperparameters(swarm, **{"1.body.learning_rate": 0.05})
    _, history = train(swarm, epochs=4)

    def of_epoch(epoch):
        rates = (float(schedules.cosine(epoch, base)) for base in (0.3, 0.05))
        return optax.chain(optax.clip(1.0), two_rates(*map(optax.sgd, rates)))

    np.testing.assert_allclose(history.train_loss[:, 1], alone(swarm, 1, of_epoch, 4), rtol=1e-4)


def test_a_rate_set_under_reduce_leaves_the_others_where_they_are():
    swarm = tn.with_schedule(of_two_rates(), "reduce")
    halved = swarm.schedule.plateau._replace(scale=jnp.full(3, 0.5))
    swarm = swarm.replace(schedule=swarm.schedule.replace(plateau=halved))
    swarm = tn.with_hyperparameters(swarm, **{"1.head.learning_rate": 1.0})
    state = schedules.begin_epoch(swarm.get_state(0))
    rates = {name: float(value) for name, value in tn.hyperparameters(state).items()}
    assert rates == {"1.head.learning_rate": 1.0, "1.body.learning_rate": pytest.approx(0.05)}


def test_hyperparameters_of_text_are_refused_by_name():
    with pytest.raises(ValueError, match="^learning_rate must be an array of numbers, got str"):
        tn.with_hyperparameters(made(), learning_rate="fast")


def test_each_member_clips_its_own_gradient():
    clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1.0)
    swarm = tn.with_hyperparameters(made(optimizer=optax.chain(clip, optax.sgd(0.5))), max_norm=[0.01, 0.1, 10.0])
    _, history = train(swarm)
    for index, norm in enumerate((0.01, 0.1, 10.0)):
        expected = alone(swarm, index, lambda _, n=norm: optax.chain(optax.clip_by_global_norm(n), optax.sgd(0.5)), 3)
        np.testing.assert_allclose(history.train_loss[:, index], expected, rtol=1e-4)


def test_a_layer_named_like_a_hyperparameter_is_left_alone():
    model = (lambda key, x: {"learning_rate": jnp.ones((3, 2))}, lambda params, x: x @ params["learning_rate"])
    swarm = tn.TurbaTrainState.swarm(model, ADAMW(0.01), 2, sample_input=X[:1])
    changed = tn.with_hyperparameters(swarm, learning_rate=[0.1, 0.2])
    assert optax.tree.get(changed.opt_state.inner_state, "mu")["learning_rate"].shape == (2, 3, 2)
    np.testing.assert_allclose(changed.opt_state.hyperparams["learning_rate"], [0.1, 0.2])


def torch_rates(make, epochs, losses=None):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, rates = make(optimizer), []
    for epoch in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*([] if losses is None else [losses[epoch]]))
    return np.array(rates)


@pytest.mark.parametrize(
    "name, make",
    [
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10, 1e-6)),
        ("warm", lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 10, eta_min=1e-6)),
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_rates_equal_pytorchs(name, make):
    found = [float(schedules.SCHEDULES[name](epoch, 0.1)) for epoch in range(25)]
    np.testing.assert_allclose(found, torch_rates(make, 25), rtol=1e-4, atol=1e-9)


def test_reduce_halves_where_pytorch_does():
    losses = np.concatenate([np.linspace(1, 0.5, 4), np.full(14, 0.5), [0.2], np.full(9, 0.3)])

    def make(o):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=5)

    swarm = tn.with_schedule(tn.with_hyperparameters(made(1), learning_rate=0.1), "reduce")
    state, found = swarm.get_state(0), []
    for loss in losses:
        state = schedules.begin_epoch(state)
        found.append(float(state.opt_state.hyperparams["learning_rate"]))
        state = schedules.end_epoch(state, jnp.float32(loss)).replace(epoch=state.epoch + 1)
    np.testing.assert_allclose(found, torch_rates(make, len(losses), losses), rtol=1e-6)
    assert min(found) < 0.03


def test_each_member_follows_its_own_schedule():
    def falling(epoch, base):
        return base / (1 + epoch)

    swarm = made(optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    swarm = tn.with_schedule(swarm, ["cosine", falling, "constant"])
    _, history = train(swarm, epochs=4)
    for index, function in enumerate((schedules.cosine, falling, schedules.constant)):
        expected = alone(swarm, index, lambda epoch, f=function: optax.sgd(float(f(epoch, 0.5))), 4)
        np.testing.assert_allclose(history.train_loss[:, index], expected, rtol=1e-4)


def test_epochs_count_over_calls_of_fit():
    swarm = tn.with_schedule(made(), "warm")
    once, _ = train(swarm, epochs=4, segment=2)
    twice, _ = train(train(swarm, epochs=2)[0], epochs=2)
    jax.tree.map(np.testing.assert_array_equal, once.params, twice.params)


def rates_of(swarm, epochs):
    """Train, and return the learning rate of the first member in each epoch."""
    rates = []
    seen = [lambda view: rates.append(float(tn.hyperparameters(view.swarm)["learning_rate"][0]))]
    return train(swarm, epochs=epochs, segment=1, callbacks=seen)[0], pytest.approx(rates, rel=1e-5)


def test_a_schedule_counts_from_the_epoch_at_which_it_is_given():
    trained, _ = train(made(), epochs=3)
    trained, rates = rates_of(tn.with_schedule(trained, lambda epoch, base: base * 0.5**epoch), 3)
    assert rates == [0.01, 0.005, 0.0025]
    _, rates = rates_of(tn.with_schedule(trained, lambda epoch, base: base * 0.5**epoch), 2)
    assert rates == [0.0025, 0.00125]


def test_a_rate_that_is_set_is_trained_with_and_the_schedule_begins_anew():
    trained, rates = rates_of(tn.with_schedule(made(), lambda epoch, base: base * 0.5**epoch), 3)
    assert rates == [0.01, 0.005, 0.0025]
    trained, rates = rates_of(tn.with_hyperparameters(trained, learning_rate=0.04), 2)
    assert rates == [0.04, 0.02]
    assert rates_of(tn.with_hyperparameters(trained, weight_decay=0.0), 2)[1] == [0.01, 0.005]


@pytest.mark.parametrize("metric", [None, lambda prediction, y: 0.5], ids=["compiled", "on the host"])
def test_reduce_in_fit_follows_the_validation_loss(metric):
    swarm = tn.with_hyperparameters(made(), learning_rate=[0.0, 0.01, 0.0])
    swarm = tn.with_schedule(swarm, ["reduce", "reduce", "constant"])
    trained, _ = train(swarm, epochs=14, validation=(X, Y), metric=metric)
    scale = trained.schedule.plateau.scale[jnp.array([0, 2])]  # of those that never improve
    np.testing.assert_array_equal(scale, [0.25, 1])  # the first epoch, then 6 and 6 waited; another schedule


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tn.with_hyperparameters(made(), momentum=0.9), "no hyperparameter 'momentum'; it has .*weight_decay"),
        (
            lambda: tn.with_hyperparameters(of_two_rates(), learning_rate=0.1),
            r"several .*'learning_rate'; it has \['1.body.learning_rate', '1.head.learning_rate'\]; say which, by \*\*",
        ),
        (lambda: tn.with_hyperparameters(made(), learning_rate=[0.1, 0.2]), "one number or 3 of them"),
        (lambda: tn.with_hyperparameters(made(optimizer=optax.sgd(0.1)), learning_rate=0.1), "wrap the optimizer"),
        (lambda: tn.with_schedule(made(optimizer=optax.sgd(0.1)), "cosine"), "needs a learning_rate as data; wrap"),
        (
            lambda: tn.with_schedule(made(), "cosin"),
            "Unknown schedule 'cosin'; known: constant, cosine, warm, multistep, reduce",
        ),
        (lambda: tn.with_schedule(made(), ["cosine"]), "one or 3 of them, got 1"),
        (lambda: tn.with_schedule(made(), {"warm": 3}), "Unknown schedule {'warm': 3}; known: constant, cosine"),
        (lambda: tn.with_hyperparameters(made(), learning_rate=[0.1, np.nan, 0.2]), "must be numbers, got NaN"),
        (lambda: tn.with_schedule(made(), lambda epoch, base: jnp.ones(2)), "returns one number"),
        (
            lambda: tn.with_schedule(made(), optax.cosine_decay_schedule(0.1, 9)),
            r"A schedule is a function \(epoch, base\) -> learning rate; one of Optax's, of steps, is lambda epoch",
        ),
        (lambda: train(tn.with_schedule(made(), "reduce")), "follow the validation loss"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_learning_rate_set_after_a_schedule_is_what_the_schedule_goes_on_from():
    rates = [0.1, 0.01, 0.001]
    before = tn.with_schedule(tn.with_hyperparameters(made(), learning_rate=rates), "cosine")
    after = tn.with_hyperparameters(tn.with_schedule(made(), "cosine"), learning_rate=rates)
    np.testing.assert_array_equal(train(after)[1].train_loss, train(before)[1].train_loss)


def test_a_rate_that_optax_computes_is_not_ours_to_set():
    swarm = made(optimizer=ADAMW(learning_rate=optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1))
    for change in (
        lambda: tn.with_schedule(swarm, "cosine"),
        lambda: tn.with_hyperparameters(swarm, learning_rate=0.1),
    ):
        with pytest.raises(ValueError, match="learning_rate was given to Optax as a schedule"):
            change()
    changed = tn.with_hyperparameters(swarm, weight_decay=0.5)
    np.testing.assert_array_equal(tn.hyperparameters(changed)["weight_decay"], [0.5] * 3)
