"""What an object computes, as one digest: functions, models and optimizers by their code and by what they hold."""

import copyreg
import dataclasses
import dis
import functools
import hashlib
import importlib
import os
import re
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distributions, version

import flax.linen as nn
import jax
import numpy as np
from flax.training.train_state import TrainState

from turbanet.training.arrays import is_key
from turbanet.training.contents import MISSING, Parts, cells, contents, copied, is_pickled_by_parts, is_same, may_change

PLAIN = bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)
CODE = "code", "consts", "names", "varnames", "argcount", "kwonlyargcount", "flags", "exceptiontable"
HELD = {  # what counts of objects that a pickle would refuse, or keep by name
    types.CodeType: [f"co_{name}" for name in CODE],
    types.MethodType: ["__self__", "__func__"],
    types.GetSetDescriptorType: ["__qualname__"],
    property: ["fget", "fset", "fdel"],
    functools.cached_property: ["func"],
}


def fingerprint(thing: object) -> "Fingerprint":
    """The digest of an object by value: equal objects that were built apart have equal ones, in any process.

    A function counts by its bytecode, constants, defaults, closure and the globals it reads, a class by its methods and
    attributes, any other object by its class and what a pickle would hold; what an installed package gives by name
    counts by that name and the package's version. Source text, line numbers and addresses do not count. A part that
    cannot be read (a generator, an open file) is named in `opaque`, and makes the digest unlike any other one.
    """
    walk = _Walk()
    try:
        found = Fingerprint(walk.digest(thing).hex())
    except RecursionError:
        found = Fingerprint(walk.unknown("what nests deeper than Python follows").hex())
    found.opaque = tuple(walk.opaque)
    found.read = tuple(walk.read)
    found.held = tuple(walk.held)
    return found


def as_numbers(array: jax.Array | np.ndarray) -> np.ndarray:
    """An array in the host's memory; typed random keys as the numbers they hold."""
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


class Fingerprint(str):
    """A hex digest, and what it takes to see whether it is still right.

    opaque : the names of the parts that could not be read
    read : (scope, name, value) of the globals and the modules' attributes that were looked up
    held : (look, thing, found) of what can change while it stays the same object; look(thing) was `found`
    """

    opaque: tuple[str, ...] = ()
    read: tuple[tuple[dict, str, object], ...] = ()
    held: tuple[tuple[Callable, object, tuple | bytes], ...] = ()

    def holds(self) -> bool:
        """Whether nothing that was read has changed since, at far less than a new digest.

        What can change within is looked at, any other object, and a part that cannot be read, is to be the same one.
        """
        return all(scope.get(name, MISSING) is value for scope, name, value in self.read) and all(
            is_same(look(thing), found) for look, thing, found in self.held
        )


