"""Training on batches of an iterator: as `fit` on the same rows in the same order, resumed at an epoch."""

import itertools
import os
import signal
import threading
import time

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import DEVICES
from tiers import first
from torch.utils.data import DataLoader, TensorDataset

import turbanet as tn
from turbanet.core import memory
from turbanet.data import batches as batches_module

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
HELD_OUT = X[50:], Y[50:]
X, Y = X[:50], Y[:50]
HOW = {"epochs": 4, "progress": False, "plan": tn.Plan(DEVICES, 2)}


def made(members=5, model=None):
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
    return tn.TurbaTrainState.swarm(model or tn.MLP((6, 2)), optimizer, members, sample_input=X[:1])


def in_order(size, x=X, y=Y):
    return [(x[begin : begin + size], y[begin : begin + size]) for begin in range(0, len(x), size)]


def train(batches, swarm=None, **more):
    return tn.fit_batches(made() if swarm is None else swarm, batches, tn.softmax_cross_entropy, **HOW | more)


def by_fit(swarm=None, **more):
    """The same rows in the same order: unshuffled."""
    swarm = made() if swarm is None else swarm
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **HOW | {"batch_size": 10, "shuffle": False} | more)


def same(ours, theirs, rtol=1e-5):
    (swarm, history), (other, whole) = ours, theirs
    np.testing.assert_allclose(history.train_loss, whole.train_loss, rtol=rtol, atol=1e-6)
    for one, two in zip(jax.tree.leaves(swarm), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def equal(ours, theirs):
    np.testing.assert_array_equal(ours[1].train_loss, theirs[1].train_loss)
    for one, two in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_array_equal(one, two)


TENSORS = TensorDataset(torch.tensor(X), torch.tensor(Y))


@pytest.mark.parametrize(
    "batches",
    [
        in_order(10),
        lambda epoch: iter(in_order(10)),
        DataLoader(TENSORS, batch_size=10),
        grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(10),
    ],
    ids=["list", "function", "DataLoader", "grain"],
)
def test_batches_train_as_fit_trains_on_rows_in_that_order(batches):
    same(train(batches), by_fit())


def test_without_validation_the_best_epoch_is_that_of_the_training_loss():
    for _, history in (train(in_order(10)), by_fit()):
        assert history.best().epoch.tolist() == history.train_loss.argmin(axis=0).tolist()


@pytest.mark.parametrize("most", first(1, [2, 1, 3]))
def test_how_many_batches_a_chunk_has_changes_no_bit(monkeypatch, most):
    whole = train(in_order(10))
    monkeypatch.setattr(batches_module, "MOST_BATCHES", most)
    equal(train(in_order(10)), whole)


def test_a_shorter_last_batch_is_a_step_of_its_own():
    swarm, history = train(in_order(20), epochs=1)  # 20, 20, 10
    one = made()
    losses = []
    for x, y in in_order(20):
        one, step = tn.fit(one, x, y, tn.softmax_cross_entropy, epochs=1, progress=False, plan=HOW["plan"])
        losses.append(step.train_loss[0])
    np.testing.assert_allclose(history.train_loss[0], np.mean(losses, axis=0), rtol=1e-5)
    np.testing.assert_allclose(swarm.params["Dense_0"]["kernel"], one.params["Dense_0"]["kernel"], rtol=1e-4, atol=1e-6)


def test_validation_metrics_patience_and_callbacks_are_those_of_fit():
    def auc(y_true, y_score):
        return float(np.mean(y_score[y_true == 1, 1]) - np.mean(y_score[y_true == 0, 1]))

    how = {"validation": HELD_OUT, "metric": {"accuracy": tn.accuracy, "auc": auc}, "patience": 2, "epochs": 12}
    seen = []
    ours = train(in_order(10), callbacks=[lambda view: seen.append(view.epoch)], segment=3, **how)
    theirs = by_fit(segment=3, **how)
    same(ours, theirs)
    np.testing.assert_allclose(ours[1].validation_loss, theirs[1].validation_loss, rtol=1e-4)
    for name in ("accuracy", "auc"):
        np.testing.assert_allclose(ours[1].validation_metric[name], theirs[1].validation_metric[name], atol=1e-4)
    assert ours[1].epochs.tolist() == theirs[1].epochs.tolist()
    assert seen[0] == 3


def test_members_see_the_rows_that_are_theirs():
    """Each member trains as one network on the rows that its mask lets through, weighted."""
    seen = rng.random((5, 50)) < 0.6
    masked = [(x, y, seen[:, 10 * i : 10 * i + 10]) for i, (x, y) in enumerate(in_order(10))]
    weights = seen.astype(np.float32)
    how = HOW | {"batch_size": 10, "shuffle": False, "per_member": (False, (False, True))}
    theirs = tn.fit(made(), X, (Y, weights), tn.weighted(tn.softmax_cross_entropy), **how)
    same(train(masked), theirs)
    held_out = train(masked, validation=HELD_OUT)[1].validation_loss[-1]
    expected = tn.evaluate(theirs[0], *HELD_OUT, tn.softmax_cross_entropy)
    np.testing.assert_allclose(held_out, expected, rtol=1e-3)


def test_trees_are_batches_too():
    def loss(params, x, y, apply_fn):
        return tn.softmax_cross_entropy(params, x["rows"], y["class"], apply_fn)

    trees = [({"rows": x}, {"class": y}) for x, y in in_order(10)]
    swarm, _ = tn.fit_batches(made(), trees, loss, **HOW)
    np.testing.assert_allclose(swarm.params["Dense_0"]["kernel"], by_fit()[0].params["Dense_0"]["kernel"], rtol=1e-4)


class Killed(Exception):
    pass


def dies_after(calls):
    def callback(view):
        calls.append(view.epoch)
        if len(calls) == 2:
            raise Killed

    return callback


def test_a_training_that_was_killed_goes_on_from_its_last_epoch(tmp_path):
    whole = train(in_order(10), callbacks=[print], segment=1)
    with pytest.raises(Killed):
        train(in_order(10), callbacks=[dies_after([])], segment=1, checkpoints=tmp_path)
    begun = []
    equal(
        train(lambda epoch: begun.append(epoch) or in_order(10), callbacks=[print], segment=1, checkpoints=tmp_path),
        whole,
    )
    assert begun == [1, 2, 3]  # of four epochs: the one whose callback raised is trained again


@pytest.mark.parametrize("calls", first(1, [7, 3]))  # of five batches an epoch
def test_a_training_that_was_interrupted_in_an_epoch_goes_on_at_its_beginning(
    tmp_path, monkeypatch, interrupted_after, calls
):
    monkeypatch.setattr(batches_module, "MOST_BATCHES", 1)
    whole = train(in_order(10))
    stopped = interrupted_after(calls, lambda: train(in_order(10), checkpoints=tmp_path))
    assert len(stopped.history.train_loss) == calls // 5
    assert int(stopped.swarm.step[0]) == calls
    equal(train(in_order(10), checkpoints=tmp_path), whole)


class Once:
    """An iterator that does not say that it ends for good."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


SEEN = np.tile(np.arange(10) > 6, (5, 1))
WITHOUT_9 = np.where(np.arange(10)[:, None] == 9, np.nan, X[:10])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (3, "batches must be an iterable of batches"),
        ([X], "Batch 0 of epoch 0 must be .x, y. or .x, y, rows., got ndarray"),
        ([(X, Y[:3])], "Batch 0 of epoch 0: x and y must have the same number of rows"),
        ([*in_order(10), (X, Y, np.ones((4, 50), bool))], r"Batch 5 of epoch 0: rows must be bool .* \[5, 50\]"),
        ([(X, Y, np.ones((5, 50)))], "got float64 of shape"),
        ((batch for batch in in_order(10)), "type generator can be read once, and there are 4 epochs; give a function"),
        (zip(*[iter([])] * 2, strict=True), "batches of type zip can be read once"),
        (itertools.islice([], 3), "batches of type islice can be read once"),
        (iter([]), "type list_iterator can be read once"),
        (iter(DataLoader([1])), "type _SingleProcessDataLoaderIter can be read once"),
        (itertools.cycle(in_order(10)), "These batches have no end, and an epoch goes once through them"),
        (lambda epoch: itertools.repeat((X, Y)), "These batches have no end"),
        (Once(in_order(10)), "There was no batch in epoch 1: what ends for good"),
        ([], "There was no batch in epoch 0"),
        (lambda epoch: None, r"batches\(0\) must return an iterable of batches .*; got None: does the function lack"),
        ([(X, Y + 5)], "In epoch 0, batch 0: y holds 5 in row 0|y holds 6"),
        ([(X[:10], Y[:10]), (X[:10] * np.nan, Y[:10])], "In epoch 0, batch 1: x holds nan in row 0"),
        ([(X[:10], Y[:10], SEEN), (WITHOUT_9, Y[:10], SEEN)], "In epoch 0, batch 1: x holds nan in row 9"),
        ([(X[:, :2], Y)], "cannot take x"),
    ],
)
def test_what_are_no_batches_is_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        train(batches)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number"),
        ({"plan": "auto"}, "plan must be a Plan"),
        ({"patience": 3}, "follow the validation loss"),
        ({"callbacks": print}, "list of functions"),
        ({"on_interrupt": "stop"}, "on_interrupt must be"),
    ],
)
def test_what_fit_refuses_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        train(in_order(10), **how)


class Repeated:
    """Says by its length that it has no end, as a repeated pipeline does; it has one: no test waits for ever."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return itertools.repeat((X[:8], Y[:8]), 100)

    def __len__(self):
        return self.length()


def infinite():  # as tf.data says it
    raise TypeError("The dataset is infinite.")


def of_grain():
    return len(grain.MapDataset.source([(X[:8], Y[:8])]).repeat())


@pytest.mark.parametrize("length", [infinite, of_grain])
def test_batches_without_end_are_refused(length):
    with pytest.raises(ValueError, match="have no end.*islice"):
        train(Repeated(length))


def test_a_stream_without_end_trains_by_the_batches_that_an_epoch_takes_of_it():
    stream = iter(Repeated(infinite))
    expected = train([(X[:8], Y[:8])] * 3)
    equal(train(lambda epoch: itertools.islice(stream, 3)), expected)
    equal(train(lambda epoch: itertools.repeat((X[:8], Y[:8]), 3)), expected)


def test_a_tf_data_pipeline_trains_as_the_list_of_its_batches():
    tf = pytest.importorskip("tensorflow")
    equal(train(tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)), train(in_order(10)))


