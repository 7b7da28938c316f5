"""What `make gpu` measures, at tiny sizes on a CPU: files, equal losses, what is left out."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from turbanet.lab.gpu import __main__ as gpu
from turbanet.lab.gpu import methods, sections, torch_steps
from turbanet.lab.labels import FUNC, FUSED, LOOP, OURS, SCAN, STEPS


@pytest.fixture
def packed(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "mnist.npz"
    np.savez(file, x=rng.integers(0, 255, (100, 784), np.uint8), y=rng.integers(0, 10, 100, np.int32), source="drawn")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", sections.SECTIONS)
def test_a_section_is_measured_and_written(name, tmp_path, packed):
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
    monkeypatch.setattr(sections, "methods", lambda work, names: constant)
    with pytest.raises(AssertionError, match="PyTorch loop trains something else"):
        sections.compare(work, (OURS, LOOP), "float32", repeats=1)


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
