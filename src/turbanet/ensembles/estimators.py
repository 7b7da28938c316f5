"""Bagged small networks as scikit-learn classifiers and regressors."""

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

MIN_OOB_MEMBERS = 5  # out-of-bag members of a row that intervals use: the spread of fewer is too uncertain


@dataclass(repr=False, eq=False)
class TurbaClassifier(ClassifierMixin, SwarmEstimator):
    """Bagged neural networks trained as one swarm: scikit-learn's `BaggingClassifier(MLPClassifier())`.

    Parameters
    ----------
    members : number of networks
    model : a Flax module [row, feature] -> [row, class] of logits; None: an MLP with Glorot-uniform weights, as in
        scikit-learn, and zero biases
    hidden : units of the MLP's hidden layers; unused with a `model` of your own
    learning_rate, weight_decay : of AdamW, per step
    epochs : passes over a member's rows
    batch_size : rows in a step
    bootstrap : whether each member is trained on a bootstrap sample of the rows, else on all rows
    oob_score : whether to compute the out-of-bag `oob_score_` and `oob_decision_function_` [row, class]
    class_weight : None, "balanced" or {class: weight}, as in scikit-learn
    early_stopping : whether each member stops, with its best weights, when its loss on held-out rows has not improved
        by `tol` for `n_iter_no_change` epochs
    validation_fraction : share of the rows held out for early stopping, stratified by class
    warm_start : whether `fit` continues with the trained members
    plan : where and in what blocks members are trained (see `turbanet.fit`)
    cluster : a `turbanet.cluster.Cluster` to train the members on, or None for this machine
    random_state : int, RandomState or None

    Attributes
    ----------
    swarm_ : the trained TurbaTrainState, which predicts logits
    history_ : the `History` of its training
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
        """Train on X [row, feature] and y [row], classes of any type; sample_weight [row] weights rows in the loss."""
        resume = self.warm_start and hasattr(self, "swarm_")
        x, labels = self._validate_inputs(X, y, reset=not resume)
        check_classification_targets(labels)
        classes = np.unique(labels)
        if resume and not np.array_equal(classes, self.classes_):
            raise ValueError(f"warm_start needs the classes {self.classes_} again, y holds {classes}.")
        self._discard_results(resume=resume)
        self.classes_ = classes
        index, weight = self._encode_labels(x, labels, sample_weight)
        outputs = len(classes)
        rows, held_out = self._train(x, index, outputs, softmax_cross_entropy, weight, classes=index, resume=resume)
        if self.oob_score:
            self.oob_decision_function_, covered = self._out_of_bag(self._probabilities(x), rows, held_out)
            predicted = self.oob_decision_function_[covered].argmax(axis=1)
            weight = self._check_weights(x, sample_weight)  # without the class weights
            weights = {} if weight is None else {"sample_weight": weight[covered]}
            self.oob_score_ = accuracy_score(index[covered], predicted, **weights)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train for one more epoch on these rows; the first call needs `classes`, all that will ever occur."""
        self._check_partial_fit()
        if isinstance(self.class_weight, str):
            advice = "give {class: weight}, as a batch does not tell how often a class comes"
            raise ValueError(f"partial_fit does not support class_weight={self.class_weight!r}: {advice}.")
        first = not hasattr(self, "swarm_")
        if first and classes is None:
            raise ValueError("The first call of partial_fit needs classes=, all that will ever come.")
        x, labels = self._validate_inputs(X, y, reset=first)
        check_classification_targets(labels)
        classes = self.classes_ if classes is None else np.unique(classes)
        if not first and not np.array_equal(classes, self.classes_):
            raise ValueError(f"partial_fit began with the classes {self.classes_}, now it is given {classes}.")
        self._discard_results(resume=True)
        self.classes_ = classes
        if len(unknown := np.setdiff1d(labels, classes)):
            raise ValueError(f"y holds {unknown[0]!r}, which is none of the classes {classes}.")
        index, weight = self._encode_labels(x, labels, sample_weight)
        self._train(x, index, len(classes), softmax_cross_entropy, weight, classes=index, resume=True, epochs=1)
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the mean over members of the class probabilities [row, class]."""
        return np.asarray(ensemble_mean(self._exclude_diverged(self._predict_members(X))), dtype=np.float64)

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the logarithm of `predict_proba` [row, class]."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Return each member's class probabilities [member, row, class]."""
        check_is_fitted(self, "swarm_")
        return self._probabilities(self._validate_inputs(X, reset=False))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable class [row]."""
        index = self.predict_proba(X).argmax(axis=1)
        return self.classes_[index]

    def _probabilities(self, x):
        return np.asarray(jax.nn.softmax(predict(self.swarm_, x)), dtype=np.float64)

    def _encode_labels(self, x, labels, sample_weight):
        """Return (int32 [row], the position of each label in `classes_`; its weight [row] or None)."""
        weight = self._check_weights(x, sample_weight)
        if self.class_weight is not None:
            of_class = compute_sample_weight(self.class_weight, labels).astype(np.float32)
            weight = of_class if weight is None else weight * of_class
        return np.searchsorted(self.classes_, labels).astype(np.int32), weight


@dataclass(repr=False, eq=False)
class TurbaRegressor(MultiOutputMixin, RegressorMixin, SwarmEstimator):
    """Bagged neural networks trained as one swarm: scikit-learn's `BaggingRegressor(MLPRegressor())`.

    Targets are standardised to mean 0 and standard deviation 1 for training. `swarm_` predicts standardised targets,
    `predict_members` targets in y's unit. Continued training (`warm_start`, `partial_fit`) standardises as the first
    call did. Parameters and attributes are those of `TurbaClassifier` without `class_weight`; `model` maps
    [row, feature] to [row, target], and `oob_prediction_` is [row] or [row, target].
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X [row, feature] and y [row] or [row, target]; sample_weight [row] weights rows in the loss."""
        resume = self.warm_start and hasattr(self, "swarm_")
        x, targets = self._validate_inputs(X, y, multi_output=True, y_numeric=True, reset=not resume)
        weight = self._check_weights(x, sample_weight)
        self._discard_results(resume=resume)
        scaled = self._standardise(targets, weight, refit=not resume)
        rows, held_out = self._train(x, scaled, scaled.shape[1], mse, weight, resume=resume)
        if self.oob_score:
            self._score_out_of_bag(np.asarray(predict(self.swarm_, x), np.float64), rows, held_out, targets, weight)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train for one more epoch on these rows."""
        self._check_partial_fit()
        first = not hasattr(self, "swarm_")
        x, targets = self._validate_inputs(X, y, multi_output=True, y_numeric=True, reset=first)
        weight = self._check_weights(x, sample_weight)
        self._discard_results(resume=True)
        scaled = self._standardise(targets, weight, refit=first)
        self._train(x, scaled, scaled.shape[1], mse, weight, resume=True, epochs=1)
        return self

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Return members' predictions in y's unit, for `prediction_interval`, [member, row] or with targets."""
        return self._unstandardise(np.asarray(self._predict_members(X), dtype=np.float64))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the mean over members, [row] or [row, target]."""
        return self._exclude_diverged(self.predict_members(X)).mean(axis=0)

    def predict_interval(self, X: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds (low, high) in y's unit, each of `predict`'s shape, that contain `level` of new targets.

        The bounds are the mean plus or minus as many standard deviations over members as cover `level` of the training
        rows, each predicted by its out-of-bag members (jackknife+ after bootstrap, Kim et al. 2020, with normalised
        scores). Each target is calibrated by itself, and rows are not weighted. This needs `oob_score=True`, about 20
        members or more, and new rows from the distribution of the training rows.
        """
        check_is_fitted(self, "swarm_")
        if not hasattr(self, "oob_deviations_"):
            raise ValueError("predict_interval is calibrated on out-of-bag rows: fit with oob_score=True.")
        if not 0 < level < 1:
            raise ValueError(f"level is the share of targets inside, between 0 and 1; got {level}.")
        if not len(self.oob_deviations_):
            raise ValueError(f"No row was unseen by {MIN_OOB_MEMBERS} members, too few to differ: take about 20.")
        members = self._exclude_diverged(self.predict_members(X))
        factors = np.array([factor_of(of_target, level) for of_target in self.oob_deviations_.T])
        centre, spread = members.mean(axis=0), members.std(axis=0, ddof=1)
        factor = factors[0] if self._single else factors
        half_width = np.where(np.isinf(factor), np.inf, np.where(np.isinf(factor), 0, factor) * spread)
        return centre - half_width, centre + half_width

    def _standardise(self, targets, weight, *, refit):
        """Return targets as float32 [row, target], standardised by these rows if `refit`, else as in the first call."""
        single = targets.ndim == 1
        targets = np.asarray(targets, np.float64).reshape(len(targets), -1)  # centred before rounding to float32
        if refit:
            self._single = single
            self._mean = np.average(targets, axis=0, weights=weight)
            spread = np.sqrt(np.average((targets - self._mean) ** 2, axis=0, weights=weight))
            self._spread = np.where(spread > 0, spread, 1)
        if (single, targets.shape[1]) != (self._single, len(self._mean)):
            before = len(self._mean)
            raise ValueError(f"y had {before} target(s) before and has {targets.shape[1]}: give as many again.")
        return ((targets - self._mean) / self._spread).astype(np.float32)

    def _unstandardise(self, y):
        y = y * self._spread + self._mean
        return y[..., 0] if self._single else y

    def _score_out_of_bag(self, members, rows, held_out, targets, weight):
        """Set the out-of-bag attributes from the members' standardised predictions [member, row, target]."""
        centre, covered = self._out_of_bag(members, rows, held_out)
        members, rows = self._exclude_diverged(members), self._exclude_diverged(rows)
        self.oob_prediction_ = self._unstandardise(centre)
        weights = {} if weight is None else {"sample_weight": weight[covered]}
        self.oob_score_ = r2_score(targets[covered], self.oob_prediction_[covered], **weights)
        counts = sum((np.bincount(of_member, minlength=len(targets)) == 0).astype(int) for of_member in rows)
        used = covered & (counts >= MIN_OOB_MEMBERS) & (True if weight is None else weight > 0)
        variance = out_of_bag(members**2, rows)[used] - centre[used] ** 2
        spread = np.sqrt(np.maximum(variance, 0) * (counts[used] / (counts[used] - 1))[:, None])
        scaled = self._standardise(targets, weight, refit=False)[used]
        self.oob_deviations_ = deviations(scaled, centre[used], spread)  # [row, target]
