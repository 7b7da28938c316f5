"""The notebooks as they lie in git, and what dvc.yaml says of them."""

import ast
import functools
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

from study.pipeline import doctor, notebook, project
from study.sources import store

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
SMALL = {"members": 4, "epochs": 20, "points": 32, "grid": 8}  # of the tour


def stages():
    """{name: stage} of dvc.yaml, each `foreach` unrolled, each `${...}` filled in."""
    found = {}
    pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    folders = {name: path for one in pipeline["vars"] for name, path in one.items()}
    for name, stage in pipeline["stages"].items():
        each = stage.get("foreach", [None])
        for key in each:
            values = {
                "key": key,
                "item": each[key] if isinstance(each, dict) else key,
                **folders,
            }
            text = yaml.safe_dump(stage.get("do", stage))
            filled = re.sub(r"\$\{(\w+)\}", lambda match, values=values: values[match[1]], text)
            found[name if key is None else f"{name}@{key}"] = yaml.safe_load(filled)
    return found


STAGES = stages()
RUNS = [name for name, stage in STAGES.items() if "study.pipeline.notebook" in stage["cmd"]]
SOURCE = ROOT / "src"
COPY = "build/source"  # of SOURCE, canonical
OURS = ("turbanet", "study")


def public_names():
    """{public name: the module that it comes from}, by the stub that decides it."""
    lines = ast.parse((SOURCE / "turbanet/__init__.pyi").read_text()).body
    froms = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {alias.name: f"turbanet.{line.module or alias.name}" for line in froms for alias in line.names}


PUBLIC = public_names()


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


def files_of(name):
    """The files behind a dotted name: a module's; a public name's is its module's, and turbanet's own finds it."""
    outer, _, last = name.rpartition(".")
    if outer == "turbanet" and last in PUBLIC:
        return {file_of(PUBLIC[last]), file_of("turbanet")}
    return {file_of(name) or file_of(outer)}


@functools.cache
def used(source):
    """The files of ours that a source uses: what it imports anywhere in it, and the names it takes of `turbanet`."""
    names, packages, taken = set(), set(), set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.partition(".")[0] in OURS]
            packages |= {alias.asname or "turbanet" for alias in ours if alias.name == "turbanet" or not alias.asname}
            names |= {alias.name for alias in ours if alias.name != "turbanet"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module.split(".")[0] in OURS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            names.add(f"turbanet.{node.attr}")
            taken.add(node.value)
    bare = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in packages and node not in taken]
    assert not bare, f"line {bare[0].lineno} hands the package itself on: what it uses cannot be told"
    return set().union(*map(files_of, names))


def closure(source):
    """Those files, those that they use, and so on."""
    found, new = set(), used(source)
    while new:
        found |= new
        new = set().union(*(used(file.read_text()) for file in new)) - found
    return found


def dependencies(source):
    """What dvc.yaml must name for a source: single modules of the study and of the library's top, its folders whole."""
    files = closure(source)
    scaling = Path("study/data_parallel/scaling")
    if SOURCE / scaling / "launch.py" in files:  # which starts the programs beside it
        files |= {file for program in (SOURCE / scaling).glob("*.py") for file in closure(program.read_text())}
    inner = {file.relative_to(SOURCE) for file in files}
    if re.search(r"\breports\.published", source):  # these functions read a file beside their module
        inner.add(Path("study/pipeline/published.csv"))
    whole = {path: path if path.parts[0] == "study" else Path(*path.parts[:2]) for path in inner}
    whole |= {path: path.parent for path in inner if path.parent == scaling}
    return {f"{COPY}/{path}" for path in whole.values()}


def declared(stage):
    return {dep for dep in STAGES[stage]["deps"] if dep.startswith(tuple(f"{COPY}/{name}/" for name in OURS))}


def difference(stage, needed):
    """What dvc.yaml forgets and what it names in vain; nothing if all is right."""
    missing = [f"dvc.yaml, {stage}: missing {name}" for name in sorted(needed - declared(stage))]
    return missing + [f"dvc.yaml, {stage}: superfluous {name}" for name in sorted(declared(stage) - needed)]


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
    plain = [cell for cell in cells(name) if "parameters" not in cell.metadata.get("tags", [])]  # a line each
    lengths = {cell.id: len([line for line in cell.source.splitlines() if line.strip()]) for cell in plain}
    assert {i: length for i, length in lengths.items() if length > 15} == {}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_has_narrow_cells(name):
    lines = [line for cell in cells(name) for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > 120] == []


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
def test_run_stage_declares_the_code_that_its_notebook_uses(stage):
    assert difference(stage, dependencies(code(f"{stage.partition('@')[0]}.ipynb"))) == []


