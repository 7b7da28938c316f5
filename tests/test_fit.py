"""fit against the same networks trained alone, by a plain Optax loop on the plain model."""

import dataclasses
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEVICES
from tiers import first

import turbanet as tn
from turbanet.core import cache, member, memory, plan as plan_module
from turbanet.data.examples import placed, prepare
from turbanet.training import compilation, program

rng = np.random.default_rng(0)
X = rng.normal(size=(30, 3))
Y = rng.integers(0, 4, 30)
MODEL, TX = tn.MLP((6, 4)), optax.adam(0.01)


def make(members=5, **kwargs):
    return tn.TurbaTrainState.swarm(MODEL, TX, members, sample_input=X[:1], **{"seed": 7, **kwargs})


def train(swarm, **kwargs):
    settings = {"epochs": 4, "batch_size": 8, "progress": False, "plan": tn.Plan(DEVICES, 2), **kwargs}
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **settings)


@partial(jax.jit, static_argnums=0)
def step_alone(loss_fn, params, opt_state, x, y):
    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y, MODEL.apply)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def alone(state, x, y, order, loss_fn=tn.softmax_cross_entropy):
    """(params, epoch losses) of one network, a step at a time, over order [epoch, step, batch]."""
    params, opt_state, losses = state.params, TX.init(state.params), []
    for epoch in np.asarray(order):
        steps = []
        for index in epoch:
            params, opt_state, loss = step_alone(loss_fn, params, opt_state, x[index], y[index])
            steps.append(float(loss))
        losses.append(np.mean(steps))
    return params, losses


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(rtol):
    return lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * 1e-2)


PLANS = [tn.Plan(1, 1), tn.Plan(1, 5), tn.Plan(DEVICES, 2), tn.Plan(DEVICES, 3), tn.Plan()]


@pytest.fixture(scope="module")
def in_float64():
    """(a swarm, each of its networks trained alone for 100 steps)."""
    with jax.enable_x64(True):
        swarm = make()
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), swarm.params)
        swarm = swarm.replace(params=params, opt_state=jax.vmap(TX.init)(params))
        order = tn.batch_order(swarm, 30, epochs=25, batch_size=8)
        return swarm, [alone(swarm.get_state(i), X, Y, order[i]) for i in range(len(swarm))]


@pytest.mark.optimized
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{len(p.devices)}x{p.block}")
def test_fit_equals_networks_alone_in_float64(plan, in_float64):
    swarm, expected = in_float64
    with jax.enable_x64(True):
        trained, history = train(swarm, epochs=25, plan=plan)
        assert trained.params["Dense_0"]["kernel"].dtype == jnp.float64
        for i, (params, losses) in enumerate(expected):
            jax.tree.map(close(1e-9), trained.get_state(i).params, params)
            np.testing.assert_allclose(history.train_loss[:, i], losses, rtol=1e-9)


@pytest.mark.optimized
def test_fit_equals_networks_alone_in_float32():
    swarm = make()
    order = tn.batch_order(swarm, 30, epochs=25, batch_size=8)
    trained, history = train(swarm, epochs=25)
    for i in range(len(swarm)):
        params, losses = alone(swarm.get_state(i), X, Y, order[i])
        np.testing.assert_allclose(history.train_loss[:, i], losses, rtol=1e-4)
        prediction = MODEL.apply({"params": params}, jnp.asarray(X))
        np.testing.assert_allclose(tn.predict(trained, X)[i], prediction, rtol=1e-4, atol=1e-5)


@pytest.mark.optimized
def test_fit_equals_pytorch():
    torch = pytest.importorskip("torch")
    swarm = make(members=2)
    _, history = train(swarm, epochs=10, batch_size=None)
    for i in range(2):
        one = jax.tree.map(lambda a: torch.tensor(np.asarray(a)), swarm.get_state(i).params)
        leaves = [one[layer][name].requires_grad_() for layer in ("Dense_0", "Dense_1") for name in ("kernel", "bias")]
        adam, x, y = torch.optim.Adam(leaves, lr=0.01), torch.tensor(X, dtype=torch.float32), torch.tensor(Y)
        for epoch in range(10):
            hidden = torch.relu(x @ leaves[0] + leaves[1])
            loss = torch.nn.functional.cross_entropy(hidden @ leaves[2] + leaves[3], y)
            adam.zero_grad()
            loss.backward()
            adam.step()
            np.testing.assert_allclose(history.train_loss[epoch, i], loss.item(), rtol=1e-4)


