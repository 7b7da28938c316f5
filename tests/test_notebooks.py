"""The notebooks as they lie in git, and what dvc.yaml says of them."""

import ast
import re
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

from turbanet.lab import notebook
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
