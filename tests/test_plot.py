"""Pictures of results: what is drawn are the numbers that NumPy, pandas and scikit-learn compute."""

import types

import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from scipy.special import softmax
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

import turbanet as tn
from turbanet import plot

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(4, 300, 3)).astype(np.float32)
Y = np.where(RANDOM.random(300) < 0.6, LOGITS.mean(0).argmax(1), RANDOM.integers(3, size=300))
PROBABILITY = softmax(LOGITS.astype(np.float64), axis=-1).mean(0)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def points(line):
    return np.column_stack(line.get_data())


def test_history_is_the_median_of_the_members_that_trained():
    losses = np.array([[3.0, 1.0, 2.0], [2.0, np.nan, 1.0], [np.nan, np.nan, np.nan]])
    ids = np.arange(3)
    history = tn.History(losses, None, ids, ids, 0.0, 0.0, None, np.array([2, 1, 2]))
    ax = plot.history(history)
    np.testing.assert_allclose(points(ax.lines[0]), [[1, 2], [2, 1.5]])
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(2.9) and band[:, 1].min() == pytest.approx(1.05)
    with pytest.raises(ValueError, match="names are of train_loss; got 'accuracy'"):
        plot.history(history, names=["accuracy"])


def test_an_infinite_loss_leaves_the_quantiles_of_the_others():
    losses = np.float32([[1, 2, 3, 4, 5], [1, 2, 3, 4, np.inf], [np.inf, np.inf, np.inf, 1, 2]])
    history = tn.History(losses, None, *[np.arange(5)] * 2, 0.0, 0.0, None, np.full(5, 3))
    ax = plot.history(history)
    assert ax.lines[0].get_ydata().tolist() == [3, 3, np.inf]
    with pytest.raises(ValueError, match="history plots the History that fit returns; got tuple"):
        plot.history(([], history))


def test_bins_and_orders_are_counted_from_one():
    logits, y = np.zeros((2, 3, 2)), np.array([0, 1, 1])
    with pytest.raises(ValueError, match="bins must be a whole number of at least 1"):
        plot.reliability(logits[0] + 0.5, y, bins=0)
    with pytest.raises(ValueError, match="orders must be a whole number of at least 1"):
        plot.ensemble_size(logits, y, orders=0)


def test_history_of_one_epoch_is_a_dot():
    history = tn.History(np.ones((1, 2)), None, np.arange(2), np.arange(2), 0.0, 0.0, None, np.ones(2, int))
    assert plot.history(history).lines[0].get_marker() == "."


@pytest.mark.parametrize("begun, first", [([3, 3], 4), ([0, 3], 1)])
def test_history_counts_on_from_what_all_members_were_trained_before(begun, first):
    history = tn.History(np.ones((2, 2)), None, *[np.arange(2)] * 2, 0.0, 0.0, None, np.full(2, 2), begun=begun)
    assert plot.history(history, names="train_loss").lines[0].get_xdata().tolist() == [first, first + 1]


@pytest.mark.parametrize("losses", [np.full((2, 3), np.nan), np.empty((0, 3))])
def test_history_without_a_number_is_an_empty_line(losses):
    history = tn.History(losses, None, *[np.arange(3)] * 2, 0.0, 0.0, None, np.full(3, len(losses)))
    assert points(plot.history(history).lines[0]).shape == (0, 2)


def test_search_draws_each_candidate_and_the_median_of_a_value():
    table = pd.DataFrame({"rate": [0.001, 0.001, 0.1, 0.1, 0.1], "validation_loss": [3.0, 1.0, 5.0, 6.0, 8.0]})
    ax = plot.search(table, "rate")
    np.testing.assert_allclose(points(ax.lines[0]), table)
    np.testing.assert_allclose(points(ax.lines[1]), [[0.001, 2], [0.1, 6]])
    assert ax.get_xscale() == "log" and plot.search(table, "validation_loss", "rate").get_xscale() == "linear"
    assert len(plot.search(pytest.importorskip("polars").from_pandas(table), "rate").lines) == 2
    with pytest.raises(ValueError, match="it lacks 'width'"):
        plot.search(table, "width")


