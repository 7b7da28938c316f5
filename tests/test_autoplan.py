"""plan="auto": measured, remembered, explained; it changes roundings only."""

import json
import math

import jax
import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.training import autoplan, program
from turbanet.training import plan as plan_module
from turbanet.training import run as training

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40).astype(np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBANET_CACHE", str(tmp_path / "cache"))
    plan_module.say_once.cache_clear()
    monkeypatch.setattr(autoplan, "PROBE_SECONDS", 0.001)
    return tmp_path / "cache" / "plans"


@pytest.fixture(scope="module")
def swarm():  # one for all tests: equal programs compile once
    return tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.1), 12, 3)


@pytest.fixture
def eager(monkeypatch):
    """A search that may take as long as it likes."""
    monkeypatch.setattr(autoplan, "SHARE", 1e9)


@pytest.fixture
def searches(monkeypatch):
    calls, search = [], autoplan.search
    monkeypatch.setattr(autoplan, "search", lambda *args, **more: calls.append(more) or search(*args, **more))
    return calls


def train(swarm, **more):
    return tn.fit(
        swarm, X, Y, tn.softmax_cross_entropy, **{"epochs": 4, "batch_size": 8, "progress": False, "segment": 1, **more}
    )


def test_a_measured_plan_is_the_fastest_of_its_candidates(swarm):
    plan = tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    fastest = min(plan.candidates, key=lambda candidate: candidate.seconds)
    assert plan.block == fastest.block and len(plan.candidates) >= 2
    assert {fastest.block // 2, min(2 * fastest.block, 6)} - {0} <= {c.block for c in plan.candidates}


def test_blocks_are_balanced_over_the_share_of_a_device(swarm):
    plan = tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    assert all(c.block == math.ceil(6 / math.ceil(6 / c.block)) for c in plan.candidates)  # 12 members, 2 devices


def test_auto_trains_to_where_a_given_plan_does(swarm, eager, searches):
    trained, history = train(swarm, plan="auto")
    expected = train(swarm, plan=tn.Plan(1, 3))[1]
    np.testing.assert_allclose(history.train_loss, expected.train_loss, rtol=1e-4)
    assert len(searches) == 1 and len(trained) == 12 and history.plan.candidates


def test_a_switched_plan_keeps_members_in_place(swarm, monkeypatch):
    other = tn.Plan(2, 5)
    monkeypatch.setattr(autoplan, "search", lambda *args, **more: other)
    trained, history = train(swarm, plan="auto")
    expected, _ = train(swarm, plan=tn.Plan(2, 3))
    assert history.plan is other and history.train_loss.shape == (4, 12)
    np.testing.assert_array_equal(trained.id, expected.id)
    np.testing.assert_allclose(trained.params["Dense_0"]["kernel"], expected.params["Dense_0"]["kernel"], rtol=1e-3)


def test_a_remembered_plan_is_taken_at_once(swarm, searches):
    found = tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    history = train(swarm, plan="auto")[1]
    assert history.plan == found and history.plan.candidates == found.candidates and len(searches) == 1


def test_a_remembered_plan_serves_with_validation_too(swarm, searches):
    tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    assert train(swarm, plan="auto", validation=(X, Y))[1].plan.candidates and len(searches) == 1


@pytest.mark.parametrize("other", [{"batch_size": 4}, {"batch_size": 40}])
def test_another_task_is_not_given_a_remembered_plan(swarm, searches, eager, other):
    tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    train(swarm, plan="auto", **other)
    assert len(searches) == 2


def test_a_short_run_is_not_searched(swarm, searches, cache):
    plan = train(swarm, plan="auto")[1].plan
    assert searches[0]["seconds"] < 1 and plan == plan_module.choose(None, swarm) and not cache.exists()
    assert "not measured" in str(plan)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[]",
        '{"candidates": []}',
        '[{"block": 3}]',
        '[{"block": "3", "seconds": 1, "compile_seconds": 1, "megabytes": 1}]',
    ],
)
def test_garbage_in_the_cache_is_ignored_and_rewritten(swarm, cache, eager, text):
    tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert train(swarm, plan="auto")[1].plan.candidates
    assert json.loads(file.read_text()) and list(cache.iterdir()) == [file]


def test_a_cache_of_another_format_is_ignored(swarm, monkeypatch):
    tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    monkeypatch.setattr(autoplan, "FORMAT", 0)
    assert not train(swarm, plan="auto")[1].plan.candidates


def test_a_cache_that_cannot_be_written_costs_one_warning(swarm, cache, caplog):
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    plan = tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    assert plan.candidates and "could not be kept" in caplog.text


