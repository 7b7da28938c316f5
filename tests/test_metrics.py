"""Metrics of each member's own held-out rows, against scikit-learn on these rows alone."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import DEVICES
from sklearn.metrics import (
    accuracy_score,
    adjusted_mutual_info_score,
    average_precision_score,
    brier_score_loss,
    cohen_kappa_score,
    f1_score,
    log_loss,
    make_scorer,
    mean_squared_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
    top_k_accuracy_score,
)

import turbanet as tn
from turbanet.core import metrics
from turbanet.training import run

rng = np.random.default_rng(0)
X = rng.normal(size=(30, 3)).astype(np.float32)
Y = (X @ [[1.0], [2.0], [-1.0]] + rng.normal(size=(30, 1))).astype(np.float32)
CLASSES = (Y[:, 0] > 0).astype(np.int32)
RAGGED = np.array([[*range(10), *[-1] * 20], [*range(30)], [*range(5, 25), *[-1] * 10]])
EVEN = np.array([range(10), range(10, 20), range(20, 30)])


def train(y=Y, outputs=1, loss=tn.mse, **how):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, outputs)), optax.adam(0.01), 3, sample_input=X[:1])
    job = {"epochs": 4, "batch_size": 8, "plan": tn.Plan(DEVICES, 1), "progress": False, "validation": (X, y)}
    return tn.fit(swarm, X, y, loss, **job | how)


def of_rows(swarm, rows, score, y=Y):
    """score(y, prediction) of each member's rows, by hand."""
    predictions = np.asarray(tn.predict(swarm, X))
    return [score(y[r[r >= 0]], prediction[r[r >= 0]]) for prediction, r in zip(predictions, rows, strict=True)]


@pytest.mark.parametrize("rows", [RAGGED, EVEN])
def test_a_metric_sees_exactly_each_members_rows(rows):
    swarm, history = train(validation_rows=rows, metric=root_mean_squared_error)
    assert history.validation_metric.shape == (4, 3)
    np.testing.assert_allclose(history.validation_metric[-1], of_rows(swarm, rows, root_mean_squared_error), rtol=1e-5)


def test_a_members_metric_does_not_depend_on_the_others_rows():
    alike = [train(validation_rows=rows, metric=root_mean_squared_error)[1] for rows in (RAGGED, RAGGED[[0, 0, 0]])]
    np.testing.assert_allclose(*[history.validation_metric[:, 0] for history in alike], rtol=1e-6)


def test_several_metrics_by_name():
    def bias(prediction, y):
        return (prediction - y).mean()

    asked = {"r2": r2_score, "bias": bias}
    swarm, history = train(validation_rows=RAGGED, metric=asked)
    assert list(history.validation_metric) == ["r2", "bias"]
    np.testing.assert_allclose(history.validation_metric["r2"][-1], of_rows(swarm, RAGGED, r2_score), rtol=1e-4)
    expected = of_rows(swarm, RAGGED, lambda y, prediction: (prediction - y).mean())
    np.testing.assert_allclose(history.validation_metric["bias"][-1], expected, rtol=1e-4, atol=1e-6)
    frame = history.frame()
    np.testing.assert_array_equal(frame.r2, history.validation_metric["r2"].ravel())
    assert "validation_metric" not in frame


def test_a_metric_that_takes_a_mask_is_compiled_and_exact():
    calls = []

    def right(prediction, y, mask):
        calls.append(type(prediction))
        return tn.accuracy(prediction, y, mask)

    how = {"y": CLASSES, "outputs": 2, "loss": tn.softmax_cross_entropy, "validation_rows": RAGGED}
    swarm, history = train(**how, metric={"compiled": right, "accuracy": tn.accuracy})
    assert len(calls) < 4 and np.ndarray not in calls
    expected = of_rows(swarm, RAGGED, lambda y, logits: (logits.argmax(-1) == y).mean(), CLASSES)
    for found in history.validation_metric.values():
        np.testing.assert_allclose(found[-1], expected, rtol=1e-6)


