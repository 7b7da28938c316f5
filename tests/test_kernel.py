"""`fit` in kernels, interpreted, against `fit` without: the same members, losses, stops and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first

import turbanet as tn
from turbanet.core import memory
from turbanet.kernels import emitter
from turbanet.training import compilation, kernel, run as training

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)
ROWS = np.stack([rng.permutation(20)[:12] for _ in range(3)])
REPEATED = np.stack([ROWS[0], *(np.where(np.arange(12) < count, ROWS[1], -1) for count in (9, 5))])
USUAL = tn.Plan(1, kernel=False)


@pytest.fixture
def kernels(monkeypatch):
    """As if the CPU could run kernels, which are interpreted."""
    monkeypatch.setattr(tn.Plan, "has_kernels", property(lambda self: True))


@pytest.fixture
def anew():
    """No kernel is compiled yet; and none is known as broken after a test that breaks it."""
    forget()
    yield
    forget()


def forget():
    compilation._programs.cache_clear()
    compilation.refusals.cache_clear()


def made(model=None, optimizer=None, members=3):
    return tn.TurbaTrainState.swarm(model or tn.MLP((4, 2)), optimizer or optax.adam(0.01), members, sample_input=X[:1])


def fit(swarm, plan=None, x=X, y=Y, loss=tn.softmax_cross_entropy, **settings):
    return tn.fit(swarm, x, y, loss, plan=plan or tn.Plan(1), **{"epochs": 3, "progress": False, **settings})


def own_rates():
    swarm = made(optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    return tn.with_hyperparameters(swarm, learning_rate=np.array([0.01, 0.1, 1.0]))


def weighted(params, x, y, apply_fn, member):
    loss, prediction = tn.mse(params, x, y, apply_fn)
    return member["weight"] * loss, prediction


def constants():
    settings = {"x": X, "y": X @ np.ones((3, 2), np.float32), "loss": weighted}
    return made(), settings | {"member": {"weight": np.array([0.1, 1, 2], np.float32)}}


CASES = {
    "all rows": (made, {}),
    "batches": (made, {"batch_size": 6}),
    "own rows": (made, {"rows": ROWS, "batch_size": 5}),
    "all own rows": (made, {"rows": ROWS}),
    "own data": (made, {"x": rng.normal(size=(3, 20, 3)).astype(np.float32), "per_member": (True, False)}),
    "own data in batches": (made, {"x": np.stack([X, -X, 2 * X]), "per_member": (True, False), "batch_size": 8}),
    "repeated rows": (made, {"rows": np.where(np.arange(12) < 9, ROWS, -1), "batch_size": 5, "equal_steps": True}),
    "repeated rows, all at once": (made, {"rows": np.where(np.arange(12) < 9, ROWS, -1), "equal_steps": True}),
    "as many repeated": (made, {"rows": REPEATED, "equal_steps": True}),
    "validation": (made, {"batch_size": 6, "validation": (X, Y), "metric": tn.accuracy}),
    "patience": (made, {"batch_size": 6, "validation": (X, Y), "patience": 1, "min_delta": 0.002, "epochs": 6}),
    "a metric on the host": (made, {"validation": (X, Y), "metric": lambda prediction, y: prediction.max()}),
    "callbacks": (made, {"batch_size": 6, "callbacks": [lambda view: None], "segment": 2}),
    "hyperparameters": (own_rates, {"batch_size": 6}),
    "constants": (lambda: constants()[0], constants()[1]),
    "a schedule of steps": (lambda: made(optimizer=optax.adam(optax.cosine_decay_schedule(0.1, 9))), {"batch_size": 6}),
}
ONCE = "own rows", "validation", "hyperparameters", "constants"


@pytest.mark.parametrize("case", first(4, sorted(CASES, key=lambda case: case not in ONCE)))
def test_fit_trains_in_kernels_as_without(kernels, case):
    make, settings = CASES[case]
    swarm, history = fit(make(), **settings)
    usual, usual_history = fit(make(), USUAL, **settings)
    assert (history.plan.in_kernel, usual_history.plan.in_kernel) == (True, False)
    for ours, theirs in zip(jax.tree.leaves(swarm), jax.tree.leaves(usual), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for name in ("train_loss", "validation_loss", "validation_metric", "epochs"):
        ours, theirs = getattr(history, name), getattr(usual_history, name)
        np.testing.assert_allclose(np.asarray(ours, float), np.asarray(theirs, float), rtol=1e-5)


def same(swarm, other):
    for a, b in zip(jax.tree.leaves(swarm), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("batch_size", first(1, [6, None]))
def test_calls_of_any_length_give_the_same_bits(kernels, monkeypatch, batch_size):
    once, history = fit(made(), epochs=7, batch_size=batch_size)
    monkeypatch.setattr(kernel, "MOST_EPOCHS", 2)  # as in two tests below, for the same program
    often, same_history = fit(made(), epochs=7, batch_size=batch_size)
    same(once, often)
    np.testing.assert_array_equal(history.train_loss, same_history.train_loss)


def test_a_member_ends_alike_among_any_others(kernels):
    swarm, alone = made(), jax.tree.map(lambda leaf: leaf[1:2], made())
    same(jax.tree.map(lambda leaf: leaf[1:2], fit(swarm)[0]), fit(alone)[0])
    ill = swarm.replace(params=jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), swarm.params))
    same(*(jax.tree.map(lambda leaf: leaf[1:], fit(each)[0].params) for each in (swarm, ill)))


def test_a_killed_training_resumes_with_its_bits(kernels, tmp_path):
    whole, _ = fit(made(), epochs=6, batch_size=6, segment=2)

    def killed(view):
        if view.epoch == 4:
            raise KeyboardInterrupt

    for callbacks in ([killed], []):
        try:
            settings = {"epochs": 6, "batch_size": 6, "segment": 2, "checkpoints": tmp_path / "t"}
            swarm, history = fit(made(), **settings, callbacks=callbacks)
        except KeyboardInterrupt:
            continue
    assert history.plan.in_kernel
    same(whole, swarm)


def test_a_training_that_began_without_a_kernel_goes_on_without(kernels, tmp_path):
    settings = {"batch_size": 6, "segment": 1, "checkpoints": tmp_path / "t"}
    fit(made(), USUAL, epochs=2, **settings)
    swarm, history = fit(made(), epochs=4, **settings)
    assert not history.plan.in_kernel and "began without a kernel" in history.plan.reason
    same(swarm, fit(made(), USUAL, epochs=4, batch_size=6)[0])


@pytest.mark.parametrize(
    "make, settings, reason",
    [
        (lambda: made(tn.MLP((4, 2), dropout=0.5)), {}, "does not take random numbers, as dropout does"),
        (made, {"rows": np.array([[0, 1, 2], [3, 4, -1], [5, 6, 7]])}, "equally many rows, or equal_steps=True"),
    ],
)
def test_what_a_kernel_cannot_hold_trains_as_usual_and_the_plan_says_why(kernels, make, settings, reason):
    swarm = make()
    trained, history = fit(swarm, **settings)
    assert not history.plan.in_kernel and reason in history.plan.reason
    same(trained, fit(swarm, USUAL, **settings)[0])
    with pytest.raises(ValueError, match=reason):
        fit(swarm, tn.Plan(1, kernel=True), **settings)


@pytest.mark.cpu
def test_without_an_nvidia_gpu_nothing_changes_and_a_kernel_asked_for_is_refused():
    _, history = fit(made())
    assert not history.plan.in_kernel and history.plan.reason == ""
    with pytest.raises(ValueError, match="A kernel needs an NVIDIA GPU; this is cpu"):
        fit(made(), tn.Plan(1, kernel=True))


def test_rows_of_a_loader_are_no_kernels(kernels):
    loader = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    with pytest.raises(ValueError, match="come from a loader"):
        tn.fit_batches(made(), loader, tn.softmax_cross_entropy, epochs=1, plan=tn.Plan(1, kernel=True), progress=False)


def test_a_kernel_that_does_not_compile_is_done_without(kernels, anew, monkeypatch):
    def broken(*_, **__):
        raise NotImplementedError("no such tile")

    monkeypatch.setattr(emitter, "train", broken)
    swarm, history = fit(made())
    assert history.plan.reason == "The kernel did not compile: no such tile"
    same(swarm, fit(made(), USUAL)[0])
    with pytest.raises(NotImplementedError, match="no such tile"):
        fit(made(), tn.Plan(1, kernel=True))


def test_a_fallback_records_every_epoch_also_from_the_cache_and_is_remembered(kernels, anew, monkeypatch):
    tried = []

    def broken(*_, **__):
        tried.append(1)
        raise NotImplementedError("no such tile")

    usual = fit(made(), USUAL, epochs=600, segment=600)[1].train_loss
    monkeypatch.setattr(emitter, "train", broken)
    for _ in range(2):
        _, history = fit(made(), epochs=600, segment=600)
        np.testing.assert_array_equal(history.train_loss, usual)
    assert len(tried) == 1 and "no such tile" in history.plan.reason
    forget()
    swarm, _ = fit(made(), compile_only=True)
    same(fit(made())[0], fit(swarm, USUAL)[0])


def test_too_little_shared_memory_is_no_reason_for_smaller_blocks(kernels, anew, monkeypatch):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000")

    monkeypatch.setattr(emitter, "train", broken)
    _, history = fit(made())
    assert history.plan.block == fit(made(), USUAL)[1].plan.block and "Shared memory" in history.plan.reason


def test_too_little_memory_is_no_fault_of_the_kernel(kernels, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda devices: 0)
    with pytest.raises(MemoryError, match="more than is free"):
        fit(made())
    monkeypatch.undo()
    monkeypatch.setattr(tn.Plan, "has_kernels", property(lambda self: True))
    assert fit(made())[1].plan.in_kernel


def test_a_plan_of_a_history_asks_for_what_was_asked_before(kernels):
    _, history = fit(made())
    _, other = fit(made(tn.MLP((4, 2), dropout=0.5)), history.plan)
    assert history.plan.in_kernel and not other.plan.in_kernel and "dropout" in other.plan.reason
    assert fit(made(), other.plan)[1].plan.in_kernel and fit(made(), other.plan)[1].plan.reason == ""


@pytest.mark.parametrize("kernel", [0, 1, "yes", np.False_])
def test_a_kernel_is_true_false_or_none(kernel):
    with pytest.raises(ValueError, match="kernel must be True, False, or None"):
        tn.Plan(kernel=kernel)


def test_a_call_has_no_more_steps_than_ctrl_c_may_wait_for(kernels, monkeypatch):
    monkeypatch.setattr(kernel, "MOST_STEPS", 12)
    calls, call = [], training.Training._call
    monkeypatch.setattr(
        training.Training, "_call", lambda run, count, extent: calls.append(count) or call(run, count, extent)
    )
    fit(made(), epochs=9, batch_size=6, segment=9)  # of four steps
    assert calls == [2, 2, 2, 2, 1]


def test_a_plan_says_that_it_was_a_kernel(kernels):
    import pickle

    plan = fit(made())[1].plan
    assert str(plan).endswith("one kernel") and pickle.loads(pickle.dumps(plan)) == plan
