"""The benchmark suite: every method trains the same networks, the table is whole; no time is asserted."""

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from tiers import first

import turbanet as tn
from study.baselines import benchmark, benchmark_results, swarm_trainers, twins
from study.baselines.benchmark_results import COLUMNS
from study.baselines.workloads import workloads
from study.figures.labels import COMPILED, FUNC, KEYS, LOOP, METHODS, OURS, STEPS

rng = np.random.default_rng(0)
PLAN = tn.Plan(2, 1)
WRITTEN = ("ratios.csv", "repeats.csv", "cold.csv", "machine.json")
FRAME = pd.DataFrame([dict.fromkeys(COLUMNS, 1) | {"runs": [0.25, 0.5], "cold_runs": [3.0, 4.0]}])
CEILINGS = {"matmul_peak_gflops": 2.0, "cache_gbytes_per_second": 3.0, "memory_gbytes_per_second": 1.0}
BLOCKS = ((8, 1), (8, 2))
SMALL = {
    "mobilenet": {"model": tn.networks.MobileNet(BLOCKS), "twin": partial(twins.mobilenet_twin, blocks=BLOCKS)},
    "vgg11": {"model": tn.networks.VGG(widths=(4, 8, 8, 8, 8))},
    "resnet": {"model": tn.networks.ResNet(8)},
}


def shrunk(name):
    """A workload with two networks and a few steps, the large architectures made small."""
    work = replace(workloads(quick=True)[name], members=2, **SMALL.get(name, {}))
    if work.batch_size is None:
        return replace(work, epochs=3)
    if work.per_member:
        return replace(work, x=work.x[:2, :64], y=work.y[:2, :64])
    size = 8 if name in SMALL else work.batch_size
    return replace(work, batch_size=size, x=work.x[: 3 * size], y=work.y[: 3 * size])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBANET_CACHE", str(tmp_path))


def test_the_suite_has_the_workloads_of_the_study():
    full, quick = workloads(), workloads(quick=True)
    assert [(work.name, work.members) for work in full.values()] == [
        ("sweep-small", 128),
        ("sweep-large", 64),
        ("mnist", 50),
        ("stocks", 500),
        ("lenet", 8),
        ("mobilenet", 4),
        ("vgg11", 4),
        ("resnet", 4),
    ]
    assert all(quick[name].steps < full[name].steps for name in full)


@pytest.mark.parametrize("name", ["sweep-small", "stocks", "lenet"])  # `test_twins` has the other networks
@pytest.mark.thorough
def test_every_method_trains_the_same_networks(name):
    work = shrunk(name)
    names = (OURS, LOOP) if name in SMALL else [method for method in METHODS if method != COMPILED]
    runs = benchmark.runs(work, plan=PLAN, threads=1, names=names)
    losses = {method: run()[0] for method, run in runs.items()}
    assert losses[OURS].shape == (work.epochs, 2)
    for method, loss in losses.items():
        np.testing.assert_allclose(loss, losses[OURS], rtol=1e-3, err_msg=method)
    again = runs[LOOP]()[0]
    np.testing.assert_array_equal(again, losses[LOOP])  # from the same start each time


def test_measure_gives_one_whole_row_a_way(monkeypatch):
    names = (OURS, LOOP)
    monkeypatch.setenv("TURBANET_COMMIT", "1a2b3c4")
    monkeypatch.setattr(benchmark, "TURN", 0.01)
    table = benchmark.measure(shrunk("mnist"), plan=PLAN, peak=1e9, repeats=2, names=names)
    assert table.plan.tolist() == [str(PLAN)] + [""] * (len(table) - 1) and set(table.commit) == {"1a2b3c4"}
    assert tuple(table.columns[: len(COLUMNS)]) == COLUMNS and list(table.method) == [KEYS[name] for name in names]
    assert (table.ratio_to_ours.iloc[0], table.members.iloc[0]) == (1, 2)
    np.testing.assert_allclose(table.ratio_to_ours, table.seconds_per_step / table.seconds_per_step[0])
    work = shrunk("mnist")
    np.testing.assert_allclose(table.peak_fraction, work.operations() * 2 / table.seconds_per_step / 1e9)
    np.testing.assert_allclose(table.cold_ratio_to_ours, table.cold_seconds / table.cold_seconds[0])
    assert table.cold_seconds[0] > table.compile_seconds[0] > 0  # the first run compiles and trains
    assert (table.compile_seconds >= 0).all() and (table.peak_memory_mb >= 0).all()