def test_search_takes_a_fitted_search_too():
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    fitted = GridSearchCV(LogisticRegression(), {"C": [0.01, 1.0, 100.0]}, cv=2).fit(x, y)
    ax = plot.search(fitted, "C")
    np.testing.assert_allclose(
        points(ax.lines[0]), np.column_stack([[0.01, 1, 100], fitted.cv_results_["mean_test_score"]])
    )
    assert ax.get_xscale() == "log"


@pytest.mark.parametrize(
    "values, texts",
    [
        ([(8,), (16, 8)], ["(8,)", "(16, 8)"]),
        ([None, "balanced"], ["None", "balanced"]),
        ([True, False], ["True", "False"]),
    ],
    ids=["tuples", "a name and None", "bools"],
)
def test_search_shows_what_is_no_number_as_text(values, texts):
    found = types.SimpleNamespace(
        cv_results_={
            "param_x": _objects(values),
            "mean_test_score": np.array([0.5, 0.7, 0.9]),
        }
    )
    ax = plot.search(found, "x")
    assert [label.get_text() for label in ax.get_xticklabels()] == texts and ax.get_xscale() == "linear"
    assert sorted(ax.lines[1].get_ydata()) == [0.7, 0.7] and len(ax.lines[0].get_ydata()) == 3


def _objects(values):
    """The values and the first one again, as scikit-learn keeps them: a masked array of objects."""
    kept = np.ma.empty(3, dtype=object)
    for position, value in enumerate([*values, values[0]]):
        kept[position] = value
    return kept


@pytest.mark.parametrize("draw", [plot.reliability, lambda p, y: plot.uncertainty(np.log(p)[None], y)])
def test_classes_that_are_no_numbers_of_outputs_are_refused(draw):
    with pytest.raises(ValueError, match="y"):
        draw(PROBABILITY, np.array(list("abc"))[Y % 3])


def test_reliability_is_scikit_learns_curve():
    ax = plot.reliability({"ensemble": PROBABILITY}, Y, bins=5)
    right, confidence = calibration_curve(PROBABILITY.argmax(1) == Y, PROBABILITY.max(1), n_bins=5)
    np.testing.assert_allclose(points(ax.lines[1]), np.column_stack([confidence, right]))
    assert ax.get_legend().get_texts()[0].get_text() == "ensemble"


def test_reliability_of_members_is_that_of_all_their_rows():
    each = softmax(LOGITS.astype(np.float64), axis=-1)
    pooled = plot.reliability(each.reshape(-1, 3), np.tile(Y, 4))
    np.testing.assert_allclose(points(plot.reliability(each, Y).lines[1]), points(pooled.lines[1]))


def test_reliability_takes_probabilities_in_the_bins_of_the_calibration_error():
    with pytest.raises(ValueError, match="Probabilities are at least 0"):
        plot.reliability(LOGITS, Y)
    p = np.array([[0.8, 0.2], [0.81, 0.19]])
    confidence, right = points(plot.reliability(p, np.array([0, 1])).lines[1]).T
    np.testing.assert_allclose(confidence, [0.8, 0.81])  # bins (0.7, 0.8] and (0.8, 0.9]
    assert right.tolist() == [1, 0]


def test_reliability_of_half_precision_is_computed_in_float32():
    confident = jnp.asarray(np.tile([0.97, 0.03], (3000, 1)), jnp.bfloat16)
    confidence, right = points(plot.reliability(confident, np.arange(3000) % 10 == 0).lines[1]).T
    np.testing.assert_allclose([*confidence, *right], [0.97, 0.9], atol=0.002)


def test_uncertainty_begins_with_the_surest_rows():
    share, accuracy = points(plot.uncertainty(LOGITS, Y).lines[0]).T
    order = np.argsort(-PROBABILITY.max(1))
    right = (PROBABILITY.argmax(1) == Y)[order]
    assert accuracy[-1] == pytest.approx(right.mean()) and accuracy[29] == pytest.approx(right[:30].mean())
    assert share[29] == pytest.approx(0.1)


