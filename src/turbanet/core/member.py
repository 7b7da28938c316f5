"""One member: its random keys, its model with its own collections and mode, its training step."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from flax.core.scope import in_filter, union_filters
from flax.core.tracers import current_trace
from flax.errors import InvalidRngError, ModifyScopeVariableError

from turbanet.backend import on_accelerator
from turbanet.core.arrays import as_arrays
from turbanet.core.optimizers import evaluation_params
from turbanet.core.state import State, Swarm

Scored: TypeAlias = tuple[jax.Array, Any]  # the loss and the prediction
INIT, SHUFFLE, STREAMS, AUGMENT, ACT, PLAY = range(6)  # tags that keep a member's random streams apart
TRAIN_FLAGS = "train", "training", "is_training"  # keywords of a model's `__call__` that are true in training
EVAL_FLAGS = "deterministic", "use_running_average", "inference", "inference_mode"  # and in evaluation
FLAG = "a keyword of its __call__ must say whether it trains, by one of the names"
ROWS = 1024  # of a member that a CPU scores or predicts at a time: the outputs of all layers may need gigabytes
ROWS_ON_ACCELERATOR = 16 * ROWS  # likewise; if even that is too much, blocks get smaller


def member_key(seed: Any, id: Any, tag: int) -> jax.Array:
    """The key of one random stream of the member (`seed`, `id`); it depends on these and the stream's `tag` alone."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, id), tag)


def streams(seed: Any, id: Any, step: Any, call: int = 0) -> dict[str, jax.Array]:
    """Return the random keys of the model of the member (`seed`, `id`) in training, {stream: key}.

    The keys are new at each `step` and at each `call` of the model in a step. Flax draws a stream of any other name
    from "params".
    """
    key = jax.random.fold_in(member_key(seed, id, STREAMS), step)
    params, dropout = jax.random.split(jax.random.fold_in(key, call))
    return {"params": params, "dropout": dropout}


@lru_cache
def mode(apply_fn: Callable, train: bool) -> dict[str, Any]:
    """Return the keyword arguments that put the model behind `apply_fn` into training (`train`) or evaluation.

    They are those of `TRAIN_FLAGS` and `EVAL_FLAGS` that the model takes; an NNX module in Flax's bridge is switched by
    its own methods too.
    """
    model = getattr(apply_fn, "__self__", None)
    if not isinstance(model, nn.Module):
        return {}
    kind = getattr(model, "nnx_class", type(model))  # or a function that returns an NNX module, which takes none
    named = parameters(kind.__call__) if isinstance(kind, type) else {}
    flags = {name: train == (name in TRAIN_FLAGS) for name in named if name in TRAIN_FLAGS + EVAL_FLAGS}
    return flags | ({"nnx_method": partial(_nnx_call, train)} if is_nnx(model) else {})


class AlwaysTrains(ValueError):
    """Raised in evaluation mode by a model that draws or changes its statistics."""


@dataclasses.dataclass(frozen=True)
class Functions:
    """A pair of functions as a model: init_params(key, x) -> params, apply_params(params, x) -> prediction."""

    init_params: Callable
    apply_params: Callable

    def init(self, key: jax.Array, x: Any) -> dict[str, Any]:
        return {"params": self.init_params(key, x)}

    def apply(self, variables: Mapping[str, Any], x: Any, **kwargs: Any) -> Any:
        return self.apply_params(variables["params"], x, **kwargs)


def as_model(model: Any) -> Any:
    """Return a model, a pair of functions as `Functions`; ValueError for what is no model."""
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        return Functions(*model)
    if isinstance(model, type) or not (hasattr(model, "init") and hasattr(model, "apply")):
        received = f"the class {model.__name__}" if isinstance(model, type) else " ".join(repr(model).split())[:60]
        valid = (
            "a Linen module, such as tn.MLP((16, 2)), an NNX one in flax.nnx.bridge.ToLinen, or a pair (init, apply)"
        )
        raise ValueError(f"The model is {valid}; got {received}.")
    return model


