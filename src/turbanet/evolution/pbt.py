"""Population-based training: the worst members copy the best ones and explore hyperparameters near theirs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core.arrays import as_array, check_whole
from turbanet.core.state import Swarm
from turbanet.evolution.genealogy import NOBODY, EvolutionHistory
from turbanet.evolution.generations import check_follows, check_names, generations_of
from turbanet.evolution.genetics import costs, ranked, share_of


def exploit(key: jax.Array, costs: jax.Array, share: float) -> jax.Array:
    """Return the position of the member whose weights each member continues with, int [member].

    costs : of `genetics.costs`; the smallest is the fittest, infinite without a fitness

    The worst `share` of the members each copy one of the best `share`, drawn uniformly (truncation selection: Jaderberg
    et al. 2017); the others keep their own. Members without a fitness copy too, and are never copied.
    """
    draw_key, tie_key = jax.random.split(key)
    members = len(costs)
    cut = int(share_of(share, members))
    order, fit = ranked(tie_key, costs)  # fit: the number of members with a fitness
    rank = jnp.argsort(order)
    drawn = jax.random.randint(draw_key, (members,), 0, jnp.minimum(fit, cut))
    return jnp.where(rank >= jnp.minimum(members - cut, fit), order[drawn], jnp.arange(members))


def explore(
    key: jax.Array, values: dict[str, Any], copied: Any, *, factors: Sequence[float], limits: Mapping[str, tuple]
) -> dict[str, jax.Array]:
    """Multiply the hyperparameters of members that copied by randomly drawn factors.

    Parameters
    ----------
    key : JAX random key
    values : hyperparameters, {name: floats [member]}
    copied : bool [member], whether the member copied another one; the values of the others do not change
    factors : one of them is drawn for each value
    limits : {name: (least, most)}, to which products are clipped

    Returns
    -------
    {name: [member]}
    """
    keys = dict(zip(sorted(values), jax.random.split(key, len(values)), strict=True))

    def explored(name, value):
        product = value * jax.random.choice(keys[name], jnp.asarray(factors, value.dtype), value.shape)
        return jnp.where(copied, jnp.clip(product, *limits.get(name, (None, None))), value)

    return {name: explored(name, value) for name, value in values.items()}


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
    """Train a swarm and adapt its members' hyperparameters as it trains (Jaderberg et al. 2017).

    Between two rounds the worst members copy the weights, optimizer states and collections of the best, and their
    hyperparameters multiplied by random factors. Members keep their ids, and so their own random numbers.

    Parameters
    ----------
    swarm : TurbaTrainState of at least two members
    train : train(swarm, round, values) -> (swarm, fitness [member]); higher is better, NaN for a member without
        fitness. A round may be `fit(with_hyperparameters(swarm, **values), ...)`,
        `train_agents(env, config._replace(**values), swarm)`, or any other training with these values
    values : {name: [member]}, the initial hyperparameters, none of them 0, such as the first item that `draw` and
        `grid` return; a call with a history continues with the values of its last round
    rounds : number of rounds
    share : share of the members that copy, and of those that are copied
    factors : each hyperparameter of a member that copied is multiplied by one of them
    limits : {name: (least, most)} of hyperparameters
    seed : seed of the copies and factors; those of a round do not depend on the call that it is part of
    history : the history of an earlier call that returned this swarm; the training continues as if uninterrupted
    progress : whether to show a bar with the rounds and the best fitness

    Returns
    -------
    (swarm, EvolutionHistory) : `history.values` holds the values that each member trained with in each round;
        `history.lineage()` has those of the best member and its ancestors, a schedule of hyperparameters

    Raises
    ------
    ValueError : for fewer than two members, another number of values than members, values that are 0 or outside their
        limits, a share of less than one member, factors that are not positive, limits of unknown names, a fitness of
        another shape, and a round in which no member has a fitness
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
        required = f"share is at most a half, and of {members} members at least one"
        raise ValueError(f"{required} that copies and another that is copied; got {share!r}.")
    factors = tuple(np.ravel(factors).tolist())
    if not factors or not all(0 < factor < np.inf for factor in factors):
        raise ValueError(f"factors are numbers above 0, such as (0.8, 1.25), got {factors!r}.")
    if not isinstance(values, Mapping):
        raise ValueError(f"values are {{name: [member]}}, the first of what draw and grid return; got {values!r:.80}.")
    initial = {name: as_array(value, name) for name, value in values.items()}
    for name, value in initial.items():
        if np.shape(value) != (members,) or not np.issubdtype(value.dtype, np.floating):
            received = f"{np.shape(value)} of {value.dtype}"
            raise ValueError(f"{name} must be one floating-point number for each of {members} members, got {received}.")
        if not np.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinite numbers: {value!r:.80}.")
        if (value == 0).any():
            raise ValueError(f"{name} holds 0, which stays 0 whatever it is multiplied by: begin at a small number.")
    if not initial:
        raise ValueError("values are {name: [member]}, got none: there is nothing to find.")
    limits = dict(limits or {})
    if unknown := limits.keys() - initial.keys():
        raise ValueError(f"limits name {', '.join(sorted(unknown))}; the values are {', '.join(initial)}.")
    for name, pair in limits.items():
        if np.shape(pair) != (2,) or np.asarray(pair).dtype.kind not in "iuf" or not pair[0] <= pair[1]:
            wanted = "(least, most) of a hyperparameter, numbers, -np.inf and np.inf for none"
            raise ValueError(f"limits are {wanted}; got {pair!r} for {name}.")
        least, most = map(float, pair)  # which NumPy compares in the values' precision
        if (initial[name] < least).any() or (initial[name] > most).any():
            raise ValueError(f"{name} begins outside of its limits {pair!r}: {values[name]!r:.80}.")
    bounds = tuple((name, tuple(map(float, pair))) for name, pair in limits.items())

    def follow(key, swarm, last):
        if last is None:
            return swarm, np.full((members, 2), NOBODY), None, initial
        values = {name: value[-1] for name, value in last.values.items()}
        fit = costs(last.fitness[-1], members)
        swarm, parents, values = _copied(key, swarm, fit, values, share=share, factors=factors, limits=bounds)
        return swarm, parents, None, values

    return generations_of(
        swarm,
        follow,
        train,
        generations=rounds,
        seed=seed,
        history=history,
        unit="round",
        progress=progress,
    )


@partial(jax.jit, static_argnames=("share", "factors", "limits"))
def _copied(key, swarm, costs, values, *, share, factors, limits):
    """Return the swarm after exploitation, its members' parents, and the values after exploration."""
    exploit_key, explore_key = jax.random.split(key)
    sources = exploit(exploit_key, costs, share)
    copied = sources != jnp.arange(len(swarm))
    own = {"seed": swarm.seed, "id": swarm.id, "member": swarm.member}  # a member's constants stay its own
    exploited = jax.tree.map(lambda leaf: leaf[sources], swarm).replace(**own)
    values = {name: jnp.asarray(value)[sources] for name, value in values.items()}
    values = explore(explore_key, values, copied, factors=factors, limits=dict(limits))
    return exploited, jnp.stack([swarm.id[sources], jnp.full_like(swarm.id, NOBODY)], axis=1), values