def test_what_cannot_be_read_is_measured_and_not_remembered(swarm, cache, caplog):
    numbers = (i for i in range(3))  # a generator: nobody can tell what it holds

    def loss(params, x, y, apply_fn):
        return tn.softmax_cross_entropy(params, x, y, apply_fn) if numbers else None

    assert tn.measured_plan(swarm, X, Y, loss, batch_size=8).candidates
    assert not list(cache.glob("*")) and "generator numbers cannot be read" in caplog.text


def test_a_model_is_known_by_what_its_functions_compute(eager, searches):
    """Flax prints a function in a field by its name alone."""
    for spread, searched in ((0.1, 1), (0.1, 1), (0.2, 2)):
        model = tn.MLP((4, 2), kernel_init=jax.nn.initializers.normal(spread))
        swarm = tn.TurbaTrainState.swarm(model, optax.adam(0.1), 12, 3)
        assert train(swarm, plan="auto")[1].plan.candidates and len(searches) == searched


def test_a_plan_explains_itself(swarm):
    lines = str(tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)).splitlines()
    assert "2 device(s) (cpu)" in lines[0] and "(measured)" in lines[0]
    assert sum("<- chosen" in line for line in lines) == 1 and all(" MB, compiled in " in line for line in lines[1:])


def test_a_program_is_asked_once_for_its_memory(swarm, monkeypatch):
    asked = []
    analysis = jax.stages.Compiled.memory_analysis  # takes XLA milliseconds, which every call of fit would pay
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: asked.append(self) or analysis(self))
    for _ in range(2):
        train(swarm, epochs=2, batch_size=7)
    assert len(asked) == 1


def test_a_candidate_without_memory_is_passed_over(swarm, monkeypatch):
    monkeypatch.setattr(autoplan, "fits", lambda made, plan: program.Need(2**20, plan.block <= 2))
    plan = tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=8)
    assert plan.block <= 2 and "out of memory" in str(plan)


def test_out_of_memory_halves_the_block_and_goes_on(swarm, monkeypatch, caplog):
    monkeypatch.setattr(training, "fits", lambda made, plan, rounds: program.Need(2**20, plan.block <= 2))
    history = train(swarm, plan=tn.Plan(2, 6))[1]
    assert history.plan.block == 1 and history.train_loss.shape == (4, 12)  # 6, 3, 1
    np.testing.assert_array_equal(history.train_loss, train(swarm, plan=tn.Plan(2, 1))[1].train_loss)
    assert [r.message.count("Out of memory with blocks of") for r in caplog.records] == [1, 1]


def test_out_of_memory_with_one_member_stops_with_a_sentence(swarm, monkeypatch):
    monkeypatch.setattr(training, "fits", lambda made, plan, rounds: program.Need(3 * 2**30, False))
    with pytest.raises(MemoryError, match="training needs 3.0 GiB, more than is free; train"):
        train(swarm, plan=tn.Plan(2, 1))


def test_an_error_of_another_kind_is_not_taken_for_memory(swarm, monkeypatch):
    def fails(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(training, "fits", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        train(swarm, plan=tn.Plan(2, 4))


def test_fits_counts_what_xla_says(swarm):
    class Sizes:
        temp_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 10, 7, 3

    class Made:
        class executable:
            memory_analysis = staticmethod(lambda: Sizes)

    assert program.fits(Made(), tn.Plan(2, 1)) == program.Need(28, True)  # two devices share one memory
    assert program.fits(Made(), tn.Plan(2, 1), rounds=3) == program.Need(44, True)  # and keep what each round returns


@pytest.mark.parametrize("batch_size", [0, 2.5])
def test_measured_plan_refuses_what_is_no_batch_size(swarm, batch_size):
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        tn.measured_plan(swarm, X, Y, tn.softmax_cross_entropy, batch_size=batch_size)


@pytest.mark.parametrize("plan", ["fast", 3, ("auto",)])
def test_a_plan_of_another_kind_is_refused(swarm, plan):
    with pytest.raises(ValueError, match="plan must be a Plan"):
        train(swarm, plan=plan)


def test_auto_measures_a_training_that_follows_its_validation_loss(eager, searches):
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optimizer, 6, sample_input=X[:1])
    swarm = tn.with_schedule(swarm, "reduce")
    how = {"epochs": 6, "segment": 2, "batch_size": 8, "validation": (X[:8], Y[:8]), "patience": 4, "progress": False}
    measured, given = (
        tn.fit(swarm, X, Y, tn.softmax_cross_entropy, plan=plan, **how)[1].train_loss for plan in ("auto", None)
    )
    assert searches
    np.testing.assert_allclose(measured, given, rtol=1e-5)


def test_nothing_is_measured_when_everyone_has_stopped(eager, searches):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.sgd(0.0), 4, sample_input=X[:1])
    how = {"epochs": 9, "segment": 3, "validation": (X[:8], Y[:8]), "patience": 1, "progress": False, "plan": "auto"}
    assert (tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **how)[1].epochs == 2).all() and not searches
