"""Run one stage's notebook by papermill, or the whole study at another size."""

import argparse
import ast
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

SECTIONS = ("data", "sizes")  # sections of params.yaml without a notebook
ENCRYPTED = Config({"KernelManager": {"transport_encryption": "auto"}})  # the kernel warns without encryption
PUBLIC = (
    "README.md",
    "report.html",
    "report.pdf",
    "report.docx",
    "published.csv",
)  # files that the report stage writes to reports/ itself


def parameters(params, stage, variant=None):
    """Select the parameters of a stage's notebook from `params`, the content of params.yaml: {name: value}.

    Mappings in a section are its variants. A variant's parameters are the section's other values, those of
    section[variant], and the variant's name as `network`. Raises ValueError for an unknown stage or variant.
    """
    section = params[_check_known("stage", stage, [name for name in params if name not in SECTIONS])] or {}
    variants = [name for name, value in section.items() if isinstance(value, dict)]
    if variants or variant is not None:
        _check_known(f"variant of {stage}", variant, variants)
    common = {name: value for name, value in section.items() if name not in variants}
    return common | (section[variant] | {"network": variant} if variants else {})


def defaults(notebook):
    """Read the values assigned in the cell tagged `parameters` of the file `notebook`: {name: value}."""
    cells = nbformat.read(notebook, as_version=4).cells
    tagged = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{notebook} must have one cell tagged `parameters`, it has {len(tagged)}.")
    lines = [line for line in ast.parse(tagged[0]).body if isinstance(line, ast.Assign)]
    return {ast.unparse(name): ast.literal_eval(line.value) for line in lines for name in line.targets}


def run(stage, variant=None, *, root="."):
    """Execute build/source/<stage>.ipynb with its parameters and replace reports/<stage>[/<variant>]/.

    root : the repository, where the notebook runs

    TURBANET_REPORTS names the folder of its results; they replace the old ones only if the whole notebook succeeds. All
    stages share JAX's compilation cache in build/compiled; reported compilation times are measured in
    `study.measurement.compilation.cold()`. Raises ValueError where names in params.yaml and in the notebook's
    `parameters` cell differ, papermill's PapermillExecutionError for a cell that fails.
    """
    root = Path(root).resolve()
    values = parameters(_read(root / "params.yaml"), stage, variant)
    notebook = root / "build/source" / f"{stage}.ipynb"
    if not notebook.exists():
        raise FileNotFoundError(f"There is no {notebook.relative_to(root)}; `dvc repro source@{stage}` makes it.")
    cell = defaults(notebook)
    if misspelt := sorted(values.keys() - cell):
        raise ValueError(f"params.yaml sets {', '.join(misspelt)}, which the notebook lacks; it knows {_names(cell)}.")
    if missing := sorted(cell.keys() - values):
        raise ValueError(f"params.yaml lacks the notebook's {', '.join(missing)}; it sets {_names(values)}.")
    folder = root / "build/run" / stage / (variant or "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {
        "TURBANET_REPORTS": str(folder),
        "TQDM_DISABLE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(root / "build/compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with _environment(settings):
        papermill.execute_notebook(
            notebook,
            folder / "executed.ipynb",
            parameters=values,
            kernel_name="python3",  # the copies under build/source name no kernel
            language="python",
            cwd=root,
            progress_bar=False,
            config=ENCRYPTED,
        )
    _publish(folder, root / "reports", stage, variant)


def copy_study(root, folder, size):
    """Make `folder` afresh as a DVC project: the study of `root` at one of the sizes in its params.yaml."""
    root, folder = Path(root).resolve(), Path(folder)
    params = _read(root / "params.yaml")
    sizes = params.get("sizes") or {}
    params = _overlay(params, sizes[_check_known("size", size, sizes)] or {}, f"sizes.{size}")
    shutil.rmtree(folder, ignore_errors=True)
    rubbish = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("src", "notebooks"):
        shutil.copytree(root / name, folder / name, ignore=rubbish)
    (folder / ".dvc").mkdir()
    for name in ("dvc.yaml", ".dvcignore", ".dvc/config"):
        shutil.copy(root / name, folder / name)
    (folder / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    # Results of `make bench` and `make peers`, and committed results for stages that cannot run.
    made = shutil.ignore_patterns("executed.ipynb", "report.docx")
    shutil.copytree(root / "reports", folder / "reports", ignore=made)
    for file in root.glob("data/external/*/*"):
        link = folder / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())


def repro(folder, *arguments, quick=False, **kwargs):
    """Run `dvc repro` in `folder` with this interpreter and the folder's src; `kwargs` go to `subprocess.run`.

    quick : compile with fewer optimizations, for runs in which compilation takes most of the time
    """
    folder = Path(folder).resolve()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(folder / "src")}
    if quick:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, **kwargs)


