"""Genetic algorithm: selection of parents, and the rule that makes their children the next generation."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from turbanet.core.arrays import as_array, check_next_ids, check_whole
from turbanet.core.cache import read
from turbanet.core.state import Swarm
from turbanet.evolution.genealogy import NOBODY
from turbanet.evolution.variation import CROSSOVERS, gaussian


def share_of(share: float, members: int) -> float:
    """Return a share of the members, rounded because products of floats are inexact (0.07 of 100 is 7)."""
    return round(share * members, 9)


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Parents are drawn uniformly from the best `share` of the members, at least one."""

    share: float = 0.2

    def __post_init__(self):
        if not isinstance(self.share, float | int) or not 0 < self.share <= 1:
            raise ValueError(f"share is the part of the members that are parents, in (0, 1], got {self.share!r}.")

    def parents(self, members: int) -> int:
        """Return the number of members that may be parents."""
        return math.ceil(share_of(self.share, members))

    def __call__(self, key: jax.Array, among: jax.Array) -> jax.Array:
        """Draw the rank of one parent, 0 the fittest, from so many that may be parents."""
        return jax.random.randint(key, (), 0, among)


@dataclasses.dataclass(frozen=True)
class Tournament:
    """A parent is the fittest of `entrants` members, drawn uniformly with replacement from all."""

    entrants: int = 3

    def __post_init__(self):
        check_whole(entrants=self.entrants)

    def parents(self, members: int) -> int:
        """Return the number of members that may be parents."""
        return members

    def __call__(self, key: jax.Array, among: jax.Array) -> jax.Array:
        """Draw the rank of one parent, 0 the fittest, from so many that may be parents."""
        return jax.random.randint(key, (self.entrants,), 0, among).min()


@struct.dataclass
class Genetic:
    """The rule of a genetic algorithm, a pure function (key, swarm, fitness) -> next generation.

    The fittest `elites` survive unchanged and keep their ids. The others are replaced by children with new ids. A child
    is a copy of one parent, optimizer and collections included; its weights are crossed with those of another parent,
    if there is a crossover, and then mutated. A child depends only on the key, its id and its parents. Members whose
    fitness is NaN are neither parents nor elites. Ties in fitness are broken at random.

    scale : standard deviation of the mutation's noise: a number, or a tree of them for layers or leaves of params
        ({"Dense_0": 0.1, "Dense_1": {"kernel": 0.02, "bias": 0.0}}); another value compiles nothing
    selection : `Truncation` or `Tournament`
    crossover : None, "uniform" (see `uniform`), "layer" (`per_layer`), or a function (key, params, params) -> params
    elites : number of members that survive unchanged

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax, turbanet as tn
    >>> swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 3)), optax.sgd(0.1), swarm_size=5, input_size=4)
    >>> rule = tn.evolution.Genetic(scale=0.02, selection=tn.evolution.Tournament(2), crossover="uniform")
    >>> children = rule(jax.random.key(0), swarm, jnp.array([3.0, 1.0, 4.0, 1.0, 5.0]))
    >>> children.id.tolist()
    [4, 5, 6, 7, 8]
    """

    scale: Any = 0.02
    selection: Truncation | Tournament = struct.field(pytree_node=False, default=Truncation())
    crossover: str | Callable | None = struct.field(pytree_node=False, default=None)
    elites: int = struct.field(pytree_node=False, default=1)

    def __call__(self, key: jax.Array, swarm: Swarm, fitness: Any) -> Swarm:
        """Return the next generation of a swarm with this fitness [member], higher is better."""
        return self.offspring(key, swarm, fitness)[0]

    def offspring(self, key: jax.Array, swarm: Swarm, fitness: Any) -> tuple[Swarm, jax.Array]:
        """Return the next generation and its members' parents, int [member, 2], as in `EvolutionHistory`.

        Raises ValueError for a fitness of another shape than [member], if no member has one, and if a crossover has
        fewer than two parents to choose from.
        """
        self.check(swarm)
        check_next_ids(swarm.id, len(swarm))
        return _offspring(self, key, swarm, costs(fitness, len(swarm)), fingerprint=read(ranked, self.crossover))

    def check(self, swarm: Swarm) -> None:
        """Raise ValueError for settings that are invalid for this swarm."""
        members = len(swarm)
        if not isinstance(self.elites, int | np.integer) or not 0 <= self.elites < members:
            required = f"elites are a whole number of at least 0 and fewer than the {members} members"
            raise ValueError(f"{required}, got {self.elites!r}{': one alone has no children' if members == 1 else ''}.")
        if not isinstance(self.selection, Truncation | Tournament):
            raise ValueError(
                f"selection is a Truncation(0.2), for example, or a Tournament(3), got {self.selection!r}."
            )
        if not (self.crossover is None or self.crossover in CROSSOVERS or callable(self.crossover)):
            raise ValueError(f"Unknown crossover {self.crossover!r}; known: {', '.join(CROSSOVERS)}, or a function.")
        if self.crossover is not None and (parents := self.selection.parents(members)) < 2:
            raise ValueError(f"A crossover needs two parents, {self.selection} of {members} members makes {parents}.")
        try:
            scales = jax.tree.leaves(jax.tree.broadcast(self.scale, swarm.params))
        except ValueError as error:
            raise ValueError(f"scale is a number, or a tree of them for parts of the params: {error}") from error
        for scale in scales:
            number = as_array(scale, "scale")
            is_concrete = not isinstance(number, jax.core.Tracer)
            if number.shape != () or (is_concrete and not 0 <= float(number) < np.inf):
                raise ValueError(f"scale must be numbers of at least 0, each for all of its leaf, got {scale!r:.80}.")


