"""The fingerprints of functions that were used before, for as long as nothing in them changes."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any
from weakref import ref

import jax
import numpy as np

from turbanet.core.contents import cells
from turbanet.core.fingerprint import Fingerprint, fingerprint

KEPT = 64  # entries of a cache
LARGE = 2**20  # bytes of arrays, from which on a loss that captured them is not kept alive


def read(*functions: Any) -> Fingerprint:
    """Return the fingerprint of the first one's fields and of the others, from the cache if nothing has changed."""
    cache = fingerprints()
    key = _weakly(functions)
    try:
        cached = cache.get(key)
    except TypeError:  # a function without a hash, such as an instance of a dataclass
        return _fingerprint(functions)
    if cached and cached.holds():
        return cached
    # A copy, as other threads may add to the cache.
    entries = [(other, _strongly(other), before) for other, before in list(cache.items())]
    if gone := [other for other, found, _ in entries if found is None]:  # whose loss nobody has any more
        for other in gone:
            cache.pop(other, None)
        jax.clear_caches()  # what is no longer remembered could change unseen
    stale = [entry for entry in entries if entry[1] is not None and not entry[2].holds()]
    changed = {other: _fingerprint(found) for other, found, _ in stale}
    if any(changed[other] != before for other, _, before in stale):
        jax.clear_caches()  # JAX would reuse old traces of loops and inner jitted functions
    cache |= changed
    return remembered(cache, key, partial(_fingerprint, functions))


def remembered(cache: dict, key: Any, make: Callable) -> Any:
    """Return cache[key], which is `make()` if it is not there, and forget the oldest entry if there are above KEPT."""
    found = cache[key] if key in cache else cache.setdefault(key, make())
    if len(cache) > KEPT:
        cache.pop(next(iter(list(cache))), None)
    return found


@lru_cache
def fingerprints() -> dict:
    """Return the cache of `read`, {key of `_weakly`: fingerprint}."""
    return {}


def _fingerprint(functions):
    """Return the fingerprint of a program's fields and of other functions; of a large loss it holds no reference."""
    program, *others = functions
    found = fingerprint((vars(program), *others))
    if _is_weak(program):
        loss, fields = program.loss_fn, vars(program)
        held = [entry for entry in found.held if entry[1] is not fields]  # those of a frozen program do not change
        found.held = tuple(
            (partial(_alive, entry[0]), ref(loss), entry[2]) if entry[1] is loss else entry for entry in held
        )
    return found


def _weakly(functions):
    """Return functions as a key that does not keep the program's loss alive, if that captured large arrays."""
    program, *others = functions
    return (
        (ref(program.loss_fn), dataclasses.replace(program, loss_fn=None), *others) if _is_weak(program) else functions
    )


def _strongly(key):
    """Return the functions of a key of `_weakly`; None if the loss is gone."""
    loss, *others = key
    if not isinstance(loss, ref):
        return key
    return None if loss() is None else (dataclasses.replace(others[0], loss_fn=loss()), *others[1:])


def _is_weak(program):
    """Whether a program's loss is a plain function that closes over arrays of LARGE bytes."""
    loss = getattr(program, "loss_fn", None)
    if not (dataclasses.is_dataclass(program) and isinstance(loss, FunctionType)):
        return False
    captured = [value for value in cells(loss) if isinstance(value, jax.Array | np.ndarray | dict | list | tuple)]
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(captured)) >= LARGE


def _alive(look, weak):
    """Return look(thing) of a weak reference; () if the thing is gone."""
    return () if (thing := weak()) is None else look(thing)
