"""Evolution: the fittest members of a swarm are the parents of its next generation."""

import dataclasses
import inspect
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from turbanet.populations.genealogy import NOBODY, EvolutionHistory, joined
from turbanet.populations.genetics import Genetic
from turbanet.training.arrays import as_array, check_whole
from turbanet.training.fingerprint import fingerprint
from turbanet.training.interrupt import Interrupted
from turbanet.training.member import Swarm
from turbanet.training.plan import say_once

BREED = 2**31 - 1  # what keys are of that no member draws from: no id


def evolve(
    swarm: Swarm,
    train: Callable[[Swarm, int], tuple[Swarm, Any]],
    rule: Any = Genetic(),  # noqa: B008 (frozen)
    *,
    generations: int,
    params: Any = None,
    seed: int = 0,
    history: EvolutionHistory | None = None,
    progress: bool = True,
) -> tuple[Swarm, EvolutionHistory]:
    """Evolve a swarm: train or only score a generation, let its fittest have children, and again.

    Parameters
    ----------
    swarm : the first generation
    train : train(swarm, generation) -> (swarm, fitness [member]), the higher the better, NaN where a member has none.
        What it trains, children inherit
    rule : `Genetic`; a function (key, swarm, fitness) -> swarm, in which a member that keeps its id is the one that it
        was; or a strategy of evosax (an object with init, ask and tell) for as many networks as the swarm has members.
        A strategy is told the negative fitness, as it seeks the least. One of a distribution begins at the weights of
        the swarm's first member; the swarm is what it asked for last, its own answer is in `history.state`
    generations : how many are trained, this swarm the first of them
    params : of a strategy; None: its `default_params`
    seed : of all that the rule draws; a generation draws what it would have drawn in another call
    history : of the call before, whose last generation this swarm is: the evolution goes on as if it had not ended
    progress : whether a bar shows the generations and the best fitness

    Returns
    -------
    (swarm, EvolutionHistory) : the last generation, and all of them; `swarm[[history.best]]` is the fittest

    Raises
    ------
    ValueError : for a rule that the swarm is too small for, members that share an id, a fitness of another shape, and
        where no member has a fitness
    Interrupted : a KeyboardInterrupt, for Ctrl-C; its `swarm` and `history` end with the last whole generation

    Examples
    --------
    >>> import gymnax, optax, turbanet as tn
    >>> from turbanet.networks.policies import Agent
    >>> env, _ = gymnax.make("CartPole-v1")
    >>> swarm = tn.TurbaTrainState.swarm(Agent(2, hidden=(8,)), optax.identity(), swarm_size=64, input_size=4)
    >>> def score(swarm, generation):
    ...     return swarm, tn.evaluate_agents(env, swarm, episodes=1, seed=generation).mean(axis=1)
    >>> swarm, history = tn.evolve(swarm, score, tn.Genetic(scale=0.5), generations=5, progress=False)
    >>> history.fitness.shape
    (5, 64)
    """
    check_whole(generations=generations)
    check_names(swarm)
    is_strategy = all(callable(getattr(rule, name, None)) for name in ("init", "ask", "tell"))
    if isinstance(rule, type) or not (is_strategy or callable(rule)):
        known = "a Genetic, a function (key, swarm, fitness) -> swarm, or an object with init, ask and tell"
        raise ValueError(f"rule is {known}, got {rule!r:.80}.")
    if params is not None and not is_strategy:
        raise ValueError(f"params are a strategy's, with init, ask and tell; the rule is {rule!r:.80}.")
    if isinstance(rule, Genetic) and (generations > 1 or history is not None):
        rule.check(swarm)
    check_follows(swarm, history, state=is_strategy)
    return generations_of(
        swarm,
        _Strategy(rule, params, swarm) if is_strategy else _Rule(rule),
        lambda born, generation, _: train(born, generation),
        generations=generations,
        seed=seed,
        history=history,
        unit="generation",
        progress=progress,
    )


class _Rule:
    """A rule (key, swarm, fitness) -> swarm as `generations_of` follows it."""

    def __init__(self, rule):
        self.rule = rule

    def follow(self, key, swarm, last):
        if last is None:
            return swarm, np.full((len(swarm), 2), NOBODY), None, None
        if isinstance(self.rule, Genetic):
            return *self.rule.offspring(key, swarm, last.fitness[-1]), None, None
        born = self.rule(key, swarm, jnp.asarray(last.fitness[-1]))
        if _specification(born) != _specification(swarm):
            came = f"{len(born)} members" if hasattr(born, "params") else type(born).__name__
            raise ValueError(f"A rule returns a swarm like the {len(swarm)} members that it is given; it made {came}.")
        if len(np.unique(born.id)) < len(born):
            raise ValueError("The rule made members that share an id: give copies ids that nobody had.")
        stayed = np.where(np.isin(born.id, swarm.id), born.id, NOBODY)
        return born, np.stack([stayed, np.full_like(stayed, NOBODY)], axis=1), None, None

    def told(self, key, swarm, fitness, state):
        return None


