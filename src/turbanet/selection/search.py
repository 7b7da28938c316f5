"""Which hyperparameters: a grid, random draws, and successive halving, each as one swarm."""

import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.training.arrays import check_whole
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd


def grid(**values: Iterable) -> tuple[dict[str, np.ndarray], "pd.DataFrame"]:
    """Every combination of the values: ({name: array [member]}, a pandas table of who is who).

    `swarm = with_hyperparameters(swarm, **arrays)` makes a grid search of a swarm of that many members.

    Examples
    --------
    >>> import turbanet as tn
    >>> arrays, table = tn.grid(learning_rate=[0.1, 0.01], weight_decay=[0.0, 0.001])
    >>> print(table)
            learning_rate  weight_decay
    member
    0                0.10         0.000
    1                0.10         0.001
    2                0.01         0.000
    3                0.01         0.001
    >>> print(arrays["learning_rate"])
    [0.1  0.1  0.01 0.01]
    """
    import pandas as pd

    listed = [_listed(name, some) for name, some in values.items()]
    table = pd.DataFrame(list(itertools.product(*listed)), columns=list(values)).rename_axis("member")
    return {name: table[name].to_numpy() for name in table}, table


def draw(members: int, *, seed: int = 0, **distributions: Any) -> tuple[dict[str, np.ndarray], "pd.DataFrame"]:
    """Random search: as `grid`, each value drawn from a list or a SciPy distribution, `loguniform(1e-4, 1e-1)`.

    Raises ValueError for a tuple of two numbers, which may mean these two or a range, and for what holds no values.
    """
    import pandas as pd

    check_whole(members=members)
    check_no_range(distributions)
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(index=pd.RangeIndex(members, name="member"))
    for name, values in distributions.items():
        if hasattr(values, "rvs"):
            table[name] = values.rvs(size=members, random_state=rng)
        else:
            some = _listed(name, values)
            table[name] = [some[i] for i in rng.integers(len(some), size=members)]
    return {name: table[name].to_numpy() for name in table}, table


def check_no_range(distributions: Mapping[str, Any]) -> None:
    """ValueError for a tuple of two numbers to draw from, which reads as a range and has only its ends."""
    for name, pair in distributions.items():
        if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(end, numbers.Real) for end in pair):
            low, high = pair
            known = f"for all between them give scipy.stats.loguniform({low}, {high}) or uniform({low}, {high - low})"
            raise ValueError(f"{name}={pair} may be a range or two values: {known}, for these two the list {[*pair]}.")


def _listed(name, values):
    """The values of a hyperparameter, one after the other; ValueError for what holds none."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__") or not (some := list(values)):
        raise ValueError(f"{name} must be a list of at least one value, got {values!r:.60}.")
    return some


def halving(
    swarm: TurbaTrainState, train: Callable, *, rungs: int, keep: float = 0.5
) -> tuple[TurbaTrainState, "pd.DataFrame"]:
    """Successive halving (Jamieson and Talwalkar 2016): train all, keep the best share, train those on, and again.

    Parameters
    ----------
    swarm : of n members
    train : train(swarm, rung) -> (swarm, score [member]), the lower the better; by `Cluster.fit` in the place of `fit`
        it trains on many machines
    rungs : how often to train
    keep : the best ceil(keep n) members go on after each rung but the last, none of them with a NaN or infinite score

    Returns
    -------
    (the swarm of the last rung, a pandas table of rung, seed, member (its id), score)

    Raises
    ------
    ValueError : for no rung, a share outside (0, 1), scores of another number of members, and where all are NaN or
        infinite
    """
    import pandas as pd

    if rungs < 1 or not 0 < keep < 1:
        raise ValueError(f"Halving needs at least one rung and a share to keep in (0, 1), got {rungs} and {keep}.")
    tables = []
    for rung in range(rungs):
        swarm, score = train(swarm, rung)
        score = np.asarray(score, float)
        if score.shape != (len(swarm),):
            raise ValueError(f"train must return one score for each of {len(swarm)} members, got shape {score.shape}.")
        tables.append(pd.DataFrame({"rung": rung, "seed": swarm.seed, "member": swarm.id, "score": score}))
        finite = np.isfinite(score)
        if not finite.any():
            came = f"All {len(swarm)} members of rung {rung} have a NaN or infinite score"
            raise ValueError(f"{came}: nobody can go on, take smaller learning rates.")
        if rung < rungs - 1:
            most = min(int(np.ceil(keep * len(swarm))), finite.sum())
            best = np.argsort(np.where(finite, score, np.inf), kind="stable")[:most]
            swarm = jax.tree.map(partial(jnp.take, indices=np.sort(best), axis=0), swarm)
    return swarm, pd.concat(tables, ignore_index=True)
