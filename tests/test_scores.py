"""Tables of scores: against scikit-learn and by hand."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score

from study.evaluation import scores

rng = np.random.default_rng(0)
Y = rng.integers(3, size=60)
OUTPUTS = {"one": rng.normal(size=(1, 60, 3)), "four": rng.normal(size=(4, 60, 3)) + 2 * np.eye(3)[Y]}


def test_score_table_has_the_mean_of_the_members_scores():
    table = scores.score_table(OUTPUTS, Y, resamples=20).set_index("model")
    for model, output in OUTPUTS.items():
        chosen = output.argmax(-1)
        assert table["accuracy (%)"][model] == pytest.approx(100 * np.mean([accuracy_score(Y, c) for c in chosen]))
        f1 = [f1_score(Y, c, average="macro") for c in chosen]
        assert table["f1 (%)"][model] == pytest.approx(100 * np.mean(f1))


def test_score_table_writes_each_interval_around_its_score():
    table = scores.score_table(OUTPUTS, Y, resamples=200)
    for score, text in table[["accuracy (%)", "accuracy interval"]].itertuples(index=False):
        low, high = map(float, text.split(" to "))
        assert low < score < high


def test_against_persistence_counts_tickers_and_takes_medians():
    naive = np.full((4, 3), 2.0)
    errors = {"all": (np.tile([[1.0], [2], [3], [8]], 3), naive), "few": (np.tile([[3.0], [1]], 3), naive[:2])}
    table = scores.against_persistence(errors)
    assert table.forecast.tolist() == ["all", "few"] and table.tickers.tolist() == [4, 2]
    assert table["beats persistence"].tolist() == [1, 1] and table["share (%)"].tolist() == [25, 50]
    assert table["median error (%)"].tolist() == [2.5, 2] and table["persistence (%)"].tolist() == [2, 2]
    assert table["median error over persistence"].tolist() == [1.25, 1]
    assert table["95 % interval"].tolist() == ["", ""]  # every day is alike, which tells nothing of others


def test_a_price_that_never_changes_leaves_the_others_their_median():
    error, naive = np.array([[1.0] * 4, [2.0] * 4, [0.0] * 4]), np.array([[2.0] * 4, [2.0] * 4, [0.0] * 4])
    table = scores.against_persistence({"level": (error, naive)})
    assert table["median error over persistence"].tolist() == [0.75] and table["beats persistence"].tolist() == [1]


def test_the_interval_of_a_share_is_a_jackknife_over_weeks():
    rng = np.random.default_rng(0)
    error, naive = rng.random((40, 15)) + 0.02, rng.random((1, 15)).repeat(40, 0)
    table = scores.against_persistence({"level": (error, naive)}, block=5)
    whole = 100 * (error.mean(1) < naive.mean(1)).mean()
    pseudo = []
    for week in range(3):
        kept = [day for day in range(15) if day // 5 != week]
        pseudo.append(3 * whole - 2 * 100 * (error[:, kept].mean(1) < naive[:, kept].mean(1)).mean())
    half = stats.t.ppf(0.975, 2) * np.std(pseudo, ddof=1) / np.sqrt(3)
    low, high = map(float, table["95 % interval"][0].split(" to "))
    np.testing.assert_allclose([low, high], np.clip([whole - half, whole + half], 0, 100), atol=0.051)


def test_differences_are_paired_over_rows():
    rng = np.random.default_rng(0)
    one = rng.random(400) < 0.9
    right = {"one": one, "same": one, "worse": one & (rng.random(400) < 0.9)}
    table = scores.differences(right, [("one", "same"), ("one", "worse")], resamples=500)
    assert table.loc[0, ["points", "low", "high"]].tolist() == [0, 0, 0]  # a difference in no row has no spread
    expected = 100 * (one.mean() - right["worse"].mean())
    drawn = rng.integers(400, size=(5000, 400))
    gap = 100 * (one.astype(float) - right["worse"])
    np.testing.assert_allclose(table.loc[1, "points"], expected)
    np.testing.assert_allclose(
        table.loc[1, ["low", "high"]].astype(float), np.quantile(gap[drawn].mean(1), [0.025, 0.975]), rtol=0.1
    )


def test_calibration_by_hand():
    sure = np.array([[[0.9, 0.1], [0.9, 0.1]], [[0.5, 0.5], [0.2, 0.8]]])  # [member, row, class]
    found = scores.calibration(sure, np.array([0, 1]))
    errors = 0.4, (0.5 + 0.2) / 2  # confidence less accuracy: 0.9 - 0.5; |0.5 - 1| and |0.8 - 1|, half of the rows each
    np.testing.assert_allclose(found["calibration_error"], np.mean(errors), rtol=1e-5)
    np.testing.assert_allclose(found["log_loss"], -np.mean(np.log([0.9, 0.1, 0.5, 0.8])), rtol=1e-5)
    np.testing.assert_allclose(found["brier"], np.mean([0.02, 1.62, 0.5, 0.08]), rtol=1e-5)
