"""Plan: where the members of a swarm run, over devices, in blocks: all at once on an accelerator, few on a core."""

import dataclasses
import logging
import math
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from turbanet.backend import tracing_for
from turbanet.training.arrays import is_key
from turbanet.training.member import Swarm

ALIGNED_BYTES = 64  # JAX takes over what begins at a multiple of it
CACHE_BYTES = 2 * 2**20  # a core's cache, which weights, gradients and moments of a block should fit in
KEPT_SECONDS = 0.1  # of compilation from which on a program is worth keeping on disk
MOST_CALLS = 16  # instead of a loop over blocks in the program, up to a fifth of what compiles; a call takes 1.5 ms
SMALLEST_BLOCK = 4  # fewer are trained one by one: without vmap that is up to a tenth faster than two or three at once
LARGEST_BLOCK = 8  # where the CPU's rule stops: the smallest networks gain up to a tenth beyond it


def use_cores(cores: int | None = None, *, cache: bool | str | os.PathLike = False) -> int:
    """Make each CPU core a device of its own (all cores the process may use, if None); call it before JAX starts.

    cache: whether what takes a tenth of a second and more to compile is kept for later processes, by JAX's persistent
    compilation cache: True for the user's cache folder (or TURBANET_CACHE), unless JAX was told another, or a folder.
    A process that finds its programs there traces them and compiles nothing.

    Returns the number of CPU devices. Raises RuntimeError when JAX has started with another number.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None and hasattr(os, "sched_getaffinity") else cores
    cores = cores or os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError:
        if len(jax.devices("cpu")) != cores:
            late = f"use_cores({cores}) came too late: JAX has started with {len(jax.devices('cpu'))} CPU device(s)"
            raise RuntimeError(f"{late}; call it before any array (in a notebook: restart the kernel).") from None
    if cache:
        _keep_programs(None if cache is True else Path(cache).expanduser().absolute())
    return cores


def cache_folder(name: str) -> Path:
    """Where something of this name is kept between processes: in the user's cache folder, or in TURBANET_CACHE."""
    return Path(os.environ.get("TURBANET_CACHE") or platformdirs.user_cache_path("turbanet")).expanduser() / name


def _keep_programs(folder):
    if folder is None and jax.config.jax_compilation_cache_dir:
        return
    # Each machine its own: a program is compiled for the instructions of one.
    folder = folder or cache_folder("compiled") / platform.node()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_SECONDS)
    compilation_cache.reset_cache()  # JAX asks only once where it is


