"""Callbacks: what they see, that stopping some keeps the others' bits, and hyperparameters set on the way."""

import operator

import jax
import numpy as np
import optax
import psutil
import pytest
from conftest import DEVICES
from tiers import first

import turbanet as tn
from turbanet.training import parts

rng = np.random.default_rng(3)
X = rng.normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
HELD_OUT = X[30:], Y[30:]
X, Y = X[:30], Y[:30]
HOW = {"epochs": 8, "batch_size": 10, "segment": 2, "progress": False}


def made(members=6):
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
    return tn.TurbaTrainState.swarm(tn.MLP((6, 2)), optimizer, members, sample_input=X[:1])


def train(swarm=None, **more):
    how = HOW | {"plan": tn.Plan(DEVICES, 2)} | more
    return tn.fit(made() if swarm is None else swarm, X, Y, tn.softmax_cross_entropy, **how)


def of(members, swarm):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[members], swarm)


def equal(one, other):
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_losses_of_short_segments_take_no_more_memory_than_their_numbers():
    """A program returns room for 256 epochs: a training of many members that kept it would hold 256 times as much."""
    members, epochs = 4000, 40
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2, 2)), optax.sgd(0.01), members, sample_input=X[:1])
    bytes_used = []

    def look(view):
        bytes_used.append(psutil.Process().memory_info().rss)

    tn.fit(swarm, X, Y, tn.softmax_cross_entropy, epochs=epochs, segment=1, callbacks=[look], progress=False)
    room = 256 * 4 * members
    assert bytes_used[-1] - bytes_used[4] < (epochs - 5) * room / 4


def test_losses_are_joined_once_however_many_segments_there_are():
    """Joined anew in each of n segments they would take the time of n * n."""
    parts, epochs = [], []

    def look(view):
        parts.append(len(view._run.losses))
        epochs.append(len(view.history.train_loss))
        view.history.train_loss[:] = 0  # a callback's own

    _, history = train(epochs=6, segment=1, callbacks=[look])
    assert max(parts) == 1 and epochs == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(history.train_loss, train(epochs=6, segment=1)[1].train_loss)


def test_a_callback_is_called_after_each_segment_with_what_is_known_by_then():
    seen = []

    def look(view):
        seen.append((view.epoch, view.train_loss, view.validation_loss, view.validation_metric, view.training.sum()))
        assert view.epochs == 8
        assert view.history.epochs.tolist() == [view.epoch] * 6
        assert len(view.history.train_loss) == view.epoch

    _, history = train(callbacks=[look], validation=HELD_OUT, metric={"accuracy": tn.accuracy})
    assert [epoch for epoch, *_ in seen] == [2, 4, 6, 8]
    for epoch, train_loss, validation_loss, metric, training in seen:
        np.testing.assert_array_equal(train_loss, history.train_loss[epoch - 1])
        np.testing.assert_array_equal(validation_loss, history.validation_loss[epoch - 1])
        np.testing.assert_array_equal(metric["accuracy"], history.validation_metric["accuracy"][epoch - 1])
        assert training == 6


@pytest.mark.optimized
def test_looking_changes_no_bit():
    plain, history = train()
    watched, other = train(callbacks=[lambda view: view.swarm])
    equal(plain, watched)
    np.testing.assert_array_equal(history.train_loss, other.train_loss)


@pytest.mark.parametrize("plan", first(1, [tn.Plan(DEVICES, 2), tn.Plan(1, 6)]))
def test_the_swarm_that_a_callback_sees_is_that_of_a_shorter_training_and_stays(plan):
    seen = {}

    def look(view):
        seen[view.epoch] = view.swarm

    trained, _ = train(callbacks=[look], plan=plan)
    shorter, _ = train(epochs=4, plan=plan)
    equal(seen[4], shorter)
    equal(seen[8], trained)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda view: view.swarm, "read view.swarm"),
        (lambda view: view.stop([0]), "call view.stop"),
        (lambda view: view.set(learning_rate=0.1), "call view.set"),
    ],
)
def test_a_view_that_is_kept_says_that_the_training_has_gone_on(ask, what):
    views = []
    train(callbacks=[views.append])
    for view, epoch in ((views[0], 2), (views[-1], 8)):
        with pytest.raises(RuntimeError, match=f"gone on from epoch {epoch}: {what} in the callback"):
            ask(view)


@pytest.mark.parametrize("asked", [np.arange(6) % 3 == 0, [0, 3], np.array([3, 0])])
@pytest.mark.parametrize("long", [False, True])
def test_who_is_stopped_stays_as_it_is_and_the_others_keep_their_bits(monkeypatch, asked, long):
    if long:
        monkeypatch.setattr(parts, "LONG", 0)  # an epoch in parts
    whole, history = train()
    shorter, _ = train(epochs=4)
    trained, stopped = train(callbacks=[lambda view: view.stop(asked) if view.epoch == 4 else None])
    gone = np.arange(6) % 3 == 0
    equal(of(~gone, trained), of(~gone, whole))
    equal(of(gone, trained), of(gone, shorter))
    assert stopped.epochs.tolist() == [4, 8, 8, 4, 8, 8]
    np.testing.assert_array_equal(stopped.train_loss[:, ~gone], history.train_loss[:, ~gone])
    np.testing.assert_array_equal(stopped.train_loss[:4], history.train_loss[:4])
    assert np.isnan(stopped.train_loss[4:, gone]).all()


