"""TurbaSearchCV finds what scikit-learn's searches find, training candidates and folds together."""

import numpy as np
import pytest
from scipy.stats import loguniform
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_digits
from sklearn.ensemble import BaggingClassifier, VotingClassifier
from sklearn.exceptions import FitFailedWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, RandomizedSearchCV, ShuffleSplit
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import turbanet as tn
from turbanet.ensembles import jobs
from turbanet.estimators import TurbaClassifier, TurbaRegressor, TurbaSearchCV

CLASSIFIER = TurbaClassifier(3, hidden=(8,), epochs=4, random_state=0)
REGRESSOR = TurbaRegressor(3, hidden=(8,), epochs=4, random_state=0)
RATES = {"learning_rate": [0.0001, 0.003, 0.03]}


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return x[:360] / 16, y[:360]


@pytest.fixture(scope="module")
def diabetes():
    return load_diabetes(return_X_y=True)


def same(ours, theirs, atol=2e-3):
    """Whether two searches have found the same, but for what roundings do."""
    names = [name for name in theirs.cv_results_ if ("_test_" in name or "_train_" in name) and "rank" not in name]
    assert names
    for name in names:
        np.testing.assert_allclose(ours.cv_results_[name], theirs.cv_results_[name], atol=atol, err_msg=name)
    assert ours.cv_results_["params"] == theirs.cv_results_["params"]
    assert ours.best_params_ == theirs.best_params_
    assert set(ours.cv_results_) == set(theirs.cv_results_)


def test_a_grid_has_the_table_of_scikit_learns(digits):
    grid = {**RATES, "weight_decay": [0.0, 0.1]}
    ours = TurbaSearchCV(CLASSIFIER, grid, cv=3, return_train_score=True).fit(*digits)
    same(ours, GridSearchCV(CLASSIFIER, grid, cv=3, return_train_score=True).fit(*digits), atol=0.01)
    assert ours.groups_ == [18]
    assert (ours.cv_results_["mean_fit_time"] > 0).all()
    assert ours.score(*digits) == ours.best_estimator_.score(*digits)
    assert ours.n_features_in_ == 64


def test_a_regressor_in_a_pipeline_with_several_scores(diabetes):
    pipeline = make_pipeline(StandardScaler(), REGRESSOR)
    grid = {f"turbaregressor__{name}": values for name, values in RATES.items()}
    how = {"cv": 3, "scoring": ["r2", "neg_mean_absolute_error"], "refit": "r2"}
    x, y = (part[:441] for part in diabetes)
    ours = TurbaSearchCV(pipeline, grid, **how).fit(x, y)
    theirs = GridSearchCV(pipeline, grid, **how).fit(x, y)
    same(ours, theirs, atol=0.05)  # the errors are about 50
    assert ours.groups_ == [9]
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x), rtol=1e-3)


def test_candidates_that_train_several_networks_take_no_other_ones(digits):
    x, y = digits[0][:90, :20], digits[1][:90] % 3
    one = TurbaClassifier(1, hidden=(4,), epochs=5, batch_size=30, random_state=0, plan=tn.Plan(1, 1))
    bagging = BaggingClassifier(one, 2, random_state=0)
    rows = {"bootstrap": [True, False], "random_state": [0, 1], "learning_rate": [1e-5, 0.05]}
    others = [clone(one).set_params(**{name: value}) for name, values in rows.items() for value in values]
    voting = VotingClassifier([(str(number), each) for number, each in enumerate(others[:4])])
    grid = {"clf": [CalibratedClassifierCV(one, cv=2, ensemble=False), voting, bagging, *others]}
    ours, theirs = (search(Pipeline([("clf", one)]), grid, cv=2) for search in (TurbaSearchCV, GridSearchCV))
    np.testing.assert_array_equal(
        ours.fit(x, y).cv_results_["mean_test_score"], theirs.fit(x, y).cv_results_["mean_test_score"]
    )
    assert len(set(theirs.cv_results_["mean_test_score"])) > 2 and ours.best_index_ == theirs.best_index_


