"""study.pipeline.paper: numbers, figures and tables in the report's text, and the four pages made of it."""

import re
import zipfile
from pathlib import Path

import jinja2
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from study.pipeline import paper

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "notebooks/report"
FRAME = pd.DataFrame(
    {"way": ["PyTorch loop", "TurbaNet"], "warm (s)": [12.3456, 0.5], "break-even": [float("inf"), 7.0]}
)
TEXT = """# A title

## Abstract {-}

Ours takes {{ m.seconds | digits }} s, {{ m.share | percent(1) }} of all: {{ see("times") }}, {{ see("mnist/losses") }}.
See also [@nadeau].

## Results

{{ table("times", "Seconds of each way.") }}

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
    return paper.render(template, values, tables=tables, pictures=folder, latex=latex, **how)


def test_numbers_come_from_the_values(folder):
    assert "Ours takes 0.0123 s, 25.0 % of all:" in render(folder)


def test_figures_and_tables_are_numbered_and_mentioned_before_they_stand(folder):
    text = render(folder)
    assert "[Table 1](#table-times), [Figure 1](#figure-mnist-losses)" in text
    assert (
        "![**Figure 1.** What to see. Three repeats.](mnist/figures/losses.png){#figure-mnist-losses width=50%}" in text
    )
    assert ": **Table 1.** Seconds of each way." in text and "| PyTorch loop | 12.3 | never |" in text


def test_a_stage_that_was_not_run_is_marked_in_the_text_and_in_its_captions(folder):
    more = '{{ as_committed("stocks") }}|{{ as_committed("sweep", "mnist") }}|{{ not_run | join(", ") }}'
    text = render(folder, TEXT + more, not_run=["mnist", "kfold"])
    sentence = "**Not run here: mnist. Its results are those that were committed.**"
    assert text.endswith(f"|{sentence}|mnist, kfold") and f"Three repeats. {sentence}](mnist/" in text
    assert "Not run" not in render(folder, not_run=["kfold"])


def test_numbers_count_each_kind_in_order(folder):
    more = '{{ see("b") }}{{ table("b", "Second.") }}'
    text = render(folder, TEXT + more, tables={"times": FRAME, "b": FRAME})
    assert "**Table 2.** Second." in text and "[Table 2](#table-b)" in text


def test_a_table_is_also_written_as_latex_with_caption_and_label(folder):
    frame = FRAME.assign(source=["@schmitt, a_b", "50 %"])
    text = TEXT.replace("Seconds of each way.", "What `never` means [@nadeau].")
    render(folder, text, tables={"times": frame}, latex=folder / "tex")
    (path,) = (folder / "tex").iterdir()
    lines = path.read_text().splitlines()
    assert path.name == "times.tex" and r"\begin{tabular}{lrrl}" in lines
    assert r"\caption{What \texttt{never} means \citep{nadeau}.}" in lines and r"\label{tab:times}" in lines
    assert r"way & warm (s) & break-even & source \\" in lines
    assert r"PyTorch loop & 12.3 & never & \citet{schmitt}, a\_b \\" in lines
    assert r"TurbaNet & 0.5 & 7 & 50 \% \\" in lines


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{{ m.second }}", jinja2.UndefinedError, "second"),
        ('{{ table("time", "A.") }}', jinja2.UndefinedError, "no table 'time'; known: times"),
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
    """The four pages of TEXT."""
    root = tmp_path_factory.mktemp("pages")
    reports = root / "reports"
    (reports / "mnist/figures").mkdir(parents=True)
    fig, _ = plt.subplots(figsize=(2, 1))
    fig.savefig(reports / "mnist/figures/losses.png")
    plt.close(fig)
    paper.pages(render(reports), root / "made", assets=ASSETS, pictures=reports)
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
    paper.pages(render(pages.parent / "reports"), tmp_path, assets=ASSETS, pictures=pages.parent / "reports")
    for name in ("README.md", "report.html", "report.pdf"):
        assert (tmp_path / name).read_bytes() == (pages / name).read_bytes(), name


# In which a number is no measurement.
NAMES = r"ResNet-20|VGG-11|CIFAR-10|LeNet-5|S&P 500|\bF1\b|95 %|Stable-Baselines3|\b2NN\b|\bTF32\b|\bfloat32\b|\bA100\b"


def test_the_reports_text_holds_no_number_typed_by_hand():
    prose = re.sub(r"{{.*?}}|{%.*?%}|{#.*?#}", "", (ASSETS / "text.md.j2").read_text(), flags=re.S)
    assert re.findall(r"[^\n]*\d[^\n]*", re.sub(NAMES, "", prose)) == []


def test_the_reports_text_computes_no_number_of_its_own():
    shown = re.findall(r"{{(.*?)}}", (ASSETS / "text.md.j2").read_text(), flags=re.S)
    literal = [
        one for one in shown if not re.match(r"\s*(figure|table|see|theirs)\(", one) and re.match(r"\s*[-\d.]", one)
    ]
    assert literal == [] and len(shown) > 50
