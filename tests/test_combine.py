"""Members combined, against scikit-learn and values by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax
from scipy.stats import gmean
from sklearn.datasets import make_classification
from sklearn.ensemble import BaggingClassifier
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_score, recall_score
from sklearn.tree import DecisionTreeClassifier

import turbanet as tn

rng = np.random.default_rng(2)
LOGITS = rng.normal(size=(5, 40, 3)).astype(np.float32)
Y = rng.integers(0, 3, 40)


@pytest.mark.parametrize(
    "call",
    [
        tn.ensemble_mean,
        tn.ensemble_geometric_mean,
        tn.ensembles.diversity,
        lambda p: tn.ensembles.stacking_weights(p, [0, 1]),
        lambda p: tn.ensembles.greedy_weights(p, [0, 1]),
        lambda p: tn.ensembles.accuracy_by_size(p, [0, 1], seed=0),
    ],
)
def test_probabilities_are_no_logits(call):
    probability = np.array([[[0.9, 0.1], [0.2, 0.8]], [[1.0, 0.0], [0.5, 0.5]]])
    with pytest.raises(ValueError, match="These logits are probabilities.*np.log"):
        call(probability)
    with np.errstate(divide="ignore"):
        call(np.log(probability))


def test_ensemble_mean_is_the_mean_probability():
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(tn.ensemble_mean(LOGITS), probability.mean(0), rtol=1e-5)


def test_ensemble_vote_counts_votes():
    votes = np.stack([np.bincount(row, minlength=3) for row in LOGITS.argmax(-1).T]) / 5
    np.testing.assert_allclose(tn.ensemble_vote(LOGITS), votes, rtol=1e-6)


def test_accuracy_of_each_member_equals_scikit_learn():
    expected = [accuracy_score(Y, one.argmax(-1)) for one in LOGITS]
    np.testing.assert_allclose(tn.accuracy(LOGITS, Y), expected, rtol=1e-6)


def test_accuracy_of_one_output_is_refused():
    with pytest.raises(
        ValueError, match=r"prediction has shape \(5, 40, 1\), one output a row: give an output for each"
    ):
        tn.accuracy(LOGITS[..., :1], np.minimum(Y, 1))


def test_accuracy_of_no_rows_is_refused():
    with pytest.raises(ValueError, match=r"prediction has shape \(5, 0, 3\), no row: a score needs at least one"):
        tn.accuracy(LOGITS[:, :0], Y[:0])


def test_accuracy_refuses_another_number_of_rows():
    with pytest.raises(ValueError, match="40 rows, y has 39"):
        tn.accuracy(LOGITS, Y[:-1])


def test_scores_are_macro_averages_of_scikit_learn():
    chosen = LOGITS[0].argmax(-1)
    expected = [f(Y, chosen, average="macro") for f in (precision_score, recall_score, f1_score)]
    got = tn.ensembles.scores(LOGITS[0], Y)
    np.testing.assert_allclose([got["precision"], got["recall"], got["f1"]], expected)


def test_member_scores_has_a_line_a_member():
    table = tn.ensembles.member_scores(LOGITS, Y)
    assert len(table) == 5 and table.accuracy[3] == accuracy_score(Y, LOGITS[3].argmax(-1))


def test_confusion_keeps_classes_nobody_has():
    narrow = np.where(Y == 2, 1, Y)
    assert tn.ensembles.confusion(LOGITS[0], narrow).shape == (3, 3)
    assert (tn.ensembles.confusion(LOGITS[0], Y) == confusion_matrix(Y, LOGITS[0].argmax(-1))).all()


def test_mean_confusion_averages_members():
    expected = sum(confusion_matrix(Y, one.argmax(-1)) for one in LOGITS) / 5
    np.testing.assert_allclose(tn.ensembles.mean_confusion(LOGITS, Y), expected)


def test_disagreement_by_hand():
    votes = np.eye(2)[[[0, 0], [0, 1], [0, 1]]]  # 3 members, 2 rows: all agree; 2 against 1
    np.testing.assert_allclose(tn.ensembles.disagreement(votes), [0, 2 / 3], atol=1e-6)


def test_disagreement_needs_two_members():
    with pytest.raises(ValueError, match="two members"):
        tn.ensembles.disagreement(LOGITS[:1])


def test_score_interval_of_one_resample_equals_scikit_learn():
    drawn = np.random.default_rng(5).integers(40, size=40)
    got = tn.score_interval(LOGITS, Y, resamples=1, seed=5)
    expected = [tn.ensembles.scores(one[drawn], Y[drawn]) for one in LOGITS]
    for name, (low, high) in got.items():
        np.testing.assert_allclose([low, high], np.mean([score[name] for score in expected]))


def test_score_interval_of_accuracy_agrees_with_the_binomial():
    right = np.arange(400) < 300
    prediction = np.eye(2)[None, right.astype(int)]
    low, high = tn.score_interval(prediction, np.ones(400, int), resamples=2000)["accuracy"]
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    np.testing.assert_allclose([low, high], [0.75 - half, 0.75 + half], atol=0.006)


def test_accuracy_by_size_ends_at_the_whole_ensemble_and_starts_at_a_member():
    curve = np.asarray(tn.ensembles.accuracy_by_size(LOGITS, Y, key=jax.random.key(0), orders=6))
    assert curve.shape == (6, 5)
    np.testing.assert_allclose(curve[:, -1], accuracy_score(Y, tn.ensemble_mean(LOGITS).argmax(-1)), rtol=1e-6)
    assert set(curve[:, 0].round(5)) <= set(np.asarray(tn.accuracy(LOGITS, Y)).round(5).tolist())


def test_weighted_mean_by_hand():
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    weights = np.array([1, 0, 0, 3, 0])
    np.testing.assert_allclose(
        tn.ensemble_mean(LOGITS, weights), 0.25 * probability[0] + 0.75 * probability[3], rtol=1e-5
    )


@pytest.mark.parametrize("weights", [[1, 1], [0] * 5, [1, 1, 1, 1, -1], [1, 1, 1, 1, np.inf], [np.nan] * 5])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be 5 numbers"):
        tn.ensemble_mean(LOGITS, weights)


@pytest.mark.parametrize("scale", [1e-50, 1e50])
def test_weights_of_any_size_are_shares(scale):
    weights = np.arange(5)
    np.testing.assert_allclose(
        tn.ensemble_mean(LOGITS, scale * weights), tn.ensemble_mean(LOGITS, weights / 10), rtol=1e-5
    )


def test_geometric_mean_equals_scipy():
    product = gmean(softmax(LOGITS, axis=-1), axis=0)
    expected = product / product.sum(-1, keepdims=True)
    np.testing.assert_allclose(tn.ensemble_geometric_mean(LOGITS), expected, rtol=1e-5)
    opposed = np.array([[[0, -np.inf]], [[-np.inf, 0]]])
    np.testing.assert_allclose(tn.ensemble_geometric_mean(opposed), [[0.5, 0.5]])


def test_stacking_weights_minimise_the_likelihood():
    own = softmax(LOGITS, axis=-1)[:, np.arange(40), Y]

    def loss(w):
        return -np.log(np.abs(w) @ own / np.abs(w).sum()).mean()

    found = np.asarray(tn.ensembles.stacking_weights(LOGITS, Y, rounds=3000))
    best = min(minimize(loss, rng.random(5), method="Nelder-Mead", options={"maxiter": 5000}).fun for _ in range(3))
    assert found.sum() == pytest.approx(1, rel=1e-5) and loss(found) < best + 1e-4


def test_greedy_weights_take_the_best_member_first():
    right = 4 * (np.arange(3) == Y[:, None]).astype(np.float32)
    members = np.stack([LOGITS[0], right, LOGITS[1]])
    np.testing.assert_array_equal(tn.ensembles.greedy_weights(members, Y, size=1), [0, 1, 0])
    found = tn.ensembles.greedy_weights(LOGITS, Y)
    own = softmax(LOGITS, axis=-1)[:, np.arange(40), Y]
    assert found.sum() == pytest.approx(1) and -np.log(found @ own).mean() <= -np.log(own).mean(1).min()


def test_out_of_bag_averages_members_that_did_not_see_a_row():
    prediction = rng.normal(size=(3, 4, 2))
    rows = np.array([[0, 1, 1], [0, 2, -1], [0, 1, 3]])
    found = tn.ensembles.out_of_bag(prediction, rows)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1], prediction[1, 1])
    np.testing.assert_allclose(found[2], (prediction[0, 2] + prediction[2, 2]) / 2)
    np.testing.assert_allclose(found[3], (prediction[0, 3] + prediction[1, 3]) / 2)


def test_out_of_bag_equals_scikit_learn():
    x, y = make_classification(80, n_classes=3, n_informative=5, random_state=0)
    bagging = BaggingClassifier(DecisionTreeClassifier(max_depth=2), 15, oob_score=True, random_state=0).fit(x, y)
    each = np.stack([tree.predict_proba(x) for tree in bagging.estimators_])
    found = tn.ensembles.out_of_bag(each, np.stack(bagging.estimators_samples_))
    np.testing.assert_allclose(found, bagging.oob_decision_function_)


def test_stacking_counts_a_row_that_every_member_finds_impossible():
    logits = np.array([[[300.0, 0.0], [0.0, 9.0]], [[200.0, 0.0], [9.0, 0.0]]], np.float32)
    logits = np.append(logits, [[[0, -np.inf]], [[0, -np.inf]]], axis=1)
    weights = np.asarray(tn.ensembles.stacking_weights(logits, np.array([1, 1, 1])))
    assert weights.sum() == pytest.approx(1) and np.isfinite(weights).all()


BROKEN = np.array(LOGITS)
BROKEN[[1, 3], 5] = np.nan


@pytest.mark.parametrize(
    "combine",
    [
        tn.ensemble_mean,
        tn.ensemble_geometric_mean,
        tn.ensemble_vote,
        tn.ensembles.disagreement,
        tn.ensembles.diversity,
        lambda logits: tn.ensemble_mean(logits, np.ones(len(logits))),
        lambda logits: tn.ensembles.stacking_weights(logits, Y),
        lambda logits: tn.ensembles.greedy_weights(logits, Y),
        lambda logits: tn.ensembles.accuracy_by_size(logits, Y, key=jax.random.key(0)),
        lambda logits: tn.ensembles.member_scores(logits, Y),
        lambda logits: tn.ensembles.mean_confusion(logits, Y),
        lambda logits: tn.score_interval(logits, Y, resamples=2),
        lambda logits: tn.ensembles.out_of_bag(logits, np.zeros((len(logits), 1), int)),
        lambda logits: tn.ensembles.temperature(logits, Y),
        lambda logits: tn.ensembles.prediction_interval(logits),
        lambda logits: tn.ensembles.prediction_interval(logits[..., 0], (logits[..., 0], Y)),
    ],
)
def test_members_that_predict_nan_are_named_and_can_be_left_out(combine):
    with pytest.raises(
        ValueError, match=r"The members at positions \[1, 3\] predict NaN: leave them out, .*without_nan"
    ):
        combine(BROKEN)
    left = BROKEN[tn.ensembles.without_nan(BROKEN)]
    assert len(left) == 3
    combine(left)


@pytest.mark.parametrize(
    "combine", [tn.ensemble_mean, tn.ensemble_vote, tn.ensembles.diversity, tn.ensembles.disagreement]
)
def test_one_prediction_is_no_ensemble(combine):
    with pytest.raises(ValueError, match=r"logits must be \[member, row, class\], got shape \(40, 3\)"):
        combine(LOGITS[0])


COMBINE = [
    tn.ensemble_mean,
    tn.ensemble_vote,
    tn.ensembles.diversity,
    lambda prediction: tn.ensembles.member_scores(prediction, Y),
]
SCORE = [
    tn.ensembles.without_nan,
    lambda prediction: tn.ensembles.out_of_bag(prediction, np.full((5, 1), -1)),
    lambda prediction: tn.accuracy(prediction, Y),
]


@pytest.mark.parametrize("combine", COMBINE)
def test_an_ensemble_has_a_member(combine):
    with pytest.raises(ValueError, match=r"has shape \(0, 40, 3\), no member: an ensemble needs at least one"):
        combine(LOGITS[:0])


@pytest.mark.parametrize("combine", COMBINE + SCORE)
def test_several_outputs_and_masked_entries_are_refused(combine):
    with pytest.raises(ValueError, match="came as a tuple, as of a model with several outputs: give one of them"):
        combine(tuple(LOGITS))
    with pytest.raises(ValueError, match="has 300 masked entries: fill them"):
        combine(np.ma.masked_array(LOGITS, np.arange(600).reshape(LOGITS.shape) < 300))


@pytest.mark.parametrize("rows", [np.arange(5), np.zeros((4, 1), int), np.full((5, 2), 40), np.ones((5, 2))])
def test_rows_are_of_each_member(rows):
    with pytest.raises(ValueError, match=r"rows must be int \[member, row\], 5 members and rows below 40; got "):
        tn.ensembles.out_of_bag(LOGITS, rows)


@pytest.mark.parametrize("row", [[np.inf, 0, 0], [-np.inf] * 3])
def test_logits_without_a_softmax_are_refused(row):
    logits = LOGITS.copy()
    logits[2, 3] = row
    with pytest.raises(ValueError, match="The largest logit of a row must be a finite number"):
        tn.ensemble_mean(logits)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_probabilities_that_were_rounded_are_no_logits(digits):
    probability = softmax(2 * LOGITS, axis=-1).round(digits)
    probability[0, 0] = 0  # as nan_to_num leaves it
    with pytest.raises(ValueError, match="These logits are probabilities"):
        tn.ensemble_mean(probability)


@pytest.mark.parametrize("score", [tn.ensembles.scores, tn.ensembles.confusion])
def test_an_ensemble_is_no_single_prediction(score):
    with pytest.raises(ValueError, match=r"One prediction is \[row, class\], got shape \(5, 40, 3\)"):
        score(LOGITS, Y)
    with pytest.raises(ValueError, match="predict NaN"):
        score(BROKEN[1], Y)


@pytest.mark.parametrize(
    "y, message",
    [
        (np.where(np.arange(40) == 8, 3, Y), "y holds 3 in row 8; the prediction has the classes 0 to 2"),
        (np.where(np.arange(40) == 8, -1, Y), "y holds -1 in row 8"),
        (Y[:, None], r"its y int \[row\]; got shapes \(5, 40, 3\), \(40, 1\)"),
        ((Y, np.ones(40)), "as for a weighted loss"),
        (np.where(np.arange(40) == 8, np.nan, Y), "y holds nan in row 8"),
        (np.where(np.arange(40) == 8, 0.5, Y), "y holds 0.5 in row 8"),
    ],
)
def test_a_y_that_holds_no_classes_of_the_prediction_is_named(y, message):
    for score in (tn.accuracy, tn.ensembles.score_interval, tn.ensembles.stacking_weights):
        with pytest.raises(ValueError, match=message):
            score(LOGITS, y)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_classes_of_any_type_are_scored_alike(dtype):
    """Also where there are as many rows as classes, of which a bool y would be a mask."""
    logits, y = LOGITS[:, :2, :2], np.array([0, 1])
    probability = np.exp(logits[0]) / np.exp(logits[0]).sum(-1, keepdims=True)
    for score, of in (
        (tn.accuracy, logits),
        (tn.ensembles.greedy_weights, logits),
        (tn.ensembles.negative_log_likelihood, probability),
        (tn.ensembles.brier_score, probability),
    ):
        np.testing.assert_array_equal(score(of, y.astype(dtype)), score(of, y))


def test_a_row_of_nan_is_of_no_class():
    prediction = np.where(np.arange(40)[:, None] == np.flatnonzero(Y == 0)[0], np.nan, LOGITS[0])
    right = (LOGITS[0].argmax(-1) == Y) & ~np.isnan(prediction).any(-1)
    assert float(tn.accuracy(prediction, Y)) == pytest.approx(right.mean())


@pytest.mark.parametrize(
    "combine", [tn.ensemble_mean, tn.ensemble_vote, tn.ensembles.disagreement], ids=lambda each: each.__name__
)
def test_one_output_has_no_classes(combine):
    with pytest.raises(ValueError, match="one output a row: give an output for each class"):
        combine(LOGITS[..., :1])


def test_accuracy_of_some_rows():
    mask = np.arange(40) < 7
    expected = [accuracy_score(Y[:7], one[:7].argmax(-1)) for one in LOGITS]
    np.testing.assert_allclose(tn.accuracy(LOGITS, Y, mask), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(tn.accuracy)(LOGITS, Y, mask), expected, rtol=1e-6)
    np.testing.assert_allclose(tn.accuracy(LOGITS, Y, mask.astype(int)), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda p: tn.accuracy(p, Y, jnp.asarray(mask)))(LOGITS), expected, rtol=1e-6)
    for other in (mask[:9], [True]):
        with pytest.raises(ValueError, match=r"mask must be bool \[row\] of 40 rows, got shape"):
            tn.accuracy(LOGITS, Y, other)
    with pytest.raises(ValueError, match="mask leaves out all rows"):
        tn.accuracy(LOGITS, Y, mask & False)


def test_combining_works_inside_jit():
    np.testing.assert_allclose(jax.jit(tn.ensemble_mean)(LOGITS), tn.ensemble_mean(LOGITS), rtol=1e-6)


@pytest.mark.parametrize("level", [95, 1, 0, -1, np.nan])
def test_a_level_is_a_share(level):
    with pytest.raises(ValueError, match="level is the share of the draws inside, between 0 and 1; got"):
        tn.score_interval(LOGITS, Y, level=level)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tn.ensembles.greedy_weights(LOGITS, Y, size=0),
        lambda: tn.ensembles.stacking_weights(LOGITS, Y, rounds=0),
        lambda: tn.score_interval(LOGITS, Y, resamples=0),
    ],
)
def test_nothing_drawn_is_refused(call):
    with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
        call()


def test_score_interval_of_several_blocks_of_draws_equals_scikit_learn():
    draws, resamples = np.random.default_rng(5), 70
    each = []
    for _ in range(resamples):
        drawn = draws.integers(40, size=40)
        each.append([tn.ensembles.scores(one[drawn], Y[drawn]) for one in LOGITS])
    got = tn.score_interval(LOGITS, Y, resamples=resamples, level=0.8, seed=5)
    for name, interval in got.items():
        means = [np.mean([score[name] for score in members]) for members in each]
        np.testing.assert_allclose(interval, np.quantile(means, [0.1, 0.9]))


def test_greedy_selection_ends_with_the_best_of_all_sizes():
    probabilities = np.array([[[0.9, 0.1], [0.9, 0.1]], [[0.1, 0.9], [0.1, 0.9]]])  # of the classes 0 and 1 in two rows
    weights = tn.ensembles.greedy_weights(np.log(probabilities), np.array([0, 1]), size=3)
    np.testing.assert_allclose(weights, [0.5, 0.5])  # likelihoods 0.5 and 0.5; with two of one 0.63 and 0.37
