"""Where members run on an accelerator, by a stand-in for its platform: all of a device's share in one block."""

import gc
import tempfile
import time
import weakref
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from test_agents import Line
from tiers import first

import turbanet as tn
from turbanet import backend, turba_train_state
from turbanet.cluster import shards
from turbanet.core import memory
from turbanet.data.examples import prepare
from turbanet.networks.policies import Agent
from turbanet.training import compilation, parts, program, run as training

MEMBERS = 24  # a CPU's blocks would have 8
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 2


@pytest.fixture
def blocks(monkeypatch):
    """(members, block) of each device in every program that is traced."""
    traced, in_blocks = [], tn.Plan.in_blocks

    def noted(self, one, own, shared):
        traced.append((len(jax.tree.leaves(own)[0]), self.block))
        return in_blocks(self, one, own, shared)

    monkeypatch.setattr(tn.Plan, "on_accelerator", property(lambda self: True))
    monkeypatch.setattr(tn.Plan, "in_blocks", noted)
    monkeypatch.setattr(backend, "platform", lambda: "gpu")
    # Orthogonal initial weights of all members at once can deadlock the threads of the CPU that stands in here.
    monkeypatch.setattr(turba_train_state, "on_accelerator", lambda: False)
    compilation._programs.cache_clear()  # JAX's own caches need not go: nothing in them is of the stand-in
    yield traced
    compilation._programs.cache_clear()


def made(members=MEMBERS, model=None, optimizer=None, features=3):
    return tn.TurbaTrainState.swarm(model or tn.MLP((4, 2)), optimizer or optax.sgd(0.1), members, features)


def fit(swarm, x=X, y=Y, **settings):
    return tn.fit(swarm, x, y, tn.softmax_cross_entropy, **{"epochs": 2, "progress": False, **settings})


def cross_validate():
    settings = {"optimizer": optax.sgd(0.1), "loss": tn.softmax_cross_entropy, "epochs": 1, "progress": False}
    tn.cross_validate({"mlp": tn.MLP((4, 2))}, X, Y, folds=2, seeds=12, stratified=True, **settings)


def estimate():
    from turbanet.estimators import TurbaClassifier

    TurbaClassifier(MEMBERS, hidden=(4,), epochs=1).fit(X, Y).predict(X)


def search():
    from turbanet.estimators import TurbaClassifier, TurbaSearchCV

    rates = {"learning_rate": np.linspace(0.01, 0.1, 10).tolist()}
    TurbaSearchCV(TurbaClassifier(1, hidden=(4,), epochs=1), rates, cv=2).fit(X, Y)


def forecast():
    import pandas as pd

    from turbanet.forecasting import Forecaster

    days = pd.date_range("2020-01-01", periods=20)
    table = pd.concat(pd.DataFrame({"unique_id": f"s{i:02}", "ds": days, "y": np.arange(20.0) + i}) for i in range(20))
    Forecaster(horizon=1, window=3, epochs=1, progress=False).fit(table).predict()


def agents():
    config = tn.rl.PPOConfig(n_steps=4, n_envs=2, batch_size=8, n_epochs=1, total_timesteps=16)
    swarm, _ = tn.rl.train_agents(Line(), config, MEMBERS, model=Agent(2, hidden=(4,)), progress=False)
    tn.rl.evaluate_agents(Line(), swarm, episodes=1)


def together():
    config = tn.rl.PPOConfig(n_steps=4, n_envs=1, batch_size=4, n_epochs=1, total_timesteps=4)
    world = tn.rl.Foraging(agents=MEMBERS, size=8, sight=1)
    tn.rl.train_together(world, config, model=Agent(world.actions, hidden=(4,)), progress=False)


def federated():
    clients = np.arange(12)[:, None].repeat(2, 1)
    settings = {"clients": np.tile(clients, (2, 1)), "rounds": 1, "sampled": MEMBERS, "progress": False}
    tn.federated.train(made(1), X, Y, tn.softmax_cross_entropy, **settings)


def evolve():
    def score(swarm, generation):
        return swarm, -tn.evaluate(swarm, X, Y, tn.softmax_cross_entropy)

    tn.evolution.evolve(made(), score, tn.evolution.Genetic(), generations=1)


def batches():
    pairs = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    tn.fit_batches(made(), pairs, tn.softmax_cross_entropy, epochs=1, progress=False)


