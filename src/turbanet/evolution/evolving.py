"""Evolve a swarm: the fittest members are the parents of the next generation."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core.arrays import check_whole
from turbanet.core.optimizers import check_plain
from turbanet.core.state import Swarm
from turbanet.evolution.genealogy import NOBODY, EvolutionHistory
from turbanet.evolution.generations import check_follows, check_names, generations_of
from turbanet.evolution.genetics import Genetic


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
    """Evolve a swarm: in each generation, train or score its members and replace them by the fittest ones' children.

    Parameters
    ----------
    swarm : the first generation
    train : train(swarm, generation) -> (swarm, fitness [member]); higher is better, NaN for a member without fitness.
        Children inherit what it trains
    rule : `Genetic`; a function (key, swarm, fitness) -> swarm, or (swarm, parents), with fitness as a NumPy array,
        float64 [member], and parents the ids that weights come from, int [member] or [member, 2]; without them a
        member that keeps its id is its own parent, and one with a new id has none (`swarm.copies` numbers its members
        from 0: return the parents, too); or an evosax strategy (an object
        with init, ask and tell) of one population, whose size is the number of members. A strategy minimises, so it
        receives the negative fitness. A distribution-based one starts at the weights of the first member; the returned
        swarm is the population that it last asked for, its solution is in `history.state`
    generations : number of generations to train; without a history, the given swarm is the first
    params : parameters of a strategy; None: its `default_params`
    seed : seed of the rule's random numbers; those of a generation do not depend on the call that it is part of
    history : the history of an earlier call that returned this swarm; the evolution continues as if uninterrupted
    progress : whether to show a bar with the generations and the best fitness

    Returns
    -------
    (swarm, EvolutionHistory) : the last generation, and the history of all; `swarm[[history.best]]` is the fittest

    Raises
    ------
    ValueError : for a rule that needs a larger swarm, members that share an id, a fitness of another shape, and a
        generation in which no member has a fitness
    Interrupted : a KeyboardInterrupt, for Ctrl-C; its `swarm` and `history` end with the last whole generation

    Examples
    --------
    >>> import gymnax, optax, turbanet as tn
    >>> from turbanet.networks.policies import Agent
    >>> env, _ = gymnax.make("CartPole-v1")
    >>> swarm = tn.TurbaTrainState.swarm(Agent(2, hidden=(8,)), optax.identity(), swarm_size=64, input_size=4)
    >>> def score(swarm, generation):
    ...     return swarm, tn.rl.evaluate_agents(env, swarm, episodes=1, seed=generation).mean(axis=1)
    >>> rule = tn.evolution.Genetic(scale=0.5)
    >>> swarm, history = tn.evolution.evolve(swarm, score, rule, generations=5, progress=False)
    >>> history.fitness.shape
    (5, 64)
    """
    check_whole(generations=generations)
    check_names(swarm)
    check_plain(swarm, "evolve")
    is_strategy = all(callable(getattr(rule, name, None)) for name in ("init", "ask", "tell"))
    if isinstance(rule, type) or not (is_strategy or callable(rule)):
        required = "a Genetic, a function (key, swarm, fitness) -> swarm, or an object with init, ask and tell"
        raise ValueError(f"rule is {required}, got {rule!r:.80}.")
    if params is not None and not is_strategy:
        raise ValueError(f"params are a strategy's, with init, ask and tell; the rule is {rule!r:.80}.")
    if isinstance(rule, Genetic) and (generations > 1 or history is not None):
        rule.check(swarm)
    check_follows(swarm, history, state=is_strategy)
    strategy = _Strategy(rule, params, swarm, history and history.state) if is_strategy else None
    return generations_of(
        swarm,
        strategy.follow if strategy else partial(_follow, rule),
        lambda born, generation, _: train(born, generation),
        generations=generations,
        seed=seed,
        history=history,
        unit="generation",
        progress=progress,
        tell=strategy.tell if strategy else None,
    )


def _follow(rule, key, swarm, last):
    """Return the generation after `last` by a rule (key, swarm, fitness) -> swarm, as `generations_of` takes it."""
    if last is None:
        return swarm, np.full((len(swarm), 2), NOBODY), None, None
    if isinstance(rule, Genetic):
        return *rule.offspring(key, swarm, last.fitness[-1]), None, None
    born = rule(key, swarm, last.fitness[-1].copy())  # in float64: float32 could make different values equal
    born, parents = born if isinstance(born, tuple) and len(born) == 2 else (born, None)
    if _specification(getattr(born, "params", None)) != _specification(swarm.params):
        made = f"{len(born)} members" if hasattr(born, "params") else type(born).__name__
        raise ValueError(f"A rule returns a swarm like the {len(swarm)} members that it is given; it made {made}.")
    if len(np.unique(born.id)) < len(born):
        raise ValueError("The rule made members that share an id: give copies ids that nobody had.")
    if parents is None:
        parents = np.where(np.isin(born.id, swarm.id), born.id, NOBODY)
    parents = np.asarray(parents)
    if parents.shape not in ((len(born),), (len(born), 2)) or not np.isin(parents, [*swarm.id, NOBODY]).all():
        required = f"ids of the last generation or {NOBODY}, int [{len(born)}] or [{len(born)}, 2]"
        raise ValueError(f"A rule's parents must be {required}; got {parents!s:.60}.")
    return born, np.column_stack([parents, np.full_like(parents, NOBODY)])[:, :2], None, None


class _Strategy:
    """Adapt an evosax strategy to `generations_of`: ask, train, tell."""

    def __init__(self, strategy, params, swarm, state):
        if getattr(strategy, "num_populations", 1) != 1:
            name = type(strategy).__name__
            raise ValueError(f"A strategy has one population, {name} has {strategy.num_populations}.")
        if strategy.population_size != len(swarm):
            sizes = f"a population_size of {strategy.population_size}, the swarm {len(swarm)} members"
            raise ValueError(f"The strategy has {sizes}.")
        if _specification(strategy.solution) != _specification(swarm.get_state(0).params):
            raise ValueError("The strategy is for another network: give it solution=swarm.get_state(0).params.")
        self.strategy = strategy
        self.params = strategy.default_params if params is None else params
        # evosax initialises a population-based strategy with a fitness, one of a distribution with a mean
        self.is_population_based = "fitness" in inspect.signature(strategy.init).parameters
        own = jax.eval_shape(self.initial, jax.random.key(0), swarm)
        if state is not None and _structure(state) != _structure(own):
            raise ValueError("history is of another strategy: continue with the one that produced it.")

    def initial(self, key, swarm, cost=None):
        """Return the strategy's first state, of a population with its cost or of the first member's weights."""
        if self.is_population_based:
            cost = jnp.zeros(len(swarm)) if cost is None else cost
            return self.strategy.init(key, swarm.params, cost, self.params)
        return self.strategy.init(key, swarm.get_state(0).params, self.params)

    def follow(self, key, swarm, last):
        no_parents = np.full((len(swarm), 2), NOBODY)
        state = None if last is None else last.state
        if state is None:
            if self.is_population_based:
                return swarm, no_parents, None, None
            state = self.initial(jax.random.fold_in(key, 0), swarm)
        population, state = self.strategy.ask(jax.random.fold_in(key, 1), state, self.params)
        return swarm.replace(params=population), no_parents, state, None

    def tell(self, key, swarm, fitness, state):
        cost = jnp.asarray(-np.where(np.isnan(fitness), np.nanmin(fitness), fitness))
        if state is None:
            return self.initial(jax.random.fold_in(key, 0), swarm, cost)
        return self.strategy.tell(jax.random.fold_in(key, 2), swarm.params, cost, state, self.params)[0]


def _structure(state):
    """Return the tree of a strategy's state, its classes among it, and the shapes of its arrays."""
    return jax.tree.structure(state), [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]


def _specification(params):
    """Return the tree of shapes and types of some weights."""
    return jax.eval_shape(lambda tree: tree, params)
