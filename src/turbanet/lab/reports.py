"""What a stage leaves behind: metrics, tables and figures, the report and the numbers published before ours."""

import base64
import json
import math
import mimetypes
import os
import re
from pathlib import Path

import numpy as np

from turbanet.lab.paths import repository

DIGITS = 6  # of a committed metric: enough to compare, few enough to read in a diff
STYLE = """body{max-width:54rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif;color:#222}
img{max-width:100%} table{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}
th,td{border-bottom:1px solid #ddd;padding:.25rem .6rem;text-align:left} th{border-color:#888}
code{background:#f4f4f4;padding:0 .2rem} a{color:#0173b2}"""


class Report:
    """The folder of one stage's results; under the runner (TURBANET_REPORTS) or, by hand, below build/by_hand/.

    Only the runner's results reach reports/, and only when the whole notebook succeeded: running a notebook by hand
    makes no stage stale.
    """

    def __init__(self, stage, variant=None):
        by_hand = repository() / "build" / "by_hand" / stage / (variant or "")
        self.folder = Path(os.environ.get("TURBANET_REPORTS") or by_hand)

    def metrics(self, values):
        """Write metrics.json: flat, name to number, `data_source` text; rounded to six significant digits."""
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
        self._write("metrics.json", json.dumps(clean, indent=2) + "\n")

    def table(self, frame, name):
        """Write tables/<name>.csv and .tex (booktabs); the index is left out. Returns the frame."""
        frame = frame.map(lambda cell: float(f"{cell:.{DIGITS}g}") if isinstance(cell, float) else cell)
        self._write(f"tables/{name}.csv", frame.to_csv(index=False))
        latex = frame.to_latex(index=False, escape=True, float_format="%.4g")
        self._write(f"tables/{name}.tex", latex)
        return frame

    def figure(self, fig, name):
        """Write figures/<name>.png and .pdf, the same bytes from the same figure."""
        (self.folder / "figures").mkdir(parents=True, exist_ok=True)
        path = str(self.folder / "figures" / name)
        fig.savefig(f"{path}.png", dpi=200, metadata={"Software": None})
        fig.savefig(f"{path}.pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
        return fig

    def text(self, name, text):
        """Write one text file, the report itself."""
        self._write(name, text)

    def _write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read_metrics(stage):
    """The metrics of a stage, such as "mnist" or "sweep/small": a dict."""
    return json.loads(_existing(stage, "metrics.json").read_text())


def read_table(stage, name):
    """A stage's table as a pandas frame."""
    import pandas as pd

    return pd.read_csv(_existing(stage, f"tables/{name}.csv"))


def _existing(stage, name):
    path = repository() / "reports" / stage / name
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}; `dvc repro` makes it.")
    return path


def published(metrics):
    """Every published number beside ours: what, published, here, ratio (here over published), why.

    metrics: {stage: {name: number}}. The published numbers lie in published.csv beside this module; a number that no
    stage measures yet has no `here`. Where it names epochs, ours is scaled from our epochs to those.
    """
    table, here = _published(), []
    for stage, metric, epochs in table[["stage", "metric", "epochs"]].itertuples(index=False):
        if isinstance(stage, str) and metric not in metrics.get(stage, {}):
            raise ValueError(f"published.csv asks for {metric!r} of {stage!r}, which that stage does not measure.")
        scale = 1.0 if math.isnan(epochs) else epochs / metrics[stage]["epochs"]
        here.append(metrics[stage][metric] * scale if isinstance(stage, str) else math.nan)
    table["here"] = here
    table["ratio"] = table.here / table.published
    return table[["study", "what", "published", "here", "ratio", "why"]]


def published_numbers(study):
    """{what: number} of one study in published.csv."""
    table = _published()
    return dict(table.loc[table.study == study, ["what", "published"]].itertuples(index=False))


def _published():
    import pandas as pd

    return pd.read_csv(Path(__file__).with_name("published.csv"))


def markdown(frame, digits=3):
    """A frame as a GitHub table; numbers to `digits` significant digits, nothing for a missing one."""

    def cell(value):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        if isinstance(value, float):
            short = float(f"{value:.{digits}g}")
            return f"{short:.10g}" if abs(short) < 1000 else f"{value:,.0f}"
        return str(value).replace("|", "\\|")

    rows = [[cell(value) for value in row] for row in frame.itertuples(index=False)]
    lines = [[cell(column) for column in frame.columns], ["---"] * len(frame.columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def html(text, folder, title):
    """Markdown as one self-contained page: pictures, named relative to `folder`, are embedded."""
    from nbconvert.filters.markdown_mistune import markdown2html_mistune

    def embed(match):
        path = folder / match[1]
        data = base64.b64encode(path.read_bytes()).decode()
        return f'src="data:{mimetypes.guess_type(path)[0]};base64,{data}"'

    body = re.sub(r'src="(?!data:|https?:)([^"]+)"', embed, markdown2html_mistune(text))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
