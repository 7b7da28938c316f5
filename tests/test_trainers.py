"""The usual methods of training: each equals a plain Optax loop on the plain Flax model."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from study.baselines import processes, swarm_trainers, trainers
from study.baselines.twins import lstm_twin, mlp_twin, reinitialise
from turbanet import TurbaTrainState
from turbanet.loss import mse, softmax_cross_entropy
from turbanet.networks.models import LSTM, MLP

MEMBERS, ROWS, EPOCHS = 3, 24, 3
RATE = 0.01
TRAINERS = {
    "loop": partial(trainers.train_loop, threads=1),
    "fused": partial(trainers.train_loop, threads=1, fused=True),
    "func": partial(trainers.train_func, threads=1),
    "processes": partial(processes.train_processes, processes=2),
}
CASES = ["mlp", "mlp full batch", "mlp per member", "lstm", "lstm per member full batch"]


class Case:
    """One small job: a swarm's initial weights, data, order; and where a plain Optax loop ends with them."""

    def __init__(self, name):
        random = np.random.default_rng(0)
        lead = (MEMBERS,) if "per member" in name else ()
        if "mlp" in name:
            self.model, self.make_twin = MLP((8, 5, 4)), mlp_twin
            self.loss, self.loss_fn = "cross_entropy", softmax_cross_entropy
            self.x = random.normal(size=(*lead, ROWS, 6)).astype(np.float32)
            self.y = random.integers(0, 4, size=(*lead, ROWS)).astype(np.int32)
        else:
            self.model, self.make_twin = LSTM(hidden=5, outputs=2), lstm_twin
            self.loss, self.loss_fn = "mse", mse
            self.x = random.normal(size=(*lead, ROWS, 7, 3)).astype(np.float32)
            self.y = random.normal(size=(*lead, ROWS, 2)).astype(np.float32)
        self.per_member = bool(lead)
        self.order, self.epochs = None, 30
        if "full batch" not in name:
            self.order, self.epochs = random.integers(0, ROWS, size=(MEMBERS, EPOCHS, 10, 6)), EPOCHS
        sample = self.x[0] if lead else self.x
        self.swarm = TurbaTrainState.swarm(self.model, optax.adam(RATE), MEMBERS, sample_input=sample, seed=1)
        self.params = [self.swarm.get_state(i).params for i in range(MEMBERS)]
        self.apply, step = jax.jit(self.model.apply), self._step()
        alone = [self._optax(step, i) for i in range(MEMBERS)]
        self.losses = np.array([losses for losses, _ in alone]).T
        self.predictions = np.array([prediction for _, prediction in alone])

    def _step(self):
        def loss_of(params, x, y):
            out = self.model.apply({"params": params}, x)
            if self.loss == "mse":
                return jnp.mean((out - y) ** 2)
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

        @jax.jit
        def step(params, state, x, y):
            value, grads = jax.value_and_grad(loss_of)(params, x, y)
            updates, state = optax.adam(RATE).update(grads, state)
            return optax.apply_updates(params, updates), state, value

        return step

    def _optax(self, step, member):
        x, y = self.member(self.x, member), self.member(self.y, member)
        params, state = self.params[member], optax.adam(RATE).init(self.params[member])
        epochs = [[np.arange(ROWS)]] * self.epochs if self.order is None else self.order[member]
        losses = []
        for steps in epochs:
            values = []
            for rows in steps:
                params, state, value = step(params, state, x[rows], y[rows])
                values.append(float(value))
            losses.append(np.mean(values))
        return losses, self.apply({"params": params}, x)

    def member(self, data, member):
        return data[member] if self.per_member else data

    def twins(self):
        return [self.make_twin(params) for params in self.params]

    def how(self):
        return {"order": self.order, "epochs": self.epochs, "per_member": self.per_member}


make_case = cache(Case)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return make_case(request.param)


@pytest.fixture(scope="module")
def mlp():
    return make_case("mlp")


@pytest.fixture(scope="module")
def lstm():
    return make_case("lstm")


def arguments(case, **changed):
    return {"loss": case.loss, "learning_rate": RATE, **case.how(), **changed}


def test_twin_is_a_copy(mlp):
    params = jax.tree.map(np.array, mlp.params[0])  # NumPy's own memory, which PyTorch could share
    before = jax.tree.map(np.copy, params)
    trainers.train_loop([mlp_twin(params)] * MEMBERS, mlp.x, mlp.y, **arguments(mlp))
    jax.tree.map(np.testing.assert_array_equal, params, before)


def in_this_process(**_):
    """joblib.Parallel without its processes."""
    return lambda jobs: [work(*arguments, **how) for work, arguments, how in jobs]


APART = pytest.param("processes", True, marks=pytest.mark.thorough)  # `test_kfold` starts the same processes


