"""The model of many machines: every number here is worked out by hand."""

import pandas as pd
import pytest

from study.cluster.idle import INSTANT, SLEEP
from study.cluster.projection import Costs, beside_measured, projected, sleeping_seconds

COSTS = Costs(
    member_step_seconds=1e-4,
    shard_seconds=2.0,
    first_seconds=10.0,
    task_seconds=0.005,
    state_bytes=1000,
    data_bytes=400,
    checkpoint_bytes=50,
    kept_bytes=100,
    scores_seconds=1e-5,
    swarm_seconds=1e-4,
)
HOW = {"members": 10_000, "machines": [5], "cores": 2, "shard": 500, "steps": 1000, "checkpoints": 10}


def line(costs=COSTS, **how):
    return projected(costs, **HOW | how).iloc[0]


def test_each_part_is_its_number_times_its_cost():
    found = line(disk_bytes_per_second=1e6)
    assert (found.workers, found.shards, found.rounds) == (10, 20, 2)
    assert found.training_seconds == pytest.approx(100)  # 2 rounds of 500 members of 1000 steps of 1e-4 s
    assert (found.shard_seconds, found.first_seconds) == (4, 10)
    assert found.dispatch_seconds == pytest.approx(0.1)  # 20 shards of 5 ms
    assert found.disk_seconds == pytest.approx(10)  # 10 000 members of 400 + 10 * 50 + 100 bytes
    assert found.gather_seconds == pytest.approx(0.1)
    assert found.seconds == pytest.approx(114.1) and found.bottleneck == "training_seconds"


def test_the_last_round_counts_whole():
    assert line(members=10_500).training_seconds == pytest.approx(150)  # 21 shards on 10 workers: three rounds


def test_a_slow_disk_is_the_bottleneck_and_decides():
    found = line(disk_bytes_per_second=1e4)
    assert found.bottleneck == "disk_seconds"
    assert found.seconds == pytest.approx(1000 + 0.1)  # training goes on meanwhile, gathering does not


def test_a_slow_driver_is_the_bottleneck_and_decides():
    found = line(steps=1, shard=1)  # 10 000 shards of 5 ms; 1000 rounds of 2 s
    assert found.bottleneck == "shard_seconds" and found.seconds == pytest.approx(0.1 + 2000 + 10 + 0.1)
    found = projected(COSTS, **HOW | {"steps": 1, "shard": 1, "machines": [5000]}).iloc[0]
    assert found.bottleneck == "dispatch_seconds" and found.seconds == pytest.approx(50 + 0.1)


def test_weights_are_gathered_when_they_are_asked_for():
    assert line().driver_bytes == 0
    found = line(weights=True)
    assert found.driver_bytes == 10_000_000 and found.gather_seconds == pytest.approx(1.1)


def test_efficiency_is_the_training_alone_over_the_seconds_of_all_workers():
    found = line(disk_bytes_per_second=1e6)
    assert found.speedup == pytest.approx(1000 / 114.1)
    assert found.efficiency == pytest.approx(100 / 114.1)


def test_shards_are_those_that_cluster_fit_would_take():
    found = projected(COSTS, members=1_000_000, machines=[1, 100], cores=32)
    assert found["shard"].tolist() == [1024, 79]  # at most 1024; 1 000 000 over four times 3200 workers


def test_costs_are_read_from_their_table():
    table = pd.DataFrame({"cost": list(vars(COSTS)), "value": list(vars(COSTS).values()), "unit": "of each"})
    assert Costs.of(table) == COSTS
    with pytest.raises(TypeError, match="bandwidth"):
        Costs.of(pd.concat([table, pd.DataFrame({"cost": ["bandwidth"], "value": [1.0]})]))


@pytest.mark.parametrize(
    ("workers", "shards", "sleep", "seconds"),
    [
        (64, 2000, 2.0, 64 + 0.64),  # 32 rounds, of which the first begins in 0.64 s
        (4, 2, 2.0, 2 + 0.02),  # fewer shards than workers
        (64, 2000, 0.5, 20 + 0.5),  # the driver, 10 ms a shard, is slower than 32 rounds of half a second
    ],
)
def test_sleeping_shards_take_whole_rounds_or_the_drivers_time(workers, shards, sleep, seconds):
    how = {"workers": workers, "shards": shards, "sleep_seconds": sleep}
    assert sleeping_seconds(**how, task_seconds=0.01) == pytest.approx(seconds)


def test_a_prediction_takes_the_cost_of_a_task_from_as_many_workers():
    table = pd.DataFrame(
        [(SLEEP, 8, 80, 2.0, 21.0, 20.0, None), (INSTANT, 8, 500, 0, 5.0, 0, 0.01), (INSTANT, 2, 500, 0, 1, 0, 0.002)],
        columns=["kind", "workers", "shards", "sleep_seconds", "seconds", "ideal_seconds", "task_seconds"],
    )
    found = beside_measured(table).iloc[0]
    assert found.predicted_seconds == pytest.approx(20.08)
    assert found.above_ideal_percent == pytest.approx(5)
    assert found.above_predicted_percent == pytest.approx(100 * (21 / 20.08 - 1))
