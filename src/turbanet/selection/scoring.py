"""Scikit-learn's scorers, by their names, as metrics of one member's predictions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from turbanet.core.metrics import as_classes, as_probabilities, holds_classes


def metrics_of(scoring: str | Sequence[str] | Mapping[str, str] | None) -> dict[str, Callable]:
    """Return {name: metric(prediction, y)} of scikit-learn's scorers of these names: the larger, the better.

    A mapping {column: name} calls them otherwise. Raises ValueError for a name that scikit-learn does not know.
    """
    from sklearn.metrics import get_scorer, get_scorer_names

    columns: Any = [scoring] if isinstance(scoring, str) or not isinstance(scoring, Iterable) else list(scoring)
    columns = [] if scoring is None else columns
    names = list(scoring.values()) if isinstance(scoring, Mapping) else columns
    if unknown := [name for name in names if name not in get_scorer_names()]:
        raise ValueError(
            f"scoring is names of sklearn.metrics.get_scorer_names(), such as roc_auc; got {unknown[0]!r}: a function "
            "of your own is metric=."
        )
    return {column: _metric(get_scorer(name)) for column, name in zip(columns, names, strict=True)}


def _metric(scorer):
    return lambda prediction, y: scorer(_estimator(prediction, y, scorer), None, y)


def _estimator(prediction: Any, y: Any, scorer: Any) -> Any:
    """Return a fitted estimator of scikit-learn, whose predictions of any rows are these."""
    import numpy as np
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

    class OneOutput(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(2)

        def decision_function(self, x: Any) -> Any:
            return prediction.reshape(y.shape)

        def predict(self, x: Any) -> Any:
            raise ValueError("it needs an output for each class, not one: give the model two.")

        predict_proba = predict

    class Classifier(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(prediction.shape[-1])

        def predict(self, x: Any) -> Any:
            return as_classes(prediction, y)

        def predict_proba(self, x: Any) -> Any:
            return as_probabilities(prediction, y)

    class Regressor(RegressorMixin, BaseEstimator):
        def predict(self, x: Any) -> Any:
            return prediction.reshape(y.shape) if prediction.size == y.size else prediction

    if scorer._score_func.__module__.endswith("_regression"):
        return Regressor()
    if holds_classes(y):
        return OneOutput() if prediction.size == y.size else Classifier()
    is_one_hot = y.ndim == 2 and y.shape[1] > 1 and (y.sum(axis=1) == 1).all()  # a softmax is of each row by itself
    ranks = "decision_function" in scorer._response_method and prediction.size == y.size and not is_one_hot
    return OneOutput() if ranks else Regressor()