@pytest.mark.parametrize(("method", "apart"), [*((name, False) for name in TRAINERS), APART])
def test_train_in_pytorch_equals_optax(case, method, apart, monkeypatch):
    if not apart:
        monkeypatch.setattr(processes.joblib, "Parallel", in_this_process)
    twins = case.twins()
    losses = TRAINERS[method](twins, case.x, case.y, **arguments(case))
    predictions = [trainers.torch_predict(t, case.member(case.x, i)) for i, t in enumerate(twins)]
    assert losses.dtype == np.float64
    np.testing.assert_allclose(losses, case.losses, rtol=1e-4)
    np.testing.assert_allclose(predictions, case.predictions, rtol=1e-3, atol=1e-4)


def test_train_steps_equals_optax(case):
    swarm, losses = swarm_trainers.train_steps(case.swarm, case.x, case.y, case.loss_fn, **case.how())
    x = case.x if case.per_member else np.broadcast_to(case.x, (MEMBERS, *case.x.shape))
    assert losses.dtype == np.float64
    np.testing.assert_allclose(losses, case.losses, rtol=1e-4)
    np.testing.assert_allclose(swarm.predict(x), case.predictions, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["loop", "func"])
def test_train_takes_one_hot_and_wide_types(mlp, method):
    one_hot = np.eye(4)[mlp.y]  # float64, as x below
    losses = TRAINERS[method](mlp.twins(), mlp.x.astype(np.float64), one_hot, **arguments(mlp))
    np.testing.assert_allclose(losses, mlp.losses, rtol=1e-4)


@pytest.mark.parametrize("method", ["loop", "func"])
def test_train_keeps_input_bias_at_zero(lstm, method):
    twins = [reinitialise(twin, seed=0) for twin in lstm.twins()]
    TRAINERS[method](twins, lstm.x, lstm.y, **arguments(lstm))
    assert all(not twin.lstm.bias_ih_l0.any() and twin.lstm.bias_hh_l0.any() for twin in twins)


def test_train_restores_threads(mlp, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    for train in (trainers.train_loop, trainers.train_func):
        train(mlp.twins(), mlp.x, mlp.y, **arguments(mlp), threads=1)
    assert calls == [1, 7, 1, 7]


def test_train_processes_gives_each_one_thread(mlp, monkeypatch):
    threads = []
    losses = np.zeros((EPOCHS, 1))
    monkeypatch.setattr(processes, "train_loop", lambda twins, **how: (threads.append(how["threads"]), losses)[1])
    monkeypatch.setattr(processes.joblib, "Parallel", in_this_process)
    processes.train_processes(mlp.twins(), mlp.x, mlp.y, **arguments(mlp), processes=8)
    assert threads == [1, 1, 1]


@pytest.mark.parametrize("method", TRAINERS)
def test_train_names_known_losses(mlp, method):
    with pytest.raises(ValueError, match="Unknown loss 'hinge'; known: cross_entropy, mse"):
        TRAINERS[method](mlp.twins(), mlp.x, mlp.y, **arguments(mlp, loss="hinge"))


BAD = {
    "order .* with 3 members and 3 epochs, got shape": {"order": np.zeros((2, EPOCHS, 1, 4), int)},
    "got shape .3, 2": {"order": np.zeros((MEMBERS, 2, 1, 4), int)},
    "got shape .3, 3, 4.": {"order": np.zeros((MEMBERS, EPOCHS, 4), int)},
    "names rows 0 to 24; there are 24 rows": {"order": np.full((MEMBERS, EPOCHS, 1, 2), (0, ROWS))},
    "names rows -1 to 0": {"order": np.full((MEMBERS, EPOCHS, 1, 2), (-1, 0))},
    "x has 24 members, y has 24, there are 3": {"per_member": True},
    "at least one network and one epoch": {"epochs": 0, "order": None},
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("method", [*TRAINERS, "steps"])
def test_train_refuses_what_does_not_fit(mlp, method, message):
    changed = BAD[message]
    with pytest.raises(ValueError, match=message):
        if method == "steps":
            swarm_trainers.train_steps(mlp.swarm, mlp.x, mlp.y, mlp.loss_fn, **{**mlp.how(), **changed})
        else:
            TRAINERS[method](mlp.twins(), mlp.x, mlp.y, **arguments(mlp, **changed))


def test_train_refuses_unequal_rows(mlp):
    with pytest.raises(ValueError, match="x has 24 rows, y has 23"):
        trainers.train_loop(mlp.twins(), mlp.x, mlp.y[1:], **arguments(mlp))


def test_best_threads_takes_the_fastest(monkeypatch):
    clock, slow_first = [0.0], {1: 9.0, 2: 5.0, 4: 9.0}
    seconds = {1: 3.0, 2: 2.0, 4: 4.0}

    def run(threads):
        clock[0] += seconds[threads] + slow_first.pop(threads, 0.0)

    monkeypatch.setattr(trainers.timing.time, "perf_counter", lambda: clock[0])
    assert trainers.best_threads(run, candidates=(1, 2, 4)) == 2


def test_best_threads_tries_powers_of_two_and_all_cores(monkeypatch):
    tried = []
    monkeypatch.setattr(trainers.joblib, "cpu_count", lambda: 6)
    trainers.best_threads(tried.append)
    assert sorted(set(tried)) == [1, 2, 4, 6]
