"""study.data_parallel.scaling.plots: what is drawn is what was measured, and what was not is dashed."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from study.data_parallel.scaling import plots as framework_plots
from study.figures.labels import FRAMEWORKS

MEASURED = pd.DataFrame(
    [
        ("JAX", 1, 100.0, 90, 120, 1.0, False),
        ("JAX", 2, 180.0, 170, 190, 0.9, False),
        ("JAX", 4, 160.0, 1, 200, 0.4, True),
    ],
    columns=["framework", "workers", "images per second", "low", "high", "efficiency", "oversubscribed"],
)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def test_throughput_shows_what_was_measured_and_dashed_what_was_not():
    predicted = pd.DataFrame({"workers": [1, 4], "images per second": [100.0, 390.0]})
    ax = framework_plots.throughput(plt.subplots()[1], MEASURED, predicted)
    (container,) = ax.containers
    np.testing.assert_allclose(container[0].get_xydata(), [[1, 100], [2, 180], [4, 160]])
    segments = container[2][0].get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[90, 120], [170, 190], [1, 200]])
    dashed = next(line for line in ax.get_lines() if line.get_linestyle() == "--")
    np.testing.assert_allclose(dashed.get_ydata(), [100, 390])


def test_marks_are_open_where_workers_share_cores():
    for draw in (framework_plots.throughput, framework_plots.efficiency):
        ax = draw(plt.subplots()[1], MEASURED)
        opened = [line for line in ax.get_lines() if line.get_markerfacecolor() == "white"]
        assert [line.get_xdata().tolist() for line in opened] == [[4]]


def test_efficiency_has_what_is_predicted_beside_it():
    predicted = pd.DataFrame({"workers": [1, 16], "efficiency": [1, 0.84]})
    ax = framework_plots.efficiency(plt.subplots()[1], MEASURED, predicted)
    shown = {line.get_label(): np.ravel(line.get_ydata()).tolist() for line in ax.get_lines()}
    assert shown["JAX"] == [1, 0.9, 0.4] and shown["predicted"] == [1, 0.84]


@pytest.mark.parametrize("column", ["images per second", "efficiency"])
def test_by_framework_is_a_row_a_framework_and_a_mark_a_number_of_workers(column):
    table = pd.concat([MEASURED.assign(framework=name) for name in ("MXNet", "JAX")])
    ax = framework_plots.by_framework(plt.subplots()[1], table, column)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["MXNet", "JAX"]
    shown = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    names = ["1 worker", "2 workers", "4 workers"]
    assert shown == {name: [[x, 0], [x, 1]] for name, x in zip(names, MEASURED[column], strict=True)}
    assert [line.get_markerfacecolor() == "white" for line in ax.get_lines()] == [False, False, True]


def test_no_framework_is_left_out():
    table = pd.concat([MEASURED.assign(framework=name) for name in FRAMEWORKS])
    ax = framework_plots.throughput(plt.subplots()[1], table)
    assert [container.get_label() for container in ax.containers] == list(FRAMEWORKS)


@pytest.mark.parametrize(("by", "names"), [("framework", ["MXNet", "JAX"]), ("rows per step", ["32", "64"])])
def test_accuracy_is_a_line_in_percent_for_each(by, names):
    own = {"framework": ["MXNet", "MXNet", "JAX"], "rows per step": [64, 64, 32]}
    table = pd.DataFrame(own | {"seconds": [1.0, 2, 3], "accuracy": [0.1, 0.2, 0.4]})
    ax = framework_plots.accuracy(plt.subplots()[1], table, "seconds", by=by)
    shown = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert list(shown) == names
    assert sorted(shown.values()) == [[[1, 10], [2, 20]], [[3, 40]]]


def test_accuracies_beside_one_another_begin_at_zero_and_none_is_cut_off():
    _, axes = plt.subplots(1, 2, sharey=True)
    for ax, share in zip(axes, (0.2, 0.4), strict=True):
        table = pd.DataFrame({"framework": ["MXNet"] * 2, "seconds": [1.0, 2], "accuracy": [0.1, share]})
        framework_plots.accuracy(ax, table, "seconds")
    assert [ax.get_ylim() for ax in axes] == [pytest.approx((0, 42))] * 2


def test_lines_of_one_framework_have_its_colour_and_other_dashes():
    own = {"what": ["one", "two", "both"], "framework": ["PyTorch DDP", "PyTorch DDP", "TurbaNet swarm"]}
    table = pd.DataFrame(own | {"seconds": 1.0, "accuracy": 0.1})
    lines = framework_plots.accuracy(plt.subplots()[1], table, "seconds", by="what").get_lines()
    shown = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in lines}
    ddp, swarm = (FRAMEWORKS[name].colour for name in ("PyTorch DDP", "TurbaNet swarm"))
    assert shown == {"one": (ddp, "-"), "two": (ddp, "--"), "both": (swarm, "-")}


def test_costs_are_bars_with_their_numbers():
    table = pd.DataFrame({"what": ["one", "both"], "framework": ["JAX", "MXNet"], "seconds": [20.4, 11.0]})
    ax = framework_plots.costs(plt.subplots()[1], table, "seconds")
    assert [bar.get_width() for bar in ax.patches] == [11.0, 20.4]
    assert [text.get_text().strip() for text in ax.texts] == ["11", "20"]


def test_sums_are_medians_in_milliseconds():
    seconds = np.array([[0.001, 0.002, 0.009], [0.004, 0.004, 0.004]])
    ax = framework_plots.sums(plt.subplots()[1], np.array([1e6, 2e6]), seconds, np.array([0.002, 0.004]))
    np.testing.assert_allclose(ax.containers[0][0].get_xydata(), [[1, 2], [2, 4]])