@pytest.mark.optimized
def test_fit_of_rows_equals_networks_alone_on_their_rows():
    swarm, rows = make(), tn.bootstrap(jax.random.key(1), members=5, rows=30, size=20)
    order = tn.batch_order(swarm, rows, epochs=4, batch_size=8)
    _, history = train(swarm, rows=rows)
    for i in range(5):
        assert set(order[i].ravel()) == set(np.asarray(rows)[i])
        np.testing.assert_allclose(history.train_loss[:, i], alone(swarm.get_state(i), X, Y, order[i])[1], rtol=1e-5)


def test_fit_of_ragged_rows_reads_only_the_members_own():
    rows = tn.ragged([[0, 1, 2], range(3, 30)])
    order = tn.batch_order(make(2), rows, epochs=2, batch_size=8)
    assert set(order[0].ravel()) == {-1, 0, 1, 2} and order.shape == (2, 2, 4, 8)
    poisoned = np.where(np.arange(30)[:, None] >= 3, np.nan, X)
    _, history = tn.fit(
        make(2),
        poisoned,
        Y,
        tn.softmax_cross_entropy,
        epochs=2,
        batch_size=8,
        rows=rows,
        progress=False,
        allow_nan=True,
    )
    assert np.isfinite(history.train_loss[:, 0]).all() and np.isnan(history.train_loss[:, 1]).all()


@pytest.mark.parametrize("batch_size", first(1, [8, None]))
def test_fit_of_per_member_data_equals_shared_data(batch_size):
    shared, a = train(make(), batch_size=batch_size)
    own = np.tile(X, (5, 1, 1)), np.tile(Y, (5, 1))
    separate, b = tn.fit(
        make(), *own, tn.softmax_cross_entropy, epochs=4, batch_size=batch_size, per_member=True, progress=False,
        plan=tn.Plan(DEVICES, 2),
    )  # fmt: skip
    np.testing.assert_allclose(a.train_loss, b.train_loss, rtol=1e-5)
    jax.tree.map(close(1e-4), shared.params, separate.params)


def test_fit_of_shared_inputs_and_per_member_targets_trains_specialists():
    targets = (np.arange(4)[:, None] == Y).astype(int)
    swarm = make(4)
    order = tn.batch_order(swarm, 30, epochs=4, batch_size=8)
    _, history = tn.fit(
        swarm, X, targets, tn.softmax_cross_entropy, epochs=4, batch_size=8, per_member=(False, True), progress=False
    )
    for i in range(4):
        losses = alone(swarm.get_state(i), X, targets[i], order[i])[1]
        np.testing.assert_allclose(history.train_loss[:, i], losses, rtol=1e-5)


