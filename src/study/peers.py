"""`make peers`: long measurements, many with other frameworks, each framework in its own environment."""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

from study.agents import suite as agents_suite
from study.cluster import costs as cluster_costs
from study.data_parallel import suite as workers_suite
from study.data_parallel.scaling import suite
from study.federated import peers as federated_peers
from study.forecasting import peers as forecasting_peers
from study.pipeline.environments import build
from study.pipeline.paths import commit, repository

PARTS = suite.PARTS | workers_suite.PARTS | agents_suite.PARTS | federated_peers.PARTS | cluster_costs.PARTS
PARTS |= forecasting_peers.PARTS


def main(arguments=None):
    """Build the environments, then measure all parts into reports/peers/; run it alone on the machine."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of them: {', '.join(PARTS)}")
    parser.add_argument("--build", action="store_true", help="only build")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - PARTS.keys()):
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    root = repository()
    failures = []
    by_framework = suite.PARTS.keys() | workers_suite.PARTS.keys()  # others make the one environment that they need
    needed = options.build or by_framework & set(options.parts or PARTS)
    for packages in sorted((root / "peers").glob("*.txt")) if needed else ():
        try:
            build(packages.stem, root=root)
        except subprocess.CalledProcessError as failure:
            failures.append(f"{packages.stem} is not built: {failure}")
    for sentence in failures:
        print(sentence, file=sys.stderr)
    if options.build:
        return 1 if failures else 0
    import turbanet as tn
    from study.measurement.machine import machine, machine_line

    tn.use_cores(cache=False)  # cold timings compile
    folder = Path(root / "reports/peers")
    for part in options.parts or PARTS:
        when = {"date": datetime.date.today().isoformat(), "commit": commit()}
        table = PARTS[part]()
        folder.mkdir(parents=True, exist_ok=True)
        table.to_csv(folder / f"{part}.csv", index=False, float_format="%.5g")
        here = {"machine": machine_line(), **when, **machine()}
        (folder / f"{part}.json").write_text(json.dumps(here, indent=2) + "\n")
        print(f"{machine_line()}; written to {folder / part}.csv", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
