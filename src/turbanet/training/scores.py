"""Scores of members on rows of their own: each on its rows as one batch, however many the others have."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core.gather import gathered, home, taken
from turbanet.core.member import takes
from turbanet.core.memory import fitting
from turbanet.core.optimizers import has_averages
from turbanet.core.plan import Plan, choose, say_once
from turbanet.core.state import State
from turbanet.data.examples import Data, of_members, placed
from turbanet.training.compilation import compiled
from turbanet.training.program import Evaluate

MANY_COUNTS = 16  # numbers of rows, above which a message recommends a loss that takes mask=


def apply(program: Any, swarm: State, data: Any, plan: Any) -> Any:
    """Run `program` on every member: -> its result [member, ...], on the swarm's device."""
    plan = choose(plan, swarm)
    rounds = plan.rounds(len(swarm))
    states = [plan.place(swarm, round) for round in rounds]
    arguments = list(zip(states, placed((data,), plan, rounds), strict=True))
    run, block = fitting(partial(compiled, program, plan, *arguments[0]), plan, len(rounds))
    if block < plan.block:
        return apply(program, swarm, data, dataclasses.replace(plan, block=block).balanced(len(swarm)))
    out = gathered(*(run(*each) for each in arguments), members=len(swarm))
    return jax.device_put(out, home(swarm.step))


def is_by_count(loss_fn: Callable, data: Data | None) -> bool:
    """Whether members have different numbers of rows and the loss takes no mask to tell padding by."""
    return data is not None and data.ragged and not takes(loss_fn, "mask")


def evaluated(evaluate: Evaluate, swarm: State, data: Data, plan: Plan | None) -> Any:
    """Run `evaluate` on every member: -> its result [member, ...], with predictions padded with zeros.

    Where a loss takes no mask, members with equal numbers of rows are scored together, by a program for each number.
    """
    if not is_by_count(evaluate.loss_fn, data):
        return apply(evaluate, swarm, data, plan)
    plan = choose(plan, swarm)
    swarm = swarm.replace(schedule=None, _stopping=None, _underway=None)  # scores read none of these, nor moments
    swarm = swarm if has_averages(swarm.opt_state) else swarm.replace(opt_state=())
    counts = np.asarray(data.count)
    groups = [np.flatnonzero(counts == count) for count in np.unique(counts)]
    if len(groups) > MANY_COUNTS:
        problem = f"A loss without mask= is scored by a program for each of {len(groups)} numbers of rows"
        say_once(f"{problem}; one that takes mask=, bool [batch], by one for all: see turbanet.mean_over_rows.")
    found = []
    for positions in groups:
        count = int(counts[positions[0]])
        (own,) = of_members((data,), positions)
        own = own.replace(rows=own.rows[:, :count], length=count, ragged=False)
        some = taken(swarm, positions)
        loss, metrics, predictions = apply(evaluate, some, own, plan.balanced(len(positions)))
        filled = jax.tree.map(partial(_filled, length=data.length), predictions)
        found.append((loss, metrics, filled))
    return taken(jax.tree.map(lambda *parts: jnp.concatenate(parts), *found), np.argsort(np.concatenate(groups)))


def _filled(leaf, length):
    """Pad [member, row, ...] with rows of zeros to `length` rows."""
    return jnp.pad(leaf, [(0, 0), (0, length - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])