def test_fit_takes_pytrees():
    def weighted(params, x, y, apply_fn):
        logits = apply_fn({"params": params}, x["features"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y["label"])
        return (loss * x["weight"]).mean(), logits

    x, y = {"features": X, "weight": np.ones(30)}, {"label": Y}
    _, history = tn.fit(make(), x, y, weighted, epochs=4, batch_size=8, progress=False, plan=tn.Plan(DEVICES, 2))
    np.testing.assert_allclose(history.train_loss, train(make())[1].train_loss, rtol=1e-6)


def test_fit_computes_the_validation_loss_after_each_epoch():
    held_out = X[:10] + 1, Y[:10]
    trained, history = train(make(), validation=held_out)
    x, y = map(jnp.asarray, held_out)
    expected = [tn.softmax_cross_entropy(trained.get_state(i).params, x, y, MODEL.apply)[0] for i in range(5)]
    np.testing.assert_allclose(history.validation_loss[-1], expected, rtol=1e-5)
    assert history.validation_loss.shape == (4, 5)


def test_fit_validates_each_fold_on_its_own_rows():
    rows, held_out = tn.k_fold(jax.random.key(0), folds=4, rows=30)
    trained, history = train(make(4), rows=rows, validation=(X, Y), validation_rows=held_out)
    for i in range(4):
        own = np.asarray(held_out)[i]
        own = own[own >= 0]
        loss, _ = tn.softmax_cross_entropy(
            trained.get_state(i).params, jnp.asarray(X[own]), jnp.asarray(Y[own]), MODEL.apply
        )
        np.testing.assert_allclose(history.validation_loss[-1, i], loss, rtol=1e-5)


@pytest.mark.optimized
def test_fit_in_two_calls_equals_one():
    half, _ = train(make(), epochs=2, segment=2)
    again, _ = train(half, epochs=2, segment=2)
    whole, _ = train(make(), epochs=4, segment=2)
    assert_same_bits(again, whole)
    assert np.asarray(whole.epoch).tolist() == [4] * 5


@pytest.mark.optimized
def test_fit_repeats_bit_for_bit():
    assert_same_bits(train(make())[0], train(make())[0])


def test_fit_does_not_depend_on_the_other_members():
    all_five, two = train(make())[0], train(make().remove_state(0).remove_state(1).remove_state(2))[0]
    assert np.asarray(two.id).tolist() == [1, 3]
    assert_same_bits(jax.tree.map(lambda leaf: leaf[jnp.array([1, 3])], all_five), two)


@pytest.mark.optimized
def test_fit_with_a_nan_neighbour_changes_no_bit():
    swarm = make()
    sick = swarm.replace(params=jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), swarm.params))
    healthy = jnp.array([0, 2, 3, 4])
    assert_same_bits(*(jax.tree.map(lambda leaf: leaf[healthy], train(s)[0]) for s in (swarm, sick)))


def test_fit_leaves_its_arguments_and_devices_alone():
    swarm = make()
    before = jax.tree.map(np.array, swarm)
    trained, _ = train(swarm)
    assert_same_bits(swarm, before)
    assert {leaf.sharding for leaf in jax.tree.leaves(trained)} == {leaf.sharding for leaf in jax.tree.leaves(swarm)}


def test_fit_without_shuffle_reads_rows_in_order():
    order = np.tile((np.arange(32) % 30).reshape(4, 8), (4, 1, 1))
    _, history = train(make(), shuffle=False)
    np.testing.assert_allclose(history.train_loss[:, 2], alone(make().get_state(2), X, Y, order)[1], rtol=1e-5)


def test_fit_of_a_single_member_swarm():
    order = tn.batch_order(make(1), 30, epochs=4, batch_size=8)
    _, history = train(make(1))
    np.testing.assert_allclose(history.train_loss[:, 0], alone(make(1).get_state(0), X, Y, order[0])[1], rtol=1e-5)


@pytest.fixture
def compiled(monkeypatch):
    """The programs compiled so far, a list that grows."""
    programs, compile_one = [], compilation._compile_in_thread
    monkeypatch.setattr(compilation, "_compile_in_thread", lambda *a, **k: programs.append(a) or compile_one(*a, **k))
    compilation._programs.cache_clear()  # and not JAX's own caches, which the next tests would have to fill again
    return programs


@pytest.mark.parametrize(
    ("plan", "job"),
    first(
        1,
        [
            (
                tn.Plan(DEVICES, 2),
                {"metric": {"mean": lambda p, y: np.mean(p)}, "monitor": "mean", "mode": "max", "patience": 2},
            ),
            (tn.Plan(1, 1), {}),
            (tn.Plan(DEVICES, 2), {}),
            (tn.Plan(DEVICES, 2), {"patience": 1, "segment": 1}),
            (tn.Plan(DEVICES, 2), {"checkpoints": True}),
        ],
    ),
    ids=["monitor", "one device", "plain", "patience", "checkpoints"],
)
def test_calls_of_a_block_train_what_one_call_of_all_blocks_trains(plan, job, monkeypatch, tmp_path):
    held_out = {"validation": (X[:11], Y[:11])}
    found = []
    for most in (0, 8):
        monkeypatch.setattr(plan_module, "MOST_CALLS", most)
        compilation._programs.cache_clear()
        kept = {"checkpoints": tmp_path / str(most)} if "checkpoints" in job else {}
        swarm, history = train(make(7), epochs=6, plan=plan, **held_out, **job | kept)
        found.append((swarm, history.train_loss, history.validation_loss, tn.predict(swarm, X, plan=plan)))
    assert_same_bits(*map(jax.tree.leaves, found))