def test_ensemble_size_ends_with_all_members():
    ax = plot.ensemble_size(LOGITS, Y, seed=1, orders=3)
    size, accuracy = points(ax.lines[0]).T
    assert size.tolist() == [1, 2, 3, 4]
    assert accuracy[-1] == pytest.approx((PROBABILITY.argmax(1) == Y).mean())
    assert ax.lines[1].get_ydata()[0] == pytest.approx((LOGITS.argmax(-1) == Y).mean())


def test_decision_regions_have_the_colours_of_the_predicted_classes():
    x = np.array([[-1, 0], [1, 0], [0, 1]], np.float32)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((3,)), optax.sgd(0.1), 2, input_size=2)
    kernel = np.tile(20 * x.T, (2, 1, 1))  # each class is sure near its own point
    swarm = swarm.replace(params={"Dense_0": {"kernel": kernel, "bias": np.zeros((2, 3), np.float32)}})
    ax = plot.decision_regions(swarm, x, [0, 1, 2], points=21)
    image, (left, right, low, high) = ax.images[0].get_array(), ax.images[0].get_extent()
    for point, colour in zip(x, plot.COLOURS, strict=False):
        column = round(20 * (point[0] - left) / (right - left))
        row = round(20 * (point[1] - low) / (high - low))
        expected = 1 - 0.6 * (1 - np.array(plt.matplotlib.colors.to_rgb(colour)))
        np.testing.assert_allclose(image[row, column], expected, atol=0.01)
    with pytest.raises(ValueError, match=r"takes x \[row, 2\]; got \[3, 1\]"):
        plot.decision_regions(swarm, x[:, :1], [0, 1, 2])
    for labels, message in (([0, 1, -1], "y holds -1"), ([0, 1, 3], "y holds 3"), ([0, 1], "y has 2")):
        with pytest.raises(ValueError, match=message):
            plot.decision_regions(swarm, x, labels)


def test_forecasts_are_those_of_one_series_with_its_band():
    days = pd.date_range("2020-01-01", periods=4)
    truth = pd.DataFrame({"unique_id": list("aabb"), "ds": days, "y": [1.0, 2.0, 3.0, 4.0]})
    ahead = pd.DataFrame({"unique_id": ["a", "b"], "ds": days[:2], "LSTM": [5.0, 6.0]})
    ahead["LSTM-lo-80"], ahead["LSTM-hi-80"] = [4.0, 5.0], [6.0, 8.0]
    ax = plot.forecasts(truth, ahead, "b")
    assert ax.lines[0].get_ydata().tolist() == [3, 4] and ax.lines[1].get_ydata().tolist() == [6]
    assert sorted(set(ax.collections[0].get_paths()[0].vertices[:, 1])) == [5, 8]
    assert [line.get_label() for line in ax.lines] == ["truth", "LSTM"]
    assert plot.forecasts(truth, ahead, "b", last=1).lines[0].get_ydata().tolist() == [4]
    with pytest.raises(ValueError, match="No forecast of 'c'"):
        plot.forecasts(truth, ahead, "c")
    with pytest.raises(ValueError, match="last must be a whole number of at least 1, got 0"):
        plot.forecasts(truth, ahead, "b", last=0)