def rebuild(folder, targets=(), *arguments, quick=False, **kwargs):
    """Run `repro` for everything that can run and, if a stage failed, for the report: the first one's exit status.

    Stages that depend on a failed one do not run either, except the report: it is made of the existing results and says
    which stages did not run (`not_run`).

    targets : stages to run before the report, which is then always made; without targets the whole study
    arguments : of both calls of `repro`
    """
    done = repro(folder, "--keep-going", *targets, *arguments, quick=quick, **kwargs)
    if done.returncode or targets:
        forced = ["--force"] * bool(
            done.returncode
        )  # DVC does not see that the list of failed stages changes the report
        repro(folder, "--single-item", "report", *forced, *arguments, quick=quick, **kwargs)
    return done


def publish(folder, name, *, root="."):
    """Move the results in `folder` to reports/<name>/ of the repository `root` and return that folder."""
    reports = Path(root) / "reports"
    _publish(Path(folder), reports, name, None)
    return reports / name


def _publish(folder, reports, stage, variant):
    for new in folder.iterdir():
        public = stage == "report" and new.name in PUBLIC
        old = reports / new.name if public else reports / stage / (variant or "") / new.name
        old.parent.mkdir(parents=True, exist_ok=True)
        if new.is_dir() and old.exists():
            shutil.rmtree(old)
        new.replace(old)


@contextlib.contextmanager
def _environment(settings):
    """Add `settings` to the environment of this process and of kernels that start inside the block."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _overlay(values, changes, section):
    """Return `values` updated by `changes`, mapping by mapping; ValueError for a new name, as it is misspelt."""
    for name in changes:
        _check_known(f"name in {section}", name, values)
    return values | {
        name: _overlay(values[name], new, f"{section}.{name}") if isinstance(new, dict) else new
        for name, new in changes.items()
    }


def _read(file):
    if not file.exists():
        raise FileNotFoundError(f"There is no {file}; run this at the root of the repository.")
    return yaml.safe_load(file.read_text()) or {}


def _names(names):
    return ", ".join(names) or "none"


def _check_known(what, name, names):
    if name not in names:
        raise ValueError(f"Unknown {what} {name!r}; known: {_names(names)}.")
    return name


def main(arguments=None):
    """Run one stage's notebook in the repository, or with --size the whole study in a copy under build/."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("stage", nargs="?", help="a section of params.yaml")
    parser.add_argument("variant", nargs="?", help="where the section has variants, one of them")
    parser.add_argument("--size", help="one of the sizes of params.yaml")
    options = parser.parse_args(arguments)
    if (options.stage is None) == (options.size is None):
        parser.error("give either a stage or --size")
    name = options.size or " ".join(filter(None, (options.stage, options.variant)))
    try:
        if options.stage:
            run(options.stage, options.variant)
            return 0
        copy_study(".", folder := Path("build") / options.size, options.size)
    except PapermillExecutionError as error:
        executed = Path("build/run") / options.stage / (options.variant or "") / "executed.ipynb"
        message = str(error.evalue).strip().partition("\n")[0]
        print(f"notebook {name}: {error.ename}: {message} (all of it is in {executed})", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, yaml.YAMLError) as error:
        print(f"notebook {name}: {error}", file=sys.stderr)
        return 1
    status = rebuild(folder, quick=options.size == "smoke").returncode
    print(f"The report at this size is {folder / 'reports/report.html'}" + ", but not all of it ran" * bool(status))
    return status


if __name__ == "__main__":
    sys.exit(main())