@pytest.mark.cpu
def test_how_long_a_call_is_goes_by_the_rounds_of_this_training(monkeypatch):
    plan, orders, call = tn.Plan(DEVICES, 1), [], compilation.Compiled.__call__
    compilation._programs.cache_clear()
    train(make(2), epochs=1, plan=plan)
    (made,) = [future.result() for future in compilation._programs().values() if hasattr(future, "result")]
    made.pace = 0.2  # seconds a round and epoch: ten epochs of one round are a call, and one of eight

    def ordered(self, *data, epochs):
        orders.append(epochs)
        return call(self, *data, epochs=epochs)

    monkeypatch.setattr(compilation.Compiled, "__call__", ordered)
    train(make(16), epochs=3, plan=plan, segment=3)
    assert orders[:8] == [1] * 8


def anew(rate=0.01, act=0.0, scale=1.0, opaque=None):
    """A swarm and a loss that share no function with another call's."""

    class Net(nn.Module):
        slope: float = act

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(nn.leaky_relu(nn.Dense(6)(x), self.slope))

    def loss(params, x, y, apply_fn):
        value, logits = tn.softmax_cross_entropy(params, x, y, apply_fn)
        assert opaque is None or opaque
        return scale * value, logits

    return tn.TurbaTrainState.swarm(Net(), optax.adam(rate), 3, sample_input=X[:1]).set_loss_fn(loss)


def trained(swarm):
    """(the trained swarm, its losses)."""
    found, history = tn.fit(swarm, X, Y, epochs=3, batch_size=8, progress=False, plan=tn.Plan(DEVICES, 2), segment=3)
    return found, history.train_loss


def test_equal_models_losses_and_optimizers_compile_once(compiled):
    first, second = anew(), anew()
    (one, losses), (other, same) = trained(first), trained(second)
    assert len(compiled) == 1
    assert_same_bits(jax.tree.leaves(one), jax.tree.leaves(other))
    np.testing.assert_array_equal(losses, same)
    assert (other.apply_fn, other.tx, other.loss_fn) == (second.apply_fn, second.tx, second.loss_fn)
    assert jax.tree.structure(other) == jax.tree.structure(second) != jax.tree.structure(one)
    np.testing.assert_array_equal(tn.predict(one, X), tn.predict(other, X))
    assert len(compiled) == 2


def test_other_models_losses_and_optimizers_compile_anew(compiled):
    _, losses = trained(anew())
    for programs, changed in enumerate(({"rate": 0.1}, {"act": 0.5}, {"scale": 3.0}), 2):
        _, different = trained(anew(**changed))
        assert len(compiled) == programs and (losses[-1] != different[-1]).all(), changed


def test_what_cannot_be_read_compiles_anew(compiled):
    for _ in range(2):
        trained(anew(opaque=(0 for _ in "a")))
    assert len(compiled) == 2


@pytest.mark.parametrize("opaque", first(1, [(0 for _ in "a"), None]), ids=["opaque", "readable"])
def test_a_program_that_was_compiled_ahead_is_the_one_that_fit_runs(opaque, compiled):
    swarm = anew(opaque=opaque)
    job = {"epochs": 3, "batch_size": 8, "validation": (X, Y), "metric": {"share": tn.accuracy}, "progress": False}
    same, seen = tn.fit(swarm, X, Y, compile_only=True, **job)
    assert same is swarm and seen.train_loss.shape == (0, 3) and not seen.epochs.any() and len(compiled) == 1
    _, history = tn.fit(swarm, X, Y, **job)
    assert len(compiled) == 1 and np.isfinite(history.train_loss).all()


