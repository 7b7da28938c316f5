"""Hyperparameter search as scikit-learn's, with candidates and folds trained as swarms."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import ParameterGrid, ParameterSampler, check_cv
from sklearn.model_selection._search import BaseSearchCV
from sklearn.model_selection._validation import _fit_and_score
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import _check_method_params, indexable

from turbanet.ensembles import jobs
from turbanet.ensembles.swarm_estimator import SwarmEstimator
from turbanet.selection.search import check_no_range


@dataclass(repr=False, eq=False)  # only for __init__; scikit-learn has the rest
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

    estimator: Any
    param_grid: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    _: KW_ONLY
    n_iter: int | None = None
    random_state: int | np.random.RandomState | None = None
    scoring: Any = None
    refit: Any = True
    cv: Any = None
    verbose: int = 0
    error_score: float | str = np.nan
    return_train_score: bool = False

    n_jobs = 1  # this and the next are of scikit-learn's searches
    pre_dispatch = "2*n_jobs"

    def fit(self, X: Any, y: Any = None, **params: Any) -> "TurbaSearchCV":
        """Search on X and y; `params` are as in `GridSearchCV.fit`, such as sample_weight and groups."""
        final = self._final_estimator()
        if not isinstance(final, SwarmEstimator):
            wanted = "TurbaSearchCV searches over a TurbaClassifier, a TurbaRegressor or a Pipeline that ends in one"
            raise TypeError(f"{wanted}, got {type(final).__name__}: take GridSearchCV for it.")
        if self.n_iter is not None:
            for grid in [self.param_grid] if isinstance(self.param_grid, Mapping) else self.param_grid:
                check_no_range(grid)
        self._fit_arguments, cv = (X, y, params), self.cv
        self.cv = list(cv) if isinstance(cv, Iterator) else cv  # which scikit-learn and `_run_search` go through
        try:
            return super().fit(X, y, **params)
        finally:
            self.cv = cv
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
        deferred: dict[tuple[int, int], jobs.Job] = {}
        folds: dict[str, jobs.Job] = {}  # by their data, of which each candidate has a copy

        def defer(candidate_and_fold, job, cluster):
            deferred[candidate_and_fold] = job.with_data_of(folds.setdefault(job.data, job))
            raise Deferred

        def replay(job, cluster):
            """Return a recorded job of the same recipe with its result; if there is none, train."""
            if not (recorded := results[job.recipe]):
                return job, *job.run(cluster)
            job, result = recorded.pop(0)
            return job, *result

        for number, candidate in enumerate(candidates):
            for fold, (train, test) in enumerate(splits):
                kwargs = {"train": train, "test": test, "parameters": candidate, "fit_params": routed.estimator.fit}
                kwargs |= {"scorer": None, "score_params": None, "verbose": 0, "error_score": "raise"}
                with contextlib.suppress(Exception):  # scikit-learn fits again, raises the same and heeds error_score
                    _with_runner(partial(defer, (number, fold)), _fit_and_score, clone(self.estimator), X, y, **kwargs)
        fitted, self.groups_ = jobs.run_grouped(deferred, self._final_estimator().cluster)
        results: dict[tuple, list] = defaultdict(list)
        for position, job in deferred.items():
            results[job.recipe].append((job, fitted[position]))
        table = _with_runner(replay, evaluate_candidates, candidates, cv=check_cv(splits))
        seconds = np.zeros((len(candidates), len(splits)))
        for position, (_, history) in fitted.items():
            seconds[position] = history.compile_seconds + history.steady_seconds
        table["mean_fit_time"] += seconds.mean(axis=1)
        table["std_fit_time"] = seconds.std(axis=1)


class Deferred(Exception):
    """What ends the `fit` of an estimator whose job is recorded for later."""


def _with_runner(runner, function, *args, **kwargs):
    """Call a function in which estimators train by `runner`."""
    context = copy_context()
    context.run(jobs.RUNNER.set, runner)
    return context.run(function, *args, **kwargs)
