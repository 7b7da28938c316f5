"""study.pipeline.notebook: what it hands to a notebook, what it refuses, what it leaves in reports/."""

import json
import os

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook

from study.pipeline import notebook, project

PARAMS = {
    "data": {"mnist": {"source": "auto"}},
    "tiny": {"rate": 0.00001, "sizes": [1, 2]},
    "sweep": {"epochs": 3, "small": {"hidden": [16]}, "large": {"hidden": [256, 256]}},
    "report": {},
    "sizes": {"smoke": {"tiny": {"rate": 0.5}, "sweep": {"large": {"hidden": [2]}}}},
}
WRITE = """
import json, os, pathlib
folder = pathlib.Path(os.environ["TURBANET_REPORTS"])
for name in ("figures", "tables"):
    (folder / name).mkdir()
    (folder / name / "new").touch()
(folder / "metrics.json").write_text(json.dumps({"rate": rate, "sizes": sizes, "cwd": os.getcwd()}))
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A function that makes a repository in the working directory: study(stage, its cells, the first with the tag)."""

    def make(stage, *sources):
        cells = [new_code_cell(source) for source in sources]
        cells[0].metadata.tags = ["parameters"]
        (tmp_path / "build/source/notebooks").mkdir(parents=True)
        nbformat.write(new_notebook(cells=cells), tmp_path / f"build/source/notebooks/{stage}.ipynb")
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return make


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")


def tree(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_parameters_are_those_of_the_section():
    assert notebook.parameters(PARAMS, "tiny") == {"rate": 0.00001, "sizes": [1, 2]}
    assert notebook.parameters({"report": None}, "report") == {}


def test_parameters_of_a_variant_are_the_sections_the_variants_and_its_name():
    assert notebook.parameters(PARAMS, "sweep", "large") == {"epochs": 3, "hidden": [256, 256], "network": "large"}


@pytest.mark.parametrize(
    "asked, said",
    [
        (("tinny",), "Unknown stage 'tinny'; known: tiny, sweep, report."),
        (("sweep", "medium"), "Unknown variant of sweep 'medium'; known: small, large."),
        (("sweep",), "Unknown variant of sweep None; known: small, large."),
        (("tiny", "small"), "Unknown variant of tiny 'small'; known: none."),
    ],
)
def test_parameters_lists_what_is_known(asked, said):
    with pytest.raises(ValueError) as error:
        notebook.parameters(PARAMS, *asked)
    assert str(error.value) == said


def test_defaults_are_what_the_parameters_cell_assigns(study):
    root = study("tiny", "rate = 0.1  # per step\nsizes = [1,  # one = first\n         2]\nname = 'a = b'", "later = 1")
    found = notebook.defaults(root / "build/source/notebooks/tiny.ipynb")
    assert found == {"rate": 0.1, "sizes": [1, 2], "name": "a = b"}


@pytest.mark.parametrize(
    "cell, said",
    [
        ("rat = 1\nsizes = []", "params.yaml sets rate, which the notebook lacks; it knows rat, sizes."),
        ("rate = 1\nsizes = []\nseed = 0", "params.yaml lacks the notebook's seed; it sets rate, sizes."),
    ],
)
def test_run_refuses_names_that_differ(study, capsys, cell, said):
    root = study("tiny", cell, "raise SystemError('this ran')")
    assert notebook.main(["tiny"]) == 1
    assert capsys.readouterr().err == f"notebook tiny: {said}\n"
    assert not (root / "build/run").exists()


def test_ctrl_c_in_a_stage_is_one_sentence_and_replaces_nothing(study, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    root = study("tiny", "rate = 1.0\nsizes = []")
    fill(root / "reports/tiny", "metrics.json")
    monkeypatch.setattr(notebook.papermill, "execute_notebook", interrupted)
    assert notebook.main(["tiny"]) == 130
    assert capsys.readouterr().err == "notebook tiny: interrupted\n"
    assert (root / "reports/tiny/metrics.json").read_text() == "old"


def test_run_says_what_makes_the_copy(study, capsys):
    study("tiny", "pass")
    assert notebook.main(["report"]) == 1
    assert "`dvc repro source` makes it" in capsys.readouterr().err


def test_run_replaces_the_results_and_nothing_else(study):
    root = study("tiny", "rate = 1.0\nsizes = []", WRITE)
    fill(root / "reports/tiny", "figures/stale.png", "tables/stale.csv", "metrics.json", "variant/metrics.json")
    fill(root / "build/run/tiny", "left_over")
    assert notebook.main(["tiny"]) == 0
    assert json.loads((root / "reports/tiny/metrics.json").read_text()) == PARAMS["tiny"] | {"cwd": str(root)}
    ours = {"executed.ipynb", "figures/new", "tables/new", "metrics.json", "variant/metrics.json"}
    assert tree(root / "reports/tiny") == ours


def test_run_of_the_report_writes_beside_the_stages(study):
    write = WRITE[: WRITE.index("for")] + "(folder / 'README.md').write_text(os.environ['TQDM_DISABLE'])"
    root = study("report", "", write)
    fill(root / "reports", "README.md", "tiny/metrics.json")
    notebook.run("report")
    assert (root / "reports/README.md").read_text() == "1"
    assert tree(root / "reports") == {"README.md", "tiny/metrics.json", "report/executed.ipynb"}


def test_run_gives_all_stages_one_compilation_cache_and_leaves_its_own_environment(study):
    compiled = "jax.jit(lambda x: x + 1)(1.0)"
    root = study("tiny", "rate = 1.0\nsizes = []", f"import jax\n{compiled}\nassert rate == 0.00001")
    before = dict(os.environ)
    notebook.run("tiny")
    assert any((root / "build/compiled").iterdir()) and dict(os.environ) == before


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("rate = 'none'\nsizes = []", r"params.yaml sets rate of tiny to 1e-05, such as 'none' is right"),
        ("rate = 1\nsizes = ['a']", r"params.yaml sets sizes of tiny to \[1, 2\], such as \['a'\] is right"),
        ("rate = 1\nsizes = 2", r"params.yaml sets sizes of tiny to \[1, 2\], such as 2 is right"),
        ("rate = True\nsizes = []", "params.yaml sets rate of tiny to 1e-05, such as True is right"),
    ],
)
def test_run_refuses_a_parameter_of_another_type(study, cell, message):
    study("tiny", cell, "raise AssertionError")
    with pytest.raises(ValueError, match=message):
        notebook.run("tiny")