def test_area_under_the_curve_of_one_column():
    def area(prediction, y):
        return roc_auc_score(y, prediction[:, 1])

    swarm, history = train(CLASSES, 2, tn.softmax_cross_entropy, validation_rows=RAGGED, metric=area)
    expected = of_rows(swarm, RAGGED, lambda y, logits: roc_auc_score(y, logits[:, 1]), CLASSES)
    np.testing.assert_allclose(history.validation_metric[-1], expected)


def test_segments_plans_and_stopping_do_not_change_a_metric():
    how = {"validation_rows": RAGGED, "metric": {"r2": r2_score}}
    whole = train(**how)[1].validation_metric["r2"]
    for other in ({"segment": 3}, {"plan": tn.Plan(1, 3)}):
        np.testing.assert_allclose(train(**how, **other)[1].validation_metric["r2"], whole, rtol=1e-4)
    stopped = train(**how, patience=1, min_delta=100.0, segment=2)[1]
    assert np.isnan(stopped.validation_metric["r2"][2:]).all() and np.isnan(stopped.validation_loss[2:]).all()
    np.testing.assert_allclose(stopped.validation_metric["r2"][:2], whole[:2], rtol=1e-4)


def test_a_metric_of_each_members_own_targets():
    own = np.stack([Y, 2 * Y, -Y])
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 1)), optax.adam(0.01), 3, sample_input=X[:1])
    job = {"epochs": 2, "plan": tn.Plan(DEVICES, 1), "progress": False, "per_member": (False, True)}
    trained, history = tn.fit(
        swarm, X, own, tn.mse, validation=(X, own), validation_rows=RAGGED, metric=r2_score, **job
    )
    predictions = np.asarray(tn.predict(trained, X))
    rows = [r[r >= 0] for r in RAGGED]
    expected = [r2_score(y[r], prediction[r]) for y, prediction, r in zip(own, predictions, rows, strict=True)]
    np.testing.assert_allclose(history.validation_metric[-1], expected, rtol=1e-4)


def test_a_killed_training_goes_on_with_its_metrics(tmp_path):
    how = {"validation_rows": RAGGED, "metric": {"r2": r2_score}, "segment": 1}
    whole = train(**how)[1].validation_metric["r2"]
    train(**how, checkpoints=tmp_path)
    np.testing.assert_array_equal(train(**how, checkpoints=tmp_path)[1].validation_metric["r2"], whole)
    with pytest.raises(ValueError, match="metric r2 was"):
        train(**how | {"metric": {"r2": root_mean_squared_error}}, checkpoints=tmp_path)


@pytest.mark.parametrize("metric", [0.5, {"r2": "r2"}, {3: r2_score}, {"train_loss": r2_score}])
def test_what_is_no_metric_is_refused(metric):
    with pytest.raises(ValueError, match=r"metric is metric\(prediction, y\) or {name: metric}"):
        train(metric=metric)


@pytest.mark.parametrize("more", [jnp.arange(100.0), jnp.float32(3)])
def test_a_prediction_without_rows_reaches_no_metric_in_part(more):
    def loss(params, x, y, apply_fn):
        value, prediction = tn.mse(params, x, y, apply_fn)
        return value, {"prediction": prediction, "more": more}

    with pytest.raises(ValueError, match="called with a prediction whose arrays lead with the rows, got "):
        train(Y, 1, loss, metric=lambda prediction, y: prediction["more"].sum(), epochs=1)


def test_a_metric_returns_one_number():
    def of_each_row(prediction, y):
        return (prediction - y)[:, 0] ** 2

    with pytest.raises(ValueError, match=r"of_each_row|validation_metric returned an array of shape \(30,\)"):
        train(metric=of_each_row)


