"""The estimators are scikit-learn's in what they promise, and train what a swarm trains."""

import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from scipy.special import softmax
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tiers import first

import turbanet as tn
from turbanet.ensembles import swarm_estimator
from turbanet.ensembles.estimators import TurbaClassifier, TurbaRegressor
from turbanet.ensembles.jobs import train
from turbanet.training import compilation, program

# A float32 trainer's losses do not agree within the 1e-7 that these ask for: see the tests of weights below.
EXPECTED_TO_FAIL = {
    name: "roundings of float32; scikit-learn's own bagging is excused from it too"
    for name in (
        "check_sample_weight_equivalence_on_dense_data",
        "check_sample_weight_equivalence_on_sparse_data",
    )
}


# What tests below hold of the estimators too, or another check of the same kind.
REPEATED = {
    *EXPECTED_TO_FAIL,
    "check_class_weight_classifiers",
    "check_estimator_sparse_array",
    "check_estimator_sparse_matrix",
    "check_estimator_sparse_tag",
    "check_fit2d_1feature",
    "check_fit_idempotent",
    "check_fit_score_takes_y",
    "check_pipeline_consistency",
    "check_positive_only_tag_during_fit",
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
}


def checks_of(estimator):
    """All of scikit-learn's checks, those in REPEATED marked `thorough`."""
    found = parametrize_with_checks([estimator], expected_failed_checks=lambda estimator: EXPECTED_TO_FAIL)
    names, checks = found.args
    each = []
    for one in checks:
        values, marks = (one.values, one.marks) if hasattr(one, "marks") else (one, ())
        check = values[1]
        repeated = check.func.__name__ in REPEATED or "X_dtype" in check.keywords
        each.append(pytest.param(*values, marks=[*marks, *[pytest.mark.thorough] * repeated]))
    return pytest.mark.parametrize(names, each, **found.kwargs)


@checks_of(TurbaClassifier(2, hidden=(16,), epochs=60, plan=tn.Plan(1, 1)))  # whose programs compile soonest
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.thorough  # most of them are those of a classifier
@checks_of(TurbaRegressor(2, hidden=(16,), epochs=60))
def test_scikit_learns_own_checks_of_a_regressor(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x[:1200] / 16, y[:1200]), (x[1200:] / 16, y[1200:])


def test_weights_of_rows_and_of_classes_multiply(digits):
    (x, y), _ = digits
    x, y = x[:120], (y[:120] > 4).astype(int)
    rows, settings = np.linspace(0.1, 2, 120), {"hidden": (4,), "epochs": 3, "random_state": 0}
    ours = TurbaClassifier(2, class_weight={0: 1, 1: 5}, **settings).fit(x, y, sample_weight=rows)
    by_hand = TurbaClassifier(2, **settings).fit(x, y, sample_weight=rows * np.array([1, 5])[y])
    np.testing.assert_allclose(ours.predict_proba(x), by_hand.predict_proba(x), rtol=1e-5)


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
    model = TurbaRegressor(3, epochs=60, random_state=0).fit(x, y)
    assert model.predict(x).shape == (200, 2) and model.predict_members(x).shape == (3, 200, 2)
    assert model.score(x, y) > 0.9


def test_any_flax_model(digits):
    (x, y), _ = digits
    classifier = TurbaClassifier(2, model=tn.MLP((8, 8, 10)), epochs=1, random_state=0).fit(x[:100], y[:100])
    assert sorted(classifier.swarm_.params) == ["Dense_0", "Dense_1", "Dense_2"]


def test_pipelines_searches_and_cross_validation():
    x, y = make_classification(120, random_state=0)
    pipeline = make_pipeline(StandardScaler(), TurbaClassifier(3, hidden=(8,), epochs=20, random_state=0))
    search = GridSearchCV(pipeline, {"turbaclassifier__learning_rate": [1e-9, 0.01]}, cv=2, refit=False).fit(x, y)
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
    GridSearchCV(small, {"learning_rate": [0.01]}, cv=2, refit=False).fit(x[:300], y[:300])


def test_parameters_changed_after_the_training_do_not_change_what_is_pickled(digits):
    (x, y), (x_test, _) = digits
    trained = TurbaClassifier(2, hidden=(8,), epochs=2).fit(x, y)
    expected = trained.predict_proba(x_test)
    trained.set_params(hidden=(5, 5), members=7)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(trained)).predict_proba(x_test), expected)


