"""`make book`: the executed notebooks, the report and the library's reference as a static site in build/book/."""

import argparse
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import turbanet
from study.pipeline import doctor
from study.pipeline.paths import repository
from turbanet import estimators, forecasting

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "params.yaml",
    "docs/design.md",
    "docs/guide.md",
    "docs/cluster.md",
)
REFERENCE = {  # page: the modules or folders whose public names it lists
    "swarms": ("turba_train_state",),
    "training": ("training", "data", "checkpoints", "core", "loss"),
    "networks": ("networks",),
    "ensembles": ("ensembles",),
    "selection": ("selection",),
    "series": ("series",),
    "rl": ("rl", "ppo"),
    "federated": ("federated",),
    "evolution": ("evolution",),
    "cluster": ("cluster",),
    "plot": ("plot", "live"),
}


def reference() -> dict[str, list[str]]:
    """Collect {page: full public names}; KeyError for a public name that no page has."""
    top = [getattr(turbanet, name) for name in turbanet.__all__]
    packages = [package for package in top if inspect.ismodule(package)]
    public = [item for item in top if not inspect.ismodule(item)]
    public += [getattr(package, name) for package in (*packages, estimators, forecasting) for name in package.__all__]
    page_of = {folder: page for page, folders in REFERENCE.items() for folder in folders}
    pages = {page: [] for page in REFERENCE}
    for item in dict.fromkeys(public):  # a name that is public in two modules is listed once
        pages[page_of[item.__module__.split(".")[1]]].append(f"{item.__module__}.{item.__qualname__}")
    return pages


def assemble(root: Path, folder: Path) -> list[str]:
    """Write the site's pages into `folder`, made afresh, and return the stages' notebooks that were not executed here.

    Pages keep their paths in the repository, so that links stay valid. Executed notebooks replace those without
    outputs.
    """
    if folder.exists():
        shutil.rmtree(folder)
    for name in PAGES:
        _copy(root / name, folder / name)
    kinds = ("*.md", "*.png", "*.csv", "*.txt", "*.pdf", "*.html")
    for file in (file for kind in kinds for file in (root / "reports").rglob(kind)):
        if file.suffix != ".html" or not file.with_suffix(".md").exists():  # mkdocs makes a page of that name
            _copy(file, folder / file.relative_to(root))
    for tables in (folder / "reports").rglob("tables"):  # which the report links to
        links = "".join(f"- [{file.name}]({file.name})\n" for file in sorted(tables.glob("*.csv")))
        (tables / "index.md").write_text(f"# Tables of {tables.parent.relative_to(folder / 'reports')}\n\n{links}")
    stages = {name.partition("@")[0] for name in doctor.stages(root)}
    bare = []
    for notebook in sorted((root / "notebooks").glob("*.ipynb")):
        stage = notebook.stem
        executed = [root / "reports" / name / "executed.ipynb" for name in (stage, f"{stage}/small")]
        found = next((file for file in executed if file.exists()), None)
        bare += [notebook.name] if stage in stages and not found else []
        text = re.sub(r"\]\(([\w./-]+)\.(?:ipynb|md)\)", r"](\1.html)", (found or notebook).read_text())
        (page := folder / notebook.relative_to(root)).parent.mkdir(exist_ok=True)
        page.write_text(text)  # mkdocs mends links in Markdown, not in notebooks
    for page, names in reference().items():
        text = "\n\n".join([f"# {page.capitalize()}", *(f"::: {name}" for name in names)])
        (folder / "reference").mkdir(exist_ok=True)
        (folder / f"reference/{page}.md").write_text(f"{text}\n")
    return bare


def _copy(file, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def main(arguments=None):
    """Assemble the site's pages and build them by mkdocs; a broken link is an error."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(arguments)
    root = repository()
    try:
        bare = assemble(root, root / "build/book-pages")
    except OSError as error:
        print(f"book: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", root / "docs/mkdocs.yml"]
    built = subprocess.run(command, cwd=root / "build")  # mkdocs writes its cache into the working directory
    if built.returncode:
        return built.returncode
    if bare:
        print(f"Without outputs, as no stage ran them here: {', '.join(bare)}; `make report` runs them.")
    print(f"The book is {root / 'build/book/index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
