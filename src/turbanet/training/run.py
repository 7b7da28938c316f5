"""A training under way, segment by segment: its plan, its memory, its time, its checkpoints, who still trains."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from turbanet.training import checkpoint, schedules, stopping
from turbanet.training.data import of_members, placed, targets
from turbanet.training.interrupt import GivenUpError, noted
from turbanet.training.member import Swarm
from turbanet.training.memory import fitting, is_out_of_memory
from turbanet.training.metrics import on_host
from turbanet.training.parts import Part, epochs_together, is_long, members_at_least
from turbanet.training.plan import Plan, choose, gathered, is_on_host, resized, say_once, taken
from turbanet.training.program import Evaluate, Train, begun, compiled
from turbanet.training.schedules import hyperparameters, with_hyperparameters
from turbanet.training.scores import evaluated, is_by_count

CALL_SECONDS = 2  # of one call of a program, about, where an epoch takes less


class Training:
    """A training under way: where it stands, what it cost, under which plan, who still trains.

    Parameters
    ----------
    program : what a member computes in an epoch
    swarm : the members as they begin
    data : (training data, held-out data or None)
    epochs : of the whole training
    segment : epochs between two checkpoints, and between two looks at who has stopped
    plan : as `fit` takes it
    metrics : {name: metric(prediction, y)} of each member's own held-out rows, called on the host
    checkpoints : a folder or `Checkpoints`, from which the training goes on if it was begun there; None: none are kept
    between : between(this) is called after each segment; None: nothing is
    """

    known: Any = None  # data that checkpoints know it by, where these are others than those in memory
    interrupted: Callable[[], bool] = staticmethod(bool)  # whether Ctrl-C came
    is_noted = True  # whether what was seen of all that the states have trained is noted
    least = 1  # members that keep an accelerator busy, where that is known: blocks get no smaller

    def __init__(self, program: Train, swarm: Swarm, data, *, epochs, segment, plan, metrics, checkpoints, between):
        self.is_by_count = is_by_count(program.loss_fn, data[1])  # the held-out loss, which is then computed apart
        self.program = dataclasses.replace(program, epochs=1) if self.is_by_count else program
        self.start = swarm
        self.data = data
        self.epochs = epochs
        self.segment = segment
        self.metrics = metrics
        self.between = between
        self.done = 0
        self.place = 0  # steps of the epoch under way that are done, where an epoch is trained in parts
        self.losses = []  # of each segment: (training loss, validation loss, {name: metric}) [epoch, member]
        self.compile_seconds = 0.0
        self.steady_seconds = 0.0
        self.training = np.arange(len(swarm))  # positions of the members that have not stopped
        self.set_aside = []  # (positions, their states) of those that have
        self.plan = choose(plan, swarm)
        if self.plan.on_accelerator and not (checkpoints or between or swarm.stopping):
            self.segment = epochs  # nothing looks at what one has trained, and a call costs as much as many epochs
        self._cut()
        known = swarm.replace(stopping=None) if stopping.is_by_callbacks(swarm) else swarm  # they may come and go
        facts = checkpoints and checkpoint.facts(known, program, self.known or data, metrics)
        self.keeper = checkpoints and checkpoint.Keeper(checkpoints, facts)
        kept = self.keeper and self.keeper.latest()
        self.asked = self.plan.block  # a resumed training keeps its plan where the caller's asks for the same again
        if kept:
            self._resume(*kept, given=isinstance(plan, Plan))
        else:
            self._place(self.start)

    @property
    def goes_on(self) -> bool:
        """Whether there are epochs left, and members to train."""
        return self.done < self.epochs and len(self.training) > 0

    def losses_now(self) -> dict[str, float]:
        """The mean losses of the last epoch over the members that trained in it."""
        named = zip(("loss", "validation"), self.losses[-1] if self.losses else (), strict=False)  # not the metrics
        last = {name: loss[-1] for name, loss in named if loss is not None}
        return {name: np.nan if np.isnan(loss).all() else np.nanmean(loss) for name, loss in last.items()}

    def seen(self):
        """(training loss, validation loss, {name: metric}) [epoch, member] so far, None for a loss not asked for."""
        none = np.zeros((0, len(self.start)), np.float32)
        return jax.tree.map(lambda *parts: np.concatenate(parts), *self.losses or [(none, None, {})])

    @property
    def is_between(self) -> bool:
        """Whether a segment is under way."""
        return self.goes_on and (self.place > 0 or self.done % self.segment > 0)

    @property
    def progress(self) -> float:
        """The epochs done, the one under way by its part."""
        return round(self.done + self.place / self.steps, 2) if self.place else self.done

    def compile(self):
        """Have the program compiled in a thread, if there is anything to train; no more comes of this object."""
        if self.goes_on:
            begun(self.program, self.current, self.states[0], self.placed[0])
        if self.keeper:
            self.keeper.close()

    def finish(self, shown: Callable[[], dict], *, progress: bool, unit: str = "epoch", units: float = 1) -> bool:
        """Train to the end, or to Ctrl-C: whether that came.

        A bar shows what is done, each epoch as so many `units`, and beside it what `shown` returns, {name: number}.
        """
        hidden = {} if progress else {"disable": True}
        total, done = round(units * self.epochs), round(units * min(self.done, self.epochs))
        with noted() as interrupted, tqdm(total=total, initial=done, unit=unit, **hidden) as bar:
            self.interrupted = interrupted
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
        """Train on for about CALL_SECONDS, or an epoch that is not cut: between two calls Ctrl-C is heeded.

        At the end of a segment stopped members are set aside and a checkpoint is kept.
        """
        left = min(self.segment - self.done % self.segment, self.epochs - self.done)
        self._train(min(left, self.program.epochs))
        self.is_noted = True
        if self.is_between:
            return
        if self.between:
            self.between(self)
        self._set_aside()
        self._keep()

    def close(self) -> None:
        """Leave nothing running behind."""

    def end(self):
        """All members' states, in the order they came in, and no more checkpoints than one of where they are."""
        try:
            if self.keeper and self.goes_on and self.is_noted:  # interrupted
                self._keep(anyway=True)
        finally:
            if self.keeper:
                self.keeper.close()
        return self.last()

    def last(self) -> Any:
        """All members' states, in the order they came in."""
        return self.everyone().replace(underway=None)

    @property
    def holds_states(self) -> bool:
        """Whether the states are there: a program that failed has taken those that it was given."""
        arrays = [leaf for leaf in jax.tree.leaves(self.states) if isinstance(leaf, jax.Array)]
        return not any(leaf.is_deleted() for leaf in arrays)

    def everyone(self, part: Callable = lambda state: state) -> Any:
        """All members' states, or a `part` of them, in the order they came in; in the training's own memory."""
        now = gathered(*map(part, self.states), members=len(self.training))
        if not self.set_aside:
            return now
        apart = [(positions, part(state)) for positions, state in self.set_aside]
        positions, states = zip(*apart, (self.training, now), strict=True)
        return taken(jax.tree.map(_concatenated, *states), np.argsort(np.concatenate(positions)))

    def still_training(self) -> np.ndarray:
        """int, the positions of the members that have not stopped."""
        if self.start.stopping is None:
            return self.training
        return self.training[self._active()]

    def stop(self, members: np.ndarray) -> None:
        """End the training of these members, bool [member], where it can (see `stopping.that_can_stop`)."""
        stay = ~members[self.training]
        each = [self.current.place(stay, round) for round in self._rounds()]
        for place, (state, stays) in enumerate(zip(self.states, each, strict=True)):
            active = state.stopping.active & stays
            self.states[place] = state.replace(stopping=state.stopping.replace(active=active))

    def set(self, values: dict[str, Any]) -> None:
        """Go on with these hyperparameters, each a number or [member], of the members that have not stopped."""
        asked = hyperparameters(with_hyperparameters(self.start, **values))  # [member], checked for all of them
        before = self._state()
        after = with_hyperparameters(before, **{name: np.asarray(asked[name])[self.training] for name in values})
        changed = [(state.opt_state, state.schedule) for state in (after, before)]
        opt_state, schedule = jax.vmap(stopping.choose)(self._active(), *changed)
        self._place(before.replace(opt_state=opt_state, schedule=schedule))

    def _place(self, state):
        """Put the states of those who still train, and their data, where the plan says."""
        self.current = self._shrunk(len(self.training))
        rounds = self._rounds()
        self.states = [self.current.place(state, round) for round in rounds]
        data, held_out = self.data
        self.placed = placed((data, None if self.is_by_count else held_out), self.current, rounds)
        if self.current.on_accelerator:  # from here on the data, too, stay there
            ((data, there),) = self.placed
            self.data = data, held_out if self.is_by_count else there
        self.ready = None

    def _cut(self):
        """See how many steps an epoch has, and cut it into parts if it is long."""
        data = self.data[0]
        self.steps = self.program.steps(data.length)
        self.least = members_at_least(self.program, self.start, data)
        if is_long(self.program, self.start, data, self.plan):
            self.program = Part(**vars(self.program))
            self.start = self.program.begun(self.start, data.length)
        else:
            epochs = epochs_together(self.program, self.start, data, self.plan, min(self.segment, self.epochs))
            self.program = dataclasses.replace(self.program, together=epochs)

    def _shrunk(self, members):
        """The plan for so many members that are left."""
        return self.plan.shrunk(members, of=len(self.start), least=self.least)

    def _rounds(self):
        return self.current.rounds(len(self.training), of=len(self.start))

    def _active(self):
        """bool, which of those in `self.training` have not stopped."""
        return np.concatenate([state.stopping.active for state in self.states])[: len(self.training)]

    def _state(self):
        """The states of those who still train, without those that only fill a block."""
        return gathered(*self.states, members=len(self.training))

    def _train(self, most):
        """A call of the program for each round, for that many epochs at the most."""
        in_parts = isinstance(self.program, Part)
        program = self._made_ready()
        left = self.steps - self.place if in_parts else most
        many = max(1, int(CALL_SECONDS / program.pace / len(self.states)))
        many = min(left, -(-many // self.program.together) * self.program.together)
        said = {"steps": many, "starts": self.place == 0, "ends": many == left} if in_parts else {"epochs": many}
        seen = self._call(many, said)
        if seen is None:
            return self._train(most)
        if in_parts and many < left:
            self.place += many
            return
        self._saw(seen, 1 if in_parts else many)

    def _made_ready(self):
        """The program, compiled for where the states and the data are."""
        begin = time.perf_counter()
        self.ready = self.ready or self._program()
        self.compile_seconds += time.perf_counter() - begin
        return self.ready

    def _call(self, many, said):
        """Call the program for each round: what was seen, or None where memory was short and blocks are halved."""
        program = self.ready
        begin = time.perf_counter()
        try:
            rounds = zip(self.states, self.placed, strict=True)
            out = jax.block_until_ready([program(*round, **said) for round in rounds])
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or not self._can_begin_anew or self.plan.block == 1:
                raise
            self._begin_anew(self.plan.block // 2)
            return None
        self.is_noted = False
        self.states, seen = map(list, zip(*out, strict=True))
        del out  # the states, and what was seen, twice
        seconds = time.perf_counter() - begin
        self.steady_seconds += seconds
        program.pace = seconds / many / len(self.states)
        return seen

    def _saw(self, seen, epochs):
        """Note what was seen of epochs that have ended."""
        self.place = 0
        *losses, predictions = jax.tree.map(lambda leaf: np.asarray(leaf)[:, :epochs], gathered(*seen))
        if self.is_by_count:
            *losses[1:], predictions = self._by_count()
        losses[2] |= self._on_host(predictions, losses[1])
        self._tell(losses)
        self.losses.append(tuple(jax.tree.map(self._of_everyone, losses)))
        self.done += epochs

    def _program(self):
        """The program, compiled for a block whose memory is free."""
        compile = partial(compiled, self.program, self.current, self.states[0], self.placed[0])
        program, block = fitting(compile, self.current, len(self.states))
        if block == self.current.block:
            return program
        if not self._can_begin_anew:
            blocks = f"blocks of {self.current.block} members, which this training has had"
            raise MemoryError(f"Out of memory with {blocks}: go on where more is free.")
        self._begin_anew(block)
        return self._program()

    @property
    def _can_begin_anew(self):
        """Whether nothing has been trained under this plan, so that another one takes nothing back."""
        return not self.done and not self.place

    def _begin_anew(self, block):
        """Begin with smaller blocks."""
        before = self.plan
        self.plan = dataclasses.replace(before, block=block).balanced(len(self.start))
        say_once(f"Out of memory with blocks of {before.block} members; going on with {self.plan.block}.")
        self._place(self.start)

    def _of_everyone(self, loss):
        """Losses [epoch, member, ...] of those who train, NaN for the others."""
        here = np.swapaxes(loss[: len(self.training)], 0, 1)
        if len(self.training) == len(self.start):
            return here
        every = np.full((len(here), len(self.start), *here.shape[2:]), np.nan, here.dtype)
        every[:, self.training] = here
        return every

    def _by_count(self):
        """(validation loss, {name: metric}, predictions) [member, 1, ...] of those in training, NaN for the stopped."""
        evaluate = Evaluate(self.program.loss_fn, self.program.metrics, self.program.predictions)
        found = evaluated(evaluate, self._state(), self.data[1], self.current)
        *scores, predictions = jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], found)
        if self.start.stopping is not None:
            active = self._active()[:, None]
            scores = jax.tree.map(lambda value: np.where(active, value, np.nan), scores)
        return *scores, predictions

    def _tell(self, losses):
        """Go on by what the host has computed of an epoch, where schedules or patience follow it."""
        _, loss, found = losses
        monitor = self.start.stopping and self.start.stopping.monitor
        value = ({stopping.LOSS: loss} | found).get(monitor) if self.is_by_count or monitor in self.metrics else None
        loss = loss if self.is_by_count and schedules.needs_validation(self.start) else None
        if value is None and loss is None:
            return
        of_rounds = resized((loss, value), self.current.padded(len(self.training)))
        for place, state in enumerate(self.states):
            here = slice(place * len(state), (place + 1) * len(state))
            last = [None if each is None else each[here, -1] for each in of_rounds]
            self.states[place] = jax.vmap(_told)(state, *last)

    def _on_host(self, predictions, loss):
        """{name: metric} of predictions [member, epoch, row, ...]; NaN where there is no validation loss."""
        if not self.metrics:
            return {}
        metrics = {name: on_host(name, metric) for name, metric in self.metrics.items()}
        found = {name: np.full(loss.shape, np.nan) for name in self.metrics}
        for place in range(len(self.training)):
            y = targets(self.data[1], place)
            rows = slice(len(jax.tree.leaves(y)[0]))
            for epoch in np.flatnonzero(~np.isnan(loss[place])):
                of_member = jax.tree.map(itemgetter((place, epoch, rows)), predictions)
                for name, metric in metrics.items():
                    found[name][place, epoch] = metric(of_member, y)
        return found

    def _set_aside(self):
        """Go on without the members that have stopped, where that halves the work or ends it."""
        if self.start.stopping is None:
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

    def _keep(self, *, anyway=False):
        """A checkpoint of where they are, if any are kept, this one is due, and the last one is not of there."""
        number = self._number()
        if not self.keeper or number == self.keeper.manager.latest_step():  # resumed and interrupted again at once
            return
        if not anyway and not self.keeper.is_due():
            return
        losses = checkpoint.leaves_by_name(self.losses and self.seen())
        arrays = {f"losses{path}": part for path, part in losses.items()}
        progress = {"done": self.done, "place": self.place, "segment": self.segment, "asked": self.asked}
        progress |= {"block": self.plan.block, "devices": len(self.plan.devices)}
        progress |= {"seconds": [self.compile_seconds, self.steady_seconds], **self._elsewhere()}
        self.keeper.save(number, arrays | checkpoint.leaves_by_name(self.everyone()), progress)

    def _number(self):
        """What a checkpoint of now is numbered by: Orbax wants it to grow."""
        return self.done * self.steps + self.place if isinstance(self.program, Part) else self.done

    def _elsewhere(self):
        """What else a checkpoint tells, {name: what JSON can hold}."""
        return {}

    def _resume(self, arrays, progress, *, given):
        """Go on from what `_keep` kept, under its plan and segments unless the caller gave another plan."""
        if (progress["done"], progress["place"]) > (self.epochs, 0):
            came = f"The training in {self.keeper.there} is past epoch {progress['done']}, {self.epochs} were asked for"
            raise ValueError(f"{came}: ask for more epochs, or name another folder.")
        if progress["asked"] == self.plan.block or not given:  # less memory than it asks for may have made it smaller
            devices = self.plan.devices[: progress["devices"]]
            self.plan = dataclasses.replace(self.plan, devices=devices, block=progress["block"])
        self.segment = progress["segment"]
        self.done = progress["done"]
        self.place = progress["place"]
        self.compile_seconds, self.steady_seconds = progress["seconds"]
        if self.done:
            metrics = {name: arrays[f"losses[2][{name!r}]"] for name in [*self.program.seen, *self.metrics]}
            self.losses = [(arrays["losses[0]"], arrays.get("losses[1]"), metrics)]
        active = arrays.setdefault(".stopping.active", np.ones(len(self.start), bool))
        if self.start.stopping is None and not np.all(active):
            raise ValueError("Callbacks had stopped members of this training: go on with callbacks, or begin anew.")
        self._place(checkpoint.named_leaves(arrays, self.start))
        self._set_aside()


def _told(state, loss, value):
    """One member after an epoch, told its validation `loss` and the `value` of what is monitored, None for neither."""
    after = schedules.end_epoch(state, loss)
    if state.stopping is None:
        return after
    if value is not None:
        after = stopping.judged(after, value.astype(state.stopping.best.dtype))
    return stopping.choose(state.stopping.active, after, state)


def _concatenated(*parts):
    return (np if all(map(is_on_host, parts)) else jnp).concatenate(parts)
