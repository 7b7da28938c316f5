import numpy as np
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from study.agents.scores import interquartile_mean, performance_profile, share


def test_interquartile_mean_leaves_out_a_quarter_on_each_side():
    returns = np.array([[-100.0, 1, 2, 3, 4, 5, 6, 1000], [1, 1, 1, 1, 1, 1, 1, 1]])
    mean, low, high = interquartile_mean(returns, resamples=500)
    np.testing.assert_allclose(mean, [(2 + 3 + 4 + 5) / 4, 1])
    assert low[0] < mean[0] < high[0] and low[1] == high[1] == 1


def test_interquartile_mean_covers_as_often_as_it_says():
    random = np.random.default_rng(0)
    draws = random.normal(size=(200, 40))
    _, low, high = interquartile_mean(draws, resamples=200)
    assert 0.88 < ((low < 0) & (high > 0)).mean() < 0.99


def test_members_without_a_number_are_left_out():
    mean, low, _ = interquartile_mean([[np.nan, 2.0, 2.0], [np.nan] * 3], resamples=10)
    assert mean[0] == low[0] == 2 and np.isnan(mean[1])


def test_performance_profile_is_the_share_above():
    assert performance_profile([1, 2, 3, 4], [0, 2, 4]).tolist() == [1, 0.5, 0]


def test_share_has_wilsons_interval():
    low, high = proportion_confint(61, 64, method="wilson")
    np.testing.assert_allclose(share(61, 64), (61 / 64, low, high))
    assert stats.binomtest(61, 64).proportion_ci(method="exact").low < share(61, 64)[1]