def by_count():
    def rmse(params, x, y, apply_fn):
        logits = apply_fn({"params": params}, x)
        return np.sqrt(2) * ((logits - jax.nn.one_hot(y, 2)) ** 2).mean() ** 0.5, logits

    rows = tn.ragged([np.arange(12 - member % 2) for member in range(MEMBERS)])
    how = {"epochs": 4, "validation": (X, Y), "validation_rows": rows, "patience": 1, "min_delta": 1.0, "segment": 1}
    tn.fit(made(), X, Y, rmse, **how, progress=False)


def shard_of_a_cluster():
    pytest.importorskip("pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / shards.ATTEMPTS).mkdir()
        job = shards.Job(None, tn.softmax_cross_entropy, None, {"epochs": 1}, tn.Checkpoints(folder), None, 1, 1)
        shards._train(job, Path(folder), 0, made(), {"x": X, "y": Y, "predict": X}, time.time())


PUBLIC = {
    "fit": lambda: fit(made(), validation=(X, Y), patience=9),
    "fit in parts": lambda: fit(made(), batch_size=4),
    "fit of few": lambda: fit(made(4)),
    "batches": batches,
    "a score by numbers of rows": by_count,
    "evaluate": lambda: tn.evaluate(made(), X, Y, tn.softmax_cross_entropy),
    "predict": lambda: tn.predict(made(), X),
    "cross_validate": cross_validate,
    "estimators": estimate,
    "search": search,
    "forecaster": forecast,
    "agents": agents,
    "together": together,
    "federated": federated,
    "evolve": evolve,
    "cluster": shard_of_a_cluster,
}


FITTING = "search", "forecaster"  # which train by `fit`, as "estimators" and "cross_validate" do


@pytest.mark.parametrize("name", first(len(PUBLIC) - len(FITTING), sorted(PUBLIC, key=lambda name: name in FITTING)))
def test_members_make_one_block(name, blocks):
    PUBLIC[name]()
    assert blocks and [pair for pair in blocks if pair[0] != pair[1]] == []


def test_a_block_is_quartered_with_the_members_that_are_left(blocks):
    plan = tn.Plan(1, 100)
    assert [plan.shrunk(left, of=100).block for left in (100, 26, 25, 7, 6, 1, 0)] == [100, 100, 25, 25, 7, 2, 1]
    assert [plan.shrunk(left, of=100, least=25).block for left in (26, 25, 1)] == [100, 25, 25]
    assert tn.Plan(1, 64).shrunk(10, of=10).block == 64  # what was given is kept
    assert [tn.Plan(1, 30).shrunk(left, of=100).block for left in (100, 31, 30, 8, 7)] == [30, 30, 30, 30, 8]


def test_what_keeps_an_accelerator_busy_is_no_smaller_block(blocks):
    data = prepare(made(), X, Y)
    weights = 3 * 4 + 4 + 4 * 2 + 2
    assert parts.members_at_least(program.Train(tn.mse, 12), made(), data) == np.ceil(2e7 / (6 * weights * 12))
    assert parts.members_at_least(program.Train(tn.mse, 3), made(), data) == np.ceil(2e7 / (6 * weights * 3))


def test_stopped_members_are_set_aside_and_end_as_they_would_have(blocks, monkeypatch):
    rates = np.geomspace(0.05, 5, 16)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    swarm = tn.with_hyperparameters(made(16, optimizer=optimizer), learning_rate=rates)
    settings = {
        "epochs": 40,
        "validation": (X, np.arange(12) // 6),
        "patience": 2,
        "segment": 2,
        "plan": tn.Plan(1),
    }
    fit(swarm, **settings)
    assert {block for _, block in blocks} == {16}  # so few that a step takes as long with fewer
    monkeypatch.setattr(parts, "STEP", 1)
    shrinking, history = fit(swarm, **settings)
    assert {block for _, block in blocks} >= {16, 4} and history.plan.block == 16
    monkeypatch.setattr(training.Training, "_set_aside", lambda self: None)
    whole, other = fit(swarm, **settings)
    np.testing.assert_array_equal(history.epochs, other.epochs)
    for one, all_of_it in zip(jax.tree.leaves(shrinking.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(one, all_of_it, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", [lambda: fit(made()), lambda: tn.predict(made(), X)], ids=["fit", "predict"])
def test_a_block_is_what_memory_holds_found_by_one_more_compilation(call, blocks, monkeypatch):
    share = MEMBERS // len(jax.devices())
    size = property(lambda self: (1000 if blocks[-1][1] == share else 400, 100))
    monkeypatch.setattr(compilation.Compiled, "bytes", size)
    monkeypatch.setattr(memory, "free_memory", lambda devices: 1000)
    call()
    assert {block for _, block in blocks} == {share, share // 2}  # three quarters would fit, and leave a small block


@pytest.mark.parametrize("call", [PUBLIC["fit"], PUBLIC["predict"], PUBLIC["federated"]])
def test_a_block_that_compilation_has_no_memory_for_is_quartered(call, blocks, monkeypatch, capfd):
    lower = tn.Plan.lower

    class TooLarge:
        def compile(self):
            raise jax.errors.JaxRuntimeError("NOT_FOUND: All configs failed: RESOURCE_EXHAUSTED: Out of memory")

    def lowered(self, *args, **settings):
        found = lower(self, *args, **settings)
        return TooLarge() if self.block > 6 else found

    monkeypatch.setattr(tn.Plan, "lower", lowered)
    call()
    share = MEMBERS // len(jax.devices())
    assert {block for _, block in blocks} == {share, share // 4}


@pytest.mark.parametrize("when", ["compiled", "called"])
def test_the_states_are_let_go_before_smaller_blocks_get_theirs(when, blocks, monkeypatch):
    held, place = [], training.Training._place

    def placed(self, state):
        gc.collect()
        assert not any(leaf() for leaf in held)  # which a GPU may have no memory for beside the new ones
        place(self, state)
        held.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(self.states))

    class TooLarge:
        pace = 1.0

        def __call__(self, *_, **__):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    share = MEMBERS // len(jax.devices())
    monkeypatch.setattr(training.Training, "_place", placed)
    if when == "compiled":
        size = property(lambda self: (1000 if blocks[-1][1] == share else 400, 100))
        monkeypatch.setattr(compilation.Compiled, "bytes", size)
        monkeypatch.setattr(memory, "free_memory", lambda devices: 1000)
    else:
        program = training.Training._program

        def large(self):
            return TooLarge() if self.current.block == share else program(self)

        monkeypatch.setattr(training.Training, "_program", large)
    _, history = fit(made())
    assert history.plan.block == share // 2 and len(held) > 0


RAGGED = tn.ragged([range(12), range(5), range(1, 10)])


@pytest.mark.parametrize(
    ("epochs", "rows"), first(1, [(33, RAGGED), (1, None), (30, None), (32, None), (33, None), (97, None)])
)
def test_short_epochs_train_in_a_loop_of_known_length_as_one_by_one(epochs, rows, blocks, monkeypatch):
    settings = {"epochs": epochs, "validation": (X, Y), "batch_size": 6, "rows": rows}
    trained, history = fit(made(3), **settings)
    monkeypatch.setattr(training, "epochs_together", lambda *others: 1)
    one_by_one, other = fit(made(3), **settings)
    assert history.train_loss.shape == (epochs, 3) and np.isfinite(history.train_loss).all()
    np.testing.assert_allclose(history.train_loss, other.train_loss, rtol=1e-5)
    np.testing.assert_allclose(history.validation_loss, other.validation_loss, rtol=1e-5)
    np.testing.assert_array_equal(trained.step, one_by_one.step)


def test_epochs_of_much_work_are_calls_of_their_own(blocks):
    data, plan = prepare(made(), X, Y), tn.Plan(1)
    assert parts.epochs_together(program.Train(tn.mse, 12), made(), data, plan, 1000) == 64
    assert parts.epochs_together(program.Train(tn.mse, 3), made(), data, plan, 1000) == 16  # of four steps
    assert parts.epochs_together(program.Train(tn.mse, 4), made(), data, plan, 1000) == 16  # of three: 21 would fit
    few = [parts.epochs_together(program.Train(tn.mse, 12), made(), data, plan, epochs) for epochs in (1, 10, 16, 65)]
    assert few == [1, 2, 16, 8]  # so that few steps are made in vain
    long = data.replace(length=10**9)
    assert parts.epochs_together(program.Train(tn.mse, 10**9), made(), long, plan, 1000) == 1


def test_no_member_fits_in_no_memory(blocks, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda devices: 0)
    with pytest.raises(MemoryError, match="are needed, more than is free; take fewer members"):
        tn.predict(made(), X)


def test_a_plan_on_a_cpu_traces_for_the_cpu_where_the_default_is_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = []
    tn.Plan("cpu").lower(lambda x: found.append(backend.platform()) or x, 1.0)
    assert found == ["cpu"] and backend.platform() == "gpu"
