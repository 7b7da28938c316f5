"""k-fold in PyTorch on a swarm's own rows: the same rates, pixels, losses; and the paired comparison."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
import torch

import turbanet as tn
from study.baselines import kfold, kfold_trainers, twins
from study.figures.labels import OURS, PROCESSES, SERIAL, SERIAL_ONE
from turbanet.core import schedules
from turbanet.data.augment import draw

rng = np.random.default_rng(0)
X = rng.normal(size=(48, 16, 16, 3)).astype(np.float32)
Y = np.arange(48) % 10
CHANGE = tn.Chain(tn.RandomCrop(2), tn.RandomFlip())
JOB = {"folds": 3, "learning_rate": 0.01, "epochs": 3, "batch_size": 8, "plan": tn.Plan(1, 2), "seed": 0, "repeats": 1}
JOB |= {"timed_epochs": 1, "sampled": (SERIAL, SERIAL_ONE, PROCESSES)}


@pytest.fixture(scope="module")
def compared():
    names = ["cosine", "reduce"]
    return kfold.compare("lenet", tn.networks.LeNet(), twins.lenet_twin, X, Y, schedules=names, augment=CHANGE, **JOB)


@pytest.mark.parametrize("method", [SERIAL, SERIAL_ONE, PROCESSES])
def test_every_method_trains_the_same_networks(compared, method):
    for part in range(3):  # training loss, validation loss, accuracy: [epoch, member]
        theirs = compared.results[method][part]
        assert theirs.shape == (JOB["epochs"], 6 if method == PROCESSES else 2)
        ours = compared.results[OURS][part][:, : theirs.shape[1]]
        tolerance = {"rtol": 5e-3} if part < 2 else {"atol": 0.07}  # of 16 rows, one on the edge
        np.testing.assert_allclose(theirs, ours, **tolerance)


def test_accuracies_and_seconds_are_tables_of_every_fold(compared):
    final = compared.found.final()
    np.testing.assert_allclose(compared.accuracy(OURS).accuracy, final.accuracy)
    assert compared.accuracy(PROCESSES).fold.tolist() == final.fold.tolist()
    seconds = compared.seconds()
    assert len(seconds) == 2 * 4 and (seconds.seconds > 0).all()
    whole = compared.times.set_index("method").seconds
    for method, part in seconds.groupby("method"):
        assert part.seconds.sum() == pytest.approx(whole[method])


def test_use_of_the_machine_is_sampled_for_each_way(compared):
    assert set(compared.use) == {OURS, SERIAL, SERIAL_ONE, PROCESSES}
    seconds, (history,) = compared.use[OURS].frame.seconds, compared.found.histories.values()
    assert seconds.min() > 0 and seconds.max() == pytest.approx(history.steady_seconds)  # from its first step on


def test_pytorchs_class_accuracies_are_those_of_all_held_out_rows(compared):
    table = compared.class_accuracy(Y)
    assert table.shape == (2, 10) and list(table.index) == ["cosine", "reduce"]
    rows = np.bincount(Y)  # each row is held out once
    found = compared.accuracy(PROCESSES)
    held = [len(rows) for rows in compared.found.validation_rows]
    for schedule, part in found.groupby("schedule"):
        assert (table.loc[schedule] * rows).sum() == pytest.approx((part.accuracy * held).sum())


def test_pytorch_changes_the_same_pixels():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.adam(0.1), 2, input_size=1, seed=5)
    drawn = kfold_trainers.draws(swarm, CHANGE, steps=3, rows=8)
    state = swarm.get_state(1).replace(step=2)
    expected = CHANGE.apply(draw(CHANGE, state, 8), X[:8])
    own = jax.tree.map(lambda leaf: torch.as_tensor(np.array(leaf[1, 2])), drawn)
    np.testing.assert_array_equal(kfold_trainers.augmented(CHANGE, own, torch.from_numpy(X[:8])), expected)


def test_a_change_without_a_pytorch_form_is_refused():
    with pytest.raises(ValueError, match="no PyTorch form"):
        kfold_trainers.augmented(object(), None, torch.zeros(1, 4, 4, 1))


@pytest.mark.parametrize("name", ["cosine", "warm", "reduce", "multistep"])
def test_rates_are_pytorchs(name):
    validation = np.r_[1.0, 0.9, np.full(10, 0.95), np.full(118, 0.94)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    scheduler = kfold_trainers.SCHEDULERS[name](optimizer := torch.optim.SGD([parameter], lr=0.1))
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    swarm = tn.with_schedule(tn.TurbaTrainState.swarm(tn.MLP((1,)), sgd, 1, input_size=1), name)
    end_epoch = jax.jit(schedules.end_epoch) if name == "reduce" else schedules.end_epoch
    state, theirs, ours = swarm.get_state(0), [], []
    for epoch, loss in enumerate(validation):
        theirs.append(optimizer.param_groups[0]["lr"])
        begun = schedules.begin_epoch(state.replace(epoch=epoch))
        ours.append(float(begun.opt_state.hyperparams["learning_rate"]))
        state = end_epoch(begun, np.float32(loss))
        optimizer.step()
        scheduler.step(*[loss] * (name == "reduce"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def test_measure_refuses_methods_that_train_something_else():
    right = (np.ones((2, 3)),) * 3, np.ones(3), None, 0.0
    wrong = (np.full((2, 3), 2.0),) * 3, np.ones(3), None, 0.0
    runs = {OURS: lambda **_: (*right[0], *right[1:]), "other": lambda **_: (*wrong[0], *wrong[1:])}
    with pytest.raises(AssertionError, match="other trains something else"):
        kfold.measure(runs, epochs=2)


def test_methods_are_timed_on_few_epochs_and_few_networks_and_sampled_to_the_end():
    asked = {OURS: [], SERIAL: [], SERIAL_ONE: [], PROCESSES: []}

    def run(name, epochs, members=None, **_):
        asked[name].append((epochs, members))
        each = np.full(6 if name == OURS else members or 6, 2.0 * epochs)
        return (np.ones((epochs, len(each))),) * 3 + (each, None, 0.0)

    runs = {name: partial(run, name) for name in asked}
    results, times, use = kfold.measure(runs, epochs=10, timed_epochs=2, repeats=1, sampled=(SERIAL_ONE, PROCESSES))
    assert asked == {
        OURS: [(1, 2), (2, None)],
        SERIAL: [(1, 2), (2, 1)],
        SERIAL_ONE: [(1, 2), (2, 1), (10, 2)],
        PROCESSES: [(1, 2), (2, None), (10, None)],
    }
    cores = min(kfold.joblib.cpu_count(), 6)
    assert times.method.tolist() == list(asked)
    assert times.seconds.tolist() == [120, 120, 120, 20 * -(-6 // cores)]
    assert times.networks_timed.tolist() == [6, 1, 1, 6]
    assert results[PROCESSES][0].shape == (10, 6) and set(use) == {SERIAL_ONE, PROCESSES}
