"""study.pipeline.rebuild: what `make report` tells DVC to do, and what it says afterwards."""

import datetime
import json
import subprocess
from pathlib import Path

import pytest

from study.pipeline import doctor, project, rebuild

ROOT = Path(__file__).parents[1]
KNOWN = [
    "sweep",
    "sweep@small",
    "sweep@large",
    "mnist",
    "stocks",
    "forecasting",
    "benchmark",
    "search",
    "kfold",
    "async_sgd",
    "scaling",
    "agents",
    "federated",
    "evolution",
    "cluster",
    "report",
]
SAID_ON_INTERRUPT = "interrupted; stages that have ended stay, the next `make report` goes on."
NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)


def ran(root, stage, hour, seconds, **metrics):
    """A stage's results, papermill's times among them."""
    folder = root / "reports" / stage
    folder.mkdir(parents=True)
    times = {"start_time": f"2020-01-01T{hour:02}:00:00.5+00:00", "duration": seconds}
    (folder / "executed.ipynb").write_text(json.dumps({"cells": [], "metadata": {"papermill": times}}))
    (folder / "metrics.json").write_text(json.dumps(metrics))


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each `dvc repro`, none of which is run."""
    calls = []

    def repro(folder, *arguments, quick):
        calls.append(arguments)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(project, "repro", repro)
    monkeypatch.setattr(rebuild.doctor, "stale", lambda root: "stocks, kfold")
    monkeypatch.setattr(rebuild, "unmade", lambda known: [])
    return calls


def test_stages_are_those_with_a_notebook():
    assert doctor.stages(ROOT) == KNOWN


def test_the_whole_study_is_one_repro(asked):
    assert rebuild.main(["--force"]) == 0 and asked == [("--keep-going", "--force")]


def test_a_stage_is_rebuilt_with_what_it_needs_then_the_report_alone(asked, capsys):
    assert rebuild.main(["--stage", "mnist"]) == 0
    assert asked == [("--keep-going", "mnist", "code", "source", "data"), ("--single-item", "report")]
    assert "stale, and in the report as they were: stocks, kfold\n" in capsys.readouterr().out


def test_the_report_alone_is_told_the_same(asked):
    rebuild.main(["--stage", "report", "--force"])
    assert asked == [("--keep-going", "code", "source", "data", "--force"), ("--single-item", "report", "--force")]


def test_an_unknown_stage_gets_one_sentence_with_the_known_ones(asked, capsys):
    assert rebuild.main(["--stage", "minst"]) == 1 and asked == []
    assert capsys.readouterr().err == f"report: Unknown stage 'minst'; known: {', '.join(KNOWN)}.\n"


def test_after_a_failed_stage_the_report_is_made_by_itself_and_the_status_is_the_failures(asked, monkeypatch):
    def repro(folder, *arguments, quick):
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 7 * (len(asked) == 1))

    monkeypatch.setattr(project, "repro", repro)
    assert rebuild.main([]) == 7
    assert asked == [("--keep-going",), ("--single-item", "report", "--force")]


def test_a_report_that_could_not_be_made_is_in_the_status(asked, monkeypatch):
    def repro(folder, *arguments, quick):
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 7 * ("--single-item" in arguments))

    monkeypatch.setattr(project, "repro", repro)
    assert rebuild.main(["--stage", "report"]) == 7 and len(asked) == 2


def test_ctrl_c_ends_it_with_one_sentence(asked, monkeypatch, capsys):
    def repro(*arguments, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(project, "repro", repro)
    assert rebuild.main([]) == 130
    assert capsys.readouterr() == ("", f"report: {SAID_ON_INTERRUPT}\n")


def test_unmade_names_the_stages_without_a_run_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").touch()
    ran(tmp_path, "sweep/small", 11, 1.0)
    ran(tmp_path, "report", 11, 1.0)
    known = ["sweep", "sweep@small", "sweep@large", "mnist", "report"]
    assert rebuild.unmade(known) == ["did not run here; in the report, as committed, if at all: sweep/large, mnist"]
    assert doctor.report(tmp_path)["stages"]["not run here"] == "no dvc.yaml here"
    stages = {"sweep": {"foreach": {"small": 1, "large": 2}}, "mnist": {}, "report": {}}
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    assert doctor.report(tmp_path)["stages"]["not run here"] == "sweep/large, mnist"
    (tmp_path / "reports/report/executed.ipynb").unlink()
    assert rebuild.unmade(known)[1:] == ["the report could not be made: what is there is an earlier one"]


def test_lines_name_seconds_and_data_and_what_is_from_before(tmp_path):
    ran(tmp_path, "mnist", 13, 83.6, data_source="MNIST, from a file")
    ran(tmp_path, "sweep/small", 11, 1200.0)
    ran(tmp_path, "stocks", 13, 1.0)
    (tmp_path / "reports/stocks/executed.ipynb").unlink()
    assert rebuild.lines(tmp_path, NOON) == [
        "mnist             84 s                MNIST, from a file",
        "stocks        not run here            none",
        "sweep/small     1200 s, from before   none",
    ]


def test_main_ends_with_the_way_back(asked, capsys):
    rebuild.main([])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "To get the committed reports back: git checkout -- reports dvc.lock"
    )
