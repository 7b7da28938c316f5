"""A swarm as a scikit-learn estimator: bagging of small networks, trained together."""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.initializers import glorot_uniform
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from turbanet.ensembles.combine import ensemble_mean, out_of_bag
from turbanet.loss import mse, softmax_cross_entropy
from turbanet.networks import convnets, models
from turbanet.training import fit as fit_module
from turbanet.training.fit import fit, predict
from turbanet.training.member import predict as predict_member
from turbanet.training.plan import Plan
from turbanet.turba_train_state import TurbaTrainState

# What an estimator's pickle of version 0.5 names: the modules' places before they moved into folders.
sys.modules.update({"turbanet.fit": fit_module, "turbanet.models": models, "turbanet.convnets": convnets})


@dataclass(repr=False, eq=False)  # for __init__ alone: the rest is scikit-learn's
class _Swarm(BaseEstimator):
    """What classifier and regressor share: their parameters, the training, the members' predictions."""

    members: int = 10
    _: KW_ONLY
    model: Any = None
    hidden: Sequence[int] = (100,)
    learning_rate: float = 0.001
    weight_decay: float = 0.0
    epochs: int = 100
    batch_size: int = 32
    bootstrap: bool = True
    oob_score: bool = False
    plan: Plan | str | None = None
    cluster: Any = None
    random_state: int | np.random.RandomState | None = None

    def _train(self, x, y, outputs, loss_fn):
        if self.oob_score and not self.bootstrap:
            raise ValueError("oob_score needs bootstrap=True: without it every member sees every row.")
        if isinstance(self.hidden, int | np.integer):
            raise ValueError(f"hidden must be a sequence of layers' units such as ({self.hidden},), got {self.hidden}.")
        random = check_random_state(self.random_state)
        identity = {"swarm_size": self.members, "sample_input": x[:1], "seed": int(random.randint(2**31 - 1))}
        rows: Any = random.randint(len(x), size=(self.members, len(x))) if self.bootstrap else None
        optimizer = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        self._made = self.model, (*self.hidden, outputs), optimizer, identity
        job: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size, "plan": self.plan}
        swarm = _untrained(*self._made)
        found = jax.eval_shape(predict_member, swarm.get_state(0), x[:1]).shape
        if found != (1, outputs):
            task = f"{outputs} classes need logits" if loss_fn is softmax_cross_entropy else f"{outputs} target(s) need"
            raise ValueError(f"{task} [row, {outputs}], the model gives {list(found)}: change its last layer.")
        train: Any = fit if self.cluster is None else self.cluster.fit
        self.swarm_, self.history_ = train(swarm, x, y, loss_fn, rows=rows, progress=False, **job)
        self.n_iter_ = self.epochs
        if self.oob_score:
            self._score_out_of_bag(out_of_bag(self.predict_members(x), rows), y)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What pickle can hold: the swarm's arrays without its functions, the history without its devices."""
        state = dict(super().__getstate__())
        if "swarm_" in state:
            state["swarm_"] = [np.asarray(leaf) for leaf in jax.tree.leaves(self.swarm_)]
            state["history_"] = replace(self.history_, plan=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "swarm_" in state:
            leaves, like = jax.tree.flatten(_untrained(*self._made))
            if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in state["swarm_"]]:
                raise ValueError("The pickled network's layers have other names or sizes by now: train it anew.")
            self.swarm_ = jax.tree.unflatten(like, [jnp.asarray(leaf) for leaf in state["swarm_"]])

    def _members(self, x):
        check_is_fitted(self)
        return predict(self.swarm_, validate_data(self, x, dtype=np.float32, reset=False))


def _untrained(model, widths, optimizer, identity):
    """The swarm before its training."""
    if model is None:
        model = models.MLP(widths, kernel_init=glorot_uniform())  # as scikit-learn draws its networks' weights
    return TurbaTrainState.swarm(model, optax.adamw(**optimizer), **identity)


class TurbaClassifier(ClassifierMixin, _Swarm):
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
    plan : where members run (see `turbanet.fit`)
    cluster : a `turbanet.Cluster` to train the members on, or None for this machine
    random_state : int, RandomState or None

    Attributes
    ----------
    swarm_ : the trained TurbaTrainState, whose predictions are logits
    history_ : what `turbanet.fit` saw, a `History`
    classes_, n_features_in_, n_iter_ : as in scikit-learn

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

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on X [row, feature] and y [row], classes of any kind."""
        x, labels = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(labels)
        self.classes_, index = np.unique(labels, return_inverse=True)
        return self._train(x, index.astype(np.int32), len(self.classes_), softmax_cross_entropy)

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """The mean over members of the probabilities: [row, class]."""
        return np.asarray(ensemble_mean(self._members(X)), dtype=np.float64)

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Every member's probabilities: [member, row, class]."""
        return np.asarray(jax.nn.softmax(self._members(X)), dtype=np.float64)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The likeliest class: [row]."""
        chosen = self.predict_proba(X).argmax(axis=1)
        return self.classes_[chosen]

    def _score_out_of_bag(self, prediction, y):
        self.oob_decision_function_ = prediction
        seen = ~np.isnan(prediction[:, 0])
        self.oob_score_ = accuracy_score(y[seen], prediction[seen].argmax(axis=1))


class TurbaRegressor(MultiOutputMixin, RegressorMixin, _Swarm):
    """Bagged neural networks, trained together: `BaggingRegressor(MLPRegressor())` as one swarm.

    Targets are brought to mean 0 and standard deviation 1 for the training: `swarm_` predicts such ones, and
    `predict_members` targets in y's unit. Parameters and attributes are `TurbaClassifier`'s; `model` maps
    [row, feature] to [row, target], `oob_prediction_` is [row] or [row, target].
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train on X [row, feature] and y [row] or [row, target]."""
        x, targets = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        self._single = targets.ndim == 1
        targets = np.asarray(targets, np.float64).reshape(len(targets), -1)  # centred before they are rounded
        spread = targets.std(0)
        self._mean = targets.mean(0)
        self._spread = np.where(spread > 0, spread, 1)
        scaled = (targets - self._mean) / self._spread
        return self._train(x, scaled.astype(np.float32), targets.shape[1], mse)

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Every member's prediction in y's unit, as `prediction_interval` takes them: [member, row] or with targets."""
        return self._unscaled(np.asarray(self._members(X), dtype=np.float64))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The mean over members: [row] or [row, target]."""
        return self.predict_members(X).mean(axis=0)

    def _unscaled(self, y):
        y = y * self._spread + self._mean
        return y[..., 0] if self._single else y

    def _score_out_of_bag(self, prediction, y):
        self.oob_prediction_ = prediction
        seen = ~np.isnan(prediction).reshape(len(y), -1).any(axis=1)
        self.oob_score_ = r2_score(self._unscaled(y)[seen], prediction[seen])
