"""The notebooks as they lie in git, and what dvc.yaml says of them."""

import ast
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import yaml

from turbanet.lab import notebook, reports
from turbanet.lab.sources import store

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
SMALL = {"members": 4, "epochs": 20, "points": 32, "grid": 8}  # of the tour


def stages():
    """{name: stage} of dvc.yaml, each `foreach` unrolled."""
    found = {}
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        for item in stage.get("foreach", []):
            text = yaml.safe_dump(stage["do"]).replace("${item}", item)
            found[f"{name}@{item}"] = yaml.safe_load(text)
        if "foreach" not in stage:
            found[name] = stage
    return found


STAGES = stages()
RUNS = [name for name, stage in STAGES.items() if "turbanet.lab.notebook" in stage["cmd"]]


def cells(name):
    return nbformat.read(ROOT / "notebooks" / name, as_version=4).cells


def code(name):
    """A notebook's code, without IPython's own lines."""
    text = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "code")
    return re.sub(r"^\s*[%!].*$", "", text, flags=re.M)


def file_of(module):
    """The file of a module of ours, or None."""
    path = ROOT / "src" / module.replace(".", "/")
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found[0] if found else None


def imported(source):
    """The files of ours that a source imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if file_of(name) else node.module for name in inner}
    return {file for name in names if name.partition(".")[0] == "turbanet" and (file := file_of(name))}


def closure(source):
    """Those files, those that they import, and so on: names from ROOT, as in dvc.yaml."""
    found, new = set(), imported(source)
    while new:
        found |= new
        new = set().union(*(imported(file.read_text()) for file in new)) - found
    return {str(file.relative_to(ROOT)) for file in found}


def declared(stage):
    return {dep for dep in STAGES[stage]["deps"] if re.fullmatch(r"src/turbanet/.*\.py", dep)}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_has_no_outputs(name):
    ran = [i for i, cell in enumerate(cells(name)) if cell.get("outputs") or cell.get("execution_count")]
    assert ran == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_opens_with_a_title_and_a_question(name):
    first = cells(name)[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and "?" in first.source


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_has_short_cells(name):
    lengths = {i: len([line for line in cell.source.splitlines() if line]) for i, cell in enumerate(cells(name))}
    assert {i: length for i, length in lengths.items() if length > 20} == {}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_installs_silences_and_moves_nothing(name):
    text = "\n".join(cell.source for cell in cells(name))
    assert re.findall(r"[!%]pip|chdir|%cd|filterwarnings|simplefilter", text) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_starts_from_the_values_of_params_yaml(name):
    stage = name.removesuffix(".ipynb")
    values = notebook.defaults(ROOT / "notebooks" / name)
    if stage == "tour":
        assert "tour" not in PARAMS and values.keys() >= SMALL.keys()
    else:
        variants = [variant for variant, value in (PARAMS[stage] or {}).items() if isinstance(value, dict)]
        assert values == notebook.parameters(PARAMS, stage, *variants[:1])


@pytest.mark.parametrize("stage", RUNS)
def test_run_stage_declares_the_modules_that_its_notebook_uses(stage):
    name = f"{stage.partition('@')[0]}.ipynb"
    used = closure(code(name))
    missing, superfluous = sorted(used - declared(stage)), sorted(declared(stage) - used)
    assert not missing and not superfluous, f"dvc.yaml, {stage}: missing {missing}, superfluous {superfluous}"


@pytest.mark.parametrize("stage", [name for name in STAGES if name.startswith("data@")])
def test_data_stage_declares_the_modules_of_its_set(stage):
    used = closure("import turbanet.lab.sources.store")
    others = {f"src/turbanet/lab/{name}.py" for name in store.SETS if stage != f"data@{name}"}
    needed = used - others
    missing, superfluous = sorted(needed - declared(stage)), sorted(declared(stage) - used)
    assert not missing and not superfluous, f"dvc.yaml, {stage}: missing {missing}, superfluous {superfluous}"


@pytest.mark.parametrize("stage", RUNS)
def test_run_stage_declares_each_of_its_parameters(stage):
    name, _, variant = stage.partition("@")
    common = [f"{name}.{key}" for key, value in (PARAMS[name] or {}).items() if not isinstance(value, dict)]
    assert STAGES[stage]["params"] == ([*common, f"{name}.{variant}"] if variant else [name])


@pytest.mark.parametrize("stage", RUNS)
def test_run_stage_runs_the_copy_that_a_source_stage_makes(stage):
    name, _, variant = stage.partition("@")
    assert STAGES[stage]["cmd"] == f"python -m turbanet.lab.notebook {name} {variant}".strip()
    assert STAGES[stage]["deps"][0] in STAGES[f"source@{name}"]["outs"]


@pytest.mark.slow
def test_tour_runs_from_its_folder(tmp_path):
    papermill.execute_notebook(
        ROOT / "notebooks/tour.ipynb",
        tmp_path / "tour.ipynb",
        parameters=SMALL,
        kernel_name="python3",
        cwd=ROOT / "notebooks",
        progress_bar=False,
        config=notebook.ENCRYPTED,
    )


@pytest.fixture(scope="module")
def late_listings(tmp_path_factory):
    """The stocks stage's results at smoke size, of six tickers listed on these of 160 days, of which 110 train."""
    folder = tmp_path_factory.mktemp("late") / "smoke"
    notebook.copy_study(ROOT, folder, "smoke")
    for link in folder.glob("data/external/stocks/[!.]*"):
        link.unlink()
    days = pd.bdate_range("2023-01-02", periods=160)
    closes = 50 + np.random.default_rng(0).normal(0, 0.5, (160, 6)).round(2)
    listed = {"AA": 0, "BB": 60, "CC": 0, "DD": 89, "EE": 100, "NA": 130}
    series = [
        pd.DataFrame({"date": days[first:], "close": closes[first:, i], "ticker": name})
        for i, (name, first) in enumerate(listed.items())
    ]
    (folder / "data/external/stocks").mkdir(parents=True, exist_ok=True)
    pd.concat(series).to_csv(folder / "data/external/stocks/prices.csv", index=False)
    store.prepare("stocks", root=folder, source="file", tickers=6, days=160)
    (folder / "build/source").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks/stocks.ipynb", folder / "build/source")
    notebook.run("stocks", root=folder)
    return folder / "reports/stocks"


