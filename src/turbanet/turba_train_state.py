"""TurbaTrainState: many networks of one architecture as one pytree with a leading member axis."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.train_state import TrainState

from turbanet.training import member


@partial(jax.jit, static_argnums=3)
def _train(swarm, x, y, loss_fn):
    return jax.vmap(partial(member.train_step, loss_fn))(swarm, x, y)


@partial(jax.jit, static_argnums=3)
def _evaluate(swarm, x, y, loss_fn):
    return jax.vmap(partial(member.evaluate, loss_fn))(swarm, x, y)


@partial(jax.jit, static_argnums=2)
def _predict(swarm, x, capture_intermediates):
    kwargs = {"capture_intermediates": True, "mutable": ["intermediates"]} if capture_intermediates else {}
    return jax.vmap(partial(member.predict, **kwargs))(swarm, x)


class TurbaTrainState(TrainState):
    """A swarm: Flax's `TrainState` whose leaves lead with a `member` axis.

    A member is a name, not a position: its random numbers depend only on (`seed`, `id`, `epoch`), so adding or
    removing others never changes it. A state without the member axis (`create`, `get_state`) is one network.
    """

    seed: Any = 0
    id: Any = 0
    epoch: Any = 0
    collections: Any = struct.field(default_factory=dict)  # what the model keeps beside its params: {name: tree}
    schedule: Any = None  # see schedules.with_schedule
    stopping: Any = None  # while `fit` trains with a patience
    loss_fn: Callable | None = struct.field(pytree_node=False, default=None)
    sample: Any = struct.field(pytree_node=False, default=None)  # shape and type of an input, if known

    @classmethod
    def swarm(cls, model, optimizer, swarm_size, input_size=None, sample_input=None, seed=None):
        """Initialise `swarm_size` networks of the Flax `model` under the Optax `optimizer`.

        `model` is a Linen module with any variable collections and random streams, an NNX one in
        `flax.nnx.bridge.ToLinen`, or a pair of functions init(key, x) -> params, apply(params, x) -> prediction.
        `sample_input` is a batch [batch, ...] or one example; `input_size` stands for zeros [1, input_size]; an array
        given as `input_size` is taken as the sample. `seed` is an int (members differ by their id), one int per
        member, or None for 0.
        """
        if not isinstance(swarm_size, int | np.integer) or swarm_size < 1:
            raise ValueError(f"swarm_size must be a whole number of at least 1, got {swarm_size!r}.")
        if input_size is not None and np.ndim(input_size) > 0:
            input_size, sample_input = None, input_size
        if (input_size is None) == (sample_input is None):
            raise ValueError("Give either input_size (a number) or sample_input (an array), one of the two.")
        sample = jnp.zeros((1, input_size)) if sample_input is None else jnp.asarray(sample_input)
        seeds, ids = np.asarray(0 if seed is None else seed), np.zeros(swarm_size, int)
        if seeds.ndim == 0:
            seeds, ids = np.full(swarm_size, seeds), np.arange(swarm_size)
        if seeds.shape != (swarm_size,) or not np.issubdtype(seeds.dtype, np.integer):
            raise ValueError(f"seed must be one int or {swarm_size} ints, got {seed!r}.")

        model = member.Functions(*model) if isinstance(model, tuple) else model
        carried = member.carried(model, jax.eval_shape(initial := partial(member.initial, model), 0, 0, sample), sample)

        def one(identity):
            variables = initial(*identity, sample)
            state = cls.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)
            return state.replace(collections={name: variables[name] for name in carried})

        # One after the other: batched QR (orthogonal initialisers) can deadlock XLA's CPU threads (jaxlib 0.10.2).
        # Level 1 compiles in half the time and gives the same bits; to run once, nothing better pays.
        quick = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
        swarm = jax.jit(partial(jax.lax.map, one), compiler_options=quick)((seeds, ids))
        named = {"seed": seeds, "id": ids, "step": np.zeros(swarm_size), "epoch": np.zeros(swarm_size)}
        named = {name: jnp.asarray(np.asarray(value, np.int32)) for name, value in named.items()}
        return swarm.replace(sample=jax.ShapeDtypeStruct(sample.shape, sample.dtype), **named)

    @classmethod
    def vmap_create(cls, *, apply_fn, params, tx, **kwargs):
        """A swarm from params that already lead with the member axis; ids are 0, 1, 2, ..."""
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
        if len(sizes) != 1 or () in sizes or (0,) in sizes:
            raise ValueError(f"All params must lead with one member axis of at least 1, got {sorted(sizes)}.")
        members = sizes.pop()[0]
        swarm = jax.jit(jax.vmap(lambda p: cls.create(apply_fn=apply_fn, params=p, tx=tx, **kwargs)))(params)
        zeros = jnp.zeros(members, jnp.int32)
        return swarm.replace(step=zeros, seed=zeros, epoch=zeros, id=jnp.arange(members, dtype=jnp.int32))

    def set_loss_fn(self, loss_fn):
        """The same swarm with `loss_fn(params, x, y, apply_fn) -> (scalar, prediction)` for `train`."""
        return self.replace(loss_fn=loss_fn)

    def train(self, x, y, loss_fn=None, **ignored):
        """One optimizer step of every member: -> (swarm, loss [member], prediction [member, ...]).

        x: [member, ..., feature]; y: [member, ...]; a swarm of one also takes them without the member axis.
        """
        return _train(self, self._lead(x, "x"), self._lead(y, "y"), self.loss(loss_fn))

    def evaluate(self, x, y, loss_fn=None):
        """The loss of every member on its own data: -> (loss [member], prediction [member, ...])."""
        return _evaluate(self, self._lead(x, "x"), self._lead(y, "y"), self.loss(loss_fn))

    def predict(self, x, capture_intermediates=False):
        """Every member's prediction [member, ...] on its own x [member, ..., feature].

        With `capture_intermediates` also every layer's output: -> (prediction, {"intermediates": ...}).
        """
        return _predict(self, self._lead(x, "x"), bool(capture_intermediates))

    def apply_gradients(self, *, grads, value=None, **kwargs):
        """One optimizer update; on a swarm, of each member by itself. `value` is the loss, for optimizers that ask."""
        if jnp.ndim(self.step) > 0:
            return jax.vmap(lambda s, g, v, k: s.apply_gradients(grads=g, value=v, **k))(self, grads, value, kwargs)
        extra = {} if value is None else {"value": value}
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, self.opt_state, self.params, **extra)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    def append(self, other, return_ids=False):
        """Both swarms as one, this one's members first; an appended id that is already taken gets the next free one.

        With `return_ids` -> (swarm, the ids [member] that the appended members have in it).
        """
        for name in ("params", "collections", "opt_state", "schedule"):
            mine, theirs = getattr(self, name), getattr(other, name)
            spec = [jax.tree.map(lambda a: (jnp.shape(a)[1:], jnp.result_type(a)), t) for t in (mine, theirs)]
            if jax.tree.structure(mine) != jax.tree.structure(theirs) or spec[0] != spec[1]:
                raise ValueError(f"append needs two swarms of one architecture and optimizer; their {name} differ.")
        taken = set(zip(np.asarray(self.seed).tolist(), np.asarray(self.id).tolist(), strict=True))
        ids = []
        for seed, id in zip(np.asarray(other.seed).tolist(), np.asarray(other.id).tolist(), strict=True):
            if (seed, id) in taken:
                id = 1 + max(i for s, i in taken if s == seed)
            taken.add((seed, id))
            ids.append(id)
        leaves = jax.tree.leaves(other.replace(id=jnp.asarray(ids, jnp.int32)))
        other = jax.tree.unflatten(jax.tree.structure(self), leaves)  # functions may be equal but not identical
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), self, other)
        return (both, np.array(ids)) if return_ids else both

    def merge(self):
        """A swarm of one, the mean of the members' weights and moments; counts stay whole numbers (the largest)."""

        def mean(leaf):
            whole = not jnp.issubdtype(leaf.dtype, jnp.inexact)
            return leaf.max(0, keepdims=True) if whole else leaf.mean(0, keepdims=True)

        return jax.tree.map(mean, self).replace(seed=self.seed[:1], id=self.id.max(keepdims=True) + 1)

    def get_state(self, index):
        """Member `index` as one network, without the member axis."""
        index = self._position(index)
        return jax.tree.map(lambda leaf: leaf[index], self)

    def remove_state(self, index):
        """The swarm without member `index`."""
        if len(self) == 1:
            raise ValueError("A swarm has at least one member; the last one cannot be removed.")
        index = self._position(index)
        return jax.tree.map(lambda leaf: jnp.delete(leaf, index, axis=0), self)

    def __getitem__(self, ids):
        """The swarm of the members of these ids, in this order; pairs (seed, id) where seeds differ."""
        wanted, names = np.atleast_1d(np.asarray(ids)), np.stack([np.asarray(self.seed), np.asarray(self.id)], axis=1)
        found = names[:, 1] == wanted[:, None] if wanted.ndim == 1 else (names == wanted[:, None]).all(-1)
        if not found.any(axis=1).all():
            missing = wanted[~found.any(axis=1)][0].tolist()
            raise KeyError(f"No member {missing} in this swarm; its ids are {names[:, 1].tolist()}.")
        if (found.sum(axis=1) > 1).any():
            twice = wanted[found.sum(axis=1) > 1][0].tolist()
            raise ValueError(f"{twice} names more than one member: give pairs (seed, id), each of one member.")
        return jax.tree.map(lambda leaf: leaf[found.argmax(axis=1)], self)

    def __iter__(self):
        return (self.get_state(index) for index in range(len(self)))

    def cost_analysis(self, x):
        """XLA's estimate of the forward pass of one member on x [batch, feature]: floating-point operations, bytes."""
        state = self.get_state(0)
        return jax.jit(member.predict).lower(state, x).cost_analysis()

    @property
    def shape(self):
        """(members, inputs, outputs): the widths of the last axis of an input and of a prediction."""
        if self.sample is None:
            widths = _kernel_widths(self.params)
            return (len(self), *widths)
        prediction = jax.eval_shape(member.predict, self.get_state(0) if jnp.ndim(self.step) else self, self.sample)
        return (len(self), self.sample.shape[-1], prediction.shape[-1])

    def __len__(self):
        return self.step.shape[0] if jnp.ndim(self.step) else 1

    def loss(self, loss_fn=None):
        """`loss_fn` if given, else the swarm's own."""
        loss_fn = loss_fn or self.loss_fn
        if loss_fn is None:
            raise ValueError("This swarm has no loss: pass loss_fn, or call swarm = swarm.set_loss_fn(loss_fn) first.")
        return loss_fn

    def _position(self, index):
        if not -len(self) <= index < len(self):
            raise IndexError(f"No member {index} in a swarm of {len(self)}.")
        return index % len(self)

    def _lead(self, data, name):
        """`data`, checked to lead with the member axis; jit takes NumPy arrays as they are."""
        members = len(self)

        def lead(leaf):
            if members == 1 and np.shape(leaf)[:1] != (1,):
                leaf = jnp.asarray(leaf)[None]
            if np.shape(leaf)[:1] != (members,):
                raise ValueError(f"{name} has shape {np.shape(leaf)}; it must lead with the {members} members.")
            return leaf

        return jax.tree.map(lead, data)


def _kernel_widths(params):
    """(inputs, outputs) of a stack of layers known only by its params: the first and last kernel in natural order."""

    def natural(path):
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", jax.tree_util.keystr(path))]

    leaves = [(natural(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if leaf.ndim >= 3]
    if not leaves:
        raise ValueError("shape is unknown: no sample input was given and no layer has a kernel.")
    leaves.sort(key=lambda pair: pair[0])
    return leaves[0][1].shape[-2], leaves[-1][1].shape[-1]
