"""A search over hyperparameters as one swarm and by scikit-learn: the same candidates, folds, networks and epochs."""

from functools import partial

import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from study.baselines import bagging
from study.figures.labels import OURS, SKLEARN_ONE
from study.measurement import timing
from study.measurement.compilation import cold
from turbanet.core.plan import Plan
from turbanet.selection.search_cv import TurbaSearchCV

TOGETHER = "TurbaSearchCV"
ONE_BY_ONE = "GridSearchCV of TurbaClassifier"
ALONE = "TurbaSearchCV, blocks of one network"
NETWORK = "GridSearchCV of MLPClassifier"


def searches(*, members, learning_rates, weight_decays, folds: int, seed: int = 0, **settings) -> dict:
    """Make {(method, networks of a candidate): unfitted search}; a single network sees all rows, several bootstrap.

    scikit-learn's MLPClassifier compares with a single network, in two processes; its Adam adds weight decay to the
    loss, ours decays the weights themselves. In blocks of one network a swarm equals `GridSearchCV` of one to the bit.
    """
    grid = {"learning_rate": learning_rates, "weight_decay": weight_decays}
    sklearn_grid = {"learning_rate_init": learning_rates, "alpha": weight_decays}
    found = {}
    for count in members:
        estimators = bagging.estimators(members=count, seed=seed, **settings)
        swarm = estimators[OURS].set_params(bootstrap=count > 1)
        found[TOGETHER, count] = TurbaSearchCV(swarm, grid, cv=folds)
        found[ONE_BY_ONE, count] = GridSearchCV(swarm, grid, cv=folds)
        if count == 1:
            found[ALONE, count] = TurbaSearchCV(clone(swarm).set_params(plan=Plan(block=1)), grid, cv=folds)
            network = clone(estimators[SKLEARN_ONE].estimator).set_params(random_state=seed)
            found[NETWORK, count] = GridSearchCV(network, sklearn_grid, cv=folds, n_jobs=2)
    return found


def compare(x, y, *, repeats: int, **settings) -> pd.DataFrame:
    """Time `searches`: each once cold, with compilation and start of processes, then all in turn, warm.

    Returns
    -------
    pandas table : method, networks (of a candidate), cold, median, low, high (s), score (the best candidate's mean over
        folds), gap and typical_gap (largest and median absolute difference of a candidate's score from GridSearchCV's
        with the same estimator, NaN where the networks differ)
    """
    made = searches(**settings)
    calls = {name: partial(bagging.fitted, search, (x, y)) for name, search in made.items()}
    first = timing.interleave({name: cold()(call) for name, call in calls.items()}, repeats=1, warmup=0)
    table = timing.summary(timing.interleave(calls, repeats=repeats))
    scores = {name: search.cv_results_["mean_test_score"] for name, search in made.items()}
    gaps = [np.abs(each - scores[ONE_BY_ONE, count]) for (_, count), each in scores.items()]
    comparable = [method in (TOGETHER, ALONE) for method, _ in made]
    method, networks = zip(*made, strict=True)
    best = [search.best_score_ for search in made.values()]
    table = table.drop(columns="method").assign(cold=[seconds for (seconds,) in first.values()], score=best)
    table["gap"] = [gap.max() if same else np.nan for gap, same in zip(gaps, comparable, strict=True)]
    table["typical_gap"] = [np.median(gap) if same else np.nan for gap, same in zip(gaps, comparable, strict=True)]
    table.insert(0, "method", method)
    table.insert(1, "networks", networks)
    return table