def read_fitness(fitness: Any) -> np.ndarray:
    """Return fitness as a NumPy array of its own precision; raise ValueError for what holds no numbers."""
    as_array(fitness, "fitness")  # only checks: its result has JAX's precision
    return np.asarray(fitness.detach() if hasattr(fitness, "detach") else fitness, float)


def costs(fitness: Any, members: int) -> Any:
    """Return the rank of each member's fitness, float [member], 0 the highest, ties equal; NaN without fitness.

    For traced fitness, return its negative, which sorts alike. Raises ValueError for another shape, and if no member
    has a fitness.
    """
    traced = isinstance(fitness, jax.core.Tracer)
    fitness = fitness if traced else read_fitness(fitness)
    if fitness.shape != (members,):
        raise ValueError(f"fitness is one number for each of {members} members, got {fitness.shape}.")
    if traced:
        return -fitness
    if np.isnan(fitness).all():
        raise ValueError("No member has a fitness, all are NaN: nobody can be a parent.")
    rank = np.unique(-fitness, return_inverse=True)[1]  # on the host: float32 could make different values equal
    return np.where(np.isnan(fitness), np.nan, rank).astype(np.float32)


def ranked(key: jax.Array, costs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (positions from the fittest on, ties in random order, NaN last; number of members with a fitness)."""
    order = jnp.lexsort((jax.random.uniform(key, costs.shape), costs))
    return order, jnp.maximum((~jnp.isnan(costs)).sum(), 1)


@partial(jax.jit, static_argnames="fingerprint")
def _offspring(rule, key, swarm, costs, *, fingerprint):
    """Compute `Genetic.offspring`; the fingerprint of its functions makes JAX compile anew when they change."""
    members, elites = len(swarm), rule.elites
    order, fit = ranked(key, costs)  # fit: the number of members with a fitness
    among = jnp.minimum(rule.selection.parents(members), fit)
    crossover = rule.crossover if callable(rule.crossover) else CROSSOVERS.get(rule.crossover)

    def chosen(positions):
        return jax.tree.map(lambda leaf: leaf[positions], swarm)

    def child(id):
        first_key, second_key, mix_key, noise_key = jax.random.split(jax.random.fold_in(key, id), 4)
        rank = rule.selection(first_key, among)
        first = chosen(order[rank])
        params, parents = first.params, (first.id, jnp.full_like(first.id, NOBODY))
        if crossover is not None:
            second_rank = rule.selection(second_key, jnp.maximum(among - 1, 1))  # among the other parents
            second_rank = jnp.where((second_rank >= rank) & (among > 1), second_rank + 1, second_rank)
            second = chosen(order[second_rank])
            params, parents = crossover(mix_key, params, second.params), (first.id, second.id)
        return first.replace(params=gaussian(noise_key, params, rule.scale), id=id), jnp.stack(parents)

    # A child for every position; those of the elites, which get the last ids, are used where an elite has no fitness.
    ids = swarm.id.max() + 1 + jnp.arange(members, dtype=swarm.id.dtype)
    children, parents = jax.vmap(child)(jnp.roll(ids, elites))
    if elites == 0:
        return children, parents
    elite = chosen(order[:elites])
    survives = jnp.arange(members) < jnp.minimum(elites, fit)

    def with_elites(elite, child):
        shape = (members,) + (1,) * (child.ndim - 1)
        filled = jnp.concatenate([elite, child[elites:]])
        return jnp.where(survives.reshape(shape), filled, child)

    own = jnp.stack([elite.id, jnp.full_like(elite.id, NOBODY)], axis=1)
    return jax.tree.map(with_elites, elite, children), with_elites(own, parents)
