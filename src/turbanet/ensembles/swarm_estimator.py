"""Base class of scikit-learn estimators that are swarms: parameters, training and pickling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.linen.initializers import glorot_uniform
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, is_classifier, is_regressor
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from turbanet.checkpoints.fitted import Fitted, numbers_of, with_numbers
from turbanet.core import member
from turbanet.core.arrays import check_whole
from turbanet.core.fingerprint import fingerprint
from turbanet.core.plan import Plan, check_cluster
from turbanet.core.schedules import with_hyperparameters
from turbanet.data.checks import one_prediction
from turbanet.ensembles.combine import of_unseen_rows
from turbanet.ensembles.jobs import Job, train
from turbanet.loss import weighted
from turbanet.networks import convnets, models
from turbanet.training import fit as fit_module
from turbanet.training.fit import predict
from turbanet.training.history import History, diverged
from turbanet.turba_train_state import TurbaTrainState

# Pickles of version 0.5 name these modules, which have since moved into folders.
sys.modules.update({"turbanet.fit": fit_module, "turbanet.models": models, "turbanet.convnets": convnets})

# One object for all estimators, so that it is fingerprinted once. Its numbers are data: a search compiles once. They
# stay float32 where a model's weights are not: in bfloat16 Adam's b2 would be 1.
ADAM = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=0.0, weight_decay=0.0)
_weighted = cache(weighted)
ACTIVATIONS = {"relu": nn.relu, "tanh": jnp.tanh, "logistic": nn.sigmoid, "identity": jnp.asarray}  # of scikit-learn


@dataclass(repr=False, eq=False)  # only for __init__; scikit-learn has the rest
class SwarmEstimator(Fitted, BaseEstimator):
    """Parameters, training and members' predictions that classifier and regressor share."""

    _parts = (History,)
    _mean_kind: ClassVar[str]  # the kind of export that is the mean over members

    members: int = 10
    _: KW_ONLY
    model: Any = None
    hidden: Sequence[int] = (100,)
    activation: str | Callable = "relu"
    dropout: float = 0.0
    loss: Any = None
    learning_rate: float = 0.001
    weight_decay: float = 0.0
    epochs: int = 100
    batch_size: int = 32
    bootstrap: bool = True
    oob_score: bool = False
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    warm_start: bool = False
    callbacks: Sequence[Callable] = ()
    plan: Plan | None = None
    cluster: Any = None
    random_state: int | np.random.RandomState | None = None

    history_: History = field(init=False)  # set by `fit`; declared here for type checkers
    swarm_: Any = field(init=False)

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        X_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
    ) -> Self:
        """Train on X [row, feature] and y; sample_weight [row] weights rows in the loss.

        y : [row], classes of any type of a classifier, numbers of a regressor, which also takes [row, target]
        X_val, y_val : the rows that `early_stopping` follows; None: a share of X that no member is trained on
        """
        if (X_val is None) != (y_val is None) or (X_val is not None and not self.early_stopping):
            received = ", ".join(name for name, value in (("X_val", X_val), ("y_val", y_val)) if value is not None)
            needed = "X_val and y_val must be passed together and with early_stopping=True"
            raise ValueError(f"{needed}; got {received} with early_stopping={self.early_stopping}.")
        return self._fit(X, y, sample_weight, validation=None if X_val is None else (X_val, y_val))

    def predict_members(self, X: ArrayLike) -> np.ndarray:
        """Return each member's prediction: a classifier's probabilities [member, row, class], else in y's unit.

        A regressor's are [member, row] or [member, row, target], as `prediction_interval` takes them.
        """
        return self._decode(self._predict_members(X))

    def predict_std(self, X: ArrayLike) -> np.ndarray:
        """Return the standard deviation over members, which has the shape of their mean."""
        return self._exclude_diverged(self.predict_members(X)).std(axis=0)

    def _fit(self, X, y, sample_weight, *, partial=False, classes=None, validation=None):
        """Train new members or go on with the trained ones, and score them out of bag.

        partial : whether to go on for one epoch; classes : of a classifier, None for those in y; validation : (X, y) to
        stop by, None for a share of X
        """
        for name in ("oob_score", "early_stopping"):
            if partial and getattr(self, name):
                raise ValueError(f"partial_fit does not support {name}=True: it has no rows but those it is given.")
        resume = (partial or self.warm_start) and hasattr(self, "swarm_")
        results = ["oob_score_", "oob_prediction_", "oob_deviations_", "oob_decision_function_"]
        for name in () if resume else [*results, "swarm_"]:  # a failing fit leaves no mixture of old and new
            self.__dict__.pop(name, None)
        kwargs = {"multi_output": True, "y_numeric": True} if is_regressor(self) else {}
        x, y = validate_data(self, X, y, dtype=np.float32, accept_sparse="csr", reset=not resume, **kwargs)
        x = _dense(x)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, x, dtype=np.float32, ensure_non_negative=True)
        epochs = 1 if partial else self.epochs
        encoded, outputs, loss_fn, total_weight = self._encode(y, weight, resume, classes)
        length = len(x)
        if validation is not None:  # further rows, which no member is trained on
            x_val, y_val = validate_data(
                self, *validation, dtype=np.float32, accept_sparse="csr", reset=False, **kwargs
            )
            encoded_val, _, _, weight_val = self._encode(y_val, None, True, getattr(self, "classes_", None), y)
            if total_weight is not None:
                ones = np.ones(len(y_val), np.float32)
                total_weight = np.concatenate([total_weight, ones if weight_val is None else weight_val])
            x, encoded = np.concatenate([x, _dense(x_val)]), np.concatenate([encoded, encoded_val])
        job = encoded, outputs, loss_fn, total_weight
        rows, held_out = self._train(x, *job, resume=resume, partial=partial, epochs=epochs, length=length)
        for name in results:  # of the training before
            self.__dict__.pop(name, None)
        if self.oob_score:
            held_out = None if validation is not None else held_out
            self._score_out_of_bag(predict(self.swarm_, x[:length]), rows, held_out, y, weight)
        return self

    def _train(self, x, y, outputs, loss_fn, weight, *, resume, partial, epochs, length):
        """Train on rows of a weight above 0, and return (rows of each member, rows held out for all or None).

        length : how many rows members may be trained on; those after them are held out
        """
        self._check_parameters()
        rng = check_random_state(self.random_state)
        identity = {"swarm_size": self.members, "sample_input": x[:1], "seed": int(rng.randint(2**31 - 1))}
        optimizer = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        options = {"activation": self.activation, "dropout": self.dropout}
        recipe = self.model, (*self.hidden, outputs), optimizer, identity, options
        settings = {"model": self.model, "layers": recipe[1], "members": self.members, **options}
        settings |= {"early_stopping": self.early_stopping, "oob_score": self.oob_score}
        kwargs: dict[str, Any] = {"epochs": epochs, "batch_size": self.batch_size, "plan": self.plan}
        kwargs |= {"callbacks": tuple(self.callbacks)} if self.callbacks else {}
        if self.early_stopping:
            settings["validation_fraction"] = self.validation_fraction
            kwargs |= {"patience": self.n_iter_no_change, "min_delta": self.tol}
        if self.early_stopping or self.oob_score:
            settings["rows"] = len(x)  # those that were unseen stay unseen
        if resume:
            self._check_resumable(settings)
        swarm = with_hyperparameters(self.swarm_ if resume else _untrained(recipe, ADAM), **optimizer)
        shape = getattr(one_prediction(swarm, x, [x.shape[1:]]), "shape", None)
        if shape != (1, outputs):
            task = f"{outputs} classes need logits" if is_classifier(self) else f"{outputs} target(s) need"
            raise ValueError(
                f"{task} [row, {outputs}], the model gives {list(shape) if shape else 'several arrays'}: change it."
            )
        if "rows" in settings:
            rng = check_random_state(int(swarm.seed[0]))  # draws the same again, so that no rows have to be kept
        elif resume and partial and isinstance(self.random_state, int | np.integer):
            rng = np.random.RandomState([swarm.seed[0], swarm.epoch[0]])  # other positions of each batch
        rows, held_out = self._draw(rng, length, weight, y if is_classifier(self) else None, given=length < len(x))
        if length < len(x):
            held_out = np.arange(length, len(x))
        if resume and "rows" in settings and fingerprint((rows, held_out)) != self.__dict__["_drawn"]:
            advice = "give y, rows of weight 0 and X_val as before, or set warm_start=False to begin anew"
            raise ValueError(f"Members that go on would be trained on rows that they must not see: {advice}.")
        if weight is not None:
            loss_fn, y = _weighted(loss_fn), (y, weight)
        drawn = None
        if not isinstance(self.random_state, int | np.integer):
            drawn = self.members, self.bootstrap, self.early_stopping, self.validation_fraction
        job, trained, history = train(Job(swarm, x, y, loss_fn, rows, held_out, kwargs, drawn), self.cluster)
        sound = ~diverged(trained, history)
        if not sound.any():
            problem = f"All {self.members} members diverged, their losses or weights are NaN or infinite"
            raise ValueError(f"{problem}: take a smaller learning_rate than {self.learning_rate}, or scale X.")
        self.swarm_, self._sound = trained, sound
        self._drawn = str(fingerprint((job.rows, job.validation))) if "rows" in settings else None
        self.history_ = self.history_ + history if resume else history
        self.n_iter_ = int(self.history_.epochs.max())
        self._made = *recipe[:3], identity | {"sample_input": np.zeros_like(x[:1])}, options  # without a row of x
        self._settings = settings
        return job.rows, job.validation

    def _check_parameters(self):
        check_whole(members=self.members, epochs=self.epochs, batch_size=self.batch_size)
        check_cluster(self.cluster)
        if callable(self.callbacks):
            raise ValueError(f"callbacks is a list of functions, got {self.callbacks!r}: put it in a list.")
        if self.early_stopping:
            check_whole(n_iter_no_change=self.n_iter_no_change)
            if not self.tol >= 0:
                raise ValueError(f"tol, what counts as an improvement, must be at least 0; got {self.tol!r}.")
            if not 0 < self.validation_fraction < 1:
                raise ValueError(f"validation_fraction is between 0 and 1, got {self.validation_fraction!r}.")
        if self.oob_score and not self.bootstrap:
            raise ValueError("oob_score needs bootstrap=True: without it every member sees every row.")
        if np.ndim(self.hidden) != 1:
            such = f"({self.hidden},)" if isinstance(self.hidden, int | np.integer) else "(32,)"
            raise ValueError(f"hidden must be a sequence of layers' units such as {such}, got {self.hidden!r}.")
        for units in self.hidden:
            check_whole(**{"A layer's units, in hidden,": units})
        for name in ("learning_rate", "weight_decay"):
            value = np.asarray(getattr(self, name))
            is_number = jnp.issubdtype(value.dtype, jnp.number)
            if not is_number or not (np.isfinite(value) & (value >= 0)).all():
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)!r}.")
        if self.model is not None and (self.activation, self.dropout) != ("relu", 0.0):
            raise ValueError(
                "activation and dropout are of the MLP that model=None makes: leave them out, or the model."
            )
        if not callable(self.activation) and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {', '.join(ACTIVATIONS)} or a function; got {self.activation!r}.")

    def _check_resumable(self, settings):
        """Raise ValueError for settings that are not those of the members that are to go on."""
        for name, value in settings.items():
            before = self.__dict__.get("_settings", {}).get(name)  # older pickles have none, and do not go on
            if value != before and (name, value) != ("oob_score", False):
                problem = f"Members trained with {name}={before} cannot go on with {name}={value}"
                raise ValueError(f"{problem}: set warm_start=False to begin anew.")

    def _draw(self, rng, length, weight, classes, *, given):
        """Draw (rows of each member, rows held out for early stopping or None) among rows with a weight above 0.

        given : whether the rows to stop by were given
        """
        pool = np.arange(length) if weight is None else np.flatnonzero(weight[:length])
        held_out = None
        if self.early_stopping and not given:
            kwargs = {"test_size": self.validation_fraction, "stratify": None if classes is None else classes[pool]}
            pool, held_out = train_test_split(pool, random_state=rng, **kwargs)
        rows = np.tile(pool, (self.members, 1))
        return (pool[rng.randint(len(pool), size=rows.shape)] if self.bootstrap else rows), held_out

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that can be pickled: the swarm's arrays without functions, the history without devices."""
        state = dict(super().__getstate__())
        if "swarm_" in state:
            state["swarm_"] = numbers_of(self.swarm_)
            state["history_"] = replace(self.history_, plan=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "swarm_" in state:
            for optimizer in (ADAM, optax.adamw(**self._made[2])):  # the latter in pickles of version 0.5
                again = with_numbers(_untrained(self._made, optimizer), state["swarm_"])
                if again is not None:
                    self.swarm_ = again
                    return
            raise ValueError("The pickled network's layers have other names or sizes by now: train it anew.")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _exclude_diverged(self, members):
        """Return [member, ...] without the members that diverged, which `turbanet.fit` has reported."""
        return members[getattr(self, "_sound", slice(None))]

    def _out_of_bag(self, prediction, rows, held_out, weight):
        """Return the predictions of rows that a member has not seen, of those that did not diverge, as a masked array.

        Besides bool [row], where there are some, and the weights of these rows or None. All have seen held-out rows.
        """
        unseen = of_unseen_rows(self._exclude_diverged(prediction), self._exclude_diverged(rows))
        if held_out is not None:
            unseen[:, held_out] = np.ma.masked
        covered = unseen.count(axis=(0, 2)) > 0
        if not covered.any():
            raise ValueError("oob_score needs rows that some member did not see, there are none: take more members.")
        return unseen, covered, None if weight is None else weight[covered]

    def _to_export(self, kind):
        """Return (kind, function of x [row, feature], such an x) for `turbanet.export`; None is the mean's kind."""
        check_is_fitted(self, "swarm_")
        kinds = "members", self._mean_kind
        kind = kind or self._mean_kind
        if kind not in kinds:
            raise ValueError(f"A {type(self).__name__} is exported as {' or '.join(kinds)}, not as {kind!r}.")
        decode = self._decoder()
        swarm = self.swarm_ if kind == "members" else jax.tree.map(self._exclude_diverged, self.swarm_)

        def program(x):
            members = decode(jax.vmap(lambda state: member.predict(state, x))(swarm))
            return members if kind == "members" else members.mean(axis=0)

        return kind, program, swarm.sample

    def _predict_members(self, X):
        check_is_fitted(self, "swarm_")
        x = validate_data(self, X, dtype=np.float32, accept_sparse="csr", reset=False)
        return predict(self.swarm_, _dense(x))


def _dense(x):
    return x.toarray() if issparse(x) else x


def _untrained(recipe, optimizer):
    """Create the swarm before its training."""
    model, widths, _, identity, *options = recipe  # pickles of 0.6 have no options
    model = _network(widths, **(options[0] if options else {})) if model is None else model
    return TurbaTrainState.swarm(model, optimizer, **identity)


@cache
def _network(widths, activation="relu", dropout=0.0):
    function = ACTIVATIONS.get(activation, activation)
    # As scikit-learn draws its networks' weights.
    return models.MLP(widths, kernel_init=glorot_uniform(), activation=function, dropout=dropout)
