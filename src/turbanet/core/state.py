"""The state that is trained: of a swarm, whose leaves lead with a `member` axis, or of one network, without it."""

import inspect
import operator
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.train_state import TrainState

from turbanet.core.arrays import is_jax_key


class State(TrainState):
    """The fields of a swarm that training, scoring and saving share; users work with the subclass `TurbaTrainState`.

    Shapes are those of a swarm; `get_state` returns one network, whose leaves lack the member axis.

    step : optimizer steps made, int32 [member]
    params, opt_state : of Flax's `TrainState`, trees of [member, ...]
    apply_fn, tx : the model's function and the optimizer, of one network
    seed, id : the member's name, int32 [member] each
    epoch : epochs trained, int32 [member]
    collections : the model's other variables, {name: tree of [member, ...]}
    schedule : a `schedules.Schedule`, [member]; None without one
    member : constants of each member's own, a tree of [member, ...], which losses and models that take the keyword
        `member` receive; None without
    loss_fn : the loss of one member, if set
    sample : shape and type of an input of one network, or of its parts, if known

    `_stopping` and `_underway`, trees of [member, ...], are set only while `fit` runs: which members still train and
    their best weights, and the progress of an epoch that is trained in parts.
    """

    step: Any
    seed: Any = 0
    id: Any = 0
    epoch: Any = 0
    collections: Any = struct.field(default_factory=dict)
    schedule: Any = None
    member: Any = None
    _stopping: Any = None
    _underway: Any = None
    loss_fn: Callable | None = struct.field(pytree_node=False, default=None)
    sample: Any = struct.field(pytree_node=False, default=None)

    def apply_gradients(self, *, grads: Any, value: Any = None, **kwargs: Any) -> Self:
        """Make one optimizer update by `grads`; on a swarm, of each member by itself.

        `value` is the loss, for optimizers that use it; `kwargs` are fields to replace in the same step. Random keys in
        the optimizer's state, as `optax.noisy_sgd` has, become the member's own by its seed and id.
        """
        if jnp.ndim(self.step) > 0:
            return jax.vmap(lambda s, g, v, k: s.apply_gradients(grads=g, value=v, **k))(self, grads, value, kwargs)
        opt_state = jax.tree.map(self._with_own_key, self.opt_state)
        updates, opt_state = updated(self.tx, grads, opt_state, self.params, value)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    def _with_own_key(self, leaf):
        is_one = jnp.ndim(leaf) == 0 and is_jax_key(leaf)
        return jax.random.fold_in(jax.random.fold_in(leaf, self.seed), self.id) if is_one else leaf

    def get_state(self, index: int) -> Self:
        """Return the member at position `index` as one network, without the member axis."""
        self._check_position(index)
        return jax.tree.map(lambda leaf: leaf[index], self)

    def _check_position(self, index):
        try:
            index = operator.index(index)
        except TypeError:
            problem = f"A member is taken by its position, one int; got {index!r:.60}"
            raise TypeError(f"{problem}: several are swarm[ids].") from None
        if not -len(self) <= index < len(self):
            raise IndexError(f"No member {index} in a swarm of {len(self)}.")

    def __len__(self) -> int:
        return np.shape(self.step)[0] if jnp.ndim(self.step) else 1

    def loss(self, loss_fn: Callable | None = None) -> Callable:
        """Return `loss_fn`, or the swarm's own for None; ValueError for anything but a function."""
        chosen: Any = loss_fn or self.loss_fn
        if not callable(chosen):
            message = f"A loss is loss(params, x, y, apply_fn), such as turbanet.mse; got {chosen!r}"
            raise ValueError(f"{message}: pass loss_fn, or call swarm = swarm.set_loss_fn(loss_fn) first.")
        return chosen if chosen.__hash__ else chosen.__call__  # a dataclass has no hash, and its method has


Swarm = TypeVar("Swarm", bound=State)  # of the caller's own class, which is returned


def _as_before(new, old):
    """Return a leaf of an optimizer's state in its type before, which mixed types of parameters may have promoted."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def updated(tx: Any, grads: Any, opt_state: Any, params: Any, value: Any = None) -> tuple[Any, Any]:
    """Return an optimizer's (updates, state) of one network; one that takes `value`, the loss, receives it."""
    try:
        known = inspect.signature(tx.update).parameters.values()
        takes_value = any(each.name == "value" or each.kind is each.VAR_KEYWORD for each in known)
    except (TypeError, ValueError):  # without a signature, as it is written in C
        takes_value = False
    given = {"value": value} if takes_value and value is not None else {}
    try:
        try:
            updates, new = tx.update(grads, opt_state, params, **given)
        except TypeError as error:  # of a part that an optimizer such as optax.chain hands it on to
            if not given or "unexpected keyword argument 'value'" not in str(error):
                raise
            updates, new = tx.update(grads, opt_state, params)
        return updates, jax.tree.map(_as_before, new, opt_state)
    except Exception as error:
        own: Any = jax.tree.structure(jax.eval_shape(tx.init, params))
        if own == jax.tree.structure(opt_state):
            raise
        advice = "replace opt_state with tx, by jax.vmap(tx.init)(swarm.params)"
        raise ValueError(f"The state of the optimizer is another one's, or of other parameters: {advice}.") from error


def check_swarm(swarm: Swarm) -> Swarm:
    """Return a swarm; ValueError for what is none, such as a model or one network, and for arrays of other members."""
    if jnp.ndim(check_state(swarm).step) != 1:
        raise ValueError("A swarm leads with a member axis; this is one network: take swarm[[id]], a swarm of one.")
    members = np.shape(swarm.step)
    if any(np.shape(leaf)[:1] != members for leaf in jax.tree.leaves(swarm)):
        shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(swarm)}
        name = next(name for name, shape in shapes.items() if shape[:1] != members)
        problem = f"swarm{name} has shape {shapes[name]}, the swarm {len(swarm)} members"
        raise ValueError(f"{problem}: stack an array of each member, [member, ...].")
    return swarm


def check_state(swarm: Swarm) -> Swarm:
    """Return a swarm or one network; ValueError for what is none, such as a model or an estimator."""
    if isinstance(swarm, State):
        return swarm
    received = f"the class {swarm.__name__}" if isinstance(swarm, type) else type(swarm).__name__
    advice = "make one of a model by TurbaTrainState.swarm"
    if hasattr(swarm, "fit") and hasattr(swarm, "predict"):
        advice = "a fitted estimator of this library has its swarm as swarm_"
    raise ValueError(f"The swarm is a TurbaTrainState; got {received}: {advice}.")
