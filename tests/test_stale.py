"""What an edit makes stale, and what `make report` says of stages that fail: in a copy whose stages compute nothing."""

import re
from pathlib import Path

import nbformat
import pytest
import yaml

from study.pipeline import project, rebuild

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[1]
QUIET = {"quick": True, "capture_output": True, "text": True}


def repro(folder, *arguments):
    """The stages that `dvc repro` ran."""
    ran = project.repro(folder, *arguments, **QUIET)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return re.findall("^Running stage '(.+)'", ran.stdout, re.M)


def stand_in(stage):
    """A command that writes something new to each out of a stage of dvc.yaml."""
    outs = [next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"] + stage.get("metrics", [])]
    files = [out if Path(out).suffix else f"{out}/new" for out in outs]
    return " && ".join(f"mkdir -p {Path(file).parent} && date +%s%N > {file}" for file in files)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A copy of the study in which code and notebooks are copied as always and nothing is computed, run once."""
    folder = tmp_path_factory.mktemp("pipeline") / "copy"
    project.copy_study(ROOT, folder, "smoke")
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())
    for name, stage in stages["stages"].items():
        stage = stage.get("do", stage)
        if name not in ("code", "source"):
            stage["cmd"] = stand_in(stage)
    (folder / "dvc.yaml").write_text(yaml.safe_dump(stages))
    repro(folder)
    return folder


STUDIES = {"mnist", "stocks", "forecasting", "benchmark", "search", "kfold", "async_sgd", "scaling"}
STUDIES |= {"agents", "federated", "evolution", "cluster"}


def test_an_edit_makes_only_its_users_stale(pipeline):
    with (pipeline / "src/turbanet/selection/search.py").open("a") as file:
        file.write("EDITED = True\n")
    assert set(repro(pipeline)) == {"code@turbanet", "report", "benchmark", "search", "kfold", "evolution"}


def test_comments_and_notebooks_run_by_hand_make_only_their_copies_stale(pipeline):
    for module in ("turbanet/training/program.py", "study/pipeline/reports.py", "turbanet/__init__.py"):
        with (pipeline / "src" / module).open("a") as file:
            file.write("# A comment.\n")
    file = pipeline / "notebooks/mnist.ipynb"
    book = nbformat.read(file, as_version=4)
    for i, cell in enumerate(book.cells):
        cell.id = f"by-hand-{i}"
        if cell.cell_type == "code":
            cell.execution_count, cell.metadata.execution = i, {"iopub.execute_input": "2020-01-01"}
            cell.outputs = [nbformat.v4.new_output("stream", text="seen")]
    book.metadata.language_info = {"name": "python", "version": "3.14.0"}
    book.metadata.kernelspec = {"name": "other", "display_name": "Other", "language": "python"}
    nbformat.write(book, file)
    assert set(repro(pipeline)) == {"code@turbanet", "code@study", "source"}


def test_one_stage_and_the_report_are_rebuilt_and_the_stale_ones_named(pipeline, monkeypatch, capfd):
    monkeypatch.chdir(pipeline)
    monkeypatch.setattr(rebuild, "lines", lambda *_: [])  # a stand-in has no seconds
    with (pipeline / "src/turbanet/core/plan.py").open("a") as file:
        file.write("EDITED = True\n")
    assert rebuild.main(["--stage", "mnist"]) == 0
    said = capfd.readouterr().out
    assert sorted(re.findall("^Running stage '(.+)'", said, re.M)) == ["code@turbanet", "mnist", "report"]
    stale = re.search("stale, .*: (.+)", said)[1].split(", ")
    assert set(stale) == {"sweep@small", "sweep@large", *STUDIES} - {"mnist"}


def test_a_stage_that_fails_takes_no_other_with_it(pipeline, monkeypatch, capfd):
    monkeypatch.chdir(pipeline)
    stages = yaml.safe_load((pipeline / "dvc.yaml").read_text())
    stages["stages"]["mnist"]["cmd"] = "false"
    stages["stages"]["stocks"]["cmd"] += " && true"
    (pipeline / "dvc.yaml").write_text(yaml.safe_dump(stages))
    monkeypatch.setattr(rebuild, "lines", lambda *_: [])
    assert rebuild.main([]) != 0
    said = capfd.readouterr().out
    assert {"mnist", "stocks", "report"} <= set(re.findall("^Running stage '(.+)'", said, re.M))
    assert said.splitlines()[-1] == "did not run here; in the report, as committed, if at all: mnist"
    assert any((pipeline / "reports/mnist/figures").iterdir())
