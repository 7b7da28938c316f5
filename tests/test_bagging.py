"""Bagging by scikit-learn and by a swarm, the same settings on both sides."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris

from study.baselines import bagging

X, Y = load_iris(return_X_y=True)
SETTINGS = {"members": 3, "hidden": [5], "epochs": 4, "batch_size": 50}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.thorough
def test_every_method_trains_the_same_networks_for_as_many_epochs():
    trained = {method: estimator.fit(X, Y) for method, estimator in bagging.estimators(**SETTINGS).items()}
    assert list(trained) == list(bagging.METHODS)
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
    assert table.method.tolist() == list(bagging.METHODS)
    assert (table["median"] > 0).all() and (table.repeats == 2).all()
    assert (table.accuracy > 0.5).all() and table.accuracy[1] == table.accuracy[2]  # one seed: the same networks


def test_speedup_is_over_the_faster_method_and_the_more_accurate_one():
    table = pd.DataFrame({"method": bagging.METHODS, "median": [2.0, 30.0, 20.0], "accuracy": [0.9, 0.85, 0.8]})
    assert bagging.speedup(table) == (10.0, pytest.approx(0.05))
    assert np.isclose(bagging.speedup(table.assign(median=[2.0, 1.0, 20.0]))[0], 0.5)


def test_each_repeat_has_a_seed_of_its_own_and_the_methods_share_it(monkeypatch):
    seen = []

    def fit(estimator, data):
        seen.append(estimator.get_params()["random_state"])
        return type("Fitted", (), {"score": lambda self, *test: 1.0, "predict": lambda self, x: Y})()

    monkeypatch.setattr(bagging, "fitted", fit)
    bagging.compare((X, Y), (X, Y), repeats=2, seed=5, **SETTINGS)
    assert seen[3:] == [5, 5, 5, 6, 6, 6]  # after the three that start the methods


def test_one_process_is_read_off_a_few_of_its_networks(monkeypatch):
    now = [0.0]

    def fit(estimator, data):
        settings = estimator.get_params()
        now[0] += 0.5 * settings.get("n_estimators", settings.get("members"))
        return type("Fitted", (), {"score": lambda self, *test: 0.9, "predict": lambda self, x: Y})()

    monkeypatch.setattr(bagging, "fitted", fit)
    monkeypatch.setattr(bagging.timing.time, "perf_counter", lambda: now[0])
    table = bagging.compare((X, Y), (X, Y), repeats=2, **SETTINGS | {"members": 20}).set_index("method")
    assert table["median"].tolist() == pytest.approx([10, 10, 10])
    assert table.networks_timed.tolist() == [20, 2, 20]


def test_both_sides_draw_their_first_weights_alike():
    shapes, settings = [(4, 200), (200, 3)], {"members": 2, "hidden": [200], "epochs": 1, "batch_size": 150}
    ours, theirs, _ = bagging.estimators(learning_rate=1e-12, **settings).values()
    ours, theirs = bagging.fitted(ours, (X, Y)), bagging.fitted(theirs, (X, Y))
    for layer, (inputs, outputs) in enumerate(shapes):
        bound = np.sqrt(6 / (inputs + outputs))  # Glorot and Bengio 2010, uniform
        mine = np.asarray(ours.swarm_.params[f"Dense_{layer}"]["kernel"])
        for kernels in (mine, np.stack([network.coefs_[layer] for network in theirs.estimators_])):
            assert 0.95 * bound < np.abs(kernels).max() <= bound * (1 + 1e-5)
            assert kernels.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
