"""Saving what is fitted, an estimator or a forecaster, to one file that holds no code, and loading it again."""

import dataclasses
import io
import json
import os
from typing import Any, ClassVar, Self

import jax
import numpy as np

from turbanet.checkpoints import identity
from turbanet.core.fingerprint import as_numbers, fingerprint, from_numbers
from turbanet.core.plan import say_once
from turbanet.core.state import State, Swarm
from turbanet.core.storage import place, save_file

FORMAT = 1
OF_A_RUN = "callbacks", "plan", "cluster"  # what a program or a machine has, and no prediction depends on
PLAIN = type(None), bool, int, float, str


class Fitted:
    """`save` and `load` for a dataclass of parameters, by the state that a pickle of it would hold."""

    _parts: ClassVar[tuple[type, ...]] = ()  # dataclasses in that state
    _kept: ClassVar[tuple[str, ...]] = ()  # parameters that the state has in a form that a file can hold
    _fixed: ClassVar[tuple[str, ...]] = ()  # parameters that belong to what was fitted

    def save(self, path: str | os.PathLike) -> None:
        """Save to one file, written whole or not at all: parameters, and what was fitted, without the training rows.

        Parameters that are code (a model, a loss, an optimizer, an activation of your own) are given to `load` again.
        `callbacks`, `plan`, `cluster` and a `random_state` that is no number are not kept. `path` may be an address,
        such as s3://bucket/file. Raises ValueError if nothing is fitted, TypeError for what no file can hold.
        """
        state: Any = self.__getstate__()
        if not any(name.startswith("swarm") for name in state):
            raise ValueError(f"Nothing is fitted yet: call fit before save, or keep the parameters of {self!r}.")
        parameters, code = self._parameters()
        encoder = _Encoder(code, self._parts)
        fitted = {name: value for name, value in state.items() if name not in _defaults(type(self))}
        about = {"format": FORMAT, "class": type(self).__name__, "versions": identity.versions()}
        about |= {"parameters": encoder(parameters), "fitted": encoder(fitted)}
        about["code"] = {name: _described(thing) for name, thing in code.items()}
        content = io.BytesIO()
        arrays = {str(number): array for number, array in enumerate(encoder.arrays)}
        np.savez(content, allow_pickle=False, turbanet=np.array(json.dumps(about)), **arrays)
        save_file(path, content.getvalue(), type(self).__name__)

    @classmethod
    def load(cls, path: str | os.PathLike, *, check: bool = True, **parameters: Any) -> Self:
        """Load what `save` wrote; it predicts, and goes on training, as what was saved.

        parameters : those that are code, such as model=, and others for the next fit. check : whether other code than
        it was saved with is refused. ValueError for another file, missing or other code, and what is fitted for good.
        """
        about, arrays = _read(path, cls.__name__)
        if missing := [f"{name}={about['code'][name][0]}" for name in about["code"] if name not in parameters]:
            problem = f"{path} was saved with {', '.join(missing)}, which is code that no file holds"
            raise ValueError(f"{problem}: {cls.__name__}.load(path, {missing[0].partition('=')[0]}=...) gives it.")
        for name, saved in about["code"].items() if check else ():
            _check(path, name, saved, _described(parameters[name]), about["versions"])

        def decode(value):
            return _decoded(value, arrays, parameters, {part.__name__: part for part in cls._parts})

        saved = decode(about["parameters"]) | {name: parameters[name] for name in about["code"]}
        fitted, loaded = cls(**saved), cls(**(saved | parameters))
        for name in cls._fixed:
            was, given = (getattr(each, name) for each in (fitted, loaded))
            if was != given:
                raise ValueError(f"{path} was fitted with {name}={was!r}, and {given!r} came: fit anew.")
        loaded.__setstate__(decode(about["fitted"]))  # type: ignore[attr-defined]
        return loaded

    def _parameters(self):
        """Return ({name: value} of the parameters that a file can hold, {name: value} of those that are code)."""
        defaults = _defaults(type(self))
        changed = {name: getattr(self, name) for name in defaults if getattr(self, name) is not defaults[name]}
        kept, code = {}, {}
        for name, value in changed.items():
            try:
                _Encoder({}, self._parts)(value)
                kept[name] = value
            except TypeError:
                if name not in OF_A_RUN + self._kept and not isinstance(value, np.random.RandomState):
                    code[name] = value
        return {name: value for name, value in kept.items() if name not in OF_A_RUN}, code