def test_a_pickle_holds_no_rows_and_its_training_leaves_the_same_ones_unseen():
    sizes = {}
    for count in (200, 2000):
        x, y = make_classification(count, random_state=0)
        model = TurbaClassifier(4, hidden=(4,), epochs=1, early_stopping=True, warm_start=True).fit(x, y)
        sizes[count] = len(pickle.dumps(model))
    assert sizes[2000] < sizes[200] + 1000  # its rows are 4 * 1800 numbers
    again = pickle.loads(pickle.dumps(model)).fit(x, y)
    np.testing.assert_array_equal(again.predict_proba(x), model.fit(x, y).predict_proba(x))
    with pytest.raises(ValueError, match="rows that they must not see: give y, rows of weight 0 and X_val as before"):
        model.fit(x, y, sample_weight=np.arange(2000) > 9)


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
    np.testing.assert_allclose(model.predict_std(x[300:]), np.std(members, axis=0))
    low, high = tn.ensembles.prediction_interval(members, (model.predict_members(x[:300]), 1000 + 5 * y[:300]))
    inside = ((low <= 1000 + 5 * y[300:]) & (1000 + 5 * y[300:] <= high)).mean()
    assert inside > 0.8  # the swarm's own predictions are near 0


def test_members_of_a_classifier_give_probabilities(digits):
    (x, y), (x_test, _) = digits
    model = TurbaClassifier(2, hidden=(8,), epochs=2, random_state=0).fit(x, y)
    members = model.predict_members(x_test)
    assert members.shape == (2, len(x_test), 10)
    np.testing.assert_allclose(members.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(members.mean(0), model.predict_proba(x_test), rtol=1e-5)
    np.testing.assert_allclose(model.predict_std(x_test), np.std(members, axis=0), atol=1e-6)


def full_batches(kind, **how):
    """Trained on all rows in each step: what repeats and what weighs a row is then the same, but for roundings."""
    return kind(3, hidden=(8,), epochs=30, batch_size=1000, learning_rate=0.01, bootstrap=False, random_state=0, **how)


def weighed(kind):
    """(x, y, weights 0 to 3, the same rows repeated that often)."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(60, 4))
    y = x[:, 0] + 0.5 * rng.normal(size=60)
    y = (y > 0).astype(int) if kind is TurbaClassifier else y
    weight = rng.integers(4, size=60)
    return x, y, weight, (np.repeat(x, weight, axis=0), np.repeat(y, weight))


def predicted(trained, x):
    return trained.predict_proba(x) if isinstance(trained, TurbaClassifier) else trained.predict(x)


@pytest.mark.parametrize("kind", first(1, [TurbaClassifier, TurbaRegressor]))
def test_a_weight_is_a_row_repeated(kind):
    x, y, weight, repeated = weighed(kind)
    by_weight = predicted(full_batches(kind).fit(x, y, sample_weight=weight), x)
    np.testing.assert_allclose(by_weight, predicted(full_batches(kind).fit(*repeated), x), rtol=1e-5, atol=1e-5)
    assert np.abs(by_weight - predicted(full_batches(kind).fit(x, y), x)).max() > 1e-3


@pytest.mark.parametrize("kind", first(1, [TurbaClassifier, TurbaRegressor]))
def test_over_draws_of_rows_weights_and_repeated_rows_predict_alike(kind):
    x, y, weight, repeated = weighed(kind)

    def over_seeds(data, **more):
        how = {"hidden": (8,), "epochs": 60, "batch_size": 1000, "learning_rate": 0.01}
        each = [predicted(kind(8, random_state=seed, **how).fit(*data, **more), x) for seed in range(12)]
        return np.mean(each, 0), np.var(each, 0, ddof=1) / len(each)

    (ours, our_error), (theirs, their_error) = over_seeds((x, y), sample_weight=weight), over_seeds(repeated)
    (plain, plain_error) = over_seeds((x, y))
    by_chance = np.sqrt(np.mean((ours - theirs) ** 2 / (our_error + their_error)))
    by_weights = np.sqrt(np.mean((plain - theirs) ** 2 / (plain_error + their_error)))
    assert by_chance < 2  # 1 on average, if nothing but chance sets them apart; the rows share the draws
    assert by_weights > 2 * by_chance


def test_rows_of_weight_zero_are_as_if_they_were_not_there():
    x, y, *_ = weighed(TurbaRegressor)
    keep = np.arange(60) % 3 > 0
    how = {"hidden": (8,), "epochs": 5, "oob_score": True, "random_state": 0}
    some = TurbaRegressor(6, **how).fit(x, y, sample_weight=keep)
    alone = TurbaRegressor(6, **how).fit(x[keep], y[keep], sample_weight=np.ones(keep.sum()))
    np.testing.assert_allclose(some.predict(x), alone.predict(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(some.oob_prediction_[~keep], some.predict(x[~keep]), rtol=1e-6)


def test_balanced_classes_weigh_the_rare_ones_up():
    x, y = make_classification(400, weights=[0.9], class_sep=0.5, flip_y=0.1, random_state=1)
    how = {"hidden": (8,), "epochs": 30, "learning_rate": 0.01, "random_state": 0}
    plain, balanced = (TurbaClassifier(3, class_weight=each, **how).fit(x, y) for each in (None, "balanced"))
    of_rare = [(model.predict(x)[y == 1] == 1).mean() for model in (plain, balanced)]
    assert of_rare[1] > of_rare[0] + 0.1
    by_hand = TurbaClassifier(3, **how).fit(x, y, sample_weight=np.where(y == 1, (y == 0).sum() / (y == 1).sum(), 1))
    np.testing.assert_allclose(balanced.predict_proba(x), by_hand.predict_proba(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [-2, np.nan, np.inf])
def test_a_weight_of_a_class_is_finite_and_not_negative(weight):
    x, y = np.eye(6, 3), ["a", "b"] * 3
    with pytest.raises(ValueError, match="class_weight must be finite numbers of at least 0, got {'a': "):
        TurbaClassifier(2, epochs=1, class_weight={"a": weight}).fit(x, y)


@pytest.mark.parametrize(
    ("weight", "message"),
    [([1.0] * 39 + [-1.0], "[Nn]egative"), ([0.0] * 40, "at least one non-zero"), ([1.0] * 39, "sample_weight.shape")],
)
def test_weights_that_are_none_are_refused(weight, message):
    x, y = make_classification(40, random_state=0)
    with pytest.raises(ValueError, match=message):
        TurbaClassifier(2).fit(x, y, sample_weight=weight)


def test_members_stop_early_with_their_best_weights():
    x, y = make_classification(300, flip_y=0.3, random_state=0)
    how = {"hidden": (32,), "epochs": 200, "learning_rate": 0.002, "random_state": 0}
    stopped = TurbaClassifier(4, early_stopping=True, n_iter_no_change=3, validation_fraction=0.2, **how).fit(x, y)
    assert stopped.n_iter_ == stopped.history_.epochs.max() < 200
    assert len(set(stopped.history_.epochs)) > 1
    assert stopped.history_.best().validation_loss.notna().all()


def test_out_of_bag_leaves_out_the_rows_that_early_stopping_follows():
    x, y = load_diabetes(return_X_y=True)
    how = {"hidden": (4,), "epochs": 1, "oob_score": True, "early_stopping": True, "random_state": 0}
    model = TurbaRegressor(40, **how).fit(x, y)  # so many that some have not seen any row
    assert np.isnan(model.oob_prediction_).sum() == np.ceil(0.1 * len(x))


def test_a_warm_start_goes_on_and_equals_one_training():
    x, y = make_classification(100, random_state=0)
    how = {"hidden": (8,), "batch_size": 25, "bootstrap": False, "random_state": 0}
    whole = TurbaClassifier(3, epochs=6, **how).fit(x, y)
    twice = TurbaClassifier(3, epochs=3, warm_start=True, **how).fit(x, y).fit(x, y)
    np.testing.assert_array_equal(twice.predict_proba(x), whole.predict_proba(x))
    np.testing.assert_array_equal(twice.history_.train_loss, whole.history_.train_loss)
    assert twice.n_iter_ == 6
    assert pickle.loads(pickle.dumps(twice)).fit(x, y).n_iter_ == 9


@pytest.mark.parametrize(
    ("changed", "labels", "message"),
    [
        ({"members": 4}, [0, 1], "trained with members=3 cannot go on with members=4"),
        ({"hidden": (9,)}, [0, 1], "trained with layers=.8, 2. cannot go on with layers=.9, 2."),
        ({}, [0, 2], r"Members of the classes \[0 1\] cannot go on with \[0 2\]"),
    ],
)
def test_a_warm_start_of_other_networks_is_refused(changed, labels, message):
    x, y = make_classification(40, random_state=0)
    model = TurbaClassifier(3, hidden=(8,), epochs=1, warm_start=True).fit(x, y)
    with pytest.raises(ValueError, match=message):
        model.set_params(**changed).fit(x, np.array(labels)[y])


def test_partial_fit_is_an_epoch_of_the_rows_it_is_given():
    x, y = load_diabetes(return_X_y=True)
    how = {"hidden": (8,), "bootstrap": False, "random_state": 0}
    three = TurbaRegressor(3, epochs=3, **how).fit(x, y)
    parts = TurbaRegressor(3, **how)
    for _ in range(3):
        parts.partial_fit(x, y)
    np.testing.assert_array_equal(parts.predict(x), three.predict(x))
    assert parts.n_iter_ == 3


def test_partial_fit_draws_other_rows_of_each_batch():
    random = np.random.default_rng(0)
    model = TurbaClassifier(1, hidden=(8,), learning_rate=0.05, random_state=0)
    for _ in range(60):
        model.partial_fit(random.normal([[-3], [3]]), [0, 1], classes=[0, 1])
    assert model.score([[-3], [3]], [0, 1]) == 1


def test_partial_fit_of_classes_that_come_later():
    x, y, *_ = weighed(TurbaClassifier)
    first, rest = y == 0, y == 1
    model = TurbaClassifier(2, hidden=(8,), learning_rate=0.05, random_state=0)
    with pytest.raises(ValueError, match="first call of partial_fit needs classes="):
        model.partial_fit(x[first], y[first])
    model.partial_fit(x[first], y[first], classes=[0, 1])
    for _ in range(20):
        model.partial_fit(x, y)
    assert model.score(x, y) > 0.8
    with pytest.raises(ValueError, match="y holds .*5.*none of the classes"):
        model.partial_fit(x, np.where(rest, 5, 0))
    with pytest.raises(ValueError, match="does not support early_stopping=True"):
        model.set_params(early_stopping=True).partial_fit(x, y)


def test_intervals_hold_their_level_of_new_targets_in_their_unit():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(3000, 2))
    y = 1000 + 50 * np.sin(2 * x[:, 0]) + 10 * rng.normal(size=3000)
    model = TurbaRegressor(20, hidden=(32,), epochs=20, learning_rate=0.01, oob_score=True, random_state=0)
    model.fit(x[:1000], y[:1000])
    for level in (0.5, 0.9):
        low, high = model.predict_interval(x[1000:], level)
        inside = ((low <= y[1000:]) & (y[1000:] <= high)).mean()
        assert level - 0.03 < inside < level + 0.06  # 2 000 rows: three standard errors are .03
    assert 40 < np.mean(high - low) < 120  # 33 would be the noise's own


def test_intervals_that_cannot_be_had_are_refused():
    x, y = load_diabetes(return_X_y=True)
    how = {"hidden": (4,), "epochs": 1, "oob_score": True, "plan": tn.Plan(1, 4), "random_state": 0}
    few, many = (TurbaRegressor(members, **how).fit(x[:100], y[:100]) for members in (4, 20))
    for model, level, message in (
        (many, 95, "between 0 and 1; got 95"),
        (many, 0.999, "needs 999 rows that 5 members did not see, there are 90: take a lower level, or more rows"),
        (few, 0.9, "needs 9 rows that 5 members did not see, there are 0: take about 20 members"),
    ):
        with pytest.raises(ValueError, match=message):
            model.predict_interval(x, level)


def test_sparse_rows_and_tables_are_what_they_hold(digits):
    (x, y), (x_test, _) = digits
    how = {"hidden": (8,), "epochs": 2, "random_state": 0}
    dense = TurbaClassifier(2, **how).fit(x, y)
    sparse = TurbaClassifier(2, **how).fit(scipy.sparse.csc_matrix(x), y)
    table = pd.DataFrame(x, columns=[f"pixel {i}" for i in range(64)])
    of_table = TurbaClassifier(2, **how).fit(table, pd.Series(y))
    expected = dense.predict_proba(x_test)
    np.testing.assert_array_equal(sparse.predict_proba(scipy.sparse.csr_array(x_test)), expected)
    np.testing.assert_array_equal(of_table.predict_proba(pd.DataFrame(x_test, columns=table.columns)), expected)
    assert of_table.feature_names_in_.tolist() == list(table)
    np.testing.assert_allclose(dense.predict_log_proba(x_test), np.log(expected))


def test_processes_of_joblib_train_as_this_one(digits):
    (x, y), _ = digits
    model = TurbaClassifier(2, hidden=(8,), epochs=2, plan=tn.Plan(1, 2), random_state=0)
    here = cross_val_score(model, x[:300], y[:300], cv=2)
    np.testing.assert_array_equal(cross_val_score(model, x[:300], y[:300], cv=2, n_jobs=2), here)


@pytest.mark.parametrize(
    ("activation", "function"), [("tanh", np.tanh), (np.square, np.square)], ids=["name", "function"]
)
def test_the_activation_is_that_of_the_hidden_layers(activation, function):
    x, y = load_diabetes(return_X_y=True)
    activation = activation if isinstance(activation, str) else jnp.square
    model = TurbaRegressor(1, hidden=(4,), activation=activation, epochs=1, random_state=0).fit(x, y)
    hidden, last = ({k: v[0] for k, v in model.swarm_.params[f"Dense_{i}"].items()} for i in range(2))
    expected = function(x @ hidden["kernel"] + hidden["bias"]) @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(model.swarm_.predict(x[None].astype(np.float32))[0], expected, rtol=1e-3, atol=1e-4)


def test_dropout_draws_in_training_and_not_in_prediction():
    x, y = load_diabetes(return_X_y=True)
    how = {"hidden": (16,), "epochs": 3, "bootstrap": False, "random_state": 0}
    model, without = (TurbaRegressor(1, dropout=rate, **how).fit(x, y) for rate in (0.5, 0.0))
    assert (model.predict(x) == model.predict(x)).all() and abs(model.predict(x) - without.predict(x)).max() > 0.01


@pytest.mark.parametrize("level", first(1, [0.9, 0.1]))
def test_quantiles_are_what_the_loss_says(level):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 2))
    y = 1000 + 50 * x[:, 0] + 100 * rng.normal(size=2000)
    how = {"loss": "quantile", "hidden": (8,), "epochs": 40, "learning_rate": 0.01, "random_state": 0}
    found = TurbaRegressor(2, quantile=level, **how).fit(x, y).predict(x)
    assert (y <= found).mean() == pytest.approx(level, abs=0.03)


def test_a_loss_of_ones_own_and_callbacks():
    x, y = load_diabetes(return_X_y=True)
    seen = []

    def absolute(params, x, y, apply_fn):
        prediction = apply_fn({"params": params}, x)
        return jnp.abs(prediction - y).mean(), prediction

    model = TurbaRegressor(2, loss=absolute, callbacks=[lambda view: seen.append(view.epoch)], epochs=4, random_state=0)
    model.fit(x, y)
    assert seen[-1] == 4
    members = np.asarray(model.swarm_.predict(np.tile(x.astype(np.float32), (2, 1, 1))))[..., 0]
    standard = (y - y.mean()) / y.std()
    loss = tn.evaluate(model.swarm_, x.astype(np.float32), standard.astype(np.float32)[:, None], absolute)
    np.testing.assert_allclose(loss, abs(members - standard).mean(1), rtol=1e-4)


@pytest.mark.parametrize("kind", [TurbaClassifier, TurbaRegressor])
def test_rows_of_ones_own_stop_a_training_and_are_not_trained_on(kind, monkeypatch):
    trained_on = []
    monkeypatch.setattr(swarm_estimator, "train", lambda job, _: (trained_on.append(job.rows), train(job))[1])
    x, y = load_diabetes(return_X_y=True)
    y = np.where(y > 150, "high", "low") if kind is TurbaClassifier else y
    how = {"early_stopping": True, "n_iter_no_change": 2, "epochs": 200, "hidden": (8,), "random_state": 0}
    own = kind(3, learning_rate=0.05, **how).fit(x[:300], y[:300], X_val=x[300:], y_val=y[300:])
    assert own.n_iter_ < 200 and trained_on[0].max() < 300
    best = own.history_.best().validation_loss
    if kind is TurbaClassifier:
        logits = np.asarray(tn.predict(own.swarm_, x[300:].astype(np.float32)), np.float64)
        expected = [log_loss(y[300:], softmax(each, axis=1)) for each in logits]
    else:
        scaled = (own.predict_members(x[300:]) - y[300:]) / y[:300].std()
        expected = (scaled**2).mean(1)
    np.testing.assert_allclose(best, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "fitted", "message"),
    [
        ({"activation": "gelu"}, {}, "activation is relu, tanh, logistic, identity or a function; got 'gelu'"),
        ({"model": tn.MLP((4, 1)), "dropout": 0.1}, {}, "activation and dropout are of the MLP that model=None makes"),
        ({"loss": "mae"}, {}, "loss is .squared_error., .quantile. or a function; got 'mae'"),
        ({"learning_rate": -0.1}, {}, "learning_rate must be a number of at least 0, got -0.1"),
        ({"weight_decay": np.nan}, {}, "weight_decay must be a number of at least 0, got nan"),
        ({"cluster": "auto"}, {}, r"cluster must be a turbanet.cluster.Cluster\(folder, ...\) or None, got 'auto'"),
        ({"callbacks": print}, {}, "callbacks is a list of functions, got .*print.*: put it in a list"),
        ({"early_stopping": True, "n_iter_no_change": 0}, {}, "n_iter_no_change must be a whole number of at least 1"),
        ({"early_stopping": True, "tol": -1}, {}, "tol, .*, must be at least 0; got -1"),
        ({"early_stopping": True, "validation_fraction": 0.0}, {}, "validation_fraction is between 0 and 1, got 0.0"),
        ({"dropout": 20}, {}, "dropout must be a number from 0 to below 1, got 20"),
        ({"loss": "quantile", "quantile": 90}, {}, "A quantile's level is a number between 0 and 1; got 90"),
        ({}, {"X_val": np.ones((2, 10)), "y_val": [1, 2]}, "must be passed together and with early_stopping=True"),
        ({"early_stopping": True}, {"X_val": np.ones((2, 10))}, "X_val and y_val must be passed together"),
    ],
)
def test_settings_that_would_be_ignored_or_are_unknown_are_refused(how, fitted, message):
    x, y = load_diabetes(return_X_y=True)
    with pytest.raises(ValueError, match=message):
        TurbaRegressor(2, hidden=(4,), epochs=1, **how).fit(x, y, **fitted)


def test_a_grid_search_over_equal_shapes_compiles_once(digits):
    (x, y), _ = digits
    x, y = x[:120], y[:120]
    grid = [{"learning_rate": [0.001], "weight_decay": [0]}, {"learning_rate": [0.01], "weight_decay": [0.1]}]
    model = TurbaClassifier(2, hidden=(7,), epochs=1, random_state=0)
    before = set(compilation._programs())
    search = GridSearchCV(model, grid, cv=2, refit=False).fit(x, y)
    assert len(search.cv_results_["params"]) == 2
    trained = [key for key in set(compilation._programs()) - before if key[0] is program.Train]
    assert len(trained) == 1


NOISE = np.random.default_rng(7)
X_NOISE, Y_NOISE = NOISE.normal(size=(120, 3)), NOISE.normal(size=120)


def test_a_failed_or_other_fit_leaves_nothing_of_the_one_before():
    model = TurbaRegressor(20, hidden=(4,), epochs=1, oob_score=True, random_state=0).fit(X_NOISE, Y_NOISE)
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        model.set_params(batch_size=0).fit(X_NOISE, 1000 * Y_NOISE)
    with pytest.raises(NotFittedError):
        model.predict(X_NOISE)
    model.set_params(batch_size=32).fit(X_NOISE, Y_NOISE)
    with pytest.raises(ValueError, match="Negative values"):
        model.fit(np.c_[X_NOISE, X_NOISE], Y_NOISE, sample_weight=-np.ones(120))
    with pytest.raises(NotFittedError):
        model.predict(X_NOISE)
    model.set_params(batch_size=32, oob_score=False).fit(X_NOISE, Y_NOISE)
    with pytest.raises(ValueError, match="fit with oob_score=True"):
        model.predict_interval(X_NOISE)


def test_rows_that_were_unseen_stay_unseen_in_a_warm_start():
    model = TurbaRegressor(20, hidden=(64,), epochs=60, learning_rate=0.01, oob_score=True, warm_start=True)
    for _ in range(3):
        model.fit(X_NOISE, Y_NOISE)
    assert model.oob_score_ < 0  # of noise
    with pytest.raises(ValueError, match="trained with rows=120 cannot go on with rows=100"):
        model.fit(X_NOISE[:100], Y_NOISE[:100])
    assert len(model.predict_interval(X_NOISE, 0.5)) == 2  # the members are there, and so are their scores


def test_rows_of_weight_zero_calibrate_no_interval():
    y = Y_NOISE + 1000 * (np.arange(120) < 20)
    model = TurbaRegressor(20, hidden=(4,), epochs=2, oob_score=True, random_state=0)
    low, high = model.fit(X_NOISE, y, sample_weight=np.arange(120) >= 20).predict_interval(X_NOISE, 0.9)
    assert (high - low).max() < 50


def test_intervals_of_several_targets_have_each_their_level():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1600, 2))
    y = np.stack([x[:, 0] + 0.01 * rng.normal(size=1600), rng.standard_t(2, size=1600)], axis=1)
    model = TurbaRegressor(20, hidden=(32,), epochs=20, learning_rate=0.01, oob_score=True, random_state=1)
    low, high = model.fit(x[:600], y[:600]).predict_interval(x[600:], 0.8)
    inside = ((low <= y[600:]) & (y[600:] <= high)).mean(axis=0)
    assert ((inside > 0.74) & (inside < 0.88)).all()


def test_the_out_of_bag_score_is_an_accuracy_whatever_classes_weigh():
    x, y = make_classification(300, weights=[0.9], flip_y=0.2, random_state=0)
    how = {"hidden": (8,), "epochs": 10, "class_weight": "balanced", "random_state": 0}
    model = TurbaClassifier(10, oob_score=True, **how).fit(x, y)
    seen = ~np.isnan(model.oob_decision_function_[:, 0])
    assert model.oob_score_ == pytest.approx((model.oob_decision_function_[seen].argmax(1) == y[seen]).mean())
    with pytest.raises(ValueError, match="partial_fit does not support class_weight='balanced'"):
        model.set_params(oob_score=False).partial_fit(x, y)


def test_a_warm_start_knows_its_columns():
    table = pd.DataFrame(X_NOISE, columns=list("abc"))
    model = TurbaRegressor(20, hidden=(4,), epochs=1, warm_start=True).fit(table, Y_NOISE)
    with pytest.raises(ValueError, match="feature names should match"):
        model.fit(table[["c", "b", "a"]], Y_NOISE)


def test_rows_on_which_all_members_diverge_leave_an_estimator_as_it_was():
    model = TurbaRegressor(3, hidden=(4,), epochs=1, random_state=0).fit(X_NOISE, Y_NOISE)
    before = model.predict(X_NOISE)
    with pytest.raises(ValueError, match="All 3 members diverged"):
        model.partial_fit(np.where(X_NOISE > 0, 3e38, X_NOISE), Y_NOISE)
    np.testing.assert_array_equal(model.predict(X_NOISE), before)


def test_members_that_diverged_are_left_out(caplog):
    x, y = load_diabetes(return_X_y=True)
    how = {"hidden": (4,), "epochs": 2, "oob_score": True, "random_state": 0}
    with pytest.raises(ValueError, match="All 30 members diverged, .* take a smaller learning_rate than 1e\\+38"):
        TurbaRegressor(30, **how | {"learning_rate": 1e38}).fit(x, y)
    well = TurbaRegressor(30, **how).fit(x, y)
    some = np.arange(30) % 3 > 0
    broken = pickle.loads(pickle.dumps(well))
    broken.swarm_ = broken.swarm_.replace(
        params=jax.tree.map(
            lambda leaf: jnp.where(some.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, np.nan), well.swarm_.params
        )
    )
    broken.set_params(warm_start=True, epochs=1, learning_rate=1e-12).fit(x, y)
    assert "10 of 30 members (0, 3, 6, 9, 12 and 5 more) diverged" in caplog.text
    np.testing.assert_allclose(broken.predict(x), well.predict_members(x)[some].mean(0), rtol=1e-4)
    np.testing.assert_allclose(broken.predict_std(x), well.predict_members(x)[some].std(0), rtol=1e-3)
    assert np.isfinite(broken.oob_score_)
    assert np.isfinite(broken.predict_interval(x)).all()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"early_stopping": True}, "trained with early_stopping=False cannot go on with early_stopping=True"),
        pytest.param(
            {"early_stopping": True},
            {"early_stopping": False},
            "trained with early_stopping=True cannot go on with early_stopping=False",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"early_stopping": True},
            {"validation_fraction": 0.3},
            "validation_fraction=0.1 cannot go on with validation_fraction=0.3",
            marks=pytest.mark.thorough,
        ),
        ({}, {"oob_score": True}, "trained with oob_score=False cannot go on with oob_score=True"),
    ],
)
def test_a_warm_start_that_needs_other_rows_unseen_is_refused(before, after, message):
    x, y = make_classification(40, random_state=0)
    model = TurbaClassifier(3, hidden=(8,), epochs=1, warm_start=True, **before).fit(x, y)
    with pytest.raises(ValueError, match=message):
        model.set_params(**after).fit(x, y)


def test_an_out_of_bag_score_may_end():
    x, y = make_classification(40, random_state=0)
    model = TurbaClassifier(3, hidden=(8,), epochs=1, warm_start=True, oob_score=True).fit(x, y)
    assert not hasattr(model.set_params(oob_score=False).fit(x, y), "oob_score_")


def test_an_out_of_bag_score_needs_rows_that_some_did_not_see():
    with pytest.raises(ValueError, match="oob_score needs rows that some member did not see, there are none"):
        TurbaRegressor(1, hidden=(4,), epochs=1, oob_score=True).fit(np.ones((1, 2)), np.ones(1))


def test_balanced_classes_weigh_validation_rows_as_those_of_the_training():
    x, y = make_classification(100, weights=[0.9], random_state=0)
    x_val, y_val = np.r_[x[y == 0][:5], x[y == 1][:5]], np.repeat([0, 1], 5)
    how = {"hidden": (4,), "epochs": 3, "early_stopping": True, "random_state": 0}
    of_class = {each: len(y) / (2 * (y == each).sum()) for each in (0, 1)}
    losses = [
        TurbaClassifier(2, class_weight=weight, **how).fit(x, y, None, x_val, y_val).history_.validation_loss
        for weight in ("balanced", of_class)
    ]
    np.testing.assert_array_equal(*losses)


def test_a_row_alone_is_predicted_as_among_others():
    """Whose logits may be numbers that a softmax could have returned."""
    x, y = make_classification(60, 4, random_state=0)
    model = TurbaClassifier(1, hidden=(4,), epochs=1, random_state=0).fit(x, y)
    model.swarm_ = model.swarm_.replace(params=jax.tree.map(jnp.zeros_like, model.swarm_.params))
    model.swarm_.params["Dense_1"]["bias"] = jnp.array([[0.75, 0.25]])
    np.testing.assert_allclose(model.predict_proba(x[:1]), [softmax([0.75, 0.25])], rtol=1e-6)


def test_targets_of_another_shape_do_not_go_on():
    x, y = load_diabetes(return_X_y=True)
    model = TurbaRegressor(2, hidden=(4,), epochs=1, random_state=0).partial_fit(x[:20], y[:20])
    with pytest.raises(ValueError, match=r"y was \[row\] before and is \[row, 1\]"):
        model.partial_fit(x[:20], y[:20, None])


def test_a_target_that_is_constant_but_for_rounding_is_constant():
    x = np.linspace(0, 1, 60)[:, None]
    y = np.full(60, 0.1)
    assert 0 < y.std() < 1e-15
    model = TurbaRegressor(2, hidden=(4,), epochs=2, random_state=0).fit(x, y)
    exported = tn.export(model)  # which a spread that float32 does not hold would stop
    np.testing.assert_allclose(exported(x.astype(np.float32)), model.predict(x), rtol=1e-5)


def test_a_loss_of_a_classifier_is_no_name():
    with pytest.raises(ValueError, match="loss is None, for the cross-entropy, or a function; got 'log_loss'"):
        TurbaClassifier(2, loss="log_loss").fit(np.eye(4), [0, 1, 0, 1])
