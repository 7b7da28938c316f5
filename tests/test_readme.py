"""README.md: its example runs, and what it names is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
QUOTED = re.findall(r"`([^`\n]+)`", PROSE)
LINKS = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", PROSE) if not re.match(r"https?:|#", link)]
PATHS = sorted({*LINKS, *(name for name in QUOTED if re.fullmatch(r"[^ <>${}*]*(/[^ <>${}*]*|\.ipynb|\.yaml)", name))})


def stages():
    """{name as DVC writes it: stage} of dvc.yaml."""
    found = {}
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items():
        for item in stage.get("foreach", [None]):
            text = yaml.safe_dump(stage.get("do", stage)).replace("${item}", str(item))
            found[f"{name}@{item}" if item else name] = yaml.safe_load(text)
    return found


def made():
    """The paths that a run of the pipeline makes."""
    entries = [out for stage in stages().values() for out in [*stage.get("outs", []), *stage.get("metrics", [])]]
    return [Path(name) for entry in entries for name in ([entry] if isinstance(entry, str) else entry)]


def test_readme_has_an_example_of_at_most_fifteen_lines():
    assert EXAMPLES and len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 15


@pytest.mark.slow
def test_readme_example_runs_and_prints(tmp_path):
    (tmp_path / "example.py").write_text(EXAMPLES[0])
    environment = os.environ | {"TQDM_DISABLE": "1"}
    command = [sys.executable, "example.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"\d", ran.stdout), "it prints no number"


@pytest.mark.parametrize("name", PATHS)
def test_readme_names_a_path_that_is_there_or_is_made(name):
    path = Path(name)
    if path.parts[0] == "build":  # made by hand or by make, never committed
        assert "build/" in (ROOT / ".gitignore").read_text().splitlines()
    elif not (ROOT / path).exists():
        unmade = [out for out in made() if not (ROOT / out).exists()]
        assert any(path == out or out in path.parents or path in out.parents for out in unmade)


def test_readme_names_targets_that_make_has():
    lines = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.M)
    code = [*QUOTED, *"\n".join(re.findall(r"^```\w*\n(.*?)^```$", TEXT, re.M | re.S)).splitlines()]
    named = {match[1] for part in code if (match := re.match(r"make ([\w-]+)", part))}
    assert "report" in named and named <= set(" ".join(lines).split())


def test_readme_lists_every_stage_that_runs_a_notebook():
    table = "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))
    wanted = {name for name in stages() if name.split("@")[0] not in ("data", "source")}
    assert wanted and wanted <= set(re.findall(r"`([^`]+)`", table))
