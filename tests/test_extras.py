"""A package that is not installed is named with the extra that brings it."""

import subprocess
import sys
import tomllib
from pathlib import Path

CODE = """
import sys
import turbanet as tn

for module, code in {cases!r}:
    here = {{name: loaded for name, loaded in sys.modules.items() if name.partition(".")[0] == module}}
    sys.modules.update(dict.fromkeys([*here, module]))  # as if it were not installed
    try:
        exec(code)
    except ImportError as error:
        print(error)
    del sys.modules[module]
    sys.modules.update(here)
"""
CASES = [  # the module that is missing, what needs it, the extra that brings it
    ("pandas", "tn.grid(rate=[1, 2])", "forecast"),
    ("pandas", "import turbanet.forecasting", "forecast"),
    ("sklearn", "from turbanet.estimators import TurbaClassifier", "sklearn"),
    ("matplotlib", "tn.LivePlot()(None)", "plot"),
    ("ray", "from turbanet.cluster import engine\nwith engine.connected(None): pass", "cluster"),
]
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_what_is_not_installed_is_named_with_its_extra():
    command = [sys.executable, "-c", CODE.format(cases=[case[:2] for case in CASES])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "This needs {}: pip install '.[{}]' in the folder of TurbaNet's clone.".format
    assert done.stdout.splitlines() == [said(module, extra) for module, _, extra in CASES], done.stderr
    for module, _, extra in CASES:
        packages = [package.partition(">")[0] for package in PROJECT["optional-dependencies"][extra]]
        assert module.replace("sklearn", "scikit-learn") in packages
