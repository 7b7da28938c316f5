"""A package that is not installed is named with the extra that brings it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CODE = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # as if it were not installed
import turbanet as tn, numpy as np, optax
{code}
"""
MISSING = {
    "pandas": ("tn.grid(rate=[1, 2])", "forecast"),
    "sklearn": ("from turbanet.estimators import TurbaClassifier", "sklearn"),
    "matplotlib": ("tn.LivePlot()(None)", "plot"),
    "ray": ("from turbanet.cluster import engine\nwith engine.connected(None): pass", "cluster"),
}
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("module", MISSING)
def test_what_is_not_installed_is_named_with_its_extra(module):
    code, extra = MISSING[module]
    command = [sys.executable, "-c", CODE.format(missing=[module], code=code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: This needs {module}: pip install '.[{extra}]' in the folder of TurbaNet's clone."
    packages = [package.partition(">")[0] for package in PROJECT["optional-dependencies"][extra]]
    assert module.replace("sklearn", "scikit-learn") in packages


def test_forecasters_need_pandas():
    command = [sys.executable, "-c", CODE.format(missing=["pandas"], code="import turbanet.forecasting")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("pip install '.[forecast]' in the folder of TurbaNet's clone.")
