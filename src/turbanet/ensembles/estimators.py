"""Bagging of small networks, trained together, as scikit-learn's classifiers and regressors."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Self

import jax
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from turbanet.ensembles.calibration import deviations, factor_of
from turbanet.ensembles.combine import ensemble_mean, out_of_bag
from turbanet.ensembles.swarm_estimator import SwarmEstimator
from turbanet.loss import mse, softmax_cross_entropy
from turbanet.training.fit import predict

UNSEEN_BY = 5  # members, by which a row counts for intervals: fewer do not tell how they differ


@dataclass(repr=False, eq=False)
class TurbaClassifier(ClassifierMixin, SwarmEstimator):
    """Bagged neural networks, trained together: `BaggingClassifier(MLPClassifier())` as one swarm.

    Parameters
    ----------
    members : how many networks
    model : a Flax module [row, feature] -> [row, class] of logits; None is an MLP, its weights drawn as scikit-learn's
        (Glorot's uniform), its biases zero
    hidden : units of the MLP's hidden layers; a `model` of your own has no use for them
    learning_rate, weight_decay : of AdamW, per step
    epochs : passes over a member's rows
    batch_size : rows in a step
    bootstrap : each member sees its own draw of the rows, with repetition; else all see all
    oob_score : `oob_score_` and `oob_decision_function_` [row, class] from the members that did not see a row
    class_weight : None, "balanced" or {class: weight}, as in scikit-learn
    early_stopping : whether each member stops by itself, with its best weights, when its loss on rows that are set
        aside for that has not become smaller by `tol` in `n_iter_no_change` epochs
    validation_fraction : the share of the rows that are set aside, of each class alike
    warm_start : whether `fit` goes on with the members that are there
    plan : where members run (see `turbanet.fit`)
    cluster : a `turbanet.cluster.Cluster` to train the members on, or None for this machine
    random_state : int, RandomState or None

    Attributes
    ----------
    swarm_ : the trained TurbaTrainState, whose predictions are logits
    history_ : what `turbanet.fit` saw, a `History`
    classes_, n_features_in_, feature_names_in_, n_iter_ : as in scikit-learn

    Examples
    --------
    >>> import numpy as np
    >>> from turbanet.estimators import TurbaClassifier
    >>> x = np.linspace(-1, 1, 64)[:, None]
    >>> y = np.where(x[:, 0] > 0, "right", "left")
    >>> classifier = TurbaClassifier(members=3, hidden=(8,), learning_rate=0.05, epochs=20, random_state=0).fit(x, y)
    >>> print(classifier.predict([[-0.5], [0.5]]))
    ['left' 'right']
    """

    _: KW_ONLY
    class_weight: Mapping | str | None = None

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X [row, feature] and y [row], classes of any kind; sample_weight [row] weighs rows in the loss."""
        goes_on = self.warm_start and hasattr(self, "swarm_")
        x, labels = self._validated(X, y, reset=not goes_on)
        check_classification_targets(labels)
        classes = np.unique(labels)
        if goes_on and not np.array_equal(classes, self.classes_):
            raise ValueError(f"warm_start needs the classes {self.classes_} again, y holds {classes}.")
        self._begin(goes_on=goes_on)
        self.classes_ = classes
        index, weight = self._weighed(x, labels, sample_weight)
        outputs = len(classes)
        rows, held_out = self._train(x, index, outputs, softmax_cross_entropy, weight, classes=index, goes_on=goes_on)
        if self.oob_score:
            self.oob_decision_function_, seen = self._unseen_by_some(self._probabilities(x), rows, held_out)
            chosen = self.oob_decision_function_[seen].argmax(axis=1)
            weight = self._weights(x, sample_weight)  # without those of classes
            weights = {} if weight is None else {"sample_weight": weight[seen]}
            self.oob_score_ = accuracy_score(index[seen], chosen, **weights)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train for one more epoch on these rows; `classes`: all that will ever come, needed in the first call."""
        self._check_partial()
        if isinstance(self.class_weight, str):
            advice = "give {class: weight}, as a batch does not tell how often a class comes"
            raise ValueError(f"partial_fit does not support class_weight={self.class_weight!r}: {advice}.")
        first = not hasattr(self, "swarm_")
        if first and classes is None:
            raise ValueError("The first call of partial_fit needs classes=, all that will ever come.")
        x, labels = self._validated(X, y, reset=first)
        check_classification_targets(labels)
        known = self.classes_ if classes is None else np.unique(classes)
        if not first and not np.array_equal(known, self.classes_):
            raise ValueError(f"partial_fit began with the classes {self.classes_}, now it is given {known}.")
        self._begin(goes_on=True)
        self.classes_ = known
        if len(unknown := np.setdiff1d(labels, known)):
            raise ValueError(f"y holds {unknown[0]!r}, which is none of the classes {known}.")
        index, weight = self._weighed(x, labels, sample_weight)
        self._train(x, index, len(known), softmax_cross_entropy, weight, classes=index, goes_on=True, epochs=1)
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """The mean over members of the probabilities: [row, class]."""
        return np.asarray(ensemble_mean(self._of_sound(self._members(X))), dtype=np.float64)

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """The logarithm of `predict_proba`: [row, class]."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Every member's probabilities: [member, row, class]."""
        check_is_fitted(self, "swarm_")
        return self._probabilities(self._validated(X, reset=False))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The likeliest class: [row]."""
        chosen = self.predict_proba(X).argmax(axis=1)
        return self.classes_[chosen]

    def _probabilities(self, x):
        return np.asarray(jax.nn.softmax(predict(self.swarm_, x)), dtype=np.float64)

    def _weighed(self, x, labels, sample_weight):
        """(int32 [row], which of `classes_` each label is; its weight [row] or None)."""
        weight = self._weights(x, sample_weight)
        if self.class_weight is not None:
            of_class = compute_sample_weight(self.class_weight, labels).astype(np.float32)
            weight = of_class if weight is None else weight * of_class
        return np.searchsorted(self.classes_, labels).astype(np.int32), weight


@dataclass(repr=False, eq=False)
class TurbaRegressor(MultiOutputMixin, RegressorMixin, SwarmEstimator):
    """Bagged neural networks, trained together: `BaggingRegressor(MLPRegressor())` as one swarm.

    Targets are brought to mean 0 and standard deviation 1 for the training: `swarm_` predicts such ones, and
    `predict_members` targets in y's unit. Training that goes on (`warm_start`, `partial_fit`) keeps those of the
    first rows. Parameters and attributes are `TurbaClassifier`'s but for `class_weight`; `model` maps [row, feature]
    to [row, target], `oob_prediction_` is [row] or [row, target].
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X [row, feature] and y [row] or [row, target]; sample_weight [row] weighs rows in the loss."""
        goes_on = self.warm_start and hasattr(self, "swarm_")
        x, targets = self._validated(X, y, multi_output=True, y_numeric=True, reset=not goes_on)
        weight = self._weights(x, sample_weight)
        self._begin(goes_on=goes_on)
        scaled = self._scaled(targets, weight, anew=not goes_on)
        rows, held_out = self._train(x, scaled, scaled.shape[1], mse, weight, goes_on=goes_on)
        if self.oob_score:
            self._score_out_of_bag(np.asarray(predict(self.swarm_, x), np.float64), rows, held_out, targets, weight)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train for one more epoch on these rows."""
        self._check_partial()
        first = not hasattr(self, "swarm_")
        x, targets = self._validated(X, y, multi_output=True, y_numeric=True, reset=first)
        weight = self._weights(x, sample_weight)
        self._begin(goes_on=True)
        scaled = self._scaled(targets, weight, anew=first)
        self._train(x, scaled, scaled.shape[1], mse, weight, goes_on=True, epochs=1)
        return self

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Every member's prediction in y's unit, as `prediction_interval` takes them: [member, row] or with targets."""
        return self._unscaled(np.asarray(self._members(X), dtype=np.float64))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The mean over members: [row] or [row, target]."""
        return self._of_sound(self.predict_members(X)).mean(axis=0)

    def predict_interval(self, X: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """(low, high) in y's unit, each of the shape of `predict`, between which `level` of new targets fall.

        The mean and as many standard deviations over members as hold `level` of the training rows by the members that
        did not see them (jackknife+ after bootstrap, Kim et al. 2020, with normalised scores), target by target, each
        row counting as one. It needs `oob_score=True`, about 20 members or more, and rows that come from where the
        training's did.
        """
        check_is_fitted(self, "swarm_")
        if not hasattr(self, "oob_deviations_"):
            raise ValueError("predict_interval is calibrated on out-of-bag rows: fit with oob_score=True.")
        if not 0 < level < 1:
            raise ValueError(f"level is the share of targets inside, between 0 and 1; got {level}.")
        if not len(self.oob_deviations_):
            raise ValueError(f"No row was unseen by {UNSEEN_BY} members, too few to differ: take about 20.")
        members = self._of_sound(self.predict_members(X))
        factors = np.array([factor_of(of_target, level) for of_target in self.oob_deviations_.T])
        centre, spread = members.mean(axis=0), members.std(axis=0, ddof=1)
        factor = factors[0] if self._single else factors
        half_width = np.where(np.isinf(factor), np.inf, np.where(np.isinf(factor), 0, factor) * spread)
        return centre - half_width, centre + half_width

    def _scaled(self, targets, weight, *, anew):
        """float32 [row, target] of mean 0 and deviation 1, by these rows' own, or by those of the first call."""
        single = targets.ndim == 1
        targets = np.asarray(targets, np.float64).reshape(len(targets), -1)  # centred before they are rounded
        if anew:
            self._single = single
            self._mean = np.average(targets, axis=0, weights=weight)
            spread = np.sqrt(np.average((targets - self._mean) ** 2, axis=0, weights=weight))
            self._spread = np.where(spread > 0, spread, 1)
        if (single, targets.shape[1]) != (self._single, len(self._mean)):
            was = len(self._mean)
            raise ValueError(f"y had {was} target(s) before and has {targets.shape[1]}: give as many again.")
        return ((targets - self._mean) / self._spread).astype(np.float32)

    def _unscaled(self, y):
        y = y * self._spread + self._mean
        return y[..., 0] if self._single else y

    def _score_out_of_bag(self, members, rows, held_out, targets, weight):
        """Of the members' scaled predictions [member, row, target] for the rows that each did not see."""
        centre, seen = self._unseen_by_some(members, rows, held_out)
        members, rows = self._of_sound(members), self._of_sound(rows)
        self.oob_prediction_ = self._unscaled(centre)
        weights = {} if weight is None else {"sample_weight": weight[seen]}
        self.oob_score_ = r2_score(targets[seen], self.oob_prediction_[seen], **weights)
        unseen_by = sum((np.bincount(of_member, minlength=len(targets)) == 0).astype(int) for of_member in rows)
        some = seen & (unseen_by >= UNSEEN_BY) & (True if weight is None else weight > 0)
        variance = out_of_bag(members**2, rows)[some] - centre[some] ** 2
        spread = np.sqrt(np.maximum(variance, 0) * (unseen_by[some] / (unseen_by[some] - 1))[:, None])
        scaled = self._scaled(targets, weight, anew=False)[some]
        self.oob_deviations_ = deviations(scaled, centre[some], spread)  # [row, target]
