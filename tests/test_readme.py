"""README.md and the pages beside it: the example runs, and what they name is there."""

import ast
import json
import math
import os
import pydoc
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import turbanet

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
SOURCE, STUDY = SOURCES / "turbanet", SOURCES / "study"
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "docs/design.md")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGES["README.md"], re.M | re.S)


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)


def quoted(page):
    """What stands between backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def paths(page):
    """The files and folders that a page links to or names."""
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    path = re.compile(r"[^ <>${}*]*(/[^ <>${}*]*|\.(ipynb|yaml|lock|md|cff|pyi?))")
    return sorted({*filter(None, links), *(name for name in quoted(page) if path.fullmatch(name))})


def drawn(page):
    """The paths in a page's drawings of folders, each below what it is indented under; folders end in a slash."""
    found = []
    for block in re.findall(r"^```text\n(.*?)^```$", PAGES[page], re.M | re.S):
        above = []
        for spaces, name in re.findall(r"^( *)(\S+)  +\S", block, re.M):
            above = [*above[: len(spaces) // 2], name]
            found.append("".join(above))
    return found


def commands(page):
    """Lines that a reader would type."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGES[page], re.M | re.S)
    return [*quoted(page), *"\n".join(blocks).splitlines()]


def stages():
    """{name as DVC writes it: stage} of dvc.yaml."""
    found = {}
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        each = stage.get("foreach", [None])
        for key, item in each.items() if isinstance(each, dict) else zip(each, each):
            text = yaml.safe_dump(stage.get("do", stage)).replace("${item}", str(item)).replace("${key}", str(key))
            found[f"{name}@{key}" if key else name] = yaml.safe_load(text)
    return found


def made():
    """The paths that a run of the pipeline makes."""
    entries = [out for stage in stages().values() for out in [*stage.get("outs", []), *stage.get("metrics", [])]]
    return [Path(name) for entry in entries for name in ([entry] if isinstance(entry, str) else entry)]


def imported(file, package="turbanet"):
    """The top-level folders and modules of a package that a module imports; its name stands for its public names."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    ours = [name.split(".") for name in names if name.split(".")[0] == package]
    packages = {path.name.removesuffix(".py") for path in (SOURCES / package).iterdir()}
    return {parts[1] if len(parts) > 1 and parts[1] in packages else package for parts in ours}


def test_readme_has_an_example_of_at_most_fifteen_lines():
    assert EXAMPLES and len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in PAGES for name in paths(page)])
def test_page_names_a_path_that_is_there_or_is_made(page, name):
    path = Path(name)
    if path.parts[0] == "build":  # made by hand or by make, never committed
        assert "build/" in (ROOT / ".gitignore").read_text().splitlines()
    elif not any((place / path).exists() for place in (ROOT, (ROOT / page).parent, SOURCE, SOURCES, STUDY)):
        unmade = [out for out in made() if not (ROOT / out).exists()]
        modules = SOURCE / f"{name}.py", SOURCES / f"{name}.py"  # as in training/plan and study/figures/plots
        a_module = any(module.exists() for module in modules)
        assert a_module or any(path == out or out in path.parents or path in out.parents for out in unmade)