@pytest.mark.slow
def test_stocks_goes_on_without_tickers_that_are_listed_too_late_and_names_them(late_listings):
    left_out = pd.read_csv(late_listings / "tables/left_out.csv", keep_default_na=False)
    assert left_out["ticker"].tolist() == ["EE", "NA"]
    assert left_out["why"][0] == "10 closes in 110 training days, a window takes 21 in a row"
    assert pd.read_csv(late_listings / "tables/tickers.csv")["ticker"].tolist() == ["AA", "BB", "CC", "DD"]
    metrics = json.loads((late_listings / "metrics.json").read_text())
    assert (metrics["tickers"], metrics["left_out_tickers"]) == (4, 2)


@pytest.mark.parametrize("late", [[], ["EE", "NA"]])
def test_report_names_the_tickers_that_the_data_and_the_stocks_stage_left_out(late, tmp_path):
    (cell,) = [cell.source for cell in cells("report.ipynb") if "carried_forward" in cell.source]
    pd.DataFrame({"ticker": pd.Series(late, dtype=str)}).to_csv(tmp_path / "left_out.csv", index=False)
    record = {name: "" for name in ("title", "source", "date")} | {"notes": ["a file."], "inputs": {}}
    record |= {"carried_forward": ["C 2016-01-06"], "excluded": {"B": "ends on 2016-01-12"}, "left_out": ["D"]}
    read = SimpleNamespace(read_table=lambda stage, name: pd.read_csv(tmp_path / f"{name}.csv"))
    names = {"reports": read, "pd": pd, "origin": {"stocks": record}, "show": reports.markdown}
    exec(cell, names)
    said = "a file. carried forward: C 2016-01-06 excluded: B, ends on 2016-01-12. left out: D."
    said += " listed too late for a training window, left out: EE, NA." if late else ""
    assert f"| {said} |" in names["provenance"]