def test_a_weighted_y_is_named_to_accuracy():
    y = CLASSES, np.ones(30, np.float32)
    with pytest.raises(ValueError, match="as for a weighted loss"):
        train(y, 2, tn.weighted(tn.softmax_cross_entropy), metric=tn.accuracy)


def test_scikit_learns_order_is_known():
    assert metrics.on_host("r2", r2_score)(Y * 2, Y) == r2_score(Y, Y * 2) != r2_score(Y * 2, Y)


THREE = np.arange(30) % 3


def softmaxed(logits):
    return torch.softmax(torch.tensor(np.asarray(logits)), -1).numpy()


WANTED = {
    "accuracy": (accuracy_score, lambda y, logits: accuracy_score(y, logits.argmax(-1))),
    "f1": (partial(f1_score, average="macro"), lambda y, logits: f1_score(y, logits.argmax(-1), average="macro")),
    "kappa": (cohen_kappa_score, lambda y, logits: cohen_kappa_score(y, logits.argmax(-1))),
    "mutual": (adjusted_mutual_info_score, lambda y, logits: adjusted_mutual_info_score(y, logits.argmax(-1))),
    "log": (log_loss, lambda y, logits: log_loss(y, softmaxed(logits))),
    "top": (partial(top_k_accuracy_score, k=2), lambda y, logits: top_k_accuracy_score(y, softmaxed(logits), k=2)),
    "area": (
        partial(roc_auc_score, multi_class="ovr"),
        lambda y, logits: roc_auc_score(y, softmaxed(logits), multi_class="ovr"),
    ),
}


def test_scikit_learns_metrics_get_classes_or_probabilities():
    asked = {name: metric for name, (metric, _) in WANTED.items()}
    swarm, history = train(THREE, 3, tn.softmax_cross_entropy, metric=asked, epochs=1)
    logits = np.asarray(tn.predict(swarm, X))
    for name, (_, by_hand) in WANTED.items():
        expected = [by_hand(THREE, of_member) for of_member in logits]
        np.testing.assert_allclose(history.validation_metric[name][-1], expected, rtol=1e-5)


def test_scikit_learns_metrics_of_two_classes_by_two_outputs_and_by_one():
    two = {"area": roc_auc_score, "precision": average_precision_score, "brier": brier_score_loss}
    swarm, history = train(CLASSES, 2, tn.softmax_cross_entropy, metric=two, epochs=1)
    probability = softmaxed(tn.predict(swarm, X))[..., 1]
    for name, metric in two.items():
        expected = [metric(CLASSES, of_member) for of_member in probability]
        np.testing.assert_allclose(history.validation_metric[name][-1], expected, rtol=1e-5)
    one = {"area": roc_auc_score, "right": accuracy_score, "error": mean_squared_error}
    swarm, history = train(CLASSES, 1, tn.binary_cross_entropy, metric=one, epochs=1)
    probability = 1 / (1 + np.exp(-np.asarray(tn.predict(swarm, X))[..., 0]))
    by_hand = roc_auc_score, lambda y, p: (y == (p > 0.5)).mean(), lambda y, p: ((y - p) ** 2).mean()
    expected = [[score(CLASSES, p) for score in by_hand] for p in probability]
    found = np.transpose([history.validation_metric[name][-1] for name in one])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (mean_squared_error, r"cannot score predictions and y of shapes \(30, 3\) and \(30,\): y_true and y_pred"),
        ({"area": roc_auc_score}, "The metric area cannot score .*: multi_class must be in"),
        (lambda prediction, y: prediction["mean"], "cannot score predictions .*: only integers"),
        (
            make_scorer(accuracy_score),
            "is a scorer .*, which takes an estimator: give .* sklearn.metrics.accuracy_score",
        ),
    ],
)
def test_a_metric_that_cannot_score_is_refused_before_the_training(metric, message, monkeypatch):
    monkeypatch.setattr(run.Training, "__init__", None)
    with pytest.raises(ValueError, match=message):
        train(THREE, 3, tn.softmax_cross_entropy, metric=metric)


