"""Forecasts from several origins: no look-ahead, the usual forecasts by hand, tests over days."""

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LinearRegression

from study.evaluation import rolling

rng = np.random.default_rng(0)
DAYS, TICKERS, HORIZON = 200, 3, 5
CLOSE = 50 * np.exp(np.cumsum(rng.normal(0, 0.01, (DAYS, TICKERS)) * np.exp(rng.normal(0, 0.3, (DAYS, 1))), axis=0))
SHAPE = {"window": 22, "origins": 3, "test_days": 15, "validation_days": 20}


@pytest.fixture(scope="module")
def examples():
    return rolling.rolling(CLOSE, horizon=HORIZON, **SHAPE)


def moves(first, last, ticker):
    """Absolute log returns in percent of the days first to last."""
    return [100 * abs(np.log(CLOSE[day, ticker] / CLOSE[day - 1, ticker])) for day in range(first, last + 1)]


def test_the_target_is_the_log_of_the_mean_move_of_the_next_days(examples):
    for example in (0, 40, len(examples.day) - 1):
        day = examples.day[example]
        expected = np.log(np.mean(moves(day + 1, day + HORIZON, 1)))
        np.testing.assert_allclose(examples.truth[1, example], expected)
    assert examples.day[-1] == DAYS - 1 - HORIZON


def test_an_example_sees_the_last_days_up_to_its_own(examples):
    train = examples.train[0][examples.train[0] >= 0]
    logs = np.log(np.maximum([moves(day - 21, day, 2) for day in examples.day], rolling.FLOOR))
    expected = (logs - logs[train].mean()) / logs[train].std()
    np.testing.assert_allclose(examples.x[0, 2, :, :, 0], expected, rtol=1e-4, atol=1e-5)


def test_nothing_reaches_over_an_edge(examples):
    for train, validation, test in zip(examples.train, examples.validation, examples.test):
        train = train[train >= 0]
        assert examples.day[train[-1]] + HORIZON <= examples.day[validation[0]]
        assert examples.day[validation[-1]] + HORIZON <= examples.day[test[0]]
        assert len(validation) == 20 and len(test) == 15
    assert [int(rows[0]) for rows in examples.test] == [len(examples.day) - 15 * back for back in (3, 2, 1)]


def test_what_comes_later_changes_nothing_before(examples):
    first = examples.day[examples.test[0][0]]  # the first origin: its close is known, the next one's not
    later = CLOSE.copy()
    later[first + 1 :] *= np.exp(rng.normal(0, 0.2, later[first + 1 :].shape))
    other = rolling.rolling(later, horizon=HORIZON, **SHAPE)
    known = np.concatenate([examples.train[0][examples.train[0] >= 0], examples.validation[0]])
    np.testing.assert_array_equal(other.centre[0], examples.centre[0])
    np.testing.assert_array_equal(other.x[0][:, : examples.test[0][0] + 1], examples.x[0][:, : examples.test[0][0] + 1])
    np.testing.assert_array_equal(other.y[0][:, known], examples.y[0][:, known])
    at = examples.test[0][0]  # forecast at the origin
    for name, forecast in rolling.usual_forecasts(CLOSE, examples, horizon=HORIZON).items():
        again = rolling.usual_forecasts(later, other, horizon=HORIZON)[name]
        np.testing.assert_allclose(again[0][:, at], forecast[0][:, at], err_msg=name)


def test_the_har_regression_is_least_squares_on_what_is_known(examples):
    found = rolling.usual_forecasts(CLOSE, examples, horizon=HORIZON)
    known = np.concatenate([examples.train[1][examples.train[1] >= 0], examples.validation[1]])
    past = [
        [np.log(max(np.mean(moves(day - n + 1, day, 0)), rolling.FLOOR)) for n in (1, 5, 22)] for day in examples.day
    ]
    fit = LinearRegression().fit(np.array(past)[known], examples.truth[0, known])
    np.testing.assert_allclose(found["HAR, each ticker"][1, 0], fit.predict(past), rtol=1e-6)
    np.testing.assert_allclose(found["persistence"][1, 0], [one[1] for one in past])


def test_the_weighted_average_has_the_best_decay_and_no_bias_on_what_is_known(examples):
    found = rolling.usual_forecasts(CLOSE, examples, horizon=HORIZON)["weighted average"]
    known = np.concatenate([examples.train[2][examples.train[2] >= 0], examples.validation[2]])
    gap = examples.truth[:, known] - found[2][:, known]
    assert abs(gap.mean()) < 1e-12
    for decay in rolling.DECAYS:
        weights = decay ** np.arange(examples.day[0])
        first = np.array([np.average(moves(1, examples.day[0], i)[::-1], weights=weights) for i in range(TICKERS)])
        own = rolling._weighted(np.abs(rolling.returns(CLOSE))[1:], decay)
        np.testing.assert_allclose(own[examples.day[0] - 1], np.log(first))
        other = own[examples.day[known] - 1].T
        assert np.var(examples.truth[:, known] - other) >= np.var(gap) - 1e-12


