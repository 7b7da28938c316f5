"""study.baselines.methods: every method trains the same networks, again and again from the same weights."""

import jax
import numpy as np
import optax
import pytest
from tiers import first

import turbanet as tn
from study.baselines import methods, swarm_trainers, trainers, twins
from study.figures.labels import (
    COMPILED,
    FUNC,
    FUSED,
    LOOP,
    METHODS,
    OURS,
    PROCESSES,
    SCAN,
    SCAN_ALL,
    SCAN_PROCESSES,
    SKLEARN,
    STEPS,
)
from study.sources.spirals import spirals

X, Y = spirals(32)
FULL_BATCH = tuple(method for method in METHODS if method not in (COMPILED, SKLEARN))
RATE, EPOCHS = 0.01, 6


@pytest.fixture(scope="module")
def swarm():
    return tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.adam(RATE), 2, sample_input=X[:1], seed=0)


def make(swarm, **changed):
    how = {"loss": "cross_entropy", "learning_rate": RATE, "twin": twins.mlp_twin, "plan": tn.Plan(2, 1)} | changed
    return methods.runs(swarm, X, Y, tn.softmax_cross_entropy, **how)


@pytest.fixture(scope="module")
def every(swarm):
    return make(swarm, names=FULL_BATCH)


def test_full_batch_methods_are_those_asked_for(swarm, every):
    assert list(every) == list(FULL_BATCH)
    assert list(make(swarm, names=(FUSED, OURS))) == [FUSED, OURS]


def test_full_batch_methods_without_pytorch_make_no_twins(swarm):
    def never(params):
        raise AssertionError("a twin was made")

    assert make(swarm, names=(OURS,), twin=never)[OURS](2)[0].shape == (2, 2)


@pytest.mark.parametrize("method", [method for method in FULL_BATCH if method != PROCESSES])
def test_full_batch_methods_start_from_the_swarms_weights_each_time(swarm, every, method):
    logits = np.asarray(tn.predict(swarm, X), np.float64)
    expected = np.log(np.exp(logits).sum(-1)) - logits[:, np.arange(len(Y)), Y]
    first, again = np.asarray(every[method](EPOCHS)[0]), np.asarray(every[method](EPOCHS)[0])
    np.testing.assert_allclose(first[0], expected.mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(first, again)
    assert first.shape == (EPOCHS, 2) and (first[-1] < first[0]).all()


def test_full_batch_methods_hand_threads_and_fusion_to_pytorch(swarm, monkeypatch):
    seen = []
    monkeypatch.setattr(trainers, "train_loop", lambda twins, x, y, **how: seen.append(how))
    for run in make(swarm, names=(LOOP, FUSED), threads=3).values():
        run(5)
    common = {"epochs": 5, "loss": "cross_entropy", "learning_rate": RATE, "threads": 3}
    common |= {"order": None, "per_member": False}
    assert seen == [common, common | {"fused": True}]


@pytest.mark.parametrize("method", first(5, [OURS, SCAN, STEPS, FUNC, LOOP, SCAN_ALL, SCAN_PROCESSES]))
def test_runs_of_fewer_epochs_take_the_first_batches(swarm, method):
    run = make(swarm, names=(method,), epochs=3, batch_size=8, threads=1)[method]
    np.testing.assert_allclose(run(2)[0], run()[0][:2], rtol=1e-5)


def test_runs_compile_one_network_for_all_members(swarm, monkeypatch):
    seen = []
    monkeypatch.setattr(methods.torch, "compile", lambda network: seen.append(network) or network)
    every = make(swarm, names=(COMPILED, LOOP), epochs=2, batch_size=8, threads=1)
    np.testing.assert_array_equal(every[COMPILED]()[0], every[LOOP]()[0])
    np.testing.assert_array_equal(every[COMPILED]()[0], every[LOOP]()[0])
    assert len(seen) == 1


@pytest.mark.optimized
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # of PyTorch's compiler
def test_what_torch_compiles_trains_as_the_loop_does(swarm):
    every = make(swarm, names=(COMPILED, LOOP), epochs=2, batch_size=8, threads=1)
    np.testing.assert_allclose(every[COMPILED]()[0], every[LOOP]()[0], rtol=1e-4)


def test_a_scan_takes_equally_many_networks_a_device():
    three = tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.adam(RATE), 3, sample_input=X[:1])
    with pytest.raises(ValueError, match="3 networks cannot be split equally over 2 devices"):
        swarm_trainers.train_scan(three, X, Y, tn.softmax_cross_entropy, epochs=1, devices=jax.devices()[:2])


THREE = {"mlp": tn.MLP((4, 3)), "two classes": tn.MLP((4, 2))}


@pytest.mark.parametrize(
    "model, changed, there",
    [
        ("mlp", {"batch_size": 8}, True),
        ("mlp", {}, False),
        ("mlp", {"batch_size": 8, "loss": "mse"}, False),
        ("two classes", {"batch_size": 8}, False),
    ],
)
def test_runs_have_scikit_learn_where_it_trains_the_same(model, changed, there):
    swarm = tn.TurbaTrainState.swarm(THREE[model], optax.adam(RATE), 2, sample_input=X[:1], seed=0)
    assert (SKLEARN in make(swarm, names=(SKLEARN,), **changed)) == there


@pytest.mark.parametrize("left_out", first(1, [{PROCESSES}, set()]), ids=["here", "in PyTorch's processes too"])
def test_assert_equal_losses_passes_for_every_way(every, left_out):
    methods.assert_equal_losses({name: run for name, run in every.items() if name not in left_out}, EPOCHS)


def test_assert_equal_losses_names_the_method_that_trains_something_else(swarm):
    other = make(swarm, names=(OURS, LOOP), learning_rate=2 * RATE)  # the swarm's own optimizer stays
    with pytest.raises(AssertionError, match="PyTorch loop trains something else"):
        methods.assert_equal_losses(other, EPOCHS)


def test_time_methods_has_a_row_a_repeat():
    def run(epochs):
        return None, 1.5

    table = methods.time_methods({OURS: run, LOOP: run}, 3, repeats=3)
    assert [*table.repeat] == [0, 0, 1, 1, 2, 2]
    assert all(set(turn.method) == {OURS, LOOP} for _, turn in table.groupby("repeat"))


def test_time_methods_takes_what_a_first_run_takes_longer_for_compilation(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(methods.timing.time, "perf_counter", lambda: clock[0])
    calls = []

    def run(epochs):
        calls.append(epochs)
        clock[0] += epochs + (5.0 if len(calls) == 1 else 0.0)
        return None, 1.5  # what a method says of itself does not count: others say nothing

    table = methods.time_methods({LOOP: run}, 3, repeats=1)
    assert set(table.compile_seconds) == {5} and set(table.seconds) == {3}


def test_full_batch_methods_tell_the_compilation_of_ours_alone(swarm):
    seconds = {method: run(3)[1] for method, run in make(swarm, names=(OURS, LOOP), plan=tn.Plan(1, 2)).items()}
    assert seconds[OURS] > 0 and np.isnan(seconds[LOOP])