def test_a_training_that_was_kept_to_its_end_compiles_nothing_ahead(compiled, tmp_path):
    job = {"epochs": 2, "batch_size": 8, "checkpoints": tmp_path, "progress": False}
    _, history = tn.fit(anew(), X, Y, **job)
    compilation._programs.cache_clear()
    tn.fit(anew(), X, Y, compile_only=True, **job)
    assert len(compiled) == 1
    np.testing.assert_array_equal(tn.fit(anew(), X, Y, **job)[1].train_loss, history.train_loss)


def test_what_failed_to_compile_is_compiled_again(compiled, monkeypatch):
    failing = jax.errors.JaxRuntimeError("INTERNAL: the compiler fell over")
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda self: (_ for _ in ()).throw(failing))
        tn.fit(anew(), X, Y, epochs=1, progress=False, compile_only=True)  # nobody waits for it
        with pytest.raises(jax.errors.JaxRuntimeError, match="fell over"):
            trained(anew())
    assert np.isfinite(trained(anew())[1]).all()


def test_a_global_that_changed_between_two_fits_counts(compiled):
    scope = {"scale": 1.0, "loss": tn.softmax_cross_entropy}
    source = "def scaled(*args):\n    value, logits = loss(*args)\n    return scale * value, logits"
    exec(source, scope)
    swarm = make().set_loss_fn(scope["scaled"])
    _, losses = trained(swarm)
    scope["scale"] = 2.0
    _, doubled = trained(swarm)
    np.testing.assert_allclose(doubled[0], 2 * losses[0], rtol=1e-6)
    trained(swarm)
    assert len(compiled) == 2


def loop(carry, number):
    return carry * FACTORS[0], number


inner = jax.jit(lambda value: value * FACTORS[0])
FACTORS = np.ones(1, np.float32)


def looped(value):
    return jax.lax.scan(loop, value, jnp.arange(1))[0]


@pytest.mark.parametrize(
    ("times", "call"),
    first(2, [(looped, "fit"), (inner, "train"), (inner, "fit"), (looped, "evaluate")]),
    ids=["loop-fit", "jit-train", "jit-fit", "loop-evaluate"],
)
def test_what_changes_in_place_counts_in_loops_and_inner_programs_too(times, call):
    def made():  # the same code, and other functions
        def scaled(*args):
            value, logits = tn.softmax_cross_entropy(*args)
            return times(value), logits

        return scaled

    def losses(loss):
        if call == "fit":
            return tn.fit(swarm, X, Y, loss, epochs=1, progress=False)[1].train_loss
        if call == "evaluate":
            return tn.evaluate(swarm, X, Y, loss)
        return swarm.train(*(np.stack([each] * len(swarm)) for each in (X, Y)), loss)[1]

    swarm, loss = make(), made()
    FACTORS[0] = 1
    before = losses(loss)
    for other in (loss, made()):
        FACTORS[0] *= 2
        np.testing.assert_allclose(losses(other), FACTORS[0] * before, rtol=1e-6)


def test_a_loss_that_has_no_hash_is_read_at_each_call():
    @dataclasses.dataclass
    class Scaled:
        scale: float

        def __call__(self, *args):
            value, logits = tn.softmax_cross_entropy(*args)
            return self.scale * value, logits

    loss = Scaled(1.0)
    once = trained(make().set_loss_fn(loss))[1]
    loss.scale = 2.0
    np.testing.assert_allclose(trained(make().set_loss_fn(loss))[1][0], 2 * once[0], rtol=1e-6)
    own = [np.stack([each] * len(make())) for each in (X, Y)]  # [member, ...]
    _, stepped, _ = make().set_loss_fn(loss).train(*own)
    plain, _ = make().evaluate(*own, tn.softmax_cross_entropy)
    np.testing.assert_allclose(stepped, 2 * plain, rtol=1e-6)
    np.testing.assert_allclose(make().evaluate(*own, loss)[0], 2 * plain, rtol=1e-6)