@dataclasses.dataclass(eq=False)
class Bound:
    """`apply_fn` as a loss receives it, with the member's collections, random streams and mode filled in.

    `apply_fn({"params": params}, x, ...)` returns the prediction alone. In training, `state` carries the collections
    that the model changes to the next call and the next step; evaluation changes nothing and draws nothing.
    Arguments that the caller names (`rngs`, `mutable`, collections, and in training the mode) take precedence. An
    evaluation of more than `rows_at_once` rows computes so many at a time, each for itself, and hands all to the loss.
    """

    state: State
    train: bool
    rows_at_once: int | None = None
    calls: int = 0
    trace: Any = dataclasses.field(default_factory=current_trace)

    def __call__(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        apply_fn: Any = state.apply_fn
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise ValueError('apply_fn takes what Flax takes, apply_fn({"params": params}, x); it got other names.')
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(args)} - {()}
        lead = any(getattr(leaf, "shape", ())[:1] in rows for leaf in jax.tree.leaves(kwargs))
        at_once = None if lead else self.rows_at_once
        flags = mode(apply_fn, self.train)
        if not self.train and (wrong := [name for name in flags.keys() & kwargs if kwargs[name] != flags[name]]):
            problem = f"apply_fn({{'params': params}}, x, {wrong[0]}={kwargs[wrong[0]]}) would score in training mode"
            raise ValueError(f"{problem}: leave {wrong[0]} out, a loss's apply_fn sets it, the streams and statistics.")
        kwargs = flags | own_constants(_called(apply_fn), state) | kwargs
        carried = {name: value for name, value in state.collections.items() if name not in variables}
        variables = {**carried, **variables}
        if not self.train or not isinstance(getattr(apply_fn, "__self__", None), nn.Module):
            try:
                return _in_chunks(lambda *rows: apply_fn(variables, *rows, **kwargs), args, at_once)
            except (InvalidRngError, ModifyScopeVariableError) as error:
                if self.train or not isinstance(getattr(apply_fn, "__self__", None), nn.Module):
                    raise
                problem = f"In evaluation mode the model draws or changes its statistics: {FLAG}"
                raise AlwaysTrains(f"{problem} {', '.join(TRAIN_FLAGS + EVAL_FLAGS)}.") from error
        rngs = streams(state.seed, state.id, state.step, self.calls)
        self.calls += 1
        rngs["default"] = rngs["params"]  # an NNX module's, which would have the same key for every member and step
        kwargs = {"rngs": rngs} | kwargs
        requested = kwargs.pop("mutable", None)
        if not carried or requested is False:
            return apply_fn(variables, *args, **kwargs, **({} if requested is None else {"mutable": requested}))
        if current_trace() != self.trace:
            cause = f"The model changes its {sorted(state.collections)} in training, which cannot leave a vmap, grad or"
            advice = (
                "call apply_fn outside, or with mutable=False and train=False, or give the collections beside params"
            )
            raise ValueError(f"{cause} scan in the loss: {advice}.")
        mutable = list(carried) if requested is None else union_filters(requested, list(carried))
        prediction, changed = apply_fn(variables, *args, mutable=mutable, **kwargs)
        new = jax.tree.map(lambda new, old: new.astype(old.dtype), {name: changed[name] for name in carried}, carried)
        self.state = state.replace(collections={**state.collections, **new})
        if requested is None:
            return prediction
        return prediction, {name: value for name, value in changed.items() if in_filter(requested, name)}


