"""Genealogy: the fitness and the parents of each member in each generation."""

import dataclasses
from typing import Any

import jax
import numpy as np

from turbanet.core import extras
from turbanet.core.tables import Shown, count, spread

NOBODY = -1  # id of a parent that does not exist


@dataclasses.dataclass(frozen=True, repr=False)
class EvolutionHistory(Shown):
    """Fitness, parents and hyperparameters of each member in each generation of `evolve` or `population_based`.

    fitness : [generation, member], higher is better, NaN for a member without one
    member : int [generation, member], the members' ids
    parents : int [generation, member, 2], ids in the previous generation of the members that the weights come from; a
        member that continued unchanged is its own first parent. NOBODY (-1): there is no such parent
    values : {name: [generation, member]}, the hyperparameters that each member trained with; None where there are none
    seconds : [generation], of selection and training, compilation included
    state : final state of a strategy; None without one
    fingerprint : of the last generation's ids, seeds and weights; a later call checks that its swarm has the same
    """

    fitness: np.ndarray
    member: np.ndarray
    parents: np.ndarray
    values: dict[str, np.ndarray] | None
    seconds: np.ndarray
    state: Any = None
    fingerprint: str = ""

    def _shown(self):
        generations, members = self.fitness.shape
        rows = [["median (range) of the members", "first generation", "last generation"]]
        for name, values in {"fitness": self.fitness, **(self.values or {})}.items():
            rows.append([name, spread(values[0]), spread(values[-1])])
        cost = f"{self.seconds.sum():.3g} s"
        return f"EvolutionHistory: {count(members, 'member')}, {count(generations, 'generation')}, {cost}", rows

    @property
    def best(self) -> int:
        """Id of the fittest member of the last generation."""
        return int(self.member[-1, np.nanargmax(self.fitness[-1])])

    def frame(self) -> Any:
        """Return a tidy pandas table: generation, member, parent, other_parent (-1: none), fitness and the values."""
        pd = extras.pandas()

        generations, members = self.fitness.shape
        columns = {"generation": np.repeat(np.arange(generations), members), "member": self.member.ravel()}
        columns |= {"parent": self.parents[..., 0].ravel(), "other_parent": self.parents[..., 1].ravel()}
        values = {name: value.ravel() for name, value in (self.values or {}).items()}
        return pd.DataFrame(columns | {"fitness": self.fitness.ravel()} | values)

    def lineage(self, member: int | None = None) -> Any:
        """Return the rows of `frame` of a member of the last generation and its ancestors, by first parents.

        member : its id; None: the fittest member's. Raises KeyError for an id that is not in the last generation.
        """
        member = self.best if member is None else member
        if member not in self.member[-1]:
            raise KeyError(f"No member {member} in the last generation; its ids are {self.member[-1].tolist()}.")
        members = self.member.shape[1]
        rows = []
        for generation in range(len(self.member) - 1, -1, -1):
            if member == NOBODY:
                break
            position = int(np.flatnonzero(self.member[generation] == member)[0])
            rows.append(generation * members + position)
            member = self.parents[generation, position, 0]
        return self.frame().iloc[rows[::-1]].reset_index(drop=True)


def joined(histories: list[EvolutionHistory], fingerprint: str) -> EvolutionHistory:
    """Concatenate the histories of consecutive generations; `fingerprint`: of the last generation."""
    names = "fitness", "member", "parents", "values", "seconds"
    parts = [{name: getattr(one, name) for name in names} for one in histories]
    arrays = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return dataclasses.replace(histories[-1], fingerprint=fingerprint, **arrays)
