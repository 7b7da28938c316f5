"""The training loop: segments, checkpoints, stopped members, and blocks that fit the memory."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.checkpoints import checkpoint, identity
from turbanet.core import schedules, stopping
from turbanet.core.gather import gathered, is_on_host, resized, taken
from turbanet.core.interrupt import GivenUpError, noted
from turbanet.core.memory import fitting, is_out_of_memory
from turbanet.core.metrics import on_host
from turbanet.core.plan import Plan, choose, say_once
from turbanet.core.progress import progress_bar
from turbanet.core.schedules import hyperparameters, with_hyperparameters
from turbanet.core.state import State
from turbanet.data.examples import of_members, placed, targets
from turbanet.kernels.reader import Refused
from turbanet.training.compilation import compile_in_thread, compiled
from turbanet.training.kernel import Kernel, in_kernel, remember_refusal
from turbanet.training.parts import Part, epochs_together, is_long, members_at_least
from turbanet.training.program import Evaluate, Train
from turbanet.training.scores import evaluated, is_by_count

CALL_SECONDS = 2  # of one call of a program, about, if an epoch takes less


class Training:
    """A training in progress: its states, epochs done, losses, seconds, plan and active members.

    Parameters
    ----------
    program : what a member computes in an epoch
    swarm : the members before the training
    data : (training data, held-out data or None)
    epochs : of the whole training
    segment : epochs between two checkpoints, and between two checks for stopped members
    plan : as `fit` takes it
    metrics : {name: metric(prediction, y)} of each member's own held-out rows, called on the host
    checkpoints : a folder or `Checkpoints`; a training that began there resumes; None: no checkpoints
    between : between(this) is called after each segment; None: no call
    """

    interrupted: Callable[[], bool] = staticmethod(bool)  # whether Ctrl-C came
    say: Callable[[str], None] = staticmethod(lambda _: None)  # shows what is waited for
    is_recorded = True  # whether a checkpoint may be made of the states: losses are recorded, callbacks have returned
    min_members = 1  # members that keep an accelerator busy, if known: blocks get no smaller

    def __init__(self, program: Train, swarm: State, data, *, epochs, segment, plan, metrics, checkpoints, between):
        self.is_scored_apart = bool(metrics) or is_by_count(program.loss_fn, data[1])  # after each epoch, for the host
        self.program = dataclasses.replace(program, epochs=1) if self.is_scored_apart else program
        self.start = swarm
        self.data = data
        self.epochs = epochs
        self.segment = segment
        self.metrics = metrics
        self.between = between
        self.done = 0
        self.steps_done = 0  # of the current epoch, if epochs are trained in parts
        self.losses = []  # parts of (training loss, validation loss, {name: metric}) [epoch, member]
        self.compile_seconds = 0.0
        self.steady_seconds = 0.0
        self.training = np.arange(len(swarm))  # positions of the members that have not stopped
        self.set_aside = []  # (positions, their states) of those that have
        self.plan = choose(plan, swarm)
        if not (checkpoints or between or swarm._stopping):
            self.segment = epochs  # nothing happens between segments, and a call costs as much as many epochs
        self._cut()
        self.usual = self.program  # what trains where a kernel does not
        self.needs_kernel = self.plan.kernel is True
        self.plan = dataclasses.replace(self.plan, in_kernel=False, reason="")
        self._choose_kernel()
        # A resumed training may have other callbacks.
        compared = swarm.replace(_stopping=None) if stopping.is_by_callbacks(swarm) else swarm
        facts = checkpoints and identity.facts(compared, program, data, metrics)
        self.keeper = checkpoints and checkpoint.Keeper(checkpoints, facts)
        self.requested_block = self.plan.block  # a resumed training keeps its plan if the caller requests the same one
        try:
            if latest := self.keeper and self.keeper.latest():
                self._resume(*latest, is_given=isinstance(plan, Plan))
            else:
                self._place(self.start)
        except BaseException:
            self.release()
            raise

    @property
    def goes_on(self) -> bool:
        """Whether epochs and active members are left."""
        return self.done < self.epochs and len(self.training) > 0

    def losses_now(self) -> dict[str, float]:
        """Return the mean losses of the last epoch over the members that trained in it."""
        named = zip(("loss", "validation"), self.losses[-1] if self.losses else (), strict=False)  # not the metrics
        last = {name: loss[-1] for name, loss in named if loss is not None}
        return {name: np.nan if np.isnan(loss).all() else np.nanmean(loss) for name, loss in last.items()}

    def losses_so_far(self):
        """Return (training loss, validation loss or None, {name: metric}) so far, each [epoch, member]."""
        if self.losses[1:]:  # joined once, as callbacks ask after each segment
            self.losses = [_joined(self.losses)]
        return _joined(self.losses or [(np.zeros((0, len(self.start)), np.float32), None, {})])

    @property
    def is_between(self) -> bool:
        """Whether the training is inside a segment."""
        return self.goes_on and (self.steps_done > 0 or self.done % self.segment > 0)

    @property
    def progress(self) -> float:
        """The epochs done, with the fraction of the current one."""
        return round(self.done + self.steps_done / self.steps, 2) if self.steps_done else self.done

    def compile(self):
        """Compile the program in a thread, if there is anything to train; this object trains nothing afterwards."""
        try:
            if self.goes_on:
                try:
                    compile_in_thread(self.program, self.current, self.states[0], self.placed[0])
                except Exception as error:
                    self._fall_back(error)
                    compile_in_thread(self.program, self.current, self.states[0], self.placed[0])
        finally:
            self.release()

    def finish(self, shown: Callable[[], dict], *, progress: bool, unit: str = "epoch", units: float = 1) -> bool:
        """Train to the end or to Ctrl-C, and return whether Ctrl-C came.

        A progress bar counts each epoch as `units`, and shows the {name: number} that `shown` returns.
        """
        total, done = round(units * self.epochs), round(units * min(self.done, self.epochs))
        with noted() as interrupted, progress_bar(progress, total=total, initial=done, unit=unit) as bar:
            self.interrupted = interrupted
            self.say = bar.set_postfix_str
            while self.goes_on and not interrupted():
                try:
                    self.advance()
                except GivenUpError:
                    break
                bar.n = round(units * self.progress, 2)
                bar.update(0)
                bar.set_postfix({name: f"{number:.4g}" for name, number in shown().items()})
            return interrupted()

    def advance(self):
        """Train for about CALL_SECONDS, or for one epoch that is not split.

        Ctrl-C takes effect between two calls. At the end of a segment stopped members are set aside and a checkpoint is
        saved.
        """
        left = min(self.segment - self.done % self.segment, self.epochs - self.done)
        self._train(left)
        if self.between and not self.is_between:
            self.is_recorded = False  # a resumed training calls callbacks again that failed
            self.between(self)
        self.is_recorded = True
        if self.is_between:
            return
        self._set_aside()
        self._save()

    def close(self) -> None:
        """Stop the threads of this training."""

    def end(self):
        """Return all members' states in the original order, after a last checkpoint if the training was interrupted."""
        try:
            if self.keeper and self.goes_on and self.is_recorded:
                self._save(is_due=True)
        finally:
            self.release()
        return self.last()

    def release(self) -> None:
        """Release the folder of checkpoints for other trainings."""
        if self.keeper:
            self.keeper.close()

    def last(self) -> Any:
        """Return all members' states in the original order."""
        return self.everyone().replace(_underway=None)

    @property
    def holds_states(self) -> bool:
        """Whether the states are still in memory: a program that failed has consumed those that were donated to it."""
        arrays = [leaf for leaf in jax.tree.leaves(self.states) if isinstance(leaf, jax.Array)]
        return not any(leaf.is_deleted() for leaf in arrays)

    def everyone(self, part: Callable = lambda state: state) -> Any:
        """Return all members' states, or a `part` of each, in the original order; they may share memory with these."""
        now = gathered(*map(part, self.states), members=len(self.training))
        if not self.set_aside:
            return now
        apart = [(positions, part(state)) for positions, state in self.set_aside]
        positions, states = zip(*apart, (self.training, now), strict=True)
        return taken(jax.tree.map(_concatenated, *states), np.argsort(np.concatenate(positions)))

    def still_training(self) -> np.ndarray:
        """Return the positions of the members that have not stopped, int [member]."""
        if self.start._stopping is None:
            return self.training
        return self.training[self._active()]

    def stop(self, members: np.ndarray) -> None:
        """Stop these members, bool [member], of a swarm that can stop (see `stopping.prepared`)."""
        stay = ~members[self.training]
        of_rounds = [self.current.place(stay, round) for round in self._rounds()]
        for number, (state, stays) in enumerate(zip(self.states, of_rounds, strict=True)):
            active = state._stopping.active & stays
            self.states[number] = state.replace(_stopping=state._stopping.replace(active=active))

    def set(self, values: dict[str, Any]) -> None:
        """Set hyperparameters, each a number or [member], of the members that have not stopped."""
        checked = hyperparameters(with_hyperparameters(self.start, **values))  # [member], of all members
        wanted = {name: np.asarray(checked[name])[self.training] for name in values}
        for number, (before, round) in enumerate(zip(self.states, self._rounds(), strict=True)):
            after = with_hyperparameters(before, **self.current.place(wanted, round))
            changed = [(_of_names(state, values), state.schedule) for state in (after, before)]
            chosen = jax.vmap(stopping.choose)(before._stopping.active, *changed)
            own, schedule = self.current.place(chosen)
            self.states[number] = with_hyperparameters(before, **own).replace(schedule=schedule)
        self.ready = None  # a type may have changed, from whole numbers to floats

    def _place(self, state):
        """Put the states of the active members, and their data, on the devices of the plan."""
        self.current = self._shrunk(len(self.training))
        rounds = self._rounds()
        self.states = [self.current.place(state, round) for round in rounds]
        data, held_out = self.data
        self.placed = placed((data, None if self.is_scored_apart else held_out), self.current, rounds)
        if self.current.on_accelerator:  # the data stay there
            ((data, held_out_there),) = self.placed
            self.data = data, held_out if self.is_scored_apart else held_out_there
        self.ready = None

    def _cut(self):
        """Count the steps of an epoch, and split it into parts if it is long."""
        data = self.data[0]
        self.steps = self.program.steps(data.length)
        self.min_members = members_at_least(self.program, self.start, data)
        if is_long(self.program, self.start, data, self.plan):
            self.program = Part(**vars(self.program))
            self.start = self.program.begun(self.start, data.length)
        else:
            epochs = epochs_together(self.program, self.start, data, self.plan, min(self.segment, self.epochs))
            self.program = dataclasses.replace(self.program, together=epochs)

    def _choose_kernel(self):
        """Train in kernels if the plan allows it and it is possible; otherwise the plan keeps the reason."""
        if not self.needs_kernel and (self.plan.kernel is False or not self.plan.has_kernels):
            return
        data = self.data[0], None if self.is_scored_apart else self.data[1]
        try:
            self.program = in_kernel(self.program, self.start, data, self.plan, min(self.segment, self.epochs))
        except Refused as refused:
            if self.needs_kernel:
                raise
            self._go_without_kernel(str(refused))
        else:
            self.plan = dataclasses.replace(self.plan, in_kernel=True)

    def _go_without_kernel(self, reason):
        self.program = self.usual
        self.plan = dataclasses.replace(self.plan, in_kernel=False, reason=reason)

    def _fall_back(self, error):
        """Train without the kernel, which did not compile; raise this error if there is none, or it must be one."""
        is_kernels = isinstance(self.program, Kernel) and not isinstance(error, MemoryError)
        if not is_kernels or self.needs_kernel or not self.is_untrained:
            raise error
        reason = f"The kernel did not compile: {' '.join(str(error).split())[:300]}"
        remember_refusal(self.usual, self.start, self.data[0], self.plan, reason)
        self._go_without_kernel(reason)

    def _shrunk(self, members):
        """Return the plan for the `members` that are left."""
        return self.plan.shrunk(members, of=len(self.start), least=self.min_members)

    def _rounds(self):
        return self.current.rounds(len(self.training), of=len(self.start))

    def _active(self):
        """Return which of `self.training` have not stopped, bool [member]."""
        return np.concatenate([state._stopping.active for state in self.states])[: len(self.training)]

    def _state(self):
        """Return the states of `self.training`, without the copies that fill a block."""
        return gathered(*self.states, members=len(self.training))

    def _train(self, most):
        """Train for at most `most` epochs, by one call of the program for each round."""
        in_parts = isinstance(self.program, Part)
        program = self._compiled_program()
        left = self.steps - self.steps_done if in_parts else min(most, self.program.epochs)  # of the program now
        count = max(1, int(CALL_SECONDS / program.pace / len(self.states)))
        count = min(left, -(-count // self.program.together) * self.program.together)
        extent = {"epochs": count}
        if in_parts:
            extent = {"steps": count, "starts": self.steps_done == 0, "ends": count == left}
        recorded = self._call(count, extent)
        if recorded is None:
            return self._train(most)
        if in_parts and count < left:
            self.steps_done += count
            return
        self._record(recorded, 1 if in_parts else count)

    def _compiled_program(self):
        """Return the program, compiled for the placed states and data."""
        begin = time.perf_counter()
        if not self.ready:
            self.say("compiling, the first time for these shapes")
            self.ready = self._program()
            self.say("")
        self.compile_seconds += time.perf_counter() - begin
        return self.ready

    def _call(self, count, extent):
        """Call the program for each round and return its losses; None if memory was short and blocks were halved.

        count: epochs or steps; extent: the program's arguments that say how far to train.
        """
        program = self.ready
        begin = time.perf_counter()
        try:
            out = [program(*round, **extent) for round in zip(self.states, self.placed, strict=True)]
            jax.block_until_ready(out)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or not self.is_untrained or self.plan.block == 1:
                raise
            out = None
        if out is None:  # not before, as the error's traceback holds the states
            self._restart(self.plan.block // 2)
            return None
        self.is_recorded = False
        self.states, recorded = map(list, zip(*out, strict=True))
        del out  # which would keep the states alive
        seconds = time.perf_counter() - begin
        self.steady_seconds += seconds
        program.pace = seconds / count / len(self.states)
        return recorded

    def _record(self, recorded, epochs):
        """Append the losses and metrics of epochs that have ended."""
        self.steps_done = 0
        losses = jax.tree.map(partial(_of_first_epochs, epochs), *recorded)
        if self.is_scored_apart:
            losses = (losses[0], *self._scores())
            self._update(*losses[1:])
        self.losses.append(tuple(jax.tree.map(self._of_everyone, losses)))
        self.done += epochs

    def _program(self):
        """Return the program, compiled for a block that fits in memory."""
        compile = partial(compiled, self.program, self.current, self.states[0], self.placed[0])
        try:
            program, block = fitting(compile, self.current, len(self.states))
        except Exception as error:
            self._fall_back(error)
            return self._program()
        if block == self.current.block:
            return program
        if not self.is_untrained:
            blocks = f"blocks of {self.current.block} members, which this training has had"
            raise MemoryError(f"Out of memory with {blocks}: go on where more is free.")
        del compile  # which holds the states
        self._restart(block)
        return self._program()

    @property
    def is_untrained(self):
        """Whether nothing has been trained yet, so that the plan may still change and nothing can be lost."""
        return not self.done and not self.steps_done

    def _restart(self, block):
        """Restart from the initial states with smaller blocks."""
        before = self.plan
        self.plan = dataclasses.replace(before, block=block).balanced(len(self.start))
        say_once(f"Out of memory with blocks of {before.block} members; going on with {self.plan.block}.")
        self.states = self.placed = None  # whose memory the new ones may need
        self._place(self.start)

    def _of_everyone(self, loss):
        """Return losses [epoch, member, ...] of all members, NaN for those set aside."""
        own = np.swapaxes(loss[: len(self.training)], 0, 1)
        if len(self.training) == len(self.start):
            return own
        every = np.full((len(own), len(self.start), *own.shape[2:]), np.nan, own.dtype)
        every[:, self.training] = own
        return every

    def _scores(self):
        """Return (validation loss, {name: metric}) [member, 1], NaN for stopped members; metrics as `Evaluate` does."""
        evaluate = Evaluate(self.program.loss_fn, self.program.metrics, predictions=bool(self.metrics))
        evaluation = evaluated(evaluate, self._state(), self.data[1], self.current)
        loss, values, predictions = jax.tree.map(np.array, evaluation)
        values |= {name: np.full(len(loss), np.nan) for name in self.metrics}
        active = np.ones(len(loss), bool) if self.start._stopping is None else self._active()
        metrics = {name: on_host(name, metric) for name, metric in self.metrics.items()}
        held_out = self.data[1]
        counts = np.broadcast_to(held_out.length if held_out.count is None else held_out.count, len(loss))
        for position in np.flatnonzero(active & np.isfinite(loss)) if metrics else ():
            y = targets(held_out, position)
            prediction = jax.tree.map(itemgetter((position, slice(counts[position]))), predictions)
            for name, metric in metrics.items():
                values[name][position] = metric(prediction, y)
        return jax.tree.map(lambda value: np.where(active, value, np.nan)[:, None], (loss, values))

    def _update(self, loss, metrics):
        """Update schedules and patience by the scores [member, 1] of the last epoch."""
        if self.start._stopping is None and not schedules.needs_validation(self.start):
            return
        scores = resized({stopping.LOSS: loss} | metrics, self.current.padded(len(self.training)))
        for number, state in enumerate(self.states):
            members = slice(number * len(state), (number + 1) * len(state))
            of_round = jax.tree.map(itemgetter((members, -1)), scores)
            self.states[number] = jax.vmap(_after_epoch)(state, of_round)

    def _set_aside(self):
        """Set stopped members aside, if that halves the work or ends it."""
        if self.start._stopping is None:
            return
        active = self._active()
        goes_on, stopped = np.flatnonzero(active), np.flatnonzero(~active)
        after = self._shrunk(len(goes_on))
        halves = 2 * after.padded(len(goes_on)) <= self.current.padded(len(self.training))
        if halves or after.block < self.current.block:
            state = self._state()
            self.set_aside.append((self.training[stopped], taken(state, stopped)))
            self.training = self.training[goes_on]
            self.data = of_members(self.data, goes_on)
            self._place(taken(state, goes_on))

    def _save(self, *, is_due=False):
        """Save a checkpoint, if it is due and the last one is older."""
        number = self._checkpoint_number()
        if not self.keeper or number == self.keeper.manager.latest_step():  # resumed and interrupted again at once
            return
        if not is_due and not self.keeper.is_due():
            return
        losses = identity.leaves_by_name(self.losses and self.losses_so_far())
        arrays = {f"losses{path}": part for path, part in losses.items()}
        progress = {"done": self.done, "place": self.steps_done, "segment": self.segment}
        progress |= {"asked": self.requested_block, "block": self.plan.block, "devices": len(self.plan.devices)}
        progress |= {"kernel": isinstance(self.program, Kernel)}
        progress |= {"seconds": [self.compile_seconds, self.steady_seconds]}
        self.keeper.save(number, arrays | identity.leaves_by_name(self.everyone()), progress)

    def _checkpoint_number(self):
        """Return the number of a checkpoint made now: Orbax requires it to grow."""
        return self.done * self.steps + self.steps_done if isinstance(self.program, Part) else self.done

    def _resume(self, arrays, progress, *, is_given):
        """Resume from a checkpoint, with its segments, and with its plan unless the caller gave another one."""
        if (progress["done"], progress["place"]) > (self.epochs, 0):
            past = f"The training in {self.keeper.there} is past epoch {progress['done']}, {self.epochs} were asked for"
            raise ValueError(f"{past}: ask for more epochs, or name another folder.")
        # Compare the requested block: the one in use may be smaller for lack of memory.
        if progress["asked"] == self.plan.block or not is_given:
            devices = self.plan.devices[: progress["devices"]]
            self.plan = dataclasses.replace(self.plan, devices=devices, block=progress["block"])
        if isinstance(self.program, Kernel) and not (progress.get("kernel") or self.needs_kernel):
            self._go_without_kernel("The training began without a kernel.")
        self.segment = progress["segment"]
        self.done = progress["done"]
        self.steps_done = progress["place"]
        self.compile_seconds, self.steady_seconds = progress["seconds"]
        if self.done:
            metrics = {name: arrays[f"losses[2][{name!r}]"] for name in [*self.program.metric_names, *self.metrics]}
            self.losses = [(arrays["losses[0]"], arrays.get("losses[1]"), metrics)]
        active = arrays.setdefault("._stopping.active", np.ones(len(self.start), bool))
        if self.start._stopping is None and not np.all(active):
            raise ValueError("Callbacks had stopped members of this training: go on with callbacks, or begin anew.")
        self._place(checkpoint.named_leaves(arrays, self.start))
        self._set_aside()


def _of_names(state, names):
    """Return the hyperparameters of these names, {name: [member]}."""
    return {name: hyperparameters(state)[name] for name in names}


def _after_epoch(state, scores):
    """Return one member after an epoch with these scores, {name: value}."""
    return stopping.after_epoch(state, schedules.end_epoch(state, scores[stopping.LOSS]), scores)


def _joined(losses):
    return jax.tree.map(lambda *parts: np.concatenate(parts), *losses)


def _of_first_epochs(epochs, *rounds):
    """Join losses [member, epoch, ...] of several rounds, without the room for further epochs that programs return."""
    shards = [sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0) for leaf in rounds]
    return np.concatenate([np.asarray(shard.data)[:, :epochs] for shard in itertools.chain(*shards)])


def _concatenated(*parts):
    return (np if all(map(is_on_host, parts)) else jnp).concatenate(parts)