@dataclasses.dataclass(frozen=True)
class Plan:
    """`block` members train together on each of `devices`, block after block, each for a whole segment of epochs.

    devices: how many of JAX's default devices, "cpu" or "gpu", the devices themselves, or None for all. block: members,
    or None for the rule: on a CPU as many as fit a core's cache, on an accelerator all of the device's share, or as
    many as its memory holds. Equal plans give equal bits on a CPU; another plan changes roundings only. deterministic:
    whether a GPU, too, gives equal bits in another process and where a model adds up by index (embeddings), which costs
    time, most of all in convolutions: there it took two to nine times as long on an H100.
    """

    devices: int | str | Sequence | None = None
    block: int | None = None
    deterministic: bool = False

    def __post_init__(self):
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise ValueError(f"block must be a whole number of members of at least 1, or None, got {self.block!r}.")
        known = jax.local_devices()
        devices = known if self.devices is None else self.devices
        if isinstance(devices, int | np.integer):
            if not 1 <= devices <= len(known):
                raise ValueError(f"devices must be 1 to {len(known)} (what JAX has here), got {devices}.")
            devices = known[:devices]
        elif isinstance(devices, str):
            try:
                devices = jax.local_devices(backend=devices)
            except RuntimeError:
                raise ValueError(f"JAX has no {devices!r} device here; it has: {known[0].platform}.") from None
        object.__setattr__(self, "devices", tuple(devices))

    def resolve(self, swarm: Swarm) -> "Plan":
        """The plan with its block chosen by rule if none was given; a given block is kept, and filled up if need be."""
        if self.block is not None:
            return self
        if self.on_accelerator:
            return dataclasses.replace(self, block=self._share(len(swarm)))
        leaves = jax.tree.leaves((swarm.params, swarm.params, swarm.opt_state))  # weights, gradients, moments
        member_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // len(swarm)
        block = min(CACHE_BYTES // member_bytes, LARGEST_BLOCK)
        block = 1 if block < SMALLEST_BLOCK else block
        return dataclasses.replace(self, block=block).balanced(len(swarm))

    def balanced(self, members: int) -> "Plan":
        """As many blocks a device as this plan's block makes, as equal as they can be: no near-empty one."""
        share = self._share(members)
        return dataclasses.replace(self, block=-(-share // -(-share // min(self.block, share))))

    def shrunk(self, members: int, of: int, least: int = 1) -> "Plan":
        """The plan for the `members` that are left `of` those it began with: an accelerator's block is quartered.

        Each size compiles anew, so halves would cost more than they save, and so would blocks of fewer than `least`. A
        CPU's block stays. The sizes follow from the counts alone, so that a resumed training has them too.
        """
        block, share = self.block, self._share(of)
        while self.on_accelerator and least < min(block, share) >= 4 * self._share(members):
            block, share = -(-block // 4), -(-share // 4)
        return dataclasses.replace(self, block=block)

    @property
    def on_accelerator(self) -> bool:
        """Whether the devices are accelerators, not the cores of a CPU."""
        first: Any = next(iter(self.devices))
        return first.platform != "cpu"

    def _share(self, members):
        """Members of each device."""
        return -(-members // len(self.devices))

    def __reduce__(self):
        """For copy and pickle, which devices cannot pass through: they are found again by platform and number."""
        return _found_again, ([(device.platform, device.id) for device in self.devices], self.block, self.deterministic)

    def __str__(self):
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        return f"{len(self.devices)} device(s) ({kinds}), blocks of {self.block or 'as many as the rule says'} members"

    @property
    def compiler_options(self):
        """XLA's: on a CPU vectors of 512 bits, where it would use 256; on a GPU what makes equal runs equal."""
        platform = self.devices[0].platform
        if platform == "gpu" and self.deterministic:
            return {"xla_gpu_deterministic_ops": True}
        return {"xla_cpu_prefer_vector_width": 512} if platform == "cpu" else None

    def lower(self, function: Callable, *args: Any, **settings: Any) -> jax.stages.Lowered:
        """`function` of these arguments, traced for the devices, ready to compile; `settings` are of `jax.jit`."""
        first: Any = next(iter(self.devices))
        with tracing_for(first):
            return jax.jit(function, compiler_options=self.compiler_options, **settings).lower(*args)

    def padded(self, members: int) -> int:
        """The number of members after filling every block on every device."""
        whole = self.block * len(self.devices)
        return -(-members // whole) * whole

    def rounds(self, members: int, of: int | None = None) -> list[range]:
        """Who trains in each call of a program, by position, with those that only fill a block.

        A block on each device where a CPU's blocks are small and the swarm makes few calls, else all members in one
        call, which goes through the blocks. of: how many the swarm began with, as one that is resumed is to be called
        as before.
        """
        padded, whole = self.padded(members), self.block * len(self.devices)
        is_small = not self.on_accelerator and self.block < LARGEST_BLOCK
        if not is_small or not members or self.padded(of or members) > MOST_CALLS * whole:
            return [range(padded)]
        return [range(begin, begin + whole) for begin in range(0, padded, whole)]

    def place(self, tree: Any, round: range | None = None) -> Any:
        """A [member, ...] tree, or a round of it, split over the devices, filled up with copies of its last member.

        A CPU may share the caller's memory; a program that it is donated to copies it before it writes.
        """
        if round is None:
            round = range(self.padded(len(jax.tree.leaves(tree)[0])))
        return jax.device_put(resized(tree, len(round), round.start), self._sharding("member"), may_alias=False)

    def share(self, tree: Any) -> Any:
        """A tree that all members read, once on each device."""
        return jax.device_put(tree, self._sharding())

    def vectorise(self, one: Callable) -> Callable:
        """`one(own, shared)` of one member, over trees `own` [member, ...]: blocks in turn, devices at once."""

        local = partial(self.in_blocks, one)
        if len(self.devices) == 1:
            return local
        own, shared = PartitionSpec("member"), PartitionSpec()
        # check_vma would refuse models whose scans start from constants, any RNN among them
        return jax.shard_map(local, mesh=self._sharding().mesh, in_specs=(own, shared), out_specs=own, check_vma=False)

    def in_blocks(self, one: Callable, own: Any, shared: Any) -> Any:
        """`one(own, shared)` of each member on one device, over a tree `own` [member, ...]: blocks in turn."""

        def each(member):
            return one(member, shared)

        if len(jax.tree.leaves(own)[0]) > self.block:
            return jax.lax.map(each, own, batch_size=self.block if self.block > 1 else None)
        if self.block > 1:
            return jax.vmap(each)(own)
        # One member is traced faster without vmap, and its products have no axis of one.
        out = each(jax.tree.map(lambda leaf: leaf[0], own))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)

    def _sharding(self, *axes):
        if len(self.devices) == 1:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        mesh = Mesh(np.array(self.devices), ("member",), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(*axes))


def resized(tree: Any, members: int, begin: int = 0) -> Any:
    """So many members of a [member, ...] tree from `begin` on, or filled up with copies of its last one.

    What the host holds is resized by NumPy, which has nothing to compile.
    """

    if all(map(is_on_host, jax.tree.leaves(tree))):
        return _resized(gathered(tree), members, begin, xp=np)
    whole = begin == 0 and all(len(leaf) == members for leaf in jax.tree.leaves(tree))
    return tree if whole else _resized_on_devices(tree, members, begin)


def _resized(tree, members, begin, xp=jnp):
    def resize(leaf):
        leaf = leaf[begin : begin + members]
        extra = members - len(leaf)
        return xp.concatenate([leaf, xp.repeat(leaf[-1:], extra, axis=0)]) if extra > 0 else leaf

    return jax.tree.map(resize, tree)


_resized_on_devices = jax.jit(_resized, static_argnums=(1, 2))


def gathered(*rounds: Any, members: int | None = None) -> Any:
    """The first `members`, or all, of the trees of several rounds as one; of NumPy arrays if the host's memory has it.

    From there it is moved in one piece.
    """
    if all(map(is_on_host, jax.tree.leaves(rounds))):
        return jax.tree.map(partial(_joined, members), *rounds)
    tree = _concatenated(*rounds) if rounds[1:] else rounds[0]
    return tree if members is None else resized(tree, members)


@jax.jit
def _concatenated(*rounds):
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rounds)


def taken(tree: Any, positions: Any) -> Any:
    """The members of a [member, ...] tree at these positions, int or bool [member] or a slice; each leaf where it is.

    NumPy copies whole rows, XLA's gather on a CPU does not.
    """
    leaves, structure = jax.tree.flatten(tree)
    there = [leaf for leaf in leaves if not is_on_host(leaf)]
    if there:
        moved = iter(_taken_on_devices(there, np.arange(len(there[0]))[positions]))
    out = [np.asarray(leaf)[positions] if is_on_host(leaf) else next(moved) for leaf in leaves]
    return jax.tree.unflatten(structure, out)


@jax.jit
def _taken_on_devices(leaves, positions):
    return [leaf[positions] for leaf in leaves]


def _joined(members, *parts):
    """Leaves one after the other, those of several rounds or devices in memory that JAX takes over without a copy."""
    first = parts[0]
    if len(parts) == 1 and (not isinstance(first, jax.Array) or len(first.devices()) == 1):
        return np.asarray(first)[:members]
    shape = (len(parts) * len(first) if members is None else members, *first.shape[1:])
    size = math.prod(shape) * first.dtype.itemsize
    room = np.empty(size + ALIGNED_BYTES, np.uint8)
    begin = -room.ctypes.data % ALIGNED_BYTES
    whole = room[begin : begin + size].view(first.dtype).reshape(shape)
    for number, part in enumerate(parts):
        place = whole[number * len(first) : (number + 1) * len(first)]
        for shard in part.addressable_shards:
            there = place[shard.index]
            there[...] = np.asarray(shard.data)[: len(there)]
    return whole


def home(leaf: jax.Array | np.ndarray) -> Any:
    """Where an array lies; for one of NumPy's, where JAX would put it."""
    return leaf.sharding if isinstance(leaf, jax.Array) else jnp.zeros(0).sharding


def is_on_host(leaf):
    """Whether NumPy reads an array where it lies."""
    return not isinstance(leaf, jax.Array) or (not is_key(leaf) and all(d.platform == "cpu" for d in leaf.devices()))


def _found_again(names, block, deterministic=False):
    here = {(device.platform, device.id): device for device in jax.local_devices()}
    if missing := [name for name in names if name not in here]:
        raise ValueError(f"The plan needs the devices {missing}, which JAX does not have here: it has {list(here)}.")
    return Plan([here[name] for name in names], block, deterministic is True)  # plans of 0.6 had candidates there


@cache
def say_once(sentence: str) -> None:
    """Log a piece of advice the first time it applies."""
    logging.getLogger("turbanet").warning(sentence)


def check_plan(plan: Any) -> None:
    """ValueError for what `fit` does not take as its plan."""
    if not (plan is None or isinstance(plan, Plan)):
        raise ValueError(f"plan must be a Plan or None (by rule), got {plan!r}.")


def choose(plan: Any, swarm: Swarm) -> Plan:
    """The plan that `fit` and its like start with: the given one or all devices, its block resolved for the swarm."""
    check_plan(plan)
    plan = (plan if isinstance(plan, Plan) else Plan()).resolve(swarm)
    cores = os.cpu_count() or 1
    if plan.devices[0].platform == "cpu" and len(jax.devices("cpu")) == 1 and cores > 1 and len(swarm) > 1:
        say_once(f"One CPU device on {cores} cores: call turbanet.use_cores() first to train on all of them.")
    return plan