def _in_chunks(function, args, max_rows):
    """`function(*args)`, `max_rows` rows at a time if all leaves of the arguments and the result lead with the rows."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(args)}
    (length,) = lengths.pop() if len(lengths) == 1 and () not in lengths else (0,)
    if max_rows is None or length <= max_rows:
        return function(*args)
    result = jax.eval_shape(function, *args)
    if any(leaf.shape[:1] != (length,) for leaf in jax.tree.leaves(result)):
        return function(*args)
    chunks = -(-length // max_rows)
    size = -(-length // chunks)

    def divided(leaf):
        filled = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], chunks * size - length, axis=0)])
        return filled.reshape(chunks, size, *leaf.shape[1:])

    out = jax.lax.map(lambda chunk: function(*chunk), jax.tree.map(divided, args))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:length], out)


def checked(out: Any) -> Scored:
    """Return `out`, what a loss returned, if it is (scalar, prediction); raise ValueError otherwise, in tracing."""
    is_pair = isinstance(out, tuple) and len(out) == 2
    if not is_pair or jnp.shape(out[0]) != ():
        advice = "take the loss's mean" if is_pair else "return the prediction beside it"
        raise ValueError(f"A loss returns (scalar, prediction), not shapes {jax.tree.map(jnp.shape, out)}: {advice}.")
    loss = jnp.asarray(out[0])
    if jnp.issubdtype(loss.dtype, jnp.floating):  # in half precision it would have few digits, as would metrics
        loss = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
    return loss, out[1]


def takes(function: Callable, name: str) -> bool:
    """Whether a function's own signature, not that of a function it wraps, has a parameter of this name.

    One that a partial has filled in is none.
    """
    return name in parameters(function, follow_wrapped=False) and not (
        isinstance(function, partial) and name in function.keywords
    )


def parameters(function: Callable, *, follow_wrapped: bool = True) -> Mapping[str, inspect.Parameter]:
    """Return the parameters in a function's signature; none if it is written in C and has no signature."""
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped).parameters
    except (TypeError, ValueError):
        return {}


def own_constants(function: Callable, state: State) -> dict[str, Any]:
    """Return {"member": the constants of the member} for a loss or a model that takes the keyword, else {}."""
    return {"member": state.member} if takes(function, "member") else {}


def with_constants(swarm: Swarm, constants: Any, loss_fn: Callable | None) -> Swarm:
    """Return the swarm with `constants`, a tree of [member, ...]; None: with those that it has.

    Raises ValueError for constants that do not lead with the members, or that neither the loss nor the model takes,
    and for a loss that takes some where there are none.
    """
    if constants is not None:
        constants = jax.tree.map(jnp.asarray, as_arrays(constants, "member"))
        lengths = sorted({leaf.shape[:1] for leaf in jax.tree.leaves(constants)})
        if lengths != [(len(swarm),)]:
            raise ValueError(f"member must lead with the {len(swarm)} members; its arrays lead with {lengths}.")
        if not any(takes(each, "member") for each in (loss_fn, _called(swarm.apply_fn)) if each):
            raise ValueError("member= is for a loss or a model that takes the keyword `member`, and neither does.")
        return swarm.replace(member=constants)
    if loss_fn and swarm.member is None and takes(loss_fn, "member"):
        raise ValueError("The loss takes the keyword `member`: give each member's own constants to fit, as member=.")
    return swarm


def _called(apply_fn):
    """Return the function that a model's apply calls."""
    model = getattr(apply_fn, "__self__", None)
    if isinstance(model, Functions):
        return model.apply_params
    if not isinstance(model, nn.Module):
        return apply_fn
    kind = getattr(model, "nnx_class", type(model))
    return inspect.unwrap(kind.__call__) if isinstance(kind, type) else apply_fn


def train_step(loss_fn: Callable, state: Swarm, x: Any, y: Any, mask: Any = None) -> tuple[Swarm, jax.Array, Any]:
    """One optimizer step of one member on `loss_fn` of x [batch, ...] and y: -> (state, loss, prediction).

    mask : bool [batch], which rows count, for a loss that takes it; None: all
    """
    with_constants(state, None, loss_fn)
    kwargs = own_constants(loss_fn, state) | ({} if mask is None else {"mask": mask})

    def loss(params):
        apply_fn = Bound(state, train=True)
        value, prediction = checked(loss_fn(params, x, y, apply_fn, **kwargs))
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"A loss to train by is a floating-point number, got {value.dtype}: cast it.")
        return value, (prediction, apply_fn.state.collections)

    (value, (prediction, collections)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, value=value, collections=collections), value, prediction


def evaluate(
    loss_fn: Callable, state: State, x: Any, y: Any, mask: Any = None, *, rows_at_once: int | None = None
) -> Scored:
    """One member's (loss, prediction) by `loss_fn` on x [batch, ...], y, with running statistics and no randomness.

    mask : as in `train_step`
    """
    with_constants(state, None, loss_fn)
    params = evaluation_params(state.opt_state, state.params)
    kwargs = own_constants(loss_fn, state) | ({} if mask is None else {"mask": mask})
    return checked(loss_fn(params, x, y, Bound(state, train=False, rows_at_once=rows_at_once), **kwargs))


