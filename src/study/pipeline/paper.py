"""The report and its supplement: Jinja templates over the stages' results, made pages by pandoc and typst (PDF)."""

import re
import traceback
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pypandoc
import typst

from study.pipeline import reports

FILES = {  # the pages of a document, by the name of its template
    "report": {"gfm": "README.md", "html5": "report.html", "docx": "report.docx", "typst": "report.pdf"},
    "supplement": {
        "gfm": "supplement.md",
        "html5": "supplement.html",
        "docx": "supplement.docx",
        "typst": "supplement.pdf",
    },
}
PREFIX = {"report": "", "supplement": "S"}  # of the numbers of figures and tables
GAP = 2  # letters between the columns of a table
LONG_CELL, LONG_NAME = 36, 16  # letters, beyond which the cells and the name of a column take several lines
NOTEBOOKS = "../notebooks"  # from the folder of the pages


class _Numbers:
    """The numbers of figures and tables in their order, by document, and the names that the texts mention."""

    def __init__(self, known):
        self.known = known
        self.assigned = {}
        self.mentioned = set()
        self.document = ""

    def assign(self, kind, name):
        if name in self.assigned:
            raise ValueError(f"The report shows {name} twice.")
        label = f"{kind} {PREFIX[self.document]}"
        number = 1 + sum(
            shown.startswith(label) for document, shown in self.assigned.values() if document == self.document
        )
        self.assigned[name] = self.document, f"{label}{number}"
        return self.assigned[name][1]

    def see(self, name):
        self.mentioned.add(name)
        document, number = self.known.get(name, (self.document, "?"))
        elsewhere = "" if document == self.document else f"@{document}"
        return f"[{number}]({elsewhere}#{_anchor(number, name)})"


def render(
    templates: dict[str, Path],
    values: dict[str, Any],
    *,
    tables: dict[str, Any],
    pictures: Path,
    latex: Path | None = None,
    not_run: Collection[str] = (),
    machines: dict[str, str] | None = None,
) -> dict[str, str]:
    r"""Render the templates of the report and its supplement to pandoc's Markdown with numbered figures and tables.

    Beside `values`, a template has `figure("mnist/losses", "Caption.")` for figures/losses.png of a stage and
    `table("scores", "Caption.", digits=3)` for a frame of `tables`, `see(name)` for the number of either, also of the
    other document, the filters `digits(n)` and `percent(decimals)`, the list `not_run`, and `as_committed("mnist")`, a
    sentence if that stage is in the list, else "". A caption ends with the figure's note, says whether its stage was
    not run, and links to the notebook, the PDF and the CSV.

    Parameters
    ----------
    templates : {"report": a Jinja file, "supplement": another}
    values : names for the text
    tables : {name: pandas frame} with readable column names; the stage that made it in `attrs["stage"]`
    pictures : the folder that contains the stages' folders
    latex : a folder for `<name>.tex`, with caption and \label{tab:<name>}, and `<name>.csv` of shown tables, or None
    not_run : stages, by their folders' names, whose results are the committed ones instead of this run's
    machines : {line on a machine: name}; the texts name machines instead

    Returns
    -------
    {document: text}

    Raises
    ------
    ValueError : a value or table that no stage measured, a figure or table that is shown twice or not mentioned, or
        mentioned but not shown
    FileNotFoundError : a missing picture
    """
    kwargs = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(**kwargs, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"digits": _digits, "percent": _percent}
    sources = {name: environment.from_string(template.read_text()) for name, template in templates.items()}
    numbers, texts = _Numbers({}), {}
    for folder in (None, latex):  # the first round assigns the numbers that the second one mentions
        numbers = _Numbers(numbers.assigned)
        shown = {
            "figure": partial(_figure, numbers, pictures, not_run),
            "table": partial(_table, numbers, tables, folder),
            "as_committed": partial(_as_committed, not_run),
            "not_run": list(not_run),
        }
        for numbers.document, source in sources.items():
            try:
                texts[numbers.document] = source.render(values | shown, see=numbers.see)
            except jinja2.UndefinedError as error:
                frames = traceback.extract_tb(error.__traceback__)
                line = max(frame.lineno for frame in frames if frame.filename == "<template>")
                where = f"{templates[numbers.document].name}, line {line}, tells of what was not measured ({error})"
                advice = "measure what params.yaml or `make bench` left out, or take the sentence out"
                raise ValueError(f"{where}: {advice}.") from error
    if unknown := numbers.mentioned - numbers.assigned.keys():
        raise ValueError(f"The report mentions {', '.join(sorted(unknown))}, which it does not show.")
    if silent := numbers.assigned.keys() - numbers.mentioned:
        raise ValueError(f"The report's text does not mention {', '.join(sorted(silent))}.")
    for line, machine in sorted((machines or {}).items(), key=lambda pair: -len(pair[0])):
        texts = {name: text.replace(line, machine) for name, text in texts.items()}
    return texts


