"""What a cluster costs: data are each member's own, methods are compared by weights, every part makes its table."""

import inspect

import numpy as np
import pytest

from study import peers
from study.cluster import costs as cluster_costs, idle, projection, runs as cluster_runs

pytest.importorskip("ray")


def test_rows_are_of_their_ids_alone():
    data = cluster_runs.few_rows(np.array([9]))
    assert data["x"][0, 0].tolist() == pytest.approx([2, 2 + 1 / 24, 2 + 2 / 24])  # 9 is 2 beyond 7
    assert data["y"][0, 0, 0] == pytest.approx(6.125)


def test_a_difference_is_of_a_members_weights():
    theirs = {"kernel": np.array([[[3.0], [0.0]], [[3.0], [0.0]]]), "bias": np.array([[4.0], [4.0]])}  # norms of 5
    ours = {"kernel": theirs["kernel"], "bias": np.array([[4.0], [4.5]])}
    assert cluster_costs._differences(ours, theirs).tolist() == pytest.approx([0, 0.1])
    with pytest.raises(AssertionError, match="is not"):
        cluster_costs._differences({"kernel": ours["kernel"]}, theirs)


def test_other_weights_end_the_comparison(monkeypatch):
    def apart(name, *, folder, members, **size):
        np.savez(f"{folder}/weights.npz", kernel=np.full((members, 2), 1.0 + (name == "two_workers")))
        return {"seconds": 1.0}

    monkeypatch.setattr(cluster_costs, "_apart", apart)
    with pytest.raises(AssertionError, match="100.0% of the members differ .* the worst by 0.5"):
        cluster_costs.overhead(members=3, repeats=1)


def test_the_overhead_is_that_of_the_same_repeat_and_the_methods_take_turns(monkeypatch):
    ran = []

    def apart(name, *, folder, members, **size):
        np.savez(f"{folder}/weights.npz", kernel=np.ones((members, 2)))
        ran.append(name)
        return {"seconds": {"one_process": 10.0, "two_workers": 10.0 + len(ran)}[name]}

    monkeypatch.setattr(cluster_costs, "_apart", apart)
    table = cluster_costs.overhead(members=3, repeats=2)
    assert ran == ["one_process", "two_workers", "two_workers", "one_process"]
    assert table[table.method == cluster_costs.TWO].overhead_percent.tolist() == pytest.approx([20, 30])


def test_what_fails_apart_says_its_last_words():
    with pytest.raises(RuntimeError, match="driver with .*ended with 1: TypeError: .*unexpected keyword"):
        cluster_costs._apart("driver", networks=3)


def test_make_peers_knows_the_parts():
    assert cluster_costs.PARTS.items() <= peers.PARTS.items()


@pytest.fixture(scope="module")
def slept():
    """Few short shards that slept on two workers: the table, and its lines as another process gave them."""
    lines = []
    apart = cluster_costs._apart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_costs, "_apart", lambda *name, **size: lines.extend(apart(*name, **size)) or lines)
        return cluster_costs.sleeping(workers=[2], shards=5, sleep_seconds=0.2, instant=20), lines


@pytest.mark.slow
@pytest.mark.thorough
def test_shards_sleep_on_workers_that_have_started(slept):
    table, _ = slept
    assert table.kind.tolist() == [idle.SLEEP, idle.INSTANT] and table.shards.tolist() == [5, 20]
    assert table.ideal_seconds.tolist() == pytest.approx([0.5, 0]) and table.rounds_seconds[0] == pytest.approx(0.6)
    assert (table.seconds >= table.rounds_seconds).all()


@pytest.mark.slow
@pytest.mark.thorough
def test_unit_costs_are_what_the_projection_takes(slept, monkeypatch):
    apart = cluster_costs._apart

    def once(name, **size):
        if name != "sleeping":
            return apart(name, **size)
        inspect.signature(cluster_runs.RUNS[name]).bind(**size)
        return slept[1]

    monkeypatch.setattr(cluster_costs, "_apart", once)
    table = cluster_costs.unit_costs(members=4, shards=2, hidden=2, epochs=1, block=2)
    costs = projection.Costs.of(table)
    assert min(vars(costs).values()) > 0 and costs.task_seconds == slept[0].task_seconds[1]
    assert costs.data_bytes == (240 * (10 + 1) + 10 * 10) * 4  # windows and what follows them, and those to forecast
    assert costs.state_bytes > 3 * 4 * (4 * (2 + 1 + 1) * 2)  # weights and two moments of Adam, at the least
