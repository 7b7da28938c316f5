"""The loop over generations: make one by a rule, train it, record its fitness."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from turbanet.core.arrays import check_seed
from turbanet.core.fingerprint import fingerprint
from turbanet.core.interrupt import Interrupted
from turbanet.core.plan import say_once
from turbanet.core.progress import progress_bar
from turbanet.core.state import Swarm, check_swarm
from turbanet.evolution.genealogy import EvolutionHistory, joined
from turbanet.evolution.genetics import read_fitness

BREED = 2**31 - 1  # larger than any id, so that no member draws from the same keys


def generations_of(
    swarm: Swarm,
    follow: Callable,
    train: Callable[[Swarm, int, Any], tuple[Swarm, Any]],
    *,
    generations: int,
    seed: int,
    history: EvolutionHistory | None,
    unit: str,
    progress: bool,
    tell: Callable | None = None,
) -> tuple[Swarm, EvolutionHistory]:
    """Run the loop of `evolve` and `population_based`: -> (the last generation, the history of all).

    follow : follow(key, swarm, last history or None) -> (swarm, parents, state, values)
    train : train(swarm, generation, values) -> (swarm, fitness)
    tell : tell(key, swarm, fitness, state) -> state; None: the state stays
    """
    histories = [] if history is None else [history]
    begin = len(history.fitness) if history is not None else 0
    breed = jax.random.fold_in(jax.random.key(check_seed(seed)), BREED)
    with progress_bar(progress, total=generations, unit=unit) as bar:
        for generation in range(begin, begin + generations):
            started = time.perf_counter()
            key = jax.random.fold_in(breed, generation)
            try:
                born, parents, state, values = follow(key, swarm, histories[-1] if histories else None)
                trained, fitness = _checked(train(born, generation, values), born)
                state = tell(key, trained, fitness, state) if tell else state
            except (Exception, KeyboardInterrupt) as stop:
                if not histories:
                    raise
                history = joined(histories, _fingerprint(swarm))
                if isinstance(stop, Exception):
                    vars(stop).update(swarm=swarm, history=history)
                    stop.add_note("The generation before is this exception's swarm, and its history is there.")
                    raise
                raise Interrupted(swarm, history, f"{len(history.fitness)} whole {unit}(s)") from stop
            swarm = trained
            seconds = time.perf_counter() - started
            histories[-1:] = [dataclasses.replace(last, state=None) for last in histories[-1:]]  # only the last is used
            arrays = {"fitness": fitness, "member": born.id, "parents": parents, "values": values, "seconds": seconds}
            arrays = jax.tree.map(lambda leaf: np.asarray(leaf)[None], arrays)
            histories.append(EvolutionHistory(**arrays, state=state))
            bar.update()
            bar.set_postfix({"best": f"{np.nanmax(fitness):.4g}"})
    return swarm, joined(histories, _fingerprint(swarm))


def check_names(swarm: Swarm) -> None:
    """Raise ValueError for no swarm, and if two members share an id, by which the genealogy names them."""
    ids = np.asarray(check_swarm(swarm).id)
    if len(np.unique(ids)) < len(ids):
        raise ValueError("Two members share an id, as where each has a seed: make the swarm with one seed for all.")


def check_follows(swarm: Swarm, history: EvolutionHistory | None, *, values: Any = None, state: Any = None) -> None:
    """Raise ValueError for a swarm that is not the last generation of a history, or a history of another kind.

    values : {name: ...} that the history must have; state : whether it must have a strategy's state
    """
    if history is None:
        return
    if history.fingerprint != _fingerprint(swarm):
        raise ValueError("history does not end with this swarm: pass the swarm and the history that one call returned.")
    if set(history.values or {}) != set(values or {}) or (history.state is not None) != bool(state):
        has = f"values of {', '.join(history.values)}" if history.values else "no values"
        strategy = "no strategy" if history.state is None else "a strategy's state"
        raise ValueError(f"history has {has} and {strategy}: continue with the rule and the values that produced it.")


def _fingerprint(swarm):
    """Digest of a generation: its seeds, ids and weights."""
    return str(fingerprint([np.asarray(leaf) for leaf in jax.tree.leaves((swarm.seed, swarm.id, swarm.params))]))


def _checked(returned, born):
    """Check what `train` returned for a generation and return (swarm, fitness as a NumPy array, NaN if infinite)."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(f"train returns (swarm, fitness [member]), got {type(returned).__name__}: {returned!r:.80}.")
    swarm, fitness = returned
    if not np.array_equal(getattr(swarm, "id", ()), born.id):
        raise ValueError("train returns the swarm that it was given, trained: these members in this order.")
    fitness = read_fitness(fitness)
    if fitness.shape != (len(born),):
        raise ValueError(f"train returns (swarm, fitness), one number for each of {len(born)}; got {fitness.shape}.")
    missing = ~np.isfinite(fitness)
    if missing.all():
        raise ValueError("No member has a fitness, all are NaN or infinite: nobody can be a parent.")
    if missing.any():
        ids = np.asarray(born.id)[missing]
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        say_once(f"The fitness of member {ids[0]}{more} is NaN or infinite: it ranks last, and evolution continues.")
    return swarm, np.where(missing, np.nan, fitness)