def pages(texts: dict[str, str], folder: Path, *, assets: Path, pictures: Path) -> None:
    """Write a page of each kind in FILES for each document into `folder`.

    texts : {document: pandoc's Markdown with one heading of the first level, the title}
    assets : the folder of page.yaml (pandoc's metadata), page.css, page.typ and references.bib
    pictures : the folder of the texts' pictures
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = [f"--metadata-file={assets / 'page.yaml'}", f"--bibliography={assets / 'references.bib'}", "--citeproc"]
    found = [*metadata, f"--resource-path={pictures}"]
    page = [*found, "--standalone", "--shift-heading-level-by=-1", "--number-sections"]  # the first heading: the title
    html = [*page, "--embed-resources", "--toc", "--toc-depth=2", f"--css={assets / 'page.css'}"]
    extra = {"gfm": [*found, "--wrap=none"], "html5": html, "docx": page}
    extra["typst"] = [*page, f"--include-in-header={assets / 'page.typ'}"]
    for name, text in texts.items():
        for kind, file in FILES[name].items():
            convert = partial(pypandoc.convert_text, _linked(text, kind), kind, format="markdown", verify_format=False)
            if kind == "typst":
                typst.compile(convert(extra_args=extra[kind]).encode(), output=str(folder / file), root=str(pictures))
            else:
                convert(extra_args=extra[kind], outputfile=str(folder / file))


def _linked(text, kind):
    """Link to the other document's page of the same kind, in HTML and Markdown to the place in it."""
    anchor = "(#[^)]*)" if kind in ("gfm", "html5") else "()#[^)]*"
    return re.sub(rf"\]\(@(\w+){anchor}", lambda match: f"]({FILES[match[1]][kind]}{match[2]}", text)


def _as_committed(not_run, *stages):
    """Return a note for results of these stages if some were not run, else ""."""
    found = [stage for stage in stages if stage in not_run]
    return f"**Not run here: {', '.join(found)}. The results shown are those that were committed.**" if found else ""


def _figure(numbers, pictures, not_run, name, caption, width=100):
    """Format the figure `name`, stage/figure; `width` is in percent of the page's."""
    stage, _, figure = name.rpartition("/")
    path = f"{stage}/figures/{figure}.png"
    if not (pictures / path).is_file():
        raise FileNotFoundError(f"There is no figure {path} in {pictures}.")
    note = (pictures / path).with_suffix(".txt")
    number = numbers.assign("Figure", name)
    links = {"PDF": path.removesuffix("png") + "pdf"}
    links |= {"data": f"{stage}/tables"} if (pictures / stage / "tables").is_dir() else {}
    note = note.read_text() if note.exists() else ""
    whole = f"**{number}.** {caption} {note} {_as_committed(not_run, stage)} {_links(stage, links)}"
    return f"![{' '.join(whole.split())}]({path}){{#{_anchor(number, name)} width={width}%}}"


def _table(numbers, tables, latex, name, caption, digits=3):
    """Format the table `name` and write its LaTeX."""
    if name not in tables:
        raise jinja2.UndefinedError(f"There is no table {name!r}; known: {', '.join(tables)}.")
    number = numbers.assign("Table", name)
    if latex is not None:
        latex.mkdir(parents=True, exist_ok=True)
        (latex / f"{name}.tex").write_text(_latex(tables[name], name, caption, digits))
        tables[name].to_csv(latex / f"{name}.csv", index=False)
    links = _links(tables[name].attrs.get("stage", "report"), {"CSV": f"report/tables/{name}.csv"})
    whole = " ".join(f"**{number}.** {caption} {links}".split())
    return f"::: {{#{_anchor(number, name)}}}\n{markdown(tables[name], digits)}\n\n: {whole}\n:::"


def _readable(frame, digits=3):
    """Format the frame's cells as text: (frame, for each column whether it is numeric and right-aligned)."""

    def cell(value):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return reports.number(value, digits) if is_number or value is None else str(value)

    right = [all(isinstance(value, int | float) for value in frame[name]) for name in frame.columns]
    return frame.astype(object).map(cell), right


def _width(name, cells):
    """Count the letters of a column: of its longest cell and of its name, neither capped below its longest word."""
    words = " ".join([name, *cells]).split()
    return max(3, min(len(name), LONG_NAME), min(max(map(len, cells), default=0), LONG_CELL), *map(len, words))


def markdown(frame, digits=3):
    """Format a frame as a pipe table; numbers are right-aligned with `digits` significant digits, missing ones "".

    pandoc takes column widths from the dashes below the header.
    """
    cells, right = _readable(frame, digits)
    names = [str(name).replace("|", "\\|") for name in frame.columns]
    columns = [[text.replace("|", "\\|") for text in cells[name]] for name in cells.columns]
    wide = [_width(name, column) for name, column in zip(names, columns)]
    dashes = ["-" * (width + GAP - is_right) + ":" * is_right for width, is_right in zip(wide, right)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, dashes, *zip(*columns)))


def _latex(frame, name, caption, digits):
    """Format a table in LaTeX by booktabs, with citations by natbib."""
    cells, right = _readable(frame, digits)
    options = {"format": "markdown", "extra_args": ["--natbib"], "verify_format": False}
    caption = pypandoc.convert_text(caption, "latex", **options).strip()
    form = {"index": False, "escape": True, "column_format": "".join("lr"[is_right] for is_right in right)}
    text = cells.to_latex(**form, caption=caption, label=f"tab:{name}", position="tbp")
    return re.sub(r"@(\w+)", r"\\citet{\1}", text)


def _links(stage, files):
    """Format links to a stage's notebook and to files, by their names."""
    notebook = stage.partition("/")[0]
    links = {} if notebook == "gpu" else {"notebook": f"{NOTEBOOKS}/{notebook}.ipynb"}
    return f"({', '.join(f'[{name}]({path})' for name, path in (links | files).items())})"


def _anchor(number, name):
    """Make an anchor such as figure-mnist-losses or table-data, which differs from all anchors of headings."""
    return f"{number.split()[0].lower()}-{name}".replace("/", "-").replace("_", "-")


def _digits(value, digits=3):
    if isinstance(value, jinja2.Undefined):
        str(value)  # which raises
    return reports.number(value, digits)


def _percent(share, decimals=1):
    return f"{100 * share:.{decimals}f} %"
