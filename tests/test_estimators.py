"""The estimators are scikit-learn's in what they promise, and train what a swarm trains."""

import pickle
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, make_classification
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import turbanet as tn
from turbanet.ensembles.estimators import TurbaClassifier, TurbaRegressor

EXPECTED_TO_FAIL = {}


@parametrize_with_checks(
    [TurbaClassifier(2, hidden=(16,), epochs=60), TurbaRegressor(2, hidden=(16,), epochs=60)],
    expected_failed_checks=lambda estimator: EXPECTED_TO_FAIL,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x[:1200] / 16, y[:1200]), (x[1200:] / 16, y[1200:])


def test_a_classifier_learns_the_digits(digits):
    train, test = digits
    classifier = TurbaClassifier(5, hidden=(32,), epochs=20, oob_score=True, random_state=0).fit(*train)
    assert classifier.score(*test) > 0.9
    assert abs(classifier.oob_score_ - classifier.score(*test)) < 0.06
    each = [
        np.mean(one.argmax(-1) == test[1]) for one in np.asarray(tn.predict(classifier.swarm_, test[0].astype("f4")))
    ]
    assert classifier.score(*test) >= np.mean(each)


def test_a_regressor_learns_and_scores_out_of_bag():
    x, y = load_diabetes(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    regressor = TurbaRegressor(10, hidden=(16,), epochs=30, oob_score=True, random_state=0).fit(x[:350], y[:350])
    assert regressor.score(x[350:], y[350:]) > 0.4 and abs(regressor.oob_score_ - 0.45) < 0.1
    assert regressor.oob_prediction_.shape == (350,)


def test_several_targets():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = np.stack([x[:, 0], 100 + 10 * x[:, 1]], 1)
    assert TurbaRegressor(3, epochs=60, random_state=0).fit(x, y).predict(x).shape == (200, 2)
    assert TurbaRegressor(3, epochs=60, random_state=0).fit(x, y).score(x, y) > 0.9


def test_any_flax_model(digits):
    (x, y), _ = digits
    classifier = TurbaClassifier(2, model=tn.MLP((8, 8, 10)), epochs=2, random_state=0).fit(x, y)
    assert sorted(classifier.swarm_.params) == ["Dense_0", "Dense_1", "Dense_2"]


def test_pipelines_searches_and_cross_validation():
    x, y = make_classification(120, random_state=0)
    pipeline = make_pipeline(StandardScaler(), TurbaClassifier(3, hidden=(8,), epochs=20, random_state=0))
    search = GridSearchCV(pipeline, {"turbaclassifier__learning_rate": [1e-9, 0.01]}, cv=2).fit(x, y)
    assert search.best_params_["turbaclassifier__learning_rate"] == 0.01
    assert cross_val_score(pipeline, x, y, cv=2).min() > 0.5


def test_out_of_bag_needs_bags():
    x, y = make_classification(40, random_state=0)
    with pytest.raises(ValueError, match="oob_score needs bootstrap=True"):
        TurbaClassifier(bootstrap=False, oob_score=True).fit(x, y)


def test_a_plan_goes_through_clone_and_grid_search(digits):
    (x, y), _ = digits
    small = TurbaClassifier(2, hidden=(8,), epochs=2, plan=tn.Plan(1, 2))
    assert clone(small).plan == small.plan
    GridSearchCV(small, {"learning_rate": [0.01]}, cv=2).fit(x[:60], y[:60])


def test_parameters_changed_after_the_training_do_not_change_what_is_pickled(digits):
    (x, y), (x_test, _) = digits
    trained = TurbaClassifier(2, hidden=(8,), epochs=2).fit(x, y)
    expected = trained.predict_proba(x_test)
    trained.set_params(hidden=(5, 5), members=7)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(trained)).predict_proba(x_test), expected)


def test_targets_far_from_zero_keep_their_differences():
    x = np.linspace(-1, 1, 200)[:, None]
    far = 1.7e9 + 30 * x[:, 0]
    trained = TurbaRegressor(2, hidden=(16,), epochs=100, learning_rate=0.01, random_state=0).fit(x, far)
    assert np.abs(trained.predict(x) - far).max() < 5


def test_estimators_pickled_by_version_0_5_predict_as_they_did():
    with (Path(__file__).parent / "pickles/estimators_0.5.pkl").open("rb") as file:
        kept = pickle.load(file)
    np.testing.assert_allclose(kept["classifier"].predict_proba(kept["x"]), kept["classes"], rtol=1e-5)
    np.testing.assert_allclose(kept["regressor"].predict(kept["x"]), kept["targets"], rtol=1e-5)


def test_a_pickle_of_a_network_whose_layers_changed_is_refused():
    state = TurbaClassifier(2, hidden=(3,), epochs=1, random_state=0).fit(np.eye(4), [0, 1, 0, 1]).__getstate__()
    state["swarm_"] = state["swarm_"][::-1]
    with pytest.raises(ValueError, match="layers have other names or sizes by now: train it anew"):
        TurbaClassifier().__setstate__(state)


class Narrow(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x)


@pytest.mark.parametrize(
    "make, outputs, message",
    [
        (lambda **how: TurbaClassifier(2, **how), 1, r"2 classes need logits \[row, 2\], the model gives \[1, 1\]"),
        (lambda **how: TurbaClassifier(2, **how), 7, r"2 classes need logits \[row, 2\], the model gives \[1, 7\]"),
        (lambda **how: TurbaRegressor(2, **how), 2, r"1 target\(s\) need \[row, 1\], the model gives \[1, 2\]"),
    ],
)
def test_a_model_of_other_outputs_is_refused_when_fitting(make, outputs, message):
    x, y = make_classification(40, random_state=0)
    with pytest.raises(ValueError, match=message):
        make(model=Narrow(outputs), epochs=1).fit(x, y)


def test_hidden_is_a_sequence():
    x, y = make_classification(40, random_state=0)
    with pytest.raises(ValueError, match=r"hidden must be a sequence .* such as \(16,\), got 16"):
        TurbaClassifier(2, hidden=16).fit(x, y)


def test_members_predict_in_the_unit_of_the_targets():
    x, y = load_diabetes(return_X_y=True)
    model = TurbaRegressor(4, hidden=(16,), epochs=30, random_state=0).fit(x[:300], 1000 + 5 * y[:300])
    members = model.predict_members(x[300:])
    assert members.shape == (4, 142)
    np.testing.assert_allclose(members.mean(0), model.predict(x[300:]), rtol=1e-9)
    low, high = tn.prediction_interval(members, (model.predict_members(x[:300]), 1000 + 5 * y[:300]))
    inside = ((low <= 1000 + 5 * y[300:]) & (1000 + 5 * y[300:] <= high)).mean()
    assert inside > 0.8  # the swarm's own predictions are near 0
    both = TurbaRegressor(2, hidden=(8,), epochs=2).fit(x, np.stack([y, 2 * y], 1))
    assert both.predict_members(x[:5]).shape == (2, 5, 2)


def test_members_of_a_classifier_give_probabilities(digits):
    (x, y), (x_test, _) = digits
    model = TurbaClassifier(3, hidden=(16,), epochs=2, random_state=0).fit(x, y)
    members = model.predict_members(x_test)
    assert members.shape == (3, len(x_test), 10)
    np.testing.assert_allclose(members.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(members.mean(0), model.predict_proba(x_test), rtol=1e-5)
