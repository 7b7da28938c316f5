"""A search as one swarm beside scikit-learn's: the same candidates and folds, scores that agree."""

import numpy as np
import pytest
from sklearn.datasets import load_iris

from study.baselines import searches
from study.baselines.searches import ALONE, NETWORK, ONE_BY_ONE, TOGETHER

X, Y = load_iris(return_X_y=True)
SETTINGS = {"members": [1, 2], "learning_rates": [0.001, 0.03], "weight_decays": [0.0, 0.1], "folds": 3, "seed": 4}
SETTINGS |= {"hidden": [5], "epochs": 12, "batch_size": 20}


def test_every_method_searches_the_same_candidates_folds_and_networks():
    made = searches.searches(**SETTINGS)
    assert list(made) == [
        *((method, 1) for method in (TOGETHER, ONE_BY_ONE, ALONE, NETWORK)),
        *((method, 2) for method in (TOGETHER, ONE_BY_ONE)),
    ]
    assert {search.cv for search in made.values()} == {3}
    for (method, count), search in made.items():
        assert list(map(list, search.param_grid.values())) == [[0.001, 0.03], [0.0, 0.1]]
        settings = search.estimator.get_params()
        if method != NETWORK:
            assert (settings["members"], settings["bootstrap"]) == (count, count > 1)
    network, ours = made[NETWORK, 1].estimator, made[TOGETHER, 1].estimator
    assert tuple(network.hidden_layer_sizes) == ours.hidden == (5,)
    assert network.max_iter == ours.epochs == 12 and network.n_iter_no_change > 12
    assert network.batch_size == ours.batch_size == 20
    assert network.random_state == ours.random_state == 4


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.thorough
def test_compare_gives_seconds_and_scores_of_each_way():
    table = searches.compare(X, Y, repeats=2, **SETTINGS | {"members": [1]})
    assert table.method.tolist() == [TOGETHER, ONE_BY_ONE, ALONE, NETWORK] and table.networks.eq(1).all()
    assert (table[["cold", "median"]] > 0).all(axis=None) and (table.repeats == 2).all()
    assert np.isnan(table.gap).tolist() == np.isnan(table.typical_gap).tolist() == [False, True, False, True]
    assert table.typical_gap[0] <= table.gap[0] < 0.02  # a row of 150 by roundings at most
    assert table.gap[2] == 0
    by_hand = searches.searches(**SETTINGS)[ONE_BY_ONE, 1].fit(X, Y)
    assert table.score[1] == by_hand.best_score_
