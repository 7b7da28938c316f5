"""Figures of federated learning show what they are given."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from study.federated import plots as draw


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def test_dealt_rows_are_bars_of_each_class(ax):
    labels = np.array([0, 0, 1, 1, 1])
    draw.dealt(ax, [[0, 1, 2], [3, 4, -1]], labels, "two clients")
    widths = np.array([bar.get_width() for bar in ax.patches]).reshape(2, 2)  # [class, client]
    assert widths.tolist() == [[2, 0], [1, 2]]


def test_accuracies_are_lines_in_percent_with_their_target(ax):
    draw.accuracies(ax, {"a": ([1, 2], [0.5, 0.75]), "b": ([1, 2], [0.25, 0.5])}, target=0.9)
    assert [line.get_ydata()[0] for line in ax.lines] == [50, 25, 90]
    assert [line.get_label() for line in ax.lines[:2]] == ["a", "b"]


def test_clients_are_points_around_their_mean(ax):
    draw.clients(ax, {"one for all": np.array([0.5, 1.0]), "own": np.array([0.8, 1.0, 0.9])})
    points = [np.sort(each.get_offsets()[:, 0]) for each in ax.collections if len(each.get_offsets())]
    assert [each.tolist() for each in points] == [[50, 100], [80, 90, 100]]
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([75, 90])


def test_seconds_are_points_in_milliseconds(ax):
    table = pd.DataFrame({"network": ["2NN", "2NN"], "method": ["TurbaNet", "PyTorch"], "seconds": [0.05, 0.15]})
    draw.seconds(ax, table)
    assert [line.get_xdata().tolist() for line in ax.lines] == [[50], [150]]


def test_privacy_is_accuracy_against_epsilon_of_few_and_of_many_clients(ax):
    many = {"epsilon of a thousand times as many": [3.0, 0.3]}
    draw.privacy(ax, pd.DataFrame({"noise": [1.0, 4.0], "epsilon": [300.0, 30.0], "accuracy": [0.9, 0.6], **many}))
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[300, 90], [30, 60]], [[3, 90], [0.3, 60]]]
    assert [text.get_text() for text in ax.texts] == ["1", "4"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["these clients", "a thousand times as many"]