def test_what_batches_raise_is_raised_and_nothing_goes_on_behind():
    def broken(epoch):
        yield from in_order(10)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train(broken)
    with pytest.raises(ValueError, match="Batch 0 of epoch 0"):
        train([[*in_order(10)] * 1000])
    for thread in threading.enumerate():
        if thread.name == "turbanet-batches":
            thread.join(5)
            assert not thread.is_alive()


def test_a_generator_may_fill_one_array_again():
    def reused(epoch):
        x, y = np.empty((10, 3), np.float32), np.empty(10, np.int32)
        for rows, labels in in_order(10):
            x[:], y[:] = rows, labels
            yield x, y

    equal(train(reused), train(in_order(10)))


def test_batches_of_other_shapes_and_types_take_turns():
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x).mean(1)

    swarm = tn.TurbaTrainState.swarm(Mean(), optax.sgd(0.1), 5, sample_input=np.zeros((1, 4, 3), np.float32))
    long, short = np.ones((10, 7, 3), np.float32), np.ones((10, 4, 3), np.float16)
    _, history = tn.fit_batches(swarm, [(long, Y[:10]), (short, Y[:10])], tn.softmax_cross_entropy, **HOW)
    assert np.isfinite(history.train_loss).all()


def test_what_nobody_sees_may_be_anything_and_a_batch_that_a_member_does_not_see_is_no_step_of_it(caplog):
    seen = rng.random((5, 50)) < 0.7
    seen[:, 3] = False
    seen[2, 10:20] = False
    x, y = np.where(np.arange(50)[:, None] == 3, np.nan, X).astype(np.float32), np.where(np.arange(50) == 3, -1, Y)
    ours = train([(*batch, seen[:, 10 * i : 10 * i + 10]) for i, batch in enumerate(in_order(10, x, y))])
    clean = train([(*batch, seen[:, 10 * i : 10 * i + 10]) for i, batch in enumerate(in_order(10))])
    equal(ours, clean)
    assert ours[0].step.tolist() == [20, 20, 16, 20, 20]
    nobody = np.zeros((5, 50), bool)
    nobody[0] = True
    before = made()
    after, history = train([(X, Y, nobody)], before)
    for one, two in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(one[1:], two[1:])
    assert np.isnan(history.train_loss).all(axis=0).tolist() == [False, True, True, True, True]
    assert "diverged" not in caplog.text
    ill = jax.tree.map(lambda leaf: np.array(leaf), before.params)
    ill["Dense_0"]["bias"][3, 0] = np.inf
    train([(X, Y, nobody)], before.replace(params=ill))
    assert "1 of 5 members (3) diverged" in caplog.text


