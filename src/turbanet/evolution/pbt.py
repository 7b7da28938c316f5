"""Population-based training: who does badly goes on from the best ones' weights, with settings a little off theirs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.evolution.genealogy import NOBODY, EvolutionHistory
from turbanet.evolution.generations import check_follows, check_names, generations_of
from turbanet.evolution.genetics import costs, ranked, share_of
from turbanet.training.arrays import as_array, check_whole
from turbanet.training.member import Swarm


def exploit(key: jax.Array, fitness: Any, *, share: float) -> jax.Array:
    """Whose weights each member goes on with, int [member], by position: the worst copy the best, the others stay.

    The worst `share` of the members each copy one of the best `share`, drawn evenly (truncation selection: Jaderberg et
    al. 2017). Who has NaN copies too, and is copied by nobody.
    """
    return _exploited(key, costs(fitness, len(fitness)), share)


def _exploited(key, costs, share):
    pick, shuffle = jax.random.split(key)
    members = len(costs)
    cut = int(share_of(share, members))
    order, worth = ranked(shuffle, costs)
    rank = jnp.argsort(order)
    drawn = jax.random.randint(pick, (members,), 0, jnp.minimum(worth, cut))
    return jnp.where(rank >= jnp.minimum(members - cut, worth), order[drawn], jnp.arange(members))


def explore(
    key: jax.Array, values: dict[str, Any], copied: Any, *, factors: Sequence[float], limits: Mapping[str, tuple]
) -> dict[str, jax.Array]:
    """Hyperparameters {name: [member]} times a factor drawn for each, where the member was `copied`, bool [member].

    limits : {name: (least, most)}, which none of them leaves
    """
    values = {name: jnp.asarray(value) for name, value in values.items()}
    if whole := [name for name, value in values.items() if not jnp.issubdtype(value.dtype, jnp.floating)]:
        raise ValueError(f"explore multiplies floating-point numbers, {whole[0]} holds {values[whole[0]].dtype}.")
    keys = dict(zip(sorted(values), jax.random.split(key, len(values)), strict=True))

    def changed(name, value):
        moved = value * jax.random.choice(keys[name], jnp.asarray(factors, value.dtype), value.shape)
        return jnp.where(copied, jnp.clip(moved, *limits.get(name, (None, None))), value)

    return {name: changed(name, value) for name, value in values.items()}


def population_based(
    swarm: Swarm,
    train: Callable[[Swarm, int, dict[str, Any]], tuple[Swarm, Any]],
    values: Mapping[str, Any],
    *,
    rounds: int,
    share: float = 0.2,
    factors: Sequence[float] = (0.8, 1.25),
    limits: Mapping[str, tuple[float, float]] | None = None,
    seed: int = 0,
    history: EvolutionHistory | None = None,
    progress: bool = True,
) -> tuple[Swarm, EvolutionHistory]:
    """Train a swarm whose members' hyperparameters are found while it trains (Jaderberg et al. 2017).

    Between two rounds the worst members go on from the best ones' weights, optimizers and collections, with
    hyperparameters a factor away from theirs. Members keep their ids, and so their own random numbers.

    Parameters
    ----------
    swarm : TurbaTrainState of any number of members from two on
    train : train(swarm, round, values) -> (swarm, fitness [member]), the higher the better, NaN where a member has
        none: a round of `fit(with_hyperparameters(swarm, **values), ...)`, of
        `train_agents(env, config._replace(**values), swarm)`, or of anything else that takes them
    values : {name: [member]}, the hyperparameters that the members begin with, above or below 0, as the first of what
        `draw` and `grid` return; a call with a history goes on with those that it ended with
    rounds : how many
    share : of the members that copy, and of those that are copied
    factors : by one of which each hyperparameter of a member that copied is multiplied
    limits : {name: (least, most)} of hyperparameters
    seed : of all that is drawn here; a round draws what it would have drawn in another call
    history : of the call before, whose swarm this is: the training goes on as if it had not ended
    progress : whether a bar shows the rounds and the best fitness

    Returns
    -------
    (swarm, EvolutionHistory) : `history.values` are those that each member trained with in each round;
        `history.lineage()` is how the best one came about, a schedule of hyperparameters

    Raises
    ------
    ValueError : for fewer than two members, another number of values than members, values that are 0 or outside of
        their limits, a share of which there is nobody, factors that are not above 0, limits of unknown names, a fitness
        of another shape, and where nobody has one
    Interrupted : a KeyboardInterrupt, for Ctrl-C; its `swarm` and `history` end with the last whole round

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> x, y = np.tile(np.eye(4, dtype=np.float32), (8, 1)), np.tile(np.arange(4), 8)
    >>> sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    >>> swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 4)), sgd, swarm_size=10, sample_input=x[:1])
    >>> def train(swarm, round, values):
    ...     swarm = tn.with_hyperparameters(swarm, **values)
    ...     swarm, _ = tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=2, batch_size=8, progress=False)
    ...     return swarm, tn.accuracy(tn.predict(swarm, x), y)
    >>> values = {"learning_rate": np.geomspace(0.001, 1.0, 10)}
    >>> swarm, history = tn.evolution.population_based(swarm, train, values, rounds=3, progress=False)
    >>> history.values["learning_rate"].shape
    (3, 10)
    """
    check_whole(rounds=rounds)
    check_names(swarm)
    check_follows(swarm, history, values=values)
    members = len(swarm)
    if not isinstance(share, float) or not 0 < share <= 0.5 or share_of(share, members) < 1:
        wanted = f"share is at most a half, and of {members} members at least one"
        raise ValueError(f"{wanted} that copies and another that is copied; got {share!r}.")
    factors = tuple(np.ravel(factors).tolist())
    if not factors or not all(0 < factor < np.inf for factor in factors):
        raise ValueError(f"factors are numbers above 0, such as (0.8, 1.25), got {factors!r}.")
    if not isinstance(values, Mapping):
        raise ValueError(f"values are {{name: [member]}}, the first of what draw and grid return; got {values!r:.80}.")
    begun = {name: as_array(value, name) for name, value in values.items()}
    for name, value in begun.items():
        if np.shape(value) != (members,) or not np.issubdtype(value.dtype, np.floating):
            came = f"{np.shape(value)} of {value.dtype}"
            raise ValueError(f"{name} must be one floating-point number for each of {members} members, got {came}.")
        if not np.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinite numbers: {value!r:.80}.")
        if (value == 0).any():
            raise ValueError(f"{name} holds 0, which stays 0 whatever it is multiplied by: begin at a small number.")
    if not begun:
        raise ValueError("values are {name: [member]}, got none: there is nothing to find.")
    limits = dict(limits or {})
    if unknown := limits.keys() - begun.keys():
        raise ValueError(f"limits name {', '.join(sorted(unknown))}; the values are {', '.join(begun)}.")
    for name, pair in limits.items():
        if np.shape(pair) != (2,) or not pair[0] <= pair[1]:
            raise ValueError(f"limits are (least, most) of a hyperparameter, got {pair!r} for {name}.")
        if (begun[name] < pair[0]).any() or (begun[name] > pair[1]).any():
            raise ValueError(f"{name} begins outside of its limits {pair!r}: {values[name]!r:.80}.")
    bounds = tuple((name, tuple(map(float, pair))) for name, pair in limits.items())
    step = partial(_copied, share=share, factors=factors, limits=bounds)
    return generations_of(
        swarm,
        _Copies(step, begun),
        train,
        generations=rounds,
        seed=seed,
        history=history,
        unit="round",
        progress=progress,
    )


class _Copies:
    """What follows a round, as `generations_of` asks for it."""

    def __init__(self, step, begun):
        self.step = step
        self.begun = begun

    def follow(self, key, swarm, last):
        if last is None:
            return swarm, np.full((len(swarm), 2), NOBODY), None, self.begun
        values = {name: value[-1] for name, value in last.values.items()}
        swarm, parents, values = self.step(key, swarm, costs(last.fitness[-1], len(swarm)), values)
        return swarm, parents, None, values

    def told(self, key, swarm, fitness, state):
        return None


@partial(jax.jit, static_argnames=("share", "factors", "limits"))
def _copied(key, swarm, costs, values, *, share, factors, limits):
    """(The swarm after exploitation, its members' parents, the values after exploration)."""
    pick, move = jax.random.split(key)
    places = _exploited(pick, costs, share)
    copied = places != jnp.arange(len(swarm))
    taken = jax.tree.map(lambda leaf: leaf[places], swarm).replace(seed=swarm.seed, id=swarm.id)
    values = {name: jnp.asarray(value)[places] for name, value in values.items()}
    values = explore(move, values, copied, factors=factors, limits=dict(limits))
    return taken, jnp.stack([swarm.id[places], jnp.full_like(swarm.id, NOBODY)], axis=1), values
