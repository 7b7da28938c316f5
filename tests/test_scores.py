"""Tables of scores: against scikit-learn and by hand."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from turbanet.lab import scores

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
    errors = {"all": np.array([1.0, 2, 3, 8]), "few": np.array([3.0, 1])}
    table = scores.against_persistence(errors, [2.0, 2, 2, 2], resamples=10)
    assert table.forecast.tolist() == ["all", "few"] and table.tickers.tolist() == [4, 2]
    assert table["beats persistence"].tolist() == [1, 1] and table["share (%)"].tolist() == [25, 50]
    assert table["median error (%)"].tolist() == [2.5, 2] and table["persistence (%)"].tolist() == [2, 2]
    assert table["median error over persistence"].tolist() == [1.25, 1]


def test_against_persistence_agrees_with_the_binomial():
    better = np.where(np.arange(400) < 300, 0.5, 2.0)
    table = scores.against_persistence({"level": better}, np.ones(400), resamples=2000)
    low, high = map(float, table["95 % interval"][0].split(" to "))
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    np.testing.assert_allclose([low, high], [75 - 100 * half, 75 + 100 * half], atol=0.6)