def test_parameters_without_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"The section tiny of params.yaml is names with their values; got \[1, 2\]"):
        notebook.parameters({"tiny": [1, 2]}, "tiny")
    (tmp_path / "params.yaml").write_text("hello")
    with pytest.raises(ValueError, match="holds names with their values; got 'hello'"):
        project.read(tmp_path / "params.yaml")


def test_main_tells_of_a_failed_cell_in_one_line_and_leaves_reports(study, capsys):
    root = study(
        "sweep", "epochs = 1\nhidden = []\nnetwork = ''", "raise OverflowError(f'{network} {hidden}\\nand so on')"
    )
    fill(root / "reports/sweep/small", "figures/old.png", "metrics.json")
    assert notebook.main(["sweep", "small"]) == 1
    executed = "build/run/sweep/small/executed.ipynb"
    said = f"notebook sweep small: OverflowError: small [16] (all of it is in {executed})\n"
    assert capsys.readouterr().err == said and (root / executed).exists()
    assert tree(root / "reports") == {"sweep/small/figures/old.png", "sweep/small/metrics.json"}


def test_results_that_cannot_be_written_are_known_before_the_notebook_runs(study, monkeypatch, capsys):
    root = study("tiny", "rate = 1.0\nsizes = [3]", "1 / 0")
    monkeypatch.setattr(notebook.os, "access", lambda folder, mode: folder != root / "reports/tiny")
    assert notebook.main(["tiny"]) == 1
    assert "reports/tiny cannot be written: its owner is another user, or" in capsys.readouterr().err


