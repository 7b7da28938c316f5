"""study.pipeline.reports: what a stage may leave behind, and how the report reads it."""

import hashlib
import json

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import yaml

from study.figures import plots
from study.pipeline import reports

STAGES = {"sweep/small", "sweep/large", "mnist", "kfold", "evolution", "async_sgd", "gpu"}
FRAME = pd.DataFrame({"method": ["PyTorch_loop", "50 %"], "seconds": [1.23456789, 2000.0], "members": [1, 128]})


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty repository, the working directory a folder in it."""
    (tmp_path / "params.yaml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("TURBANET_REPORTS", raising=False)
    return tmp_path


@pytest.fixture
def report(root, monkeypatch):
    """A stage's report as under the runner."""
    monkeypatch.setenv("TURBANET_REPORTS", str(root / "run"))
    return reports.Report("mnist")


def written(report):
    return json.loads((report.folder / "metrics.json").read_text())


def table():
    return pd.read_csv(reports.__file__.replace("reports.py", "published.csv"))


def compared():
    """The published results, without settings."""
    return table().query("stage != 'setting'")


def measured(value):
    """Every metric that published.csv asks for, all of one value: {stage: {name: value}}."""
    found = {stage: {"epochs": 256} for stage in STAGES}
    for row in compared().dropna(subset="stage").itertuples():
        found[row.stage][row.metric] = value
    return found


def test_repository_is_the_folder_with_the_parameters(root):
    assert reports.repository() == root


def test_repository_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"Neither {tmp_path} nor a folder above it holds params.yaml"):
        reports.repository()


def test_report_goes_where_the_runner_says(root, monkeypatch):
    monkeypatch.setenv("TURBANET_REPORTS", str(root / "run"))
    reports.Report("sweep", "small").text("README.md", "a report")
    assert (root / "run/README.md").read_text() == "a report"


def test_report_by_hand_goes_below_build(root):
    reports.Report("sweep", "small").metrics({"seconds": 1.5})
    reports.Report("mnist").metrics({"seconds": 2.5})
    found = {str(path.relative_to(root)) for path in root.rglob("metrics.json")}
    assert found == {"build/by_hand/sweep/small/metrics.json", "build/by_hand/mnist/metrics.json"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32("nan"), "0.9", True, np.True_, None, [0.9]])
def test_metrics_refuses_what_is_no_finite_number(report, value):
    with pytest.raises(ValueError, match=r"^The metric accuracy must be a finite number, got .*\.$"):
        report.metrics({"seconds": 1.0, "accuracy": value})
    assert not (report.folder / "metrics.json").exists()


def test_metrics_takes_the_text_of_the_data_source(report):
    report.metrics({"data_source": "MNIST, from a file", "rows": 42000})
    assert written(report) == {"data_source": "MNIST, from a file", "rows": 42000}


def test_metrics_are_rounded_to_six_digits(report):
    report.metrics({"a": 1.23456789, "b": 12345678.9, "c": 0.000123456789, "d": 12345678})
    assert written(report) == {"a": 1.23457, "b": 12345700.0, "c": 0.000123457, "d": 12345678}


@pytest.mark.parametrize("make", [np.float32, np.float64, np.asarray, np.float16, "jax"])
def test_metrics_takes_scalars_of_numpy_and_jax(report, make):
    import jax.numpy as jnp

    report.metrics({"a": (jnp.asarray if make == "jax" else make)(0.125), "b": np.int32(3)})
    assert written(report) == {"a": 0.125, "b": 3}


def test_read_metrics_gives_what_metrics_wrote(root, monkeypatch):
    monkeypatch.setenv("TURBANET_REPORTS", str(root / "reports/sweep/small"))
    reports.Report("sweep", "small").metrics({"data_source": "simulated", "ratio": 3.5})
    assert reports.read_metrics("sweep/small") == {"data_source": "simulated", "ratio": 3.5}


def test_read_metrics_of_a_missing_stage_says_what_makes_it(root):
    with pytest.raises(FileNotFoundError, match="reports/mnist/metrics.json; `dvc repro` makes it"):
        reports.read_metrics("mnist")


def test_table_is_written_as_csv(report):
    report.table(FRAME, "times")
    lines = (report.folder / "tables/times.csv").read_text().splitlines()
    assert lines == ["method,seconds,members", "PyTorch_loop,1.23457,1", "50 %,2000.0,128"]


def test_table_gives_the_rounded_frame_and_leaves_its_argument(report):
    before = FRAME.copy()
    assert report.table(FRAME, "times").seconds.tolist() == [1.23457, 2000]
    pd.testing.assert_frame_equal(FRAME, before)


def test_read_table_gives_what_table_wrote(root, monkeypatch):
    monkeypatch.setenv("TURBANET_REPORTS", str(root / "reports/mnist"))
    kept = reports.Report("mnist").table(FRAME, "times")
    pd.testing.assert_frame_equal(reports.read_table("mnist", "times"), kept, check_dtype=False)