class _Walk:
    """The digests of one object's parts, each part once."""

    def __init__(self, *, holds=True):
        self.seen = {}  # id: (object, digest); while the object is held, no other one gets its id
        self.opaque = []
        self.read = []
        self.held = []
        self.holds = holds  # whether `held` is asked for

    def digest(self, thing, where=()) -> bytes:
        """The digest of what lies at `where`, the names of what it lies in ("" where that gives it none)."""
        if id(thing) not in self.seen:
            self.seen[id(thing)] = thing, bytes(len(where))  # what stands for it inside itself
            whole = hashlib.sha256(type(thing).__name__.encode())
            for part in self.parts(thing, where):
                whole.update(part)
            self.seen[id(thing)] = thing, whole.digest()
        return self.seen[id(thing)][1]

    def parts(self, thing, where):
        """The bytes of a constant or an array, the digests of what anything else is made of."""
        if type(thing) in PLAIN:
            return [repr(thing).encode()]
        if isinstance(thing, np.ndarray | np.generic | jax.Array) and thing.dtype != object:
            if isinstance(thing, np.ndarray):
                self.keep(thing, _anew)
            return _numbers(thing)
        if type(thing) in (dict, Parts):
            if type(thing) is dict:
                self.keep(thing)
            return [self.digest(part, (*where, str(key))) for key, value in thing.items() for part in (key, value)]
        made_of = self.made_of(thing)
        if made_of is None:
            return [self.unknown(f"{type(thing).__qualname__} {'.'.join(filter(None, where))}".strip())]
        digests = [self.digest(part, (*where, "")) for part in made_of]
        return sorted(digests) if isinstance(thing, set | frozenset) else digests

    def made_of(self, thing):
        """What to walk in place of `thing`; None if it cannot be read."""
        if type(thing) in (tuple, list) or isinstance(thing, set | frozenset):
            if isinstance(thing, list | set):
                self.keep(thing)
            return thing
        if type(thing) in HELD:
            return [getattr(thing, name) for name in HELD[type(thing)]]
        if isinstance(thing, types.ModuleType):
            return [thing.__name__, _package(thing.__name__)]
        if name := _public_name(thing):
            return [name]
        if isinstance(thing, types.BuiltinFunctionType) and not isinstance(thing.__self__, types.ModuleType | None):
            return [thing.__name__, thing.__self__]
        if isinstance(thing, types.FunctionType):
            closed = zip(thing.__code__.co_freevars, cells(thing), strict=True)
            held = Parts((name, value) for name, value in closed if value is not MISSING)
            package = _package(thing.__globals__.get("__name__", ""))
            if package:  # whose own functions nobody changes
                options = Parts(thing.__kwdefaults__ or {}), Parts(vars(thing))
            else:
                self.keep(thing)
                options = thing.__kwdefaults__, vars(thing)
            read = package or self.globals(thing.__code__, thing.__globals__)
            return [thing.__code__, thing.__defaults__, *options, held, read]
        if isinstance(thing, type):
            if not _package(thing.__module__):
                self.keep(thing)
            kept = {k: v for k, v in sorted(vars(thing).items()) if k != "_abc_impl" and (k[:2] != "__" or callable(v))}
            return [thing.__qualname__, *thing.__bases__, Parts(kept)]
        if isinstance(thing, nn.Module | TrainState):  # their pickles hold more, which differs from day to day
            self.keep(thing)
            held = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.name != "parent"}
            return [type(thing), Parts(held)]
        wraps = isinstance(thing, staticmethod | classmethod | functools._lru_cache_wrapper | jax.stages.Wrapped)
        if wraps and hasattr(thing, "__wrapped__"):
            return [thing.__wrapped__]
        made_of = _pickled(thing)
        if is_pickled_by_parts(type(thing)):
            self.keep(thing)
            return made_of
        if made_of and (may_change(thing, made_of) or not _package(type(thing).__module__)):
            self.keep(thing, _anew)
        return made_of and copied(made_of, depth=4)

    def keep(self, thing, look=None):
        """Note how to see whether `thing` has changed: by look(thing), as it is now."""
        if self.holds:
            look = look or contents
            self.held.append((look, thing, look(thing)))

    def globals(self, code, scope) -> dict:
        """{name: value} of the globals that a code object and those inside it read, and of the modules they import."""
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        names = {step.argval for step in steps if "GLOBAL" in step.opname or step.opname == "LOAD_NAME"}
        read = {name: scope[name] for name in sorted(names & scope.keys())}
        self.read += [(scope, name, scope.get(name, MISSING)) for name in names]
        for level, step in zip(steps, steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                read[step.argval] = _imported("." * level.argval + step.argval, scope.get("__package__"))
        read = {name: self.taken(value, set(code.co_names)) for name, value in read.items()}
        for inner in code.co_consts:
            read |= self.globals(inner, scope) if isinstance(inner, types.CodeType) else {}
        return Parts(read)

    def taken(self, value, names):
        """Of a module of the user's own, what code takes from it by these names; any other value as it is."""
        if not isinstance(value, types.ModuleType) or _package(value.__name__):
            return value
        self.read += [(vars(value), name, vars(value)[name]) for name in sorted(names & vars(value).keys())]
        found = ((name, getattr(value, name)) for name in sorted(names) if hasattr(value, name))
        return Parts((name, self.taken(part, names - {name})) for name, part in found)

    def unknown(self, name) -> bytes:
        self.opaque.append(name)
        return os.urandom(32)


def _anew(thing):
    """The digest of `thing` as it is now; of nothing where a part of it cannot be read."""
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return hashlib.sha256(_numbers(thing)[1]).digest()
    walk = _Walk(holds=False)
    found = walk.digest(thing)
    return b"" if walk.opaque else found


def _numbers(array):
    """The bytes of an array's type and shape, and of its numbers."""
    numbers = np.ascontiguousarray(as_numbers(array)).reshape(-1)
    return f"{array.dtype}{np.shape(array)}".encode(), numbers.view(np.uint8)


def _pickled(thing):
    """What a pickle would hold of an object, as its class knows best what its state is; None if it refuses."""
    try:
        made = copyreg.dispatch_table.get(type(thing), lambda thing: thing.__reduce_ex__(4))(thing)
    except Exception:  # a class may raise anything to say so
        return None
    if isinstance(made, str):
        return [made, type(thing), getattr(thing, "__dict__", None)]
    return [*made[:3], *(items and list(items) for items in made[3:5])]


def _imported(name, package):
    try:
        return _package(name) or importlib.import_module(name, package)
    except (ImportError, TypeError):  # what is not there, or lies in no package
        return None


def _public_name(thing) -> str | None:
    """The name by which an installed package gives `thing`, and the package's version; None if none does."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", getattr(thing, "__name__", None))
    if not (isinstance(module, str) and isinstance(name, str) and _package(module)):
        return None
    found = functools.reduce(lambda held, part: getattr(held, part, None), name.split("."), sys.modules.get(module))
    return f"{module}.{name} of {_package(module)}" if found is thing else None


@functools.cache
def _package(module) -> str | None:
    """Name and version of the installed package that a module is part of; None for a module of the user's own."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"Python {sys.version_info.major}.{sys.version_info.minor}"
    places = str(PathFinder.find_spec(top))  # names the module's file and folders
    if not re.search(r"[/\\](site|dist)-packages[/\\]", places):
        return None
    try:
        return f"{top} {version(top)}"
    except PackageNotFoundError:  # the package has another name than its module
        return f"{top} {[version(name) for name in _distributions(top)]}"


def _distributions(top) -> list[str]:
    """The installed distributions that have a module or package of this name, by their lists of files.

    `packages_distributions` tells it for all names, which takes it seconds where hundreds are installed.
    """
    there = re.compile(rf"^{re.escape(top)}(/|\.[^/]*(py|so|pyd),)", re.M)
    return sorted({each.name for each in distributions() if there.search(each.read_text("RECORD") or "")})