def test_splits_may_come_from_a_generator(digits):
    how = {"estimator": CLASSIFIER, "param_grid": {"learning_rate": [0.001, 0.03]}, "refit": False}
    ours = TurbaSearchCV(**how, cv=KFold(2).split(digits[0])).fit(*digits)
    same(ours, TurbaSearchCV(**how, cv=KFold(2)).fit(*digits), atol=0)
    assert ours.n_splits_ == 2 and ours.groups_ == [4]


def test_other_shapes_make_groups_of_their_own(diabetes):
    model = TurbaRegressor(3, plan=tn.Plan(1, 1), random_state=0)  # one program for any number of members
    grid = [
        {"hidden": [(4,)], "members": [2, 3], "epochs": [2]},
        {"hidden": [(8,)], "members": [2], "epochs": [2]},
        {"hidden": [(4,)], "members": [2], "epochs": [3]},
    ]
    how = {"cv": KFold(3), "refit": False}  # 442 rows: 294 or 295 to train on, 10 steps
    ours = TurbaSearchCV(model, grid, **how).fit(*diabetes)
    same(ours, GridSearchCV(model, grid, **how).fit(*diabetes))
    assert ours.groups_ == [6, 3, 3]


def test_folds_that_make_other_numbers_of_steps_train_apart(diabetes):
    each = {}
    rates, how = {"learning_rate": [0.003, 0.03]}, {"cv": KFold(3), "refit": False}
    for batch_size in (49, 1000):  # 294 = 6 * 49
        model = TurbaRegressor(3, hidden=(8,), epochs=4, batch_size=batch_size, plan=tn.Plan(1, 1), random_state=0)
        each[batch_size] = TurbaSearchCV(model, rates, **how).fit(*diabetes)
        same(each[batch_size], GridSearchCV(model, rates, **how).fit(*diabetes))
    assert [sorted(search.groups_) for search in each.values()] == [[2, 4], [2, 4]]


def test_draws_and_a_splitter_that_draws(digits):
    model = TurbaClassifier(3, hidden=(8,), epochs=4, plan=tn.Plan(1, 1), random_state=0)
    how = {"n_iter": 3, "random_state": 1, "cv": ShuffleSplit(2, random_state=3), "refit": False}
    names = {"learning_rate": loguniform(1e-4, 1e-1)}
    ours = TurbaSearchCV(model, names, **how).fit(*digits)
    same(ours, RandomizedSearchCV(model, names, **how).fit(*digits), atol=0.02)
    drawn = TurbaSearchCV(model, RATES, cv=ShuffleSplit(2), refit=False).fit(*digits)
    assert drawn.groups_ == [6]


def test_weights_groups_and_early_stopping_go_through(digits):
    x, y = digits
    rng = np.random.default_rng(0)
    more = {"sample_weight": rng.uniform(size=len(x)), "groups": rng.integers(6, size=len(x))}
    stops = {"early_stopping": True, "n_iter_no_change": 2}
    model = TurbaClassifier(3, hidden=(8,), epochs=30, plan=tn.Plan(1, 1), random_state=0, **stops)
    rates, how = {"learning_rate": [0.003, 0.03]}, {"cv": GroupKFold(2)}
    ours = TurbaSearchCV(model, rates, **how).fit(x, y, **more)
    same(ours, GridSearchCV(model, rates, **how).fit(x, y, **more), atol=0.02)


def test_nothing_is_trained_twice_even_with_seeds_that_are_drawn(digits, monkeypatch):
    runs = []
    run = jobs.Job.run
    monkeypatch.setattr(jobs.Job, "run", lambda job, cluster=None: runs.append(len(job.swarm)) or run(job, cluster))
    model = TurbaClassifier(3, hidden=(8,), epochs=1)
    TurbaSearchCV(model, RATES, cv=3).fit(*digits)
    assert runs == [27, 3]  # the search, and the best again on all rows


