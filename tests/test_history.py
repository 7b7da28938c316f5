"""Histories: their best epochs, their epochs counted on, one after the other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import turbanet as tn
from turbanet.training.history import History, diverged, name_diverged

NAN = np.nan


def history(train_loss, *, begun=0, followed=("train_loss", "min", 0.0), **more):
    train_loss = np.array(train_loss, np.float32)
    epochs = (~np.isnan(train_loss)).sum(0)
    members = np.arange(train_loss.shape[1])
    more |= {"begun": np.broadcast_to(begun, members.shape), "followed": followed}
    return History(train_loss, None, members * 0, members, 1.0, 2.0, None, epochs, **more)


def test_best_is_the_epoch_of_the_lowest_loss_of_each_member():
    found = history([[3, 5, 1], [1, 4, 2], [2, 4, NAN]]).best()
    assert found.epoch.tolist() == [1, 1, 0]
    assert found.train_loss.tolist() == [1, 4, 1]
    assert found.member.tolist() == [0, 1, 2]


def test_best_counts_on_from_epochs_before_and_takes_another_metric():
    metric = {"accuracy": np.array([[0.5, 0.9], [0.75, 0.8]])}
    found = history([[1, 1], [2, 2]], begun=[10, 20], validation_metric=metric).best("accuracy", "max")
    assert found.epoch.tolist() == [11, 20]
    assert found.accuracy.tolist() == [0.75, 0.9]


def test_best_asks_for_as_much_better_as_patience_did():
    assert history([[1.0], [0.95], [0.85]], followed=("train_loss", "min", 0.1)).best().epoch.tolist() == [2]
    assert history([[1.0], [0.95], [0.91]], followed=("train_loss", "min", 0.1)).best().epoch.tolist() == [0]


def test_best_of_a_member_without_a_number_is_its_first_line():
    assert history([[NAN, 2.0], [NAN, 1.0]]).best().epoch.tolist() == [0, 1]


@pytest.mark.parametrize("asked", [("accuracy", "max"), ("train_loss", "lowest")])
def test_best_of_what_was_not_seen_is_refused(asked):
    with pytest.raises(ValueError, match="best takes one of train_loss, and mode"):
        history([[1.0]]).best(*asked)


def test_the_best_epoch_is_the_one_whose_weights_patience_brings_back():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), rng.integers(2, size=60)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((16, 2)), optax.adam(0.05), 5, sample_input=x[:1])
    held_out = x[40:], y[40:]
    how = {"epochs": 30, "batch_size": 10, "segment": 2, "progress": False, "patience": 4, "min_delta": 0.01}
    swarm, seen = tn.fit(swarm, x[:40], y[:40], tn.softmax_cross_entropy, validation=held_out, **how)
    best = seen.best()
    assert best.validation_loss.tolist() == pytest.approx(
        tn.evaluate(swarm, *held_out, tn.softmax_cross_entropy).tolist(), rel=1e-5
    )
    assert np.isnan(seen.train_loss[-1]).any()
    assert not best.train_loss.isna().any()


class Float32(nn.Module):
    """A model that stays in float32 where JAX's x64 is on."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, dtype=jnp.float32, param_dtype=jnp.float32)(x)


def test_the_best_epoch_under_x64_is_the_one_whose_weights_patience_brings_back():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)).astype(np.float32), rng.integers(2, size=30)
    how = {"validation": (x[20:], y[20:]), "metric": tn.accuracy, "monitor": "validation_metric", "mode": "max"}
    with jax.enable_x64(True):
        swarm = tn.TurbaTrainState.swarm(Float32(), optax.sgd(0.3), 50, sample_input=x[:1])
        how |= {"epochs": 12, "patience": 12, "min_delta": 0.1, "progress": False}
        swarm, seen = tn.fit(swarm, x[:20], y[:20], tn.softmax_cross_entropy, **how)
        scores = tn.accuracy(tn.predict(swarm, x[20:]), y[20:])
        np.testing.assert_allclose(seen.best().validation_metric, scores, rtol=1e-6)


def test_two_calls_are_one_history():
    x = np.eye(4, dtype=np.float32)
    optimizer = optax.adam(0.01)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4,)), optimizer, 3, sample_input=x[:1])
    how = {"batch_size": 2, "progress": False, "plan": tn.Plan(1, 3)}
    data = x, np.arange(4), tn.softmax_cross_entropy
    whole, at_once = tn.fit(swarm, *data, epochs=6, **how)
    half, first = tn.fit(swarm, *data, epochs=2, **how)
    _, second = tn.fit(half, *data, epochs=4, **how)
    both = first + second
    np.testing.assert_array_equal(both.train_loss, at_once.train_loss)
    assert second.frame().epoch.min() == 2
    assert both.frame().drop(columns="train_loss").equals(at_once.frame().drop(columns="train_loss"))
    assert both.epochs.tolist() == [6] * 3
    assert both.compile_seconds == first.compile_seconds + second.compile_seconds
    assert int(whole.epoch[0]) == 6


