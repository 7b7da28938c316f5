"""Conversion of tensors, tables and lists to arrays for JAX, and checks of ids, seeds and whole numbers."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

P = ParamSpec("P")
T = TypeVar("T")
ROUNDING = 1e-12  # of a mean, by which equal float64 numbers may seem to deviate
MAX_ID = 2**31 - 2  # of ids and seeds: JAX in 32 bits would cut larger ones; 2**31 - 1 is free for streams of no member


def as_array(value: Any, name: str) -> jax.Array | np.ndarray:
    """Return `value` as one array of numbers of a type that JAX computes in; errors call it `name`.

    A JAX array is returned as it is. PyTorch tensors (also those that require gradients), pandas tables and columns,
    NumPy arrays, numbers, lists, and whatever else has `__array__` or `__dlpack__` become NumPy arrays (bfloat16
    tensors become JAX arrays) of this machine's byte order, without a copy where the type allows. With JAX in 32 bits,
    its default, int64 and float64 become int32 and float32. Raises ValueError for data that are not numbers, and for
    numbers beyond those types.
    """
    if isinstance(value, jax.Array):
        return value
    array = as_numpy(value, name)
    dtype = array.dtype
    computed = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
    try:
        with np.errstate(over="raise"):
            converted = array.astype(computed, copy=False)
    except FloatingPointError:
        received = f"numbers up to {np.abs(array[np.isfinite(array)]).max():.4g}, JAX computes in {computed}"
        raise ValueError(f"{name} holds {received}: scale them, or set jax_enable_x64.") from None
    if dtype.kind in "iu" and not np.array_equal(converted, array):
        received = f"whole numbers from {array.min()} to {array.max()}, JAX computes in {computed}"
        raise ValueError(f"{name} holds {received}: make them smaller, or floats, or set jax_enable_x64.")
    return converted


def as_numpy(value: Any, name: str) -> np.ndarray:
    """Return `value` as one NumPy array of the type that it has, such as float64; ValueError for no numbers."""
    array = _read(value, name)
    dtype = array.dtype
    if dtype.kind in "mM" or not (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)):
        text = "; labels as text are numbered by np.unique(y, return_inverse=True)" if name == "y" else ""
        kinds = {column: np.asarray(part).dtype for column, part in value.items()} if _is_table(value) else {}
        columns = [f"column {column!r} of type {kind}" for column, kind in kinds.items() if kind.kind not in "biufc"]
        received = columns[0] if columns else f"{type(value).__name__} of type {dtype}"
        raise ValueError(f"{name} must be an array of numbers, got {received}: convert it{text}.")
    return array


def as_arrays(tree: Any, name: str) -> Any:
    """Return `tree` with every leaf converted by `as_array`.

    A dict, a tuple, a named tuple and any type registered with `jax.tree_util` are trees; so is a list that holds an
    array, a tensor or a table. A list of numbers, or of lists of numbers, is one array. None stays None.
    """
    return jax.tree.map(lambda leaf: as_array(leaf, name), tree, is_leaf=_is_list_of_numbers)


def check_whole(**numbers: Any) -> None:
    """Raise ValueError for any of `numbers`, given by name, that is not a whole number of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")


def divisor(spread: Any, centre: Any) -> np.ndarray:
    """Return standard deviations to divide by: 1 in place of those of numbers that are equal but for rounding."""
    return np.where(spread > ROUNDING * np.abs(centre), spread, 1.0)


def check_float32(mean: np.ndarray, spread: np.ndarray) -> None:
    """Raise ValueError where float32 rounds numbers of this mean and spread by more than a thousandth of the spread."""
    if (far := np.abs(mean) * np.finfo(np.float32).eps > spread / 1000).any():
        numbers = f"{np.ravel(mean)[far.ravel()][0]:.4g}, with a spread of {np.ravel(spread)[far.ravel()][0]:.4g}"
        raise ValueError(f"float32 cannot tell apart numbers around {numbers}: subtract their mean before training.")


