"""study.pipeline.paper: numbers, figures and tables in the texts of report and supplement, and their pages."""

import re
import zipfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from study.pipeline import paper

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "notebooks/report"
FRAME = pd.DataFrame(
    {"method": ["PyTorch loop", "TurbaNet"], "warm (s)": [12.3456, 0.5], "break-even": [float("inf"), 7.0]}
)
TEXT = """# A title

## Abstract {-}

Ours takes {{ m.seconds | digits }} s, {{ m.share | percent(1) }} of all: {{ see("times") }}, {{ see("mnist/losses") }}.
See also [@nadeau].

## Results

{{ table("times", "Seconds of each method.") }}

{{ figure("mnist/losses", "What to see.", 50) }}
"""
VALUES = {"m": {"seconds": 0.012345, "share": 0.25}}


@pytest.fixture
def folder(tmp_path):
    """A folder of reports with one figure of one stage."""
    figures = tmp_path / "reports/mnist/figures"
    figures.mkdir(parents=True)
    fig, ax = plt.subplots(figsize=(2, 1))
    ax.plot([1, 2])
    fig.savefig(figures / "losses.png")
    plt.close(fig)
    (figures / "losses.txt").write_text("Three repeats.\n")
    return tmp_path / "reports"


def render(folder, text=TEXT, values=VALUES, tables=None, latex=None, **how):
    template = folder.parent / "text.md.j2"
    template.write_text(text)
    tables = {"times": FRAME} if tables is None else tables
    return paper.render({"report": template}, values, tables=tables, pictures=folder, latex=latex, **how)["report"]


def both(folder, report, supplement):
    """The texts of a report and its supplement."""
    templates = {name: folder.parent / f"{name}.md.j2" for name in ("report", "supplement")}
    for template, text in zip(templates.values(), (report, supplement), strict=True):
        template.write_text(text)
    return paper.render(templates, VALUES, tables={"times": FRAME, "b": FRAME}, pictures=folder)


def test_numbers_come_from_the_values(folder):
    assert "Ours takes 0.0123 s, 25.0 % of all:" in render(folder)


def test_figures_and_tables_are_numbered_and_mentioned_before_they_stand(folder):
    text = render(folder)
    assert "[Table 1](#table-times), [Figure 1](#figure-mnist-losses)" in text
    links = "([notebook](../notebooks/mnist.ipynb), [PDF](mnist/figures/losses.pdf))"
    place = "(mnist/figures/losses.png){#figure-mnist-losses width=50%}"
    assert f"![**Figure 1.** What to see. Three repeats. {links}]{place}" in text
    assert ": **Table 1.** Seconds of each method." in text and "| PyTorch loop | 12.3 | never |" in text


def test_a_stage_that_was_not_run_is_marked_in_the_text_and_in_its_captions(folder):
    more = '{{ as_committed("stocks") }}|{{ as_committed("sweep", "mnist") }}|{{ not_run | join(", ") }}'
    text = render(folder, TEXT + more, not_run=["mnist", "kfold"])
    sentence = "**Not run here: mnist. The results shown are those that were committed.**"
    assert text.endswith(f"|{sentence}|mnist, kfold") and f"Three repeats. {sentence} ([notebook]" in text
    assert "Not run" not in render(folder, not_run=["kfold"])


def test_numbers_count_each_kind_in_order(folder):
    more = '{{ see("b") }}{{ table("b", "Second.") }}'
    text = render(folder, TEXT + more, tables={"times": FRAME, "b": FRAME})
    assert "**Table 2.** Second." in text and "[Table 2](#table-b)" in text


def test_the_supplement_has_numbers_of_its_own_and_each_mentions_the_other(folder):
    text = TEXT + '\n\nAlso {{ see("b") }}.'
    texts = both(folder, text, 'As {{ see("mnist/losses") }} and {{ see("b") }}.\n\n{{ table("b", "Second.") }}\n')
    assert "Also [Table S1](@supplement#table-b)." in texts["report"]
    assert "As [Figure 1](@report#figure-mnist-losses) and [Table S1](#table-b)." in texts["supplement"]
    paper.pages(texts, folder / "made", assets=ASSETS, pictures=folder)
    made = {path.name: path.read_bytes() for path in (folder / "made").iterdir()}
    assert made.keys() == {file for files in paper.FILES.values() for file in files.values()}
    assert b"(supplement.md#table-b)" in made["README.md"] and b'href="supplement.html#table-b"' in made["report.html"]
    assert b"(README.md#figure-mnist-losses)" in made["supplement.md"]
    assert not any(b"@supplement" in page or b"@report" in page for page in made.values())