def test_a_fold_is_kept_once_for_all_candidates(diabetes, monkeypatch):
    held, run = [], jobs.run_grouped
    monkeypatch.setattr(jobs, "run_grouped", lambda found, cluster: held.extend(found.values()) or run(found, cluster))
    TurbaSearchCV(REGRESSOR, {"learning_rate": [0.001, 0.01, 0.1]}, cv=2, refit=False).fit(*diabetes)
    assert len(held) == 6 and len({id(job.x) for job in held}) == len({id(job.y) for job in held}) == 2


def test_rows_that_a_step_before_draws_are_trained_on_for_themselves(digits, monkeypatch):
    class Noisy(StandardScaler):
        def transform(self, X, copy=None):
            return super().transform(X) + np.random.default_rng().normal(size=X.shape)

    runs = []
    run = jobs.Job.run
    monkeypatch.setattr(jobs.Job, "run", lambda job, cluster=None: runs.append(len(job.swarm)) or run(job, cluster))
    TurbaSearchCV(make_pipeline(Noisy(), CLASSIFIER), {"turbaclassifier__epochs": [1]}, cv=2, refit=False).fit(*digits)
    assert runs == [6, 3, 3]


@pytest.mark.filterwarnings("ignore:One or more of the test scores are non-finite")
def test_a_candidate_that_cannot_be_trained_is_told_as_scikit_learn_tells_it(digits):
    grid = {"hidden": [8, (8,)]}
    with pytest.warns(FitFailedWarning, match="2 fits failed"):
        found = TurbaSearchCV(CLASSIFIER, grid, cv=2).fit(*digits)
    assert np.isnan(found.cv_results_["mean_test_score"]).tolist() == [True, False]
    assert found.best_params_ == {"hidden": (8,)}
    with pytest.raises(ValueError, match="hidden must be a sequence"):
        TurbaSearchCV(CLASSIFIER, grid, cv=2, error_score="raise").fit(*digits)


@pytest.mark.parametrize("other", [LogisticRegression(), BaggingClassifier(CLASSIFIER)])
def test_other_estimators_are_refused(digits, other):
    with pytest.raises(TypeError, match="take GridSearchCV"):
        TurbaSearchCV(other, RATES).fit(*digits)


def test_a_misspelt_parameter_is_refused(digits):
    with pytest.raises(ValueError, match="Invalid parameter 'learning_rat'"):
        TurbaSearchCV(CLASSIFIER, {"learning_rat": [0.1]}).fit(*digits)


def test_a_drawn_seed_keeps_what_was_unseen_unseen():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 3)), rng.normal(size=120)
    model = TurbaRegressor(5, hidden=(64,), epochs=100, learning_rate=0.02, oob_score=True)

    def out_of_bag(estimator, x, y):
        return estimator.oob_score_

    found = TurbaSearchCV(model, {"learning_rate": [0.02]}, cv=3, refit=False, scoring=out_of_bag).fit(x, y)
    assert found.cv_results_["mean_test_score"][0] < 0  # of noise


@pytest.mark.filterwarnings("ignore:One or more of the test scores are non-finite")
@pytest.mark.parametrize("wrong", [{"epochs": [0, 2]}, {"batch_size": [0, 32]}, {"batch_size": ["auto", 32]}])
def test_one_bad_candidate_ends_nothing(digits, wrong):
    with pytest.warns(FitFailedWarning, match="2 fits failed"):
        found = TurbaSearchCV(CLASSIFIER, wrong, cv=2, refit=False).fit(*digits)
    assert np.isnan(found.cv_results_["mean_test_score"]).tolist() == [True, False]


def test_a_search_trains_on_the_estimators_cluster(digits):
    class Cluster:
        calls = 0

        def fit(self, *data, **how):
            Cluster.calls += 1
            return tn.fit(*data, **how)

    model = TurbaClassifier(3, hidden=(8,), epochs=1, cluster=Cluster())
    TurbaSearchCV(model, RATES, cv=3, refit=False).fit(*digits)
    assert Cluster.calls == 1