def rmse(params, x, y, apply_fn, mask=None):
    logits = apply_fn({"params": params}, x)
    squares = (logits - jax.nn.one_hot(y, 2)) ** 2
    return jnp.sqrt(jnp.mean(squares, where=None if mask is None else mask[:, None])), logits


def test_a_loss_that_mixes_rows_is_of_those_that_a_member_sees():
    seen = rng.random((5, 10)) < 0.6
    x, y = X[:10].copy(), Y[:10]
    still = made(model=tn.MLP((2,)))
    _, history = tn.fit_batches(still, [(x, y, seen)], rmse, **HOW | {"epochs": 1})
    kernels, biases = (np.asarray(still.params["Dense_0"][name]) for name in ("kernel", "bias"))
    for member, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        errors = x[seen[member]] @ kernel + bias - np.eye(2)[y[seen[member]]]
        np.testing.assert_allclose(history.train_loss[0, member], np.sqrt(np.mean(errors**2)), rtol=1e-5)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


@pytest.mark.parametrize(
    ("loss", "model", "needs"),
    [
        (lambda params, x, y, apply_fn: rmse(params, x, y, apply_fn), None, r"need a loss that takes mask=, bool"),
        (rmse, Normed(), r"need a model without \['batch_stats'\]"),
    ],
)
def test_rows_of_each_members_own_are_refused_where_none_can_be_left_out(loss, model, needs):
    batches = [(X[:10], Y[:10], np.ones((5, 10), bool))]
    with pytest.raises(ValueError, match=f"In epoch 0, batch 0: Batches with rows of each .*{needs}"):
        tn.fit_batches(made(model=model), batches, loss, **HOW)