def test_a_metric_of_the_host_may_score_without_targets():
    def loss(params, x, y, apply_fn):
        out = apply_fn({"params": params}, x)
        return ((out - x[:, :1]) ** 2).mean(), out

    how = {"metric": {"largest": lambda prediction, y: float(np.abs(prediction).max())}, "validation": (X, None)}
    swarm, history = train(None, 1, loss, **how, validation_rows=RAGGED)
    expected = [np.abs(np.asarray(tn.predict(swarm, X))[i, own[own >= 0]]).max() for i, own in enumerate(RAGGED)]
    np.testing.assert_allclose(history.validation_metric["largest"][-1], expected, rtol=1e-6)


def test_a_loss_that_predicts_nothing_has_no_metric(monkeypatch):
    def loss(params, x, y, apply_fn):
        return apply_fn({"params": params}, x).mean(), None

    monkeypatch.setattr(run.Training, "__init__", None)
    with pytest.raises(ValueError, match="cannot score predictions and y of shapes None and"):
        train(loss=loss, metric=r2_score)


@pytest.mark.parametrize("metric", [tn.accuracy, accuracy_score, roc_auc_score], ids=lambda metric: metric.__name__)
def test_a_member_that_diverged_has_no_score_and_stops_no_other(metric):
    """Whose NaN would read as class 0, which most rows are of."""
    y = (np.arange(30) > 24).astype(np.int32)
    swarm = tn.TurbaTrainState.swarm(
        tn.MLP((4, 2)), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 2, sample_input=X[:1]
    )
    swarm = tn.with_hyperparameters(swarm, learning_rate=[0.1, 1e30])
    how = {"epochs": 4, "batch_size": 8, "progress": False, "patience": 5, "monitor": "score", "mode": "max"}
    swarm, history = tn.fit(
        swarm, X, y, tn.softmax_cross_entropy, validation=(X, y), metric={"score": metric}, plan=tn.Plan(1, 2), **how
    )
    score = history.validation_metric["score"]
    assert np.isfinite(score[:, 0]).all() and np.isnan(score[:, 1]).all()
    assert np.isfinite(np.asarray(tn.predict(swarm, X))).all()  # the first weights again, as none was good


def test_a_metric_gets_y_first_if_its_first_argument_is_named_so():
    def right(y, prediction):
        return float((np.asarray(prediction).argmax(-1) == y).mean())

    def compiled(target, logits, mask):
        return ((logits.argmax(-1) == target) * mask).sum() / mask.sum()

    metric = {"known": tn.accuracy, "right": right, "compiled": compiled, "bishop": lambda y, t: float(y.shape[-1])}
    _, history = train(THREE, 3, tn.softmax_cross_entropy, metric=metric)
    for name in ("right", "compiled"):
        np.testing.assert_allclose(history.validation_metric[name], history.validation_metric["known"], rtol=1e-6)
    assert (history.validation_metric["bishop"] == 3).all()  # y is the prediction there, t the target


@pytest.mark.parametrize("as_y", [lambda y: y.astype(bool), lambda y: y[:, None]], ids=["bool", "a column"])
def test_classes_may_be_bool_or_a_column(as_y):
    found = [
        train(y, 1, tn.binary_cross_entropy, metric=accuracy_score)[1].validation_metric
        for y in (CLASSES, as_y(CLASSES))
    ]
    np.testing.assert_array_equal(*found)


def test_a_metric_of_a_weighted_loss_is_told_that_y_is_a_tuple():
    weights = np.ones(len(THREE), np.float32)
    with pytest.raises(
        ValueError, match=r"a tuple, as of a weighted loss, of which a metric of your own scores y\[0\]"
    ):
        train((THREE, weights), 3, tn.weighted(tn.softmax_cross_entropy), metric=accuracy_score)
