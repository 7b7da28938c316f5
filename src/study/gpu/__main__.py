"""`make gpu`: measure on the GPU of this machine, a file a section, written as soon as a row is there."""

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

from study.pipeline.paths import repository


def main(arguments=None):
    """Measure all sections, or some, into reports/gpu/<card>/; without a GPU, and tiny, into build/gpu/<card>/."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("sections", nargs="*", help="some of them, such as: sweep suite")
    parser.add_argument("--tiny", action="store_true", help="a few networks and steps: whether it runs, no figures")
    parser.add_argument("--share", type=float, default=1.0, help="of each section's seconds")
    parser.add_argument("--out", type=Path, help="the folder for the results")
    parser.add_argument("--mnist", type=Path, help="a file that --pack wrote, on a machine that has no other")
    parser.add_argument("--draw", type=Path, help="only draw the figure of a card's folder")
    parser.add_argument("--pack", type=Path, help="only write the rows of MNIST that are trained on into this file")
    given = parser.parse_args(arguments)
    if given.draw:
        _draw(given.draw)
        return 0
    if given.pack:
        x, y, source = _mnist()
        np.savez_compressed(given.pack, x=(255 * x).round().astype(np.uint8), y=y, source=source)
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".6")  # PyTorch needs some of the memory too

    from study.gpu import sections
    from study.measurement.machine import machine

    if unknown := sorted(set(given.sections) - sections.SECTIONS.keys()):
        parser.error(f"unknown section {unknown[0]!r}; known: {', '.join(sections.SECTIONS)}")
    here = machine()
    is_gpu = here["jax_backend"] == "gpu"
    if not is_gpu and not given.tiny:
        parser.error("JAX has no GPU here; --tiny runs on a CPU, to see whether everything works.")
    card = re.sub(r"[^a-z0-9]+", "-", (here["gpu"] if is_gpu else "cpu").lower()).strip("-")
    folder = given.out or repository() / ("reports" if is_gpu and not given.tiny else "build") / "gpu" / card
    folder.mkdir(parents=True, exist_ok=True)
    about = {"card": here["gpu"], **here, "driver": _driver(), "commit": _commit(), "tiny": given.tiny}
    about |= {"date": datetime.date.today().isoformat(), "left_out": [], "failed": {}, "seconds": {}}
    about = _with_others(about, folder / "about.json", given.sections or sections.SECTIONS)
    for name in given.sections or sections.SECTIONS:
        begin = time.perf_counter()
        budget = sections.Budget(given.share * sections.SECTIONS[name][1])
        try:
            _measure(name, budget, folder / f"{name}.csv", about["commit"], tiny=given.tiny, packed=given.mnist)
        except Exception as error:  # the others are measured all the same
            about["failed"][name] = " ".join(str(error).split())[:300]
            print(f"{name} ended early: {about['failed'][name]}", file=sys.stderr, flush=True)
        about["left_out"] += [f"{name}: {what}" for what in budget.left_out]
        about["seconds"][name] = round(time.perf_counter() - begin, 1)
        (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    if not given.tiny and (folder / "sweep.csv").is_file():
        _draw(folder)
    for what in about["left_out"]:
        print(f"left out, as there was no time: {what}")
    print(f"{sum(about['seconds'].values()):.0f} s; written to {folder}")
    return 1 if about["failed"] else 0


def _with_others(about, file, sections):
    """`about` with what the same code has left of other sections in this folder."""
    before = json.loads(file.read_text()) if file.is_file() else {}
    if any(before.get(name) != about[name] for name in ("card", "commit", "tiny")):
        return about
    others = {name: seconds for name, seconds in before["seconds"].items() if name not in sections}
    left_out = [what for what in before["left_out"] if what.split(":")[0] in others]
    failed = {name: why for name, why in before["failed"].items() if name in others}
    return about | {"seconds": others, "left_out": left_out, "failed": failed}


def _draw(folder):
    from study.gpu import figures

    figures.draw(folder)


def _measure(name, budget, file, commit, *, tiny, packed):
    """Write the rows of a section as they come, each with the commit that measured it."""
    import pandas as pd

    from study.gpu import sections

    function, _ = sections.SECTIONS[name]
    data = _mnist(packed) if name == "mnist" else ()
    rows = []
    for some in function(budget, *data, tiny=tiny):
        rows += [row | {"commit": commit} for row in some]
        pd.DataFrame(rows).to_csv(file, index=False, float_format="%.5g")
        print(pd.DataFrame(some).to_string(index=False, float_format="%.4g"), flush=True)


def _mnist(packed=None):
    """42 000 rows of MNIST, as many as were published on: x float32 [row, 784], y int [row], where they came from."""
    if packed:
        held = np.load(packed)
        return held["x"].astype(np.float32) / 255, held["y"], str(held["source"])
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


def _commit():
    """Of the code that measures: git's, or TURBANET_COMMIT where a copy without git is run."""
    if known := os.environ.get("TURBANET_COMMIT"):
        return known
    try:
        ask = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(ask, cwd=repository(), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
