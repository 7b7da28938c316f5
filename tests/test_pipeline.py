"""The whole study at smoke size on the embedded data, in a copy: what `dvc repro` makes and repeats."""

import json
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
import yaml

from study.pipeline import notebook, paper, project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4500)]  # the first test waits for the whole study
ROOT = Path(__file__).parents[1]
TIMED = re.compile("seconds|growth|over|ratio|per_|threads|break_even")  # metrics that a clock had a part in
SWEEP = {
    "turbanet_seconds_{largest}",
    "torch_loop_seconds_{largest}",
    "hundred_over_one_torch",
    "turbanet_growth_seconds_per_network",
    "torch_loop_growth_seconds_per_network",
}
FRAMEWORKS = ("pytorch_ddp", "jax", "keras", "tensorflow", "mxnet", "horovod_pytorch", "horovod_tensorflow")
SCALING = ("throughput_1", "throughput_2", "efficiency_2", "test_accuracy")
KFOLD = ("speedup_vs_serial", "speedup_vs_processes", "accuracy", "serial_accuracy")
QUIET = {"quick": True, "capture_output": True, "text": True}
METRICS = {
    "kfold": {
        *(f"{model}_{name}" for model in ("lenet", "lenet5", "vgg") for name in KFOLD),
        "swarm_cpu_utilisation",
        "serial_cpu_utilisation",
        "data_source",
    },
    "async_sgd": {
        *(f"{method}_accuracy" for method in ("torch_serial_one", "hogwild", "ddp", "downpour", "local_sgd")),
        "hogwild_cpu_utilisation",
        "serial_cpu_utilisation",
        "mnist_best_torch_over_local_sgd_ratio",
        "data_source",
    },
    "scaling": {
        *(f"{framework}_{name}" for framework in FRAMEWORKS for name in SCALING),
        "swarm_efficiency_2",
        "data_source",
    },
    "agents": {
        "agents_seconds_per_agent",
        "sb3_seconds_per_agent",
        "agents_solved_share",
        "acrobot_mean_return",
        "pendulum_mean_return",
        "foraging_a_network_each_return",
        "data_source",
    },
    "federated": {
        "lr_mnist_seconds",
        "lr_mnist_cold_seconds",
        *(f"torch_over_turbanet_{network}_ratio" for network in ("lr", "2nn", "cnn")),
        "accuracy_two_classes",
        "client_accuracy_tuned_by_its_client",
        "private_epsilon",
        "data_source",
    },
    "evolution": {
        "generation_seconds_16",
        "gymnasium_over_turbanet_ratio_16",
        "evolved_best_return",
        "pbt_less_random",
        "pbt_less_random_low",
        "evolved_reward_return",
        "true_reward_return",
        "data_source",
    },
    "cluster": {
        "one_process_seconds",
        "cluster_seconds",
        "cluster_startup_seconds",
        "killed_seconds",
        "resumed_at_epoch",
        "largest_difference_one_process",
        "lstm_error",
        "ray_task_over_shards_ratio",
        "data_source",
    },
    "sweep/small": SWEEP,
    "sweep/large": SWEEP,
    "mnist": {
        "ensemble_accuracy",
        "average_accuracy",
        "torch_accuracy",
        "ensemble_f1",
        "swarm_seconds",
        "torch_seconds",
        "members",
        "data_source",
    },
    "stocks": {
        "tickers",
        "turbanet_seconds_per_ticker",
        "turbanet_mae_median",
        "torch_mae_median",
        "persistence_mae_median",
        "data_source",
    },
}


def status():
    """What git says of the working tree; nothing in an unpacked archive."""
    command = ["git", "status", "--porcelain"]
    return subprocess.check_output(command, cwd=ROOT, text=True) if (ROOT / ".git").exists() else ""


def repro(folder, *arguments):
    """The stages that `dvc repro` ran."""
    ran = project.repro(folder, *arguments, **QUIET)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return running(ran)


def running(ran):
    return re.findall("^Running stage '(.+)'", ran.stdout, re.M)


