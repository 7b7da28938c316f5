"""`make report`: rebuild stale stages, then print each stage's time and source of data."""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

from study.pipeline import doctor, project
from study.pipeline.paths import repository

BACK = "To get the committed reports back: git checkout -- reports dvc.lock"


def targets(stage: str | None, known: list[str]) -> list[str]:
    """List the targets of `dvc repro` before the report: one stage with its inputs; none for the whole study.

    Raises ValueError for a stage that is not in `known`.
    """
    if stage is None:
        return []
    project.check_known("stage", stage, known)
    return [*doctor.INPUTS] if stage == "report" else [stage, *doctor.INPUTS]


def lines(root: Path, since: datetime.datetime) -> list[str]:
    """Format a line for each stage: papermill's seconds, "from before" if it ran before `since`, its source of data."""
    reports = root / "reports"
    folders = {file.parent for name in ("metrics.json", "executed.ipynb") for file in reports.rglob(name)}
    found = []
    for folder in sorted(folders):
        metrics = folder / "metrics.json"
        source = json.loads(metrics.read_text()).get("data_source", "none") if metrics.exists() else "none"
        found.append(f"{folder.relative_to(reports)!s:<14}{_seconds(folder, since):<24}{source}")
    return found


def unmade(known: list[str]) -> list[str]:
    """Format at most two lines on the stages that did not run here or failed."""
    missing = doctor.not_run(known)
    others = [name for name in missing if name != "report"]
    found = [f"did not run here; in the report, as committed, if at all: {', '.join(others)}"] if others else []
    return found + ["the report could not be made: what is there is an earlier one"] * ("report" in missing)


def _seconds(folder, since):
    executed = folder / "executed.ipynb"
    if not executed.exists():
        return "not run here"
    run = json.loads(executed.read_text())["metadata"]["papermill"]
    before = datetime.datetime.fromisoformat(run["start_time"]) < since
    return f"{run['duration']:6.0f} s" + ", from before" * before


def main(arguments=None):
    """Rebuild the study's stale stages, or one stage with its inputs and then only the report."""
    parser = argparse.ArgumentParser(description=main.__doc__, epilog="Other arguments are passed to `dvc repro`.")
    parser.add_argument("--stage", help="a stage of dvc.yaml that runs a notebook")
    options, others = parser.parse_known_args(arguments)
    begin, since = time.perf_counter(), datetime.datetime.now(datetime.UTC)
    try:
        root = repository()
        known = doctor.stages(root)
        todo = targets(options.stage, known)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    try:
        status = project.rebuild(root, todo, *others).returncode
    except KeyboardInterrupt:
        print("report: interrupted; stages that have ended stay, the next `make report` goes on.", file=sys.stderr)
        return project.INTERRUPTED
    print("\n".join(lines(root, since)))
    print(f"{'all of it':<14}{time.perf_counter() - begin:6.0f} s")
    if options.stage:
        print(f"stale, and in the report as they were: {doctor.stale(root)}")
    for line in unmade(known):
        print(line)
    if (root / ".git").exists():
        print(BACK)
    return status


if __name__ == "__main__":
    sys.exit(main())
