"""Probabilities and intervals, against scikit-learn, SciPy and values by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from sklearn.metrics import brier_score_loss, log_loss

import turbanet as tn
from turbanet.ensembles import calibration

rng = np.random.default_rng(5)
Y = rng.integers(0, 3, 60)
LOGITS = rng.normal(size=(4, 60, 3)) + (np.arange(3) == Y[:, None])
P = softmax(LOGITS, axis=-1)


def test_likelihood_equals_scikit_learn():
    expected = [log_loss(Y, one) for one in P]
    np.testing.assert_allclose(tn.ensembles.negative_log_likelihood(P, Y), expected, rtol=1e-5)
    assert np.isfinite(tn.ensembles.negative_log_likelihood(np.eye(3)[[0]], np.array([1])))


def test_brier_score_equals_scikit_learn():
    expected = [brier_score_loss(Y, one, scale_by_half=False) for one in P]
    np.testing.assert_allclose(tn.ensembles.brier_score(P, Y), expected, rtol=1e-5)
    assert tn.ensembles.brier_score(np.eye(3)[[0, 1]], np.array([0, 0])) == pytest.approx(1.0)  # right: 0, wrong: 2


def test_calibration_error_by_hand():
    p = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]])
    y = np.array([0, 1, 1, 1])
    # two bins: all four confidences lie in the upper one; accuracy 3/4, mean confidence 0.7375
    assert tn.ensembles.expected_calibration_error(p, y, bins=2) == pytest.approx(0.75 - 0.7375)
    # ten bins: (0.8, 0.9] right; (0.7, 0.8] wrong; (0.6, 0.7] right; (0.5, 0.6] right
    assert tn.ensembles.expected_calibration_error(p, y, bins=10) == pytest.approx((0.1 + 0.8 + 0.3 + 0.45) / 4)


def test_a_sure_prediction_falls_into_the_last_bin():
    assert tn.ensembles.expected_calibration_error(np.eye(2)[[0, 0]], np.array([0, 1])) == pytest.approx(0.5)


def test_temperature_minimises_the_likelihood():
    found = tn.ensembles.temperature(LOGITS, Y)
    assert found.shape == (4,)
    for one, got in zip(LOGITS, found, strict=True):

        def loss(t, one=one):
            return -log_softmax(one / np.exp(t[0]), axis=-1)[np.arange(60), Y].mean()

        assert loss([np.log(got)]) <= minimize(loss, [0.5], method="Nelder-Mead").fun + 1e-6


def test_temperature_ends_at_its_bounds():
    right = np.eye(3)[[0, 1, 2, 0]]
    found = tn.ensembles.temperature([right, -right], np.array([0, 1, 2, 0]))
    np.testing.assert_allclose(np.log(found), [-20, 20], atol=1e-5)


def test_temperature_undoes_a_scaling():
    true = softmax(rng.normal(size=(20000, 3)), axis=-1)
    y = np.array([rng.choice(3, p=p) for p in true])
    scales = np.array([3, 1e-4, 1e5])
    found = tn.ensembles.temperature(scales[:, None, None] * np.log(true), y)
    np.testing.assert_allclose(found, scales, rtol=0.05)


def test_a_class_that_a_row_rules_out_takes_no_part_in_the_temperature():
    logits = LOGITS[0].copy()
    logits[np.arange(60), (Y + 1) % 3] -= 1000
    ruled_out = np.where(logits < -500, -np.inf, logits)
    np.testing.assert_allclose(tn.ensembles.temperature(ruled_out, Y), tn.ensembles.temperature(logits, Y), rtol=1e-4)
    with pytest.raises(ValueError, match="A true class has the logit -inf, a probability of 0: no temperature"):
        tn.ensembles.temperature(ruled_out, (Y + 1) % 3)


def test_diversity_by_hand():
    same = np.log([[[0.7, 0.3]], [[0.7, 0.3]]])
    np.testing.assert_allclose(tn.ensembles.diversity(same), [0], atol=1e-6)
    apart = np.array([[[50.0, -50.0]], [[-50.0, 50.0]]])
    np.testing.assert_allclose(tn.ensembles.diversity(apart), [np.log(2)], rtol=1e-5)


def test_interval_over_members_is_their_quantiles():
    prediction = rng.normal(size=(50, 7, 2))
    low, high = tn.ensembles.prediction_interval(prediction, level=0.8)
    np.testing.assert_allclose(low, np.quantile(prediction, 0.1, axis=0))
    np.testing.assert_allclose(high, np.quantile(prediction, 0.9, axis=0))


def test_calibrated_intervals_hold_their_level():
    def rows(count):
        centre, spread = rng.normal(size=count), rng.uniform(0.5, 2, size=count)
        members = centre + spread * rng.normal(size=(10, count)) / 5
        return members, centre + spread * rng.normal(size=count)

    (prediction, y), held_out = rows(20000), rows(4000)
    low, high = tn.ensembles.prediction_interval(prediction, held_out, level=0.9)
    assert np.mean((low <= y) & (y <= high)) == pytest.approx(0.9, abs=0.02)
    narrow, wide = tn.ensembles.prediction_interval(prediction, level=0.9)
    assert np.mean((narrow <= y) & (y <= wide)) < 0.5  # members alone are far too sure


def test_each_output_is_calibrated_by_itself():
    members, y = rng.normal(size=(5, 30, 2)), rng.normal(size=(30, 2)) * [1, 0.01]
    both = tn.ensembles.prediction_interval(members[:, :4], (members, y), level=0.9)
    for output in range(2):
        alone = tn.ensembles.prediction_interval(
            members[:, :4, output], (members[..., output], y[:, output]), level=0.9
        )
        np.testing.assert_allclose(np.array(both)[..., output], alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8"])
def test_numbers_of_few_bits_are_computed_in_float32(dtype):
    members = jnp.asarray(100 + 10 * rng.normal(size=(300, 20)), dtype)
    exact, unseen, y = np.asarray(members, np.float64), np.full((300, 1), -1), np.full(20, 100.0)
    np.testing.assert_allclose(tn.ensembles.out_of_bag(members, unseen), exact.mean(0), rtol=1e-5)
    found, expected = (tn.ensembles.prediction_interval(each, (each, y), level=0.9) for each in (members, exact))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_diversity_of_half_precision_is_not_computed_in_it():
    logits = jnp.asarray(2 * LOGITS[0] + rng.normal(size=LOGITS.shape) / 20, jnp.bfloat16)
    expected = tn.ensembles.diversity(np.asarray(logits, np.float32))
    np.testing.assert_allclose(tn.ensembles.diversity(logits), expected, rtol=1e-3, atol=1e-7)


def test_members_that_agree_have_an_interval_of_width_0():
    root = np.sqrt(2)  # the deviation of 0, 0 and 3, whose mean is 1
    held_out = np.array([[0.0, 0, 0], [0, 0, 0], [3, 3, 3]]), np.array([1, 1 + root, 9])  # 0, 1 and more deviations
    low, high = tn.ensembles.prediction_interval(
        np.array([[0, 0.1], [0, 0.1], [3, 0.1]]), held_out, level=0.5
    )  # of these, 1
    np.testing.assert_allclose([low[0], high[0]], [1 - root, 1 + root])
    assert low[1] == high[1] == 0.1


def test_a_calibration_row_where_members_agree_and_are_right_needs_no_width():
    held_out = np.array([[0.1, 0], [0.1, 2], [0.1, 1]]), np.array([0.1, 4])
    low, high = tn.ensembles.prediction_interval(
        np.array([[3.0], [5], [7]]), held_out, level=0.3
    )  # the smaller of 0 and more
    np.testing.assert_array_equal([low, high], [[5], [5]])


@pytest.mark.parametrize("level, bounded", [(0.5, True), (0.7, False)])
def test_a_calibration_row_where_members_agree_and_err_needs_more_than_any_width(level, bounded):
    held_out = np.array([[0.1, 0, 0], [0.1, 2, 2], [0.1, 1, 1]]), np.array([0.2, 1, 1])
    low, high = tn.ensembles.prediction_interval(np.array([[3.0, 6], [5, 6], [7, 6]]), held_out, level=level)
    expected = [[5, 6], [5, 6]] if bounded else [[-np.inf] * 2, [np.inf] * 2]  # the second, 0, and the third
    np.testing.assert_array_equal([low, high], expected)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tn.ensembles.negative_log_likelihood(P, Y[:-1]), "prediction has 60 rows, y has 59"),
        (lambda: tn.ensembles.prediction_interval(np.zeros((1, 3))), "two members"),
        (lambda: tn.ensembles.prediction_interval(np.zeros((2, 3)), level=1.0), "level in"),
        (lambda: tn.ensembles.prediction_interval(P[..., 0], (P[:, :5, 0], Y[:4])), "calibration is"),
        (lambda: tn.ensembles.prediction_interval(P[:2, :, 0], (P[..., 0], Y)), r"calibration is \(prediction \[2 mem"),
        (lambda: tn.ensembles.prediction_interval(P, (P[..., 0], Y)), "calibration is"),
        (
            lambda: tn.ensembles.prediction_interval(P[..., 0], (P[..., 0], np.where(Y == 1, np.nan, Y))),
            "must be finite numbers",
        ),
        (lambda: tn.ensembles.prediction_interval(P, (P[:, :5], P[0, :5]), level=0.9), "at least 9 rows"),
        (lambda: tn.ensembles.prediction_interval((P[0], P[1])), "prediction came as a tuple, as of a model with"),
        (lambda: tn.ensembles.expected_calibration_error(P, Y), r"probability must be \[row, class\], got 3 axes"),
        (lambda: tn.ensembles.expected_calibration_error(P[0], Y, bins=0), "bins must be a whole number"),
        (lambda: tn.ensembles.prediction_interval(P[..., 0], (P[:, :5, 0], Y[:5]), level=0.95), "at least 19 rows"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "score", [tn.ensembles.negative_log_likelihood, tn.ensembles.brier_score, tn.ensembles.expected_calibration_error]
)
def test_logits_are_no_probabilities(score):
    logits = 5 * rng.normal(size=P.shape[1:])
    message = r"Probabilities are at least 0 and sum to 1; got rows that sum to .*: of logits take jax.nn.softmax"
    with pytest.raises(ValueError, match=message):
        score(logits, Y)
    with pytest.raises(ValueError, match=message):
        score(logits - logits.sum(-1, keepdims=True) / 3 + 1 / 3, Y)  # sums to 1, and is below 0
    score(softmax(logits, axis=-1).astype(np.float16), Y)


def test_temperature_of_probabilities_is_refused():
    for probability in (P, P[0]):
        with pytest.raises(ValueError, match="These logits are probabilities"):
            tn.ensembles.temperature(probability, Y)


def test_scores_work_inside_jit():
    np.testing.assert_allclose(
        jax.jit(tn.ensembles.negative_log_likelihood)(P, Y), tn.ensembles.negative_log_likelihood(P, Y), rtol=1e-5
    )


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_an_interval_takes_as_few_rows_as_its_message_says(level):
    needed = calibration.rows_for(level)
    assert np.isfinite(calibration.factor_of(np.arange(float(needed)), level))
    with pytest.raises(ValueError, match=f"needs at least {needed} rows"):
        calibration.factor_of(np.arange(needed - 1.0), level)


def test_a_rank_that_is_whole_is_not_rounded_up():
    assert 100 * 0.55 > 55  # in floating point
    assert calibration.factor_of(np.arange(1.0, 100.0), 0.55) == 55
