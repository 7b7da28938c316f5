"""The cluster's study: series decided by their ids, the usual methods learn what a swarm learns, a node that dies."""

import contextlib
import dataclasses
import os
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import psutil
import pytest

import turbanet as tn
from study.cluster import methods as cluster_methods, suite as cluster_suite
from study.cluster.methods import Forecaster

# Ray's own processes: forked and at once replaced, and ended by the operating system.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MARKET = {"days": 53, "window": 5, "seed": 3}  # 48 windows, of which 8 are forecast
RATE = {"learning_rate": 0.01}
MAKE = partial(cluster_suite.networks, hidden=4, window=5, seed=0, **RATE)
DATA = partial(cluster_suite.series, test_days=8, **MARKET)
HOW = {"batch_size": 10, "plan": tn.Plan(1, block=2)}


def test_returns_are_an_autoregression_of_their_ids_noise():
    found = cluster_suite.returns([4, 9], days=6, seed=3)
    for id, own in zip([4, 9], found, strict=True):
        random = np.random.default_rng([3, id])
        echo, noise = random.uniform(-0.6, 0.6), random.normal(size=6)
        expected = [noise[0] / np.sqrt(1 - echo**2)]
        for each in noise[1:]:
            expected.append(echo * expected[-1] + each)
        np.testing.assert_allclose(own, expected, rtol=1e-6)


def test_returns_of_an_id_are_its_own_whoever_is_beside_it():
    alone = cluster_suite.returns([7], days=30, seed=0)[0]
    assert np.array_equal(cluster_suite.returns([2, 7, 1], days=30, seed=0)[1], alone)
    assert not np.array_equal(cluster_suite.returns([7], days=30, seed=1)[0], alone)


def test_series_are_windows_and_the_day_after_them_with_the_last_days_apart():
    values = cluster_suite.returns([0, 1], days=53, seed=3)
    parts = DATA([0, 1])
    assert parts["x"].shape == (2, 40, 5, 1) and parts["predict"].shape == (2, 8, 5, 1)
    assert np.array_equal(parts["x"][1, 7, :, 0], values[1, 7:12])
    assert parts["y"][1, 7, 0] == values[1, 12]
    assert np.array_equal(parts["predict"][0, -1, :, 0], values[0, -6:-1])


def test_errors_are_of_the_last_days():
    values = cluster_suite.returns([0, 1], days=53, seed=3)
    truth = values[:, -8:]
    found = cluster_suite.errors(truth[..., None] + 0.5, [0, 1], **MARKET)
    np.testing.assert_allclose(found["LSTM"], [0.25, 0.25], rtol=1e-6)
    np.testing.assert_allclose(found["zero"], (truth**2).mean(1), rtol=1e-6)
    np.testing.assert_allclose(found["persistence"], (np.diff(values)[:, -8:] ** 2).mean(1), rtol=1e-5)


def test_a_forecaster_is_our_lstm_in_plain_flax():
    params = MAKE([5]).get_state(0).params
    x = DATA([5])["predict"][0]
    theirs = Forecaster(4).apply({"params": params}, x)
    np.testing.assert_allclose(theirs, tn.LSTM(4).apply({"params": params}, x), rtol=1e-5, atol=1e-6)


def test_usual_methods_learn_what_a_swarm_learns():
    ids = np.array([6, 1, 3])
    swarm, history = tn.fit(MAKE(ids), DATA(ids)["x"], DATA(ids)["y"], tn.mse, epochs=2, per_member=True, **HOW)
    _, _, predictions = cluster_suite.one_process(MAKE, DATA, ids, epochs=2, **HOW)
    own = cluster_methods.jobs(MAKE, DATA, ids, epochs=2, batch_size=10)
    methods = [cluster_methods.trained_alone(job, hidden=4, **RATE) for job in own]
    for found in (methods, [cluster_methods.trained_by_pytorch(job, **RATE) for job in own]):
        losses, forecasts = cluster_methods._stacked(found)
        np.testing.assert_allclose(losses.reshape(3, 2, 4).mean(2).T, history.train_loss, rtol=1e-4)
        np.testing.assert_allclose(forecasts, predictions, rtol=1e-4, atol=1e-5)
    assert np.array_equal(predictions, tn.predict(swarm, DATA(ids)["predict"], per_member=True))


