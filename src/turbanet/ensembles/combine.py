"""Members combined into one prediction, and the scores of each member, of their average and of the ensemble."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_softmax, softmax


def ensemble_mean(logits, weights=None):
    """The mean over members of the class probabilities: logits [member, row, class] -> [row, class].

    weights: [member], not negative, for a weighted mean; `stacking_weights` and `greedy_weights` find some.
    """
    if weights is None:
        return _mean_probabilities(logits)
    weights = np.asarray(weights)
    if weights.shape != (len(logits),) or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights must be {len(logits)} numbers of at least 0 and not all 0, got {weights}.")
    return jnp.einsum("m,mrc->rc", weights / weights.sum(), softmax(logits, axis=-1))


@jax.jit
def _mean_probabilities(logits):
    return softmax(logits, axis=-1).mean(axis=0)


def ensemble_geometric_mean(logits):
    """The normalised geometric mean of the members' probabilities: [member, row, class] -> [row, class]."""
    return softmax(log_softmax(logits, axis=-1).mean(axis=0), axis=-1)


def ensemble_vote(logits):
    """The share of members that vote for each class: [member, row, class] -> [row, class]; argmax is the majority's."""
    classes = jnp.arange(logits.shape[-1])
    return (logits.argmax(-1)[..., None] == classes).mean(axis=0)


def stacking_weights(logits, y, *, rounds=200):
    """Weights [member] of the mean under which rows that nobody trained on are likeliest: logits [member, row, class].

    Expectation maximisation for the proportions of a mixture (Dempster et al. 1977, section 4.3): no round is worse.
    """
    own = true_class(log_softmax(logits, axis=-1), y)
    own = jnp.exp(own - own.max(0))  # a factor of a row changes nothing, and a row that all find unlikely counts too

    def better(_, weights):
        share = weights[:, None] * own
        return (share / share.sum(0)).mean(1)

    return jax.lax.fori_loop(0, rounds, better, jnp.full(len(own), 1 / len(own)))


def greedy_weights(logits, y, *, size=20):
    """Weights [member] that sum to 1, of `size` members taken one by one, the one that helps most, with repetition.

    What helps is the likelihood of rows that nobody trained on; of all sizes up to `size` the best is kept (Caruana et
    al. 2004).
    """
    own = np.asarray(true_class(softmax(logits, axis=-1), y), np.float64)
    taken, total, best = [], np.zeros(own.shape[1]), (np.inf, 0)
    for count in range(1, size + 1):
        loss = -np.log(np.maximum((total + own) / count, np.finfo(float).tiny)).mean(1)
        taken.append(int(loss.argmin()))
        total = total + own[taken[-1]]
        best = min(best, (loss.min(), count))
    return np.bincount(taken[: best[1]], minlength=len(own)) / best[1]


def out_of_bag(prediction, rows):
    """The mean prediction of the members that did not see a row: [member, row, ...] -> [row, ...], NaN if all did.

    rows: int [member, row], what each member trained on (see `sampling`). It scores without test rows (Breiman 1996).
    """
    prediction = np.asarray(prediction)
    seen = np.zeros(prediction.shape[:2], bool)
    for own, which in zip(seen, np.asarray(rows), strict=True):
        own[which[which >= 0]] = True
    unseen = ~seen.reshape(*seen.shape, *[1] * (prediction.ndim - 2))
    count = unseen.sum(0)
    return np.where(count, np.where(unseen, prediction, 0).sum(0) / np.maximum(count, 1), np.nan)


def accuracy(prediction, y):
    """The share of rows whose largest entry is the true class: [..., row, class], int [row] -> [...]."""
    if prediction.shape[-2] != len(y):
        raise ValueError(f"prediction has {prediction.shape[-2]} rows, y has {len(y)}.")
    return (prediction.argmax(-1) == jnp.asarray(y)).mean(axis=-1)


