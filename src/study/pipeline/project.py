"""The study as a DVC project: copied at another size, reproduced, reported where stages failed."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import yaml

BY_HAND = "reports/benchmark", "reports/gpu", "reports/peers"  # made by no stage
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


def read(file: Path) -> dict:
    """Read a YAML file at the root of the repository; {} if it is empty."""
    if not file.exists():
        raise FileNotFoundError(f"There is no {file}; run this at the root of the repository.")
    content = yaml.safe_load(file.read_text()) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds names with their values; got {content!r:.60}.")
    return content


def check_known(what, name, known):
    """Return `name` if it is known; ValueError that lists the known names otherwise."""
    if name not in known:
        raise ValueError(f"Unknown {what} {name!r}; known: {', '.join(known) or 'none'}.")
    return name


def copy_study(root, folder, size):
    """Make `folder` a DVC project: the study of `root` at one of the sizes in its params.yaml.

    What an earlier copy has made there stays, for `repro` to keep what has not changed; without the folder all is anew.
    """
    root, folder = Path(root).resolve(), Path(folder)
    params = read(root / "params.yaml")
    sizes = params.pop("sizes", None) or {}
    params = overlay(params, sizes[check_known("size", size, sizes)] or {}, f"sizes.{size}") | {"sizes": size}
    rubbish = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("src", "notebooks"):
        remove(folder / name)
        shutil.copytree(root / name, folder / name, ignore=rubbish)
    (folder / ".dvc").mkdir(exist_ok=True)
    for name in ("CITATION.cff", "dvc.yaml", ".dvcignore", ".dvc/config"):
        shutil.copy(root / name, folder / name)
    (folder / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    # Results of `make bench` and others by hand, and at first committed results for stages that cannot run.
    if not (folder / "reports").exists() and (root / "dvc.lock").exists():
        shutil.copy(root / "dvc.lock", folder)  # with what parameters they were made
    made = shutil.ignore_patterns("executed.ipynb", "*.docx")
    for source in (root / "reports").iterdir() if not (folder / "reports").exists() else map(root.joinpath, BY_HAND):
        target = folder / source.relative_to(root)
        if source.is_dir():
            remove(target)
            shutil.copytree(source, target, ignore=made)
        elif source.suffix != ".docx":
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    remove(folder / "data/external")
    for file in root.glob("data/external/*/*"):
        link = folder / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())


def remove(folder):
    """Remove a folder if it is there; an OSError says why it cannot be."""
    if Path(folder).exists():
        shutil.rmtree(folder)


def repro(folder, *arguments, quick=False, **kwargs):
    """Run `dvc repro` in `folder` with this interpreter and the folder's src; `kwargs` go to `subprocess.run`.

    quick : compile with fewer optimizations, for runs in which compilation takes most of the time
    """
    folder = Path(folder).resolve()
    alone = folder / ".dvc/config.local"
    if not alone.exists() and not any((each / ".git").exists() for each in (folder, *folder.parents)):
        alone.write_text("[core]\n    no_scm = true\n")  # downloaded without git
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(folder / "src")}
    if quick:
        flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
        flags += ["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10.")  # gone in 0.11
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "XLA_FLAGS": " ".join(flags)}
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
        # DVC does not see that the list of failed stages changes the report.
        forced = ["--force"] if done.returncode else []
        last = repro(folder, "--single-item", "report", *forced, *arguments, quick=quick, **kwargs)
        return done if done.returncode else last
    return done


def overlay(values, changes, section):
    """Return `values` updated by `changes`, mapping by mapping; ValueError for a new name, as it is misspelt."""
    for name in changes:
        check_known(f"name in {section}", name, values)
    return values | {
        name: overlay(values[name], new, f"{section}.{name}") if isinstance(new, dict) else new
        for name, new in changes.items()
    }
