"""Members and data of a shard: split by the driver, put together by the worker."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from turbanet.core.arrays import as_arrays, is_key
from turbanet.core.fingerprint import as_numbers
from turbanet.data.examples import join, one_a_member, pair
from turbanet.turba_train_state import TurbaTrainState

DATA_NAMES = "x", "y", "rows", "validation", "validation_rows", "per_member", "predict", "member"


def states(make_swarm: Any, members: Any) -> tuple[Any, Callable | None]:
    """Split a swarm into (its tree, a function from positions in `members` to states); a function into (it, None).

    members : the number of members, for all, or ids; KeyError for one that the swarm has not
    """
    if not isinstance(make_swarm, TurbaTrainState):
        return make_swarm, None
    if np.ndim(make_swarm.step) != 1:
        raise ValueError("make_swarm is one member's state: give a swarm, of a member axis, or make_swarm(ids).")
    leaves, tree = jax.tree.flatten(make_swarm if np.ndim(members) == 0 else make_swarm[members])
    return tree, lambda positions: [_as_numbers(leaf, positions) for leaf in leaves]


def _as_numbers(leaf, positions):
    """Return members of a leaf in a form that pickles: (numbers, the implementation of random keys or None)."""
    kind = jax.random.key_impl(leaf) if is_key(leaf) else None
    return as_numbers(leaf)[positions], kind and str(kind)


def swarm_of(tree: Any, states: list) -> TurbaTrainState:
    """Rebuild the swarm that `states` has split."""
    leaves = [numbers if kind is None else jax.random.wrap_key_data(numbers, impl=kind) for numbers, kind in states]
    return jax.tree.map(jax.numpy.asarray, jax.tree.unflatten(tree, leaves))


def members(make_swarm: Callable, ids: np.ndarray) -> TurbaTrainState:
    """Return the members of these ids before their training; ValueError if `make_swarm` makes others."""
    swarm = make_swarm(ids)
    if not isinstance(swarm, TurbaTrainState) or np.ndim(swarm.step) != 1:
        raise ValueError(f"make_swarm(ids) must make a TurbaTrainState with a member axis, got {type(swarm).__name__}.")
    if not np.array_equal(swarm.id, ids):
        got = f"{np.asarray(swarm.id)[:5].tolist()} for the ids {ids[:5].tolist()}"
        raise ValueError(f"make_swarm(ids) must make the members of those ids, got {got}: hand ids on as swarm_size.")
    return swarm


def as_dict(data: Any, **more: Any) -> dict:
    """Return (x, y) or a dict of DATA_NAMES, and `more`, as one dict of arrays without None; ValueError for others."""
    if not isinstance(data, dict) and not (isinstance(data, tuple | list) and len(data) == 2):
        known = f"(x, y), a dict of {', '.join(DATA_NAMES)}, or data(ids)"
        raise ValueError(f"data must be {known}; got {type(data).__name__}.")
    data = {**(data if isinstance(data, dict) else dict(zip("xy", data, strict=True))), **more}
    if unknown := sorted(set(data) - set(DATA_NAMES)):
        raise ValueError(f"data may hold {', '.join(DATA_NAMES)}, and holds {', '.join(unknown)} too.")
    if missing := [name for name in "xy" if name not in data]:
        raise ValueError(f"data holds no {' and no '.join(missing)}: give (x, y), or a dict with both.")
    if "validation" in data and data["validation"] is not None:
        data["validation"] = tuple(pair(data["validation"]))
    present = {name: part for name, part in data.items() if part is not None}
    if present.get("per_member") is True and isinstance(data["x"], list) and isinstance(data["y"], list):
        if "validation" in present or "predict" in present:
            raise ValueError("Lists of each member's own rows came with validation or predict: make them arrays.")
        x, y, rows = one_a_member(data["x"], data["y"], present.get("rows"), members=len(data["x"]))
        present |= {"x": x, "y": y} | ({} if rows is None else {"rows": rows})
    return {name: part if name == "per_member" else as_arrays(part, name) for name, part in present.items()}


def own_pair(data: dict) -> tuple[Any, Any]:
    """Return whether x and whether y leads with the member axis, as `fit` takes per_member."""
    own = data.get("per_member", False)
    return own if isinstance(own, tuple) else (own, own)


def split(data: dict) -> tuple[dict, Callable[[Any], list]]:
    """Split data of `as_dict` into (what all shards share, a function from positions to a shard's own arrays)."""
    of_x, of_y = own_pair(data)
    is_own = {"x": of_x, "y": of_y, "validation": (of_x, of_y), "predict": of_x}
    is_own |= dict.fromkeys(("rows", "validation_rows", "member"), True)
    arrays = {name: part for name, part in data.items() if name in is_own}
    leaves, tree = jax.tree.flatten(arrays)
    owned = jax.tree.leaves(jax.tree.broadcast({name: is_own[name] for name in arrays}, arrays))
    leaves = [np.asarray(leaf) for leaf in leaves]
    shared = [None if own else leaf for leaf, own in zip(leaves, owned, strict=True)]

    def own(positions):
        return [leaf[positions] if own else None for leaf, own in zip(leaves, owned, strict=True)]

    return {"leaves": shared, "tree": tree, "per_member": (of_x, of_y)}, own


def merge(shared: dict, own: list) -> dict:
    """Rebuild the data that `split` has split."""
    return jax.tree.unflatten(shared["tree"], join(own, shared["leaves"])) | {"per_member": shared["per_member"]}