def numbers_of(swarm: State) -> list[np.ndarray]:
    """Return the arrays of a swarm, random keys as the numbers that they hold."""
    return [as_numbers(leaf) for leaf in jax.tree.leaves(swarm)]


def with_numbers(like: Swarm, numbers: list[np.ndarray]) -> Swarm | None:
    """Return the swarm `like` with these arrays; None if they are none of such a swarm."""
    leaves, tree = jax.tree.flatten(like)
    if [as_numbers(leaf).shape for leaf in leaves] != [np.shape(each) for each in numbers]:
        return None
    return jax.tree.unflatten(tree, map(from_numbers, numbers, leaves))


def _defaults(kind):
    """Return {name: default} of a dataclass's parameters."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.init}


class _Encoder:
    """Turns values into what JSON holds, and collects their arrays."""

    def __init__(self, code: dict[str, Any], parts: tuple[type, ...]):
        self.names = {id(thing): name for name, thing in code.items()}
        self.parts = parts
        self.arrays: list[np.ndarray] = []

    def __call__(self, value: Any) -> Any:
        if id(value) in self.names:
            return {"code": self.names[id(value)]}
        if type(value) in PLAIN:
            return value
        if isinstance(value, self.parts):
            return {"part": type(value).__name__, "fields": self(vars(value))}
        if isinstance(value, dict):
            return {"dict": [[self(name), self(each)] for name, each in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self(each) for each in value]}
        if not isinstance(value, np.ndarray | np.generic):
            advice = "set the parameter that it was fitted with, or fit again; ids and labels may be strings or numbers"
            raise TypeError(f"{value!r:.80} is code, or a value that no file holds, and no parameter: {advice}.")
        if value.dtype == object:
            return {"objects": self(value.tolist())}
        self.arrays.append(np.asarray(value))
        return {"array": len(self.arrays) - 1, "dtype": str(value.dtype)}


def _decoded(value, arrays, code, parts):
    """Return the value that `_Encoder` turned into JSON."""

    def decode(each):
        return _decoded(each, arrays, code, parts)

    match value:
        case {"code": name}:
            return code[name]
        case {"part": name, "fields": fields}:
            return parts[name](**decode(fields))
        case {"dict": items}:
            return {decode(name): decode(each) for name, each in items}
        case {"list": items}:
            return list(map(decode, items))
        case {"tuple": items}:
            return tuple(map(decode, items))
        case {"objects": items}:
            return np.array(decode(items), dtype=object)
        case {"array": number, "dtype": dtype}:
            array = arrays[str(number)]
            return (array.view(dtype) if array.dtype.kind == "V" else array)[()]  # bfloat16 is nameless to NumPy
    return value


def _read(path, name):
    """Return (what is said about a saved object, its arrays by number)."""
    file = place(path)
    if file.is_dir():
        raise ValueError(f"{path} is a folder and holds no {name} that save wrote: name the file of one.")
    try:
        content = io.BytesIO(file.read_bytes())
        with np.load(content, allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(str(arrays.pop("turbanet")))
        kind = about["class"]
    except OSError:
        raise
    except Exception as error:  # zip, NumPy, JSON: each raises its own for files of others
        raise ValueError(f"{path} holds no {name} that save wrote: name the file of one.") from error
    if kind != name:
        raise ValueError(f"{path} holds a {kind}, not a {name}: load it by {kind}.load.")
    if about["format"] != FORMAT:
        problem = f"{path} holds a {name} in format {about['format']}, and this TurbaNet reads format {FORMAT}"
        raise ValueError(f"{problem}: load it with the turbanet {about['versions']['turbanet']} that wrote it.")
    return about, arrays


def _described(thing):
    """Return (name, fingerprint) of code; "" for a fingerprint that would tell nothing."""
    digest = fingerprint(thing)
    return [identity.called(thing), "" if digest.opaque else digest[:16]]


def _check(path, name, saved, given, versions):
    """Raise ValueError for other code than the saved one; only log it if versions differ too, as they may change it."""
    if saved == given or "" in (saved[1], given[1]):
        return
    if versions == identity.versions():
        problem = f"{path} was saved with another {name}, {saved[0]}, than the {given[0]} that came"
        raise ValueError(f"{problem}: give the same, or check=False if both compute the same.")
    say_once(f"Whether the {name} in {path} is the same by now is unknown: it was saved by {versions}.")
