"""study.data_parallel.scaling: the frameworks train one network on the same rows; what fails ends all in a sentence."""

import signal
import sys
import threading
import time
from functools import cache

import jax
import numpy as np
import optax
import psutil
import pytest
from flax.traverse_util import flatten_dict
from tiers import first

import turbanet as tn
from study.data_parallel.scaling import launch
from study.data_parallel.scaling.job import Job, Result
from turbanet.data.sampling import deal

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 8, 8, 3)).astype(np.float32)
Y = RANDOM.integers(0, 10, 48)
MODEL = tn.networks.ResNet(8)
HERE = ["pytorch_ddp", "jax", "jax_processes"]


@cache
def variables():
    return jax.device_get(jax.jit(MODEL.init)(jax.random.key(0), X[:1]))


@jax.jit
def loss_and_gradient(params, stats, x, y):
    def loss(params):
        scores, _ = MODEL.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    return jax.value_and_grad(loss)(params)


def job(**how):
    """A job of ResNet-8 on small images."""
    weights = flatten_dict(variables(), sep="/")
    values = {"batch_size": 6, "steps": 5, "learning_rate": 0.05, "warm_up": 2, "depth": 8, "evaluate_every": 5} | how
    return Job(weights, X, Y, X[:20], Y[:20], **values)