@pytest.mark.parametrize("loss", [None, 3.0])
def test_what_is_no_loss_is_not_set(loss):
    with pytest.raises(ValueError, match="A loss is loss"):
        make().set_loss_fn(tn.mse).set_loss_fn(loss)


def test_what_a_loss_reads_of_a_module_and_that_changed_counts():
    settings = types.ModuleType("settings_of_a_user")
    settings.scale = 1.0
    scope = {"settings": settings, "loss": tn.softmax_cross_entropy}
    exec("def scaled(*args):\n    value, logits = loss(*args)\n    return settings.scale * value, logits", scope)
    swarm = make().set_loss_fn(scope["scaled"])
    _, losses = trained(swarm)
    settings.scale = 2.0
    _, doubled = trained(swarm)
    np.testing.assert_allclose(doubled[0], 2 * losses[0], rtol=1e-6)


def test_an_attribute_of_a_loss_that_changed_between_two_fits_counts():
    class Scaled:
        def __init__(self):
            self.scale = 1.0

        def __call__(self, *args):
            value, logits = tn.softmax_cross_entropy(*args)
            return self.scale * value, logits

    scaled = Scaled()
    swarm = make().set_loss_fn(scaled)
    _, losses = trained(swarm)
    scaled.scale = 2.0
    _, doubled = trained(swarm)
    np.testing.assert_allclose(doubled[0], 2 * losses[0], rtol=1e-6)


def test_another_precision_compiles_anew(compiled):
    swarm = make()
    train(swarm, segment=4)
    with jax.default_matmul_precision("high"):
        train(swarm, segment=4)
    assert len(compiled) == 2


def test_trainings_in_several_threads_end_as_one_after_the_other():
    """Each with losses of its own, which all threads remember in one cache."""
    x, y = np.eye(8, dtype=np.float32), np.arange(8) % 2

    def trained(number):
        out = []
        for factor in range(6):

            def loss(params, x, y, apply_fn, factor=1.0 + number + 3 * factor):
                return factor * tn.softmax_cross_entropy(params, x, y, apply_fn)[0], 0

            swarm = tn.TurbaTrainState.swarm(tn.MLP((3, 2)), optax.sgd(1e-3), 2, sample_input=x[:1], seed=number)
            swarm, _ = tn.fit(swarm, x, y, loss, epochs=2, batch_size=4, progress=False)
            out.append(jax.tree.leaves(swarm.params))
        return out

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(trained, range(3)))
    finally:
        sys.setswitchinterval(before)
    jax.tree.map(np.testing.assert_array_equal, together, [trained(number) for number in range(3)])


def test_the_last_programs_are_kept(compiled, monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 1)
    for batch_size in (8, 10):
        train(make(), epochs=1, batch_size=batch_size)
    assert len(compiled) == 2 and len(compilation._programs()) == 1


def test_history_frame_is_tidy():
    _, history = train(make(), validation=(X, Y))
    frame = history.frame()
    assert list(frame.columns) == ["epoch", "seed", "member", "train_loss", "validation_loss"] and len(frame) == 20
    row = frame[(frame.epoch == 3) & (frame.member == 2)].iloc[0]
    assert (row.train_loss, row.validation_loss) == (history.train_loss[3, 2], history.validation_loss[3, 2])


def test_fit_shows_progress_on_a_terminal_only_if_asked(capfd):
    train(make(), progress=False)
    assert capfd.readouterr().err == ""
    train(make(), progress=True)
    assert "epoch" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"rows": np.full((5, 3), 30)}, r"rows must lie in 0\.\.29.* got 30 to 30, 3 at the fewest"),
        ({"rows": np.zeros((4, 3), int)}, "rows has 4 members, the swarm has 5"),
        ({"validation": (X, Y), "validation_rows": np.zeros((4, 3), int)}, "validation_rows has 4 members"),
        ({"per_member": True}, "it must lead with 5 members"),
        ({"validation_rows": np.zeros((5, 3), int)}, "without validation"),
        ({"metric": tn.accuracy}, "metric came without validation"),
        ({"validation": (X, Y[:-1])}, "same number of rows"),
    ],
)
def test_fit_refuses_bad_input_in_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        train(make(), **settings)