def test_losses_are_means_over_tickers_for_each_test_day(examples):
    forecast = np.zeros(examples.y.shape[:3])
    days = rolling.daily_loss(forecast, examples)
    assert days.shape == (45,)
    np.testing.assert_allclose(days[:15], (examples.truth[:, examples.test[0]] ** 2).mean(0))
    np.testing.assert_allclose(rolling.daily_loss(forecast + examples.truth, examples), 0)


def test_qlike_is_least_for_the_truth_and_corrects_the_mean_of_a_lognormal(examples):
    exact = np.broadcast_to(examples.truth, examples.y.shape[:3])
    np.testing.assert_allclose(rolling.qlike(exact, examples), 0, atol=1e-12)
    noisy = exact + rng.normal(0, 0.3, exact.shape)
    variance = np.var((exact - noisy)[0][:, examples.validation[0]])
    ratio = np.exp(examples.truth[:, examples.test[0]]) / np.exp(noisy[0][:, examples.test[0]] + variance / 2)
    np.testing.assert_allclose(rolling.qlike(noisy, examples)[:15], (ratio - np.log(ratio) - 1).mean(0))


def test_the_test_is_diebold_and_marianos_with_both_corrections():
    count, lags = 60, 5
    one, other = rng.normal(1, 0.3, count), rng.normal(1.1, 0.3, count)
    gap = one - other
    centred = gap - gap.mean()
    covariance = [centred[lag:] @ centred[: count - lag] / count for lag in range(lags + 1)]
    variance = covariance[0] + 2 * sum((1 - lag / (lags + 1)) * covariance[lag] for lag in range(1, lags + 1))
    statistic = gap.mean() / np.sqrt(variance / count) * np.sqrt((count + 1 - 10 + 20 / count) / count)
    table = rolling.compared({"a": one, "b": other}, [("a", "b"), ("b", "a")], horizon=5)
    p = 2 * stats.t.sf(abs(statistic), count - 1)
    np.testing.assert_allclose(table.dm, p)
    np.testing.assert_allclose(table.difference, [gap.mean(), -gap.mean()])
    np.testing.assert_allclose(table.holm, np.minimum(1, 2 * table.p))


def test_p_is_of_the_lowest_frequencies():
    gap = rng.normal(0.1, 1, 60).cumsum() / 5
    freedom = int(0.41 * 60 ** (2 / 3))  # 6
    days = np.arange(60) + 0.5
    waves = [np.sqrt(2 / 60) * np.cos(np.pi * j * days / 60) @ gap for j in range(1, freedom + 1)]
    statistic = gap.mean() / np.sqrt(np.mean(np.square(waves)) / 60)
    table = rolling.compared({"a": gap, "b": 0 * gap}, [("a", "b")], horizon=5)
    assert table.p[0] == pytest.approx(2 * stats.t.sf(abs(statistic), freedom))


def test_holms_p_by_hand():
    losses = {name: rng.normal(mean, 0.3, 60) for name, mean in (("a", 1), ("b", 1.05), ("c", 1.2), ("d", 1.1))}
    table = rolling.compared(losses, [("a", "b"), ("a", "c"), ("a", "d")], horizon=2)
    order = np.argsort(table.p)
    stepped = np.maximum.accumulate(np.array([3, 2, 1]) * table.p.to_numpy()[order])
    np.testing.assert_allclose(table.holm.to_numpy()[order], np.minimum(1, stepped))


def test_the_interval_over_days_is_students_over_blocks():
    loss = np.repeat(rng.random(10), 6)  # six days in a row alike: ten numbers, not sixty
    mean, low, high = rolling.over_days(loss, block=6)
    expected = stats.ttest_1samp(loss[::6], 0).confidence_interval()
    assert mean == pytest.approx(loss.mean()) and (low, high) == pytest.approx(tuple(expected))


def test_pooled_rows_are_every_tickers():
    rows = np.array([[0, 1, -1], [0, 1, 2]], np.int32)
    found = rolling.pooled(rows, tickers=2, examples=10)
    assert found.tolist() == [[0, 1, 10, 11, -1, -1], [0, 1, 2, 10, 11, 12]]


@pytest.mark.parametrize(
    ("close", "said"),
    [
        (np.where(CLOSE > 0, np.nan, 0), "listed throughout"),
        (CLOSE[:80], "80 days are too few for 3 origins of 15"),
    ],
)
def test_rolling_refuses_what_it_cannot_split(close, said):
    with pytest.raises(ValueError, match=said):
        rolling.rolling(close, **({"horizon": 5} | SHAPE))
