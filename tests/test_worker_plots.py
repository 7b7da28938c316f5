"""study.data_parallel.plots: what is drawn is what was measured."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from study.data_parallel import plots as worker_plots
from study.figures.labels import HOGWILD, LOCAL, SERIAL_ONE


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def table(behind=(0, 1, 1, 2)):
    return pd.DataFrame({"seconds": [1.0, 2, 3, 4], "loss": [4.0, 2, 2, 0], "behind": behind})


def test_losses_are_means_of_an_epoch_against_seconds_and_epochs():
    axes = plt.subplots(1, 2)[1]
    worker_plots.losses(axes, {HOGWILD: (table(), 2)}, target=1.5)
    by_time, by_epoch = axes[0].get_lines()[0], axes[1].get_lines()[0]
    np.testing.assert_allclose(by_time.get_ydata(), [np.nan, 3, 2, 1])
    np.testing.assert_allclose(by_time.get_xdata(), [1, 2, 3, 4])
    np.testing.assert_allclose(by_epoch.get_xdata(), [0.5, 1, 1.5, 2])
    assert axes[0].get_lines()[1].get_ydata() == [1.5, 1.5]


def test_staleness_is_the_share_of_steps():
    ax = worker_plots.staleness(plt.subplots()[1], {HOGWILD: table()})
    np.testing.assert_allclose(ax.get_lines()[0].get_xydata(), [[0, 25], [1, 50], [2, 25]])


def test_speed_ups_are_bars_with_their_numbers():
    methods = pd.DataFrame({"method": [SERIAL_ONE, LOCAL], "speed-up": [1.0, 1.75]})
    ax = worker_plots.speed_ups(plt.subplots()[1], methods, SERIAL_ONE)
    assert [bar.get_width() for bar in ax.patches] == [1.75, 1.0]
    assert [text.get_text().strip() for text in ax.texts] == ["1.75", "1.00"]
    ax.figure.draw_without_rendering()
    assert ax.xaxis.label.get_window_extent().x1 <= ax.get_window_extent().x1 + 1


def test_architectures_name_each_way():
    axes = worker_plots.architectures(plt.subplots(1, 4)[1])
    assert [ax.get_title().partition("\n")[0] for ax in axes] == list(worker_plots.ARCHITECTURES)
    assert all("worker 2" in " ".join(text.get_text() for text in ax.texts) for ax in axes)


def test_speed_ups_against_workers_are_open_where_workers_share_cores():
    columns = ["method", "workers", "speed-up", "oversubscribed"]
    methods = pd.DataFrame(
        [(HOGWILD, 1, 0.9, False), (HOGWILD, 2, 1.7, False), (HOGWILD, 4, 1.6, True)], columns=columns
    )
    ax = worker_plots.against_workers(plt.subplots()[1], methods)
    line, opened = ax.get_lines()[:2]
    np.testing.assert_allclose(line.get_xydata(), [[1, 0.9], [2, 1.7], [4, 1.6]])
    np.testing.assert_allclose(opened.get_xydata(), [[4, 1.6]])
    assert opened.get_markerfacecolor() == "white"


def test_each_seed_is_a_point_and_their_median_a_line():
    seconds = pd.DataFrame({"method": [HOGWILD] * 3 + [LOCAL], "seconds_to_loss": [3.0, 1, 2, 0.5]})
    ax = worker_plots.seconds_of_seeds(plt.subplots()[1], seconds)
    assert [label.get_text() for label in ax.get_yticklabels()] == [LOCAL, HOGWILD]
    points, median = ax.get_lines()[2:]
    assert points.get_xdata().tolist() == [3, 1, 2] and list(median.get_xdata()) == [2, 2]