def test_copy_study_overlays_the_size_and_links_the_users_files(study):
    root = study("tiny", "pass")
    fill(
        root,
        "src/a.py",
        "src/__pycache__/a.pyc",
        "notebooks/a.ipynb",
        "CITATION.cff",
        "dvc.yaml",
        ".dvcignore",
        ".dvc/config",
    )
    fill(root, "reports/mnist/executed.ipynb", "data/mnist/x.npy", "elsewhere.gz")
    committed = {"reports/README.md", "reports/benchmark/cpu/machine.json", "reports/mnist/metrics.json"}
    fill(root, *committed)
    (root / "data/external/mnist").mkdir(parents=True)
    (root / "data/external/mnist/images.gz").symlink_to("../../../elsewhere.gz")
    folder = root / "build/smoke"
    project.copy_study(root, folder, "smoke")
    config = {"CITATION.cff", "dvc.yaml", ".dvcignore", ".dvc/config", ".dvc/config.local", "params.yaml"}
    assert tree(folder) == config | committed | {"src/a.py", "notebooks/a.ipynb", "data/external/mnist/images.gz"}
    assert (folder / "data/external/mnist/images.gz").readlink() == root / "elsewhere.gz"
    params = yaml.safe_load((folder / "params.yaml").read_text())
    assert params["tiny"] == {"rate": 0.5, "sizes": [1, 2]} and params["sizes"] == "smoke"
    assert params["sweep"] == {"epochs": 3, "small": {"hidden": [16]}, "large": {"hidden": [2]}}


def test_copy_study_keeps_what_an_earlier_copy_has_made(study):
    root = study("tiny", "pass")
    fill(root, "src/a.py", "src/b.py", "notebooks/a.ipynb", "CITATION.cff", "dvc.yaml", ".dvcignore", ".dvc/config")
    by_hand = [f"{name}/x.csv" for name in project.BY_HAND]
    fill(root, "reports/README.md", "reports/mnist/metrics.json", "data/external/mnist/images.gz", "dvc.lock", *by_hand)
    folder = root / "build/smoke"
    project.copy_study(root, folder, "smoke")
    assert (folder / "dvc.lock").read_text() == "old"  # of the committed results
    made = {"dvc.lock": "made", "reports/mnist/metrics.json": "made", "build/run/mnist/executed.ipynb": "made"}
    for name, text in made.items():
        fill(folder, name)
        (folder / name).write_text(text)
    (root / "src/b.py").unlink()
    (root / by_hand[0]).write_text("measured anew")
    (root / "data/external/mnist/images.gz").unlink()
    project.copy_study(root, folder, "smoke")
    assert {name: (folder / name).read_text() for name in made} == made
    assert (folder / by_hand[0]).read_text() == "measured anew"
    assert not (folder / "src/b.py").exists() and not (folder / "data/external").exists()


def test_copy_study_refuses_an_unknown_size_or_name(study):
    root = study("tiny", "pass")
    with pytest.raises(ValueError, match="Unknown size 'tiny'; known: smoke."):
        project.copy_study(root, root / "build/tiny", "tiny")
    (root / "params.yaml").write_text(yaml.safe_dump(PARAMS | {"sizes": {"smoke": {"tiny": {"rat": 1}}}}))
    with pytest.raises(ValueError, match="Unknown name in sizes.smoke.tiny 'rat'; known: rate, sizes."):
        project.copy_study(root, root / "build/smoke", "smoke")


def test_publish_moves_results_into_reports_and_keeps_others(tmp_path):
    fill(tmp_path / "build", "ratios.csv")
    fill(tmp_path / "reports/benchmark/cpu", "kept")
    assert notebook.publish(tmp_path / "build", "benchmark/cpu", root=tmp_path) == tmp_path / "reports/benchmark/cpu"
    assert tree(tmp_path) == {"reports/benchmark/cpu/ratios.csv", "reports/benchmark/cpu/kept"}
