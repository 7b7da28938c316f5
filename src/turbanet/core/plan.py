"""Plans: how the members of a swarm are split over devices, and into blocks on each device."""

import contextlib
import dataclasses
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Sequence
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
from turbanet.core.arrays import check_whole
from turbanet.core.gather import resized
from turbanet.core.state import State

CACHE_BYTES = 2 * 2**20  # of a core's cache, which weights, gradients and moments of a block should fit in
KEPT_SECONDS = 0.1  # of compilation from which on a program is saved to disk
MOST_KEPT = 2 * 2**30  # bytes of these programs
MOST_CALLS = 16  # in place of a loop over blocks, which takes up to a fifth of the compilation; a call takes 1.5 ms
SMALLEST_BLOCK = 4  # below it members train one by one: up to a tenth faster without vmap than two or three at once
LARGEST_BLOCK = 8  # of the default on a CPU
SMALL_BYTES = 2**14  # members of at most this size gain up to a tenth from blocks twice as large; LSTMs lost a fifth


def use_cores(cores: int | None = None, *, cache: bool | str | os.PathLike = True) -> int:
    """Make each CPU core a JAX device, and keep compiled programs on disk; call this before JAX starts.

    cores: how many; None: all that the process may use. cache: where programs that take a tenth of a second or longer
    to compile are kept for later processes, by JAX's persistent compilation cache. True: the folder that JAX is
    configured with, else `cache_folder()`, of which the least used programs go when they exceed 2 GiB; a path: that
    folder; False: none. A process that finds its programs there traces them and does not compile.

    Returns the number of CPU devices. Raises RuntimeError if JAX has started with another number, ValueError for a
    number below 1.
    """
    if cores is not None:
        check_whole(cores=cores)
    cores = len(os.sched_getaffinity(0)) if cores is None and hasattr(os, "sched_getaffinity") else cores
    cores = cores or os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError:
        if len(jax.devices("cpu")) != cores:
            message = f"use_cores({cores}) came too late: JAX has started with {len(jax.devices('cpu'))} CPU device(s)"
            raise RuntimeError(f"{message}; call it before any array (in a notebook: restart the kernel).") from None
    configured = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009  (missing in its stub)
    if cache is False or (cache is True and configured):
        return cores
    folder = cache_folder() if cache is True else Path(cache).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # another user's folder may be there
            pass
        if cache is True:
            _complete(folder)
    except OSError as error:
        say_once(f"Compiled programs are not kept, as {folder} cannot be used ({error.strerror}): set TURBANET_CACHE.")
        return cores
    if cache is True:
        jax.config.update("jax_compilation_cache_max_size", MOST_KEPT)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_SECONDS)
    compilation_cache.reset_cache()  # JAX reads the setting only once
    return cores


def cache_folder() -> Path:
    """Return the folder of `use_cores` for compiled programs: in TURBANET_CACHE, else in the user's cache folder.

    Each machine has its own, as a program is compiled for the instructions of its processor.
    """
    root = os.environ.get("TURBANET_CACHE") or platformdirs.user_cache_path("turbanet")
    return Path(root, "compiled", platform.node()).expanduser().absolute()


