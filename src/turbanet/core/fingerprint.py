"""Digests of what objects compute: functions, models and optimizers by their code and by what they hold."""

import copyreg
import dataclasses
import dis
import functools
import hashlib
import importlib
import itertools
import os
import re
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distributions, version

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState

from turbanet.core.arrays import is_key
from turbanet.core.contents import MISSING, Parts, cells, contents, copied, is_pickled_by_parts, is_same, may_change

PLAIN = bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)
CODE_FIELDS = "code", "consts", "names", "varnames", "argcount", "kwonlyargcount", "flags", "exceptiontable"
ATTRIBUTES = {  # that count, of objects that a pickle would refuse or store by name
    types.CodeType: [f"co_{name}" for name in CODE_FIELDS],
    types.MethodType: ["__self__", "__func__"],
    types.GetSetDescriptorType: ["__qualname__"],
    property: ["fget", "fset", "fdel"],
    functools.cached_property: ["func"],
}


def fingerprint(thing: object) -> "Fingerprint":
    """Return the digest of an object by value: equal objects that were built apart have equal digests, in any process.

    A function counts by its bytecode, constants, defaults, closure and the globals it reads, a class by its methods and
    attributes, any other object by its class and what a pickle would hold; an object that an installed package exports
    counts by its name and the package's version. Source text, line numbers and addresses do not count, nor does what
    such packages keep, such as os.environ. A part that cannot be read (a generator, an open file) is named in `opaque`,
    and makes the digest unlike any other.
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
    """Return an array in the host's memory, typed random keys as the numbers they hold."""
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


def from_numbers(numbers: np.ndarray, like: jax.Array) -> jax.Array:
    """Return the array of which `as_numbers` gave these numbers, random keys of the type of `like`."""
    array = jnp.asarray(numbers)
    if not is_key(like):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), like.dtype)))


class Fingerprint(str):
    """A hex digest, and what it takes to tell whether it is still valid.

    opaque : the names of the parts that could not be read
    read : (scope, name, value) of the globals and the modules' attributes that were looked up
    held : (look, thing, found) of objects that can change in place; look(thing) was `found`
    """

    opaque: tuple[str, ...] = ()
    read: tuple[tuple[dict, str, object], ...] = ()
    held: tuple[tuple[Callable, object, tuple | bytes], ...] = ()

    def holds(self) -> bool:
        """Whether nothing that was read has changed since, at far less cost than a new digest.

        Objects that can change in place are read again; any other object, and any that is opaque, must be identical.
        """
        return all(scope.get(name, MISSING) is value for scope, name, value in self.read) and all(
            is_same(look(thing), found) for look, thing, found in self.held
        )


