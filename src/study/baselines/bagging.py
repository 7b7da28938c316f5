"""Bagged networks by scikit-learn and by a swarm: the same architecture, epochs, batches and number of networks."""

import itertools
import warnings
from functools import partial

import numpy as np
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from study.figures.labels import OURS, SKLEARN_ONE, SKLEARN_TWO
from study.measurement import timing
from study.measurement.compilation import cold
from turbanet.ensembles.estimators import TurbaClassifier

METHODS = (OURS, SKLEARN_ONE, SKLEARN_TWO)
FEW = 2  # networks that are timed in one process, as it trains one after the other


class RowsClassifier(MLPClassifier):
    """MLPClassifier without sample weights, so that bagging passes resampled rows instead.

    Bootstrap counts as weights fail in scikit-learn's weighted mean where a small batch has only zeros.
    """

    def fit(self, X, y):
        return super().fit(X, y)


def estimators(*, members: int, hidden, epochs: int, batch_size: int, seed: int = 0, learning_rate: float = 0.001):
    """Make {method: untrained estimator}: bootstrap rows, ReLU, Adam, no weight decay, no early stopping."""
    network = RowsClassifier(
        tuple(hidden),
        learning_rate_init=learning_rate,
        batch_size=batch_size,
        max_iter=epochs,
        tol=0.0,
        n_iter_no_change=epochs + 1,
        alpha=0.0,
    )
    ours = TurbaClassifier(
        members,
        hidden=tuple(hidden),
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        random_state=seed,
    )
    sklearn = [BaggingClassifier(network, members, n_jobs=jobs, random_state=seed) for jobs in (1, 2)]
    return dict(zip(METHODS, [ours, *sklearn], strict=True))


def compare(train, test, *, repeats: int = 3, seed: int = 0, **settings):
    """Time all methods in turn on the same rows; each repeat has its own seed, which all methods share.

    Parameters
    ----------
    train, test : (x [row, feature], y [row])
    repeats : timed runs of each method
    seed : of the first repeat; later ones count up
    settings : arguments of `estimators`

    Returns
    -------
    pandas table : method, median, low, high (s), repeats, accuracy (on the test rows, in [0, 1], mean over repeats),
        networks_timed. A swarm compiles anew in each run; a short training before starts scikit-learn's processes. One
        process trains the same networks as two, so it is timed on FEW of them and takes over the accuracy of the two.
    """
    short = estimators(**settings | {"epochs": 1, "members": 2})
    brief = {method: fitted(estimator, train) for method, estimator in short.items()}
    np.testing.assert_array_equal(*(brief[method].predict(test[0]) for method in (SKLEARN_ONE, SKLEARN_TWO)))
    members = settings["members"]
    networks = {OURS: members, SKLEARN_ONE: min(FEW, members), SKLEARN_TWO: members}

    def run(estimator, seeds):
        return fitted(estimator.set_params(random_state=next(seeds)), train).score(*test)

    turns = {}
    for method in METHODS:
        estimator = estimators(**settings | {"members": networks[method]})[method]
        call = partial(run, estimator, itertools.count(seed))
        turns[method] = cold()(call) if method == OURS else call
    scores = {}
    seconds = timing.interleave(turns, repeats=repeats, warmup=0, results=scores)
    seconds = {method: [each * members / networks[method] for each in seconds[method]] for method in METHODS}
    accuracy = [float(np.mean(scores[method])) for method in (OURS, SKLEARN_TWO, SKLEARN_TWO)]
    return timing.summary(seconds).assign(accuracy=accuracy, networks_timed=list(networks.values()))


def fitted(estimator, data):
    """Fit the estimator to data (x, y) without its warning that it has not converged."""
    with warnings.catch_warnings(category=ConvergenceWarning, action="ignore"):  # the epochs are fixed on purpose
        return estimator.fit(*data)


def speedup(table) -> tuple[float, float]:
    """Return (time of scikit-learn's faster method over ours, our accuracy less its best) from a `compare` table."""
    by_method = table.set_index("method")
    ours = by_method.loc[OURS]
    sklearn = by_method.loc[[SKLEARN_ONE, SKLEARN_TWO]]
    return float(sklearn["median"].min() / ours["median"]), float(ours.accuracy - sklearn.accuracy.max())