def test_read_peers_gives_a_table_and_when_and_where_it_was_measured(root):
    folder = root / "reports/peers"
    folder.mkdir(parents=True)
    FRAME.to_csv(folder / "sums.csv", index=False)
    record = {"date": "2026-11-24", "commit": "1a2b3c4", "machine": "one core", "cores": 1}
    (folder / "sums.json").write_text(json.dumps(record))
    table, here = reports.read_peers("sums")
    pd.testing.assert_frame_equal(table, FRAME)
    said = "measured on 2026-11-24 by make peers on one core, of commit 1a2b3c4"
    assert here["cores"] == 1 and here["measured"] == said
    with pytest.raises(FileNotFoundError, match="peers/depths.csv; `make peers ARGS=depths` makes it"):
        reports.read_peers("depths")


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_figure_has_the_same_bytes_at_another_time(report, monkeypatch, kind):
    with matplotlib.rc_context():
        plots.style()
        saved = []
        for second in ("0", "1000000000"):  # what matplotlib takes for now
            monkeypatch.setenv("SOURCE_DATE_EPOCH", second)
            fig, ax = plt.subplots()
            ax.plot([1, 2], label="a line")
            ax.legend()
            report.figure(fig, "line")
            saved.append((report.folder / f"figures/line.{kind}").read_bytes())
            plt.close(fig)
    assert saved[0] == saved[1] and len(saved[0]) > 1000


def test_figure_gives_the_figure_back(report):
    fig, _ = plt.subplots()
    assert report.figure(fig, "empty") is fig
    plt.close(fig)
    assert {path.name for path in (report.folder / "figures").iterdir()} == {"empty.png", "empty.pdf", "empty.txt"}


def test_published_ratio_is_here_over_published():
    metrics = measured(0.5)
    metrics["kfold"]["serial_one_over_processes_ratio"] = 4.12
    row = reports.published(metrics).set_index("what").loc["serial over parallel: time"]
    assert row.here == 4.12 and row.published == 2.06 and row.ratio == pytest.approx(2)


def test_published_scales_times_to_the_published_epochs():
    got = reports.published(measured(0.25)).set_index("what").here
    assert got["small network, CPU: PyTorch's growth (s per network)"] == 1  # 256 epochs of the published 1024
    assert got["small network, CPU: PyTorch's growth over TurbaNet's"] == 0.25


def test_what_the_parameters_leave_out_stands_without_a_number_of_ours():
    metrics = measured(1.0)
    del metrics["mnist"]["ensemble_f1"]
    lacking = table().query("metric == 'ensemble_f1'").what.iloc[0]
    got = reports.published(metrics).set_index("what").here
    assert np.isnan(got[lacking]) and got.isna().sum() == reports.published(measured(1.0)).here.isna().sum() + 1


def test_the_committed_report_measures_every_metric_that_is_published():
    committed = pd.read_csv(reports.repository() / "reports/published.csv").set_index("what").here
    here = compared().dropna(subset="stage").query("why != '`make published` trains it'")
    assert committed[here.what].notna().all()


def test_published_has_a_ratio_where_a_stage_measures_the_same():
    got, all_of = reports.published(measured(1.0)), compared()
    assert len(got) == len(all_of) < len(table()) and (got.published.abs() > 0).all()
    assert set(got.what[got.ratio.notna()]) == set(all_of.what[all_of.stage.notna()])


def test_published_numbers_of_a_gpu_stand_alone_where_none_was_measured():
    metrics = measured(1.0)
    del metrics["gpu"]
    got, of_gpu = reports.published(metrics).set_index("what"), table().query("stage == 'gpu'").what
    assert len(of_gpu) > 3 and got.here[of_gpu].isna().all() and got.published[of_gpu].notna().all()


def test_published_names_only_known_stages_and_says_why():
    rows = compared()
    assert set(rows.stage.dropna()) == STAGES and (rows.stage.isna() == rows.metric.isna()).all()
    assert (
        rows.why.fillna("").str.strip().all()
        and table().source.str.startswith("@").all()
        and not table()[["study", "what"]].duplicated().any()
    )


def test_metrics_refuses_an_array_and_a_data_source_that_is_no_text(report):
    for bad in ({"a": np.ones(3)}, {"data_source": float("nan")}):
        with pytest.raises(ValueError, match=f"The metric {next(iter(bad))} must be"):
            report.metrics(bad)


def test_figure_keeps_a_dot_in_its_name(report):
    fig, _ = plt.subplots()
    report.figure(fig, "share_0.5")
    plt.close(fig)
    names = {f"share_0.5.{kind}" for kind in ("png", "pdf", "txt")}
    assert {path.name for path in (report.folder / "figures").iterdir()} == names


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (0.00001234, "0.0000123"), (42000, "42,000"), (float("inf"), "never"), (float("nan"), "")],
)
def test_number_has_no_exponent(value, text):
    assert reports.number(value) == text


def test_figure_keeps_its_note(report):
    fig, _ = plt.subplots()
    report.figure(fig, "one", "Three repeats.")
    plt.close(fig)
    assert (report.folder / "figures/one.txt").read_text() == "Three repeats.\n"


