"""study.figures.plots: each figure draws the numbers it was given, on the Axes it was given, without a warning."""

import matplotlib

matplotlib.use("Agg")

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

from study.figures import forecast_plots, plots, score_plots
from study.figures.labels import FUSED, LOOP, METHODS, OURS, SERIAL

SECONDS = {(OURS, 1): [1, 2, 3], (OURS, 4): [4, 5, 9], (LOOP, 1): [10, 10, 10], (LOOP, 4): [40, 41, 45]}
TIMES = pd.DataFrame(
    [
        {"method": method, "members": members, "seconds": one}
        for (method, members), all_of in SECONDS.items()
        for one in all_of
    ]
).assign(compile_seconds=0.5)
RATIOS = pd.DataFrame(
    [(OURS, 1, 1, 1, 1), (OURS, 4, 1, 1, 1), (LOOP, 1, 5, 4, 6), (LOOP, 4, 8.2, 8, 9)],
    columns=["method", "members", "ratio", "low", "high"],
)


@pytest.fixture(autouse=True)
def drawn():
    """The study's style; at the end every figure is drawn, where most warnings would come."""
    with matplotlib.rc_context():
        plots.style()
        yield
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots(figsize=(plots.COLUMN, 2.5))[1]


def labels(ax):
    return [text.get_text() for text in (ax.get_legend().get_texts() if ax.get_legend() else ax.texts)]


def colours(ax):
    """{label: colour} of what has a label of its own."""
    handles, names = ax.get_legend_handles_labels()
    lines = [handle.lines[0] if hasattr(handle, "lines") else handle for handle in handles]
    return {name.split(":")[0]: to_rgb(line.get_color()) for name, line in zip(names, lines)}


def test_colours_tell_the_methods_apart():
    assert (
        len({plots.COLOURS[method] for method in METHODS})
        == len({plots.MARKERS[method] for method in METHODS})
        == len(METHODS)
    )


def test_colours_are_those_of_the_method_in_every_figure():
    first, second = plt.subplots(1, 2)[1]
    times = colours(plots.time_against_size(first, TIMES))
    ratios = colours(plots.ratio_against_size(second, RATIOS))
    of_methods = {method: to_rgb(plots.COLOURS[method]) for method in (OURS, LOOP)}
    assert times == {f"{OURS}, cold": of_methods[OURS]} | of_methods and ratios == of_methods


def test_style_lays_figures_out_by_itself():
    assert plt.figure().get_layout_engine() is not None


def test_concept_draws_the_same_networks_one_after_the_other_and_together():
    axes = plt.subplots(1, 2)[1]
    assert plots.concept(axes, lanes=6) is axes
    boxes = [[p for p in ax.patches if isinstance(p, FancyBboxPatch)] for ax in axes]
    assert [len(some) for some in boxes] == [6, 6]
    assert [len({box.get_y() for box in some}) for some in boxes] == [1, 6]
    assert [len({box.get_x() for box in some}) for some in boxes] == [6, 1]
    assert axes[0].get_xlim() == axes[1].get_xlim() and "schematic" in axes[0].get_xlabel()


def test_time_against_size_draws_medians_and_ranges_on_logarithmic_axes(ax):
    assert plots.time_against_size(ax, TIMES) is ax
    ours, loop = ax.containers
    np.testing.assert_allclose(ours.lines[0].get_xydata(), [[1, 2], [4, 5]])
    np.testing.assert_allclose(loop.lines[0].get_xydata(), [[1, 10], [4, 41]])
    bars = ours.lines[2][0].get_segments()
    np.testing.assert_allclose(bars, [[[1, 1], [1, 3]], [[4, 4], [4, 9]]])
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_time_against_size_dashes_ours_with_its_compilation(ax):
    plots.time_against_size(ax, TIMES)
    (cold,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(cold.get_xydata(), [[1, 2.5], [4, 5.5]])
    assert labels(ax) == ["TurbaNet", "TurbaNet, cold", "PyTorch loop"]  # from below, as their lines end


def test_ratio_against_size_draws_ratios_and_their_intervals(ax):
    assert plots.ratio_against_size(ax, RATIOS) is ax
    (loop,) = ax.containers
    np.testing.assert_allclose(loop.lines[0].get_xydata(), [[1, 5], [4, 8.2]])
    np.testing.assert_allclose(loop.lines[2][0].get_segments(), [[[1, 4], [1, 6]], [[4, 8], [4, 9]]])
    (one,) = [line for line in ax.lines if line.get_label() == OURS]
    assert set(one.get_ydata()) == {1}


def test_names_of_lines_stand_at_their_ends_and_do_not_overlap(ax):
    for name, y in (("a", [0, 5.0, np.nan]), ("b", [3, 5, 5.01]), ("c", [9, 9, 10]), ("d", [0, 0, 0])):
        ax.plot([1, 2, 3], y, label=name)
    ax.plot([1, 3], [7, 7])  # it has no name
    ax.set_ylim(0, 10)
    plots.name_lines(ax)
    places = {text.get_text(): text.xy[1] for text in ax.texts}
    assert places["d"] == 0 and places["c"] == 1 and places["a"] < 0.5 < places["b"]
    colours = [text.get_color() for text in sorted(ax.texts, key=lambda text: text.get_text())]
    assert colours == [line.get_color() for line in ax.lines[:4]]
    ax.figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))