def test_stopping_most_goes_on_with_fewer_blocks_and_all_ends_the_training():
    whole, _ = train()

    def stop(view):
        if view.epoch == 2:
            view.stop([2, 3])
            view.stop([4, 5])  # besides those
        if view.epoch == 6:
            view.stop()

    shown = []
    trained, history = train(callbacks=[stop, lambda view: shown.append(view.training.sum())])
    assert shown == [2, 2, 0]  # a callback sees what one before it has asked for
    assert history.epochs.tolist() == [6, 6, 2, 2, 2, 2]
    assert len(history.train_loss) == 6
    equal(of([0, 1], trained), of([0, 1], train(epochs=6)[0]))
    assert not np.array_equal(trained.params["Dense_0"]["kernel"][0], whole.params["Dense_0"]["kernel"][0])


def test_stopping_all_at_once():
    trained, history = train(callbacks=[lambda view: view.stop()])
    equal(trained, train(epochs=2)[0])
    assert history.epochs.tolist() == [2] * 6


def test_with_patience_who_is_stopped_has_its_best_weights():
    def stop(view):
        if view.epoch == 4:
            view.stop([1])

    how = {"validation": HELD_OUT, "patience": 8}
    trained, history = train(callbacks=[stop], **how)
    assert history.epochs.tolist() == [8, 4, 8, 8, 8, 8]
    shorter, _ = train(epochs=4, **how)
    equal(trained.params["Dense_0"]["kernel"][1], shorter.params["Dense_0"]["kernel"][1])


def test_who_is_stopped_stays_so_under_a_metric_that_numpy_computes():
    def right(prediction, y):
        return (prediction.argmax(-1) == y).mean()

    def stop(view):
        if view.epoch == 2:
            view.stop([1])  # so few that they are not set aside

    followed = {"validation": HELD_OUT, "metric": {"right": right}, "monitor": "right", "mode": "max", "patience": 9}
    trained, history = train(callbacks=[stop], **followed)
    assert history.epochs.tolist() == [8, 2, 8, 8, 8, 8]
    short, _ = train(epochs=2, **followed)
    equal(of([1], trained).params, of([1], short).params)


def test_a_learning_rate_set_on_the_way_is_that_of_two_calls():
    rates = np.linspace(0.001, 0.1, 6)
    first, _ = train(epochs=4)
    second, _ = train(tn.with_hyperparameters(first, learning_rate=rates), epochs=4)

    def change(view):
        if view.epoch == 4:
            view.set(learning_rate=rates)

    trained, history = train(callbacks=[change])
    equal(trained, second)
    np.testing.assert_allclose(tn.hyperparameters(trained)["learning_rate"], rates, rtol=1e-6)
    assert history.epochs.tolist() == [8] * 6


def test_a_rate_that_began_as_an_int_is_set_to_any_number():
    sgd = optax.inject_hyperparams(optax.sgd)
    whole, same = (tn.TurbaTrainState.swarm(tn.MLP((6, 2)), sgd(rate), 6, sample_input=X[:1]) for rate in (1, 1.0))

    def change(view):
        if view.epoch == 4:
            view.stop([5])
            view.set(learning_rate=0.25)

    equal(train(whole, callbacks=[change])[0], train(same, callbacks=[change])[0])


def test_a_learning_rate_is_set_for_those_who_train_on_alone():
    def change(view):
        if view.epoch == 2:
            view.stop([5])
            view.set(learning_rate=0.5)

    trained, history = train(callbacks=[change])
    assert tn.hyperparameters(trained)["learning_rate"].tolist() == pytest.approx([0.5] * 5 + [0.05])
    assert np.isnan(history.train_loss[2:, 5]).all()  # though its block trains on


def test_a_schedule_goes_on_from_a_rate_that_is_set():
    swarm = tn.with_schedule(made(), "cosine")

    def change(view):
        if view.epoch == 4:
            view.set(learning_rate=0.01)

    first, _ = train(swarm, epochs=4)
    second, _ = train(tn.with_hyperparameters(first, learning_rate=0.01), epochs=4)
    equal(train(swarm, callbacks=[change])[0], second)