def test_forecasts_of_several_origins_are_a_line_each_in_order_of_time():
    rows = [(3, 4, 1.0), (3, 5, 2.0), (4, 6, 4.0), (4, 5, 3.0)]
    ahead = pd.DataFrame(rows, columns=["cutoff", "ds", "N-quick"]).assign(unique_id="a", y=0.0)
    ahead["N-quick-lo-80"], ahead["N-quick-q0.9"] = ahead["N-quick"] - 1, ahead["N-quick"] + 1
    ahead["N-quick-hi-80"] = ahead["N-quick"] + 2
    ax = plot.forecasts(pd.DataFrame({"unique_id": "a", "ds": range(4), "y": 0.0}), ahead)
    assert [points(line).tolist() for line in ax.lines[1:]] == [[[4, 1], [5, 2]], [[5, 3], [6, 4]]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["truth", "N-quick"]
    beside = plot.forecasts(pd.DataFrame({"unique_id": "a", "ds": range(4), "y": 0.0}), ahead.assign(N=5.0))
    assert len(beside.lines) == 5 and beside.lines[3].get_color() != beside.lines[1].get_color()
    assert ax.lines[1].get_color() == ax.lines[2].get_color() and len(ax.collections) == 2


def test_forecasts_of_one_step_are_seen():
    truth = pd.DataFrame({"unique_id": "a", "ds": range(9), "y": 0.0})
    ahead = pd.DataFrame({"unique_id": "a", "ds": [4, 5, 6], "cutoff": [3, 4, 5], "y": 0.0, "M": [1.0, 2, 3]})
    ahead["M-lo-80"], ahead["M-hi-80"] = ahead.M - 1, ahead.M + 1
    several = plot.forecasts(truth, ahead)
    assert [points(line).tolist() for line in several.lines[1:]] == [[[4, 1], [5, 2], [6, 3]]]
    one = plot.forecasts(truth, ahead[:1])
    assert one.lines[1].get_marker() == "."
    (bar,) = one.collections[1].get_segments()
    assert bar.tolist() == [[4, 0], [4, 2]]


def test_tables_of_no_forecasts_are_refused():
    truth = pd.DataFrame({"unique_id": [7], "ds": [1], "y": [0.0]})
    ahead = truth.rename(columns={"y": "M"})
    for tables, message in (
        ((truth, ahead[:0]), "forecast has no rows"),
        ((ahead, ahead), "truth needs the columns unique_id, ds, y; it has no y"),
        ((truth, ahead.assign(unique_id="7")), "No value of '7'; there are those of .*7"),
    ):
        with pytest.raises(ValueError, match=message):
            plot.forecasts(*tables)


def test_forecasts_have_the_clock_of_their_zone():
    days = pd.date_range("2024-03-01", periods=5, tz="Australia/Sydney")
    truth = pd.DataFrame({"unique_id": "a", "ds": days, "y": 1.0})
    axis = plot.forecasts(truth, truth.rename(columns={"y": "LSTM"})).xaxis
    assert {date.hour for date in plt.matplotlib.dates.num2date(axis.get_majorticklocs(), tz=days.tz)} == {0}


@pytest.mark.parametrize("of", ["zone", "polars", "numbers", "periods", "text"])
def test_forecasts_are_of_any_table_and_times(of):
    days = {"numbers": range(3)}.get(of, pd.date_range("2020-01-01", periods=3, tz="UTC" if of == "zone" else None))
    truth = pd.DataFrame({"unique_id": "a", "ds": days, "y": [1.0, 2.0, 3.0]})
    ahead = pd.DataFrame({"unique_id": "a", "ds": list(days)[2:], "LSTM": [5.0]})
    if of in ("periods", "text"):
        tables = truth, ahead
        written = {"periods": lambda ds: ds.dt.to_period("D"), "text": lambda ds: ds.astype(str)}[of]
        truth, ahead = (table.assign(ds=written(table.ds)) for table in tables)
    if of == "polars":
        truth, ahead = (pytest.importorskip("polars").from_pandas(table) for table in (truth, ahead))
    ax = plot.forecasts(truth, ahead)
    assert ax.lines[0].get_ydata().tolist() == [1, 2, 3] and ax.lines[1].get_ydata().tolist() == [5]
    ax.figure.canvas.draw()
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert any("Jan" in label for label in labels) == (of != "numbers")


def test_a_figure_is_sized_for_a_screen_and_within_a_style_for_print():
    before = plt.rcParams["figure.figsize"]
    assert tuple(plot.uncertainty(LOGITS, Y).figure.get_size_inches()) == (6.4, 4.0)
    with plot.style("print"):
        assert tuple(plot.uncertainty(LOGITS, Y).figure.get_size_inches()) == (3.5, 2.4)
    assert plt.rcParams["figure.figsize"] == before
    with pytest.raises(ValueError, match="style is screen or print; got 'poster'"), plot.style("poster"):
        pass


def test_pictures_go_into_axes_that_are_given():
    _, ax = plt.subplots()
    assert plot.uncertainty(LOGITS, Y, ax=ax) is ax and len(plt.get_fignums()) == 1
