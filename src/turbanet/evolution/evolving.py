"""Evolution: the fittest members of a swarm are the parents of its next generation."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.evolution.genealogy import NOBODY, EvolutionHistory
from turbanet.evolution.generations import check_follows, check_names, generations_of
from turbanet.evolution.genetics import Genetic
from turbanet.training.arrays import check_whole
from turbanet.training.member import Swarm
from turbanet.training.optimizers import check_plain


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
        if _specification(getattr(born, "params", None)) != _specification(swarm.params):
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
        if _specification(strategy.solution) != _specification(swarm.get_state(0).params):
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


def _specification(params):
    """What the weights of two swarms, or two networks, have in common: a tree of their shapes and types."""
    return jax.eval_shape(lambda tree: tree, params)