def test_fit_refuses_x_and_y_of_different_lengths():
    with pytest.raises(ValueError, match="same number of rows"):
        tn.fit(make(), X, Y[:-1], tn.softmax_cross_entropy, epochs=1)


def test_fit_refuses_one_network_without_a_member_axis():
    with pytest.raises(ValueError, match="this is one network"):
        train(make().get_state(0))


def test_fit_without_a_loss_says_what_to_do():
    with pytest.raises(ValueError, match="pass loss_fn"):
        tn.fit(make(), X, Y, epochs=1)


def test_fit_refuses_a_loss_without_a_scalar():
    with pytest.raises(ValueError, match="take the loss's mean"):
        tn.fit(make(), X, Y, lambda p, x, y, apply_fn: (apply_fn({"params": p}, x), y), epochs=1, progress=False)


def test_evaluate_counts_each_row_once():
    rows = tn.ragged([[0], [1, 2, 3, 4, 5, 6, 7]])
    swarm = make(2)
    got = tn.evaluate(swarm, X, Y, tn.softmax_cross_entropy, rows=rows)
    for i, own in enumerate(([0], [1, 2, 3, 4, 5, 6, 7])):
        logits = np.asarray(MODEL.apply({"params": swarm.get_state(i).params}, jnp.asarray(X[own])), np.float64)
        expected = -np.mean((logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[range(len(own)), Y[own]])
        np.testing.assert_allclose(got[i], expected, rtol=1e-5)


def test_predict_equals_the_plain_model():
    swarm = make()
    for i, prediction in enumerate(tn.predict(swarm, X, plan=tn.Plan(DEVICES, 2))):
        expected = MODEL.apply({"params": swarm.get_state(i).params}, jnp.asarray(X))
        np.testing.assert_allclose(prediction, expected, rtol=1e-5, atol=1e-6)


def test_predict_of_per_member_rows():
    swarm, rows = make(2), np.array([[3, 1], [2, 2]])
    everything = tn.predict(swarm, X)
    got = tn.predict(swarm, X, rows=rows)
    np.testing.assert_allclose(got[0, 0], everything[0, 3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1, 1], everything[1, 2], rtol=1e-5, atol=1e-6)


def test_weights_of_its_own_ride_along_with_shared_data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 2, 12)
    rows = np.array([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])
    weights = np.zeros((2, 12), np.float32)
    weights[[[0], [1]], rows] = 1
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.1), 2, sample_input=x[:1])
    how = {"epochs": 3, "progress": False}
    loss = tn.weighted(tn.softmax_cross_entropy)
    weighed, history = tn.fit(swarm, x, (y, weights), loss, per_member=(False, (False, True)), **how)
    chosen, expected = tn.fit(swarm, x, y, tn.softmax_cross_entropy, rows=rows, **how)
    np.testing.assert_allclose(history.train_loss, expected.train_loss, rtol=1e-5)
    np.testing.assert_allclose(weighed.params["Dense_0"]["kernel"], chosen.params["Dense_0"]["kernel"], rtol=1e-4)


def test_a_metric_is_scored_on_each_members_held_out_rows_after_each_epoch():
    held_out = tn.ragged([range(20, 30 - i) for i in range(5)])  # of different lengths
    job = {"validation": (X, Y), "validation_rows": held_out, "metric": tn.accuracy}
    trained, history = train(make(), **job)
    assert history.validation_metric.shape == (4, 5)
    for i, logits in enumerate(tn.predict(trained, X)):
        rows = np.arange(20, 30 - i)
        assert history.validation_metric[-1, i] == pytest.approx((logits[rows].argmax(-1) == Y[rows]).mean())
    np.testing.assert_array_equal(history.frame().validation_metric, history.validation_metric.ravel())
    assert train(make(), validation=(X, Y))[1].validation_metric is None


