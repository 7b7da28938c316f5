"""Members combined into one prediction, and the scores of each member, of their average and of the ensemble."""

import jax.numpy as jnp
import numpy as np
from jax.nn import softmax


def ensemble_mean(logits):
    """The mean over members of the class probabilities: logits [member, row, class] -> [row, class]."""
    return softmax(logits, axis=-1).mean(axis=0)


def ensemble_vote(logits):
    """The share of members that vote for each class: [member, row, class] -> [row, class]; argmax is the majority's."""
    classes = jnp.arange(logits.shape[-1])
    return (logits.argmax(-1)[..., None] == classes).mean(axis=0)


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


def disagreement(logits):
    """The share of pairs of members that choose different classes, for each row: [member, row, class] -> [row]."""
    members = len(logits)
    if members < 2:
        raise ValueError("Disagreement needs at least two members.")
    counts = ensemble_vote(logits) * members
    return 1 - (counts * (counts - 1)).sum(-1) / (members * (members - 1))
