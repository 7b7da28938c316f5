"""A swarm over machines: a cluster of nodes on this one, series to forecast, a node that dies."""

import contextlib
import io
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from turbanet.cluster.engine import started

ONE, WHOLE, KILLED = "one process", "two nodes", "a node killed"
ECHO = 0.6  # the strongest coefficient of a series
STORE = {"object_store_memory": 2**27}  # bytes of a node, which holds a shard's arguments and little else
DRIVER = {"include_dashboard": False, "num_cpus": 0}  # its node trains nothing


def returns(ids, *, days: int, seed: int) -> np.ndarray:
    """Simulated daily returns, float32 [series, day], in units of each series' own volatility.

    Each is an autoregression of the first order with a coefficient of its own, and is decided by its id alone.
    """
    echo = np.empty(len(ids))
    values = np.empty((days, len(ids)))  # the noise first
    for place, id in enumerate(ids):
        random = np.random.default_rng([seed, int(id)])
        echo[place] = random.uniform(-ECHO, ECHO)
        values[:, place] = random.normal(size=days)
    values[0] /= np.sqrt(1 - echo**2)  # as if there had been days before
    for day in range(1, days):
        values[day] += echo * values[day - 1]
    return values.T.astype(np.float32)


def series(ids, *, days: int, test_days: int, window: int, seed: int) -> dict[str, Any]:
    """What `turbanet.cluster.fit` reads of these ids: x [member, row, window, 1], y [member, row, 1], predict as x.

    The last `test_days` days are those that are predicted; the others are trained on.
    """
    x, y = _windows(returns(ids, days=days, seed=seed), window)
    return {"x": x[:, :-test_days], "y": y[:, :-test_days], "per_member": True, "predict": x[:, -test_days:]}


def networks(ids, *, hidden: int, window: int, learning_rate: float, seed: int):
    """The LSTMs of these ids, before their training."""
    import optax

    import turbanet as tn

    sample = np.zeros((1, window, 1), np.float32)
    return tn.TurbaTrainState.swarm(tn.LSTM(hidden), optax.adam(learning_rate), ids, sample_input=sample, seed=seed)


def one_process(make: Callable, data: Callable, ids, **how: Any):
    """(trained swarm, `History`, predictions [member, row, 1]): what a worker does of a shard, in this process."""
    import turbanet as tn

    parts = data(ids)
    x, y, wanted = (parts.pop(name) for name in ("x", "y", "predict"))
    swarm, history = tn.fit(make(ids), x, y, tn.mse, progress=False, **parts, **how)
    return swarm, history, np.asarray(tn.predict(swarm, wanted, per_member=True))


def timed(call: Callable) -> tuple[float, Any]:
    """(seconds, what it returns) of a call."""
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def errors(predictions, ids, *, days: int, window: int, seed: int) -> dict[str, np.ndarray]:
    """Mean squared errors on the predicted days, {forecast: [series]}: the networks', of no change, of the last return.

    predictions : [series, day, 1], of the last days
    """
    x, y = (part[:, -predictions.shape[1] :] for part in _windows(returns(ids, days=days, seed=seed), window))
    forecasts = {"LSTM": predictions, "zero": np.zeros_like(y), "persistence": x[:, :, -1]}
    return {name: ((each - y) ** 2).mean((1, 2)) for name, each in forecasts.items()}


def difference(one, other) -> float:
    """The largest difference between two swarms' parameters."""
    import jax

    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def killed(there: "Nodes", run: Callable, folder: Path, *, done: int) -> tuple[Any, float]:
    """(what `run()` returns, when a node was killed in it, seconds since 1970); another one takes its place.

    The kill comes once so many shards in the run's folder are done and all nodes' own have kept a checkpoint.
    Raises RuntimeError where the run ends before that.
    """
    with contextlib.redirect_stdout(io.StringIO()), ThreadPoolExecutor() as pool:  # Ray prints a dead node's last lines
        under_way = pool.submit(run)  # a test cluster is changed by the main thread alone
        while not under_way.done() and not _is_in_the_middle(folder, done, len(there.nodes)):
            time.sleep(0.02)
        if under_way.done():
            under_way.result()
            raise RuntimeError(f"The run ended before {done} shards were done and others under way: make it longer.")
        when = time.time()
        there.replace_one()
        return under_way.result(), when


def attempts(history, *, killed_at: float = np.inf):
    """All attempts of a run over a cluster, a pandas table: shard, worker, begin, end, lost (whether a kill ended it).

    Seconds count from the first attempt's begin. killed_at : when a node was killed, seconds since 1970
    """
    import pandas as pd

    from turbanet.cluster.shards import ATTEMPTS

    lines = []
    for one in history.table.itertuples():
        lines.append((one.shard, one.process, one.begin, one.begin + one.seconds, False))
        counted = (history.folder / "shards" / f"{one.shard:06d}" / ATTEMPTS).iterdir()
        lost = sorted(file.stat().st_mtime for file in counted)[:-1]  # each was made when its attempt began
        lines += [(one.shard, _of_the_dead(history.table, killed_at), begin, killed_at, True) for begin in lost]
    table = pd.DataFrame(lines, columns=["shard", "process", "begin", "end", "lost"]).sort_values("begin")
    table["worker"] = 1 + pd.factorize(table.process)[0]
    table[["begin", "end"]] -= table.begin.min()
    return table[["shard", "worker", "begin", "end", "lost"]].reset_index(drop=True)


def _windows(values, window):
    """Windows [series, row, window, 1] of returns [series, day], and the return after each, [series, row, 1]."""
    whole = np.lib.stride_tricks.sliding_window_view(values, window + 1, axis=1)
    return whole[..., :-1, None].copy(), whole[..., -1:].copy()


def _is_in_the_middle(folder, done, workers):
    """Whether so many shards in a run's folder are done, and so many others have kept a checkpoint."""
    ended = {file.parent.name for file in folder.glob("shards/*/shard.json")}
    kept = {file.parts[-3] for file in folder.glob("shards/*/training/*") if file.name.isdigit() and file.name != "0"}
    return len(ended) >= done and len(kept - ended) >= workers


def _of_the_dead(table, killed_at):
    """The process that ended a shard before the kill and began none after it; -1 where none has."""
    last = table.assign(end=table.begin + table.seconds).groupby("process").end.max()
    gone = last[last < killed_at]
    return int(gone.idxmax()) if len(gone) else -1


class Nodes:
    """A Ray cluster on this machine, of this process: its own node without a CPU, and nodes with one worker each.

    startup_seconds : what it took to begin
    """

    def __init__(self, count: int):
        import ray
        from ray.cluster_utils import Cluster

        begin = time.perf_counter()
        self.cluster = started(Cluster, initialize_head=True, head_node_args=DRIVER | STORE)
        self.nodes = [self._another() for _ in range(count)]
        ray.init(self.cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
        self.startup_seconds = time.perf_counter() - begin

    def _another(self):
        return started(self.cluster.add_node, num_cpus=1, **STORE)

    def replace_one(self) -> None:
        """Kill a node, and add another in its place."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        self.nodes.append(self._another())

    def close(self) -> None:
        """Leave nothing running."""
        import ray

        ray.shutdown()
        self.cluster.shutdown()
