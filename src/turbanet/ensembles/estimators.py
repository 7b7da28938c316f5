"""Bagged small networks as scikit-learn classifiers and regressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from turbanet.core.arrays import check_float32, divisor
from turbanet.ensembles.calibration import deviations, factor_of, interval, rows_for
from turbanet.ensembles.combine import mean_probabilities
from turbanet.ensembles.predictions import check_nan
from turbanet.ensembles.swarm_estimator import SwarmEstimator
from turbanet.loss import mse, quantile_loss, softmax_cross_entropy

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
    activation, dropout : of its hidden layers: scikit-learn's "relu", "tanh", "logistic", "identity" or a function, and
        the share of units that a step leaves out
    loss : loss(params, x, y, apply_fn) -> (scalar, prediction) of logits and y int [row]; None: the cross-entropy. With
        sample or class weights it must take weight= (see `mean_over_rows`)
    learning_rate, weight_decay : of AdamW, per step
    epochs : passes over a member's rows
    batch_size : rows in a step
    bootstrap : whether each member is trained on a bootstrap sample of the rows, else on all rows
    oob_score : whether to compute the out-of-bag `oob_score_` and `oob_decision_function_` [row, class]
    class_weight : None, "balanced" or {class: weight}, as in scikit-learn
    early_stopping : whether each member stops, with its best weights, when its loss on held-out rows has not improved
        by `tol` for `n_iter_no_change` epochs
    validation_fraction : share of the rows held out for early stopping, stratified by class
    warm_start : whether `fit` continues with the trained members; with bootstrap, on the same rows if `random_state` is
        an int, on rows drawn anew otherwise
    callbacks : as `turbanet.fit` takes them; of a `TurbaSearchCV` they see the members of many candidates
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

    classes_: np.ndarray = field(init=False)

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train for one more epoch on these rows; the first call needs `classes`, all that will ever occur."""
        if isinstance(self.class_weight, str):
            advice = "give {class: weight}, as a batch does not tell how often a class comes"
            raise ValueError(f"partial_fit does not support class_weight={self.class_weight!r}: {advice}.")
        if classes is None and not hasattr(self, "swarm_"):
            raise ValueError("The first call of partial_fit needs classes=, all that will ever come.")
        classes = self.classes_ if classes is None else np.unique(classes)
        return self._fit(X, y, sample_weight, partial=True, classes=classes)

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the mean over members of the class probabilities [row, class]."""
        logits = self._exclude_diverged(self._predict_members(X))
        check_nan(logits, "logits")
        probability = np.asarray(mean_probabilities(logits, None), dtype=np.float64)
        return probability / probability.sum(axis=1, keepdims=True)  # float32's sum is 1 to seven digits

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the logarithm of `predict_proba` [row, class]."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable class [row]."""
        index = self.predict_proba(X).argmax(axis=1)
        return self.classes_[index]

    _mean_kind = "probability"

    def _decoder(self):
        return jax.nn.softmax

    def _decode(self, logits):
        return np.asarray(jax.nn.softmax(logits), dtype=np.float64)

    def _encode(self, labels, weight, resume, classes, balanced_by=None):
        """Set `classes_`, and return (int32 [row], number of classes, loss function, weight [row] or None).

        balanced_by : the labels whose shares "balanced" classes are weighted by; None: these
        """
        check_classification_targets(labels)
        classes = np.unique(labels) if classes is None else classes
        if resume and not np.array_equal(classes, self.classes_):
            advice = "give the same again, or begin anew"
            raise ValueError(f"Members of the classes {self.classes_} cannot go on with {classes}: {advice}.")
        if len(unknown := np.setdiff1d(labels, classes)):
            raise ValueError(f"y holds {unknown.tolist()[0]!r}, which is none of the classes {classes}.")
        self.classes_ = classes
        encoded = np.searchsorted(classes, labels).astype(np.int32)
        if self.class_weight is not None:
            y = labels if balanced_by is None else balanced_by
            of_class = compute_class_weight(self.class_weight, classes=classes, y=y).astype(np.float32)
            if not (np.isfinite(of_class) & (of_class >= 0)).all():
                raise ValueError(f"class_weight must be finite numbers of at least 0, got {self.class_weight!r}.")
            weight = of_class[encoded] if weight is None else weight * of_class[encoded]
        if not (self.loss is None or callable(self.loss)):
            raise ValueError(f"loss is None, for the cross-entropy, or a function; got {self.loss!r}.")
        return encoded, len(classes), self.loss or softmax_cross_entropy, weight

    def _score_out_of_bag(self, logits, rows, held_out, labels, weight):
        unseen, covered, weight = self._out_of_bag(self._decode(logits), rows, held_out, weight)
        self.oob_decision_function_ = unseen.mean(axis=0).filled(np.nan)
        predicted = self.classes_[self.oob_decision_function_[covered].argmax(axis=1)]
        self.oob_score_ = accuracy_score(labels[covered], predicted, sample_weight=weight)