def test_ratio_against_size_takes_another_base(ax):
    plots.ratio_against_size(ax, RATIOS.replace(OURS, FUSED), base=FUSED)
    assert set(labels(ax)) == {LOOP, FUSED} and FUSED in ax.get_ylabel()


def test_ratios_by_workload_has_an_axes_a_workload_and_both_ratios():
    axes = plt.subplots(1, 3, sharex=True, sharey=True)[1]
    table = pd.DataFrame({"workload": ["a", "a", "b"], "method": [LOOP, FUSED, LOOP], "ratio": [4.0, 2.0, 0.5]})
    table = table.assign(low=table.ratio - 0.25, high=table.ratio + 0.5, cold_ratio=[1.0, 3.0, 0.125])
    plots.ratios_by_workload(axes, table)
    assert [ax.get_title() for ax in axes[:2]] == ["a", "b"] and not axes[2].axison
    first = axes[0].containers[0]
    np.testing.assert_allclose(first.lines[0].get_xydata(), [[4, 0]])
    np.testing.assert_allclose(first.lines[2][0].get_segments(), [[[3.75, 0], [4.5, 0]]])
    hollow = [line.get_xdata()[0] for line in axes[0].lines if line.get_markerfacecolor() == "none"]
    assert hollow == [1, 3] and [text.get_text() for text in axes[0].get_yticklabels()] == [LOOP, FUSED]


def test_confusion_writes_the_shares(ax):
    assert score_plots.confusion(ax, np.array([[90.2, 9.8], [0.04, 99.96]]), "average") is ax
    assert [text.get_text() for text in ax.texts] == ["90", "10", "", "100"]
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("average", "predicted", "true")


def test_confusion_writes_differences_of_half_a_point_and_more(ax):
    score_plots.confusion(ax, np.array([[1.26, -1.26], [0.49, 0.51]]), "one − other", limit=3)
    assert [text.get_text() for text in ax.texts] == ["1.3", "-1.3", "", "0.5"]
    assert ax.collections[0].get_clim() == (-3, 3)


def test_accuracy_against_size_draws_mean_range_and_member(ax):
    assert score_plots.accuracy_against_size(ax, np.array([[0.5, 0.8, 0.9], [0.7, 0.8, 0.9]]), 0.6, "bootstrap") is ax
    mean, member = ax.lines
    np.testing.assert_allclose(mean.get_xydata(), [[1, 0.6], [2, 0.8], [3, 0.9]])
    assert set(member.get_ydata()) == {0.6} and mean.get_color() == member.get_color()
    band = ax.collections[0].get_paths()[0].vertices
    assert band[band[:, 0] == 1, 1].min() == 0.5 and band[band[:, 0] == 1, 1].max() == 0.7


def test_error_distribution_shows_all_tickers_of_each_name(ax):
    rng = np.random.default_rng(0)
    errors = {
        "TurbaNet": rng.lognormal(size=70),
        "PyTorch": rng.lognormal(size=9),
        "persistence": rng.lognormal(size=70),
    }
    assert forecast_plots.error_distribution(ax, errors) is ax
    sums = [patch.get_xy()[1:-1:2, 1].sum() for patch in ax.patches]  # a step's heights
    np.testing.assert_allclose(sums, 100)


def test_error_distribution_says_and_draws_the_medians(ax):
    forecast_plots.error_distribution(
        ax, {"TurbaNet, level": np.array([1.0, 2, 4]), "persistence": np.array([1.0, 1.5, 8])}
    )
    assert labels(ax) == ["TurbaNet, level (median 2.00 %)", "persistence (median 1.50 %)"]
    assert [line.get_xdata()[0] for line in ax.lines] == [2, 1.5]
    assert [to_rgb(line.get_color()) for line in ax.lines] == [plots.COLOURS[OURS], plots.COLOURS["persistence"]]


def test_forecast_draws_the_truth_and_every_prediction(ax):
    days, truth = np.datetime64("2018-01-01") + np.arange(50), np.arange(50.0)
    values = {"TurbaNet": truth + 1, "persistence": truth - 1}
    assert forecast_plots.forecast(ax, days, truth, values, "AAPL") is ax
    np.testing.assert_array_equal([line.get_ydata() for line in ax.lines], [truth, truth + 1, truth - 1])
    assert [line.get_label() for line in ax.lines] == ["truth", "TurbaNet", "persistence"]
    assert ax.get_title() == "AAPL" and ax.lines[1].get_color() == plots.COLOURS[OURS]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "-", ":"] and ax.get_legend() is None


