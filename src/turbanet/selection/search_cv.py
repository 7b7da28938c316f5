"""Hyperparameter search as scikit-learn's, with candidates and folds trained as swarms."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import ParameterGrid, ParameterSampler, check_cv
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_method_params, indexable

from turbanet.ensembles import jobs
from turbanet.ensembles.swarm_estimator import SwarmEstimator
from turbanet.selection.search import check_no_range


class TurbaSearchCV(BaseSearchCV):
    """`GridSearchCV` or `RandomizedSearchCV` of a swarm estimator, with candidates and folds trained as swarms.

    Candidates and folds that differ in learning rate, weight decay, class weights' values, seed or number of members
    have equal shapes and train as one swarm. Other layers, epochs or batch sizes, and folds of other numbers of steps,
    form other groups. Scores equal those of scikit-learn's searches up to rounding, which training amplifies where the
    learning rate is high; they are bitwise equal where both train in blocks of one size, such as `Plan(block=1)`.

    Parameters
    ----------
    estimator : a `TurbaClassifier` or `TurbaRegressor`, or a `Pipeline` that ends in one
    param_grid : {name: values}, or a list of such; with `n_iter`, values may be SciPy distributions, but not a tuple of
        two numbers, which could mean these two or a range
    n_iter : number of candidates drawn; None: all combinations
    random_state : of the draws
    scoring, refit, cv, verbose, error_score, return_train_score : as in `GridSearchCV`

    Attributes
    ----------
    cv_results_, best_estimator_, best_params_, best_score_, best_index_, n_splits_, scorer_, refit_time_ : as in
        `GridSearchCV`; mean_fit_time of a candidate is its share of its groups' seconds, by number of members
    groups_ : [group], number of fits in each group

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from turbanet.estimators import TurbaClassifier, TurbaSearchCV
    >>> x, y = load_iris(return_X_y=True)
    >>> classifier = TurbaClassifier(members=2, hidden=(8,), epochs=20, random_state=0)
    >>> search = TurbaSearchCV(classifier, {"learning_rate": [0.00001, 0.03]}, cv=5).fit(x, y)
    >>> search.best_params_, search.groups_
    ({'learning_rate': 0.03}, [10])
    """

    def __init__(
        self,
        estimator: Any,
        param_grid: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        n_iter: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        scoring: Any = None,
        refit: Any = True,
        cv: Any = None,
        verbose: int = 0,
        error_score: float | str = np.nan,
        return_train_score: bool = False,
    ):
        kwargs = {"scoring": scoring, "refit": refit, "cv": cv, "verbose": verbose, "error_score": error_score}
        super().__init__(estimator, **kwargs, return_train_score=return_train_score)
        self.param_grid = param_grid
        self.n_iter = n_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, **params: Any) -> "TurbaSearchCV":
        """Search on X and y; `params` are as in `GridSearchCV.fit`, such as sample_weight and groups."""
        final = self._final_estimator()
        if not isinstance(final, SwarmEstimator):
            wanted = "TurbaSearchCV searches over a TurbaClassifier, a TurbaRegressor or a Pipeline that ends in one"
            raise TypeError(f"{wanted}, got {type(final).__name__}: take GridSearchCV for it.")
        if self.n_iter is not None:
            for grid in [self.param_grid] if isinstance(self.param_grid, Mapping) else self.param_grid:
                check_no_range(grid)
        self._fit_arguments = X, y, params
        try:
            return super().fit(X, y, **params)
        finally:
            del self._fit_arguments

    def _final_estimator(self):
        """Return the estimator, or a pipeline's last step."""
        final = self.estimator
        while isinstance(final, Pipeline):
            final = final.steps[-1][1]
        return final

    def _run_search(self, evaluate_candidates):
        X, y = indexable(*self._fit_arguments[:2])
        params = _check_method_params(X, params=self._fit_arguments[2])
        routed = self._get_routed_params_for_fit(params)
        if self.n_iter is None:
            candidates = list(ParameterGrid(self.param_grid))
        else:
            candidates = list(ParameterSampler(self.param_grid, self.n_iter, random_state=self.random_state))
        splitter = check_cv(self.cv, y, classifier=is_classifier(self.estimator))
        splits = list(splitter.split(X, y, **routed.splitter.split))  # once, as a splitter may be random
        trained = np.zeros((len(candidates), len(splits)), bool)
        with jobs.deferring() as deferred:
            for number, candidate in enumerate(candidates):
                for fold, (train, _) in enumerate(splits):
                    trained[number, fold] = self._defer(candidate, X, y, train, routed.estimator.fit)
        fitted, groups = jobs.run_grouped(deferred, self._final_estimator().cluster)
        self.groups_ = [len(group) for group in groups]
        with jobs.replaying(deferred, fitted):
            results = evaluate_candidates(candidates, cv=check_cv(splits))
        seconds = np.zeros(trained.shape)
        seconds[trained] = [history.compile_seconds + history.steady_seconds for _, history in fitted]
        results["mean_fit_time"] += seconds.mean(axis=1)
        results["std_fit_time"] = seconds.std(axis=1)

    def _defer(self, candidate, X, y, train, params):
        """Record the job of a candidate on these rows, and return whether `fit` got that far: else it fails again."""
        estimator = clone(self.estimator).set_params(**clone(candidate, safe=False))
        of_rows = _check_method_params(X, params=params, indices=train)
        try:
            estimator.fit(_safe_indexing(X, train), _safe_indexing(y, train), **of_rows)
        except jobs.Deferred:
            return True
        except Exception:  # scikit-learn fits again, raises the same and heeds error_score
            return False
        raise RuntimeError(f"{estimator} trained nothing in fit: TurbaSearchCV has nothing to train together.")