def test_captions_link_to_the_data_of_the_stage_that_made_them(folder):
    (folder / "mnist/tables").mkdir()
    frame = FRAME.copy()
    frame.attrs["stage"] = "sweep/small"
    text = render(folder, tables={"times": frame})
    assert "([notebook](../notebooks/sweep.ipynb), [CSV](report/tables/times.csv))" in text
    assert "[data](mnist/tables))](mnist/figures/losses.png)" in text


def test_machines_are_named_by_letters(folder):
    (folder / "mnist/figures/losses.txt").write_text("On 2 CPU devices, a CPU, 2 cores, jax 1.\n")
    assert "On 2 CPU devices, machine A." in render(folder, machines={"a CPU, 2 cores, jax 1": "machine A"})


def test_a_table_is_also_written_as_latex_with_caption_and_label_and_as_csv(folder):
    frame = FRAME.assign(source=["@schmitt, a_b", "50 %"])
    text = TEXT.replace("Seconds of each method.", "What `never` means [@nadeau].")
    render(folder, text, tables={"times": frame}, latex=folder / "tex")
    csv, path = sorted((folder / "tex").iterdir())
    lines = path.read_text().splitlines()
    assert pd.read_csv(csv).equals(frame)
    assert path.name == "times.tex" and r"\begin{tabular}{lrrl}" in lines
    assert r"\caption{What \texttt{never} means \citep{nadeau}.}" in lines and r"\label{tab:times}" in lines
    assert r"method & warm (s) & break-even & source \\" in lines
    assert r"PyTorch loop & 12.3 & never & \citet{schmitt}, a\_b \\" in lines
    assert r"TurbaNet & 0.5 & 7 & 50 \% \\" in lines


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("A.\n{{ m.second }}", ValueError, "line 2, tells of what was not measured .*second"),
        ("A.\n{{ m.second | digits }}", ValueError, "line 2, tells of what was not measured .*second"),
        ('{{ table("time", "A.") }}', ValueError, "no table 'time'; known: times"),
        ('{{ see("mnist/loss") }}', ValueError, "mentions mnist/loss, which it does not show"),
        ('{{ table("times", "A.") }}', ValueError, "does not mention times"),
        ('{{ table("times", "A.") }}{{ table("times", "B.") }}', ValueError, "shows times twice"),
        ('{{ figure("mnist/loss", "A.") }}', FileNotFoundError, "no figure mnist/figures/loss.png"),
    ],
)
def test_what_is_not_there_stops_the_report(folder, text, error, said):
    with pytest.raises(error, match=said):
        render(folder, text)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of TEXT."""
    root = tmp_path_factory.mktemp("pages")
    reports = root / "reports"
    (reports / "mnist/figures").mkdir(parents=True)
    fig, _ = plt.subplots(figsize=(2, 1))
    fig.savefig(reports / "mnist/figures/losses.png")
    plt.close(fig)
    paper.pages({"report": render(reports)}, root / "made", assets=ASSETS, pictures=reports)
    return root / "made"


def test_all_four_pages_are_there(pages):
    assert {path.name for path in pages.iterdir()} == {"README.md", "report.html", "report.pdf", "report.docx"}
    assert (pages / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "word/document.xml" in zipfile.ZipFile(pages / "report.docx").namelist()


def test_the_web_page_needs_nothing_from_elsewhere(pages):
    page = (pages / "report.html").read_text()
    assert re.findall(r'src="(?!data:)[^"]*"', page) == [] and '<link rel="stylesheet"' not in page
    assert "<title>A title</title>" in page and "prefers-color-scheme: dark" in page
    assert "Nadeau" in page and 'id="TOC"' in page


def test_the_page_for_git_has_pipe_tables_pictures_and_references(pages):
    page = (pages / "README.md").read_text()
    assert page.startswith("# A title") and "| PyTorch loop |" in page and "mnist/figures/losses.png" in page
    assert "Nadeau" in page and "**Table 1.**" in page and "{{" not in page


def test_pages_are_the_same_bytes_at_another_time(pages, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    texts = {"report": render(pages.parent / "reports")}
    paper.pages(texts, tmp_path, assets=ASSETS, pictures=pages.parent / "reports")
    for name in ("README.md", "report.html", "report.pdf"):
        assert (tmp_path / name).read_bytes() == (pages / name).read_bytes(), name


@pytest.mark.parametrize(("rows", "pages"), [([60], 2), ([30] * 4, 4)])
def test_a_table_breaks_over_pages_only_if_it_is_taller_than_one(rows, pages, tmp_path):
    tables = [f"::: {{#table-{i}}}\n| a |\n|---|\n" + "| b |\n" * n + "\n: C.\n:::" for i, n in enumerate(rows)]
    text = "\n\n".join(["# A title", *tables, "The end."])
    paper.pages({"report": text}, tmp_path, assets=ASSETS, pictures=tmp_path)
    assert re.findall(rb"/Count (\d+)", (tmp_path / "report.pdf").read_bytes()) == [str(pages).encode()]


# In which a number is no measurement.
NAMES = r"ResNet-20|VGG-11|CIFAR-10|LeNet-5|S&P 500|\bF1\b|95 %|Stable-Baselines3|@sb3|2NN|TF32|float32|A100"


@pytest.mark.parametrize("document", paper.FILES)
def test_the_texts_hold_no_number_typed_by_hand(document):
    prose = re.sub(r"{{.*?}}|{%.*?%}|{#.*?#}", "", (ASSETS / f"{document}.md.j2").read_text(), flags=re.S)
    assert re.findall(r"[^\n]*\d[^\n]*", re.sub(NAMES, "", prose)) == []


@pytest.mark.parametrize("document", paper.FILES)
def test_the_texts_compute_no_number_of_their_own(document):
    shown = re.findall(r"{{(.*?)}}", (ASSETS / f"{document}.md.j2").read_text(), flags=re.S)
    literal = [
        one for one in shown if not re.match(r"\s*(figure|table|see|theirs)\(", one) and re.match(r"\s*[-\d.]", one)
    ]
    assert literal == [] and len(shown) > 50


@pytest.mark.parametrize(("document", "page"), [("report", "README.md"), ("supplement", "supplement.md")])
def test_every_heading_of_a_text_is_one_of_its_page(document, page):
    """Jinja takes the line break after a tag at the end of a line, and a paragraph then swallows what follows."""
    plain = re.compile(r"^#+ [^{\n]+$", re.M)  # without values
    written = plain.findall((ASSETS / f"{document}.md.j2").read_text())
    shown = plain.findall((ROOT / "reports" / page).read_text())
    assert len(written) > 5 and [heading for heading in written if heading.strip() not in shown] == []


def test_markdown_by_hand():
    frame = pd.DataFrame({"method": ["a|b", "c"], "seconds": [1234567.8, np.nan], "ratio": [0.12345, -12.345]})
    lines = [
        "| method | seconds | ratio |",
        "| -------- | ----------: | ------: |",
        r"| a\|b | 1,234,568 | 0.123 |",
        "| c |  | -12.3 |",
    ]
    assert paper.markdown(frame).splitlines() == lines


def test_markdown_shares_out_a_page_by_what_the_cells_hold():
    frame = pd.DataFrame({"n": [1], "what": ["word " * 30], "file": ["a" * 50]})
    dashes = paper.markdown(frame).splitlines()[1]
    assert [len(part) for part in dashes.strip("| ").split(" | ")] == [5, 38, 52]


def test_markdown_writes_no_exponent_for_a_rounded_thousand_and_nothing_for_none():
    assert paper.markdown(pd.DataFrame({"a|b": [999.7, None]}, dtype=object)).splitlines() == [
        r"| a\|b |",
        "| ------- |",
        "| 1,000 |",
        "|  |",
    ]


def test_markdown_gives_as_many_digits_as_asked():
    assert paper.markdown(pd.DataFrame({"accuracy": [0.94444]}), 4).endswith("| 0.9444 |")


def test_markdown_breaks_a_long_name_before_its_cells_go_without_room():
    frame = pd.DataFrame({"workload": ["MNIST"], "PyTorch, CUDA graph of a step": [1.5]})
    dashes = paper.markdown(frame).splitlines()[1]
    assert [len(part) for part in dashes.strip("| ").split(" | ")] == [10, 18]


def test_markdown_of_no_rows_is_its_header():
    assert paper.markdown(pd.DataFrame({"method": []})).splitlines()[0] == "| method |"
