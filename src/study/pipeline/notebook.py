"""Run one stage's notebook by papermill, or the whole study at another size."""

import argparse
import ast
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from study.pipeline import project

SECTIONS = ("data", "sizes")  # sections of params.yaml without a notebook
ENCRYPTED = Config({"KernelManager": {"transport_encryption": "auto"}})  # the kernel warns without encryption
PUBLIC = (
    "README.md",
    "report.html",
    "report.pdf",
    "report.docx",
    "supplement.md",
    "supplement.html",
    "supplement.pdf",
    "supplement.docx",
    "published.csv",
)  # files that the report stage writes to reports/ itself


def parameters(params, stage, variant=None):
    """Select the parameters of a stage's notebook from `params`, the content of params.yaml: {name: value}.

    Mappings in a section are its variants. A variant's parameters are the section's other values, those of
    section[variant], and the variant's name as `network`. Raises ValueError for an unknown stage or variant.
    """
    section = params[project.check_known("stage", stage, [name for name in params if name not in SECTIONS])] or {}
    if not isinstance(section, dict):
        raise ValueError(f"The section {stage} of params.yaml is names with their values; got {section!r:.60}.")
    variants = [name for name, value in section.items() if isinstance(value, dict)]
    if variants or variant is not None:
        project.check_known(f"variant of {stage}", variant, variants)
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
    """Execute build/source/notebooks/<stage>.ipynb with its parameters and replace reports/<stage>[/<variant>]/.

    root : the repository, where the notebook runs

    TURBANET_REPORTS names the folder of its results; they replace the old ones only if the whole notebook succeeds. All
    stages share JAX's compilation cache in build/compiled; reported compilation times are measured in
    `study.measurement.compilation.cold()`. Raises ValueError where names in params.yaml and in the notebook's
    `parameters` cell differ, papermill's PapermillExecutionError for a cell that fails.
    """
    root = Path(root).resolve()
    values = parameters(project.read(root / "params.yaml"), stage, variant)
    notebook = root / "build/source/notebooks" / f"{stage}.ipynb"
    if not notebook.exists():
        raise FileNotFoundError(f"There is no {notebook.relative_to(root)}; `dvc repro source` makes it.")
    cell = defaults(notebook)
    if misspelt := sorted(values.keys() - cell):
        known = ", ".join(cell) or "none"
        raise ValueError(f"params.yaml sets {', '.join(misspelt)}, which the notebook lacks; it knows {known}.")
    if missing := sorted(cell.keys() - values):
        present = ", ".join(values) or "none"
        raise ValueError(f"params.yaml lacks the notebook's {', '.join(missing)}; it sets {present}.")
    for name, value in values.items():
        if not _fits(value, cell[name]):
            advice = ": a number has a point before its exponent, 1.0e-3, for YAML" if isinstance(value, str) else ""
            raise ValueError(
                f"params.yaml sets {name} of {stage} to {value!r}, such as {cell[name]!r} is right{advice}."
            )
    name = f"{stage}/{variant}" if variant else stage
    folder = root / "build/run" / name
    project.remove(folder)
    folder.mkdir(parents=True)
    results = root / "reports" / name
    results.mkdir(parents=True, exist_ok=True)
    for each in (results, *filter(Path.is_dir, results.iterdir())):  # known before the notebook has run
        if not os.access(each, os.W_OK):
            raise PermissionError(f"{each} cannot be written: its owner is another user, or it is read-only.")
    settings = {
        "TURBANET_REPORTS": str(folder),
        "TQDM_DISABLE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(root / "build/compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with mock.patch.dict(os.environ, settings):  # of this process, and so of the kernel
        papermill.execute_notebook(
            notebook,
            folder / "executed.ipynb",
            parameters=values,
            kernel_name="python3",  # the copies in build/source name no kernel
            language="python",
            cwd=root,
            progress_bar=False,
            config=ENCRYPTED,
        )
    publish(folder, name, root=root)


def _fits(value, example):
    """Whether a parameter is of the type of the notebook's own value, also within lists."""
    if isinstance(example, list):
        return isinstance(value, list) and all(_fits(each, example[0]) for each in value if example)
    number = isinstance(example, int | float) and not isinstance(example, bool)
    kinds = int | float if number else type(example)
    return example is None or (isinstance(value, kinds) and (isinstance(value, bool) == isinstance(example, bool)))


def publish(folder, name, *, root="."):
    """Move the results in `folder` to reports/<name>/ of the repository `root` and return that folder.

    The report itself goes to reports/.
    """
    reports = Path(root, "reports")
    for new in Path(folder).iterdir():
        is_public = name == "report" and new.name in PUBLIC
        old = (reports if is_public else reports / name) / new.name
        old.parent.mkdir(parents=True, exist_ok=True)
        if new.is_dir() and old.exists():
            shutil.rmtree(old)
        new.replace(old)
    return reports / name


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
        project.copy_study(".", folder := Path("build") / options.size, options.size)
        status = project.rebuild(folder, quick=options.size == "smoke").returncode
    except PapermillExecutionError as error:
        executed = Path("build/run") / options.stage / (options.variant or "") / "executed.ipynb"
        message = str(error.evalue).strip().partition("\n")[0]
        print(f"notebook {name}: {error.ename}: {message} (all of it is in {executed})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"notebook {name}: interrupted", file=sys.stderr)
        return project.INTERRUPTED
    except (ValueError, OSError, RuntimeError, yaml.YAMLError) as error:
        print(f"notebook {name}: {error}", file=sys.stderr)
        return 1
    print(f"The report at this size is {folder / 'reports/report.html'}" + ", but not all of it ran" * bool(status))
    return status


if __name__ == "__main__":
    sys.exit(main())