def sweep(folder):
    return yaml.safe_load((folder / "params.yaml").read_text())["sweep"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The rebuilt copy: (its folder, what `dvc repro` said, git's status before). A stage that failed has not `ran`."""
    before, folder = status(), tmp_path_factory.mktemp("study") / "smoke"
    project.copy_study(ROOT, folder, "smoke")
    for link in folder.glob("data/external/*/[!.]*"):
        link.unlink()
    params = yaml.safe_load((folder / "params.yaml").read_text())
    for name in params["data"]:
        params["data"][name]["source"] = "embedded"
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "agg")  # no picture is drawn once more for the notebook
        return folder, project.rebuild(folder, **QUIET), before


def made(study, stage):
    """The folder of a stage's results; it fails with the stage's last words if there are none."""
    folder, said, _ = study
    last = [line for line in said.stderr.splitlines() if line.startswith(f"notebook {stage.replace('/', ' ')}:")]
    assert (folder / "reports" / stage / "executed.ipynb").exists(), last or said.stdout[-2000:] + said.stderr[-4000:]
    return folder / "reports" / stage


def test_repro_runs_every_stage_and_leaves_the_working_tree(study):
    _, said, before = study
    ran = {"report", *(stage.partition("@")[0] for stage in running(said))}  # which waits for all the others
    assert ran == set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    assert status() == before


@pytest.mark.parametrize("stage", METRICS)
def test_metrics_are_flat_and_have_the_promised_names(study, stage):
    found = json.loads((made(study, stage) / "metrics.json").read_text())
    largest = max(sweep(study[0])["small"]["swarm_sizes"])
    assert found.keys() >= {name.format(largest=largest) for name in METRICS[stage]}
    assert all(isinstance(value, str if name == "data_source" else int | float) for name, value in found.items())


def test_default_sweep_measures_what_its_promised_metrics_need():
    for network in ("small", "large"):
        sizes = sweep(ROOT)[network]
        assert max(sizes["swarm_sizes"]) == max(sizes["baseline_sizes"]) == 128
    assert 100 in sweep(ROOT)["small"]["swarm_sizes"]  # the README's hundred networks


def test_report_is_complete_and_says_that_the_data_are_stand_ins(study):
    reports = made(study, "report").parent
    assert all((reports / name).stat().st_size for name in notebook.PUBLIC)
    page = (reports / "README.md").read_text()
    assert "stand-in" in page.split("\n## ")[0].lower()
    pictures = re.findall(r'src="([^"]+)"', page)
    assert pictures and [name for name in pictures if not (reports / name).is_file()] == []


def test_every_number_of_the_abstract_stands_in_the_report(study):
    page = (made(study, "report").parent / "README.md").read_text()
    abstract, rest = page.split("## Abstract")[1].split("## Introduction")

    def numbers(text):
        return set(re.findall(r"\d[\d.,]*(?<![.,])", re.sub("ResNet-20", "", text)))

    assert len(numbers(abstract)) > 8 and numbers(abstract) - numbers(rest) == set()


def test_second_repro_runs_nothing_but_what_failed(study):
    failed = re.findall("failed to reproduce '(.+?)'", study[1].stderr)
    assert set(running(project.repro(study[0], "--dry", "--keep-going", **QUIET))) == set(failed)


def test_scores_repeat(study):
    first = json.loads((made(study, "mnist") / "metrics.json").read_text())
    assert repro(study[0], "--force", "--single-item", "mnist") == ["mnist"]
    again = json.loads((made(study, "mnist") / "metrics.json").read_text())
    always = [{name for name in found if "break_even" not in name} for found in (first, again)]  # it may be never
    assert always[0] == always[1]
    scores = [name for name in first if not TIMED.search(name)]
    assert len(scores) > 3 and {name: first[name] for name in scores} == {name: again[name] for name in scores}


def test_report_marks_a_stage_that_did_not_run(study, tmp_path, monkeypatch):
    ran, aside = made(study, "federated") / "executed.ipynb", tmp_path / "executed.ipynb"
    cells = nbformat.read(study[0] / "build/source/notebooks/report.ipynb", as_version=4).cells
    texts = {}
    monkeypatch.setattr(paper, "pages", lambda found, *_, **__: texts.update(found))  # the stage itself made pages
    monkeypatch.setattr(paper, "_latex", lambda *_: "")
    monkeypatch.setenv("TURBANET_REPORTS", str(tmp_path / "report"))
    monkeypatch.chdir(study[0])
    ran.rename(aside)
    exec("\n".join(cell.source for cell in cells if cell.cell_type == "code"), {})
    aside.rename(ran)
    first, *sections = texts["supplement"].split("\n## ")
    assert "**Not run here: federated." in first
    assert [one.split("\n")[0] for one in sections if "Not run here: federated." in one] == ["Federated clients"]