def test_joblib_gives_each_network_back_in_its_place():
    own = cluster_methods.jobs(MAKE, DATA, np.arange(3), epochs=1, batch_size=10)
    losses, predictions = cluster_methods.by_joblib(own, processes=1, **RATE)
    one, forecast = cluster_methods.trained_by_pytorch(own[2], **RATE)
    assert np.array_equal(losses[2], one) and np.array_equal(predictions[2], forecast)
    assert losses.shape == (3, 4) and predictions.shape == (3, 8, 1)


def test_difference_is_the_largest_of_any_weight():
    one = MAKE([0, 1])
    first, *_ = jax.tree.leaves(one.params)
    params = jax.tree.map(lambda leaf: leaf + 0.25 * (leaf is first), one.params)
    assert cluster_suite.difference(one, one) == 0
    assert cluster_suite.difference(one, dataclasses.replace(one, params=params)) == pytest.approx(0.25)


def test_a_run_is_in_the_middle_once_shards_are_done_and_others_keep_checkpoints(tmp_path):
    for shard in "0123":
        (tmp_path / "shards" / shard / "training/0").mkdir(parents=True)
    (tmp_path / "shards/0/shard.json").touch()
    (tmp_path / "shards/1/training/2").mkdir()
    assert not cluster_suite._is_in_the_middle(tmp_path, 1, workers=2)
    (tmp_path / "shards/2/training/4").mkdir()
    assert cluster_suite._is_in_the_middle(tmp_path, 1, workers=2)
    assert not cluster_suite._is_in_the_middle(tmp_path, 2, workers=2)


def test_attempts_name_who_was_killed_and_until_when(tmp_path):
    table = pd.DataFrame({"shard": [0, 1, 2, 3], "process": [50, 60, 50, 70], "begin": [100.0, 101, 110, 125]})
    history = SimpleNamespace(table=table.assign(seconds=[10.0, 8, 20, 5]), folder=tmp_path)
    tries = {0: [100], 1: [101], 2: [110], 3: [109, 125]}
    for shard, begins in tries.items():
        folder = tmp_path / f"shards/{shard:06d}/attempts"
        folder.mkdir(parents=True)
        for begin in begins:
            (folder / str(begin)).touch()
            os.utime(folder / str(begin), (begin, begin))
    found = cluster_suite.attempts(history, killed_at=115.0)
    assert found.to_numpy().tolist() == [
        [0, 1, 0, 10, False],
        [1, 2, 1, 9, False],
        [3, 2, 9, 15, True],  # by the worker of shard 1, the only one that ended and began nothing after the kill
        [2, 1, 10, 30, False],
        [3, 3, 25, 30, False],
    ]


def test_a_run_that_ends_too_early_to_be_killed_says_so(tmp_path):
    there = SimpleNamespace(nodes=[1, 2], suspend_one=lambda condition: condition(), replace_one=pytest.fail)
    with pytest.raises(RuntimeError, match="The run ended before 3 shards were done"):
        cluster_suite.killed(there, lambda: None, tmp_path, done=3)
    with pytest.raises(OSError, match="the run's own"):
        cluster_suite.killed(there, (tmp_path / "the run's own").read_text, tmp_path, done=3)


def test_a_node_is_suspended_only_where_its_shard_is_still_under_way():
    nodes = cluster_suite.Nodes.__new__(cluster_suite.Nodes)
    nodes.suspended = []
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE))
        stack.callback(nodes._each_suspended, "kill")
        assert parent.stdout.read(1) == b"\n"
        nodes.nodes = [None, SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=parent)]})]
        (worker,) = nodes.suspended = psutil.Process(parent.pid).children()
        stops = partial(_is_within_a_second, lambda: worker.status() == psutil.STATUS_STOPPED)
        runs = partial(_is_within_a_second, lambda: worker.status() != psutil.STATUS_STOPPED)
        assert not nodes.suspend_one(lambda: False) and not stops()
        conditions = iter([lambda: True, lambda: not stops()])  # the shard ended meanwhile
        assert not nodes.suspend_one(lambda: next(conditions)()) and runs()
        assert nodes.suspend_one(lambda: True) and stops()


def _is_within_a_second(condition):
    return any(condition() or time.sleep(0.02) for _ in range(50))
