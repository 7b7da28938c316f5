"""Ctrl-C between two segments: nothing is lost, nothing half-done is left."""

import contextlib
import os
import signal
import threading

import jax
import numpy as np
import optax
import pytest
from conftest import DEVICES

import turbanet as tn
from turbanet.checkpoints import checkpoint
from turbanet.core import interrupt
from turbanet.training import compilation, run as training

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 3)).astype(np.float32)
Y = rng.integers(0, 2, 12)


def train(**how):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.01), 3, sample_input=X[:1])
    job = {"epochs": 8, "segment": 2, "progress": False, "plan": tn.Plan(DEVICES, 1)}
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **job | how)


@pytest.fixture
def after_two_segments(monkeypatch):
    """Ctrl-C comes while the second segment runs."""
    run = training.Training._train

    def interrupted(self, most):
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        run(self, most)

    monkeypatch.setattr(training.Training, "_train", interrupted)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def expected():
    return train(epochs=4)


@pytest.fixture
def watched():
    """What is expected where somebody looks on."""
    return train(epochs=4, callbacks=[lambda view: None])


def same(found, expected):
    (swarm, history), (other, losses) = found, expected
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(swarm), jax.tree.leaves(other))
    np.testing.assert_array_equal(history.train_loss, losses.train_loss)
    np.testing.assert_array_equal(history.epochs, 4)


def test_the_exception_carries_what_was_trained(watched, after_two_segments):
    with pytest.raises(KeyboardInterrupt, match=r"interrupted after 4 whole epoch\(s\)") as stopped:
        train(callbacks=[lambda view: None])
    same((stopped.value.swarm, stopped.value.history), watched)


def test_what_was_trained_is_returned_where_that_is_asked_for(watched, after_two_segments):
    same(train(on_interrupt="return", callbacks=[lambda view: None]), watched)


def test_an_interrupted_training_goes_on_from_its_checkpoint(expected, after_two_segments, tmp_path, monkeypatch):
    train(on_interrupt="return", checkpoints=tmp_path)
    _, history = train(checkpoints=tmp_path)
    assert len(history.train_loss) == 8
    np.testing.assert_array_equal(history.train_loss[:4], expected[1].train_loss)


def test_a_call_of_the_program_is_bounded_and_changes_no_bit(monkeypatch):
    calls, run = [], training.Training._train

    def counted(self, most):
        before = self.done
        run(self, most)
        calls.append(self.done - before)

    monkeypatch.setattr(training.Training, "_train", counted)
    programs = {}
    monkeypatch.setattr(compilation, "_programs", lambda: programs)
    expected = train(segment=8)
    assert calls[0] == 1 and sum(calls) == 8  # its pace is not known before
    calls.clear()
    train(segment=8)
    train(segment=2)  # nothing happens between these
    assert calls == [8, 8]
    calls.clear()
    monkeypatch.setattr(training, "CALL_SECONDS", 0)
    found = train(segment=8)
    assert calls == [1] * 8
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]))
    np.testing.assert_array_equal(found[1].train_loss, expected[1].train_loss)


def test_ctrl_c_inside_a_segment_keeps_a_checkpoint(expected, after_two_segments, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CALL_SECONDS", 0)
    _, history = train(segment=8, on_interrupt="return", checkpoints=tmp_path)
    assert len(history.train_loss) == 3
    monkeypatch.undo()
    swarm, history = train(segment=8, epochs=4, checkpoints=tmp_path)
    same((swarm, history), expected)


def test_a_resumed_training_that_is_interrupted_at_once_is_kept_as_it_was(after_two_segments, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CALL_SECONDS", 0)
    how = {"segment": 8, "on_interrupt": "return", "checkpoints": tmp_path}
    swarm, _ = train(**how)
    monkeypatch.undo()
    monkeypatch.setattr(training, "noted", lambda: contextlib.nullcontext(lambda: True))
    again, history = train(**how)
    assert len(history.train_loss) == 3
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(swarm))


def test_a_second_one_loses_nothing_and_a_third_stops_at_once():
    survived = []
    with pytest.raises(KeyboardInterrupt), interrupt.noted() as came:
        for number in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            assert came()
            survived.append(number)
    assert survived == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_job_that_is_told_to_end_keeps_what_it_trained(watched, tmp_path):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray sets a handler of its own where it has run

    def told(view):
        if view.epoch == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(tn.Interrupted) as stopped:
        train(checkpoints=tmp_path, callbacks=[told])
    same((stopped.value.swarm, stopped.value.history), watched)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    same(train(epochs=4, checkpoints=tmp_path, callbacks=[lambda view: None]), watched)


def test_what_a_callback_raises_carries_what_was_trained(watched, tmp_path):
    def fails(view):
        if view.epoch == 4:
            raise RuntimeError("The disk of the plots is full.")

    with pytest.raises(RuntimeError, match="The disk of the plots is full") as failed:
        train(checkpoints=tmp_path, callbacks=[fails])
    same((failed.value.swarm, failed.value.history), watched)
    assert failed.value.__notes__ == ["What was trained by then is this exception's swarm and history."]
    same(train(epochs=4, checkpoints=tmp_path, callbacks=[lambda view: None]), watched)


def test_what_fails_before_anything_is_trained_is_raised_as_it_is(monkeypatch):
    def fails(self, most):
        raise RuntimeError("There is no machine.")

    monkeypatch.setattr(training.Training, "_train", fails)
    with pytest.raises(RuntimeError, match="There is no machine") as failed:
        train()
    assert not hasattr(failed.value, "swarm")


def test_a_disk_that_is_full_at_the_end_takes_nothing_along(expected, tmp_path, monkeypatch):
    def full(self, number, *others, **told):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.Folder, "write", full)
    with pytest.raises(OSError, match="No space left") as failed:
        train(epochs=4, segment=4, checkpoints=tmp_path)
    same((failed.value.swarm, failed.value.history), expected)


def test_a_metric_that_fails_leaves_no_checkpoint_of_epochs_that_nobody_saw(tmp_path):
    calls = []

    def fails(prediction, y):
        calls.append(len(calls))
        if len(calls) > 12:
            raise ZeroDivisionError
        return float(np.mean(prediction))

    with pytest.raises(ZeroDivisionError) as failed:
        train(validation=(X, Y), metric=fails, checkpoints=tmp_path, segment=1)
    done = len(failed.value.history.train_loss)
    kept = max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert kept == done > 0


def test_somebody_elses_handler_is_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.noted() as came:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not came()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_trains_without_signals(expected):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(epochs=4)))
    thread.start()
    thread.join()
    same(found[0], expected)


def test_a_misspelt_choice_is_named():
    with pytest.raises(ValueError, match='on_interrupt must be "raise" or "return", got \'stop\''):
        train(on_interrupt="stop")