def test_a_member_that_stopped_early_goes_on_where_it_stopped():
    first = history([[1, 4], [2, NAN], [3, NAN]])
    second = history([[10, 40], [NAN, 50]], begun=[3, 1])
    both = first + second
    np.testing.assert_array_equal(both.train_loss, [[1, 4], [2, 40], [3, 50], [10, NAN]])
    assert both.epochs.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (history([[1.0, 1.0]]), "member 0 ended the first after 2 epochs and began the second after 0"),
        (history([[1.0]], begun=2), "of other members"),
        (history([[1.0, 1.0]], begun=2, validation_metric=np.zeros((1, 2))), "must hold the same metrics"),
    ],
)
def test_histories_that_do_not_follow_one_another_are_refused(second, message):
    with pytest.raises(ValueError, match=message):
        history([[1.0, 2.0], [1.0, 2.0]]) + second


def test_best_of_what_was_followed_is_by_its_own_mode():
    metric = {"a": np.array([[0.1], [0.9], [0.5]]), "b": np.array([[3.0], [2.0], [1.0]])}
    seen = history([[1.0], [1.0], [1.0]], validation_metric=metric, followed=("a", "max", 0.0))
    assert seen.best().epoch.tolist() == seen.best("a").epoch.tolist() == [1]
    assert seen.best(mode="min").epoch.tolist() == [0]
    assert seen.best("b", "min").epoch.tolist() == [2]
    with pytest.raises(ValueError, match="best takes one of"):
        seen.best("b")


def test_the_sum_has_every_epoch_also_where_all_are_nan():
    nan = {"m": np.full((2, 1), NAN)}
    first = history([[1.0], [2.0]], validation_metric=nan)
    both = first + history([[3.0], [4.0]], begun=2, validation_metric=nan)
    assert both.train_loss[:, 0].tolist() == [1, 2, 3, 4]
    assert len(both.frame()) == 4


def test_the_sum_after_a_segment_that_nobody_finished():
    first = history([[1.0], [2.0], [NAN], [NAN]])
    both = first + history([[3.0]], begun=2)
    np.testing.assert_array_equal(both.train_loss[:, 0], [1, 2, 3, NAN])


def blown(rates, **how):
    """Members of these learning rates, trained on a straight line: of which some are too large."""
    x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), sgd, len(rates), sample_input=x[:1])
    swarm = tn.with_hyperparameters(swarm, learning_rate=rates)
    return tn.fit(swarm, x, 2 * x, tn.mse, progress=False, plan=tn.Plan(1, 2), **how)


def test_members_that_diverged_are_named_once_a_call(caplog):
    for _ in range(2):
        caplog.clear()
        swarm, history = blown([0.1, 1e38, 0.1, 1e30], epochs=5)
        (said,) = [record.message for record in caplog.records if "diverged" in record.message]
        assert said.startswith("2 of 4 members (1, 3) diverged, with a NaN or infinite loss or weight: take a smaller")
    assert diverged(swarm, history).tolist() == [False, True, False, True]


def test_of_several_trainings_in_one_it_is_said_how_many_diverged(caplog):
    swarm, history = blown([0.1, 1e38], epochs=5)
    twice = [np.concatenate([getattr(history, name)] * 2) for name in ("seed", "member", "epochs")]
    losses = np.concatenate([history.train_loss] * 2, axis=1)
    doubled = dataclasses.replace(history, **dict(zip(("seed", "member", "epochs"), twice)), train_loss=losses)
    caplog.clear()
    name_diverged(jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), swarm), doubled, restored=False)
    assert caplog.text.count("2 of 4 members diverged, with a NaN or infinite") == 1


def test_weights_that_break_in_the_last_step_are_seen(caplog):
    swarm, history = blown([3e38, 0.1], epochs=1)
    assert np.isfinite(history.train_loss).all() and not np.isfinite(swarm.params["Dense_0"]["kernel"][0]).all()
    assert "1 of 2 members (0) diverged" in caplog.text


def test_that_the_first_weights_came_back_is_said(caplog):
    x = np.ones((4, 1), np.float32)
    blown([1e38, 0.1], epochs=6, patience=2, validation=(x, x))
    assert "1 of 2 members (0) diverged" in caplog.text
    assert "weights of their best epoch again, or the first" in caplog.text


def test_nobody_who_is_well_is_named(caplog):
    blown([0.1, 0.2], epochs=2)
    assert "diverged" not in caplog.text


@pytest.mark.parametrize("first", [True, False])
def test_a_history_without_epochs_adds_no_metric_and_takes_none(first):
    empty = history(np.zeros((0, 2)), begun=0 if first else 2)
    metric = {"accuracy": np.array([[0.5, 0.9], [0.75, 0.8]])}
    full = history([[1, 1], [2, 2]], validation_metric=metric)
    both = empty + full if first else full + empty
    assert both.recorded().keys() == {"train_loss", "accuracy"}
    np.testing.assert_array_equal(both.validation_metric["accuracy"], metric["accuracy"])
    assert both.epochs.tolist() == [2, 2] and both.steady_seconds == 4.0


def test_a_metric_given_alone_is_that_of_its_name():
    alone = history([[1, 1]], validation_metric=np.array([[0.5, 0.9]]))
    named = history([[2, 2]], begun=1, validation_metric={"validation_metric": np.array([[0.75, 0.8]])})
    both = alone + named
    np.testing.assert_array_equal(both.recorded()["validation_metric"], [[0.5, 0.9], [0.75, 0.8]])
