"""Hyperparameter search: a grid, random draws and successive halving, each as one swarm."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core import extras
from turbanet.core.arrays import as_array, check_seed, check_whole
from turbanet.core.plan import say_once
from turbanet.core.state import check_swarm
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd


def grid(**values: Iterable) -> tuple[dict[str, np.ndarray], pd.DataFrame]:
    """Return every combination of the values: ({name: array [member]}, a pandas table of each member's values).

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
    pd = extras.pandas()

    listed = [_as_list(name, choices) for name, choices in values.items()]
    columns = zip(values, zip(*itertools.product(*listed), strict=True), strict=True)
    table = pd.DataFrame({name: _column(column) for name, column in columns}).rename_axis("member")
    return {name: table[name].to_numpy() for name in table}, table


def draw(members: int, *, seed: int = 0, **distributions: Any) -> tuple[dict[str, np.ndarray], pd.DataFrame]:
    """Return random draws in the form of `grid`, each from a list or a SciPy distribution, `loguniform(1e-4, 1e-1)`.

    Raises ValueError for a tuple of two numbers, which could mean these two or a range, and for an empty list.
    """
    pd = extras.pandas()

    check_whole(members=members)
    check_no_range(distributions)
    rng = np.random.default_rng(int(check_seed(seed)))
    table = pd.DataFrame(index=pd.RangeIndex(members, name="member"))
    for name, values in distributions.items():
        if hasattr(values, "rvs"):
            table[name] = values.rvs(size=members, random_state=rng)
        else:
            choices = _as_list(name, values)
            table[name] = _column([choices[i] for i in rng.integers(len(choices), size=members)])
    return {name: table[name].to_numpy() for name in table}, table


def _column(values):
    """Return values as a column of pandas, where None stays None."""
    pd = extras.pandas()

    return pd.Series(list(values), dtype=object if any(value is None for value in values) else None)


def check_no_range(distributions: Mapping[str, Any]) -> None:
    """Raise ValueError for a tuple of two numbers, which reads as a range but would be drawn from as two values."""
    for name, pair in distributions.items():
        if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(end, numbers.Real) for end in pair):
            low, high = pair
            known = f"for all between them give scipy.stats.loguniform({low}, {high}) or uniform({low}, {high - low})"
            raise ValueError(f"{name}={pair} may be a range or two values: {known}, for these two the list {[*pair]}.")


def _as_list(name, values):
    """Return the values of a hyperparameter as a list; ValueError for what is no sequence, and for an empty one."""
    values = np.asarray(values) if isinstance(values, jax.Array) else values
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__") or not (out := list(values)):
        raise ValueError(f"{name} must be a list of at least one value, got {values!r:.60}.")
    return out


def halving(
    swarm: TurbaTrainState, train: Callable, *, rungs: int, keep: float = 0.5
) -> tuple[TurbaTrainState, pd.DataFrame]:
    """Run successive halving (Jamieson and Talwalkar 2016): train all members, keep the best share, and repeat.

    Parameters
    ----------
    swarm : of n members
    train : train(swarm, rung) -> (swarm, score [member]), the lower the better, such as history.best().validation_loss
        (the last epoch's is NaN where `patience` has stopped a member); it trains on many machines where it calls
        `Cluster.fit` instead of `fit`
    rungs : number of calls of `train`
    keep : after each rung but the last the best ceil(keep n) members are kept, of those with a finite score

    Returns
    -------
    (the swarm of the last rung, a pandas table of rung, seed, member (its id), score)

    Raises
    ------
    ValueError : for no rung, a share outside (0, 1), where `train` returns something else, and where no score is finite
    """
    pd = extras.pandas()

    check_whole(rungs=rungs)
    if not 0 < keep < 1:
        raise ValueError(f"keep is the share that goes on, in (0, 1), got {keep}.")
    tables = []
    for rung in range(rungs):
        returned = train(swarm, rung)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(f"train returns (swarm, score [member]), got {type(returned).__name__}: {returned!r:.80}.")
        swarm, score = check_swarm(returned[0]), np.asarray(as_array(returned[1], "score"), float)
        if score.shape != (len(swarm),):
            raise ValueError(f"train must return one score for each of {len(swarm)} members, got shape {score.shape}.")
        tables.append(pd.DataFrame({"rung": rung, "seed": swarm.seed, "member": swarm.id, "score": score}))
        finite = np.isfinite(score)
        if not finite.any():
            problem = f"All {len(swarm)} members of rung {rung} have a NaN or infinite score"
            raise ValueError(f"{problem}, so none can continue: use smaller learning rates.")
        if rung < rungs - 1:
            if ids := swarm.id[~finite].tolist():
                which = f"{len(ids)} of {len(swarm)} members, such as {ids[0]}, have a NaN or infinite score"
                say_once(f"{which} and do not go on; with patience, return history.best().validation_loss.")
            survivors = min(int(np.ceil(round(keep * len(swarm), 9))), finite.sum())
            best = np.argsort(np.where(finite, score, np.inf), kind="stable")[:survivors]
            swarm = jax.tree.map(partial(jnp.take, indices=np.sort(best), axis=0), swarm)
    return swarm, pd.concat(tables, ignore_index=True)
