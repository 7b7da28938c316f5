"""study.data_parallel.scaling.suite: what is measured is what its tables say, with trainings made up."""

import numpy as np
import pandas as pd
import pytest

from study.data_parallel.scaling import launch, suite
from study.data_parallel.scaling.job import Job, Result

ROWS = 640
WEIGHTS = {"params/a": np.zeros((2, 3), np.float32), "batch_stats/a": np.zeros(7, np.float32)}


@pytest.fixture
def trained(monkeypatch):
    """Trainings that were asked for: a step takes a second, the k-th score is 0.1 k; there is no MXNet."""
    asked = []

    def cifar10_job(test_rows=1, **how):
        x = np.zeros((ROWS, 1), np.float32)
        return Job(WEIGHTS, x, np.zeros(ROWS, int), x[:test_rows], None, **({"learning_rate": 0.02} | how))

    def train(name, job, workers):
        if name == "mxnet":
            raise FileNotFoundError("There is no mxnet in build/peers: `make peers` builds it.")
        asked.append((name, workers, job))
        seconds = np.arange(1.0, job.steps + 1)
        accuracy = 0.1 * np.arange(1, len(job.evaluated) + 1)
        return Result(seconds, np.full(job.steps, 2.3), accuracy, job.evaluated, 4.0, job.batch_size * workers)

    monkeypatch.setattr(suite, "cifar10_job", cifar10_job)
    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(suite.joblib, "cpu_count", lambda: 2)
    return asked


def test_throughput_has_every_framework_that_is_there_at_each_number_of_workers(trained, capsys):
    found = suite.throughput(repeats=2)
    assert set(found.framework) == launch.FRAMEWORKS.keys() - {"mxnet"}
    assert found.groupby(["framework", "workers", "batch_size", "repeat"]).part.count().unique().tolist() == [4]
    second = found[(found.repeat == 1) & (found.part == 3)].set_index("framework")
    second = second[["workers", "batch_size", "images_per_second"]]
    weak, strong = [[1, 32, 32], [2, 32, 64], [4, 32, 128]], [[1, 64, 64], [4, 16, 64]]
    assert second.loc["jax"].values.tolist() == sorted(weak + strong)
    assert second.loc["keras"].values.tolist() == weak
    assert (found.oversubscribed == (found.workers == 4)).all()
    assert "mxnet, 1 workers: There is no mxnet in build/peers" in capsys.readouterr().err


def measured(**losses):
    """A table of throughput: 100 images per second at one worker of 8 rows, 110 of 16, 150 to 170 at two of 8."""
    cases = [(1, 8, 0, 100.0), (1, 16, 0, 110.0), (2, 8, 0, 150.0), (2, 8, 1, 160.0), (2, 8, 2, 170.0)]
    lines = [
        (name, workers, size, workers > 1, part, rate, 2.0, loss)
        for name, loss in losses.items()
        for workers, size, part, rate in cases
    ]
    columns = ["framework", "workers", "batch_size", "oversubscribed", "part", "images_per_second"]
    return pd.DataFrame(lines, columns=[*columns, "startup_seconds", "first_loss"])


def test_weak_scaling_compares_equal_batches_and_strong_scaling_equal_steps():
    weak = suite.compared(measured(jax=2.3), batch_size=8).set_index("workers")
    assert weak["images per second"].tolist() == [100, 160] and weak["speed-up"].tolist() == [1, 1.6]
    assert weak.efficiency.tolist() == [1, 0.8] and weak["rows per step"].tolist() == [8, 16]
    assert weak.loc[2, ["low", "high", "startup (s)", "oversubscribed"]].tolist() == [150, 170, 2, True]
    strong = suite.compared(measured(jax=2.3), rows=16).set_index("workers")
    assert strong["speed-up"].tolist() == pytest.approx([1, 160 / 110])


def test_frameworks_begin_with_the_same_loss():
    suite.compared(measured(pytorch_ddp=2.3, keras=2.31, swarm=9.0), batch_size=8)
    with pytest.raises(AssertionError, match="With 1 workers of 8 rows jax begins at another loss than pytorch_ddp's"):
        suite.compared(measured(pytorch_ddp=2.3, jax=2.31), batch_size=8)


def test_accuracy_is_measured_as_often_of_each_and_knows_the_rows_that_a_network_saw(trained):
    found = suite.accuracy(epochs=3, evaluations=6)
    own = found.set_index(["framework", "workers", "batch_size"]).sort_index()
    ddp = own.loc["jax", 2, 32]
    assert ddp.steps.tolist() == [5, 10, 15, 20, 25, 30] and ddp.rows_seen.tolist() == (64 * ddp.steps).tolist()
    swarm = own.loc["swarm", 2, 32]
    assert swarm.steps.tolist() == [20, 40, 60] and swarm.rows_seen.tolist() == [640, 1280, 1920]
    assert (swarm.networks == 2).all() and (ddp.networks == 1).all()
    assert ddp.accuracy.tolist() == pytest.approx(0.1 * np.arange(1, 7)) and ddp.seconds.tolist() == ddp.steps.tolist()
    others = {case[1:] for case in own.index if case[0] == "pytorch_ddp"}
    assert others == {(2, 32), (1, 32), (4, 32), (2, 16), (2, 64), (2, 128)}
    assert not {name for name, *_ in own.index} & {*suite.TWICE, "mxnet"}


def test_the_learning_rate_is_in_proportion_to_the_rows_of_a_step(trained):
    suite.accuracy(counts=(4,), batch_sizes=(64,), warm_up=1)
    last = {name: job.rates(count)[-1] / (job.batch_size * count) for name, count, job in trained if name != "swarm"}
    np.testing.assert_allclose(list(last.values()), 0.02 / 32, rtol=1e-6)


def test_depths_are_measured_with_sums_and_without(trained):
    found = suite.depths(depths=(8, 14), workers=(1, 2), steps=5)
    assert found[["depth", "framework", "workers"]].values.tolist() == [
        [depth, name, count] for depth in (8, 14) for name in ("pytorch_ddp", "pytorch_alone") for count in (1, 2)
    ]
    assert (found.gradient_bytes == 24).all() and found.images_per_second.tolist() == [32, 64] * 4


def test_sums_have_a_line_for_each_size_and_repeat(monkeypatch):
    monkeypatch.setattr(launch, "all_reduce_seconds", lambda sizes, workers, repeats: np.array([[1.0, 2], [3, 4]]))
    found = suite.sums(sizes=(10, 20), repeats=2)
    assert found.values.tolist() == [[40, 2, 0, 1], [40, 2, 1, 2], [80, 2, 0, 3], [80, 2, 1, 4]]