@pytest.mark.parametrize("page", PAGES)
def test_page_names_targets_and_variables_that_make_has(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^([a-z][a-z -]*):", makefile, re.M)).split())
    lines = [match for part in commands(page) if (match := re.match(r"make ([\w-]+)(?: ([A-Z]+)=)?", part))]
    assert {line[1] for line in lines} <= targets
    assert {line[2] for line in lines if line[2]} <= set(re.findall(r"\$\(([A-Z]+)\)", makefile))


@pytest.mark.parametrize("page", PAGES)
def test_page_names_python_objects_that_are_there(page):
    named = {match[1] for part in quoted(page) if (match := re.match(r"(?:tn|turbanet)\.(\w[\w.]*)", part))}
    assert [name for name in sorted(named) if pydoc.locate(f"turbanet.{name}") is None] == []


def test_pages_fetch_nothing_from_a_remote_that_there_is_not():
    assert "remote" not in (ROOT / ".dvc/config").read_text()
    assert [page for page, text in PAGES.items() if re.search(r"dvc (checkout|pull|fetch)", text)] == []


def test_readme_lists_every_stage_that_runs_a_notebook():
    table = "\n".join(line for line in PAGES["README.md"].splitlines() if line.startswith("|"))
    wanted = {name for name, stage in stages().items() if "study.pipeline.notebook" in stage["cmd"]}
    assert wanted and wanted <= set(re.findall(r"`([^`]+)`", table))


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_page_draws_paths_that_are_there(page):
    assert drawn(page) and [path for path in drawn(page) if not (ROOT / path).exists()] == []


def test_design_draws_every_folder_and_top_level_module_of_the_library():
    there = {f"{file.parent.relative_to(ROOT)}/" for file in SOURCES.rglob("*.py")}
    there |= {str(file.relative_to(ROOT)) for file in SOURCES.glob("*/*.py")} - {"src/study/__init__.py"}
    assert {path for path in drawn("docs/design.md") if path.startswith("src/")} == there


def test_design_has_a_reason_for_every_module_of_more_than_200_lines():
    table = PAGES["docs/design.md"].partition("| longer | because |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall("`(.*?)`", row.split("|")[1])]
    long = [file for file in SOURCE.rglob("*.py") if len(file.read_text().splitlines()) > 200]
    assert sorted(named) == sorted(str(file.relative_to(SOURCE).with_suffix("")) for file in long)


@pytest.mark.parametrize(("package", "first"), [("turbanet", "study"), ("study", "peers")])
def test_imports_run_the_way_that_the_design_draws(package, first):
    line = re.search(rf"^{first}\b.* -> .*$", PAGES["docs/design.md"], re.M)[0]
    level = {name: i for i, names in enumerate(line.split(" -> ")) for name in names.split(", ")}
    level |= {"turbanet": 1, "__init__": -1, "__main__": -1}
    back = []
    for file in (SOURCES / package).rglob("*.py"):
        own = file.relative_to(SOURCES / package).parts[0].removesuffix(".py")
        back += [f"{file} imports {to}" for to in imported(file, package) - {own} if level[own] >= level[to]]
    assert back == []


def test_the_library_knows_nothing_of_the_study():
    assert [file for file in SOURCE.rglob("*.py*") if file.suffix != ".pyc" and imported(file, "study")] == []


def test_changelog_sends_readers_to_modules_that_are_there():
    rows = [line.split("|")[2] for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("| `")]
    named = re.findall(r"`(turbanet[\w.]+)`", " ".join(rows))
    assert named and [name for name in named if find_spec(name) is None] == []


def test_version_is_the_same_everywhere():
    changelog = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert changelog == citation == turbanet.__version__
    assert f"Version {turbanet.__version__.rpartition('.')[0]}" in PAGES["README.md"]
    assert f"version = {{{turbanet.__version__}}}" in PAGES["README.md"]


def test_citation_has_what_the_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors"} <= citation.keys()
    assert all({"type", "title", "authors"} <= reference.keys() for reference in citation["references"])


def results():
    """README's table of results, off the committed metrics: time of another method over TurbaNet's."""
    m = json.loads((ROOT / "reports/benchmark/metrics.json").read_text())
    usual = "PyTorch's fastest usual method"
    rows = [
        ("{} networks, one hidden layer of 16 units", usual, "sweep_small_usual"),
        ("{} networks, two of 256 units", usual, "sweep_large_usual"),
        ("{} networks 784-64-32-10 on MNIST's rows, batches of 8", usual, "mnist_usual"),
        ("{} LSTMs, a series each", usual, "stocks_usual"),
        ("{} networks ResNet-20: a loss", "the best other method", "resnet"),
    ]
    head = [
        "| trained | beside | its time over ours, compiled | 95 % interval | TurbaNet ahead, compiling too, from |",
        "|---|---|---:|---:|---:|",
    ]
    lines = []
    for what, how, name in rows:
        warm, low, high = (f"{m[f'{name}_warm_ratio{kind}']:.3g}" for kind in ("", "_low", "_high"))
        ahead = math.ceil(m[f"{name}_break_even_steps"]) if f"{name}_break_even_steps" in m else "never"
        lines.append(f"| {what.format(m[f'{name}_members'])} | {how} | {warm} | {low} to {high} | {ahead} |")
    by_hand = {
        kind: [m[name] for name in m if name.endswith(f"_scan_vmap_{kind}_ratio")] for kind in ("all", "processes")
    }
    devices, processes = (f"{min(each):.3g} to {max(each):.3g}" for each in by_hand.values())
    lines += [
        "",
        f"A `scan` over `vmap` by hand takes {devices} times as long as TurbaNet on both cores, and {processes} times",
        f"in a process per core, over the {len(by_hand['all'])} workloads where it was measured.",
    ]
    return "\n".join([*head, *lines])


def claim():
    """README's second line, off the committed metrics."""
    from study.figures.labels import FUSED, LOOP
    from study.gpu import chapter
    from study.pipeline.reports import number, read_metrics, read_table

    table = read_table("benchmark", "ratios").set_index(["workload", "method"]).loc["sweep-small"]
    members = table.members[LOOP]
    over_one = members / min(table.ratio[[LOOP, FUSED]])
    gpu = chapter.numbers(chapter.cards(ROOT / "reports/gpu")[0])
    resnet = read_metrics("benchmark")["resnet_warm_ratio"]
    return (
        f"**Train hundreds of small neural networks together. On two CPU cores {members} of them take "
        f"{over_one:.2f} times as long as PyTorch takes for one, once compiled. "
        f"On one {gpu['card']} {gpu['most']:,} of them train {gpu['call_steps']} steps, a call of `fit` with all its "
        f"checks and copies, in {number(gpu['call_over_loop_one'])} times ({number(gpu['call_over_loop_one_low'])} to "
        f"{number(gpu['call_over_loop_one_high'])}) the time that PyTorch's loop takes for one. "
        f"On the CPU deep convolutional networks gain nothing: for ResNet-20 the best other method takes "
        f"{number(resnet)} of our time.**"
    )


def test_readmes_claim_is_the_committed_reports():
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "reports"], cwd=ROOT).returncode:
        pytest.skip("the reports are not the committed ones")
    said = re.search(r"<!-- claim: .*?-->\n(.*?)\n<!-- end of claim -->", PAGES["README.md"], re.S)[1]
    assert " ".join(said.split()) == claim()


