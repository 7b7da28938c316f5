"""A swarm over a Ray cluster: the numbers of one machine, whatever dies; bad input stops before anything is trained."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import bucket
import jax
import joblib
import numpy as np
import optax
import pandas as pd
import psutil
import pytest
import torch
from flax import linen as nn
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from small_runs import (
    HOW,
    LONG,
    NEXT,
    RANDOM,
    SERIES,
    X,
    Y,
    classifiers,
    of_series,
    on_cluster,
    picky,
    regressors,
    waiting,
)
from tiers import first

import turbanet as tn
from turbanet.cluster import engine, folder, shards, validation as cluster_validation
from turbanet.cluster.driver import environment
from turbanet.ensembles.estimators import TurbaClassifier

# Ray's own processes: forked and at once replaced, and ended by the operating system.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SOURCE = Path(tn.__file__).parents[1]
PATHS = f"{Path(__file__).parent}{os.pathsep}{SOURCE}"  # where other processes find small_runs, and this turbanet
WARM = {"num_cpus": 1, "runtime_env": environment(1, 0)}  # of the workers that other tests have started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with a worker each, the driver's and one that may be killed."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATHS)
        patch.setenv(bucket.ROOT, str(tmp_path_factory.mktemp("buckets")))
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # workers of an environment that no shard takes
        keep = {"num_workers_soft_limit": 8}  # else Ray ends idle workers, and the next test waits for others
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": keep}
        cluster = engine.started(Cluster, initialize_head=True, head_node_args=head)
        add = cluster.add_node
        cluster.add_node = lambda **how: engine.started(add, **how)
        cluster.nodes = [cluster.head_node, cluster.add_node(num_cpus=1)]
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def alone(members, **how):
    """The same members trained on this machine."""
    return tn.fit(classifiers(range(members)), X, Y, tn.softmax_cross_entropy, **HOW | how, progress=False)[0]


def same(a, b):
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def begun(where):
    """The shards in a folder that have kept a checkpoint."""
    return {file.parts[-3] for file in where.glob("shards/*/training/*") if file.name.isdigit() and file.name != "0"}


@pytest.mark.parametrize(("members", "shard"), first(1, [(12, 4), (42, 6), (42, 42)]))
def test_any_number_of_shards_gives_the_bits_of_one_machine(cluster, tmp_path, members, shard):
    validation = {"validation": (X[:8], Y[:8]), "metric": tn.accuracy}
    results, history = on_cluster(tmp_path / "run", members=members, shard=shard, predict=X[:5], **validation)
    swarm = classifiers(range(members))
    here, seen = tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **HOW, **validation, progress=False)
    assert same(results.swarm(), here)
    assert np.array_equal(results.swarm().id, np.arange(members))
    scores = results.scores()
    assert np.array_equal(scores.train_loss, seen.train_loss[-1])
    assert np.array_equal(scores.validation_metric, seen.validation_metric[-1])
    pd.testing.assert_frame_equal(history.whole().best(), seen.best())
    losses = history.frame().pivot(index="epoch", columns="member", values="validation_loss")
    assert np.array_equal(losses, seen.validation_loss)
    assert np.array_equal(results.predictions(), tn.predict(here, X[:5]))
    assert history.table.members.tolist() == [shard] * (members // shard)


def test_every_members_own_data_may_be_given_or_read_by_the_worker(cluster, tmp_path):
    here, _ = tn.fit(regressors(range(8)), SERIES[:8], NEXT[:8], tn.mse, per_member=True, **HOW, progress=False)
    for name, data in {"given": of_series(np.arange(8)), "read": of_series}.items():
        results, _ = on_cluster(tmp_path / name, regressors, data, tn.mse, members=8, shard=4)
        assert same(results.swarm(), here)
        assert np.array_equal(results.predictions(), tn.predict(here, SERIES[:8, :4], per_member=True))


def test_rows_go_with_their_members(cluster, tmp_path):
    rows = np.asarray(tn.bootstrap(jax.random.key(0), members=8, rows=40))
    results, _ = on_cluster(tmp_path, members=8, shard=4, rows=rows)
    here, _ = tn.fit(classifiers(range(8)), X, Y, tn.softmax_cross_entropy, rows=rows, **HOW, progress=False)
    assert same(results.swarm(), here)


def test_constants_go_with_their_members(cluster, tmp_path):
    def scaled(params, x, y, apply_fn, *, member):
        return tn.mse(params, x, member["scale"] * y, apply_fn)

    job = {"member": {"scale": np.arange(8.0)}, "per_member": True}
    here, _ = tn.fit(regressors(range(8)), SERIES[:8], NEXT[:8], scaled, **HOW, **job, progress=False)
    results, _ = on_cluster(tmp_path / "run", regressors, (SERIES[:8], NEXT[:8]), scaled, members=8, shard=4, **job)
    assert same(results.swarm(), here)
    on_two = tn.cluster.Cluster(tmp_path / "kept", shard=4, progress=False)
    again, _ = on_two.fit(regressors(range(8)), SERIES[:8], NEXT[:8], scaled, **HOW, **job)
    for swarm in (results.swarm(), again):
        np.testing.assert_array_equal(swarm.member["scale"], np.arange(8))


def test_a_swarm_and_ids_of_ones_own_are_taken(cluster, tmp_path):
    swarm = classifiers([9, 3, 5, 4])
    results, _ = on_cluster(tmp_path, swarm, members=[9, 3, 5, 4], shard=2)
    here, _ = tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **HOW, progress=False)
    assert same(results.swarm(), here)
    assert results.scores().member.tolist() == [9, 3, 5, 4]


def test_the_same_call_again_trains_nothing_and_another_one_is_refused(cluster, tmp_path):
    first, _ = on_cluster(tmp_path, members=8, shard=4)
    again, history = on_cluster(tmp_path, members=8)  # in the shards that are there
    assert same(first.swarm(), again.swarm()) and history.table.resumed.all()
    with pytest.raises(ValueError, match="is of another run: make swarm was"):
        on_cluster(tmp_path, lambda ids: classifiers(ids), members=8, shard=4)
    with pytest.raises(ValueError, match="is of another run: fit arguments was"):
        on_cluster(tmp_path, members=8, shard=4, epochs=7)


def test_what_data_of_ids_reads_has_not_changed(cluster, tmp_path):
    np.save(tmp_path / "x.npy", X)

    def read(ids):
        return np.load(tmp_path / "x.npy"), Y

    on_cluster(tmp_path / "run", data=read, members=4, shard=4)
    np.save(tmp_path / "x.npy", 5 * X)
    with pytest.raises(ValueError, match="is of another run: first shards data was"):
        on_cluster(tmp_path / "run", data=read, members=4, shard=4)


def test_tensors_and_tables_are_data_too(cluster, tmp_path):
    for _ in range(2):  # the second time they are known again
        data = pd.DataFrame(X), torch.from_numpy(Y)
        results, history = on_cluster(tmp_path / "run", data=data, members=4, shard=4, validation=[X[:8], Y[:8]])
    assert same(results.swarm(), alone(4)) and history.table.resumed.all()


def test_a_shard_that_memory_kills_is_given_up(tmp_path):
    marker = folder.Marker(tmp_path)
    where = tn.Checkpoints(tmp_path)
    job = shards.Job(classifiers, None, None, {}, where, marker, cores=1, attempts=2)
    job.count(0)
    job.count(0)
    with pytest.raises(RuntimeError, match="Shard 0 was killed 2 times: give memory="):
        job.count(0)
    dataclasses.replace(job, marker=folder.Marker(tmp_path)).count(0)  # another call tries again


def test_a_shard_that_ray_runs_again_after_its_results_is_not_trained_again(tmp_path):
    """As when its node dies before the driver has read what it returned."""
    job = shards.Job(untouched, None, None, {}, tn.Checkpoints(tmp_path), folder.Marker(tmp_path), cores=1, attempts=2)
    job.folder(0).mkdir(parents=True)
    (job.folder(0) / shards.DONE).write_text('{"shard": 0, "seconds": 1.5}')
    assert shards.train(job, {}, 0, np.arange(4), None, []) == {"shard": 0, "seconds": 1.5}


def untouched(ids):
    raise AssertionError("it was made again")


def test_a_cluster_without_nodes_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(engine, "NODE_SECONDS", 0.1)
    cancelled = []

    def wait(waiting, **how):
        time.sleep(0.05)
        return [], waiting

    ray = SimpleNamespace(wait=wait, nodes=list, cancel=lambda reference, force: cancelled.append(reference))
    ray.remote = lambda **_: lambda task: SimpleNamespace(remote=lambda name: name)
    with pytest.raises(ConnectionError, match="No node has had room for a worker"):
        list(engine.run(ray, print, [("a", ("a",)), ("b", ("b",))], at_once=lambda unfit: 0))
    assert cancelled == ["a", "b"]


@pytest.mark.parametrize("patience", first(1, [None, 2]))
def test_a_swarm_at_an_address_is_kept_and_found_again(cluster, patience):
    how = {"members": 8, "shard": 4, "predict": X[:5], "validation": (X[:8], Y[:8]), "patience": patience}
    run = "run" + "-stops" * bool(patience)
    for _ in range(2):
        results, history = on_cluster(f"s3://bucket/{run}", **how)
    assert history.table.resumed.all()
    here = alone(8, validation=(X[:8], Y[:8]), patience=patience)
    assert same(results.swarm(), here)
    assert np.array_equal(results.predictions(), tn.predict(here, X[:5]))
    assert results.scores().member.tolist() == list(range(8))
    left = [file.name for file in Path(os.environ[bucket.ROOT]).glob(f"bucket/{run}/shards/*/*")]
    assert "training" not in left and left.count("shard.json") == 2


def test_what_an_attempt_leaves_half_written_is_not_read(cluster, tmp_path):
    on_cluster(tmp_path, members=4, shard=4)
    cut = tmp_path / "shards/000000/out-cut"
    cut.mkdir()
    (cut / "scores.parquet").write_text("cu")
    results, _ = on_cluster(tmp_path, members=4, shard=4)
    assert results.scores().member.tolist() == [0, 1, 2, 3]


def test_a_worker_may_have_several_cores(cluster, tmp_path):
    plan = tn.Plan(2, block=2)
    node = cluster.add_node(num_cpus=2)
    try:
        results, _ = on_cluster(tmp_path, members=4, shard=4, cpus=2, plan=plan)
    finally:
        cluster.remove_node(node)
    assert same(results.swarm(), alone(4, plan=plan))


@pytest.mark.thorough  # on a node that really joins; the next two tests need none
def test_a_node_that_joins_is_left_out_where_unfit(cluster, tmp_path, caplog):
    ray = __import__("ray")
    unfit = tmp_path / "unfit"
    jobs = ((number, (2, unfit if number else None)) for number in range(12))
    with contextlib.closing(engine.run(ray, picky, jobs, at_once=lambda unfit: 3, **WARM)) as ran:
        came = [next(ran)]
        node = cluster.add_node(num_cpus=2)
        try:
            came += ran
        finally:
            cluster.remove_node(node)
    assert sorted(name for name, _ in came) == list(range(12))
    assert {where for _, where in came} == {each.node_id for each in cluster.nodes}
    assert "This node is bad. It gets no more shards." in caplog.text


def test_every_unfit_node_is_left_out(caplog):
    answers = iter(["done", engine.Unfit("a", "It is old."), engine.Unfit("b", "It is slow."), "done"])
    selectors = []

    def options(label_selector):  # what has options has no more of them, as in Ray
        selectors.append(label_selector["ray.io/node-id"])
        return SimpleNamespace(remote=lambda *_: object())

    ray = SimpleNamespace(nodes=lambda: [{"NodeID": "a"}], get=lambda _: next(answers), cancel=None)
    ray.wait = lambda waiting, num_returns, timeout: (waiting[:1], waiting[1:])
    ray.remote = lambda **_: lambda task: SimpleNamespace(remote=lambda *_: object(), options=options)
    ray.exceptions = SimpleNamespace(RayError=RuntimeError)
    came = list(engine.run(ray, print, [("x", ()), ("y", ())], at_once=lambda unfit: 1))
    assert sorted(came) == [("x", "done"), ("y", "done")]
    assert selectors == ["!in(a)", "!in(a,b)"]
    assert "It is slow. It gets no more shards." in caplog.text


def test_a_node_that_cannot_work_from_the_beginning_stops_the_run(cluster):
    with pytest.raises(RuntimeError, match=r"This node is bad\."):
        list(engine.run(__import__("ray"), picky, [(0, (1,))], at_once=lambda unfit: 2, **WARM))


def test_a_cluster_trains_in_fits_place(cluster, tmp_path):
    there = tn.cluster.Cluster(tmp_path, shard=5, progress=False)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.adam(0.01), 8, input_size=3, seed=[3, 1] * 4)
    swarm = swarm.replace(id=jax.numpy.repeat(jax.numpy.arange(4), 2))  # of two seeds, so that each id comes twice
    how = {"metric": {"right": tn.accuracy, "again": tn.accuracy}, "patience": 1, "validation": (X[:9], Y[:9])}
    for _ in range(2):
        trained, history = there.fit(swarm, X, Y, tn.softmax_cross_entropy, **HOW | how, progress=False)
    here, seen = tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **HOW | how, progress=False)
    assert same(trained, here)
    for name in ("train_loss", "validation_loss", "seed", "member", "epochs"):
        assert np.array_equal(getattr(history, name), getattr(seen, name), equal_nan=True), name
    assert list(history.validation_metric) == ["right", "again"]
    assert np.array_equal(history.validation_metric["right"], seen.validation_metric["right"], equal_nan=True)
    there.fit(trained, X, Y, tn.softmax_cross_entropy, **HOW)  # another training, in a folder of its own
    there.fit(trained, torch.from_numpy(X), pd.Series(Y), tn.softmax_cross_entropy, **HOW)  # the same, in the same one
    assert len(list(tmp_path.iterdir())) == 2


def test_scores_are_in_the_order_of_the_members():
    losses = np.arange(12, dtype=np.float32).reshape(4, 3)  # [epoch, member]
    history = tn.fit(classifiers(range(3)), X, Y, tn.softmax_cross_entropy, epochs=4, progress=False)[1]
    history = dataclasses.replace(history, train_loss=losses, epochs=np.array([4, 2, 3]))
    scores = shards.scores(history)
    assert scores.member.tolist() == [0, 1, 2]
    assert scores.train_loss.tolist() == [9, 4, 8]


def test_cross_validate_and_halving_train_on_a_cluster(cluster, tmp_path):
    there = tn.cluster.Cluster(tmp_path, shard=4, progress=False)
    how = {"optimizer": optax.adam(0.01), "loss": tn.softmax_cross_entropy, "epochs": 3, "folds": 3, "seeds": 2}
    how |= {"metric": lambda prediction, y: float(np.mean(prediction)), "scoring": "f1"}
    found = [tn.cross_validate(tn.MLP((8, 2)), X, Y, **how, plan=HOW["plan"], cluster=c) for c in (there, None)]
    pd.testing.assert_frame_equal(*(each.table.drop(columns="seconds") for each in found))
    np.testing.assert_allclose(*(each.predictions["mlp"] for each in found), atol=1e-6)  # some folds are a row longer

    def rung(fit):
        def train(swarm, rung):
            swarm, history = fit(swarm, X, Y, tn.softmax_cross_entropy, **HOW, progress=False)
            return swarm, history.train_loss[-1]

        return train

    _, table = tn.halving(classifiers(range(8)), rung(there.fit), rungs=2)
    _, expected = tn.halving(classifiers(range(8)), rung(tn.fit), rungs=2)
    pd.testing.assert_frame_equal(table, expected)
    with pytest.raises(ValueError, match="leave checkpoints out"):
        tn.cross_validate(tn.MLP((8, 2)), X, Y, **how, cluster=there, checkpoints=tmp_path / "other")


ESTIMATOR = {"members": 4, "hidden": (8,), "epochs": 3, "random_state": 0, "plan": HOW["plan"]}


def test_an_estimator_trains_on_a_cluster(cluster, tmp_path):
    there = TurbaClassifier(**ESTIMATOR, cluster=tn.cluster.Cluster(tmp_path, shard=2, progress=False)).fit(X, Y)
    assert np.array_equal(there.predict_proba(X), TurbaClassifier(**ESTIMATOR).fit(X, Y).predict_proba(X))
    assert clone(there).fit(X, Y).history_.train_loss.shape == (3, 4)


@pytest.mark.thorough  # as under joblib's own processes in test_estimators
def test_an_estimator_trains_under_joblibs_ray(cluster):
    from ray.util.joblib import register_ray

    alone = TurbaClassifier(**ESTIMATOR)
    expected = cross_val_score(alone, X, Y, cv=2)
    register_ray()
    with joblib.parallel_config("ray", n_jobs=2):
        assert np.array_equal(cross_val_score(alone, X, Y, cv=2), expected)


def test_who_fails_at_every_attempt_is_named_and_the_others_finish(cluster, tmp_path):
    def data(ids):
        if 5 in ids:
            raise OSError("the disk of member 5 is gone")
        return X, Y

    with pytest.raises(
        tn.cluster.ShardsFailed, match="Shard 1, members 4 to 7, failed at every attempt.*the disk of member 5"
    ):
        on_cluster(tmp_path, data=data, members=12, shard=4)
    with pytest.raises(tn.cluster.ShardsFailed) as failed:
        on_cluster(tmp_path, data=data, members=12, shard=4, attempts=1)
    ((ids, told),) = failed.value.failures.values()
    assert ids.tolist() == [4, 5, 6, 7] and "in data\n    raise OSError" in told
    assert failed.value.results.scores().member.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def locked(lock):
    def loss(params, x, y, apply_fn):
        with lock:
            return tn.softmax_cross_entropy(params, x, y, apply_fn)

    return loss


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"epoch": 3}, TypeError, "hands on to fit .* it got epoch"),
        ({"callbacks": [print]}, TypeError, "hands on to fit .* it got callbacks"),
        ({"shard": 13}, ValueError, "A shard of 13 members is more than the 12"),
        ({"shard": 0}, ValueError, "shard must be a whole number of at least 1"),
        ({"attempts": 0}, ValueError, "attempts must be a whole number of at least 1"),
        ({"members": 0}, ValueError, "members must be a whole number of at least 1"),
        ({"members": [1, 1]}, ValueError, "ids that differ"),
        ({"members": [2**32 + 5]}, ValueError, "from 0 to 2147483646"),
        ({"data": X}, ValueError, r"data must be \(x, y\)"),
        ({"data": {"x": X}}, ValueError, "data holds no y"),
        ({"data": {"x": X, "y": Y, "row": Y}}, ValueError, "holds row too"),
        ({"data": (X, Y + 7)}, ValueError, "must hold a class from 0 to 1"),
        ({"data": lambda ids: (X, Y), "rows": Y}, ValueError, r"data\(ids\) came with rows"),
        ({"make": lambda ids: classifiers(ids + 1)}, ValueError, "must make the members of those ids"),
        ({"make": lambda ids: 3}, ValueError, "must make a TurbaTrainState"),
        ({"make": lambda ids: classifiers(len(ids))}, ValueError, r"those ids, got \[0\] for the ids \[11\]"),
        ({"make": tn.MLP((2,))}, ValueError, "make_swarm is a swarm, or a function of ids, .*; got MLP"),
        ({"make": tn.MLP}, ValueError, "make_swarm is a swarm, or a function of ids, .*; got MLP"),
        ({"make": 12}, ValueError, "make_swarm is a swarm, or a function of ids, .*; got int"),
        ({"gpus": "1"}, ValueError, "gpus must be a number of at least 0, .* got '1'"),
        ({"gpus": -1}, ValueError, "gpus must be a number of at least 0, .* got -1"),
        ({"loss": locked(threading.Lock())}, ValueError, "loss_fn cannot be sent to workers"),
        ({"cpus": 64}, ValueError, "needs 64 CPUs of at most 1"),
        ({"memory": 2**50}, ValueError, "GiB of at most"),
        ({"address": "127.0.0.1:9"}, ValueError, "is connected to Ray at"),
        ({"epochs": 0}, ValueError, "epochs must be a whole number of at least 1"),
        ({"batch_size": -3}, ValueError, "batch_size must be a whole number"),
        ({"patience": 2}, ValueError, "follow the validation loss: give validation"),
        ({"metric": tn.accuracy}, ValueError, "came without validation"),
        ({"plan": 7}, ValueError, "plan must be a Plan"),
        ({"cpus": 0}, ValueError, "cpus must be a number above 0"),
        ({"memory": "1GB"}, ValueError, "memory must be a number above 0, .* got '1GB'"),
        ({"predict": X[:, :2]}, ValueError, "The model cannot take predict's x with rows of shape"),
        ({"swarm": range(3)}, ValueError, r"members is 12, make_swarm is of shape \(3,\)"),
        ({"swarm": range(12), "members": [3, 40, 5, 6]}, KeyError, "No member 40 in this swarm"),
    ],
)
def test_bad_input_stops_before_anything_is_trained(cluster, tmp_path, wrong, error, sentence):
    if "swarm" in wrong:  # made here, not where tests are collected
        wrong = {"make": classifiers(wrong.pop("swarm"))} | wrong
    with pytest.raises(error, match=sentence):
        on_cluster(tmp_path / "run", **{"members": 12, "shard": 4} | wrong)
    assert not (tmp_path / "run" / "shards").exists()


def test_a_model_is_no_swarm_of_a_cluster(tmp_path):
    with pytest.raises(ValueError, match="The swarm is a TurbaTrainState; got MLP"):
        tn.cluster.Cluster(tmp_path).fit(tn.MLP((2,)), X, Y, tn.mse, epochs=1)


def test_several_predictions_are_refused_before_a_shard_is_trained():
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x), nn.Dense(2)(x)

    def loss(params, x, y, apply_fn):
        return tn.softmax_cross_entropy(params, x, y, lambda *inputs: apply_fn(*inputs)[0])

    swarm = tn.TurbaTrainState.swarm(Heads(), optax.sgd(0.1), 2, input_size=3)
    data = {"x": X, "y": Y}
    assert cluster_validation.check_shard(swarm, data, loss, {"epochs": 1}) == ("train_loss", "min", 0.0)
    with pytest.raises(ValueError, match="The model predicts several arrays; predict= stores one"):
        cluster_validation.check_shard(swarm, data | {"predict": X}, loss, {"epochs": 1})


def test_a_plan_is_of_as_many_devices_as_a_worker_has(cluster, tmp_path):
    with pytest.raises(ValueError, match="is for 2 devices, a worker has 1: take Plan"):
        on_cluster(tmp_path, members=8, shard=4, plan=tn.Plan(2, block=2))


def test_a_folder_that_is_not_shared_and_other_versions_are_noticed(tmp_path):
    marker = folder.Marker(str(tmp_path))
    assert marker.wrong() is None
    marker.versions = marker.versions | {"jax": "0.1"}
    assert "has other versions than the driver: jax was 0.1 and is" in marker.wrong()
    marker = folder.Marker(str(tmp_path))
    marker.remove()
    assert "is not shared: " in marker.wrong()


def test_a_run_whose_nodes_do_not_see_the_folder_stops(cluster, tmp_path, monkeypatch):
    made = folder.Marker.__init__
    monkeypatch.setattr(folder.Marker, "__init__", lambda self, where: made(self, where) or self.remove())
    with pytest.raises(RuntimeError, match="is not shared: .* does not see it"):
        on_cluster(tmp_path, members=4, shard=4)
    assert not list(tmp_path.glob("shards/*/shard.json"))


def test_a_folder_with_other_things_is_left_alone(cluster, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other things"):
        on_cluster(tmp_path, members=12, shard=4)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"This needs ray: pip install '.\[cluster\]'"):
        engine.connected(None).__enter__()


def test_a_start_that_failed_leaves_no_process_and_is_tried_again(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(engine, "LOOK_SECONDS", 0)
    begun = []

    def start(*, num_cpus):
        program = [sys.executable, "-c", "import time; time.sleep(600)", ray.__file__]  # as the raylet's names it
        begun.append(subprocess.Popen(program))
        while not psutil.Process(begun[-1].pid).cmdline():  # empty for an instant, as the program begins
            time.sleep(0.001)
        if len(begun) < 3:
            raise Exception("The current node timed out during startup.")
        return num_cpus

    assert engine.started(start, num_cpus=5) == 5
    assert [one.poll() is None for one in begun] == [False, False, True]
    begun[-1].kill()
    begun[-1].wait()


def test_a_start_is_not_tried_without_end(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(engine, "LOOK_SECONDS", 0)
    monkeypatch.setattr(engine, "START_SECONDS", 0.1)
    with pytest.raises(ConnectionError, match=r"tried \d+ times in 0 s \(it timed out\): call again"):
        engine.started(lambda: (_ for _ in ()).throw(Exception("it timed out")))
    with pytest.raises(ValueError, match="no such option"):
        engine.started(lambda: (_ for _ in ()).throw(ValueError("no such option")))


def test_a_cluster_that_does_not_answer_is_not_waited_for():
    pytest.importorskip("ray")
    with pytest.raises(ConnectionError, match="No Ray cluster answers at 127.0.0.1:9 .*ray start"):
        engine._check_answers("127.0.0.1:9")


def test_a_port_that_is_not_rays_is_not_waited_for(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(engine, "WAIT_SECONDS", 0.2)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(ConnectionError, match="No Ray cluster answers at"):
        engine._check_answers(f"127.0.0.1:{silent.getsockname()[1]}")


def test_the_port_of_a_cluster_answers(cluster):
    engine._check_answers(cluster.address)


def test_predictions_come_back_as_they_were(tmp_path):
    values = RANDOM.normal(size=(3, 4, 2)).astype(np.float32)
    for each in (values, values > 0, values.astype(jax.numpy.bfloat16)):
        shards._keep_predictions(each, tmp_path / "some.npy")
        assert np.array_equal(shards.kept_predictions(tmp_path / "some.npy"), each)


def test_a_killed_node_costs_what_came_after_its_last_checkpoint(cluster, tmp_path):
    with ThreadPoolExecutor() as pool:  # as Ray's test cluster is changed by the main thread alone
        run = pool.submit(on_cluster, tmp_path / "run", loss=waiting(tmp_path / "killed"), **LONG)
        while not run.done() and len(begun(tmp_path / "run")) < 2:
            time.sleep(0.1)
        assert not run.done()
        node = cluster.nodes.pop()
        workers = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
        cluster.remove_node(node, allow_graceful=False)
        assert psutil.wait_procs(workers, timeout=60)[1] == []  # else its shard may end after all
        (tmp_path / "killed").touch()
        results, history = run.result()
    assert same(results.swarm(), alone(8, epochs=20, segment=4))
    assert sorted(history.table.attempts) == [1, 2]
    assert history.table.resumed_at.max() >= 4


DRIVER = """
import pathlib, sys, small_runs as here
run, file = map(pathlib.Path, sys.argv[1:])
here.on_cluster(run, loss=here.waiting(file), **here.LONG | {"members": 4})
"""


def test_ctrl_c_leaves_nothing_running_and_the_same_call_goes_on(cluster, tmp_path):
    how = {"env": os.environ | {"PYTHONPATH": PATHS}, "stderr": subprocess.PIPE, "text": True}
    call = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), str(tmp_path / "gone on")]
    driver = subprocess.Popen(call, **how, start_new_session=True)  # with a Ray of its own, that ends with it
    while driver.poll() is None and not begun(tmp_path / "run"):
        time.sleep(0.1)
    assert driver.poll() is None, driver.communicate()[1][-2000:]
    rays = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGINT)
    _, told = driver.communicate(timeout=180)
    assert driver.returncode != 0 and "KeyboardInterrupt" in told
    assert len(rays) > 3 and psutil.wait_procs(rays, timeout=60)[1] == []
    (tmp_path / "gone on").touch()
    results, history = on_cluster(tmp_path / "run", loss=waiting(tmp_path / "gone on"), **LONG | {"members": 4})
    assert history.table.resumed_at.max() >= 4
    assert same(results.swarm(), alone(4, epochs=20, segment=4))
