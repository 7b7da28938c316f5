"""`make gpu`: measure on this machine's GPU; each section writes a file, row by row."""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from study.pipeline.paths import commit, repository


def main(arguments=None):
    """Measure all sections, or some, into reports/gpu/<card>/; without a GPU, or tiny, into build/gpu/<card>/."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("sections", nargs="*", help="a selection, such as: sweep suite")
    parser.add_argument(
        "--tiny", action="store_true", help="a few networks and steps, to check that it runs; no figures"
    )
    parser.add_argument("--share", type=float, default=1.0, help="the share of each section's seconds to use")
    parser.add_argument("--out", type=Path, help="the folder for the results")
    parser.add_argument("--mnist", type=Path, help="a file that --pack wrote, for a machine without MNIST")
    parser.add_argument("--draw", type=Path, help="only draw the figure of a card's folder")
    parser.add_argument("--pack", type=Path, help="only write MNIST's training rows into this file")
    options = parser.parse_args(arguments)
    if options.draw:
        _draw(options.draw)
        return 0
    if options.pack:
        x, y, source = _mnist()
        np.savez_compressed(options.pack, x=(255 * x).round().astype(np.uint8), y=y, source=source)
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".6")  # PyTorch needs some of the memory too

    from study.gpu import sections
    from study.measurement.machine import machine

    if unknown := sorted(set(options.sections) - sections.SECTIONS.keys()):
        parser.error(f"unknown section {unknown[0]!r}; known: {', '.join(sections.SECTIONS)}")
    here = machine()
    is_gpu = here["jax_backend"] == "gpu"
    if not is_gpu and not options.tiny:
        parser.error("JAX has no GPU here; --tiny runs on a CPU, to see whether everything works.")
    card = re.sub(r"[^a-z0-9]+", "-", (here["gpu"] if is_gpu else "cpu").lower()).strip("-")
    folder = options.out or repository() / ("reports" if is_gpu and not options.tiny else "build") / "gpu" / card
    folder.mkdir(parents=True, exist_ok=True)
    about = {"card": here["gpu"], **here, "driver": _driver(), "commit": commit(), "tiny": options.tiny}
    about |= {"date": datetime.date.today().isoformat(), "left_out": [], "failed": {}, "seconds": {}}
    about = _with_others(about, folder / "about.json", options.sections or sections.SECTIONS)
    for name in options.sections or sections.SECTIONS:
        begin = time.perf_counter()
        budget = sections.Budget(options.share * sections.SECTIONS[name][1])
        try:
            _measure(name, budget, folder / f"{name}.csv", about["commit"], tiny=options.tiny, packed=options.mnist)
        except Exception as error:  # the other sections are still measured
            about["failed"][name] = " ".join(str(error).split())[:300]
            print(f"{name} ended early: {about['failed'][name]}", file=sys.stderr, flush=True)
        about["left_out"] += [f"{name}: {what}" for what in budget.left_out]
        about["seconds"][name] = round(time.perf_counter() - begin, 1)
        (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    if not options.tiny and (folder / "sweep.csv").is_file():
        _draw(folder)
    for what in about["left_out"]:
        print(f"left out for lack of time: {what}")
    print(f"{sum(about['seconds'].values()):.0f} s; written to {folder}")
    return 1 if about["failed"] else 0


def _with_others(about, file, sections):
    """Merge into `about` the records of other sections that the same code has left in this folder."""
    before = json.loads(file.read_text()) if file.is_file() else {}
    if any(before.get(name) != about[name] for name in ("card", "commit", "tiny")):
        return about
    others = {name: seconds for name, seconds in before["seconds"].items() if name not in sections}
    left_out = [what for what in before["left_out"] if what.split(":")[0] in others]
    failed = {name: reason for name, reason in before["failed"].items() if name in others}
    return about | {"seconds": others, "left_out": left_out, "failed": failed}


def _draw(folder):
    from study.gpu import figures

    figures.draw(folder)


def _measure(name, budget, file, commit, *, tiny, packed):
    """Write the rows of a section as they are measured, each with its commit."""
    import pandas as pd

    from study.gpu import sections
    from study.gpu.torch_steps import TF32, multiplying_in

    function, _ = sections.SECTIONS[name]
    data = _mnist(packed) if name == "mnist" else ()
    rows = []
    with multiplying_in(TF32):  # where a section does not say otherwise
        for some in function(budget, *data, tiny=tiny):
            rows += [row | {"commit": commit} for row in some]
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.5g")
            print(pd.DataFrame(some).to_string(index=False, float_format="%.4g"), flush=True)


def _mnist(packed=None):
    """Load 42 000 rows of MNIST, the published number: x float32 [row, 784], y int [row], and their source."""
    if packed:
        stored = np.load(packed)
        return stored["x"].astype(np.float32) / 255, stored["y"], str(stored["source"])
    from study.sources import store

    root = repository()
    if not (root / "data/mnist.json").is_file():
        store.prepare("mnist", root=root)
    arrays, provenance = store.load("mnist", root)
    x, y = arrays["x_train"], arrays["y_train"]
    rows = np.random.default_rng(0).permutation(len(x))[:42_000]
    return (x[rows].reshape(len(rows), -1) / 255).astype(np.float32), y[rows].astype(np.int32), provenance["source"]


def _driver():
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


if __name__ == "__main__":
    sys.exit(main())
