"""study.evaluation.windows: forecasts without look-ahead, rows by class, pixels."""

import numpy as np
import pytest

from study.evaluation.windows import forecast_windows, normalised, split_rows

# Forecasts.


def market(days=30, tickers=3):
    return np.exp(np.random.default_rng(0).normal(0, 0.1, (days, tickers)).cumsum(axis=0))


def split(prices, **settings):
    return forecast_windows(prices, **{"window": 3, "validation_days": 6, "test_days": 7} | settings)


def test_forecast_windows_equals_values_by_hand():
    windows = forecast_windows(np.array([[1.0, 2, 4, 3, 6, 5, 8]]).T, window=1, validation_days=2, test_days=2)
    np.testing.assert_array_equal(windows.scale, [4])  # days 0 to 2 are for training
    np.testing.assert_array_equal(windows.x[0, :, :, 0], [[0.25], [0.5], [0.75], [1.25]])
    np.testing.assert_array_equal(windows.y[0, :, 0], [0.5, 1, 1.5, 2])
    np.testing.assert_array_equal(windows.last[0], windows.x[0, :, -1, 0])
    np.testing.assert_array_equal(windows.target_date, [1, 2, 4, 6])
    assert [rows.tolist() for rows in windows[2:5]] == [[[0, 1]], [[2]], [[3]]]


def test_forecast_windows_change_is_the_level_less_the_last_close():
    level, change = split(market()), split(market(), target="change")
    np.testing.assert_allclose(change.x[..., 0] + level.last[:, :, None], level.x[..., 0], atol=1e-6)
    np.testing.assert_allclose(change.y[..., 0] + level.last, level.y[..., 0], atol=1e-6)
    np.testing.assert_array_equal(change.x[:, :, -1], 0)


@pytest.mark.parametrize("target", ["level", "change"])
def test_forecast_windows_do_not_look_ahead(target):
    prices, first_test_day = market(), 23
    changed = np.concatenate([prices[:first_test_day], 99 * prices[first_test_day:]])
    one, two = split(prices, target=target), split(changed, target=target)
    early = one.target_date < first_test_day
    np.testing.assert_array_equal(one.scale, two.scale)
    np.testing.assert_array_equal(one.x[:, early], two.x[:, early])
    np.testing.assert_array_equal(one.y[:, early], two.y[:, early])
    assert early.sum() == one.train.shape[1] + one.validation.shape[1] and (one.y != two.y).any()
    later = split(np.concatenate([prices[:17], 99 * prices[17:]]))  # the validation days neither
    np.testing.assert_array_equal(one.scale, later.scale)


def test_forecast_windows_do_not_straddle_a_split():
    windows = split(market())
    days = windows.target_date[:, None] + np.arange(-3, 1)
    for rows, first, end in zip(windows[2:5], (0, 17, 23), (17, 23, 30), strict=True):
        assert days[rows].min() == first and days[rows].max() == end - 1
    assert [rows.shape[1] for rows in windows[2:5]] == [14, 3, 4]


def test_forecast_windows_pads_the_rows_of_a_late_listing():
    prices = market()
    prices[:10, 1] = np.nan
    windows = split(prices)
    np.testing.assert_array_equal(windows.train[1], [10, 11, 12, 13, *[-1] * 10])
    np.testing.assert_array_equal(windows.train[0], np.arange(14))
    assert windows.test.min() >= 0 and np.isfinite(windows.x).all() and np.isnan(windows.last[1, 9])
    assert windows.scale[1] == prices[10:17, 1].max()


def test_forecast_windows_leaves_out_and_names_a_ticker_without_a_training_window():
    prices = market()
    early, late = prices[:, [0, 2]], prices.copy()
    late[:14, 1] = np.nan  # of 17 training days
    windows, expected = split(late, tickers=["A", "B", "C"]), split(early)
    assert windows.left_out == {"B": "3 closes in 17 training days, a window takes 4 in a row"}
    assert windows.kept.tolist() == [0, 2] and expected.left_out == {}
    for found, array in zip(windows[:8], expected[:8], strict=True):
        np.testing.assert_array_equal(found, array)


def test_forecast_windows_leaves_out_a_ticker_that_is_listed_after_the_training_days():
    prices = market()
    prices[:20, 2] = np.nan
    assert split(prices).left_out == {"2": "0 closes in 17 training days, a window takes 4 in a row"}


def test_forecast_windows_names_the_tickers_where_none_has_a_training_window():
    prices = market(tickers=2)
    prices[:14] = np.nan
    with pytest.raises(ValueError, match="No ticker has 4 training days in a row.*17 training days, A, B have fewer"):
        split(prices, tickers=["A", "B"])


def test_forecast_windows_asks_for_enough_days():
    with pytest.raises(ValueError, match="of 30 days, 21 are for training, 3 for validation, 6 for test"):
        split(market(), validation_days=3, test_days=6)


# Rows for training, validation and test.

CLASSES = np.repeat([0, 1, 2], [600, 300, 103])[np.random.default_rng(0).permutation(1003)]


def test_split_rows_has_the_sizes_asked_for():
    parts = split_rows(CLASSES, rows=500, held_out=0.1)
    assert [len(part) for part in parts] == [400, 50, 50]


def test_split_rows_are_disjoint_and_in_order():
    parts = split_rows(CLASSES, rows=500, held_out=0.1)
    assert len(set(np.concatenate(parts))) == 500 and np.concatenate(parts).max() < 1003
    assert all((np.diff(part) > 0).all() for part in parts)


def test_split_rows_keep_the_shares_of_the_classes():
    for part in split_rows(CLASSES, rows=500, held_out=0.1):
        expected = np.array([600, 300, 103]) / 1003 * len(part)
        np.testing.assert_allclose(np.bincount(CLASSES[part]), expected, atol=1)


def test_split_rows_are_seeded():
    one, same, other = (split_rows(CLASSES, rows=500, held_out=0.1, seed=seed) for seed in (3, 3, 4))
    for a, b, c in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


@pytest.mark.parametrize("rows", [1003, 42000])
def test_split_rows_takes_all_where_more_are_asked_for(rows):
    parts = split_rows(CLASSES, rows=rows, held_out=0.25)
    assert [len(part) for part in parts] == [501, 251, 251]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1003))


@pytest.mark.parametrize("held_out", [0, -0.1, 0.5, 1, float("nan")])
def test_split_rows_refuses_a_share_that_leaves_nothing(held_out):
    with pytest.raises(ValueError, match=f"held_out must be between 0 and 0.5, got {held_out}"):
        split_rows(CLASSES, rows=500, held_out=held_out)


def test_split_rows_may_leave_out_fewer_rows_than_there_are_classes():
    parts = split_rows(np.arange(100) % 10, rows=95, held_out=0.1)
    assert sum(map(len, parts)) == 95


def test_normalised_pixels_are_of_unit_size_and_know_no_other_row():
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 4), np.uint8)
    x = normalised(images)
    assert x.shape == (3, 4, 4, 1) and x.dtype == np.float32
    np.testing.assert_allclose(x[..., 0], (images / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(normalised(images[:1]), x[:1])


def test_normalised_puts_zeros_around_small_images():
    images = np.full((2, 4, 3, 3), 255, np.uint8)
    x = normalised(images, size=8)
    assert x.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(x[:, 2:6, 2:5], 2)
    np.testing.assert_allclose(x[:, :2], -2)
    with pytest.raises(ValueError, match="size must be at least"):
        normalised(images, size=3)
