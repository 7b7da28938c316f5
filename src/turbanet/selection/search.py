"""Which hyperparameters: a grid, random draws, and successive halving, each as one swarm."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def grid(**values):
    """Every combination of the values: ({name: array [member]}, a pandas table of who is who).

    `swarm = with_hyperparameters(swarm, **arrays)` makes a grid search of a swarm of that many members.
    """
    import pandas as pd

    table = pd.DataFrame(list(itertools.product(*values.values())), columns=list(values)).rename_axis("member")
    return {name: table[name].to_numpy() for name in table}, table


def draw(members: int, *, seed: int = 0, **distributions):
    """Random search: as `grid`, each value drawn from a list or a SciPy distribution, `loguniform(1e-4, 1e-1)`."""
    import pandas as pd

    rng, drawn = np.random.default_rng(seed), {}
    for name, values in distributions.items():
        if hasattr(values, "rvs"):
            drawn[name] = values.rvs(size=members, random_state=rng)
        else:
            drawn[name] = [values[i] for i in rng.integers(len(values), size=members)]
    table = pd.DataFrame(drawn).rename_axis("member")
    return {name: table[name].to_numpy() for name in table}, table


def halving(swarm, train, *, rungs: int, keep: float = 0.5):
    """Successive halving (Jamieson and Talwalkar 2016): train all, keep the best share, train those on, and again.

    train(swarm, rung) -> (swarm, score [member]), the lower the better, NaN the worst. Of n members the best
    ceil(keep n) go on after each rung but the last. Returns (the swarm of the last rung, a pandas table of rung, seed,
    member (its id), score).
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
        names = {"seed": np.asarray(swarm.seed), "member": np.asarray(swarm.id)}
        tables.append(pd.DataFrame({"rung": rung, **names, "score": score}))
        if rung < rungs - 1:
            best = np.sort(np.argsort(np.where(np.isnan(score), np.inf, score))[: int(np.ceil(keep * len(swarm)))])
            swarm = jax.tree.map(partial(jnp.take, indices=best, axis=0), swarm)
    return swarm, pd.concat(tables, ignore_index=True)
