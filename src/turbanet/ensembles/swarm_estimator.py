"""Base class of scikit-learn estimators that are swarms: parameters, training and pickling."""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.initializers import glorot_uniform
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from turbanet.core.arrays import check_whole
from turbanet.core.plan import Plan
from turbanet.core.schedules import with_hyperparameters
from turbanet.ensembles.combine import out_of_bag
from turbanet.ensembles.jobs import Job, train
from turbanet.loss import weighted
from turbanet.networks import convnets, models
from turbanet.training import fit as fit_module
from turbanet.training.checks import one_prediction
from turbanet.training.fit import predict
from turbanet.training.history import History, diverged
from turbanet.turba_train_state import TurbaTrainState

# Pickles of version 0.5 name these modules, which have since moved into folders.
sys.modules.update({"turbanet.fit": fit_module, "turbanet.models": models, "turbanet.convnets": convnets})

# One object for all estimators, so that it is fingerprinted once. Its numbers are data: a search compiles once.
ADAM = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, weight_decay=0.0)
_weighted = cache(weighted)


@dataclass(repr=False, eq=False)  # only for __init__; scikit-learn has the rest
class SwarmEstimator(BaseEstimator):
    """Parameters, training and members' predictions that classifier and regressor share."""

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
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    warm_start: bool = False
    plan: Plan | None = None
    cluster: Any = None
    random_state: int | np.random.RandomState | None = None

    history_: History = field(init=False)  # set by `fit`; declared here for type checkers
    classes_: np.ndarray = field(init=False)
    _drawn: tuple = field(init=False)

    def predict_std(self, X: ArrayLike) -> np.ndarray:
        """Return the standard deviation over members, which has the shape of their mean."""
        return self._exclude_diverged(self.predict_members(X)).std(axis=0)

    def _train(self, x, y, outputs, loss_fn, weight, *, classes=None, resume=False, epochs=None):
        """Train on the rows of x and y with a weight above 0, and return (rows of each member, held-out rows or None).

        classes: [row], by which the rows held out for early stopping are stratified. resume: continue with the trained
        members, if there are any.
        """
        check_whole(members=self.members, epochs=self.epochs, batch_size=self.batch_size)
        if self.oob_score and not self.bootstrap:
            raise ValueError("oob_score needs bootstrap=True: without it every member sees every row.")
        if isinstance(self.hidden, int | np.integer):
            raise ValueError(f"hidden must be a sequence of layers' units such as ({self.hidden},), got {self.hidden}.")
        rng = check_random_state(self.random_state)
        identity = {"swarm_size": self.members, "sample_input": x[:1], "seed": int(rng.randint(2**31 - 1))}
        optimizer = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        recipe = self.model, (*self.hidden, outputs), optimizer, identity
        resume = resume and hasattr(self, "swarm_")
        held_out_by: dict[str, Any] = {"early_stopping": self.early_stopping, "oob_score": self.oob_score}
        held_out_by |= {"validation_fraction": self.validation_fraction} if self.early_stopping else {}
        if resume:
            self._check_held_out(held_out_by)
        swarm = with_hyperparameters(self._members_to_resume(recipe), **optimizer) if resume else _untrained(*recipe)
        shape = one_prediction(swarm, x, [x.shape[1:]]).shape
        if shape != (1, outputs):
            task = f"{outputs} classes need logits" if classes is not None else f"{outputs} target(s) need"
            raise ValueError(f"{task} [row, {outputs}], the model gives {list(shape)}: change its last layer.")
        kwargs: dict[str, Any] = {"epochs": epochs or self.epochs, "batch_size": self.batch_size, "plan": self.plan}
        if self.early_stopping:
            kwargs |= {"patience": self.n_iter_no_change, "min_delta": self.tol}
        if resume and (self.oob_score or self.early_stopping):
            rows, held_out = self._previous_draw(len(x))
        else:
            rows, held_out = self._draw(rng, len(x), weight, classes)
        if weight is not None:
            loss_fn, y = _weighted(loss_fn), (y, weight)
        job, trained, history = train(Job(swarm, x, y, loss_fn, rows, held_out, kwargs), self.cluster)
        self._sound = ~diverged(trained, history)
        if not self._sound.any():
            problem = f"All {self.members} members diverged, their losses or weights are NaN or infinite"
            raise ValueError(f"{problem}: take a smaller learning_rate than {self.learning_rate}, or scale X.")
        self.swarm_ = trained
        self._drawn = len(x), job.rows, job.validation
        self.history_ = self.history_ + history if resume else history
        self.n_iter_ = int(self.history_.epochs.max())
        self._made = recipe
        self._unseen = held_out_by
        return job.rows, job.validation

    def _check_held_out(self, now):
        """Raise ValueError where resumed members would be scored on rows they were trained on; `oob_score` may end."""
        before = getattr(self, "_unseen", now)  # older pickles lack it
        if now != before | {"oob_score": now["oob_score"] and before["oob_score"]}:
            old, new = (", ".join(f"{name}={value}" for name, value in each.items()) for each in (before, now))
            problem = f"The members were trained with {old} and are to go on with {new}"
            raise ValueError(f"{problem}, which needs other rows to be unseen: set warm_start=False to begin anew.")

    def _previous_draw(self, length):
        """Return what `_draw` returned the last time, so that held-out rows stay held out."""
        before, *drawn = getattr(self, "_drawn", (None,))
        if before != length:
            raise ValueError(f"What goes on with rows that were kept unseen needs all {before} again, got {length}.")
        return drawn

    def _draw(self, rng, length, weight, classes):
        """Draw (rows of each member, rows held out for early stopping or None) among rows with a weight above 0."""
        pool = np.arange(length) if weight is None else np.flatnonzero(weight)
        held_out = None
        if self.early_stopping:
            kwargs = {} if classes is None else {"stratify": classes[pool]}
            pool, held_out = train_test_split(pool, test_size=self.validation_fraction, random_state=rng, **kwargs)
        rows = np.tile(pool, (self.members, 1))
        return (pool[rng.randint(len(pool), size=rows.shape)] if self.bootstrap else rows), held_out

    def _discard_results(self, *, resume):
        """Delete earlier results, so that a failing `fit` leaves no mixture of old and new ones."""
        for name in ("oob_score_", "oob_prediction_", "oob_deviations_", "oob_decision_function_"):
            self.__dict__.pop(name, None)
        if not resume:
            self.__dict__.pop("swarm_", None)

    def _members_to_resume(self, recipe):
        """Return the trained members; ValueError where the parameters now describe other members."""
        before, now = map(_describe, (self._made, recipe))
        for name, value in now.items():
            if value != before[name]:
                raise ValueError(f"The {name} were {before[name]} and are {value}: set warm_start=False to begin anew.")
        return self.swarm_

    def _check_weights(self, x, sample_weight):
        """Return sample_weight as float32 [row] or None, checked by scikit-learn."""
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, x, dtype=np.float32, ensure_non_negative=True)

    def _check_partial_fit(self):
        for name in ("oob_score", "early_stopping"):
            if getattr(self, name):
                raise ValueError(f"partial_fit does not support {name}=True: it has no rows but those it is given.")

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that can be pickled: the swarm's arrays without functions, the history without devices."""
        state = dict(super().__getstate__())
        if "swarm_" in state:
            state["swarm_"] = [np.asarray(leaf) for leaf in jax.tree.leaves(self.swarm_)]
            state["history_"] = replace(self.history_, plan=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "swarm_" in state:
            shapes = [leaf.shape for leaf in state["swarm_"]]
            for make in (_untrained, _untrained_0_5):
                leaves, like = jax.tree.flatten(make(*self._made))
                if shapes == [leaf.shape for leaf in leaves]:
                    self.swarm_ = jax.tree.unflatten(like, [jnp.asarray(leaf) for leaf in state["swarm_"]])
                    return
            raise ValueError("The pickled network's layers have other names or sizes by now: train it anew.")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _validate_inputs(self, *data, **options):
        """Return X as dense float32 [row, feature], and y if given, from arrays, tables or sparse matrices."""
        checked = validate_data(self, *data, dtype=np.float32, accept_sparse="csr", **options)
        x, *rest = checked if isinstance(checked, tuple) else (checked,)
        dense = x.toarray() if hasattr(x, "toarray") else x
        return (dense, *rest) if rest else dense

    def _exclude_diverged(self, members):
        """Return [member, ...] without the members that diverged, which `turbanet.fit` has reported."""
        return members[getattr(self, "_sound", slice(None))]

    def _out_of_bag(self, prediction, rows, held_out):
        """Return the out-of-bag prediction of the members that did not diverge, and bool [row], where it is not NaN.

        It is NaN in held-out rows and in rows that all these members were trained on.
        """
        oob = out_of_bag(self._exclude_diverged(prediction), self._exclude_diverged(rows))
        oob[held_out if held_out is not None else []] = np.nan
        covered = ~np.isnan(oob).any(axis=1)
        if not covered.any():
            raise ValueError("oob_score needs rows that some member did not see, there are none: take more members.")
        return oob, covered

    def _predict_members(self, x):
        check_is_fitted(self, "swarm_")
        return predict(self.swarm_, self._validate_inputs(x, reset=False))


def _describe(recipe):
    """Return {name: value} of what must stay the same for members to be trained on."""
    model, widths, _, identity = recipe
    members = f"{identity['swarm_size']} of {identity['sample_input'].shape[1]} features"
    return {"models": model, "layers": widths, "members": members}


def _untrained(model, widths, optimizer, identity):
    """Create the swarm before its training."""
    return with_hyperparameters(_create(model, widths, ADAM, identity), **optimizer)


def _untrained_0_5(model, widths, optimizer, identity):
    """Create the swarm as version 0.5 did."""
    return _create(model, widths, optax.adamw(**optimizer), identity)


def _create(model, widths, optimizer, identity):
    return TurbaTrainState.swarm(_network(widths) if model is None else model, optimizer, **identity)


@cache
def _network(widths):
    return models.MLP(widths, kernel_init=glorot_uniform())  # as scikit-learn draws its networks' weights
