"""What `make gpu` measures, at tiny sizes on a CPU: files, equal losses, what is left out."""

import json

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from tiers import first

from study.figures.labels import FUNC, FUNC_GRAPH, FUSED, GRAPH, LOOP, OURS, SCAN, STEPS, USUAL
from study.gpu import __main__ as gpu, chapter, figures, methods, sections, torch_steps


@pytest.fixture
def packed(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "mnist.npz"
    np.savez(file, x=rng.integers(0, 255, (100, 784), np.uint8), y=rng.integers(0, 10, 100, np.int32), source="drawn")
    return file


TESTED = ("sweep", "mnist", "kernel", "roofline")  # in `make test`; the others train what the library's tests train


@pytest.mark.slow
@pytest.mark.parametrize("name", first(4, [*TESTED, *(name for name in sections.SECTIONS if name not in TESTED)]))
def test_a_section_is_measured_and_written(name, tmp_path, packed, monkeypatch):
    monkeypatch.setattr("study.gpu.compare.TURN", 0.001)
    assert gpu.main(["--tiny", "--out", str(tmp_path), "--mnist", str(packed), name]) == 0
    table = pd.read_csv(tmp_path / f"{name}.csv")
    about = json.loads((tmp_path / "about.json").read_text())
    assert len(table) and about["left_out"] == [] and about["tiny"] and set(about["seconds"]) == {name}
    if "method" in table:
        assert OURS in set(table.method) and (table[table.method == OURS].filter(like="seconds").iloc[:, 0] > 0).all()


def test_without_a_gpu_and_in_full_it_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "JAX has no GPU here; --tiny runs on a CPU" in capsys.readouterr().err


def test_an_unknown_section_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", "sweeps"])
    assert "unknown section 'sweeps'; known: sweep, mnist" in capsys.readouterr().err


def test_what_does_not_fit_into_its_seconds_is_left_out_and_named():
    budget = sections.Budget(0)
    assert list(sections.stocks(budget)) == [] and budget.left_out[0] == f"LSTMs by {OURS}"


def test_methods_that_train_something_else_are_no_rows(monkeypatch):
    work = sections.workloads()["sweep-small"].first(2)
    found = sections.compare(work, (OURS, SCAN, STEPS, FUNC, LOOP, FUSED), "float32", repeats=1)
    assert [row["error"] for row in found] == [""] * 6 and all(row["seconds_per_step"] > 0 for row in found)
    constant = {OURS: _constant(0.0), LOOP: _constant(1.0)}
    monkeypatch.setattr("study.gpu.compare.methods", lambda work, names: constant)
    with pytest.raises(AssertionError, match="PyTorch loop trains something else"):
        sections.compare(work, (OURS, LOOP), "float32", repeats=1)


def test_a_precision_ends_with_its_block():
    before = jax.config.jax_default_matmul_precision, torch.get_float32_matmul_precision()
    x = np.ones((1, 1), np.float32)
    with torch_steps.multiplying_in("float32"), torch_steps.multiplying_in("TF32"):
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        assert "HIGHEST" not in str(jax.make_jaxpr(jnp.dot)(x, x))
    with pytest.raises(ZeroDivisionError), torch_steps.multiplying_in("float32"):
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        assert "HIGHEST" in str(jax.make_jaxpr(jnp.dot)(x, x))
        raise ZeroDivisionError
    assert (jax.config.jax_default_matmul_precision, torch.get_float32_matmul_precision()) == before


def _constant(loss):
    return lambda steps: methods.Run(np.full(2, loss), 1.0, 1.0)


def test_a_training_is_reset_to_where_it_began():
    network = torch.nn.Linear(2, 2)
    x, y = torch.randn(8, 2), torch.randint(0, 2, (8,))
    training = torch_steps.one_network(network, x, y, torch.nn.functional.cross_entropy, learning_rate=0.1)
    first = []
    for _ in range(2):
        training.reset()
        for _ in range(3):
            training.step()
        first.append((training.total.item(), network.weight.detach().clone()))
    assert first[0][0] == first[1][0] and torch.equal(first[0][1], first[1][1])


def measured(folder, *, networks=(1, 128), loop=1e-3):
    """A card's folder with a sweep whose swarms take 1, 2, ... us a step."""
    folder.mkdir(parents=True)
    (folder / "about.json").write_text(
        json.dumps(
            dict.fromkeys(("card", "driver", "jax", "torch", "commit"), "x")
            | {"date": "2026-01-01", "tiny": False, "left_out": []}
        )
    )
    rows = []
    for work in (chapter.SMALL, chapter.WIDE):
        for us, count in enumerate(networks, 1):
            row = {"workload": work, "networks": count, "precision": "TF32"}
            row |= {"wall_per_step": 3e-6 * us, "steps": 7}
            rows += [row | {"method": name, "seconds_per_step": us * 1e-6} for name in (OURS, SCAN, FUNC_GRAPH)]
            each = {LOOP: 2 * loop, FUSED: loop, GRAPH: loop / 10}
            rows += [row | {"method": name, "seconds_per_step": count * each[name]} for name in each]
    table = pd.DataFrame(rows)
    table = table.assign(low=0.8 * table.seconds_per_step, high=1.25 * table.seconds_per_step)
    table.to_csv(folder / "sweep.csv", index=False)
    return folder


def test_numbers_of_the_chapter_are_ratios_by_hand(tmp_path):
    found = chapter.numbers(measured(tmp_path / "card"))
    assert found["networks"] == found["most"] == found["in_time_of_one"] == 128
    assert found["small_loop"] == pytest.approx(128e-3 / 2e-6) and found["wide_graph"] == pytest.approx(12.8e-3 / 2e-6)
    assert found["loop_one_ms"] == pytest.approx(1) and found["most_over_loop_one"] == pytest.approx(2e-3)
    assert found["call_over_loop_one"] == pytest.approx(6e-3) and found["call_steps"] == found["small_call_steps"] == 7
    bounds = [found[f"call_over_loop_one_{end}"] for end in ("low", "high")]
    np.testing.assert_allclose(bounds, [6e-3 / 1.25, 6e-3 / 0.8])
    assert found["most_over_graph_one"] == pytest.approx(2e-2) and found["small_call_ms"] == pytest.approx(6e-3)
    np.testing.assert_allclose([found["call_least_ms"], found["call_most_ms"]], [14e-3, 28e-3])  # 2 and 4 us in 7 steps
    assert found["small_loop_by_call"] == pytest.approx(128e-3 / 6e-6) and found["small_by_hand_by_call"] == 1 / 3


def test_a_method_timed_on_one_network_alone_is_multiplied(tmp_path):
    card = measured(tmp_path / "card", networks=(1, 128, 512))
    table = pd.read_csv(card / "sweep.csv")
    table[(table.networks < 512) | ~table.method.isin(chapter.ONE_BY_ONE)].to_csv(card / "sweep.csv", index=False)
    assert chapter.sweep(card, chapter.SMALL).loc[512, FUSED] == pytest.approx(0.512)


def test_trainings_to_the_end_are_told_where_they_were_measured(tmp_path):
    card = measured(tmp_path / "card")
    assert not {"lstms", "agents", "rounds"} & chapter.numbers(card).keys()
    seconds = {OURS: 3.0, GRAPH: 60.0, FUSED: 900.0, LOOP: 1000.0}
    lstms = [{"method": name, "networks": 5, "seconds": each, "epochs": 7} for name, each in seconds.items()]
    pd.DataFrame(lstms).to_csv(card / "stocks.csv")
    agents = {"networks": [64, 2048], "timesteps": 500, "seconds": [5.0, 26.0], "mean_return": [450.0, 466.0]}
    agents["solved"] = [0.8, 0.9]
    pd.DataFrame(agents).to_csv(card / "agents.csv")
    pd.DataFrame({"rounds": [100], "sampled": [50], "seconds": [1.7]}).to_csv(card / "federated.csv")
    found = chapter.numbers(card)
    assert [found[f"lstms_{name}"] for name in ("seconds", "graph", "loop", "epochs")] == [3, 60, 900, 7]
    assert [found[f"agents{name}"] for name in ("", "_seconds", "_return", "_solved")] == [2048, 26, 466, 0.9]
    assert (found["rounds"], found["rounds_seconds"]) == (100, 1.7)


def test_sections_measured_one_by_one_by_the_same_code_stay_in_about(tmp_path):
    file = tmp_path / "about.json"
    about = {"card": "x", "commit": "a", "tiny": False}
    before = about | {
        "seconds": {"sweep": 1, "suite": 2},
        "left_out": ["sweep: y", "suite: z"],
        "failed": {"sweep": "w"},
    }
    file.write_text(json.dumps(before))
    fresh = about | {"seconds": {}, "left_out": [], "failed": {}}
    kept = {"seconds": {"sweep": 1}, "left_out": ["sweep: y"], "failed": {"sweep": "w"}}
    assert gpu._with_others(fresh, file, ["suite"]) == fresh | kept
    assert gpu._with_others(fresh | {"commit": "b"}, file, ["suite"]) == fresh | {"commit": "b"}


def test_only_cards_with_a_sweep_of_full_size_are_read(tmp_path):
    assert chapter.cards(tmp_path) == []
    card = measured(tmp_path / "card")
    tiny = measured(tmp_path / "tiny")
    (tiny / "about.json").write_text(json.dumps({"tiny": True, "date": "2027-01-01"}))
    assert chapter.cards(tmp_path) == [card]


def test_a_commit_of_digits_and_an_e_is_no_number(tmp_path):
    card = measured(tmp_path / "card")
    pd.DataFrame({"networks": [1], "commit": ["2818e81"]}).to_csv(card / "federated.csv")
    assert chapter.read(card, "federated").commit[0] == "2818e81"


def test_a_card_that_measured_the_small_networks_alone_has_numbers_and_a_table_of_them(tmp_path):
    card = measured(tmp_path / "card")
    table = pd.read_csv(card / "sweep.csv")
    table[table.workload == chapter.SMALL].to_csv(card / "sweep.csv", index=False)
    found = chapter.numbers(card)
    assert found["small_by_hand"] == 1 and "wide_ms" not in found
    table = chapter.tables(card)["gpu-card-sweep"]
    assert set(table.network) == {"2-16-2"} and table[chapter.CALL].tolist() == pytest.approx([3, 6])


def test_what_a_kernel_gains_is_a_ratio_of_the_same_training(tmp_path):
    card = measured(tmp_path / "card")
    assert chapter.kernels(card) is None
    rows = [{"workload": "a", "precision": "TF32", "networks": n, "seconds_per_step": s, "method": m}
            for n, m, s in ((1, OURS, 1e-6), (1, USUAL, 3e-6), (8, OURS, 2e-6), (8, USUAL, 14e-6))]  # fmt: skip
    pd.DataFrame(rows).to_csv(card / "kernel.csv", index=False)
    assert [*chapter.kernels(card).times] == pytest.approx([3, 7])
    found = chapter.numbers(card)
    assert (found["kernel_least"], found["kernel_most"]) == pytest.approx((3, 7)) and found["kernel_most_networks"] == 8


def test_the_figure_has_three_lines_with_their_names(tmp_path):
    figures.draw(measured(tmp_path / "card"))
    assert {file.suffix for file in (tmp_path / "card/figures").iterdir()} == {".png", ".pdf", ".txt"}
    _, ax = plt.subplots()
    figures.growth(ax, tmp_path / "card")
    assert [text.get_text().split("\n")[0] for text in ax.texts] == ["PyTorch's loop", "PyTorch,", "TurbaNet"]
    np.testing.assert_allclose(ax.lines[2].get_ydata(), [1024e-6, 2048e-6])
    np.testing.assert_allclose(ax.lines[3].get_ydata(), [3 * 1024e-6, 6 * 1024e-6])
    table = pd.read_csv(tmp_path / "card/sweep.csv")
    table.loc[table.method == SCAN, "seconds_per_step"] *= 2
    table.to_csv(tmp_path / "card/sweep.csv", index=False)
    assert [text.get_text() for text in figures.growth(plt.subplots()[1], tmp_path / "card").texts][2] == "XLA, by hand"
    plt.close("all")
