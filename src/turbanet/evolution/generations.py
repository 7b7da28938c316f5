"""Generations of a swarm: one is trained, another follows by a rule, and what each was worth is kept."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from turbanet.evolution.genealogy import EvolutionHistory, joined
from turbanet.evolution.genetics import read_fitness
from turbanet.training.arrays import check_seed
from turbanet.training.fingerprint import fingerprint
from turbanet.training.interrupt import Interrupted
from turbanet.training.member import Swarm
from turbanet.training.plan import say_once

BREED = 2**31 - 1  # what keys are of that no member draws from: no id


def generations_of(
    swarm: Swarm,
    rule: Any,
    train: Callable[[Swarm, int, Any], tuple[Swarm, Any]],
    *,
    generations: int,
    seed: int,
    history: EvolutionHistory | None,
    unit: str,
    progress: bool,
) -> tuple[Swarm, EvolutionHistory]:
    """The loop of `evolve` and `population_based`: -> (the last generation, the history of all).

    rule : follow(key, swarm, last history or None) -> (swarm, parents, state, values), told(key, swarm, fitness, state)
        -> state
    train : train(swarm, generation, values) -> (swarm, fitness)
    """
    seen = [] if history is None else [history]
    begin = len(history.fitness) if history is not None else 0
    breed = jax.random.fold_in(jax.random.key(check_seed(seed)), BREED)
    with tqdm(total=generations, unit=unit, disable=not progress) as bar:
        for generation in range(begin, begin + generations):
            started = time.perf_counter()
            key = jax.random.fold_in(breed, generation)
            try:
                born, parents, state, values = rule.follow(key, swarm, seen[-1] if seen else None)
                trained, fitness = _checked(train(born, generation, values), born)
                state = rule.told(key, trained, fitness, state)
            except KeyboardInterrupt as stop:
                if not seen:
                    raise
                history = joined(seen, _known_by(swarm))
                raise Interrupted(swarm, history, f"{len(history.fitness)} whole {unit}(s)") from stop
            swarm = trained
            seconds = time.perf_counter() - started
            one = fitness, np.asarray(born.id), np.asarray(parents), values, seconds, state
            seen[-1:] = [dataclasses.replace(last, state=None) for last in seen[-1:]]  # the last one's is enough
            seen.append(EvolutionHistory.of(*one))
            bar.update()
            bar.set_postfix({"best": f"{np.nanmax(fitness):.4g}"})
    return swarm, joined(seen, _known_by(swarm))


def check_names(swarm: Swarm) -> None:
    """ValueError where two members have one id: who descends from whom is told by ids."""
    ids = np.asarray(swarm.id)
    if len(np.unique(ids)) < len(ids):
        raise ValueError("Two members share an id, as where each has a seed: make the swarm with one seed for all.")


def check_follows(swarm: Swarm, history: EvolutionHistory | None, *, values: Any = None, state: Any = None) -> None:
    """ValueError for a swarm that is not the last generation of a history, and for a history of another kind.

    values : {name: ...} that the history is to have, state : whether it is to have a strategy's
    """
    if history is None:
        return
    if history.fingerprint != _known_by(swarm):
        raise ValueError("history is of another swarm, or of this one as it was before: give the two of one call.")
    if set(history.values or {}) != set(values or {}) or (history.state is not None) != bool(state):
        has = f"values of {', '.join(history.values)}" if history.values else "no values"
        strategy = "no strategy" if history.state is None else "a strategy's state"
        raise ValueError(f"history has {has} and {strategy}: go on with the rule and values that it is of.")


def _known_by(swarm):
    """What a generation is known by: its names and its weights."""
    return str(fingerprint([np.asarray(leaf) for leaf in jax.tree.leaves((swarm.seed, swarm.id, swarm.params))]))


def _checked(returned, born):
    """What `train` returned for the members that it was given: (swarm, fitness as NumPy has it)."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(f"train returns (swarm, fitness [member]), got {type(returned).__name__}: {returned!r:.80}.")
    swarm, fitness = returned
    if not np.array_equal(getattr(swarm, "id", ()), born.id):
        raise ValueError("train returns the swarm that it was given, trained: these members in this order.")
    fitness = read_fitness(fitness)
    if fitness.shape != (len(born),):
        raise ValueError(f"train returns (swarm, fitness), one number for each of {len(born)}; got {fitness.shape}.")
    without = ~np.isfinite(fitness)
    if without.all():
        raise ValueError("No member has a fitness, all are NaN or infinite: nobody can be a parent.")
    if without.any():
        names = np.asarray(born.id)[without]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say_once(f"The fitness of member {names[0]}{more} is NaN or infinite: the worst, the others go on.")
    return swarm, np.where(without, np.nan, fitness)
