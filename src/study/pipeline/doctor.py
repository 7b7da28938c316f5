"""A report on this machine and study: devices, versions, sources of data, stale stages."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from study.pipeline import reports

INPUTS = ("code", "source", "data")  # quick stages that the report needs beside existing results


def linked(root):
    """List the user's own files by data set: {set: [file names]} of `root`/data/external/<set>/."""
    folders = sorted(folder for folder in Path(root, "data/external").glob("*") if folder.is_dir())
    return {f.name: sorted(p.name for p in f.iterdir() if not p.name.startswith(".")) for f in folders}


def provenance(root):
    """Read the data sets' provenance from `root`/data/<set>.json: {set: {key: short value}}."""
    provenances = {file.stem: json.loads(file.read_text()) for file in sorted(Path(root, "data").glob("*.json"))}
    return {
        name: {key: value for key, value in facts.items() if len(str(value)) <= 60}
        for name, facts in provenances.items()
        if isinstance(facts, dict)
    }


def stale(root):
    """List the stages whose own dependencies have changed, or explain in a sentence why that is unknown.

    Later stages are stale only if these stages' results change, which is not known before they run.
    """
    if not Path(root, "dvc.yaml").exists():
        return "no dvc.yaml here"
    if not Path(root, "build/source/notebooks").exists():
        return "all: nothing has run here yet"
    command = [sys.executable, "-m", "dvc", "repro", "--dry", "--allow-missing"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if ran.returncode:
        return f"dvc repro --dry failed: {' '.join(ran.stderr.split()):.300}"
    lines = ran.stdout.splitlines()
    return ", ".join(line.split("'")[1] for line in lines if line.startswith("Running stage")) or "none"


def stages(root):
    """List the stages of `root`/dvc.yaml that run a notebook; a group (sweep) before its stages (sweep@small)."""
    found = []
    for name, stage in yaml.safe_load(Path(root, "dvc.yaml").read_text())["stages"].items():
        if name not in INPUTS:
            found += [name, *(f"{name}@{item}" for item in stage.get("foreach", ()))]
    return found


def not_run(known):
    """List those stages of `known` that did not run here or failed."""
    groups = {name.partition("@")[0] for name in known if "@" in name}
    return reports.not_run(name.replace("@", "/") for name in known if name not in groups)


def torch_devices():
    """Describe PyTorch's devices and CPU threads."""
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch_devices": ", ".join(["cpu", *names]), "torch_threads": torch.get_num_threads()}


def report(root):
    """Collect the whole report, {section: {name: value}}."""
    from study.measurement.machine import machine

    files = {name: ", ".join(found) or "nothing linked" for name, found in linked(root).items()}
    sources = {
        name: ", ".join(f"{key} {value}" for key, value in facts.items()) for name, facts in provenance(root).items()
    }
    missing = "no dvc.yaml here"
    if Path(root, "dvc.yaml").exists():
        missing = ", ".join(not_run(stages(root))) or "none"
    return {
        "machine": {**machine(), **torch_devices()},
        "data/external": files or {"": "no data/external here: run this at the root of the repository"},
        "data": sources or {"": "none made yet: make data"},
        "stages": {"stale, and what uses them": stale(root), "not run here": missing},
    }


def main():
    sections = report(Path())
    width = max(len(name) for rows in sections.values() for name in rows)
    for section, rows in sections.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<{width}}  {value}")


if __name__ == "__main__":
    main()
