"""Genealogy: what a population was worth in each generation, and who descends from whom."""

import dataclasses
from typing import Any

import numpy as np

NOBODY = -1  # in the place of a parent


@dataclasses.dataclass(frozen=True)
class EvolutionHistory:
    """What `evolve` or `population_based` saw of each member in each generation.

    fitness : [generation, member], the higher the better, NaN where a member had none
    member : int [generation, member], the members' ids
    parents : int [generation, member, 2], the ids in the generation before of whose weights they are; a member that
        went on as it was is its own first parent. NOBODY (-1): there is no such parent
    values : {name: [generation, member]}, the hyperparameters that each trained with; None where there are none
    seconds : [generation], of selection and training, compilation included
    state : of a strategy that evolved them; None without one
    fingerprint : of the last generation's names and weights, by which it is known again
    """

    fitness: np.ndarray
    member: np.ndarray
    parents: np.ndarray
    values: dict[str, np.ndarray] | None
    seconds: np.ndarray
    state: Any = None
    fingerprint: str = ""

    @classmethod
    def of(cls, fitness: Any, member: Any, parents: Any, values: Any, seconds: float, state: Any) -> "EvolutionHistory":
        """One generation's: arrays [member, ...]."""
        values = None if values is None else {name: np.asarray(value)[None] for name, value in values.items()}
        return cls(fitness[None], member[None], parents[None], values, np.array([seconds]), state)

    @property
    def best(self) -> int:
        """The id of the last generation's fittest member."""
        return int(self.member[-1, np.nanargmax(self.fitness[-1])])

    def frame(self) -> Any:
        """A tidy pandas table: generation, member, parent and other_parent (-1: nobody), fitness, the values."""
        import pandas as pd

        generations, members = self.fitness.shape
        columns = {"generation": np.repeat(np.arange(generations), members), "member": self.member.ravel()}
        columns |= {"parent": self.parents[..., 0].ravel(), "other_parent": self.parents[..., 1].ravel()}
        values = {name: value.ravel() for name, value in (self.values or {}).items()}
        return pd.DataFrame(columns | {"fitness": self.fitness.ravel()} | values)

    def lineage(self, member: int | None = None) -> Any:
        """The lines of `frame` that a member of the last generation descends from, by first parents; None: the best.

        Raises KeyError for an id that the last generation has not.
        """
        member = self.best if member is None else member
        if member not in self.member[-1]:
            raise KeyError(f"No member {member} in the last generation; its ids are {self.member[-1].tolist()}.")
        members = self.member.shape[1]
        lines, wanted = [], member
        for generation in range(len(self.member) - 1, -1, -1):
            if wanted == NOBODY:
                break
            place = int(np.flatnonzero(self.member[generation] == wanted)[0])
            lines.append(generation * members + place)
            wanted = self.parents[generation, place, 0]
        return self.frame().iloc[lines[::-1]].reset_index(drop=True)


def joined(seen: list[EvolutionHistory], fingerprint: str) -> EvolutionHistory:
    """One history of some that followed one another; `fingerprint`: of the last generation."""
    last = seen[-1]
    names = "fitness", "member", "parents", "seconds"
    whole = {name: np.concatenate([getattr(one, name) for one in seen]) for name in names}
    each = [one.values for one in seen if one.values is not None]
    values = {name: np.concatenate([one[name] for one in each]) for name in each[0]} if each else None
    return dataclasses.replace(last, values=values, fingerprint=fingerprint, **whole)
