"""Figures of many machines show what they are given."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from study.cluster import projection_plots as draw
from study.cluster.projection import PARTS


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def test_measured_seconds_are_points_beside_their_prediction(ax):
    table = {"workers": [8, 64], "seconds": [66.0, 70.0], "ideal_seconds": [62.5, 62.5], "predicted_seconds": [64, 65]}
    assert draw.predicted_and_measured(ax, pd.DataFrame(table)) is ax
    lines = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert lines == {"nobody waits": [62.5, 62.5], "predicted": [64, 65], "measured": [66, 70]}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["8", "64"]
    assert ax.get_ylim() == (0, pytest.approx(80.5))


def test_each_part_is_a_line_over_machines_with_the_whole_above(ax):
    parts = {part: [100.0 + number, 10.0 + number] for number, part in enumerate(PARTS)}
    table = pd.DataFrame({"machines": [1, 10], **parts, "seconds": [200.0, 20.0]})
    assert draw.over_machines(ax, table) is ax
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert lines["training"] == [[1, 100], [10, 10]] and lines["gathering"] == [[1, 105], [10, 15]]
    assert lines["all of it"] == [[1, 200], [10, 20]] and len(lines) == 7
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_every_part_has_a_colour_of_its_own():
    assert set(draw.NAMES) == set(PARTS)
    assert len({colour for _, colour in draw.NAMES.values()}) == len(PARTS)
