"""The state of a swarm: many networks of one architecture as one pytree with a leading member axis."""

from __future__ import annotations

import copy
import dataclasses
import html
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import freeze
from flax.errors import ScopeParamShapeError
from numpy.typing import ArrayLike

from turbanet.backend import on_accelerator, platform
from turbanet.checkpoints import serialization
from turbanet.checkpoints.describe import described
from turbanet.core import member
from turbanet.core.aliases import aliases
from turbanet.core.arrays import as_arrays, check_ids, check_next_ids, check_seed, check_whole, first_line, is_key
from turbanet.core.cache import read
from turbanet.core.fingerprint import fingerprint
from turbanet.core.gather import is_on_host, resized
from turbanet.core.optimizers import check_optimizer
from turbanet.core.plan import say_once
from turbanet.core.state import State, check_swarm
from turbanet.training.compilation import remembered
from turbanet.training.program import Evaluate

PAIR = np.array([2**32, 1])  # of a seed and an id: one number for both
_by_public_names = aliases(input_data="x", output_data="y")  # of TurbaNet 0.4


def _each(function, fixed, swarm, x, *y):
    """Return function(fixed, member, its data) for every member, compiled once for each function and `fixed`."""
    fingerprints = read(Evaluate(fixed), swarm.apply_fn, swarm.tx)
    try:
        return _compiled_each(function, fixed, fingerprints, swarm, x, *y)
    except ScopeParamShapeError as error:
        got, made = (jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (x, swarm.sample))
        raise ValueError(f"The model cannot take x of shape {got}; the swarm was made for {made}, a batch.") from error


@partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled_each(function, fixed, fingerprints, swarm, *data):
    return jax.vmap(partial(function, fixed))(swarm, *data)


def _predict(capture, state, x):
    settings: dict[str, Any] = {"capture_intermediates": True, "mutable": ["intermediates"]} if capture else {}
    return member.predict(state, x, **settings)


