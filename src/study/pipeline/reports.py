"""A stage's results, metrics, tables and figures, and the numbers that others have published."""

import hashlib
import io
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from study.pipeline.paths import repository

MADE_UP = {"environments, simulated", "series, simulated", "two spirals, generated", "random numbers in the suite"}
DIGITS = 6  # of a committed metric: enough to compare, few enough to read in a diff


class Report:
    """The folder of one stage's results: the runner's (TURBANET_REPORTS) or, by hand, a folder in build/by_hand/.

    Only the runner's results reach reports/, and only if the whole notebook succeeds, so running a notebook by hand
    makes no stage stale.
    """

    def __init__(self, stage, variant=None):
        by_hand = repository() / "build" / "by_hand" / stage / (variant or "")
        self.folder = Path(os.environ.get("TURBANET_REPORTS") or by_hand)

    def metrics(self, values):
        """Write metrics.json, {name: number rounded to six significant digits}; `data_source` is text."""
        clean = {}
        for name, value in values.items():
            if name != "data_source":
                value = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(f"The metric {name} must be a finite number, got {value!r}.")
                value = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
            elif not isinstance(value, str):
                raise ValueError(f"The metric data_source must be text, got {value!r}.")
            clean[name] = value
        self.text("metrics.json", json.dumps(clean, indent=2) + "\n")

    def table(self, frame, name):
        """Write tables/<name>.csv without the index and return the frame."""
        frame = frame.map(lambda cell: float(f"{cell:.{DIGITS}g}") if isinstance(cell, float) else cell)
        self.text(f"tables/{name}.csv", frame.to_csv(index=False))
        return frame

    def figure(self, fig, name, note=""):
        """Write figures/<name>.png (256 colours), .pdf and the note, .txt; equal figures give equal bytes.

        note : whole sentences on data, sizes, machine and repeats, which the report adds to the caption
        """
        (self.folder / "figures").mkdir(parents=True, exist_ok=True)
        path = str(self.folder / "figures" / name)
        picture = io.BytesIO()
        fig.savefig(picture, format="png", dpi=200)
        Image.open(picture).convert("RGB").quantize(256).save(f"{path}.png", optimize=True)  # a third of the bytes
        fig.savefig(f"{path}.pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
        self.text(f"figures/{name}.txt", f"{note}\n")
        return fig

    def text(self, name, text):
        """Write one text file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read_metrics(stage):
    """Read the metrics of a stage such as "mnist" or "sweep/small"."""
    return json.loads(_existing(stage, "metrics.json").read_text())


def read_table(stage, name):
    """Read a stage's table as a pandas frame, whose `attrs` name the stage."""
    import pandas as pd

    table = pd.read_csv(_existing(stage, f"tables/{name}.csv"))
    table.attrs["stage"] = stage
    return table


def read_peers(part):
    """Read a table of `make peers` and {the machine's facts}, of which `measured` is a sentence on when and where."""
    import pandas as pd

    table, record = (_existing("peers", f"{part}.{kind}", f"make peers ARGS={part}") for kind in ("csv", "json"))
    here = json.loads(record.read_text())
    measured = f"measured on {here['date']} by make peers on {here['machine']}, of commit {here['commit']}"
    return pd.read_csv(table), here | {"measured": measured}


def machines(root):
    """List the machines of what was measured before, by hand: {line on a machine: what}."""
    import pandas as pd

    measured = [(f, "`make bench`") for f in sorted((root / "reports/benchmark").glob("*/ratios.csv"))]
    measured += [(f, "`make peers`") for f in sorted((root / "reports/peers").glob("*.json"))]
    found = {}
    for file, what in measured:
        lines = pd.read_csv(file).machine if file.suffix == ".csv" else [json.loads(file.read_text())["machine"]]
        for line in lines:
            found.setdefault(line, []).append(what)
    return {line: ", ".join(dict.fromkeys(whats)) for line, whats in found.items()}


def parts(line):
    """Split a line on a machine: (processor and cores, versions)."""
    hardware, _, versions = line.partition(", jax ")
    return hardware, f"jax {versions}"


def minutes(root, stage):
    """Return the minutes that a stage's notebook took; None if its results are of no run here."""
    executed = _executed(root, stage)
    return executed and json.loads(executed.read_text())["metadata"]["papermill"]["duration"] / 60


def _executed(root, stage):
    """Return the file of the notebook that made a stage's results; None if they are of no run here.

    A checkout of committed results leaves the notebook of the run before, which dvc.lock then does not know.
    """
    executed, lock = root / "reports" / stage / "executed.ipynb", root / "dvc.lock"
    if not executed.is_file():
        return None
    stages = yaml.safe_load(lock.read_text())["stages"].values() if lock.is_file() else ()
    known = {out["path"]: out.get("md5") for one in stages for out in one.get("outs", ())}
    digest = hashlib.md5(executed.read_bytes()).hexdigest()
    return executed if known.get(str(executed.relative_to(root)), digest) == digest else None


def parameters(root):
    """Return the parameters that the stages last ran with, as dvc.lock has them, in the shape of params.yaml."""
    found = {}
    for stage in yaml.safe_load((root / "dvc.lock").read_text())["stages"].values():
        for name, value in stage.get("params", {}).get("params.yaml", {}).items():
            *path, last = name.split(".")
            section = found
            for part in path:
                section = section.setdefault(part, {})
            section[last] = _numbers(value)
    return found


def _numbers(value):
    """Return a value of dvc.lock with numbers such as 5e-05, which YAML reads as text, as numbers."""
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if isinstance(value, str) and re.fullmatch(r"-?[\d.]+e[-+]?\d+", value) else value


def are_real(metrics, records):
    """Whether stages ran on real data: `metrics` of each; `records`, the provenance of the sets that are there now.

    A set that a stage ran on and that is there no more is not known to be real.
    """
    used = {name for each in metrics for name in each["data_source"].split("; ")} - MADE_UP
    return all(record["real"] for record in records) and used <= {record["title"] for record in records}


def results_hash(root):
    """Hash what dvc.lock says of all stages but the report's: ten letters, equal for equal code, inputs and results."""
    lock = yaml.safe_load((root / "dvc.lock").read_text())
    others = {name: stage for name, stage in lock["stages"].items() if name != "report"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:10]


def bibtex(cited, results):
    """Format the content of CITATION.cff as a BibTeX entry; `results` identifies them."""
    lines = {"title": cited["title"], "author": " and ".join(one["name"] for one in cited["authors"])}
    lines |= {"version": cited["version"], "year": str(cited["date-released"])[:4]}
    lines["note"] = f"Software and reproducible study, results {results}"
    return "@software{turbanet,\n" + "".join(f"  {name} = {{{value}}},\n" for name, value in lines.items()) + "}"


def not_run(stages):
    """List those of `stages`, named as for `read_metrics`, that did not run here or failed; their results are older."""
    return [stage for stage in stages if _executed(repository(), stage) is None]


def _existing(stage, name, made_by="dvc repro"):
    path = repository() / "reports" / stage / name
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}; `{made_by}` makes it.")
    return path