def test_the_hash_of_results_is_of_all_stages_but_the_report(root):
    def hashed(**stages):
        (root / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
        return reports.results_hash(root)

    first = hashed(mnist={"md5": "1"}, stocks={"md5": "2"})
    assert len(first) == 10 and first == hashed(stocks={"md5": "2"}, mnist={"md5": "1"}, report={"md5": "3"})
    assert first != hashed(mnist={"md5": "1"}, stocks={"md5": "3"})


def test_minutes_are_papermill_s_and_none_where_a_stage_did_not_run(root):
    (root / "reports/sweep/small").mkdir(parents=True)
    metadata = {"metadata": {"papermill": {"duration": 90.0}}}
    executed = root / "reports/sweep/small/executed.ipynb"
    executed.write_text(json.dumps(metadata))
    out = {"path": "reports/sweep/small/executed.ipynb", "md5": hashlib.md5(executed.read_bytes()).hexdigest()}
    (root / "dvc.lock").write_text(yaml.safe_dump({"stages": {"sweep@small": {"outs": [out]}, "report": {"outs": []}}}))
    assert reports.minutes(root, "sweep/small") == 1.5 and reports.minutes(root, "mnist") is None
    assert reports.not_run(["sweep/small", "mnist"]) == ["mnist"]
    executed.write_text(json.dumps(metadata | {"cells": []}))  # of another run than dvc.lock's, as after a checkout
    assert reports.minutes(root, "sweep/small") is None and reports.not_run(["sweep/small"]) == ["sweep/small"]


def test_parameters_are_those_that_the_stages_ran_with(root):
    stages = {
        "sweep@small": {"params": {"params.yaml": {"sweep.epochs": 3, "sweep.small": {"hidden": [16]}}}},
        "sweep@large": {"params": {"params.yaml": {"sweep.epochs": 3, "sweep.large": {"hidden": [256]}}}},
        "mnist": {"params": {"params.yaml": {"mnist": {"rows": 7, "rates": [1.5], "device": "auto"}}}},
        "report": {},
    }
    lock = yaml.safe_dump({"stages": stages}).replace("1.5", "5e-05")  # as DVC writes it, and YAML reads as text
    (root / "dvc.lock").write_text(lock)
    sweep = {"epochs": 3, "small": {"hidden": [16]}, "large": {"hidden": [256]}}
    assert reports.parameters(root) == {
        "sweep": sweep,
        "mnist": {"rows": 7, "rates": [0.00005], "device": "auto"},
    }


def test_data_are_real_if_every_stage_ran_on_what_is_there_and_real():
    there = [{"title": "MNIST", "real": True}, {"title": "prices", "real": True}]
    ran = [{"data_source": "MNIST"}, {"data_source": "two spirals, generated"}, {"data_source": "prices; MNIST"}]
    assert reports.are_real(ran, there)
    assert not reports.are_real(ran, [there[0] | {"real": False}, there[1]])
    assert not reports.are_real([*ran, {"data_source": "digits, a stand-in"}], there)  # that were replaced since


def test_no_data_of_the_committed_report_are_unknown():
    there = [{"title": name, "real": True} for name in ("MNIST, the original files",)]
    folder = reports.repository() / "reports"
    ran = [json.loads(file.read_text()) for file in folder.rglob("metrics.json") if file.parent != folder]
    ran = [each for each in ran if "data_source" in each]
    others = {name for each in ran for name in each["data_source"].split("; ")} - reports.MADE_UP
    assert reports.are_real(ran, there + [{"title": name, "real": True} for name in others if "simulated" not in name])


def test_machines_are_those_of_bench_and_peers(root):
    for file, text in {
        "benchmark/cpu/ratios.csv": "workload,machine\nmnist,'one, jax 1'\nmnist,'one, jax 1'\nvgg,'third, jax 1'\n",
        "peers/a.json": '{"machine": "other, jax 1"}',
        "peers/b.json": '{"machine": "one, jax 1"}',
    }.items():
        path = root / "reports" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("'", '"'))
    assert reports.machines(root) == {
        "one, jax 1": "`make bench`, `make peers`",
        "third, jax 1": "`make bench`",
        "other, jax 1": "`make peers`",
    }
    assert reports.parts("a CPU, 2 cores, jax 1, torch 2") == ("a CPU, 2 cores", "jax 1, torch 2")


def test_bibtex_is_of_the_citation_file():
    cited = {
        "title": "T",
        "authors": [{"name": "The A"}, {"name": "B"}],
        "version": "1.2.0",
        "date-released": "2026-11-27",
    }
    lines = reports.bibtex(cited, "0123abcdef").splitlines()
    assert lines[0] == "@software{turbanet," and lines[-1] == "}"
    assert "  note = {Software and reproducible study, results 0123abcdef}," in lines
    assert {"  author = {The A and B},", "  version = {1.2.0},", "  year = {2026},"} <= set(lines)


def test_published_numbers_are_those_of_one_study():
    numbers = reports.published_numbers("k-fold")
    assert numbers["serial over parallel: time"] == 2.06 and numbers["LeNet, warm, serial: accuracy"] == 0.5399
    assert "epochs" not in numbers and reports.published_numbers("nothing") == {}