class _Strategy:
    """A strategy of evosax as `generations_of` follows it: ask, train, tell."""

    def __init__(self, strategy, params, swarm):
        if strategy.population_size != len(swarm):
            came = f"a population_size of {strategy.population_size}, the swarm {len(swarm)} members"
            raise ValueError(f"The strategy has {came}.")
        one = swarm.get_state(0).params
        if _shapes(strategy.solution) != _shapes(one):
            raise ValueError("The strategy is for another network: give it solution=swarm.get_state(0).params.")
        self.strategy = strategy
        self.params = strategy.default_params if params is None else params
        self.evolves_members = "fitness" in inspect.signature(strategy.init).parameters

    def follow(self, key, swarm, last):
        nobody = np.full((len(swarm), 2), NOBODY)
        state = None if last is None else last.state
        if state is None:
            if self.evolves_members:
                return swarm, nobody, None, None
            state = self.strategy.init(jax.random.fold_in(key, 0), swarm.get_state(0).params, self.params)
        population, state = self.strategy.ask(jax.random.fold_in(key, 1), state, self.params)
        return swarm.replace(params=population), nobody, state, None

    def told(self, key, swarm, fitness, state):
        cost = jnp.asarray(-np.where(np.isnan(fitness), np.nanmin(fitness), fitness))
        if state is None:
            return self.strategy.init(jax.random.fold_in(key, 0), swarm.params, cost, self.params)
        return self.strategy.tell(jax.random.fold_in(key, 2), swarm.params, cost, state, self.params)[0]


def _shapes(tree):
    return jax.tree.structure(tree), [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _specification(swarm):
    """The structure, shapes and types of a swarm's weights."""
    params = getattr(swarm, "params", None)
    return _shapes(params), [leaf.dtype for leaf in jax.tree.leaves(params)]


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
    with tqdm(total=generations, unit=unit, disable=not progress) as bar:
        for generation in range(begin, begin + generations):
            started = time.perf_counter()
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), BREED), generation)
            try:
                born, parents, state, values = rule.follow(key, swarm, seen[-1] if seen else None)
                trained, fitness = _checked(train(born, generation, values), born)
                state = rule.told(key, trained, fitness, state)
            except KeyboardInterrupt as stop:
                if not seen:
                    raise
                history = joined(seen, _print(swarm))
                raise Interrupted(swarm, history, f"{len(history.fitness)} whole {unit}(s)") from stop
            swarm = trained
            seconds = time.perf_counter() - started
            one = fitness, np.asarray(born.id), np.asarray(parents), values, seconds, state
            seen[-1:] = [dataclasses.replace(last, state=None) for last in seen[-1:]]  # the last one's is enough
            seen.append(EvolutionHistory.of(*one))
            bar.update()
            bar.set_postfix({"best": f"{np.nanmax(fitness):.4g}"})
    return swarm, joined(seen, _print(swarm))


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
    if history.swarm != _print(swarm):
        raise ValueError("history is of another swarm, or of this one as it was before: give the two of one call.")
    if set(history.values or {}) != set(values or {}) or (history.state is not None) != bool(state):
        has = f"values of {', '.join(history.values)}" if history.values else "no values"
        strategy = "no strategy" if history.state is None else "a strategy's state"
        raise ValueError(f"history has {has} and {strategy}: go on with the rule and values that it is of.")


def _print(swarm):
    """What a generation is known by: its names and its weights."""
    return str(fingerprint([np.asarray(leaf) for leaf in jax.tree.leaves((swarm.seed, swarm.id, swarm.params))]))


def _checked(returned, born):
    """What `train` returned for the members that it was given: (swarm, fitness as NumPy has it)."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(f"train returns (swarm, fitness [member]), got {type(returned).__name__}: {returned!r:.80}.")
    swarm, fitness = returned
    if not np.array_equal(getattr(swarm, "id", ()), born.id):
        raise ValueError("train returns the swarm that it was given, trained: these members in this order.")
    fitness = np.asarray(as_array(fitness, "fitness"), float)
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