class _Walk:
    """The digests of one object's parts, each part once."""

    def __init__(self, *, watching=True, in_library=False):
        self.visited = {}  # id: (object, digest); while the object is referenced here, no other one gets its id
        self.opaque = []
        self.read = []
        self.held = []
        self.watching = watching  # whether `held` is wanted
        self.in_library = in_library  # whether this is the walk of `_library_globals`

    def digest(self, thing, path=()) -> bytes:
        """Return the digest of the object at `path`, the names of what it lies in ("" for one without a name)."""
        if id(thing) not in self.visited:
            self.visited[id(thing)] = thing, bytes(len(path))  # stands for it inside itself
            kind = "array" if isinstance(thing, np.ndarray | jax.Array) else type(thing).__name__
            whole = hashlib.sha256(kind.encode())
            for part in self.parts(thing, path):
                whole.update(part)
            self.visited[id(thing)] = thing, whole.digest()
        return self.visited[id(thing)][1]

    def parts(self, thing, path):
        """Return the bytes of a constant or an array, or the digests of the components of anything else."""
        if type(thing) in PLAIN:
            return [repr(thing).encode()]
        if isinstance(thing, np.ndarray | np.generic | jax.Array) and thing.dtype != object:
            if isinstance(thing, np.ndarray):
                self.watch(thing, _current_digest)
            return _array_bytes(thing)
        if type(thing) in (dict, Parts):
            if type(thing) is dict:
                self.watch(thing)
            return [self.digest(part, (*path, str(key))) for key, value in thing.items() for part in (key, value)]
        components = self.components(thing)
        if components is None:
            return [self.unknown(f"{type(thing).__qualname__} {'.'.join(filter(None, path))}".strip())]
        digests = [self.digest(part, (*path, "")) for part in components]
        return sorted(digests) if isinstance(thing, set | frozenset) else digests

    def components(self, thing):
        """Return the objects whose digests make that of `thing`; None if it cannot be read."""
        if type(thing) in (tuple, list) or isinstance(thing, set | frozenset):
            if isinstance(thing, list | set):
                self.watch(thing)
            return thing
        if type(thing) in ATTRIBUTES:
            return [getattr(thing, name) for name in ATTRIBUTES[type(thing)]]
        if isinstance(thing, types.ModuleType):
            package = _package(thing.__name__)
            if package or _is_library(thing.__name__):
                return [thing.__name__, package]
            self.watch(thing)
            return [thing.__name__, Parts((k, v) for k, v in sorted(vars(thing).items()) if k[:2] != "__")]
        if name := _public_name(thing):
            return [name]
        if isinstance(thing, types.BuiltinFunctionType) and not isinstance(thing.__self__, types.ModuleType | None):
            return [thing.__name__, thing.__self__]
        if isinstance(thing, types.FunctionType):
            return self.of_function(thing)
        if isinstance(thing, type):
            if not (_package(thing.__module__) or _is_library(thing.__module__)):
                self.watch(thing)
            own = {k: v for k, v in sorted(vars(thing).items()) if k != "_abc_impl" and (k[:2] != "__" or callable(v))}
            return [thing.__qualname__, *thing.__bases__, Parts(own)]
        if isinstance(thing, nn.Module | TrainState):  # their pickles also hold what changes from run to run
            self.watch(thing)
            fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.name != "parent"}
            return [type(thing), Parts(fields)]
        wraps = isinstance(thing, staticmethod | classmethod | functools._lru_cache_wrapper | jax.stages.Wrapped)
        if wraps and hasattr(thing, "__wrapped__"):
            return [thing.__wrapped__]
        components = _pickled(thing)
        if is_pickled_by_parts(type(thing)):
            self.watch(thing)
            return components
        if components and (may_change(thing, components) or not _package(type(thing).__module__)):
            self.watch(thing, _current_digest)
        return components and copied(components, depth=4)

    def of_function(self, function):
        """Return a function's code, defaults, attributes, closure, and what it reads of globals."""
        closed = zip(function.__code__.co_freevars, cells(function), strict=True)
        held = {name: value for name, value in closed if value is not MISSING}
        has_module = any(isinstance(value, types.ModuleType) for value in held.values())
        closure = self.of_code(_steps(function.__code__), held, "DEREF") if has_module else Parts(held)
        module = function.__globals__.get("__name__", "")
        read = _package(module)
        if read or _is_library(module):  # whose own functions do not change
            options = Parts(function.__kwdefaults__ or {}), Parts(vars(function))
        else:
            self.watch(function)
            options = function.__kwdefaults__, vars(function)
        if not read and _is_library(module) and not self.in_library:
            read = _library_globals(function.__code__, module)
        read = read or self.globals(function.__code__, function.__globals__)
        return [function.__code__, function.__defaults__, *options, closure, read]

    def watch(self, thing, look=None):
        """Record look(thing) as it is now, to tell later whether `thing` has changed."""
        if self.watching:
            look = look or contents
            self.held.append((look, thing, look(thing)))

    def globals(self, code, scope) -> dict:
        """Return {name: value} of globals that a code object and those inside it read, and of modules they import."""
        steps = _steps(code)
        names = {step.argval for step in steps if "GLOBAL" in step.opname or step.opname == "LOAD_NAME"}
        read = {name: scope[name] for name in sorted(names & scope.keys())}
        self.read += [(scope, name, scope.get(name, MISSING)) for name in names]
        for level, step in zip(steps, steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                read[step.argval] = _imported("." * level.argval + step.argval, scope.get("__package__"))
        return self.of_code(steps, read, "GLOBAL", "LOAD_NAME")

    def of_code(self, steps, read, *loads):
        """Narrow {name: value} to what the steps of a function read, unless they use a value by itself."""
        names = {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")}
        whole = {
            step.argval
            for step, then in itertools.pairwise(steps)
            if any(load in step.opname for load in loads) and then.opname not in ("LOAD_ATTR", "LOAD_METHOD")
        }
        return Parts((name, each if name in whole else self.narrowed(each, names)) for name, each in read.items())

    def narrowed(self, value, names):
        """Narrow a module of the user's own to the attributes of these `names`; any other value stays as it is."""
        if not isinstance(value, types.ModuleType) or _package(value.__name__):
            return value
        self.read += [(vars(value), name, vars(value)[name]) for name in sorted(names & vars(value).keys())]
        found = ((name, getattr(value, name)) for name in sorted(names) if hasattr(value, name))
        return Parts((name, self.narrowed(part, names - {name})) for name, part in found)

    def unknown(self, name) -> bytes:
        self.opaque.append(name)
        return os.urandom(32)


def _steps(code):
    """Return the instructions of a code object and of those inside it."""
    inner = [step for const in code.co_consts if isinstance(const, types.CodeType) for step in _steps(const)]
    return [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"] + inner


def _is_library(module):
    """Whether a module is this library's: one that is not installed counts by its code, which is read once."""
    return module.partition(".")[0] == __name__.partition(".")[0]


@functools.lru_cache(4096)
def _library_globals(code, module):
    """Return the digest of the globals that a code object of the library reads."""
    walk = _Walk(watching=False, in_library=True)
    return walk.digest(walk.globals(code, vars(sys.modules[module])))


def _current_digest(thing):
    """Return the digest of `thing` as it is now; b"" if a part of it cannot be read."""
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return hashlib.sha256(_array_bytes(thing)[1]).digest()
    walk = _Walk(watching=False)
    found = walk.digest(thing)
    return b"" if walk.opaque else found


def _array_bytes(array):
    """Return the bytes of an array's type and shape, and those of its numbers."""
    numbers = np.ascontiguousarray(as_numbers(array)).reshape(-1)
    return f"{array.dtype}{np.shape(array)}".encode(), numbers.view(np.uint8)


def _pickled(thing):
    """Return what a pickle would hold of an object, as its class defines its state; None if it refuses."""
    try:
        reduced = copyreg.dispatch_table.get(type(thing), lambda thing: thing.__reduce_ex__(4))(thing)
    except Exception:  # a class may refuse by raising anything
        return None
    if isinstance(reduced, str):
        return [reduced, type(thing), getattr(thing, "__dict__", None)]
    return [*reduced[:3], *(items and list(items) for items in reduced[3:5])]


def _imported(name, package):
    try:
        return _package(name) or importlib.import_module(name, package)
    except (ImportError, TypeError):  # it does not exist, or is relative to no package
        return None


def _public_name(thing) -> str | None:
    """Return the name by which an installed package exports `thing`, and its version; None if none does."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", getattr(thing, "__name__", None))
    if not (isinstance(module, str) and isinstance(name, str) and _package(module)):
        return None
    found = functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), sys.modules.get(module))
    return f"{module}.{name} of {_package(module)}" if found is thing else None


@functools.cache
def _package(module) -> str | None:
    """Return name and version of the installed package that a module is part of; None for the user's own modules."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"Python {sys.version_info.major}.{sys.version_info.minor}"
    spec = str(PathFinder.find_spec(top))  # names the module's file and folders
    if not re.search(r"[/\\](site|dist)-packages[/\\]", spec):
        return None
    try:
        return f"{top} {version(top)}"
    except PackageNotFoundError:  # the package has another name than its module
        return f"{top} {[version(name) for name in _distributions(top)]}"


def _distributions(top) -> list[str]:
    """Return the installed distributions that have a module or package of this name, by their lists of files.

    `packages_distributions` looks up all names, which takes seconds where hundreds are installed.
    """
    pattern = re.compile(rf"^{re.escape(top)}(/|\.[^/]*(py|so|pyd),)", re.M)
    return sorted({each.name for each in distributions() if pattern.search(each.read_text("RECORD") or "")})
