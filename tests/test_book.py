"""study.pipeline.book: the site has every page of the repository, every public name, and no link that leads nowhere."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import turbanet
from study.pipeline import book
from turbanet import estimators, forecasting

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A copy of what the book is made of, with one notebook that a stage ran; of most others the title alone."""
    root = tmp_path_factory.mktemp("study") / "root"
    for name in (*book.PAGES, "docs/mkdocs.yml", "dvc.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    kept = shutil.ignore_patterns("*.ipynb", "*.docx")
    shutil.copytree(ROOT / "reports", root / "reports", ignore=kept)
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for file in (root / "notebooks").glob("*.ipynb"):  # to turn all cells of all of them into pages takes long
        if file.stem not in ("mnist", "tour"):
            whole = json.loads(file.read_text())
            file.write_text(json.dumps(whole | {"cells": whole["cells"][:1]}))
    (root / "src").symlink_to(ROOT / "src")
    executed = json.loads((root / "notebooks/mnist.ipynb").read_text())
    executed["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "printed by the stage"}]
    (root / "reports/mnist/executed.ipynb").write_text(json.dumps(executed))
    return root


def test_an_executed_notebook_stands_for_the_bare_one(study):
    bare = book.assemble(study, study / "build/book-pages")
    assert {"sweep.ipynb", "kfold.ipynb"} <= set(bare) and not {"mnist.ipynb", "tour.ipynb"} & set(bare)
    assert "printed by the stage" in (study / "build/book-pages/notebooks/mnist.ipynb").read_text()


def test_the_folders_of_tables_that_the_report_links_to_are_pages(study):
    book.assemble(study, study / "build/book-pages")
    folders = set(re.findall(r'href="(\S+/tables)"', (study / "build/book-pages/reports/README.md").read_text()))
    for folder in folders:
        page = study / "build/book-pages/reports" / folder / "index.md"
        assert all(f"]({file.name})" in page.read_text() for file in page.parent.glob("*.csv"))
    assert "mnist/tables" in folders


def test_links_of_a_notebook_lead_to_pages_of_the_site(study):
    book.assemble(study, study / "build/book-pages")
    tour = (study / "build/book-pages/notebooks/tour.ipynb").read_text()
    assert "](sweep.html)" in tour and "](../docs/guide.html)" in tour and ".ipynb)" not in tour


def test_every_public_name_is_in_the_reference_once():
    names = [name for names in book.reference().values() for name in names]
    folders = [
        turbanet.cluster,
        turbanet.ensembles,
        turbanet.evolution,
        turbanet.federated,
        turbanet.networks,
        turbanet.plot,
        turbanet.rl,
    ]
    public = {name for package in (turbanet, estimators, forecasting, *folders) for name in package.__all__}
    assert {name.rsplit(".", 1)[1] for name in names} == public - {folder.__name__[9:] for folder in folders}
    assert len(set(names)) == len(names)


def test_every_page_of_the_menu_is_put_there_and_every_notebook_is_in_it(study):
    book.assemble(study, study / "build/book-pages")
    menu = re.findall(r"\S+\.(?:md|ipynb)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE)
    assert [name for name in menu if not (study / "build/book-pages" / name).is_file()] == []
    assert {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} <= set(menu)


def test_a_site_without_a_warning_is_named_with_the_notebooks_that_no_stage_ran(study, monkeypatch, capsys):
    monkeypatch.setattr(book, "repository", lambda: study)
    monkeypatch.setattr(book.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert book.main([]) == 0
    said = capsys.readouterr().out
    assert "as no stage ran them here: agents.ipynb, " in said and "mnist.ipynb" not in said
    assert f"The book is {study / 'build/book/index.html'}" in said


@pytest.mark.slow
def test_the_site_builds_and_a_link_that_leads_nowhere_ends_it(study, monkeypatch, capfd):
    """One build for both: mkdocs writes all pages before it ends with the number of its warnings."""
    monkeypatch.setattr(book, "repository", lambda: study)
    with (study / "README.md").open("a") as file:
        file.write("\n[a page](docs/missing.md)\n")
    assert book.main([]) != 0
    said = "".join(capfd.readouterr())
    assert "contains a link 'docs/missing.md'" in said and "Aborted with 1 warnings in strict mode!" in said, said
    site = study / "build/book"
    assert "printed by the stage" in (site / "notebooks/mnist.html").read_text()
    assert "swarm_size" in (site / "reference/swarms.html").read_text()
    fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*"', (site / "index.html").read_text())
    assert fetched == []
