"""Results of a run over a cluster: a table of shards in memory, all else read from its folder on request."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from turbanet.cluster import shards
from turbanet.core import extras
from turbanet.core.metrics import ONE
from turbanet.training.history import History
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class ClusterHistory:
    """Costs of a run over a cluster, by shard, and its losses.

    table : pandas, a row per shard: shard, members, first and last (ids), out (its folder of results), node, process,
        block, attempts, resumed_at (epochs, or steps of long epochs, of the checkpoint that an earlier attempt had
        written), begin (seconds since 1970) and seconds of the last attempt, compile_seconds and steady_seconds of all
        attempts, resumed (whether an earlier call had finished the shard)
    folder : of the run, with the losses of all epochs
    followed : what `History.best` goes by (see `History`)
    """

    table: "pd.DataFrame"
    folder: Any
    followed: tuple[str, str, float]

    def frame(self) -> "pd.DataFrame":
        """Return the losses and metrics of all members and epochs as `History.frame` has them, shard after shard."""
        return _concatenate(self, shards.LOSSES)

    def whole(self) -> History:
        """Return a `History` of all members, in this process's memory; its seconds are sums over the workers."""
        tables = [shards.kept_table(file) for file in _files(self, shards.LOSSES)]
        widths = self.table.members.tolist()
        metrics = {name: _stack(tables, widths, name) for name in tables[0] if name not in ("epoch", "seed", "member")}
        fields: dict[str, Any] = {name: metrics.pop(name, None) for name in ("train_loss", "validation_loss")}
        columns = {"seed": "seed", "member": "member", "begun": "epoch"}  # of each member's first epoch
        first = [table.iloc[:width] for table, width in zip(tables, widths, strict=True)]
        fields |= {name: np.concatenate([table[column] for table in first]) for name, column in columns.items()}
        fields |= {name: float(self.table[name].sum()) for name in ("compile_seconds", "steady_seconds")}
        fields["epochs"] = _concatenate(self, shards.SCORES).epoch.to_numpy() + 1 - fields["begun"]
        fields["validation_metric"] = metrics[ONE] if metrics.keys() == {ONE} else metrics or None
        return History(**fields, plan=None, followed=self.followed)


@dataclasses.dataclass(frozen=True)
class ClusterResults:
    """Results of a run over a cluster, in its folder, by shards in the order of their members.

    table : as of `ClusterHistory`
    folder : of the run; each shard has scores in Parquet, predictions as a NumPy file and weights by Orbax
    like : one member before its training, with the functions that all share
    """

    table: "pd.DataFrame"
    folder: Any
    like: TurbaTrainState

    def scores(self) -> "pd.DataFrame":
        """Return each member's last epoch: seed, member, epoch, train_loss, validation_loss, metrics.

        With `patience` the weights are those of the best epoch, which is in `history.whole().best()`.
        """
        return _concatenate(self, shards.SCORES)

    def predictions(self) -> np.ndarray:
        """Return every member's predictions [member, ...]; FileNotFoundError if the run had nothing to predict."""
        return np.concatenate([shards.kept_predictions(file) for file in _files(self, shards.PREDICTIONS)])

    def swarm(self) -> TurbaTrainState:
        """Return all trained members, in this process's memory."""
        return jax.tree.map(lambda *leaves: jax.numpy.concatenate(leaves), *self)

    def __iter__(self) -> Iterator[TurbaTrainState]:
        """Iterate over the trained members of each shard."""
        return (shards.kept_swarm(folder, self.like) for folder in _files(self, shards.SWARM))


class ShardsFailed(RuntimeError):
    """Raised when some shards failed at every attempt, after the others are done.

    results, history : of the other shards; failures : {shard: (ids int [member], traceback)}
    """

    def __init__(self, results: ClusterResults, history: ClusterHistory, failures: dict[int, tuple[Any, str]]):
        number, (ids, traceback) = next(iter(failures.items()))
        last = traceback.strip().splitlines()[-1].rstrip(".")
        problem = f"Shard {number}, members {ids[0]} to {ids[-1]}, failed at every attempt: {last}"
        more = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        done = f"The {len(results.table)} others are done, and the same call tries those that failed again"
        super().__init__(f"{problem}{more}. {done}.\n\n{traceback}")
        self.results = results
        self.history = history
        self.failures = failures


def _files(run, name):
    outputs = zip(run.table.shard, run.table.out, strict=True)
    return [run.folder / "shards" / f"{number:06d}" / out / name for number, out in outputs]


def _stack(tables, widths, name):
    """Return a column of the losses, of shards of `widths` members, [epoch, member]; NaN after a shard's last epoch."""
    parts = [table[name].to_numpy().reshape(-1, width) for table, width in zip(tables, widths, strict=True)]
    most = max(map(len, parts))
    return np.hstack([np.pad(part, ((0, most - len(part)), (0, 0)), constant_values=np.nan) for part in parts])


def _concatenate(run, name):
    pd = extras.pandas()

    return pd.concat(map(shards.kept_table, _files(run, name)), ignore_index=True)