class Stream:
    """Batches of a source that is gone through once: how many were taken, and a lock that only one reader may have."""

    def __init__(self, size=10, waits_at=None):
        self.parts = in_order(size)
        self.taken = 0
        self.waits_at = waits_at
        self.goes_on = threading.Event()
        self.reading = threading.Lock()

    def epoch(self, _):
        return itertools.islice(self, len(self.parts))

    def __iter__(self):
        return self

    def __next__(self):
        with self.reading:
            if self.taken == self.waits_at:
                self.goes_on.wait()
            self.taken += 1
            return self.parts[(self.taken - 1) % len(self.parts)]


def test_stopping_early_takes_no_batch_that_nobody_trains_on():
    stream = Stream()
    _, history = train(stream.epoch, validation=HELD_OUT, patience=1, min_delta=10.0, epochs=50)
    assert history.epochs.tolist() == [2] * 5 and stream.taken == 2 * len(stream.parts)
    assert np.isfinite(history.train_loss[:2]).all() and np.isnan(history.train_loss[2:]).all()
    stream = Stream()
    _, history = train(stream.epoch, callbacks=[lambda view: view.stop()], segment=2, epochs=50)
    assert stream.taken == 2 * len(stream.parts) and len(history.train_loss) == 2


def test_what_a_loader_raises_carries_what_was_trained():
    whole = train(in_order(10), epochs=2)

    def fails(epoch):
        if epoch == 2:
            raise ConnectionError("The store of the batches is gone.")
        return in_order(10)

    with pytest.raises(ConnectionError, match="store of the batches is gone") as failed:
        train(fails)
    equal((failed.value.swarm, failed.value.history), whole)


def test_what_a_loader_raises_in_the_first_epoch_carries_the_steps_made(monkeypatch):
    monkeypatch.setattr(batches_module, "MOST_BATCHES", 1)

    def fails(epoch):
        yield from in_order(10)[:3]
        raise ConnectionError("The store of the batches is gone.")

    with pytest.raises(ConnectionError) as failed:
        train(fails)
    assert len(failed.value.history.train_loss) == 0 and failed.value.swarm.step.tolist() == [2] * 5


def test_ctrl_c_ends_the_wait_for_a_slow_source():
    stream = Stream(waits_at=7)

    def interrupt():
        while stream.taken < 7:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    too_late = threading.Timer(60, stream.goes_on.set)
    too_late.start()
    threading.Thread(target=interrupt).start()
    with pytest.raises(tn.Interrupted) as stopped:
        train(stream.epoch)
    too_late.cancel()
    assert not stream.goes_on.is_set()  # it did not wait for the source
    assert len(stopped.value.history.train_loss) <= 1
    stream.goes_on.set()


def test_a_second_call_at_once_has_the_source_for_itself():
    def pairs():
        for number in range(10**6):
            yield from in_order(10)[number % 5 : number % 5 + 1]

    source = pairs()  # a generator, which two readers at once break
    how = {"callbacks": [lambda view: view.stop()], "segment": 1, "epochs": 3}
    for _ in range(3):
        _, history = train(lambda epoch: itertools.islice(source, 5), **how)
        assert len(history.train_loss) == 1


def test_blocks_are_halved_where_memory_is_short(monkeypatch):
    whole = train(in_order(10), plan=tn.Plan(DEVICES, 1))
    answers = iter([1])
    original = memory.fitting_block
    monkeypatch.setattr(memory, "fitting_block", lambda *what: next(answers, None) or original(*what))
    ours = train(in_order(10), plan=tn.Plan(DEVICES, 2))
    assert ours[1].plan.block == 1
    equal(ours, whole)


def test_chunks_of_later_epochs_are_those_of_the_first(monkeypatch):
    monkeypatch.setattr(batches_module, "MOST_BATCHES", 4)
    reader = batches_module.Batches(in_order(10), 2, 1, lambda chunk: None)
    for epoch in range(3):
        assert [chunk.steps for chunk in reader.chunks(epoch)] == [4, 1]
