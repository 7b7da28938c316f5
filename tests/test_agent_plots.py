import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from study.agents import plots as agent_plots
from study.figures.labels import OURS, SCAN
from study.figures.plots import COLOURS

BAND = np.array([2.0, 3, 4]), np.array([1.0, 2, 3]), np.array([3.0, 4, 5])


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_learning_is_the_mean_in_its_band_and_the_middle_of_the_members():
    few = np.where(np.arange(11) < 5, 9, np.nan)  # the first update ends the episodes of five alone
    returns = np.stack([few, np.arange(11.0), np.arange(11) + 5.0])
    ax = agent_plots.learning(plt.subplots()[1], [10, 20, 30], returns, BAND)
    (mean,) = ax.get_lines()
    assert mean.get_ydata().tolist() == [3, 4]
    ends = [band.get_paths()[0].get_extents().get_points().tolist() for band in ax.collections]
    assert ends == [[[20, 1], [30, 14]], [[20, 2], [30, 5]]]


def test_profile_is_in_percent():
    ax = agent_plots.profile(plt.subplots()[1], [0, 1], {"early": np.array([1, 0.5]), "late": np.array([1, 1])})
    assert labels(ax) == ["early", "late"] and ax.get_lines()[0].get_ydata().tolist() == [100, 50]


def test_seconds_per_agent_are_warm_and_cold():
    table = pd.DataFrame({"members": [1, 4], "warm": [4.0, 2], "cold": [8.0, 3]})
    ax = agent_plots.seconds_per_agent(plt.subplots()[1], table)
    assert labels(ax) == ["warm", "cold"] and ax.get_lines()[1].get_ydata().tolist() == [8, 3]


def test_costs_are_points_with_their_numbers():
    table = pd.DataFrame({"method": ["TurbaNet", "jit(vmap(train))", "other"], "seconds": [1.5, 3.2, 84.2]})
    ax = agent_plots.costs(plt.subplots()[1], table)
    assert [text.get_text().strip() for text in ax.texts] == ["84.2", "3.2", "1.5"]
    assert [line.get_xydata().tolist() for line in ax.get_lines()] == [[[84.2, 0]], [[3.2, 1]], [[1.5, 2]]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["other", "jit(vmap(train))", "TurbaNet"]
    colours = [COLOURS[name] for name in ("PyTorch", SCAN, OURS)]
    assert [line.get_color() for line in ax.get_lines()] == colours


def test_cart_poles_lean_where_the_pole_does():
    axes = agent_plots.cart_poles(plt.subplots(1, 2)[1], [(0.0, 0.0), (1.0, np.pi / 2)], ["up", "right"])
    np.testing.assert_allclose(axes[0].get_lines()[1].get_xydata(), [[0, 0.3], [0, 1.3]], atol=1e-9)
    np.testing.assert_allclose(axes[1].get_lines()[1].get_xydata(), [[1, 0.3], [2, 0.3]], atol=1e-9)


def test_boards_have_food_and_agents_and_a_movie_has_all_of_them():
    food, place = np.zeros((2, 4, 4), bool), np.array([[[0, 1]], [[2, 3]]])
    axes = agent_plots.boards(plt.subplots(1, 2)[1], food, place, ["first", "second"])
    assert axes[1].get_lines()[0].get_xydata().tolist() == [[3, 2]]  # column, row
    assert agent_plots.movie(food, place).to_jshtml().count("data:image/png") == 2


def test_foraging_sets_one_network_and_chance_beside_a_network_each():
    ax = agent_plots.foraging(plt.subplots()[1], [1, 2, 3], BAND, np.ones((3, 1)), at_random=0.5)
    assert labels(ax) == ["a network each", "one network", "at random"] and ax.get_ylim()[0] == 0


def test_returns_are_a_point_an_agent():
    ax = agent_plots.returns_by(plt.subplots()[1], [1.0, 2], {"own": [5, 6], "other": [3, 4]}, "gravity")
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[5, 6], [3, 4]] and labels(ax) == ["own", "other"]
