"""A training under way, segment by segment: its plan, its memory, its time, who still trains."""

import dataclasses
import time
from functools import partial

import jax
import numpy as np

from turbanet.training import autoplan, checkpoint
from turbanet.training.plan import resized, say_once
from turbanet.training.program import compiled, fits


class Training:
    """A training under way: where it stands, what it cost, under which plan, who still trains."""

    def __init__(self, one, swarm, own, shared, plan, *, asked=None):
        self.asked = asked  # members in a block as the caller's plan has it, for whoever resumes
        self.one, self.start, self.shared_data = one, swarm, shared
        self.done, self.losses, self.compile_seconds, self.steady_seconds = 0, [], 0.0, 0.0
        self.training, self.set_aside = np.arange(len(swarm)), []  # positions; (positions, their states)
        self._place(swarm, own, plan)

    def _place(self, state, own, plan):
        self.plan, self.state, self.own = plan, plan.place(state), plan.place(own)
        self.shared = plan.share(self.shared_data)
        self.fits_memory = False

    def segment(self, epochs):
        """Train on for some epochs; out of memory at the first, with half the block. Then set aside who has stopped."""
        try:
            self._segment(epochs)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if self.done or self.plan.block == 1 or "RESOURCE_EXHAUSTED" not in repr(error):
                raise
            plan = dataclasses.replace(self.plan, block=self.plan.block // 2, candidates=())
            say_once(f"Out of memory with blocks of {self.plan.block} members; going on with {plan.block}.")
            self._place(self.start, self._own(), plan)
            return self.segment(epochs)
        if self.start.stopping is not None:
            self._set_aside()

    @property
    def loss(self):
        """The mean loss of the last epoch over the members that trained in it."""
        last = self.losses[-1][0][-1]
        return last[~np.isnan(last)].mean() if not np.isnan(last).all() else np.nan

    def _segment(self, epochs):
        begin = time.perf_counter()
        program = compiled(dataclasses.replace(self.one, epochs=epochs), self.plan, self.state, self.own, self.shared)
        self.compile_seconds += time.perf_counter() - begin
        if not self.fits_memory and not (need := fits(program, self.plan)).enough:  # asked once: it takes milliseconds
            raise MemoryError(
                f"RESOURCE_EXHAUSTED: training needs {need.bytes / 2**30:.1f} GiB, more than is free; "
                "train fewer members at a time (Plan(block=...)) or smaller batches."
            )
        begin = time.perf_counter()
        self.state, loss = jax.block_until_ready(program(self.state, self.own, self.shared))
        self.steady_seconds += time.perf_counter() - begin
        self.fits_memory = True
        self.losses.append(jax.tree.map(self._of_everyone, loss))
        self.done += epochs

    def _of_everyone(self, loss):
        """Losses [epoch, member] of those who train, NaN for the others."""
        every = np.full((loss.shape[1], len(self.start)), np.nan, loss.dtype)
        every[:, self.training] = np.asarray(loss)[: len(self.training)].T
        return every

    def _state(self):
        return _first(self.state, len(self.training))

    def _own(self):
        return _first(self.own, len(self.training))

    def _set_aside(self):
        """Go on with the members that have not stopped, where that halves the work or ends it."""
        active = np.asarray(self.state.stopping.active)[: len(self.training)]
        if 2 * self.plan.padded(max(active.sum(), 1)) > self.plan.padded(len(self.training)) and active.any():
            return
        state, own = self._state(), self._own()
        gone, kept = np.flatnonzero(~active), np.flatnonzero(active)
        self.set_aside.append((self.training[gone], _members(state, gone)))
        self.training = self.training[kept]
        if len(kept):
            self._place(_members(state, kept), _members(own, kept), self.plan)

    def everyone(self):
        """All members' states, in the order they came in."""
        parts = self.set_aside
        if len(self.training):
            parts = [*parts, (self.training, self._state())]
        if len(parts) == 1:
            return parts[0][1]
        return jax.tree.map(partial(_together, [positions for positions, _ in parts]), *(state for _, state in parts))

    def kept(self, segment):
        """What a checkpoint keeps: ({name: array}, {name: value})."""
        losses = [part for part in zip(*self.losses, strict=True) if part[0] is not None]
        arrays = {f"losses[{i}]": np.concatenate(part) for i, part in enumerate(losses)}
        progress = {
            "done": self.done,
            "segment": segment,
            "block": self.plan.block,
            "asked": self.asked,
            "devices": len(self.plan.devices),
            "seconds": [self.compile_seconds, self.steady_seconds],
        }
        return arrays | checkpoint.leaves_by_name(self.everyone()), progress

    def resume(self, arrays, progress):
        """Go on from what `kept` returned."""
        state = checkpoint.named_leaves(arrays, self.start)
        self.done, (self.compile_seconds, self.steady_seconds) = progress["done"], progress["seconds"]
        self.losses = [tuple(arrays.get(f"losses[{i}]") for i in range(3))]
        own = self._own()
        if state.stopping is not None:
            active = np.asarray(state.stopping.active)
            gone, self.training = np.flatnonzero(~active), np.flatnonzero(active)
            if len(gone):
                self.set_aside.append((gone, _members(state, gone)))
                state, own = _members(state, self.training), _members(own, self.training)
        if len(self.training):
            self._place(state, own, self.plan)

    def search(self, epochs):
        """After the first segment its seconds are known, and so is what a search may cost."""
        plan, seconds = self.plan, autoplan.SHARE * self.steady_seconds * epochs / self.done
        job = {"devices": plan.devices, "start": plan.block, "seconds": seconds}
        state, own = self._state(), self._own()
        data = own["train"], self.shared_data["train"]
        found = autoplan.search(self.one, state, *data, compile_seconds=self.compile_seconds, **job)
        if found.block != plan.block:
            self._place(state, own, found)
        self.plan = found


def _members(tree, positions):
    """Those members of a [member, ...] tree, in the host's memory: NumPy copies whole rows, XLA's gather does not."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[positions], tree)


def _together(positions, *leaves):
    """[member, ...] of the leaves, each of which has the members at its positions."""
    out = np.empty((sum(map(len, positions)), *leaves[0].shape[1:]), leaves[0].dtype)
    for where, leaf in zip(positions, leaves, strict=True):
        out[where] = leaf
    return out


def _first(tree, members):
    """A [member, ...] tree without what fills it up."""
    leaves = jax.tree.leaves(tree)
    return resized(tree, members) if leaves and len(leaves[0]) != members else tree
