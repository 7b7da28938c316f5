"""The objects that another object holds: they show whether it was changed in place."""

import copyreg
import functools
import operator
import types
from typing import Any

MISSING = object()  # stands for the value of a name that has none, or none yet
FIXED = types.WrapperDescriptorType, types.MethodDescriptorType, types.MemberDescriptorType


class Parts(dict):
    """{name: part}, a copy made while an object is read, which nobody else can change."""


def contents(thing: Any) -> tuple:
    """Return the replaceable objects in `thing`: a container's items, attributes, what a function closes over."""
    if type(thing) is dict:
        return *thing, *thing.values()
    if isinstance(thing, types.FunctionType):
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, *cells(thing)
    if isinstance(thing, functools.partial):  # asking for its __dict__ would create one
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, type):
        return *thing.__bases__, *vars(thing), *vars(thing).values()
    held = getattr(thing, "__dict__", {})
    slots = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]  # as pickle finds them
    found = [*held, *held.values(), *(getattr(thing, name, MISSING) for name in slots)]
    found += thing.values() if isinstance(thing, dict) else ()
    return *found, *(thing if isinstance(thing, dict | list | set) else ())


def is_same(now: tuple | bytes, then: tuple | bytes) -> bool:
    """Whether an object is unchanged: its digests are equal, or it holds the same objects in the same order."""
    if isinstance(then, bytes):
        return now == then
    return len(now) == len(then) and all(map(operator.is_, now, then))


def cells(function: types.FunctionType) -> list:
    """Return the values that a function closes over, in the order of their names; MISSING where not assigned yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(MISSING)
    return found


def is_pickled_by_parts(kind: type) -> bool:
    """Whether a pickle of an object of this class holds its very parts, and no copies of them."""
    if kind is functools.partial:
        return True
    own = getattr(kind, "__getstate__", None) is object.__getstate__
    return own and kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__


def may_change(thing: Any, pickled: Any) -> bool:
    """Whether an object of a package's class, `pickled` as copies, can change; one that is equal by value cannot."""
    by_identity = type(thing).__hash__ in (None, object.__hash__) or hasattr(thing, "__array__")
    may_hold = any(pickled[1:]) or type(thing).__hash__ is None or hasattr(thing, "__dict__")  # empty as it may be
    return by_identity and may_hold and not isinstance(thing, FIXED)


def copied(pickled: Any, depth: int) -> Any:
    """Return the containers that a pickle made itself as tuples and `Parts`, down to some depth."""
    if depth and type(pickled) is dict:
        return Parts((name, copied(part, depth - 1)) for name, part in pickled.items())
    return tuple(copied(part, depth - 1) for part in pickled) if depth and type(pickled) in (list, tuple) else pickled