def test_error_distribution_counts_a_ticker_without_error(ax):
    forecast_plots.error_distribution(ax, {"persistence": np.array([0.0, 1.0, 2.0])})
    heights = [patch.get_xy()[:, 1].max() for patch in ax.patches]
    np.testing.assert_allclose(heights, 200 / 3)  # 0 joins 1 in the lowest bin, 2 in the highest has the rest


def test_seconds_by_model_has_an_axes_a_model_and_a_point_a_way():
    times = pd.DataFrame(
        [(m, w, s) for m, pair in {"a": (1.0, 4.0), "b": (2.0, 3.0)}.items() for w, s in zip((OURS, SERIAL), pair)],
        columns=["model", "method", "seconds"],
    )
    axes = plt.subplots(1, 2, sharey=True)[1]
    plots.seconds_by_model(axes, times.assign(low=times.seconds / 2, high=times.seconds + 1))
    points = [each for ax in axes for each in ax.containers]
    assert [each.lines[0].get_xydata().tolist() for each in points] == [[[1, 0]], [[4, 1]], [[2, 0]], [[3, 1]]]
    ends = [each.lines[2][0].get_segments()[0][:, 0].tolist() for each in points]
    assert ends == [[0.5, 2], [2, 5], [1, 3], [1.5, 4]]
    assert [ax.get_title() for ax in axes] == ["a", "b"]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == [OURS, SERIAL]
    assert [text.get_text() for text in axes[0].texts] == ["1", "4"] and axes[0].get_xlim()[0] == 0


def test_use_of_cores_draws_each_core_and_their_mean(ax):
    frame = pd.DataFrame({"seconds": [0.2, 0.4], "core_0": [100.0, 50.0], "core_1": [0.0, 50.0], "memory_gb": [1, 1]})
    plots.use_of_cores(ax, frame, "title")
    assert len(ax.lines) == 3
    np.testing.assert_array_equal(ax.lines[-1].get_ydata(), [50, 50])


def test_fold_scores_show_each_fold_the_mean_and_its_interval(ax):
    frame = pd.DataFrame({"model": "a", "schedule": "cosine", "accuracy": [50.0, 60.0]})
    score_plots.fold_scores(ax, frame, {("a", "cosine"): (55.0, 40.0, 70.0)})
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [50, 60])
    (low, high) = ax.collections[0].get_segments()[0][:, 1]
    assert (low, high) == (40, 70)


def test_class_scores_are_a_heat_map_of_percent(ax):
    score_plots.class_scores(ax, pd.DataFrame([[10.0, 95.2]], index=["a, cosine"], columns=[0, 1]))
    assert [text.get_text() for text in ax.texts] == ["10", "95"]


def test_median_and_range_draws_both(ax):
    score_plots.median_and_range(ax, [1, 2], [[3.0, 5, 10], [1, 2, 9]], "--", "validation rows")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [5, 2])
    band = ax.collections[0].get_paths()[0].vertices
    assert band[band[:, 0] == 1, 1].min() == 3 and band[band[:, 0] == 2, 1].max() == 9


def test_no_type_is_smaller_than_seven_points_at_print_size():
    axes = plt.subplots(1, 3, figsize=(plots.PAGE, 2.5))[1]
    score_plots.confusion(axes[0], np.full((10, 10), 12.3), "one − other", limit=20)
    plots.time_against_size(axes[1], TIMES)
    score_plots.class_scores(axes[2], pd.DataFrame([[10.0, 95.2]], index=["a, cosine"], columns=[0, 1]))
    axes[0].figure.canvas.draw()
    texts = [text for text in axes[0].figure.findobj(matplotlib.text.Text) if text.get_text().strip()]
    assert texts and min(text.get_fontsize() for text in texts) >= plots.SMALL


def test_roofline_draws_each_workload_under_both_ceilings(ax):
    table = pd.DataFrame({"workload": ["mnist", "own"], "operations_per_byte": [1.0, 30.0], "gflops": [5.0, 90.0]})
    plots.roofline(ax, table, peak=100, bandwidths={"cache": 40, "memory": 10})
    assert labels(ax) == ["MNIST", "own", "cache, 40 GB/s", "memory, 10 GB/s (dashed)"]
    cache, memory, *points = (line.get_xydata() for line in ax.lines)
    np.testing.assert_allclose([(xy[0, 1], xy[-1, 1]) for xy in (cache, memory)], [(40 / 3, 100), (10 / 3, 100)])
    np.testing.assert_array_equal(np.concatenate(points), [[1, 5], [30, 90]])


@pytest.mark.parametrize(
    ("limits", "ticks"), [((0.9, 6), ["1", "2", "5"]), ((0.002, 900), ["0.01", "0.1", "1", "10", "100"])]
)
def test_logarithmic_axes_have_plain_numbers(ax, limits, ticks):
    ax.set(xlim=limits, ylim=(1, 10))
    plots.logarithmic(ax, "x")
    ax.figure.canvas.draw()
    shown = [t.get_text() for t in ax.get_xticklabels(which="both") if limits[0] <= t.get_position()[0] <= limits[1]]
    assert [text for text in shown if text] == ticks and ax.get_yscale() == "linear"