def scores(prediction, y):
    """Accuracy and macro-averaged precision, recall and F1 of one prediction [row, class], by scikit-learn: a dict."""
    from sklearn.metrics import accuracy_score, precision_recall_fscore_support

    chosen = np.asarray(prediction).argmax(-1)
    precision, recall, f1, _ = precision_recall_fscore_support(y, chosen, average="macro", zero_division=0.0)
    return {"accuracy": accuracy_score(y, chosen), "precision": precision, "recall": recall, "f1": f1}


def member_scores(prediction, y):
    """`scores` of every member of prediction [member, row, class]: a pandas table, one line a member."""
    import pandas as pd

    return pd.DataFrame([scores(one, y) for one in np.asarray(prediction)]).rename_axis("member")


def confusion(prediction, y):
    """Counts int [true class, predicted class] of one prediction [row, class], by scikit-learn."""
    from sklearn.metrics import confusion_matrix

    prediction = np.asarray(prediction)
    return confusion_matrix(y, prediction.argmax(-1), labels=np.arange(prediction.shape[-1]))


def mean_confusion(prediction, y):
    """The average member's confusion matrix: prediction [member, row, class] -> float [true, predicted]."""
    return np.mean([confusion(one, y) for one in np.asarray(prediction)], axis=0)


def score_interval(prediction, y, *, resamples=1000, level=0.95, seed=0):
    """Percentile bootstrap over the rows of `scores`, averaged over members: {score: (low, high)}.

    prediction: [member, row, class] (one member for a single model or an ensemble); y: int [row]. The interval says how
    far the scores would move on another test set of this size (Efron and Tibshirani 1993, section 13.3).
    """
    prediction, y, rng = np.asarray(prediction), np.asarray(y), np.random.default_rng(seed)
    classes = prediction.shape[-1]
    cells = y * classes + prediction.argmax(-1)
    draws = []
    for _ in range(resamples):
        drawn = cells[:, rng.integers(len(y), size=len(y))]
        counts = np.stack([np.bincount(one, minlength=classes**2) for one in drawn])
        draws.append(_confusion_scores(counts.reshape(-1, classes, classes)).mean(axis=1))
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return dict(
        zip(("accuracy", "precision", "recall", "f1"), zip(low.tolist(), high.tolist(), strict=True), strict=True)
    )


def _confusion_scores(counts):
    """[score, member] of confusion matrices [member, true, predicted]; as scikit-learn, 0 where nothing was chosen."""
    right, true, chosen = np.diagonal(counts, axis1=1, axis2=2), counts.sum(2), counts.sum(1)
    precision, recall = right / np.maximum(chosen, 1), right / np.maximum(true, 1)
    f1 = 2 * right / np.maximum(true + chosen, 1)
    seen = (true + chosen) > 0  # a class that is neither there nor chosen has no score
    accuracy = right.sum(1) / counts.sum((1, 2))
    return np.stack([accuracy, *((score * seen).sum(1) / seen.sum(1) for score in (precision, recall, f1))])


def accuracy_by_size(logits, y, *, key, orders=20):
    """Accuracy of the mean-probability ensemble of the first 1, 2, ... members, in random orders: [order, size]."""

    @jax.jit
    def curves(probability, keys):
        def one(key):
            return accuracy(jnp.cumsum(jax.random.permutation(key, probability), axis=0), y)

        return jax.lax.map(one, keys)

    return curves(softmax(logits, axis=-1), jax.random.split(key, orders))


def disagreement(logits):
    """The share of pairs of members that choose different classes, for each row: [member, row, class] -> [row]."""
    members = len(logits)
    if members < 2:
        raise ValueError("Disagreement needs at least two members.")
    counts = ensemble_vote(logits) * members
    return 1 - (counts * (counts - 1)).sum(-1) / (members * (members - 1))


def true_class(prediction, y):
    """The entry of the true class: [..., row, class], int [row] -> [..., row]."""
    if prediction.ndim < 2 or prediction.shape[-2] != len(y):
        raise ValueError(f"A prediction of {len(y)} rows is [..., row, class], got shape {prediction.shape}.")
    index = jnp.broadcast_to(jnp.asarray(y)[:, None], (*prediction.shape[:-1], 1))
    return jnp.take_along_axis(jnp.asarray(prediction), index, axis=-1)[..., 0]
