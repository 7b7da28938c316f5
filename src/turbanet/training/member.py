"""One member: its random keys, its model with its own collections and mode, its training step."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.tracers import current_trace

from turbanet.training.optimizers import evaluation_params

Swarm: TypeAlias = Any  # a TurbaTrainState, whose module stands above this one
Scored: TypeAlias = tuple[jax.Array, Any]  # the loss and the prediction
INIT, SHUFFLE, STREAMS, AUGMENT, ACT, PLAY = range(6)  # tags that keep a member's random streams apart
TRAINS = "train", "training", "is_training"  # keywords by which a model's `__call__` is told that it trains
RESTS = "deterministic", "use_running_average", "inference", "inference_mode"  # and that it does not


def member_key(seed: Any, id: Any, tag: int) -> jax.Array:
    """The key of one random stream of the member (`seed`, `id`); it depends on these and the stream's `tag` alone."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, id), tag)


def streams(seed: Any, id: Any, step: Any, call: int = 0) -> dict[str, jax.Array]:
    """What the model of the member (`seed`, `id`) draws from in training, {name: key}.

    The keys are new at each `step` and at each `call` of the model in a step. A stream of any name but these two is
    drawn from "params", as Flax does.
    """
    key = jax.random.fold_in(member_key(seed, id, STREAMS), step)
    params, dropout = jax.random.split(jax.random.fold_in(key, call))
    return {"params": params, "dropout": dropout}


@lru_cache
def mode(apply_fn: Callable, train: bool) -> dict[str, Any]:
    """The keyword arguments that put the model behind `apply_fn` into training (`train`) or evaluation.

    Of the names in `TRAINS` and `RESTS` those that the model takes; an NNX module in Flax's bridge is set by its own
    methods.
    """
    model = getattr(apply_fn, "__self__", None)
    if not isinstance(model, nn.Module):
        return {}
    if _is_nnx(model):
        return {"nnx_method": partial(_nnx_call, train)}
    taken = inspect.signature(type(model).__call__).parameters
    return {name: train == (name in TRAINS) for name in taken if name in TRAINS + RESTS}


@dataclasses.dataclass(frozen=True)
class Functions:
    """A pair of functions as a model: init_params(key, x) -> params, apply_params(params, x) -> prediction."""

    init_params: Callable
    apply_params: Callable

    def init(self, key, x):
        return {"params": self.init_params(key, x)}

    def apply(self, variables, x, **kwargs):
        return self.apply_params(variables["params"], x, **kwargs)


@dataclasses.dataclass(eq=False)
class Bound:
    """`apply_fn` as a loss gets it: the member's collections, random streams and mode go in by themselves.

    `apply_fn({"params": params}, x, ...)` returns the prediction alone. In training, what the model changes in its
    collections is in `state`, for the next call and the next step; evaluation changes nothing, draws nothing.
    Arguments that the caller names (`train`, `rngs`, `mutable`, collections) are the caller's. An evaluation of more
    than `rows_at_once` rows computes so many at a time, each row for itself, and hands all of them to the loss.
    """

    state: Any
    train: bool
    rows_at_once: int | None = None
    calls: int = 0
    trace: Any = dataclasses.field(default_factory=current_trace)

    def __call__(self, variables, *args, **kwargs):
        state = self.state
        apply_fn = state.apply_fn
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise ValueError('apply_fn takes what Flax takes, apply_fn({"params": params}, x); it got other names.')
        kwargs = mode(apply_fn, self.train) | kwargs
        variables = {**state.collections, **variables}
        if not self.train or not isinstance(getattr(apply_fn, "__self__", None), nn.Module):
            return _in_parts(lambda *rows: apply_fn(variables, *rows, **kwargs), args, self.rows_at_once)
        rngs = streams(state.seed, state.id, state.step, self.calls)
        self.calls += 1
        if _is_nnx(apply_fn.__self__):
            rngs["default"] = rngs["params"]  # Flax would hand it the same number for every member and step
        kwargs = {"rngs": rngs} | kwargs
        if not state.collections or "mutable" in kwargs:
            return apply_fn(variables, *args, **kwargs)
        if current_trace() != self.trace:
            stays = f"The model changes its {sorted(state.collections)} in training, which cannot leave a vmap, grad or"
            raise ValueError(f"{stays} scan in the loss: call apply_fn outside, or with mutable=False and train=False.")
        prediction, changed = apply_fn(variables, *args, mutable=list(state.collections), **kwargs)
        changed = jax.tree.map(lambda new, old: new.astype(old.dtype), changed, state.collections)
        self.state = state.replace(collections=changed)
        return prediction


