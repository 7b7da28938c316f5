"""turbanet.lab.worker_plots: what is drawn is what was measured."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from turbanet.lab import worker_plots
from turbanet.lab.labels import HOGWILD, LOCAL, SERIAL_ONE


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
    ways = pd.DataFrame({"way": [SERIAL_ONE, LOCAL], "speed-up": [1.0, 1.75]})
    ax = worker_plots.speed_ups(plt.subplots()[1], ways, SERIAL_ONE)
    assert [bar.get_width() for bar in ax.patches] == [1.75, 1.0]
    assert [text.get_text().strip() for text in ax.texts] == ["1.75", "1.00"]


def test_architectures_name_each_way():
    axes = worker_plots.architectures(plt.subplots(1, 4)[1])
    assert [ax.get_title().partition("\n")[0] for ax in axes] == list(worker_plots.ARCHITECTURES)
    assert all("worker 2" in " ".join(text.get_text() for text in ax.texts) for ax in axes)


def test_throughput_shows_what_was_measured_and_dashed_what_was_not():
    columns = ["framework", "workers", "images a second", "low", "high"]
    measured = pd.DataFrame([("jax", 1, 100.0, 90, 120), ("jax", 2, 180.0, 170, 190)], columns=columns)
    predicted = pd.DataFrame({"workers": [1, 4], "images a second": [100.0, 390.0]})
    ax = worker_plots.throughput(plt.subplots()[1], measured, predicted)
    (container,) = ax.containers
    np.testing.assert_allclose(container[0].get_xydata(), [[1, 100], [2, 180]])
    segments = container[2][0].get_segments()
    np.testing.assert_allclose([segment[:, 1] for segment in segments], [[90, 120], [170, 190]])
    dashed = next(line for line in ax.get_lines() if line.get_linestyle() == "--")
    np.testing.assert_allclose(dashed.get_ydata(), [100, 390])


def test_no_framework_is_left_out():
    names = [f"framework {number}" for number in range(12)]
    measured = pd.DataFrame({"framework": names, "workers": 1, "images a second": 9.0, "low": 8.0, "high": 10.0})
    ax = worker_plots.throughput(plt.subplots()[1], measured, pd.DataFrame({"workers": [1], "images a second": [9.0]}))
    assert sorted(container.get_label() for container in ax.containers) == sorted(names)


def test_sums_are_medians_in_milliseconds():
    seconds = np.array([[0.001, 0.002, 0.009], [0.004, 0.004, 0.004]])
    ax = worker_plots.sums(plt.subplots()[1], np.array([1e6, 2e6]), seconds, np.array([0.002, 0.004]))
    np.testing.assert_allclose(ax.containers[0][0].get_xydata(), [[1, 2], [2, 4]])