def _complete(folder):
    """Give each program its time of use, which JAX needs of all and an older version or a killed process left out."""
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the program
                used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Train `block` members at once on each of `devices`, one block after another, each for all epochs of a call.

    Equal plans give equal bits on a CPU; another plan changes rounding only.

    devices: how many of JAX's default devices, "cpu" or "gpu", a sequence of devices, or None for all. block: number of
    members, or None for the default: on a CPU as many as fit a core's cache, on an accelerator the device's share of
    the swarm, or as much of it as fits in memory. deterministic: whether a GPU gives equal bits as well in another
    process, and for models that add up by index (embeddings). It costs time, most of all in convolutions, which took
    two to nine times as long on an H100. kernel: whether `fit` trains each member in one GPU kernel, which holds a
    small network from the first step of a call to the last. None: where possible; True: always, with a ValueError where
    it is impossible; False: never. It changes rounding only. The plan of a history records whether a kernel was used
    (`in_kernel`) and, if not, why (`reason`).
    """

    devices: int | str | Sequence | None = None
    block: int | None = None
    deterministic: bool = False
    kernel: bool | None = None
    in_kernel: bool = dataclasses.field(default=False, compare=False)
    reason: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        if self.block is not None:
            check_whole(block=self.block)
        if not (self.kernel is None or isinstance(self.kernel, bool)):
            raise ValueError(f"kernel must be True, False, or None (where it is possible), got {self.kernel!r}.")
        available = jax.local_devices()
        devices = available if self.devices is None else self.devices
        if isinstance(devices, int | np.integer):
            if not 1 <= devices <= len(available):
                raise ValueError(f"devices must be 1 to {len(available)} (what JAX has here), got {devices}.")
            devices = available[:devices]
        elif isinstance(devices, str):
            try:
                devices = jax.local_devices(backend=devices)
            except RuntimeError:
                raise ValueError(f"JAX has no {devices!r} device here; it has: {available[0].platform}.") from None
        several = tuple(devices) if isinstance(devices, Iterable) else (devices,)
        if not several or len({*map(id, several)}) < len(several) or not all(hasattr(d, "platform") for d in several):
            raise ValueError(
                f"devices are some of jax.devices(), their number, a platform or None; got {devices!r:.80}."
            )
        object.__setattr__(self, "devices", several)

    def resolve(self, swarm: State) -> "Plan":
        """Return the plan with the default block if it has none; a given block stays."""
        if self.block is not None:
            return self
        if self.on_accelerator:
            return dataclasses.replace(self, block=self._share(len(swarm)))
        leaves = jax.tree.leaves((swarm.params, swarm.params, swarm.opt_state))  # weights, gradients, moments
        member_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // len(swarm)
        most = LARGEST_BLOCK if member_bytes > SMALL_BYTES else 2 * LARGEST_BLOCK
        block = min(CACHE_BYTES // member_bytes, most)
        block = 1 if block < SMALLEST_BLOCK else block
        return dataclasses.replace(self, block=block).balanced(len(swarm))

    def balanced(self, members: int) -> "Plan":
        """Return the plan with the same number of blocks a device, of sizes as equal as possible."""
        share = self._share(members)
        return dataclasses.replace(self, block=-(-share // -(-share // min(self.block, share))))

    def shrunk(self, members: int, of: int, least: int = 1) -> "Plan":
        """Return the plan for the `members` that are left `of` the original number: quarter an accelerator's block.

        Each size compiles again, so that halving would cost more than it saves, as would blocks of fewer than `least`
        members. A CPU's block stays. The sizes follow from the counts alone, so that a resumed training has the same.
        """
        block, share = self.block, self._share(of)
        while self.on_accelerator and least < min(block, share) >= 4 * self._share(members):
            block, share = -(-block // 4), -(-share // 4)
        return dataclasses.replace(self, block=block)

    @property
    def has_kernels(self) -> bool:
        """Whether the devices are NVIDIA GPUs, which kernels of our own are written for."""
        return self.on_accelerator and "NVIDIA" in self.kind

    @property
    def kind(self) -> str:
        """The kind of the devices, such as "NVIDIA H100 80GB HBM3"."""
        return self.devices[0].device_kind

    @property
    def on_accelerator(self) -> bool:
        """Whether the devices are accelerators and not cores of a CPU."""
        return self.devices[0].platform != "cpu"

    def _share(self, members):
        """Return the number of members of each device."""
        return -(-members // len(self.devices))

    def __reduce__(self):
        """Copy and pickle devices as platform and id: the devices themselves cannot be pickled."""
        devices = [(device.platform, device.id) for device in self.devices]
        return _found_again, (devices, self.block, self.deterministic, self.kernel, self.in_kernel, self.reason)

    def __str__(self):
        kinds = ", ".join(sorted({device.device_kind for device in self.devices}))
        blocks = f"{len(self.devices)} device(s) ({kinds}), blocks of {self.block or 'the default number of'} members"
        return f"{blocks}, one kernel" if self.in_kernel else blocks

    @property
    def compiler_options(self):
        """XLA's options: 512-bit vectors instead of 256 on a CPU; deterministic operations on a GPU if requested."""
        platform = self.devices[0].platform
        if platform == "gpu" and self.deterministic:
            return {"xla_gpu_deterministic_ops": True}
        return {"xla_cpu_prefer_vector_width": 512} if platform == "cpu" else None

    def lower(self, function: Callable, *args: Any, **settings: Any) -> jax.stages.Lowered:
        """Trace and lower `function` for the devices of the plan; `settings` are arguments of `jax.jit`."""
        with tracing_for(self.devices[0]):
            return jax.jit(function, compiler_options=self.compiler_options, **settings).lower(*args)

    def padded(self, members: int) -> int:
        """Return the number of members after filling every block on every device."""
        whole = self.block * len(self.devices)
        return -(-members // whole) * whole

    def rounds(self, members: int, of: int | None = None) -> list[range]:
        """Return the positions of the members of each call of a program, with copies that fill a block.

        A call has one block on each device if a CPU's blocks are small and the calls few; else one call has all members
        and loops over the blocks. of: the original number of members, so that a resumed training has the same calls.
        """
        padded, whole = self.padded(members), self.block * len(self.devices)
        is_small = not self.on_accelerator and self.block < LARGEST_BLOCK
        if not is_small or not members or self.padded(of or members) > MOST_CALLS * whole:
            return [range(padded)]
        return [range(begin, begin + whole) for begin in range(0, padded, whole)]

    def place(self, tree: Any, round: range | None = None) -> Any:
        """Put a [member, ...] tree, or a round of it, on the devices, filled up with copies of its last member.

        A CPU may share the caller's memory; a program that it is donated to copies it before writing.
        """
        if round is None:
            round = range(self.padded(len(jax.tree.leaves(tree)[0])))
        return jax.device_put(resized(tree, len(round), round.start), self._sharding("member"), may_alias=False)

    def share(self, tree: Any) -> Any:
        """Put a tree that all members read on each device."""
        return jax.device_put(tree, self._sharding())

    def vectorise(self, one: Callable) -> Callable:
        """Map `one(own, shared)` over a tree `own` [member, ...]: devices in parallel, blocks in turn."""
        local = partial(self.in_blocks, one)
        if len(self.devices) == 1:
            return local
        own, shared = PartitionSpec("member"), PartitionSpec()
        # check_vma would refuse models whose scans start from constants, any RNN among them
        return jax.shard_map(local, mesh=self.mesh, in_specs=(own, shared), out_specs=own, check_vma=False)

    def in_blocks(self, one: Callable, own: Any, shared: Any) -> Any:
        """Map `one(own, shared)` over a tree `own` [member, ...] on one device: blocks in turn."""

        def each(member):
            return one(member, shared)

        if len(jax.tree.leaves(own)[0]) > self.block:
            return jax.lax.map(each, own, batch_size=self.block if self.block > 1 else None)
        if self.block > 1:
            return jax.vmap(each)(own)
        # Without vmap one member traces faster, and its products have no axis of size one.
        out = each(jax.tree.map(lambda leaf: leaf[0], own))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices, of the axis "member"."""
        return Mesh(np.array(self.devices), ("member",), axis_types=(AxisType.Auto,))

    def _sharding(self, *axes):
        if len(self.devices) == 1:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def _found_again(names, block, deterministic=False, *others):
    local = {(device.platform, device.id): device for device in jax.local_devices()}
    if missing := [name for name in names if name not in local]:
        raise ValueError(f"The plan needs the devices {missing}, which JAX does not have here: it has {list(local)}.")
    deterministic = deterministic is True  # plans of 0.6 had candidates there
    return Plan([local[name] for name in names], block, deterministic, *others)


@cache
def say_once(sentence: str) -> None:
    """Log a message as a warning, once in this process."""
    logging.getLogger("turbanet").warning(sentence)


def dividing(devices: Any, members: int) -> Plan:
    """Return a plan of one block a device, for the largest number of `devices` that divides the members."""
    available: Any = Plan(devices).devices
    count = max(count for count in range(1, len(available) + 1) if members % count == 0)
    return Plan(available[:count], block=members // count)


def check_plan(plan: Any) -> None:
    """Raise ValueError if `plan` is neither a `Plan` nor None."""
    if not (plan is None or isinstance(plan, Plan)):
        raise ValueError(f"plan must be a Plan or None (by rule), got {plan!r}.")


def check_cluster(cluster: Any) -> None:
    """Raise ValueError for what is no `turbanet.cluster.Cluster`, such as its address."""
    if not (cluster is None or hasattr(cluster, "fit")):
        raise ValueError(f"cluster must be a turbanet.cluster.Cluster(folder, ...) or None, got {cluster!r}.")


def choose(plan: Any, swarm: State) -> Plan:
    """Return the given plan, or one of all devices, with its block resolved for the swarm."""
    check_plan(plan)
    plan = (plan if isinstance(plan, Plan) else Plan()).resolve(swarm)
    cores = os.cpu_count() or 1
    if plan.devices[0].platform == "cpu" and len(jax.devices("cpu")) == 1 and cores > 1 and len(swarm) > 1:
        say_once(f"One CPU device on {cores} cores: call turbanet.use_cores() first to train on all of them.")
    return plan