def test_a_training_killed_in_a_callback_goes_on_with_what_was_asked_before(tmp_path):
    def steer(view):
        if view.epoch == 2:
            view.stop([0])
            view.set(learning_rate=0.2)

    def die(view):
        if view.epoch == 6:
            raise OSError("the logging service is gone")

    whole, history = train(callbacks=[steer])
    with pytest.raises(OSError, match="logging service"):
        train(callbacks=[steer, die], checkpoints=tmp_path)
    resumed, other = train(callbacks=[steer], checkpoints=tmp_path)
    equal(resumed, whole)
    np.testing.assert_array_equal(other.train_loss, history.train_loss)
    assert other.epochs.tolist() == history.epochs.tolist() == [2, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("steers_first", first(1, [False, True]))
def test_what_callbacks_ask_for_is_not_lost_when_one_raises(tmp_path, steers_first):
    def steer(view):
        if view.epoch == 4:
            view.stop([0])
            view.set(learning_rate=0.2)

    def fail(view):
        if view.epoch == 4 and fails:
            raise fails.pop()

    fails = [OSError("the logging service is gone")]
    callbacks = [steer, fail] if steers_first else [fail, steer]
    with pytest.raises(OSError, match="logging service"):
        train(callbacks=callbacks, checkpoints=tmp_path)
    resumed, history = train(callbacks=callbacks, checkpoints=tmp_path)
    equal(resumed, train(callbacks=[steer])[0])
    assert history.epochs.tolist() == [4, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda view: view.stop([6]), "positions from 0 to 5"),
        (lambda view: view.stop([-1]), "positions from 0 to 5"),
        (lambda view: view.stop([0.5]), "positions from 0 to 5"),
        (lambda view: view.stop(np.ones(5, bool)), "bool .member. of the 6 members, got shape .5,."),
        (lambda view: view.set(learning_rat=0.1), "no hyperparameter 'learning_rat'"),
        (lambda view: view.set(learning_rate=[0.1, 0.2]), "one number or 6 of them"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        train(callbacks=[ask])


@pytest.mark.parametrize("callbacks", [print, [None], "live"])
def test_callbacks_are_a_list_of_functions(callbacks):
    with pytest.raises(ValueError, match="list of functions of a TrainingView"):
        train(callbacks=callbacks)


def test_a_table_has_a_line_a_segment():
    table = tn.ProgressTable()
    _, history = train(callbacks=[table], validation=HELD_OUT, metric=tn.accuracy)
    assert table.table.epoch.tolist() == [2, 4, 6, 8]
    assert table.table.training.tolist() == [6] * 4
    last = history.validation_loss[-1]
    found = table.table.iloc[-1][["validation_loss_low", "validation_loss", "validation_loss_high"]].tolist()
    assert found == pytest.approx(np.quantile(last, [0.05, 0.5, 0.95]), rel=1e-6)
    assert table.table.validation_metric.iloc[0] == pytest.approx(np.median(history.validation_metric[1]))


def test_a_plot_shows_the_median_of_what_was_seen(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tn.LivePlot()
    _, history = train(callbacks=[plot], validation=HELD_OUT, metric=tn.accuracy)
    losses, metric = plot.figure.axes
    assert [line.get_label() for line in losses.lines] == ["train loss", "validation loss"]
    np.testing.assert_allclose(losses.lines[1].get_ydata(), np.median(history.validation_loss, axis=1), rtol=1e-6)
    np.testing.assert_allclose(metric.lines[0].get_ydata(), np.median(history.validation_metric, axis=1), rtol=1e-6)
    assert "6 of 6 members" in losses.get_title()
    plot.figure.savefig(tmp_path / "plot.png")


def test_nothing_is_shown_that_has_stopped_for_all():
    pytest.importorskip("matplotlib")
    table, plot = tn.ProgressTable(), tn.LivePlot()
    train(callbacks=[lambda view: view.stop(), table, plot])
    assert table.table.training.tolist() == [0]


def test_a_training_goes_on_with_other_callbacks_or_none_unless_they_had_stopped_somebody(tmp_path):
    def die(view):
        if view.epoch == 4:
            raise OSError

    whole, _ = train()
    with pytest.raises(OSError):
        train(callbacks=[die], checkpoints=tmp_path / "a")
    equal(train(checkpoints=tmp_path / "a")[0], whole)
    with pytest.raises(OSError):
        train(callbacks=[lambda view: view.stop([1]), die], checkpoints=tmp_path / "b")
    with pytest.raises(ValueError, match="Callbacks had stopped members"):
        train(checkpoints=tmp_path / "b")


def test_stopping_nobody_is_nothing():
    equal(train(callbacks=[lambda view: view.stop([])])[0], train()[0])


def test_hyperparameters_that_are_set_copy_nothing_else():
    def change(view):
        run = view._run
        before = [(state.params, state.opt_state.inner_state) for state in run.states]
        run.set({"learning_rate": 0.5})
        after = [(state.params, state.opt_state.inner_state) for state in run.states]
        assert all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(after)))

    trained, _ = train(callbacks=[change])
    assert tn.hyperparameters(trained)["learning_rate"].tolist() == [0.5] * 6


def test_an_unknown_hyperparameter_lists_the_known_ones():
    with pytest.raises(ValueError, match="no hyperparameter 'lr'; it has .*'learning_rate'.*; give one of these"):
        train(callbacks=[lambda view: view.set(lr=0.1)])