@dataclass(repr=False, eq=False)
class TurbaRegressor(MultiOutputMixin, RegressorMixin, SwarmEstimator):
    """Bagged neural networks trained as one swarm: scikit-learn's `BaggingRegressor(MLPRegressor())`.

    Targets are standardised to mean 0 and standard deviation 1 for training. `swarm_` predicts standardised targets,
    `predict_members` targets in y's unit. Continued training (`warm_start`, `partial_fit`) standardises as the first
    call did. Parameters and attributes are those of `TurbaClassifier` without `class_weight`; `model` maps
    [row, feature] to [row, target], and `oob_prediction_` is [row] or [row, target].

    loss : "squared_error", "quantile" for the quantile `quantile` of y, or a loss of y [row, target], standardised
    """

    _: KW_ONLY
    loss: Any = "squared_error"
    quantile: float = 0.5

    def _loss(self):
        if callable(self.loss):
            return self.loss
        if self.loss not in ("squared_error", "quantile"):
            raise ValueError(f'loss is "squared_error", "quantile" or a function; got {self.loss!r}.')
        return mse if self.loss == "squared_error" else quantile_loss(self.quantile)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train for one more epoch on these rows."""
        return self._fit(X, y, sample_weight, partial=True)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the mean over members, [row] or [row, target]."""
        return self._exclude_diverged(self.predict_members(X)).mean(axis=0)

    def predict_interval(self, X: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds (low, high) in y's unit, each of `predict`'s shape, that contain `level` of new targets.

        The bounds are the mean plus or minus as many standard deviations over members as cover `level` of the training
        rows, each predicted by its out-of-bag members (out-of-bag residuals, after Kim et al. 2020). Each target is
        calibrated by itself, and rows are not weighted. This needs `oob_score=True`, about 20 members or more, and new
        rows from the distribution of the training rows. With few members the bounds hold more than `level`, as a
        training row is predicted by fewer of them than a new one.
        """
        if not hasattr(self, "oob_deviations_"):
            raise ValueError("predict_interval is calibrated on out-of-bag rows: fit with oob_score=True.")
        if not 0 < level < 1:
            raise ValueError(f"level is the share of targets inside, between 0 and 1; got {level}.")
        rows, needed = len(self.oob_deviations_), rows_for(level)
        if rows < needed:
            unseen = f"rows that {MIN_OOB_MEMBERS} members did not see"
            advice = "about 20 members" if len(self.oob_prediction_) > needed else "a lower level, or more rows"
            raise ValueError(f"A level of {level} needs {needed} {unseen}, there are {rows}: take {advice}.")
        members = self._exclude_diverged(self.predict_members(X))
        factors = factor_of(self.oob_deviations_, level)
        centre, spread = members.mean(axis=0), members.std(axis=0, ddof=1)
        return interval(centre, spread, factors[0] if self._single else factors)

    _mean_kind = "mean"

    def _decoder(self):
        """Return `_decode` as a function in a program, which computes in float32."""
        check_float32(self._mean, self._spread)
        mean, spread, single = jnp.float32(self._mean), jnp.float32(self._spread), self._single

        def decode(standardised):
            y = standardised * spread + mean
            return y[..., 0] if single else y

        return decode

    def _decode(self, standardised):
        y = np.asarray(standardised, np.float64) * self._spread + self._mean
        return y[..., 0] if self._single else y

    def _encode(self, targets, weight, resume, classes=None, balanced_by=None):
        """Return (float32 [row, target], number of targets, loss function, weight), standardised as at first."""
        single = targets.ndim == 1
        targets = np.asarray(targets, np.float64).reshape(len(targets), -1)  # centred before rounding to float32
        if not resume:
            self._single = single
            self._mean = np.average(targets, axis=0, weights=weight)
            spread = np.sqrt(np.average((targets - self._mean) ** 2, axis=0, weights=weight))
            self._spread = divisor(spread, self._mean)
        if (single, targets.shape[1]) != (self._single, len(self._mean)):
            before = "[row]" if self._single else f"[row, {len(self._mean)}]"
            received = "[row]" if single else f"[row, {targets.shape[1]}]"
            raise ValueError(f"y was {before} before and is {received}: give as many targets again.")
        return ((targets - self._mean) / self._spread).astype(np.float32), targets.shape[1], self._loss(), weight

    def _score_out_of_bag(self, standardised, rows, held_out, targets, weight):
        unseen, covered, weight = self._out_of_bag(np.asarray(standardised, np.float64), rows, held_out, weight)
        centre = unseen.mean(axis=0).filled(np.nan)
        self.oob_prediction_ = self._decode(centre)
        self.oob_score_ = r2_score(targets[covered], self.oob_prediction_[covered], sample_weight=weight)
        used = unseen[..., 0].count(axis=0) >= MIN_OOB_MEMBERS
        used[covered] &= True if weight is None else weight > 0
        scaled, *_ = self._encode(targets, weight, resume=True)
        spread = unseen[:, used].std(axis=0, ddof=1).data
        self.oob_deviations_ = deviations(scaled[used], centre[used], spread)  # [row, target]