def test_many_ragged_held_out_rows_are_scored_in_parts_as_at_once():
    x, y = np.tile(X, (20, 1)), np.tile(Y, 20)  # more rows than are scored at a time
    held_out = tn.ragged([range(600 - i) for i in range(5)])
    swarm = make()
    got = tn.evaluate(swarm, x, y, tn.softmax_cross_entropy, rows=held_out)
    for i in range(5):
        expected = tn.evaluate(swarm, x[: 600 - i], y[: 600 - i], tn.softmax_cross_entropy)[i]
        np.testing.assert_allclose(got[i], expected, rtol=1e-5)


def test_a_stopped_member_has_no_metric():
    _, history = train(make(), validation=(X, Y), metric=tn.accuracy, patience=1, min_delta=10.0, segment=4)
    assert np.isnan(history.validation_metric[1:]).sum() == np.isnan(history.validation_loss[1:]).sum() > 0


def conv_swarm(members=2):
    images = rng.normal(size=(230, 16, 16, 1)).astype(np.float32)
    return images, tn.TurbaTrainState.swarm(tn.networks.LeNet(classes=4), TX, members, sample_input=images[:1], seed=3)


@pytest.mark.parametrize("rows", first(1, [100, 230]))  # the last part is filled up; or one part holds all
def test_rows_scored_in_parts_are_scored_as_at_once(monkeypatch, rows):
    images, swarm = conv_swarm()
    labels = np.arange(230) % 4
    monkeypatch.setattr(member, "ROWS", rows)
    losses = tn.evaluate(swarm, images, labels, tn.softmax_cross_entropy)
    predictions = tn.predict(swarm, images)
    for i, state in enumerate(swarm):
        logits = np.asarray(tn.networks.LeNet(classes=4).apply({"params": state.params}, images), np.float64)
        picked = logits[np.arange(230), labels] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(predictions[i], logits, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(losses[i], -picked.mean(), rtol=1e-5)


def test_rows_scored_in_parts_take_the_memory_of_a_part(monkeypatch):
    images, swarm = conv_swarm(1)
    needs = []
    for rows in (10, 1000):
        compilation.forget()
        monkeypatch.setattr(member, "rows_at_once", lambda rows=rows: rows)
        plan = tn.Plan(1, 1)
        (data,) = placed((prepare(swarm, images),), plan, plan.rounds(len(swarm)))
        compiled = compilation.compiled(program.predict_rows, plan, plan.place(swarm), data)
        needs.append(memory.needs(compiled, plan).bytes)
    assert 3 * needs[0] < needs[1]


def test_a_loss_that_is_no_mean_of_its_rows_is_the_same_in_parts(monkeypatch):
    def spread(params, x, y, apply_fn):
        logits = apply_fn({"params": params}, x)
        return jnp.std(logits), logits

    monkeypatch.setattr(member, "ROWS", 7)
    losses = tn.evaluate(make(), X, Y, spread)
    expected = [np.std(np.asarray(MODEL.apply({"params": state.params}, X))) for state in make()]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("more", first(1, [{"validation": (X[:9], Y[:9]), "patience": 2}, {}]))
def test_a_swarm_of_numpy_arrays_is_fitted_and_scored_as_any_other(more):
    held = jax.tree.map(np.asarray, make())
    found, expected = train(held, **more)[0], train(make(), **more)[0]
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    results = [*jax.tree.leaves(found), tn.predict(held, X)]
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in results)
    np.testing.assert_array_equal(tn.predict(held, X), tn.predict(make(), X))
    np.testing.assert_array_equal(*[tn.evaluate(each, X, Y, tn.softmax_cross_entropy) for each in (held, make())])


def test_the_order_of_whole_batches_is_all_rows():
    order = tn.batch_order(make(2), 10, epochs=1)
    assert order.shape == (2, 1, 1, 10) and (np.sort(order, axis=-1) == np.arange(10)).all()
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        tn.batch_order(make(2), 10, epochs=1, batch_size=0)