class TurbaTrainState(State):
    """A swarm: Flax's `TrainState` whose leaves lead with a `member` axis; `State` lists its fields.

    A member is identified by `seed` and `id`, not by position: its random numbers depend only on these and on `epoch`,
    so adding or removing others never changes it. A state without the member axis (`create`, `get_state`) is one
    network.
    """

    @classmethod
    def swarm(
        cls,
        model: Any,
        optimizer: optax.GradientTransformation,
        swarm_size: int | ArrayLike,
        input_size: Any = None,
        sample_input: Any = None,
        seed: int | Sequence[int] | None = None,
    ) -> Self:
        """Initialise `swarm_size` networks of one architecture.

        Parameters
        ----------
        model : a Linen module with any variable collections and random streams, an NNX one in
            `flax.nnx.bridge.ToLinen`, or a pair of functions init(key, x) -> params, apply(params, x) -> prediction
        optimizer : an Optax one, as for one network
        swarm_size : the number of members, or their ids, int [member], in place of 0, 1, 2, ...; a member is, bit for
            bit, the same as among all
        input_size : the number of features, for a sample of zeros [1, input_size]; an array is taken as the sample
        sample_input : a batch [batch, ...] or one example, in place of `input_size`; for a model of several inputs a
            dict or tuple of them
        seed : an int (members differ by their id), one int a member, or None for 0

        Returns
        -------
        The swarm: every leaf leads with the member axis.

        Raises
        ------
        ValueError : for no or both of `input_size` and `sample_input`, for invalid numbers of members, ids and seeds,
            for a model without parameters or with integer ones, and for an optimizer that is none of Optax's or needs
            more than gradients, parameters and the loss.

        Examples
        --------
        >>> import numpy as np
        >>> import optax
        >>> from turbanet import MLP, TurbaTrainState
        >>> swarm = TurbaTrainState.swarm(MLP((16, 3)), optax.adam(1e-3), swarm_size=5, input_size=4, seed=0)
        >>> swarm.shape
        (5, 4, 3)
        >>> swarm.predict(np.zeros((5, 2, 4))).shape  # [member, batch, feature] -> [member, batch, output]
        (5, 2, 3)
        """
        own_ids = check_ids(swarm_size, "swarm_size") if np.ndim(swarm_size) else None
        members: Any = swarm_size if own_ids is None else len(own_ids)
        check_whole(swarm_size=members)
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise ValueError(f"The optimizer is one of Optax's, such as optax.adam(0.001); got {optimizer!r}.")
        if (input_size is None) == (sample_input is None):
            raise ValueError("Give either input_size (a number) or sample_input (an array), one of the two.")
        if isinstance(input_size, tuple | list) and np.ndim(input_size) == 1:
            shape = ", ".join(["1", *map(str, input_size)])
            raise ValueError(
                f"input_size is one number, got {input_size!r:.60}: give sample_input=np.zeros(({shape}))."
            )
        if sample_input is None and not np.ndim(input_size):
            check_whole(input_size=input_size.item() if hasattr(input_size, "item") else input_size)
        if sample_input is None:
            sample_input = input_size if np.ndim(input_size) else jnp.zeros((1, input_size))
        sample = jax.tree.map(jnp.asarray, as_arrays(sample_input, "sample_input"))
        seeds = check_seed(0 if seed is None else seed, members=members)
        ids = np.arange(members) if seeds.ndim == 0 else np.zeros(members, int)
        seeds = np.full(members, seeds) if seeds.ndim == 0 else seeds
        if own_ids is not None:
            ids = own_ids
            if np.unique([seeds, ids], axis=1).shape[1] < members:
                raise ValueError(f"Two members of one seed have the same id: ids must differ, got {ids!s:.60}.")

        model = member.as_model(model)

        def all_members():
            create_member = cls._creator(model, optimizer, sample)

            def create(identity):  # without functions: equal models and optimizers share a program
                return create_member(identity).replace(apply_fn=None, tx=None)

            if on_accelerator():
                return jax.jit(jax.vmap(create))
            # One after the other: batched QR (orthogonal initialisers) can deadlock XLA's CPU threads (jaxlib 0.10.2).
            # Level 1 compiles in half the time and gives the same bits; the program runs only once. It would override
            # level 0, which JAX has a setting for.
            quick = jax.config.read("jax_disable_most_optimizations")
            options = {} if quick else {"xla_backend_optimization_level": 1}
            return jax.jit(partial(jax.lax.map, create), compiler_options=options)

        leaves, tree = jax.tree.flatten(sample)
        identity = read(member.initial, model.apply, optimizer), fingerprint(leaves), tree, platform()
        program = remembered((cls, *identity), all_members)
        swarm = program({"seed": seeds, "id": ids}).replace(apply_fn=model.apply, tx=optimizer)
        spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sample)
        return swarm.replace(sample=freeze(spec) if isinstance(spec, dict) else spec)

    @classmethod
    def _creator(cls, model, optimizer, sample):
        """Return a function of {"seed": ..., "id": ...} that creates that member, untrained."""
        model = member.as_model(model)
        initial = partial(member.initial, model)
        try:
            shapes = jax.eval_shape(initial, 0, 0, sample)
        except Exception as error:  # of the user's model
            advice = "it takes one, x, an array or a dict or tuple of arrays"
            if isinstance(error, TypeError) and "required positional argument" in str(error):
                raise ValueError(f"The model is called with more than its input ({error}): {advice}.") from error
            if hasattr(sample, "shape"):
                raise
            shapes = f"{jax.tree.map(jnp.shape, sample)!s:.200}"
            problem = f"The model cannot take a sample_input of the shapes {shapes} ({first_line(error)})"
            raise ValueError(f"{problem}: for one array give that, [batch, ...].") from error
        if optimizer is not serialization.INFERENCE_ONLY:
            check_optimizer(optimizer, shapes.get("params", {}))
        carried, warnings = member.survey(model, shapes, sample)
        for warning in warnings:
            say_once(warning)

        def create_member(identity):
            variables = initial(**identity, sample=sample)
            state = cls.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)
            counters = jax.tree.map(jnp.int32, {**identity, "step": 0, "epoch": 0})
            return state.replace(collections={name: variables[name] for name in carried}, **counters)

        return create_member

    @classmethod
    def vmap_create(cls, *, apply_fn: Callable, params: Any, tx: optax.GradientTransformation, **kwargs: Any) -> Self:
        """Create a swarm from parameters that already lead with the member axis; ids are 0, 1, 2, ...

        Parameters
        ----------
        apply_fn : apply_fn({"params": params}, x) -> prediction, of one network
        params : a tree of [member, ...]
        tx : the Optax optimizer
        kwargs : other fields of the state, one value for all members; of seed, step, epoch and id also one a member

        Returns
        -------
        The swarm.

        Raises
        ------
        ValueError : for params that do not lead with one member axis, and for what `swarm` refuses of params and tx
        """
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
        if len(sizes) != 1 or () in sizes or (0,) in sizes:
            raise ValueError(f"All params must lead with one member axis of at least 1, got {sorted(sizes)}.")
        check_optimizer(tx, jax.eval_shape(partial(jax.tree.map, lambda leaf: leaf[0]), params))
        (members,) = sizes.pop()
        counters: dict[str, Any] = {"step": 0, "seed": 0, "epoch": 0, "id": np.arange(members)}
        counters = {name: kwargs.pop(name, value) for name, value in counters.items()}
        swarm = jax.jit(jax.vmap(lambda p: cls.create(apply_fn=apply_fn, params=p, tx=tx, **kwargs)))(params)
        counters = {name: np.broadcast_to(value, members) for name, value in counters.items()}
        return swarm.replace(**jax.tree.map(jnp.int32, counters))

    def save(self, folder: str | os.PathLike) -> None:
        """Save the swarm to `folder`, whole or not at all, in place of one that was saved there before.

        Saved are all arrays and the fingerprints of model, optimizer and schedules; no code, and not the loss: `load`
        takes the model and the optimizer, `set_loss_fn` the loss. Raises ValueError for a folder that holds something
        else, OSError if it cannot be written.
        """
        serialization.save(self, folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike,
        model: Any,
        optimizer: optax.GradientTransformation | None = None,
        *,
        schedule: Any = None,
        sample_input: Any = None,
        check: bool = True,
    ) -> Self:
        """Load the swarm that `save` wrote, bit for bit; it predicts and trains on as the saved one would have.

        Parameters
        ----------
        folder : that of `save`
        model, optimizer : those of `swarm`; without an optimizer the loaded swarm predicts and cannot be trained
        schedule : that of `with_schedule`, if it holds a function of your own; schedules with a name are restored
        sample_input : a batch of the input, only for a swarm that was not made by `swarm` and so does not know it
        check : whether to refuse a model, an optimizer or a schedule whose code or contents are not those saved; arrays
            of other names, shapes and types are always refused

        Returns
        -------
        The swarm, without a loss: see `set_loss_fn`.

        Raises
        ------
        FileNotFoundError : for a folder without a saved swarm
        ValueError : for a swarm of another format, and for what `check` refuses. Under another version of Python or of
            a package a difference of code is logged and not refused, as the code of the same model may differ.

        Examples
        --------
        >>> import optax, tempfile, turbanet as tn
        >>> swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 3)), optax.adam(1e-3), swarm_size=5, input_size=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     swarm.save(folder)
        ...     again = tn.TurbaTrainState.load(folder, tn.MLP((8, 3)), optax.adam(1e-3))
        >>> again.shape
        (5, 4, 3)
        """
        creator = partial(cls._creator, model, serialization.INFERENCE_ONLY if optimizer is None else optimizer)
        return serialization.load(folder, creator, schedule=schedule, sample_input=sample_input, check=check)

    def set_loss_fn(self, loss_fn: Callable) -> Self:
        """Return the swarm with `loss_fn(params, x, y, apply_fn) -> (scalar, prediction)` for `train`."""
        bare = self.replace(loss_fn=None)
        return bare.replace(loss_fn=bare.loss(loss_fn))

    @_by_public_names
    def train(self, x: Any, y: Any, loss_fn: Callable | None = None) -> tuple[Self, jax.Array, Any]:
        """Make one optimizer step of every member: -> (swarm, loss [member], prediction [member, ...]).

        x: [member, ..., feature]; y: [member, ...]; a swarm of one also takes them without the member axis. Arrays,
        tensors, tables, lists, or trees of them. `loss_fn` None is that of `set_loss_fn`. The names of TurbaNet 0.4,
        `input_data` and `output_data`, stand for x and y; an unknown keyword raises TypeError.
        """
        return _each(member.train_step, self.loss(loss_fn), self, *self._lead(x, y))

    @_by_public_names
    def evaluate(self, x: Any, y: Any, loss_fn: Callable | None = None) -> tuple[jax.Array, Any]:
        """Evaluate every member on its own x and y, as in `train`: -> (loss [member], prediction [member, ...])."""
        return _each(member.evaluate, self.loss(loss_fn), self, *self._lead(x, y))

    @_by_public_names
    def predict(self, x: Any, capture_intermediates: bool = False) -> Any:
        """Return every member's prediction [member, ...] on its own x [member, ..., feature].

        With `capture_intermediates` also every layer's output: -> (prediction, {"intermediates": ...}).
        """
        return _each(_predict, bool(capture_intermediates), self, *self._lead(x))

    def append(self, other: Self, return_ids: bool = False) -> Any:
        """Append the members of `other` to the swarm; an appended id that is taken becomes the next free one.

        With `return_ids` -> (swarm, the ids [member] that the appended members have in it).
        """
        check_swarm(self)
        check_swarm(other)
        for name in ("params", "collections", "opt_state", "schedule", "member"):
            one, two = (getattr(swarm, name) for swarm in (self, other))
            if name == "schedule" and one and two and fingerprint(one.functions) == fingerprint(two.functions):
                two = two.replace(functions=one.functions)
            if _member_specification(one) != _member_specification(two):
                what = "constants (fit's member=)" if name == "member" else name
                raise ValueError(f"append needs two swarms of one architecture and optimizer; their {what} differ.")
        for name, what in {"apply_fn": "model", "tx": "optimizer"}.items():
            one, two = getattr(self, name), getattr(other, name)
            if one != two and fingerprint(one) != fingerprint(two):
                raise ValueError(
                    f"append needs two swarms of one {what}, which trains and predicts for all; they differ."
                )
        names = list(zip(self.seed.tolist(), self.id.tolist(), strict=True))
        taken, highest = set(names), dict(sorted(names))  # {seed: its highest id}
        for seed, id in zip(other.seed.tolist(), other.id.tolist(), strict=True):
            id = highest[seed] + 1 if (seed, id) in taken else id
            names.append((seed, id))
            taken.add((seed, id))
            highest[seed] = max(id, highest.get(seed, id))
        ids = [id for _, id in names]
        check_next_ids(ids, 0)
        # The structure of the first: the functions in the two may be equal but not identical.
        other = jax.tree.unflatten(jax.tree.structure(self), jax.tree.leaves(other))
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), self, other).replace(id=jnp.array(ids, jnp.int32))
        return (both, np.array(ids[len(self) :])) if return_ids else both

    def merge(self) -> Self:
        """Merge the members into a swarm of one: mean weights and moments, the largest count, the first random key."""
        check_next_ids(check_swarm(self).id, 1)

        def mean(leaf):
            if is_key(leaf):
                return leaf[:1]
            average = leaf.mean if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.max
            return average(0, keepdims=True)

        return jax.tree.map(mean, self).replace(seed=self.seed[:1], id=self.id.max(keepdims=True) + 1)

    def copies(self, members: int) -> Self:
        """Return a swarm of copies of this swarm's one member, ids from 0 on; each draws and trains for itself."""
        check_whole(members=members)
        if len(check_swarm(self)) != 1:
            raise ValueError(f"copies are of one network, this is a swarm of {len(self)}: take swarm[[id]] of it.")
        return resized(self, members).replace(id=jnp.arange(members, dtype=self.id.dtype))

    def remove_state(self, index: int) -> Self:
        """Return the swarm without the member at position `index`."""
        if len(self) == 1:
            raise ValueError("A swarm has at least one member; the last one cannot be removed.")
        self._check_position(index)
        return jax.tree.map(lambda leaf: jnp.delete(leaf, index, axis=0), self)

    def __getitem__(self, ids: Any) -> Self:
        """Return the swarm of the members with these ids, in this order; pairs (seed, id) where seeds differ."""
        check_swarm(self)
        if isinstance(ids, slice):
            by_position = "jax.tree.map(lambda leaf: leaf[1:3], swarm)"
            raise TypeError(f"Members go by id, swarm[[4, 7]], as positions change; by position it is {by_position}.")
        requested = np.atleast_1d(np.asarray(ids))
        if not requested.size:
            raise ValueError("A swarm has at least one member, and no id came: give one.")
        if requested.dtype == bool:
            raise TypeError("Members go by id, swarm[[4, 7]], and a mask by position: swarm[swarm.id[mask]].")
        if requested.dtype.kind not in "iuf" or requested.shape[1:] not in ((), (2,)):
            raise KeyError(f"Members go by id, an int each, or by pairs (seed, id); got {ids!r:.60}.")
        names, wanted = np.asarray(self.id), requested
        if requested.ndim == 2:
            names, wanted = np.stack([np.asarray(self.seed), names], axis=1) @ PAIR, requested @ PAIR
        order = np.argsort(names)
        first, last = (np.searchsorted(names, wanted, side, sorter=order) for side in ("left", "right"))
        for name, members in zip(requested.tolist(), last - first, strict=True):
            if members == 0:
                raise KeyError(f"No member {name} in this swarm; its ids are {self.id.tolist()!s:.200}.")
            if members > 1:
                raise ValueError(f"{name} names more than one member: give pairs (seed, id), each of one member.")
        return jax.tree.map(lambda leaf: leaf[order[first]], self)

    def __iter__(self) -> Iterator[Self]:
        leaves, tree = jax.tree.flatten(check_swarm(self))
        leaves = [np.asarray(leaf) if is_on_host(leaf) else leaf for leaf in leaves]
        return (jax.tree.unflatten(tree, [leaf[index, ...] for leaf in leaves]) for index in range(len(self)))

    def cost_analysis(self, x: Any) -> dict[str, float] | None:
        """Return XLA's estimate of one member's forward pass on x [batch, feature]: FLOPs and bytes."""
        lowered = jax.jit(member.predict).lower(self.get_state(0), as_arrays(x, "x"))
        return lowered.cost_analysis() or lowered.compile().cost_analysis()  # on a GPU known only when compiled

    @property
    def shape(self) -> tuple[int, int, int]:
        """(members, inputs, outputs): the widths of the last axis of an input, an array, and of a prediction."""
        if self.sample is None:
            return (len(self), *_kernel_widths(self.params))
        if not hasattr(self.sample, "shape"):
            raise ValueError("shape is unknown: an input of this swarm is no single array.")
        prediction = jax.eval_shape(member.predict, self.get_state(0) if jnp.ndim(self.step) else self, self.sample)
        if not hasattr(prediction, "shape"):
            raise ValueError("shape is unknown: a prediction of this swarm is no single array.")
        return (len(self), self.sample.shape[-1], prediction.shape[-1])

    def __repr__(self) -> str:
        return described(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(described(self))}</pre>"

    def __reduce__(self) -> Any:
        """Pickle the functions too, by cloudpickle, as optimizers are closures (for pickle and joblib)."""
        try:
            import cloudpickle

            if member.is_nnx(getattr(self.apply_fn, "__self__", None)):
                raise TypeError("what pickle makes of an NNX module in Flax's bridge cannot be read")
            fields = cloudpickle.dumps(vars(self))
        except Exception as error:  # objects that a function holds may raise anything
            advice = "keep it by swarm.save(folder), for TurbaTrainState.load(folder, model, optimizer)"
            raise TypeError(f"This swarm cannot be pickled ({error}): {advice}.") from error
        return _unpickled, (type(self), fields)

    def __copy__(self) -> Self:
        return self.replace()

    def __deepcopy__(self, memo: dict) -> Self:
        return jax.tree.map(copy.deepcopy, self)

    def _lead(self, x, *y):
        """Return x and y as arrays that lead with the member axis; jit takes NumPy arrays as they are."""
        data = [as_arrays(each, name) for name, each in zip("xy", (x, *y), strict=False)]
        check_swarm(self)
        if len(self) == 1 and self._lacks_member_axis(data[0]):
            data = jax.tree.map(lambda leaf: leaf[None], data)
        for path, leaf in jax.tree.leaves_with_path(dict(zip("xy", data, strict=False))):
            if leaf.shape[:1] != (len(self),):
                raise ValueError(f"{path[0].key} has shape {leaf.shape}; it must lead with the {len(self)} members.")
            if y and 0 in leaf.shape[:2]:
                raise ValueError(f"{path[0].key} has shape {leaf.shape}: a loss needs at least one row of each member.")
        return data

    def _lacks_member_axis(self, x):
        """Whether x of a swarm of one is without the member axis; of one row, the rank of the swarm's sample tells."""
        leaves, samples = jax.tree.leaves(x), jax.tree.leaves(self.sample)
        is_one = all(leaf.shape[:1] == (1,) for leaf in leaves)
        return not is_one or any(leaf.ndim <= sample.ndim for leaf, sample in zip(leaves, samples, strict=False))


def _unpickled(kind, fields):
    import cloudpickle

    names = {field.name for field in dataclasses.fields(kind)}
    # What a pickle of 0.6 calls stopping and underway is _stopping and _underway now.
    return kind(**{name if name in names else f"_{name}": value for name, value in cloudpickle.loads(fields).items()})


def _member_specification(tree):
    """Return what two swarms must have in common in a part: its structure, a member's shapes and types."""
    return jax.tree.structure(tree), [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _kernel_widths(params):
    """Return (inputs, outputs) of a stack of layers by its params: the first and last kernel in natural order."""

    def natural(path):
        return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", jax.tree_util.keystr(path)))

    leaves = {natural(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if leaf.ndim >= 3}
    if not leaves:
        raise ValueError("shape is unknown: no sample input was given and no layer has a kernel.")
    return leaves[min(leaves)].shape[-2], leaves[max(leaves)].shape[-1]
