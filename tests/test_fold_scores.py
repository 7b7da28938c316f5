"""study.evaluation.fold_scores: comparisons of scores over folds that share training rows."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from study.evaluation import fold_scores


def test_the_paired_comparison_is_nadeau_and_bengios():
    a, b = np.array([0.71, 0.74, 0.69, 0.73, 0.75]), np.array([0.70, 0.70, 0.68, 0.69, 0.74])
    mean, low, high, p = fold_scores.difference(a, b, train=4, test=1)
    gap = a - b
    error = np.sqrt((1 / 5 + 1 / 4) * gap.var(ddof=1))
    assert mean == pytest.approx(gap.mean())
    assert p == pytest.approx(2 * (1 - stats.t.cdf(gap.mean() / error, 4)))
    assert high - mean == pytest.approx(stats.t.ppf(0.975, 4) * error) and mean - low == pytest.approx(high - mean)
    plain = stats.ttest_rel(a, b).pvalue
    assert p > plain  # the plain test takes folds for independent


def test_equal_scores_do_not_differ():
    assert fold_scores.difference([0.5, 0.6], [0.5, 0.6], train=1, test=1) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="at least two folds"):
        fold_scores.difference([0.5], [0.4], train=1, test=1)


def test_accuracy_table_is_in_percent_with_the_corrected_interval():
    frame = pd.DataFrame({"model": "a", "schedule": ["x"] * 3 + ["y"] * 3, "fold": [0, 1, 2] * 2})
    frame["accuracy"], frame["serial"] = [0.5, 0.6, 0.7, 0.1, 0.1, 0.1], [0.4, 0.6, 0.6, 0.2, 0.2, 0.2]
    table = fold_scores.accuracy_table(frame, folds=3)
    half = stats.t.ppf(0.975, 2) * np.sqrt((1 / 3 + 1 / 2) * 100)  # ten points between folds
    gap = 20 / 3, stats.t.ppf(0.975, 2) * np.sqrt((1 / 3 + 1 / 2) * np.var([10, 0, 10], ddof=1))
    expected = [[60, 60 - half, 60 + half, 160 / 3, gap[0], gap[0] - gap[1], gap[0] + gap[1], 10]]
    expected += [[10, 10, 10, 20, -10, -10, -10, 0]]
    assert table[["model", "schedule"]].to_numpy().tolist() == [["a", "x"], ["a", "y"]]
    np.testing.assert_allclose(table.iloc[:, 2:].to_numpy(), expected, atol=1e-9)


def test_accuracy_table_leaves_nothing_of_a_gap_that_is_rounding():
    frame = pd.DataFrame({"model": "a", "schedule": "x", "fold": [0, 1], "accuracy": [0.1 + 0.2, 0.3], "serial": 0.3})
    assert fold_scores.accuracy_table(frame, folds=2)["swarm less serial"].tolist() == [0]