def published(metrics):
    """Compare published numbers with ours: a table of study, what, published, here, ratio, why, source.

    metrics : {stage: {name: number}}. The published numbers are in published.csv beside this module; those without a
    stage are only quoted, as are those that were not measured here; settings of a study are left out. Where a line
    names epochs, our number is scaled from our epochs to them.
    """
    table = _published()
    table = table[table.stage != "setting"]
    here = []
    for stage, metric, epochs in table[["stage", "metric", "epochs"]].itertuples(index=False):
        if metric not in metrics.get(stage, {}):
            here.append(math.nan)
            continue
        scale = 1.0 if math.isnan(epochs) else epochs / metrics[stage]["epochs"]
        here.append(metrics[stage][metric] * scale)
    table = table.assign(here=here, ratio=np.divide(here, table.published))
    return table[["study", "what", "published", "here", "ratio", "why", "source"]].reset_index(drop=True)


def published_numbers(study):
    """Read the numbers of one study in published.csv: {what: number}."""
    table = _published()
    return dict(table.loc[table.study == study, ["what", "published"]].itertuples(index=False))


def _published():
    import pandas as pd

    return pd.read_csv(Path(__file__).with_name("published.csv"))


def number(value, digits=3):
    """Format a number with `digits` significant digits, no exponent; "never" for infinity, "" for NaN and None."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and math.isinf(value):
        return "never"
    if not isinstance(value, float):
        return f"{value:,}"
    short = float(f"{value:.{digits}g}")
    return np.format_float_positional(short, trim="-") if abs(short) < 1000 else f"{value:,.0f}"
