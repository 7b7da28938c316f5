"""What an editor and a type checker see of the library, which run none of its code."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import turbanet as tn
from turbanet.estimators import TurbaClassifier

ROOT = Path(__file__).parents[1]
TRAINED = """import optax, turbanet as tn
swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.adam(1e-3), 3, input_size=4)
swarm, history = tn.fit(swarm, x, y, tn.mse, epochs=1)
"""
SETTINGS = """
[[tool.mypy.overrides]]  # each is a page's first lines and one of its sections, run one after the other
module = {modules}
allow_redefinition_new = true
local_partial_types = true
disallow_incomplete_defs = false

[[tool.mypy.overrides]]
module = "haiku.*"
follow_imports = "skip"
"""


def completions(code):
    """The names that Jedi, which completes in IPython and JupyterLab, offers at the end of the code."""
    jedi = pytest.importorskip("jedi")
    return {completion.name for completion in jedi.Script(code).complete()}


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_public_names_are_completed():
    assert set(tn.__all__) - completions("import turbanet as tn\ntn.") == set()


@pytest.mark.parametrize(("name", "kind"), [("swarm", tn.TurbaTrainState), ("history", tn.History)])
def test_methods_of_what_fit_returns_are_completed(name, kind):
    assert public(kind) > {"train", "save"} or public(kind) > {"frame", "best"}
    assert public(kind) - completions(f"{TRAINED}{name}.") == set()


@pytest.mark.parametrize("function", [tn.fit, tn.cross_validate, tn.TrainingView.stop, TurbaClassifier.fit])
def test_arrays_are_array_like_in_a_signature(function):
    signature = str(inspect.signature(function))
    assert "ArrayLike" in signature and "_SupportsArray" not in signature


@pytest.mark.slow
def test_examples_have_the_types_of_the_signatures(tmp_path):
    pytest.importorskip("mypy")
    examples = {}
    for page in ("README.md", "docs/guide.md"):
        sections = re.split(r"^#+ ", (ROOT / page).read_text(), flags=re.M)
        code = ["\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)) for section in sections]
        examples |= {f"{Path(page).stem}_{i}.py": f"{code[1]}\n{part}" for i, part in enumerate(code) if part}
    for name, code in examples.items():
        (tmp_path / name).write_text(code)
    modules = [Path(name).stem for name in examples]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + SETTINGS.format(modules=modules))
    command = [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache", *examples]  # the one of `make lint`
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    # A dict of settings has one type for all its values, to mypy, and so can fit no argument.
    known = '"**dict[', "[import-"  # nor has mypy the types of all packages
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line and not any(k in line for k in known)]
    assert checked.returncode in (0, 1) and errors == [], checked.stdout + checked.stderr
