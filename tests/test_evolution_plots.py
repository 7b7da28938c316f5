import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from study.evolution import plots as evolution_plots
from turbanet.evolution.genealogy import EvolutionHistory


@pytest.fixture
def history():
    """Three generations of three: 1 went on and had 3 and 4, whose child 5 is the best; 6 is of 1 and 3."""
    return EvolutionHistory(
        fitness=np.array([[1.0, 3, 2], [3, 5, 4], [3, 9, 1]]),
        member=np.array([[0, 1, 2], [1, 3, 4], [1, 5, 6]]),
        parents=np.array([[[-1, -1]] * 3, [[1, -1], [1, 2], [2, -1]], [[1, -1], [4, 3], [1, 3]]]),
        values={"rate": np.array([[0.1, 0.2, 0.3], [0.2, 0.4, 0.6], [0.2, 0.8, 0.1]])},
        seconds=np.ones(3),
    )


def labels(ax):
    return [text.get_text() for text in (ax.get_legend().get_texts() if ax.get_legend() else ax.texts)]


def test_fitness_is_the_mean_over_seeds_in_their_range():
    ax = evolution_plots.fitness(plt.subplots()[1], {"one": np.array([[1.0, 3], [3, 5]]), "other": np.ones((1, 2))})
    assert labels(ax) == ["other", "one"] and ax.get_lines()[0].get_ydata().tolist() == [2, 4]
    low, high = ax.collections[0].get_paths()[0].get_extents().get_points()[:, 1]
    assert (low, high) == (1, 5)


def test_genealogy_joins_members_to_their_parents_and_follows_the_best(history):
    ax = evolution_plots.genealogy(plt.subplots()[1], history)
    (line,) = ax.get_lines()
    assert line.get_xydata().tolist() == [[0, 1], [1, 1], [2, 0]]  # 2, which had 4, which had 5: by rank
    segments = [segment.tolist() for segment in ax.collections[0].get_segments()]
    assert len(segments) == 9 and [[1, 0], [2, 0]] in segments  # 3 is the other parent of 5


def test_founders_are_counted_along_first_parents(history):
    assert evolution_plots.founders(history).tolist() == [[1, 1, 1], [0, 2, 1], [0, 2, 1]]


def test_descent_is_in_percent_the_largest_founder_below(history):
    ax = evolution_plots.descent(plt.subplots()[1], evolution_plots.founders(history))
    below = ax.collections[0].get_paths()[0].vertices
    assert below[:, 1].max() == pytest.approx(200 / 3)


def test_schedules_are_the_range_the_median_and_the_best_line_s(history):
    ax = evolution_plots.schedules(plt.subplots()[1], history, "rate", "learning rate")
    median, best = [line.get_ydata().tolist() for line in ax.get_lines()]
    assert median == [0.2, 0.4, 0.2] and best == [0.3, 0.6, 0.8] and ax.get_yscale() == "log"
    ends = ax.collections[0].get_paths()[0].vertices
    assert [(ends[ends[:, 0] == i, 1].min(), ends[ends[:, 0] == i, 1].max()) for i in range(3)] == [
        (0.1, 0.3),
        (0.2, 0.6),
        (0.1, 0.8),
    ]


def test_paired_differences_have_student_s_interval():
    found = np.array([1.0, 2, 3, 4, 5])
    ax = evolution_plots.paired(plt.subplots()[1], {"less random": found})
    (low, _), (high, _) = ax.collections[0].get_segments()[0]
    np.testing.assert_allclose([low, high], [3 - 1.963243, 3 + 1.963243], rtol=1e-5)  # t(4) = 2.776445
    assert ax.get_lines()[0].get_xdata().tolist() == found.tolist()


def test_quantiles_are_a_line_a_column():
    table = pd.DataFrame({"median": [1.0, 2], "best": [3.0, 4]})
    ax = evolution_plots.quantiles(plt.subplots()[1], table)
    assert labels(ax) == ["median", "best"] and ax.get_lines()[1].get_ydata().tolist() == [3, 4]


def test_a_reward_map_has_its_axes():
    fig, ax = plt.subplots()
    evolution_plots.reward_map(fig, ax, np.eye(2), np.array([-1.0, 1]), np.array([-3.0, 3]), ("angle", "speed"))
    assert ax.images[0].get_extent() == [-1, 1, -3, 3] and ax.get_ylabel() == "speed"
