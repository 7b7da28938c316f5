"""A swarm as a scikit-learn estimator, before it classifies or regresses: its parameters, its training, its pickle."""

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

from turbanet.ensembles.combine import out_of_bag
from turbanet.ensembles.jobs import Job, train
from turbanet.loss import weighted
from turbanet.networks import convnets, models
from turbanet.training import fit as fit_module
from turbanet.training.arrays import check_whole
from turbanet.training.checks import one_prediction
from turbanet.training.fit import predict
from turbanet.training.history import History, diverged
from turbanet.training.plan import Plan
from turbanet.training.schedules import with_hyperparameters
from turbanet.turba_train_state import TurbaTrainState

# What an estimator's pickle of version 0.5 names: the modules' places before they moved into folders.
sys.modules.update({"turbanet.fit": fit_module, "turbanet.models": models, "turbanet.convnets": convnets})

# What is the same object is known without being read again. The numbers are set as data: a search compiles once.
ADAM = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, weight_decay=0.0)
_weighted = cache(weighted)


@dataclass(repr=False, eq=False)  # for __init__ alone: the rest is scikit-learn's
class SwarmEstimator(BaseEstimator):
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
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    tol: float = 1e-4
    warm_start: bool = False
    plan: Plan | None = None
    cluster: Any = None
    random_state: int | np.random.RandomState | None = None

    history_: History = field(init=False)  # of no parameter: what `fit` sets, for the types
    classes_: np.ndarray = field(init=False)
    _drawn: tuple = field(init=False)

    def predict_std(self, X: ArrayLike) -> np.ndarray:
        """How far the members differ: the standard deviation over them, of the shape of their mean."""
        return self._of_sound(self.predict_members(X)).std(axis=0)

    def _train(self, x, y, outputs, loss_fn, weight, *, classes=None, goes_on=False, epochs=None):
        """Train on the rows of x and y with a weight above 0: (rows of each member, those of early stopping or None).

        classes : [row], which the rows for early stopping are drawn from alike
        goes_on : whether with the members that are there, if any are
        """
        check_whole(members=self.members, epochs=self.epochs, batch_size=self.batch_size)
        if self.oob_score and not self.bootstrap:
            raise ValueError("oob_score needs bootstrap=True: without it every member sees every row.")
        if isinstance(self.hidden, int | np.integer):
            raise ValueError(f"hidden must be a sequence of layers' units such as ({self.hidden},), got {self.hidden}.")
        random = check_random_state(self.random_state)
        identity = {"swarm_size": self.members, "sample_input": x[:1], "seed": int(random.randint(2**31 - 1))}
        optimizer = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        made = self.model, (*self.hidden, outputs), optimizer, identity
        goes_on = goes_on and hasattr(self, "swarm_")
        unseen: dict[str, Any] = {"early_stopping": self.early_stopping, "oob_score": self.oob_score}
        unseen |= {"validation_fraction": self.validation_fraction} if self.early_stopping else {}
        if goes_on:
            self._check_unseen(unseen)
        swarm = with_hyperparameters(self._same_members(made), **optimizer) if goes_on else _untrained(*made)
        found = one_prediction(swarm, x, [x.shape[1:]]).shape
        if found != (1, outputs):
            task = f"{outputs} classes need logits" if classes is not None else f"{outputs} target(s) need"
            raise ValueError(f"{task} [row, {outputs}], the model gives {list(found)}: change its last layer.")
        how: dict[str, Any] = {"epochs": epochs or self.epochs, "batch_size": self.batch_size, "plan": self.plan}
        if self.early_stopping:
            how |= {"patience": self.n_iter_no_change, "min_delta": self.tol}
        if goes_on and (self.oob_score or self.early_stopping):
            rows, held_out = self._drawn_before(len(x))
        else:
            rows, held_out = self._draw(random, len(x), weight, classes)
        if weight is not None:
            loss_fn, y = _weighted(loss_fn), (y, weight)
        done, trained, history = train(Job(swarm, x, y, loss_fn, rows, held_out, how), self.cluster)
        self._sound = ~diverged(trained, history)
        if not self._sound.any():
            came = f"All {self.members} members diverged, their losses or weights are NaN or infinite"
            raise ValueError(f"{came}: take a smaller learning_rate than {self.learning_rate}, or scale X.")
        self.swarm_ = trained
        self._drawn = len(x), done.rows, done.validation
        self.history_ = self.history_ + history if goes_on else history
        self.n_iter_ = int(self.history_.epochs.max())
        self._made = made
        self._unseen = unseen
        return done.rows, done.validation

    def _check_unseen(self, now):
        """ValueError where what goes on would be scored on rows that were trained on; `oob_score` may end."""
        before = getattr(self, "_unseen", now)  # not there in older pickles
        if now != before | {"oob_score": now["oob_score"] and before["oob_score"]}:
            was, here = (", ".join(f"{name}={value}" for name, value in each.items()) for each in (before, now))
            came = f"The members were trained with {was} and are to go on with {here}"
            raise ValueError(f"{came}, which needs other rows to be unseen: set warm_start=False to begin anew.")

    def _drawn_before(self, length):
        """What `_draw` returned the last time, so that rows that members have not seen stay unseen."""
        before, *drawn = getattr(self, "_drawn", (None,))
        if before != length:
            raise ValueError(f"What goes on with rows that were kept unseen needs all {before} again, got {length}.")
        return drawn

    def _draw(self, random, length, weight, classes):
        """(rows of each member, those of early stopping or None), of those with a weight above 0."""
        seen = np.arange(length) if weight is None else np.flatnonzero(weight)
        held_out = None
        if self.early_stopping:
            alike = {} if classes is None else {"stratify": classes[seen]}
            seen, held_out = train_test_split(seen, test_size=self.validation_fraction, random_state=random, **alike)
        rows = np.tile(seen, (self.members, 1))
        return (seen[random.randint(len(seen), size=rows.shape)] if self.bootstrap else rows), held_out

    def _begin(self, *, goes_on):
        """Forget what was trained and scored before, so that what fails now leaves nothing half-new behind."""
        for name in ("oob_score_", "oob_prediction_", "oob_deviations_", "oob_decision_function_"):
            self.__dict__.pop(name, None)
        if not goes_on:
            self.__dict__.pop("swarm_", None)

    def _same_members(self, made):
        """The members that are there; ValueError where others are asked for."""
        was, now = map(_described, (self._made, made))
        for name, what in now.items():
            if what != was[name]:
                raise ValueError(f"The {name} were {was[name]} and are {what}: set warm_start=False to begin anew.")
        return self.swarm_

    def _weights(self, x, sample_weight):
        """float32 [row] or None, checked by scikit-learn."""
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, x, dtype=np.float32, ensure_non_negative=True)

    def _check_partial(self):
        for name in ("oob_score", "early_stopping"):
            if getattr(self, name):
                raise ValueError(f"partial_fit does not support {name}=True: it has no rows but those it is given.")

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
            kept = [leaf.shape for leaf in state["swarm_"]]
            for make in (_untrained, _untrained_0_5):
                leaves, like = jax.tree.flatten(make(*self._made))
                if kept == [leaf.shape for leaf in leaves]:
                    self.swarm_ = jax.tree.unflatten(like, [jnp.asarray(leaf) for leaf in state["swarm_"]])
                    return
            raise ValueError("The pickled network's layers have other names or sizes by now: train it anew.")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _validated(self, *data, **how):
        """X as dense float32 [row, feature], beside y if it came: of arrays, tables, sparse matrices."""
        found = validate_data(self, *data, dtype=np.float32, accept_sparse="csr", **how)
        x, *rest = found if isinstance(found, tuple) else (found,)
        dense = x.toarray() if hasattr(x, "toarray") else x
        return (dense, *rest) if rest else dense

    def _of_sound(self, members):
        """[member, ...] without the members that diverged, which `turbanet.fit` has named."""
        return members[getattr(self, "_sound", slice(None))]

    def _unseen_by_some(self, prediction, rows, held_out):
        """`out_of_bag` of the sound members, NaN in rows held out, and in which rows it has numbers, bool [row]."""
        found = out_of_bag(self._of_sound(prediction), self._of_sound(rows))
        found[held_out if held_out is not None else []] = np.nan
        some = ~np.isnan(found).any(axis=1)
        if not some.any():
            raise ValueError("oob_score needs rows that some member did not see, there are none: take more members.")
        return found, some

    def _members(self, x):
        check_is_fitted(self, "swarm_")
        return predict(self.swarm_, self._validated(x, reset=False))


def _described(made):
    """{name: what it is} of what members cannot train on with another of."""
    model, widths, _, identity = made
    members = f"{identity['swarm_size']} of {identity['sample_input'].shape[1]} features"
    return {"models": model, "layers": widths, "members": members}


def _untrained(model, widths, optimizer, identity):
    """The swarm before its training."""
    return with_hyperparameters(_members_of(model, widths, ADAM, identity), **optimizer)


def _untrained_0_5(model, widths, optimizer, identity):
    """The same as version 0.5 made it."""
    return _members_of(model, widths, optax.adamw(**optimizer), identity)


def _members_of(model, widths, optimizer, identity):
    return TurbaTrainState.swarm(_network(widths) if model is None else model, optimizer, **identity)


@cache
def _network(widths):
    return models.MLP(widths, kernel_init=glorot_uniform())  # as scikit-learn draws its networks' weights