def check_ids(ids: Any, name: str) -> np.ndarray:
    """Return members' ids as int32 [member]; ValueError for other shapes and types, and outside of 0 to `MAX_ID`."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or not ids.size or not _are_ids(ids):
        raise ValueError(f"{name} must be a number, or ids int [member] from 0 to {MAX_ID}; got {ids!s:.60}.")
    return ids.astype(np.int32)


def check_seed(seed: Any, name: str = "seed", members: int | None = None) -> np.ndarray:
    """Return one seed, int32, or one for each of `members`; ValueError outside of 0 to `MAX_ID`, where int32 wraps."""
    seeds = np.asarray(None if isinstance(seed, jax.Array) and is_key(seed) else seed)
    if seeds.shape not in ((), (members,)) or not _are_ids(seeds):
        wanted = "one int" if members is None else f"one int or {members} ints"
        raise ValueError(f"{name} must be {wanted} from 0 to {MAX_ID}, got {seed!s:.60}.")
    return seeds.astype(np.int32)


def seeded(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose `seed` is a JAX key: it takes an int as well, and `key`, the argument's former name."""

    @wraps(function)
    def with_key(*args: P.args, **kwargs: P.kwargs) -> T:
        if "key" in kwargs:
            kwargs["seed"] = kwargs.pop("key")
        try:
            bound = signature(function).bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(signature(function).parameters)
            raise TypeError(f"{function.__name__} takes {names}, by name: {error}.") from None
        seed = bound.arguments["seed"]
        if not is_jax_key(seed):
            bound.arguments["seed"] = jax.random.key(int(check_seed(seed)))
        return function(*bound.args, **bound.kwargs)

    return with_key


def check_next_ids(ids: Any, count: int) -> None:
    """Raise ValueError if `count` new members, numbered on from the highest of `ids`, would exceed `MAX_ID`."""
    if not isinstance(ids, jax.core.Tracer) and (last := int(np.asarray(ids).max()) + count) > MAX_ID:
        raise ValueError(f"A new member would have the id {last}, ids go up to {MAX_ID}: give members smaller ids.")


def _are_ids(numbers):
    return numbers.dtype.kind in "iu" and bool(((numbers >= 0) & (numbers <= MAX_ID)).all())


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, to quote it within another message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def without_x64(types: str) -> str:
    """Return the advice for types such as "float64[3]" in a process that lacks them; else an empty string."""
    lacks = jnp.result_type(float) != jnp.float64 and any(name in types for name in ("float64", "int64"))
    return 'call jax.config.update("jax_enable_x64", True) first, as where it was made' if lacks else ""


def floating(tree: Any) -> tuple[list, Callable]:
    """Return a tree's floating-point leaves, and a function that puts others in their place.

    That is put(leaves, rest=function) -> the tree; function, if given, is applied to each of the other leaves.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def put(floats, rest=lambda leaf: leaf):
        new = iter(floats)
        return jax.tree.unflatten(structure, [next(new) if one else rest(leaf) for leaf, one in zip(leaves, is_float)])

    return [leaf for leaf, one in zip(leaves, is_float) if one], put


def is_key(leaf: jax.Array | np.ndarray) -> bool:
    """Whether an array holds JAX's typed random keys, which NumPy cannot read."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_jax_key(seed: Any) -> bool:
    """Whether a seed is one of JAX's keys, typed or uint32 [2], and no int."""
    return np.ndim(seed) > 0 or (isinstance(seed, jax.Array) and is_key(seed))


def _is_list_of_numbers(node):
    return isinstance(node, list) and all(getattr(leaf, "shape", ()) == () for leaf in jax.tree.leaves(node))


def _read(value, name):
    parts = value if isinstance(value, list | tuple) else [value]
    if masked := sum(np.ma.count_masked(part) for part in parts if isinstance(part, np.ma.MaskedArray)):
        raise ValueError(f"{name} has {masked} masked entries: fill them (.filled(...)), or leave their rows out.")
    if hasattr(value, "detach"):  # a PyTorch tensor
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if hasattr(value, "__dlpack__"):  # a type that NumPy lacks, or memory that it cannot read
            return jnp.from_dlpack(value)
        rows = "rows of different lengths, or no numbers" if isinstance(value, list | tuple) else type(value).__name__
        advice = "turbanet.ragged pads them" if name == "rows" else f"make it one ({error})"
        raise ValueError(f"{name} must be an array of numbers, got {rows}: {advice}.") from None
    if array.dtype.kind == "O" and _is_table(value):  # with columns of several types
        columns = [np.asarray(column) for _, column in value.items()]
        if not any(column.dtype.kind in "mMO" for column in columns):
            array = np.stack(columns, axis=1)
    return array


def _is_table(value):
    """Whether a value is a table of named columns, such as pandas'."""
    return hasattr(value, "items") and len(getattr(value, "shape", ())) == 2