def predict(state: State, x: Any, *, rows_at_once: int | None = None, **kwargs: Any) -> Any:
    """One member's prediction on x [batch, ...], as in `evaluate`; `kwargs` go to Flax's apply."""
    params = evaluation_params(state.opt_state, state.params)
    return Bound(state, train=False, rows_at_once=rows_at_once)({"params": params}, x, **kwargs)


def changing(state: State) -> list[str]:
    """Return the names of one member's collections that a training step changes, as statistics of a batch are.

    A table of constants is none. All, where the model cannot be traced on the swarm's sample.
    """

    def step(collections, x):
        apply_fn = Bound(state.replace(collections=collections), train=True)
        apply_fn({"params": state.params}, x)
        return apply_fn.state.collections

    try:
        traced, after = jax.make_jaxpr(step, return_shape=True)(state.collections, unfreeze(state.sample))
    except Exception:
        return sorted(state.collections)
    given = set(map(id, traced.jaxpr.invars))
    after = jax.tree.unflatten(jax.tree.structure(after), map(id, traced.jaxpr.outvars))
    return [name for name in sorted(after) if not given.issuperset(jax.tree.leaves(after[name]))]


def initial(model: Any, seed: Any, id: Any, sample: Any) -> Any:
    """Return the initial variables {"params": ..., other collections} of the member (`seed`, `id`) of a Flax `model`.

    sample: an input, whose shape and type the model is made for.
    """
    key = member_key(seed, id, INIT)
    of_flax = isinstance(model, nn.Module)  # an NNX one in Flax's bridge, or in another module, asks for each stream
    keys = {"params": key, "dropout": key, "default": key} if of_flax else key
    return model.init(keys, sample, **mode(model.apply, False))


def survey(model: Any, variables: Any, sample: Any) -> tuple[list[str], list[str]]:
    """Trace a training step of `model` on `sample`: -> (names of the collections that are state, warnings).

    variables: as `initial` returns them, or their shapes. State are collections that keep their shapes in a step and
    are not what `sow` reports of one. Warnings, sentences, tell of running statistics that no step changes and of
    dropout that draws nothing.
    """
    names = sorted(set(variables) - {"params"})
    if not names and not isinstance(model, nn.Module):
        return [], []
    drops, sown = [], set()

    def sow(module, collection, *args, **kwargs):
        sown.add(collection)
        return type(module).sow(module, collection, *args, **kwargs)

    def notice(method, args, kwargs, context):
        fields = vars(context.module)
        fields["sow"] = partial(sow, context.module)
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
        return [], []  # it cannot train on the sample alone; the loss may pass it more
    inputs = [id(var) for var in traced.jaxpr.invars]  # the variables, then the two random keys
    used = {id(var) for equation in traced.jaxpr.eqns for var in equation.invars}
    statistics = jax.tree.unflatten(jax.tree.structure(after), map(id, traced.jaxpr.outvars)).get("batch_stats")
    idle = []
    if statistics and set(inputs).issuperset(jax.tree.leaves(statistics)):
        idle.append("has batch_stats that no training step changes")
    if any(drops) and used.isdisjoint(inputs[-2:]):
        idle.append("has dropout that never draws")
    before, after = (jax.tree.map(jnp.shape, tree) for tree in (variables, after))
    carried = [name for name in names if name in after and before[name] == after[name] and name not in sown]
    return carried, [f"{type(model).__name__} {what}: {FLAG} {', '.join(TRAIN_FLAGS + EVAL_FLAGS)}." for what in idle]


def is_nnx(model):
    """Whether a Linen module is Flax's bridge to an NNX one, which needs its random streams when it is created."""
    return hasattr(model, "nnx_class")


def _nnx_call(train, module, /, *args, **kwargs):
    (module.train if train else module.eval)()
    return module(*args, **kwargs)


def rows_at_once() -> int:
    """Return how many rows of a member the program being traced scores or predicts at a time."""
    return ROWS_ON_ACCELERATOR if on_accelerator() else ROWS
