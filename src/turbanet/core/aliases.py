"""Other names of keyword arguments, under which users of other libraries and of earlier versions know them."""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def aliases(**names: str) -> Callable[[T], T]:
    """Let a function or a class take and show arguments under further names: aliases(horizon="h")."""

    def renamed(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for alias, name in names.items():
                if alias in kwargs and name in kwargs:
                    raise TypeError(f"{alias} and {name} are one argument: give {name} alone.")
                if alias in kwargs:
                    kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        return call

    def decorate(thing: Any) -> Any:
        if not isinstance(thing, type):
            return renamed(thing)
        thing.__init__ = renamed(thing.__init__)  # type: ignore[misc]
        for alias, name in names.items():
            setattr(thing, alias, property(attrgetter(name)))
        return thing

    return decorate
