"""docs/guide.md: every section runs, after the page's first lines and by itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs/guide.md").read_text()
PREAMBLE, *SECTIONS = [
    (section.partition("\n")[0], "\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)))
    for section in re.split(r"^#+ ", PAGE, flags=re.M)[1:]
]
# What keeps a log elsewhere is too much to install for five lines: these note what they are told.
LOGGERS = """
import contextlib, sys, types

said = []
mlflow, wandb = types.ModuleType("mlflow"), types.ModuleType("wandb")
mlflow.log_metric = lambda name, value, step: said.append((name, float(value), step))
mlflow.start_run = contextlib.nullcontext
wandb.Histogram = list
wandb.init = lambda **how: types.SimpleNamespace(log=said.append, finish=lambda: None)
sys.modules.update(mlflow=mlflow, wandb=wandb)
"""
RUN = """
for title, code in sections:
    print("##", title, flush=True)
    exec(compile(code, title, "exec"), dict(globals(), __name__=title.replace(" ", "_")))
print("said", len(said))
"""


def test_the_page_has_code_for_every_task():
    without = [title for title, code in SECTIONS if not code]
    assert without == ["When it does not help"]
    assert len(SECTIONS) > 10


@pytest.mark.slow
def test_every_section_runs(tmp_path):
    (tmp_path / "guide.py").write_text("\n".join([PREAMBLE[1], LOGGERS, f"sections = {SECTIONS!r}", RUN]))
    environment = os.environ | {"TQDM_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "guide.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    assert ran.stdout.count("## ") == len(SECTIONS)
    assert "said 15" in ran.stdout  # two numbers and one histogram, after each of five segments