def by_hand(workers, steps=5, rates=None, only=None):
    """Losses of plain JAX: in each step the workers' own gradients, by their own batches' statistics, averaged.

    only: the worker that trains a network of its own.
    """
    state = variables()
    params, stats = state["params"], state["batch_stats"]
    given = job(steps=steps)
    epochs = -(-steps * 6 * workers // 48) + 1
    order = deal(rows=48, workers=workers, epochs=epochs, batch_size=6).reshape(workers, -1, 6)

    pace, losses = jax.tree.map(np.zeros_like, params), []
    those = range(workers) if only is None else [only]
    for step, rate in enumerate(given.rates(workers) if rates is None else rates):
        each = [jax.device_get(loss_and_gradient(params, stats, X[order[w, step]], Y[order[w, step]])) for w in those]
        losses.append(np.mean([loss for loss, _ in each]))
        mean = jax.tree.map(lambda *grads: sum(grads) / len(those), *(grads for _, grads in each))
        pace = jax.tree.map(lambda p, g: 0.9 * p + g, pace, mean)
        params = jax.tree.map(lambda w, p, rate=rate: w - rate * p, params, pace)
    return np.array(losses)


@pytest.mark.parametrize(("name", "workers"), first(1, [*((name, 2) for name in HERE), ("pytorch_ddp", 1), ("jax", 1)]))
def test_every_framework_trains_as_plain_jax_by_hand(name, workers):
    found = launch.train(name, job(), workers=workers)
    expected = by_hand(workers)
    np.testing.assert_allclose(found.loss[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found.loss, expected, rtol=2e-2)
    assert (np.diff(found.seconds) > 0).all() and found.rows == 6 * workers and found.startup_seconds > 0
    assert found.accuracy.shape == (1,) and found.at.tolist() == [5] and 0 <= found.accuracy[0] <= 1


@pytest.mark.thorough
def test_gradients_of_half_the_bits_start_alike():
    found = launch.train("pytorch_ddp_fp16", job(), workers=2)
    expected = by_hand(2)
    np.testing.assert_allclose(found.loss[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found.loss, expected, rtol=5e-2)


@pytest.mark.thorough
def test_workers_that_send_nothing_train_networks_of_their_own():
    found = launch.train("pytorch_alone", job(), workers=2)
    own = np.full(5, 0.05)
    each = [by_hand(2, rates=own, only=worker) for worker in range(2)]
    np.testing.assert_allclose(found.loss, np.mean(each, axis=0), rtol=2e-2)


@pytest.fixture(scope="module")
def by_fit():
    """(the losses of two networks by `fit` [epoch], their mean accuracy)."""
    swarm = tn.TurbaTrainState.swarm(MODEL, optax.sgd(0.05, 0.9), 2, sample_input=X[:1], seed=0)
    swarm, history = tn.fit(swarm, X, Y, tn.softmax_cross_entropy, epochs=3, batch_size=6)
    return history.train_loss.mean(1), (np.asarray(tn.predict(swarm, X[:20])).argmax(-1) == Y[:20]).mean()


@pytest.mark.parametrize("name", first(1, ["swarm", "swarm_processes"]))
def test_a_swarm_trains_a_network_a_core(name, by_fit):
    found = launch.train(name, job(steps=24, evaluate_every=8), workers=2)
    assert found.loss.shape == (24,) and found.loss[-1] < found.loss[0]
    assert found.at.tolist() == [8, 16, 24] and found.accuracy.shape == (3,)
    assert (np.diff(found.seconds) > 0).all()
    losses, accuracy = by_fit
    np.testing.assert_allclose(found.loss[::8], losses, rtol=1e-3)
    np.testing.assert_allclose(found.accuracy[-1], accuracy, atol=0.05)


def test_a_swarm_is_scored_between_epochs():
    with pytest.raises(RuntimeError, match="A swarm is scored between epochs.*multiples of an epoch's 8 steps"):
        launch.train("swarm", job(steps=8, evaluate_every=4), workers=1)


def test_what_needs_an_environment_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setitem(launch.FRAMEWORKS, "mxnet", launch.Framework("mxnet", environment="nowhere"))
    assert launch.available(["jax", "mxnet"]) == ["jax"]
    assert capsys.readouterr().out == (
        "mxnet is not measured. There is no nowhere in build/peers: `make peers` builds it.\n"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (137, r"^Worker 1 of horovod_pytorch was ended by SIGKILL, and the others were stopped\.$"),
        (1, r"^Worker 1 of horovod_pytorch failed, and the others were stopped\. Its output:\nno room\nleft$"),
    ],
)
def test_of_a_worker_that_a_launcher_saw_fail_only_its_own_words_are_quoted(code, said, monkeypatch):
    lines = (
        "[1]<stderr>:no room",
        "[0]<stderr>:I was stopped",
        "[1]<stderr>:left",
        "Process name: 1",
        f"Exit code: {code}",
    )
    program = f"print({chr(10).join(lines)!r}); raise SystemExit(1)"
    monkeypatch.setattr(launch, "_commands", lambda *of: [[sys.executable, "-c", program]])
    with pytest.raises(RuntimeError, match=said):
        launch.train("horovod_pytorch", job(), workers=2)


def test_a_program_that_failed_before_anybody_looked_is_noticed(monkeypatch):
    begun = launch.subprocess.Popen

    def ended(*of, **kwargs):
        process = begun(*of, **kwargs)
        process.wait()
        return process

    monkeypatch.setattr(launch, "_commands", lambda *of: [[sys.executable, "-c", "raise SystemExit('no room')"]])
    monkeypatch.setattr(launch.subprocess, "Popen", ended)
    with pytest.raises(RuntimeError, match="Worker 0 of jax failed, and the others were stopped. Its output:\nno room"):
        launch.train("jax", job(), workers=2)


def test_learning_rates_grow_with_the_workers_after_a_warm_up():
    given = job(warm_up=4, steps=6)
    np.testing.assert_allclose(given.rates(1), np.full(6, 0.05))
    np.testing.assert_allclose(given.rates(3), 0.05 * np.array([1.5, 2, 2.5, 3, 3, 3]), rtol=1e-6)


def test_throughput_leaves_the_first_steps_out():
    seconds = np.array([10.0, 11, 12, 13, 14, 15])
    result = Result(seconds, seconds, np.array([0.2, 0.4]), np.array([3, 6]), 1.0, rows=30)
    np.testing.assert_allclose(result.throughputs(), [30.0] * 3)
    assert result.throughput() == 30.0 and result.seconds_to(0.3) == 15.0 and result.seconds_to(0.5) == np.inf


@pytest.mark.thorough
def test_a_sum_over_processes_is_timed():
    seconds = launch.all_reduce_seconds([10, 1000], workers=2, repeats=3)
    assert seconds.shape == (2, 3) and (seconds > 0).all()


def test_a_killed_program_is_named_and_the_others_end(monkeypatch):
    programs = ["import time; time.sleep(601)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    monkeypatch.setattr(launch, "_commands", lambda *of: [[sys.executable, "-c", program] for program in programs])
    with pytest.raises(RuntimeError, match=r"^Worker 1 of jax was ended by SIGKILL, and the others were stopped\.$"):
        launch.train("jax", job(), workers=2)
    left = psutil.Process().children(recursive=True)
    assert [process for process in left if programs[0] in process.cmdline()] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pytorch_ddp", "jax_processes"])
def test_a_killed_worker_ends_the_run_in_one_sentence(name):
    me = psutil.Process()
    before = set(me.children(recursive=True))
    killed = []

    def of_run():
        new = set(me.children(recursive=True)) - before
        return [process for process in new if str(launch.PROGRAMS) in " ".join(process.cmdline())]

    def kill():
        while not killed:
            busy = [process for process in of_run() if process.cpu_times().user > 3]
            if busy:
                busy[-1].send_signal(signal.SIGKILL)
                killed.append(time.monotonic())
            time.sleep(0.1)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RuntimeError, match=rf"^Worker \d of {name} was ended by SIGKILL, and the others") as error:
        launch.train(name, job(steps=100_000, evaluate_every=None), workers=2)
    assert time.monotonic() - killed[0] < 30 and "\n" not in str(error.value)
    assert of_run() == []


def test_a_failing_worker_is_quoted():
    with pytest.raises(RuntimeError, match=r"(?s)^Worker 0 of jax failed.*Its output:.*ResNet's depth is 6 n \+ 2"):
        launch.train("jax", job(depth=9), workers=1)


@pytest.mark.thorough
def test_a_loss_that_is_no_number_is_named():
    with pytest.raises(RuntimeError, match=r"The loss of worker \d is (nan|inf) at step \d, with learning rate 1e\+30"):
        launch.train("pytorch_ddp", job(learning_rate=1e30, warm_up=0), workers=1)


def test_what_cannot_be_started_is_said(monkeypatch):
    for start in (lambda name: launch.train(name, job(), workers=1), lambda name: launch.available([name])):
        with pytest.raises(ValueError, match="Unknown framework 'horovid'; known: pytorch_ddp"):
            start("horovid")
    with pytest.raises(ValueError, match="49 workers, 48 rows"):
        launch.train("jax", job(), workers=49)
    monkeypatch.setitem(launch.FRAMEWORKS, "mxnet", launch.Framework("mxnet", environment="nowhere"))
    with pytest.raises(FileNotFoundError, match="There is no nowhere in build/peers: `make peers` builds it"):
        launch.train("mxnet", job(), workers=1)
