"""The house around the code: what installs it, builds it and keeps it clean."""

import ast
import configparser
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ON_311 = {"python_version": "3.11", "python_full_version": "3.11.9", "implementation_name": "cpython"}


def requirements(lines):
    """{canonical name: Requirement} of those that Python 3.11 installs."""
    found = [Requirement(line) for line in lines]
    return {r.name.lower().replace("_", "-"): r for r in found if not r.marker or r.marker.evaluate(ON_311)}


def wanted():
    """What pyproject.toml asks for, in all extras but cuda."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "cuda"]
    return requirements(sum(extras, project["dependencies"]))


def locked():
    """{name: "==version"} of requirements.lock."""
    found = requirements((ROOT / "requirements.lock").read_text().splitlines())
    return {name: str(r.specifier) for name, r in found.items()}


def files():
    """What is, or is about to be, in git."""
    if not (ROOT / ".git").exists():  # an unpacked archive
        folders = [ROOT / name for name in ("src", "tests", "notebooks", ".ci", ".github")]
        return [f for f in [*ROOT.glob("*"), *(f for d in folders for f in d.rglob("*"))] if f.is_file()]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def interpreter(folder, name, script):
    """Put a command `name` into `folder`."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def which_python(path):
    """`make which-python` where the PATH is `path` alone."""
    environment = {"PATH": str(path), "HOME": str(path)}
    command = [shutil.which("make"), "--silent", "--no-print-directory", "which-python"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_environment_names_what_pyproject_names_at_the_locks_versions():
    lines = re.findall(r"^      - ([a-z].*)$", (ROOT / "environment.yml").read_text(), re.M)
    named = {name: str(r.specifier) for name, r in requirements(lines).items()}
    assert named == {name: locked()[name] for name in wanted()}


def test_lock_holds_each_dependency_at_a_version_that_pyproject_allows():
    for name, requirement in wanted().items():
        assert requirement.specifier.contains(locked()[name].removeprefix("==")), name


def test_lock_pins_the_torch_that_has_a_cpu_build():
    assert locked()["torch"] == "==2.13.0"


def test_lock_has_only_pins():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    odd = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .+)?", line)]
    assert odd == []
    gpu = [line for line in lines if line.startswith(("nvidia", "cuda", "triton"))]
    assert [line.partition("==")[0] for line in gpu] == ["nvidia-ml-py"]  # a few kilobytes of Python


def test_make_passes_over_an_interpreter_that_fails(tmp_path):
    interpreter(tmp_path, "python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    interpreter(tmp_path, "python3.12", f'exec {sys.executable} "$@"')
    assert which_python(tmp_path).stdout.split()[0] == "python3.12"


def test_make_looks_under_a_virtual_environment(tmp_path):
    interpreter(tmp_path, "python3", f'exec {sys.executable} "$@"')
    assert which_python(tmp_path).stdout.split()[1] == sys._base_executable


def test_make_refuses_an_old_interpreter_in_one_sentence(tmp_path):
    old = "import sys; sys.version_info = (3, 10, 0); exec(sys.argv[1])"
    interpreter(tmp_path, "python3", f'exec {sys.executable} -c "{old}" "$2"')
    ran = which_python(tmp_path)
    said = [line for line in ran.stderr.splitlines() if not line.startswith("make")]
    assert ran.returncode and len(said) == 1 and "Python 3.11 or newer" in said[0]


def test_dvc_reports_to_nobody():
    config = configparser.ConfigParser()
    config.read(ROOT / ".dvc/config")
    assert dict(config["core"]) == {"analytics": "false", "check_update": "false", "autostage": "false"}


def test_ci_chooses_the_librarys_tests_by_their_mark():
    from conftest import STUDY

    run = (ROOT / ".github/workflows/ci.yml").read_text()
    assert 'pytest -m "not study"' in run and "tests/" not in run
    study = {file.name for file in STUDY}
    assert study >= {"test_notebooks.py", "test_house.py"} and not study & {"test_checkpoint.py", "test_canonical.py"}


def test_the_wheel_holds_the_library_and_nothing_of_the_study(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = {str(f.relative_to(ROOT / "src")) for f in files() if f.is_relative_to(ROOT / "src/turbanet")}
    assert inside == library and "turbanet/training/fit.py" in inside


def test_folders_are_one_sentence_and_a_list_of_names():
    inner = sorted((ROOT / "src").glob("*/*/**/__init__.py"))
    code = {file: ast.parse(file.read_text()).body[1:] for file in inner}
    assert len(inner) > 4 and all(ast.get_docstring(ast.parse(file.read_text())) for file in inner)
    public = {file.parent.name: body for file, body in code.items() if body}
    assert public.keys() == {"cluster", "ensembles", "evolution", "federated", "networks", "rl"}
    del public["federated"][-1], public["federated"][:2]  # which was a function
    for *imports, names in public.values():
        imported = {alias.name for line in imports for alias in line.names}
        assert all(isinstance(line, ast.ImportFrom) for line in imports) and imported == set(
            ast.literal_eval(names.value)
        )


def test_committed_notebooks_name_their_kernel_and_the_pipelines_copies_do_not():
    for file in (ROOT / "notebooks").glob("*.ipynb"):
        assert json.loads(file.read_text())["metadata"].keys() == {"kernelspec"}, file
    keys = re.findall(r"--extra-keys '([^']+)'", (ROOT / "dvc.yaml").read_text())
    assert keys == ["metadata.kernelspec metadata.language_info"]


def test_no_file_names_a_package_index():
    address = re.compile(r"--(extra-)?index-url|--find[-]links|https?://[^\s\"']*(pypi\.|pythonhosted|/simple\b)")
    texts = {file: file.read_bytes().decode(errors="ignore") for file in files()}
    assert [str(file) for file, text in texts.items() if address.search(text)] == []


def test_doctor_lists_the_linked_files_and_what_the_data_says_of_itself(tmp_path):
    from study.pipeline import doctor

    (tmp_path / "data/external/mnist").mkdir(parents=True)
    for name in ("images.gz", ".gitignore"):
        (tmp_path / "data/external/mnist" / name).touch()
    (tmp_path / "data/mnist.json").write_text('{"source": "file", "rows": 60000}')
    assert doctor.linked(tmp_path) == {"mnist": ["images.gz"]}
    assert doctor.provenance(tmp_path) == {"mnist": {"source": "file", "rows": 60000}}
    assert doctor.stale(tmp_path) == "no dvc.yaml here"
    (tmp_path / "dvc.yaml").touch()
    assert doctor.stale(tmp_path) == "all: nothing has run here yet"


def test_pyproject_names_every_package_that_the_source_imports():
    distributions, used = importlib.metadata.packages_distributions(), set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module] if isinstance(node, ast.ImportFrom) else []
            used |= {name.partition(".")[0] for name in named}
    peers = "\n".join(file.read_text() for file in (ROOT / "peers").glob("*.txt"))  # have environments of their own
    foreign = (
        used
        - set(sys.stdlib_module_names)
        - {"turbanet", "study", *re.findall(r"^(keras|tensorflow|mxnet|horovod|flwr|neuralforecast)", peers, re.M)}
    )
    assert foreign and {distributions[name][0].lower().replace("_", "-") for name in foreign} <= wanted().keys()