def _in_parts(function, args, most):
    """`function(*args)` for at most `most` rows at a time, where all leaves of args and result lead with the rows."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(args)}
    (length,) = lengths.pop() if len(lengths) == 1 and () not in lengths else (0,)
    if most is None or length <= most:
        return function(*args)
    result = jax.eval_shape(function, *args)
    if any(leaf.shape[:1] != (length,) for leaf in jax.tree.leaves(result)):
        return function(*args)
    parts = -(-length // most)
    size = -(-length // parts)

    def divided(leaf):
        filled = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], parts * size - length, axis=0)])
        return filled.reshape(parts, size, *leaf.shape[1:])

    out = jax.lax.map(lambda part: function(*part), jax.tree.map(divided, args))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:length], out)


def checked(out: Any) -> Scored:
    """What a loss returned, if it is (scalar, prediction), or a ValueError, when it is traced."""
    is_pair = isinstance(out, tuple) and len(out) == 2
    if not is_pair or jnp.shape(out[0]) != ():
        advice = "take the loss's mean" if is_pair else "return the prediction beside it"
        raise ValueError(f"A loss returns (scalar, prediction), not shapes {jax.tree.map(jnp.shape, out)}: {advice}.")
    return out


def takes(function: Callable, name: str) -> bool:
    """Whether a function says that it takes an argument of this name; what it wraps does not say it for it."""
    try:
        return name in inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # written in C
        return False


def train_step(loss_fn: Callable, state: Any, x: Any, y: Any, mask: Any = None) -> tuple[Any, jax.Array, Any]:
    """One step of one member's optimizer on `loss_fn` of x [batch, ...] and y: -> (state, loss, prediction).

    mask : bool [batch], which rows count, for a loss that takes it; None: all
    """
    masked = {} if mask is None else {"mask": mask}

    def loss(params):
        apply_fn = Bound(state, train=True)
        value, prediction = checked(loss_fn(params, x, y, apply_fn, **masked))
        return value, (prediction, apply_fn.state.collections)

    (value, (prediction, collections)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, value=value, collections=collections), value, prediction


def evaluate(
    loss_fn: Callable, state: Any, x: Any, y: Any, mask: Any = None, *, rows_at_once: int | None = None
) -> Scored:
    """One member's (loss, prediction) by `loss_fn` on x [batch, ...], y, with running statistics and nothing random.

    mask : as in `train_step`
    """
    params = evaluation_params(state.opt_state, state.params)
    masked = {} if mask is None else {"mask": mask}
    return checked(loss_fn(params, x, y, Bound(state, train=False, rows_at_once=rows_at_once), **masked))


def predict(state: Any, x: Any, *, rows_at_once: int | None = None, **kwargs: Any) -> Any:
    """One member's prediction on x [batch, ...], as in `evaluate`; `kwargs` go to Flax's apply."""
    params = evaluation_params(state.opt_state, state.params)
    return Bound(state, train=False, rows_at_once=rows_at_once)({"params": params}, x, **kwargs)


def initial(model: Any, seed: Any, id: Any, sample: Any) -> Any:
    """The variables {"params": ..., other collections} that the member (`seed`, `id`) of the Flax `model` begins with.

    sample: an input, whose shape and type the model is made for.
    """
    key = member_key(seed, id, INIT)
    keys = {"params": key, "dropout": key, "default": key} if _is_nnx(model) else key
    return model.init(keys, sample, **mode(model.apply, False))


def survey(model: Any, variables: Any, sample: Any) -> tuple[list[str], list[str]]:
    """What a training step of `model` on `sample` does: (the collections it carries on, sentences on what never acts).

    variables: as `initial` returns them, or their shapes. Carried are collections that a step leaves in the shape they
    had: what `sow` grows is no state. Never to act is advice alone, for running statistics that no step changes and for
    dropout that draws nothing.
    """
    names = sorted(set(variables) - {"params"})
    if not names and not isinstance(model, nn.Module):
        return [], []
    drops = []

    def notice(method, args, kwargs, context):
        fields = vars(context.module)
        rate = fields.get("rate") if isinstance(context.module, nn.Dropout) else fields.get("dropout_rate")
        drops.append(isinstance(rate, float | int) and rate > 0)
        return method(*args, **kwargs)

    def step(variables, rngs):
        return model.apply(variables, sample, mutable=names, rngs=rngs, **mode(model.apply, True))[1]

    try:
        with nn.intercept_methods(notice):
            traced, after = jax.make_jaxpr(step, return_shape=True)(variables, streams(0, 0, 0))
    except Exception:
        if names:
            raise
        return [], []  # it does not train on the sample alone, as a loss that hands it more may
    given = [id(var) for var in traced.jaxpr.invars]  # the variables, then the two random keys
    used = {id(var) for equation in traced.jaxpr.eqns for var in equation.invars}
    statistics = jax.tree.unflatten(jax.tree.structure(after), map(id, traced.jaxpr.outvars)).get("batch_stats")
    idle = []
    if statistics and set(given).issuperset(jax.tree.leaves(statistics)):
        idle.append("has batch_stats that no training step changes")
    if any(drops) and used.isdisjoint(given[-2:]):
        idle.append("has dropout that never draws")
    known = f"a keyword of its __call__ must say whether it trains, by one of the names {', '.join(TRAINS + RESTS)}"
    before, after = (jax.tree.map(jnp.shape, tree) for tree in (variables, after))
    kept = [name for name in names if name in after and before[name] == after[name]]
    return kept, [f"{type(model).__name__} {what}: {known}." for what in idle]


def _is_nnx(model):
    """Whether a Linen module is Flax's bridge to an NNX one, which makes its random streams before it needs them."""
    return hasattr(model, "nnx_class")


def _nnx_call(train, module, *args, **kwargs):
    (module.train if train else module.eval)()
    return module(*args, **kwargs)
