"""What members score on rows of their own, each on its rows as one batch, however many others have."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from turbanet.training.data import Data, of_members, placed
from turbanet.training.member import Swarm, takes
from turbanet.training.plan import Plan, choose, gathered, home, say_once
from turbanet.training.program import Evaluate, compiled

MOST_COUNTS = 16  # of rows, from which on a sentence says how one program does


def apply(program: Any, swarm: Swarm, data: Any, plan: Plan | None) -> Any:
    """What `program` returns of every member, [member, ...], where the swarm is."""
    plan = choose(plan, swarm)
    rounds = plan.rounds(len(swarm))
    states = [plan.place(swarm, round) for round in rounds]
    orders = list(zip(states, placed((data,), plan, rounds), strict=True))
    run = compiled(program, plan, *orders[0])
    out = gathered(*(run(*order) for order in orders), members=len(swarm))
    return jax.device_put(out, home(swarm.step))


def is_by_count(loss_fn: Callable, data: Data | None) -> bool:
    """Whether members have different numbers of rows under a loss that cannot be told which rows are padding."""
    return data is not None and data.ragged and not takes(loss_fn, "mask")


class ByCount:
    """What `evaluate` returns of members with different numbers of rows: those of one number are a program.

    evaluate, data, plan : of all members
    """

    def __init__(self, evaluate: Evaluate, data: Data, plan: Plan):
        self.evaluate = evaluate
        self.length = data.length
        counts = np.asarray(data.count)
        self.groups = []
        for count in sorted(set(counts.tolist())):
            positions = np.flatnonzero(counts == count)
            (own,) = of_members((data,), positions)
            own = own.replace(rows=own.rows[:, :count], length=count, ragged=False)
            its_plan = plan.balanced(len(positions))
            rounds = its_plan.rounds(len(positions))
            self.groups.append((positions, its_plan, rounds, placed((own,), its_plan, rounds)))
        if len(self.groups) > MOST_COUNTS:
            what = f"A loss without mask= is scored by a program for each of {len(self.groups)} numbers of rows"
            say_once(f"{what}; one that takes mask=, bool [batch], by one for all: see turbanet.mean_over_rows.")

    def __call__(self, swarm: Swarm) -> Any:
        """(loss, {name: metric}, predictions) [member, ...], of NumPy; predictions are filled up with zeros."""
        swarm = swarm.replace(opt_state=(), schedule=None, stopping=None, underway=None)  # of which no score reads
        each = [self._scored(swarm, *group) for group in self.groups]
        order = np.argsort(np.concatenate([positions for positions, *_ in self.groups]))
        return jax.tree.map(lambda *parts: np.concatenate(parts)[order], *each)

    def _scored(self, swarm, positions, plan, rounds, data):
        some = jax.tree.map(lambda leaf: leaf[positions], swarm)
        states = [plan.place(some, round) for round in rounds]
        run = compiled(self.evaluate, plan, states[0], data[0])
        out = gathered(*map(run, states, data), members=len(positions))
        loss, found, predictions = jax.tree.map(np.asarray, out)

        def filled(leaf):
            return np.pad(leaf, [(0, 0), (0, self.length - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])

        return loss, found, jax.tree.map(filled, predictions)