def test_readme_has_the_results_of_the_committed_reports():
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "reports"], cwd=ROOT).returncode
    if changed:
        pytest.skip("the reports are not the committed ones")
    assert results() in PAGES["README.md"], results()


@pytest.mark.slow
def test_readmes_examples_run_one_after_the_other_and_the_first_prints_what_it_says(tmp_path):
    said = re.findall(r"^```\n(average member.*?)^```$", PAGES["README.md"], re.M | re.S)[0]
    (tmp_path / "example.py").write_text('print("end of an example")\n'.join(EXAMPLES))
    environment = os.environ | {"TQDM_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert len(EXAMPLES) >= 5 and ran.returncode == 0, ran.stderr
    first, number = ran.stdout.partition("end of an example\n")[0], r"[\d.]+"
    assert re.sub(number, "", first) == re.sub(number, "", said)
    assert [*map(float, re.findall(number, first))] == pytest.approx([*map(float, re.findall(number, said))], abs=0.02)


def test_what_the_readme_says_of_a_gpu_was_measured():
    from study.gpu import chapter
    from study.pipeline.reports import number

    said = re.search(r"<!-- gpu: .*?-->(.*?)<!-- end of gpu -->", PAGES["README.md"], re.S)[1]
    older, newer = (chapter.numbers(card) for card in chapter.cards(ROOT / "reports/gpu")[1::-1])
    found = older | newer
    names = "most most_ms loop_one_ms networks small_ms small_loop small_graph small_func"
    names += " small_call_steps small_call_ms"
    names += " lstms lstms_epochs lstms_seconds lstms_graph lstms_loop agents agents_steps agents_seconds"
    expected = [number(found[name].item() if hasattr(found[name], "item") else found[name]) for name in names.split()]
    assert re.findall(r"\d[\d,.]*\d|\d", re.sub("H[0-9]+|2-16-2", "", said)) == expected
