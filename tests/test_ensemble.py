"""Members combined, against scikit-learn and values by hand."""

import jax
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_score, recall_score

import turbanet as tn

rng = np.random.default_rng(2)
LOGITS = rng.normal(size=(5, 40, 3)).astype(np.float32)
Y = rng.integers(0, 3, 40)


def test_ensemble_mean_is_the_mean_probability():
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(tn.ensemble_mean(LOGITS), probability.mean(0), rtol=1e-5)


def test_ensemble_vote_counts_votes():
    votes = np.stack([np.bincount(row, minlength=3) for row in LOGITS.argmax(-1).T]) / 5
    np.testing.assert_allclose(tn.ensemble_vote(LOGITS), votes, rtol=1e-6)


def test_accuracy_of_each_member_equals_scikit_learn():
    expected = [accuracy_score(Y, one.argmax(-1)) for one in LOGITS]
    np.testing.assert_allclose(tn.accuracy(LOGITS, Y), expected, rtol=1e-6)


def test_accuracy_refuses_another_number_of_rows():
    with pytest.raises(ValueError, match="40 rows, y has 39"):
        tn.accuracy(LOGITS, Y[:-1])


def test_scores_are_macro_averages_of_scikit_learn():
    chosen = LOGITS[0].argmax(-1)
    expected = [f(Y, chosen, average="macro") for f in (precision_score, recall_score, f1_score)]
    got = tn.scores(LOGITS[0], Y)
    np.testing.assert_allclose([got["precision"], got["recall"], got["f1"]], expected)


def test_member_scores_has_a_line_a_member():
    table = tn.member_scores(LOGITS, Y)
    assert len(table) == 5 and table.accuracy[3] == accuracy_score(Y, LOGITS[3].argmax(-1))


def test_confusion_keeps_classes_nobody_has():
    narrow = np.where(Y == 2, 1, Y)
    assert tn.confusion(LOGITS[0], narrow).shape == (3, 3)
    assert (tn.confusion(LOGITS[0], Y) == confusion_matrix(Y, LOGITS[0].argmax(-1))).all()


def test_mean_confusion_averages_members():
    expected = sum(confusion_matrix(Y, one.argmax(-1)) for one in LOGITS) / 5
    np.testing.assert_allclose(tn.mean_confusion(LOGITS, Y), expected)


def test_disagreement_by_hand():
    votes = np.eye(2)[[[0, 0], [0, 1], [0, 1]]]  # 3 members, 2 rows: all agree; 2 against 1
    np.testing.assert_allclose(tn.disagreement(votes), [0, 2 / 3], atol=1e-6)


def test_disagreement_needs_two_members():
    with pytest.raises(ValueError, match="two members"):
        tn.disagreement(LOGITS[:1])


def test_score_interval_of_one_resample_equals_scikit_learn():
    drawn = np.random.default_rng(5).integers(40, size=40)
    got = tn.score_interval(LOGITS, Y, resamples=1, seed=5)
    expected = [tn.scores(one[drawn], Y[drawn]) for one in LOGITS]
    for name, (low, high) in got.items():
        np.testing.assert_allclose([low, high], np.mean([score[name] for score in expected]))


def test_score_interval_of_accuracy_agrees_with_the_binomial():
    right = np.arange(400) < 300
    prediction = np.eye(2)[None, right.astype(int)]
    low, high = tn.score_interval(prediction, np.ones(400, int), resamples=2000)["accuracy"]
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    np.testing.assert_allclose([low, high], [0.75 - half, 0.75 + half], atol=0.006)


def test_accuracy_by_size_ends_at_the_whole_ensemble_and_starts_at_a_member():
    curve = np.asarray(tn.accuracy_by_size(LOGITS, Y, key=jax.random.key(0), orders=6))
    assert curve.shape == (6, 5)
    np.testing.assert_allclose(curve[:, -1], accuracy_score(Y, tn.ensemble_mean(LOGITS).argmax(-1)), rtol=1e-6)
    assert set(curve[:, 0].round(5)) <= set(np.asarray(tn.accuracy(LOGITS, Y)).round(5).tolist())
