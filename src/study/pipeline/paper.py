"""The report's pages: a Jinja template over the stages' results, converted by pandoc and, for the PDF, typst."""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pypandoc
import typst

from study.pipeline import reports


class _Numbers:
    """The numbers of figures and tables in their order, and the names that the text mentions."""

    def __init__(self, known):
        self.known = known
        self.assigned = {}
        self.mentioned = set()

    def assign(self, kind, name):
        if name in self.assigned:
            raise ValueError(f"The report shows {name} twice.")
        self.assigned[name] = f"{kind} {1 + sum(label.startswith(kind) for label in self.assigned.values())}"
        return self.assigned[name]

    def see(self, name):
        self.mentioned.add(name)
        number = self.known.get(name, "?")
        return f"[{number}](#{_anchor(number, name)})"


def render(
    template: Path,
    values: dict[str, Any],
    *,
    tables: dict[str, Any],
    pictures: Path,
    latex: Path | None = None,
    not_run: Collection[str] = (),
) -> str:
    r"""Render the template to pandoc's Markdown with numbered figures and tables.

    Beside `values`, a template has `figure("mnist/losses", "Caption.")` for figures/losses.png of a stage and
    `table("scores", "Caption.", digits=3)` for a frame of `tables`, `see(name)` for the number of either, the filters
    `digits(n)` and `percent(decimals)`, the list `not_run`, and `as_committed("mnist")`, a sentence if that stage is in
    the list, else "". A caption ends with the figure's note and says whether its stage was not run.

    Parameters
    ----------
    template : a Jinja file
    values : names for the text
    tables : {name: pandas frame} with readable column names
    pictures : the folder that contains the stages' folders
    latex : a folder for `<name>.tex` of each shown table with caption and \\label{tab:<name>}, or None
    not_run : stages, by their folders' names, whose results are the committed ones instead of this run's

    Raises
    ------
    jinja2.UndefinedError : a missing value or table
    ValueError : a figure or table that is shown twice or not mentioned, or mentioned but not shown
    FileNotFoundError : a missing picture
    """
    kwargs = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(**kwargs, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"digits": reports.number, "percent": _percent}
    source = environment.from_string(template.read_text())
    numbers = _Numbers({})
    for _ in range(2):  # the first round assigns the numbers that the second one mentions
        numbers = _Numbers(numbers.assigned)
        shown = {
            "figure": partial(_figure, numbers, pictures, not_run),
            "table": partial(_table, numbers, tables, latex),
            "as_committed": partial(_as_committed, not_run),
            "not_run": list(not_run),
        }
        text = source.render(values | shown, see=numbers.see)
    if unknown := numbers.mentioned - numbers.assigned.keys():
        raise ValueError(f"The report mentions {', '.join(sorted(unknown))}, which it does not show.")
    if silent := numbers.assigned.keys() - numbers.mentioned:
        raise ValueError(f"The report's text does not mention {', '.join(sorted(silent))}.")
    return text


def pages(text: str, folder: Path, *, assets: Path, pictures: Path) -> None:
    """Write README.md, report.html, report.pdf and report.docx into `folder`.

    text : pandoc's Markdown with one heading of the first level, the title
    assets : the folder of page.yaml (pandoc's metadata), page.css, page.typ and references.bib
    pictures : the folder of the text's pictures
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = [f"--metadata-file={assets / 'page.yaml'}", f"--bibliography={assets / 'references.bib'}", "--citeproc"]
    found = [*metadata, f"--resource-path={pictures}"]
    page = [*found, "--standalone", "--shift-heading-level-by=-1", "--number-sections"]  # the first heading: the title
    convert = partial(pypandoc.convert_text, text, format="markdown", verify_format=False)
    convert("gfm", extra_args=[*found, "--wrap=none"], outputfile=str(folder / "README.md"))
    html = [*page, "--embed-resources", "--toc", "--toc-depth=2", f"--css={assets / 'page.css'}"]
    convert("html5", extra_args=html, outputfile=str(folder / "report.html"))
    convert("docx", extra_args=page, outputfile=str(folder / "report.docx"))
    typ = convert("typst", extra_args=[*page, f"--include-in-header={assets / 'page.typ'}"])
    typst.compile(typ.encode(), output=str(folder / "report.pdf"), root=str(pictures))


def _as_committed(not_run, *stages):
    """Return a note for results of these stages if some were not run, else ""."""
    found = [stage for stage in stages if stage in not_run]
    return f"**Not run here: {', '.join(found)}. Its results are those that were committed.**" if found else ""


def _figure(numbers, pictures, not_run, name, caption, width=100):
    """Format the figure `name`, stage/figure; `width` is in percent of the page's."""
    stage, _, figure = name.rpartition("/")
    path = f"{stage}/figures/{figure}.png"
    if not (pictures / path).is_file():
        raise FileNotFoundError(f"There is no figure {path} in {pictures}.")
    note = (pictures / path).with_suffix(".txt")
    number = numbers.assign("Figure", name)
    whole = f"**{number}.** {caption} {note.read_text() if note.exists() else ''} {_as_committed(not_run, stage)}"
    return f"![{' '.join(whole.split())}]({path}){{#{_anchor(number, name)} width={width}%}}"


def _table(numbers, tables, latex, name, caption, digits=3):
    """Format the table `name` and write its LaTeX."""
    if name not in tables:
        raise jinja2.UndefinedError(f"There is no table {name!r}; known: {', '.join(tables)}.")
    number = numbers.assign("Table", name)
    if latex is not None:
        latex.mkdir(parents=True, exist_ok=True)
        (latex / f"{name}.tex").write_text(_latex(tables[name], name, caption, digits))
    whole = " ".join(f"**{number}.** {caption}".split())
    return f"::: {{#{_anchor(number, name)}}}\n{reports.markdown(tables[name], digits)}\n\n: {whole}\n:::"


def _latex(frame, name, caption, digits):
    """Format a table in LaTeX by booktabs, with citations by natbib."""
    cells, right = reports.readable(frame, digits)
    caption = pypandoc.convert_text(caption, "latex", format="markdown", extra_args=["--natbib"]).strip()
    form = {"index": False, "escape": True, "column_format": "".join("lr"[is_right] for is_right in right)}
    text = cells.to_latex(**form, caption=caption, label=f"tab:{name}", position="tbp")
    return re.sub(r"@(\w+)", r"\\citet{\1}", text)


def _anchor(number, name):
    """Make an anchor such as figure-mnist-losses or table-data, which differs from all anchors of headings."""
    return f"{number.split()[0].lower()}-{name}".replace("/", "-").replace("_", "-")


def _percent(share, decimals=1):
    return f"{100 * share:.{decimals}f} %"