@pytest.mark.parametrize("stage", [f"data@{name}" for name in store.SETS])
def test_data_stage_declares_the_modules_of_its_set(stage):
    modules = f"study.sources.store, study.sources.{stage.partition('@')[2]}"
    assert difference(stage, dependencies(f"import {modules}")) == []


def test_used_follows_imports_and_public_names():
    source = "import turbanet as tn\nfrom turbanet import LSTM\nfrom study.figures import plots\ntn.fit, tn.loss"
    names = ["turbanet", "study.figures.plots", "turbanet.loss", "turbanet.networks.models", "turbanet.training.fit"]
    assert used(source) == set(map(file_of, names))


def test_used_refuses_a_package_that_is_handed_on():
    with pytest.raises(AssertionError, match="line 2 hands the package itself on"):
        used("import turbanet as tn\nsetattr(tn, 'fit', None)")


def test_dependencies_are_folders_but_for_the_study():
    found = dependencies("from turbanet.core import plan\nfrom study.pipeline.paths import repository")
    assert found == {f"{COPY}/turbanet/backend.py", f"{COPY}/turbanet/core", f"{COPY}/study/pipeline/paths.py"}


def test_the_report_depends_on_what_every_stage_makes():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    names = [name.replace("@", "/") for name in doctor.stages(ROOT) if name not in ("sweep", "report")]
    made = {f"reports/{name}/{part}" for name in names for part in ("metrics.json", "tables", "figures")}
    assert made <= set(stages["report"]["deps"])
    read = next(cell.source for cell in nbformat.read(ROOT / "notebooks/report.ipynb", 4).cells if cell.id == "read")
    assert [name for name in names if f'"{name}"' not in read] == []  # else a stand-in of it is not told
    text = "".join(file.read_text() for file in (ROOT / "notebooks/report").glob("*.j2"))
    told = "".join(re.findall(r"as_committed\((.*?)\)", text))
    assert [name for name in names if f'"{name}"' not in told] == []  # else nobody learns that it failed


@pytest.mark.parametrize("stage", RUNS)
def test_run_stage_declares_each_of_its_parameters(stage):
    name, _, variant = stage.partition("@")
    common = [f"{name}.{key}" for key, value in (PARAMS[name] or {}).items() if not isinstance(value, dict)]
    assert STAGES[stage]["params"] == ([*common, f"{name}.{variant}"] if variant else [name])


@pytest.mark.parametrize("stage", RUNS)
def test_run_stage_runs_the_copy_that_the_source_stage_makes(stage):
    name, _, variant = stage.partition("@")
    assert STAGES[stage]["cmd"] == f"python -m study.pipeline.notebook {name} {variant}".strip()
    assert STAGES[stage]["deps"][0] == f"{STAGES['source']['outs'][0]}/{name}.ipynb"


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
    project.copy_study(ROOT, folder, "smoke")
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
    (folder / "build/source/notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks/stocks.ipynb", folder / "build/source/notebooks")
    notebook.run("stocks", root=folder)
    return folder / "reports/stocks"


@pytest.mark.thorough
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
    names = {"reports": read, "pd": pd, "origin": {"stocks": record}}
    exec(cell, names)
    said = "a file. Carried forward: C 2016-01-06. Left out: D."
    said += " Listed too late for a training window, left out: EE, NA." if late else ""
    said += " Excluded: B, ends on 2016-01-12."
    assert names["provenance"].notes.tolist() == [said]


def leaves(value):
    """The values in a value of params.yaml, a list of lists at the most."""
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list) else [value]


def branches(size, stage):
    """{parameter: (whether it is on, the words in it)} of a stage at a size; a 0 anywhere in it is off."""
    values = project.overlay(PARAMS, PARAMS["sizes"].get(size, {}), size)[stage] or {}
    for variant in [name for name, value in values.items() if isinstance(value, dict)]:
        values = values | {f"{variant}.{name}": value for name, value in values[variant].items()}
    parts = {name: leaves(value) for name, value in values.items() if not isinstance(value, dict)}
    return {name: (all(part), {each for each in part if isinstance(each, str)}) for name, part in parts.items()}


@pytest.mark.parametrize("stage", [name for name in PARAMS if name not in notebook.SECTIONS])
def test_smoke_takes_the_branches_of_the_defaults_and_turns_on_what_another_size_does(stage):
    smoke, default, published = (branches(size, stage) for size in ("smoke", "default", "published"))
    for name, (on, words) in smoke.items():
        assert on or not (default[name][0] or published[name][0]), f"{name} is 0 in smoke alone"
        assert words == default[name][1], f"{name} leaves names out"