def test_a_loop_over_few_networks_is_read_as_one_over_all(monkeypatch):
    networks = []
    train = benchmark.trainers.train_loop

    def counted(twins, *data, **how):
        networks.append(len(twins))
        return train(twins, *data, **how)

    monkeypatch.setattr(benchmark.trainers, "train_loop", counted)
    monkeypatch.setattr(benchmark.timing, "interleave", lambda runs, **how: {name: [3.0, 6.0, 9.0] for name in runs})
    monkeypatch.setattr(benchmark, "LOOPED", 2)
    firsts = [{OURS: (7.0, 10.0 + number), LOOP: (0.0, 5.0 + number)} for number in range(3)]  # compiling; in all
    work = replace(shrunk("sweep-small"), members=6)
    kwargs = {"plan": PLAN, "peak": 1.0, "repeats": 3, "names": (OURS, LOOP), "first": lambda names, threads: firsts}
    table = benchmark.measure(work, **kwargs).set_index("method")
    assert networks[-1] == 2 and list(table.members) == [6, 6]
    expected = np.array([[3, 6, 9], [9, 18, 27]]) / work.steps  # of each repeat; the loop's three times as long
    np.testing.assert_allclose(np.stack(table.runs), expected)
    np.testing.assert_allclose(table.seconds_per_step, expected[:, 1])
    assert np.isnan(table.peak_memory_mb["torch_loop"]) and table.peak_memory_mb["turbanet"] >= 0
    assert table.ratio_to_ours["torch_loop"] == 3
    # The loop starts once: two networks in 5 seconds, four more as in the warm runs, whose median is 6 for two.
    np.testing.assert_allclose(np.stack(table.cold_runs), [[10, 11, 12], [17, 18, 19]])
    np.testing.assert_allclose(table.cold_seconds, [11, 18])
    np.testing.assert_allclose(table.compile_seconds, [7, 0])


@pytest.mark.parametrize("apart", first(1, [False, True]), ids=["here", "in a process"])
def test_first_runs_are_of_new_processes_and_of_every_method(apart, monkeypatch, capsys):
    def here(command, name):
        """What a process of this command prints."""
        assert command[:3] == [sys.executable, "-m", "study.baselines.benchmark"]
        capsys.readouterr()
        assert benchmark.main(command[3:]) == 0
        return capsys.readouterr().out

    if not apart:
        work = shrunk("sweep-small")
        monkeypatch.setattr(benchmark, "workloads", lambda quick: {"sweep-small": work})
        monkeypatch.setattr(benchmark.programs, "output", here)
    ask = benchmark.in_new_processes("sweep-small", quick=True, processes=1)
    (found,) = ask((OURS, LOOP), 1)
    assert found.keys() == {OURS, LOOP} and found[OURS][1] > found[OURS][0] > 0 and found[LOOP][1] > 0


@pytest.mark.parametrize(("names",), first(1, [((LOOP, OURS),), ((OURS, LOOP),)]))
def test_first_runs_compare_the_networks_that_a_loop_trains_in_any_order(names, monkeypatch):
    monkeypatch.setattr(benchmark, "LOOPED", 2)
    work = replace(shrunk("sweep-small"), members=4)
    every, scale = benchmark._every(work, PLAN, names, 1)
    assert tuple(benchmark._first_runs(work, every, 1e-3)[0]) == names and scale == {OURS: 1, LOOP: 2}


def test_measure_refuses_methods_that_train_something_else(monkeypatch):
    train = swarm_trainers.train_steps
    monkeypatch.setattr(swarm_trainers, "train_steps", lambda *args, **how: (None, 1.1 * train(*args, **how)[1]))
    with pytest.raises(AssertionError, match="sweep-small: one step per dispatch trains something else"):
        benchmark.measure(shrunk("sweep-small"), plan=PLAN, peak=1.0, repeats=1, names=(OURS, STEPS))


def test_a_method_that_cannot_is_left_out_and_named(monkeypatch, capsys):
    def cannot(*args, **how):
        raise NotImplementedError("no rule for this")

    monkeypatch.setattr(benchmark.trainers, "train_func", cannot)
    table = benchmark.measure(shrunk("sweep-small"), plan=PLAN, peak=1.0, repeats=1, names=(OURS, FUNC))
    assert list(table.method) == ["turbanet"] and "torch.func vmap cannot: no rule for this" in capsys.readouterr().err


def test_operations_of_the_mnist_network_by_hand():
    layers = [(784, 64), (64, 32), (32, 10)]
    forward = sum(2 * 8 * a * b for a, b in layers)
    assert workloads()["mnist"].operations() == 3 * forward - 2 * 8 * 784 * 64


