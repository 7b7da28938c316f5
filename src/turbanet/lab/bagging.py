"""Bagged networks by scikit-learn and by a swarm: the same architecture, epochs, batches and number of networks."""

import contextlib
import itertools
import warnings
from functools import partial

import numpy as np
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from turbanet.ensembles.estimators import TurbaClassifier
from turbanet.lab import timing
from turbanet.lab.compilation import cold
from turbanet.lab.labels import OURS, SKLEARN_ONE, SKLEARN_TWO

WAYS = (OURS, SKLEARN_ONE, SKLEARN_TWO)


class RowsClassifier(MLPClassifier):
    """MLPClassifier that takes no weights, so that bagging hands it its rows.

    Bootstrap rows as weights fail in scikit-learn's own mean where a small batch has none but zeros.
    """

    def fit(self, X, y):
        return super().fit(X, y)


def estimators(*, members: int, hidden, epochs: int, batch_size: int, seed: int = 0, learning_rate: float = 0.001):
    """{way: estimator}, untrained: bootstrap rows, ReLU, Adam, no weight decay, no early end."""
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
    theirs = [BaggingClassifier(network, members, n_jobs=jobs, random_state=seed) for jobs in (1, 2)]
    return dict(zip(WAYS, [ours, *theirs], strict=True))


def compare(train, test, *, repeats: int = 3, seed: int = 0, **settings):
    """A table of the ways trained in turn: way, median, low, high (s), repeats, accuracy (of the test rows, in [0, 1]).

    train, test: (x [row, feature], y [row]). Each repeat has a seed of its own, the same for all ways; the accuracy is
    the repeats' mean. A swarm compiles anew in each of its runs; scikit-learn's processes are started before, by a
    short training.
    """
    for estimator in estimators(**settings | {"epochs": 1, "members": 2}).values():
        _fit(estimator, train)

    def run(way, estimator, seeds):
        with cold() if way == OURS else contextlib.nullcontext():
            return _fit(estimator.set_params(random_state=next(seeds)), train).score(*test)

    turns = {way: partial(run, way, each, itertools.count(seed)) for way, each in estimators(**settings).items()}
    scores = {}
    table = timing.summary(timing.interleave(turns, repeats=repeats, warmup=0, results=scores))
    return table.assign(accuracy=[float(np.mean(scores[way])) for way in table.way])


def _fit(estimator, data):
    with warnings.catch_warnings(category=ConvergenceWarning, action="ignore"):  # it ends after its epochs, as asked
        return estimator.fit(*data)


def speedup(table) -> tuple[float, float]:
    """(time of scikit-learn's faster way over ours, our accuracy less the better of its two) in a `compare` table."""
    of = table.set_index("way")
    ours = of.loc[OURS]
    theirs = of.loc[[SKLEARN_ONE, SKLEARN_TWO]]
    return float(theirs["median"].min() / ours["median"]), float(ours.accuracy - theirs.accuracy.max())
