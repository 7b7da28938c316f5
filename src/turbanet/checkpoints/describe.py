"""A description of a swarm in three lines: its members, its model, its devices."""

import dataclasses
import textwrap
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from turbanet.checkpoints.identity import called
from turbanet.core.member import Functions
from turbanet.core.state import State


def described(swarm: State) -> str:
    """Describe members, model, parameters of each, types and devices; never fails, whatever the leaves are."""
    kind = type(swarm).__name__
    try:
        params = jax.tree.leaves(swarm.params)
        members = np.shape(swarm.step)
        count = sum(leaf.size for leaf in params) // max([1, *members])
        types = ", ".join(sorted({str(leaf.dtype) for leaf in params}))
        network = f"{members[0]} member(s)" if members else "one network"
        identity = f"{network}, {_span('seed', swarm.seed)}, {_span('id', swarm.id)}"
        size = f"{count:,} parameters{' each' if members else ''}, {types}"
        arrays = [leaf for leaf in (*params, swarm.step) if isinstance(leaf, jax.Array)]
        devices = {str(device) for array in arrays for device in array.sharding.device_set}
    except Exception:  # jax.tree.map makes a swarm of anything, JAX traces it, and a repr is what errors are read by
        return f"{kind}: of leaves without values\nmodel: {model(swarm.apply_fn)}\nwhere: nowhere"
    where = ", ".join(sorted(devices)) or "in the host's memory"
    return f"{kind}: {identity}\nmodel: {model(swarm.apply_fn)}, {size}\nwhere: {where}"


def model(apply_fn: Any) -> str:
    """Describe the model behind `apply_fn`: its name, and its fields that differ from their defaults."""
    module = getattr(apply_fn, "__self__", None)
    if not isinstance(module, nn.Module | Functions):
        return called(apply_fn)
    values = [(field, getattr(module, field.name)) for field in dataclasses.fields(module) if field.repr]
    changed = {field.name: value for field, value in values if repr(value) != repr(field.default)}
    fields = ", ".join(f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in changed.items())
    return f"{type(module).__name__}({textwrap.shorten(fields, 90, placeholder=' ...')})"


def _span(name, numbers):
    low, high = int(np.min(numbers)), int(np.max(numbers))
    return f"{name} {low}" if low == high else f"{name}s {low} to {high}"