def test_operations_of_the_lstm_by_hand():
    x, h, out = (2 * 32 * size for size in (1 * 4 * 32, 32 * 4 * 32, 32))  # the batch's products, of x, state, read-out
    assert workloads(True)["stocks"].operations() == 20 * (2 * x + 3 * h) + 3 * out


def test_operations_of_lenet_count_by_the_window():
    first, second, dense = 28 * 28 * 5 * 5 * 3 * 6, 10 * 10 * 5 * 5 * 6 * 16, 400 * 120 + 120 * 84 + 84 * 10
    padded = 14 * 14 * 5 * 5 * 16 * 6  # the second's gradient to its input: a window over the padded gradient
    once = 2 * first + 2 * second + padded + 3 * dense  # the input of the first needs no gradient
    assert workloads(True)["lenet"].operations() == 2 * 32 * once


def test_the_command_writes_quick_results_beside_the_committed_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "repository", lambda: tmp_path)
    monkeypatch.setattr(benchmark.roofline, "ceilings", lambda: CEILINGS)
    monkeypatch.delenv("TURBANET_REPORTS", raising=False)
    failures = {"lenet": "torch_loop trains something else"}
    monkeypatch.setattr(benchmark, "run", lambda names, quick, peak: (FRAME, failures))
    assert benchmark.main([]) == 1
    assert "lenet is not in it: torch_loop trains something else" in capsys.readouterr().err
    failures.clear()
    assert benchmark.main(["--quick"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    assert benchmark.main([]) == 0
    written = pd.read_csv(tmp_path / "reports/benchmark/cpu/ratios.csv")
    assert tuple(written.columns) == COLUMNS and "workload" in capsys.readouterr().out
    folder = tmp_path / "reports/benchmark/cpu"
    assert {path.name for path in folder.iterdir()} == set(WRITTEN)
    repeats = pd.read_csv(folder / "repeats.csv")
    assert repeats.to_dict("list") == {
        "workload": [1, 1],
        "method": [1, 1],
        "repeat": [0, 1],
        "seconds_per_step": [0.25, 0.5],
    }
    assert pd.read_csv(folder / "cold.csv").seconds.tolist() == [3.0, 4.0]
    assert json.loads((folder / "machine.json").read_text()).items() >= CEILINGS.items()


def test_some_workloads_measured_anew_leave_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "repository", lambda: tmp_path)
    monkeypatch.setattr(benchmark.roofline, "ceilings", lambda: CEILINGS)
    monkeypatch.delenv("TURBANET_REPORTS", raising=False)
    folder = tmp_path / "reports/benchmark/cpu"

    def measured(machine, table, *arguments):
        """The machine whose facts are written."""
        monkeypatch.setattr(benchmark, "machine_line", lambda: machine)
        monkeypatch.setattr(benchmark, "run", lambda *_, **__: (table.assign(machine=machine), {}))
        assert benchmark.main(arguments) == 0
        return json.loads((folder / "machine.json").read_text())["machine"]

    every = pd.concat([FRAME.assign(workload=name) for name in ("mnist", "stocks", "lenet")])
    anew = FRAME.assign(workload="mnist", members=7, runs=[[0.75]])
    assert measured("old", every) == "old"
    assert measured("new", anew, "--workloads", "mnist") == "old"
    ratios, repeats = pd.read_csv(folder / "ratios.csv"), pd.read_csv(folder / "repeats.csv")
    assert ratios[["workload", "members"]].values.tolist() == [["mnist", 7], ["stocks", 1], ["lenet", 1]]
    assert repeats.workload.tolist() == ["mnist", *["stocks"] * 2, *["lenet"] * 2]
    assert repeats.seconds_per_step.tolist() == [0.75, 0.25, 0.5, 0.25, 0.5]
    assert measured("new", every[2:], "--workloads", "lenet") == "new"  # which measured two of three now
    (folder / "machine.json").unlink()
    assert measured("newest", anew, "--workloads", "mnist") == "newest"  # what took hours is written all the same


def test_the_command_leaves_publishing_to_the_runner(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "repository", lambda: tmp_path)
    monkeypatch.setattr(benchmark.roofline, "ceilings", lambda: CEILINGS)
    monkeypatch.setenv("TURBANET_REPORTS", str(tmp_path / "run"))
    monkeypatch.setattr(benchmark, "run", lambda names, quick, peak: (FRAME, {}))
    assert benchmark.main([]) == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(WRITTEN)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_workload_whose_methods_differ_keeps_no_other_from_being_measured(monkeypatch):
    def measured(work, **how):
        assert work.name != "mnist", "mnist: torch_loop\ntrains something else"
        return pd.DataFrame({"workload": [work.name]})

    monkeypatch.setattr(benchmark, "measure", measured)
    monkeypatch.setattr(benchmark, "chosen_plan", lambda work: PLAN)
    table, failures = benchmark.run(["mnist", "lenet"], quick=True, peak=1.0)
    assert list(table.workload) == ["lenet"]
    assert list(failures) == ["mnist"] and failures["mnist"].startswith("mnist: torch_loop trains something else")
    assert len(benchmark.run(["mnist"], quick=True, peak=1.0)[0]) == 0


def test_the_command_names_the_workloads_it_knows(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--workloads", "minst"])
    assert "unknown workload minst; known: sweep-small" in capsys.readouterr().err


def test_speed_of_size_counts_the_state_of_one_network():
    x, y = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)
    row = benchmark.speed_of_size(x, y, members=2, hidden=5, steps=2, learning_rate=0.01)
    weights = 3 * 5 + 5 + 5 * 2 + 2
    assert (row["members"], row["hidden"]) == (2, 5)
    assert 4 * 3 * weights <= row["state_bytes_per_member"] < 4 * 3 * weights + 100  # both moments; counters
    assert 0 < row["low"] <= row["seconds_per_step"] <= row["high"] and row["compile_seconds"] > 0


def test_what_was_measured_is_read_with_intervals_and_break_even(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_results, "repository", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="machine.json; `make bench` makes it"):
        benchmark_results.read("cpu")
    folder = tmp_path / "reports/benchmark/cpu"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(json.dumps({"machine": "a machine"} | CEILINGS))
    lines = [("turbanet", 2.0, 1.0, 10.0), ("torch_loop", 6.0, 3.0, 4.0), ("torch_func", 1.0, 0.5, 0.0)]
    frame = [
        dict.fromkeys(COLUMNS, 1.0)
        | {
            "workload": "lenet",
            "method": method,
            "seconds_per_step": seconds,
            "ratio_to_ours": ratio,
            "compile_seconds": compiled,
            "machine": "a machine",
        }
        for method, seconds, ratio, compiled in lines
    ]
    pd.DataFrame(frame).to_csv(folder / "ratios.csv", index=False)
    times = {"turbanet": [1.0, 2.0, 3.0], "torch_loop": [3.0, 6.0, 9.0], "torch_func": [1.0, 1.0, 1.0]}
    repeats = [("lenet", method, i, second) for method, seconds in times.items() for i, second in enumerate(seconds)]
    frame = pd.DataFrame(repeats, columns=["workload", "method", "repeat", "seconds_per_step"])
    frame.to_csv(folder / "repeats.csv", index=False)
    cold = {"turbanet": [10.0, 20.0], "torch_loop": [5.0, 10.0], "torch_func": [20.0, 10.0]}
    repeats = [("lenet", method, i, second) for method, seconds in cold.items() for i, second in enumerate(seconds)]
    frame = pd.DataFrame(repeats, columns=["workload", "method", "repeat", "seconds"])
    frame.to_csv(folder / "cold.csv", index=False)
    table, machine = benchmark_results.read("cpu")
    assert table.method.tolist() == [OURS, LOOP, FUNC] and machine["machine"] == table.machine[0] == "a machine"
    assert table.loc[1, ["ratio", "low", "high"]].tolist() == pytest.approx([3, 3, 3])  # in each pair
    assert table.loc[1, ["cold_ratio", "cold_low", "cold_high"]].tolist() == pytest.approx([0.5, 0.5, 0.5])
    assert table.cold_ratio[2] == pytest.approx(1) and table.cold_low[2] < 0.5 < 2 < table.cold_high[2]
    assert table.ratio[2] == pytest.approx(6 ** (-1 / 3)) and table.low[2] < 0.5 < table.high[2]
    steps = workloads()["lenet"].steps
    assert np.isnan(table.break_even_steps[0])  # 15 and 7.5 s cold, less than as many warm steps: nothing at first
    assert table.break_even_steps[1:].tolist() == [0, np.inf]
    assert table.repeats.tolist() == [3, 3, 3] and table.steps[0] == steps
    frame.assign(seconds=frame.seconds + 6 * steps).to_csv(folder / "cold.csv", index=False)  # 2 and 6 s a step, warm
    at_first = 15 + 6 * steps - 2 * steps, 7.5 + 6 * steps - 6 * steps
    ahead = benchmark_results.read("cpu")[0].break_even_steps[1]
    assert ahead == pytest.approx((at_first[0] - at_first[1]) / (6 - 2))
    (folder / "cold.csv").unlink()
    assert benchmark_results.read("cpu")[0].cold_seconds.tolist() == [1, 1, 1]
