"""Bagging by scikit-learn and by a swarm, the same settings on both sides."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris

from turbanet.lab import bagging

X, Y = load_iris(return_X_y=True)
SETTINGS = {"members": 3, "hidden": [5], "epochs": 4, "batch_size": 50}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_every_way_trains_the_same_networks_for_as_many_epochs():
    trained = {way: estimator.fit(X, Y) for way, estimator in bagging.estimators(**SETTINGS).items()}
    assert list(trained) == list(bagging.WAYS)
    ours, *theirs = trained.values()
    layers = ours.swarm_.params
    for other in theirs:
        assert len(other.estimators_) == len(ours.swarm_) == 3
        for network in other.estimators_:
            assert network.n_iter_ == ours.n_iter_ == 4
            assert [c.shape for c in network.coefs_] == [layers[f"Dense_{i}"]["kernel"].shape[1:] for i in range(2)]
    assert [other.n_jobs for other in theirs] == [1, 2]


def test_compare_gives_seconds_and_accuracy_of_each_way():
    table = bagging.compare(
        (X[::2], Y[::2]), (X[1::2], Y[1::2]), repeats=2, learning_rate=0.03, **SETTINGS | {"epochs": 60}
    )
    assert table.way.tolist() == list(bagging.WAYS)
    assert (table["median"] > 0).all() and (table.repeats == 2).all()
    assert (table.accuracy > 0.5).all() and table.accuracy[1] == table.accuracy[2]  # one seed: the same networks


def test_speedup_is_over_the_faster_way_and_the_more_accurate_one():
    table = pd.DataFrame({"way": bagging.WAYS, "median": [2.0, 30.0, 20.0], "accuracy": [0.9, 0.85, 0.8]})
    assert bagging.speedup(table) == (10.0, pytest.approx(0.05))
    assert np.isclose(bagging.speedup(table.assign(median=[2.0, 1.0, 20.0]))[0], 0.5)
