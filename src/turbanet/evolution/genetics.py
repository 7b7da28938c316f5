"""Genetics: which members of a swarm are parents, and the rule by which their children are the next generation."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from turbanet.evolution.genealogy import NOBODY
from turbanet.evolution.variation import CROSSOVERS, gaussian
from turbanet.training.arrays import as_array, check_next_ids, check_whole
from turbanet.training.member import Swarm
from turbanet.training.program import read


def share_of(share: float, members: int) -> float:
    """A share of the members, without what is left of a product that has no exact number (0.07 of 100 is 7)."""
    return round(share * members, 9)


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Parents are drawn evenly from the best `share` of the members, at least one."""

    share: float = 0.2

    def __post_init__(self):
        if not isinstance(self.share, float | int) or not 0 < self.share <= 1:
            raise ValueError(f"share is the part of the members that are parents, in (0, 1], got {self.share!r}.")

    def parents(self, members: int) -> int:
        """How many may be parents."""
        return math.ceil(share_of(self.share, members))

    def __call__(self, key: jax.Array, among: jax.Array) -> jax.Array:
        """The rank of one parent, 0 the fittest, of so many that may be."""
        return jax.random.randint(key, (), 0, among)


@dataclasses.dataclass(frozen=True)
class Tournament:
    """A parent is the fittest of some `entrants`, drawn evenly, with repetition, from all members."""

    entrants: int = 3

    def __post_init__(self):
        check_whole(entrants=self.entrants)

    def parents(self, members: int) -> int:
        """How many may be parents."""
        return members

    def __call__(self, key: jax.Array, among: jax.Array) -> jax.Array:
        """The rank of one parent, 0 the fittest, of so many that may be."""
        return jax.random.randint(key, (self.entrants,), 0, among).min()


@struct.dataclass
class Genetic:
    """A rule of how a generation follows another: (key, swarm, fitness) -> swarm, a pure function.

    The fittest `elites` go on as they are, ids too. The others are children, with ids that nobody had: a copy of one
    parent, optimizer and collections included, whose weights are crossed with another parent's, if there is a
    crossover, and then mutated. A child depends on the key, its id and its parents alone. Members whose fitness is NaN
    are nobody's parents and no elites; of equal ones it is drawn who comes first.

    scale : standard deviation of the mutation's noise: a number, or a tree of them for layers or leaves of params
        ({"Dense_0": 0.1, "Dense_1": {"kernel": 0.02, "bias": 0.0}}); another one compiles nothing
    selection : `Truncation` or `Tournament`
    crossover : None, "uniform" (see `uniform`), "layer" (`per_layer`), or a function (key, params, params) -> params
    elites : how many

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
        """The next generation of a swarm whose members have this fitness [member], the higher the better."""
        return self.offspring(key, swarm, fitness)[0]

    def offspring(self, key: jax.Array, swarm: Swarm, fitness: Any) -> tuple[Swarm, jax.Array]:
        """(The next generation, its members' parents, int [member, 2], as `EvolutionHistory` has them).

        Raises ValueError for a fitness of another shape than [member], where nobody has one, and where there are not
        two parents to cross.
        """
        self.check(swarm)
        check_next_ids(swarm.id, len(swarm))
        return _offspring(self, key, swarm, costs(fitness, len(swarm)), known=read(ranked, self.crossover))

    def check(self, swarm: Swarm) -> None:
        """ValueError for a rule that a swarm like this one cannot follow."""
        members = len(swarm)
        if not isinstance(self.elites, int | np.integer) or not 0 <= self.elites < members:
            known = f"elites are a whole number of at least 0 and fewer than the {members} members"
            raise ValueError(f"{known}, got {self.elites!r}{': one alone has no children' if members == 1 else ''}.")
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
            is_known = not isinstance(number, jax.core.Tracer)
            if number.shape != () or (is_known and not 0 <= float(number) < np.inf):
                raise ValueError(f"scale must be numbers of at least 0, each for all of its leaf, got {scale!r:.80}.")


def read_fitness(fitness: Any) -> np.ndarray:
    """Fitness as NumPy has it, in the precision that it came in; ValueError for what holds no numbers."""
    as_array(fitness, "fitness")  # which JAX's precision would cut
    return np.asarray(fitness.detach() if hasattr(fitness, "detach") else fitness, float)


def costs(fitness: Any, members: int) -> Any:
    """The place of each member's fitness, float [member], 0 the highest, equal ones alike; NaN where it has none.

    Raises ValueError for another shape, and where nobody has a fitness.
    """
    traced = isinstance(fitness, jax.core.Tracer)
    fitness = fitness if traced else read_fitness(fitness)
    if fitness.shape != (members,):
        raise ValueError(f"fitness is one number for each of {members} members, got {fitness.shape}.")
    if traced:
        return -fitness
    if np.isnan(fitness).all():
        raise ValueError("No member has a fitness, all are NaN: nobody can be a parent.")
    place = np.unique(-fitness, return_inverse=True)[1]  # what float32 would make equal stays apart
    return np.where(np.isnan(fitness), np.nan, place).astype(np.float32)


def ranked(key: jax.Array, costs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Positions from the fittest on, equal ones in an order that is drawn, NaN last; how many have a fitness)."""
    order = jnp.lexsort((jax.random.uniform(key, costs.shape), costs))
    return order, jnp.maximum((~jnp.isnan(costs)).sum(), 1)


@partial(jax.jit, static_argnames="known")
def _offspring(rule, key, swarm, costs, *, known):
    """`Genetic.offspring`, written for one child; known: the fingerprint of what it computes."""
    members, elites = len(swarm), rule.elites
    order, worth = ranked(key, costs)
    among = jnp.minimum(rule.selection.parents(members), worth)
    crossover = rule.crossover if callable(rule.crossover) else CROSSOVERS.get(rule.crossover)

    def chosen(places):
        return jax.tree.map(lambda leaf: leaf[places], swarm)

    def child(id):
        pick, pick_other, mix, noise = jax.random.split(jax.random.fold_in(key, id), 4)
        rank = rule.selection(pick, among)
        one = chosen(order[rank])
        params, parents = one.params, (one.id, jnp.full_like(one.id, NOBODY))
        if crossover is not None:
            other_rank = rule.selection(pick_other, jnp.maximum(among - 1, 1))  # of the others
            other_rank = jnp.where((other_rank >= rank) & (among > 1), other_rank + 1, other_rank)
            other = chosen(order[other_rank])
            params, parents = crossover(mix, params, other.params), (one.id, other.id)
        return one.replace(params=gaussian(noise, params, rule.scale), id=id), jnp.stack(parents)

    # Children for all; the first ones, with the last ids, stand where an elite has no fitness.
    ids = swarm.id.max() + 1 + jnp.arange(members, dtype=swarm.id.dtype)
    children, parents = jax.vmap(child)(jnp.roll(ids, elites))
    if elites == 0:
        return children, parents
    elite = chosen(order[:elites])
    stays = jnp.arange(members) < jnp.minimum(elites, worth)

    def instead(elite, child):
        shape = (members,) + (1,) * (child.ndim - 1)
        filled = jnp.concatenate([elite, child[elites:]])
        return jnp.where(stays.reshape(shape), filled, child)

    own = jnp.stack([elite.id, jnp.full_like(elite.id, NOBODY)], axis=1)
    return jax.tree.map(instead, elite, children), instead(own, parents)
