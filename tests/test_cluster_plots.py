"""Figures of a swarm over machines show what they are given."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from study.cluster import plots as draw
from study.cluster.methods import JOBLIB, SHARDS


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


COLUMNS = ["shard", "worker", "begin", "end", "lost"]


def test_timeline_has_a_bar_an_attempt_in_its_workers_line(ax):
    draw.timeline(ax, pd.DataFrame([(0, 1, 0.0, 2.0, False), (1, 2, 0.5, 3.5, False)], columns=COLUMNS), "two")
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in ax.patches]
    assert bars == [(0, 2, pytest.approx(1)), (0.5, 3, pytest.approx(2))]
    assert [text.get_text() for text in ax.texts] == ["0", "1"]
    assert not ax.lines and ax.get_legend() is None and ax.get_title(loc="left") == "two"


def test_timeline_marks_the_kill_where_what_was_lost_ends(ax):
    lines = [(0, 1, 0.0, 2.0, False), (1, 2, 0.5, 1.5, True), (1, 3, 4.0, 6.0, False)]
    draw.timeline(ax, pd.DataFrame(lines, columns=COLUMNS))
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [False, True, False]
    assert [line.get_xdata()[0] for line in ax.lines] == [1.5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["lost with its node"]


def test_seconds_are_milliseconds_a_network(ax):
    draw.seconds(ax, pd.DataFrame({"method": [SHARDS, JOBLIB], "networks": [2000, 200], "seconds": [10.0, 8.0]}))
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[5, 0]], [[40, 1]]]
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"{SHARDS}, 2,000", f"{JOBLIB}, 200"]
    assert [text.get_text() for text in ax.texts] == ["5", "40"]
