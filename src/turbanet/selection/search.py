"""Which hyperparameters: a grid, random draws, and successive halving, each as one swarm."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

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

    table = pd.DataFrame(list(itertools.product(*values.values())), columns=list(values)).rename_axis("member")
    return {name: table[name].to_numpy() for name in table}, table


def draw(members: int, *, seed: int = 0, **distributions: Any) -> tuple[dict[str, np.ndarray], "pd.DataFrame"]:
    """Random search: as `grid`, each value drawn from a list or a SciPy distribution, `loguniform(1e-4, 1e-1)`."""
    import pandas as pd

    rng = np.random.default_rng(seed)
    table = pd.DataFrame(index=pd.RangeIndex(members, name="member"))
    for name, values in distributions.items():
        if hasattr(values, "rvs"):
            table[name] = values.rvs(size=members, random_state=rng)
        else:
            table[name] = [values[i] for i in rng.integers(len(values), size=members)]
    return {name: table[name].to_numpy() for name in table}, table


def halving(
    swarm: TurbaTrainState, train: Callable, *, rungs: int, keep: float = 0.5
) -> tuple[TurbaTrainState, "pd.DataFrame"]:
    """Successive halving (Jamieson and Talwalkar 2016): train all, keep the best share, train those on, and again.

    Parameters
    ----------
    swarm : of n members
    train : train(swarm, rung) -> (swarm, score [member]), the lower the better, NaN the worst; by `Cluster.fit` in the
        place of `fit` it trains on many machines
    rungs : how often to train
    keep : the best ceil(keep n) members go on after each rung but the last

    Returns
    -------
    (the swarm of the last rung, a pandas table of rung, seed, member (its id), score)

    Raises
    ------
    ValueError : for no rung, a share outside (0, 1) and scores of another number of members
    """
    import pandas as pd

    if rungs < 1 or not 0 < keep < 1:
        raise ValueError(f"Halving needs at least one rung and a share to keep in (0, 1), got {rungs} and {keep}.")
    tables = []
    for rung in range(rungs):
        swarm, score = train(swarm, rung)
        score = np.asarray(score)
        if score.shape != (len(swarm),):
            raise ValueError(f"train must return one score for each of {len(swarm)} members, got shape {score.shape}.")
        tables.append(pd.DataFrame({"rung": rung, "seed": swarm.seed, "member": swarm.id, "score": score}))
        if rung < rungs - 1:
            best = np.argsort(score)[: int(np.ceil(keep * len(swarm)))]  # NaN comes last
            swarm = jax.tree.map(partial(jnp.take, indices=np.sort(best), axis=0), swarm)
    return swarm, pd.concat(tables, ignore_index=True)
