"""Bagged networks by scikit-learn and by a swarm: the same architecture, epochs, batches and number of networks."""

import contextlib
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

WAYS = (OURS, SKLEARN_ONE, SKLEARN_TWO)
FEW = 2  # networks off which the time of one process is read: it trains them one after the other


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
    """The ways trained in turn on the same rows, each repeat with a seed of its own that all ways share.

    Parameters
    ----------
    train, test : (x [row, feature], y [row])
    repeats : timed runs of each way
    seed : of the first repeat
    settings : as `estimators` takes them

    Returns
    -------
    pandas table : way, median, low, high (s), repeats, accuracy (of the test rows, in [0, 1], the repeats' mean),
        networks_timed. A swarm compiles anew in each of its runs; scikit-learn's processes are started before, by a
        short training. One process trains the networks of two, so that they are not sat through twice: its seconds are
        read off FEW of them, its accuracy is that of the two.
    """
    brief = {way: fitted(each, train) for way, each in estimators(**settings | {"epochs": 1, "members": 2}).items()}
    np.testing.assert_array_equal(*(brief[way].predict(test[0]) for way in (SKLEARN_ONE, SKLEARN_TWO)))
    members = settings["members"]
    networks = {OURS: members, SKLEARN_ONE: min(FEW, members), SKLEARN_TWO: members}

    def run(estimator, seeds, forget):
        with forget():
            return fitted(estimator.set_params(random_state=next(seeds)), train).score(*test)

    turns = {}
    for way in WAYS:
        estimator = estimators(**settings | {"members": networks[way]})[way]
        turns[way] = partial(run, estimator, itertools.count(seed), cold if way == OURS else contextlib.nullcontext)
    scores = {}
    seconds = timing.interleave(turns, repeats=repeats, warmup=0, results=scores)
    seconds = {way: [each * members / networks[way] for each in seconds[way]] for way in WAYS}
    accuracy = [float(np.mean(scores[way])) for way in (OURS, SKLEARN_TWO, SKLEARN_TWO)]
    return timing.summary(seconds).assign(accuracy=accuracy, networks_timed=list(networks.values()))


def fitted(estimator, data):
    with warnings.catch_warnings(category=ConvergenceWarning, action="ignore"):  # it ends after its epochs, as asked
        return estimator.fit(*data)


def speedup(table) -> tuple[float, float]:
    """(time of scikit-learn's faster way over ours, our accuracy less the better of its two) in a `compare` table."""
    of = table.set_index("way")
    ours = of.loc[OURS]
    theirs = of.loc[[SKLEARN_ONE, SKLEARN_TWO]]
    return float(theirs["median"].min() / ours["median"]), float(ours.accuracy - theirs.accuracy.max())
