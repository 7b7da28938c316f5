"""What a run over a cluster has left in its folder: a table of shards in memory, all else read when it is asked for."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from turbanet.cluster import shards
from turbanet.training.history import History
from turbanet.training.metrics import ONE
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class ClusterHistory:
    """What a run over a cluster cost, shard by shard.

    table : pandas, a line a shard: shard, members, first and last (ids), out (its folder of results), node, process,
        block, attempts, resumed_at (epochs, or steps of long ones, that an earlier attempt had kept), begin (seconds
        since 1970) and seconds of the last attempt, compile_seconds and steady_seconds of all, resumed (whether an
        earlier call had finished it)
    folder : where the losses of all epochs are
    """

    table: "pd.DataFrame"
    folder: Any

    def frame(self) -> "pd.DataFrame":
        """The losses and metrics of all members and epochs, as `History.frame` has them; of all shards at once."""
        return _tables(self, shards.LOSSES)

    def whole(self) -> History:
        """The same as a `History` of all members, in this process's memory; its seconds are all workers' sums."""
        each = [shards.kept_table(file) for file in _files(self, shards.LOSSES)]
        widths = self.table.members.tolist()
        found = {name: _beside(each, widths, name) for name in each[0] if name not in ("epoch", "seed", "member")}
        told: dict[str, Any] = {name: found.pop(name, None) for name in ("train_loss", "validation_loss")}
        named = {"seed": "seed", "member": "member", "begun": "epoch"}  # of their first lines
        first = [table.iloc[:width] for table, width in zip(each, widths, strict=True)]
        told |= {name: np.concatenate([table[column] for table in first]) for name, column in named.items()}
        told |= {name: float(self.table[name].sum()) for name in ("compile_seconds", "steady_seconds")}
        told["epochs"] = _tables(self, shards.SCORES).epoch.to_numpy() + 1 - told["begun"]
        told["validation_metric"] = found.get(ONE, found or None)
        return History(**told, plan=None)


@dataclasses.dataclass(frozen=True)
class ClusterResults:
    """What came out of a run over a cluster, in its folder, by shards in the order of their members.

    table : as of `ClusterHistory`
    folder : where the shards are, each with scores and predictions in Parquet and weights by Orbax
    like : one member before its training, with the functions of all
    """

    table: "pd.DataFrame"
    folder: Any
    like: TurbaTrainState

    def scores(self) -> "pd.DataFrame":
        """Each member's last epoch: seed, member, epoch, train_loss, validation_loss, metrics."""
        return _tables(self, shards.SCORES)

    def predictions(self) -> np.ndarray:
        """Every member's predictions [member, ...]; FileNotFoundError where the run was given nothing to predict."""
        return np.concatenate([shards.kept_predictions(file) for file in _files(self, shards.PREDICTIONS)])

    def swarm(self) -> TurbaTrainState:
        """All trained members, in this process's memory."""
        return jax.tree.map(lambda *leaves: jax.numpy.concatenate(leaves), *self)

    def __iter__(self) -> Iterator[TurbaTrainState]:
        """The trained members of one shard after the other."""
        return (shards.kept_swarm(folder, self.like) for folder in _files(self, shards.SWARM))


class ShardsFailed(RuntimeError):
    """Some shards have failed at every attempt, the others are done.

    results, history : of the others; failures : {shard: (ids int [member], traceback)}
    """

    def __init__(self, results: ClusterResults, history: ClusterHistory, failures: dict[int, tuple[Any, str]]):
        number, (ids, told) = next(iter(failures.items()))
        last = told.strip().splitlines()[-1]
        who = f"Shard {number}, members {ids[0]} to {ids[-1]}, failed at every attempt: {last}"
        more = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        done = f"The {len(results.table)} others are done, and the same call tries those that failed again"
        super().__init__(f"{who}{more}. {done}.\n\n{told}")
        self.results = results
        self.history = history
        self.failures = failures


def _files(run, name):
    each = zip(run.table.shard, run.table.out, strict=True)
    return [run.folder / "shards" / f"{number:06d}" / out / name for number, out in each]


def _beside(tables, widths, name):
    """A column of the losses of all shards of such `widths`, [epoch, member]; NaN after a shard's last epoch."""
    parts = [table[name].to_numpy().reshape(-1, width) for table, width in zip(tables, widths, strict=True)]
    most = max(map(len, parts))
    return np.hstack([np.pad(part, ((0, most - len(part)), (0, 0)), constant_values=np.nan) for part in parts])


def _tables(run, name):
    import pandas as pd

    return pd.concat(map(shards.kept_table, _files(run, name)), ignore_index=True)
