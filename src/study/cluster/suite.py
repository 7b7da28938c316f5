"""A swarm over machines: a cluster of nodes on this machine, series to forecast, a node that dies."""

import contextlib
import io
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from turbanet.cluster.engine import started

ONE, WHOLE, KILLED = "one process", "all nodes", "a node killed"
ECHO = 0.6  # the strongest coefficient of a series
STORE = {"object_store_memory": 2**27}  # bytes of a node, which holds a shard's arguments and little else
DRIVER = {"include_dashboard": False, "num_cpus": 0}  # its node trains nothing


def returns(ids, *, days: int, seed: int) -> np.ndarray:
    """Simulated daily returns, float32 [series, day], in units of each series' own volatility.

    Each is an autoregression of first order with its own coefficient and depends only on its id.
    """
    echo = np.empty(len(ids))
    values = np.empty((days, len(ids)))  # the noise first
    for index, id in enumerate(ids):
        random = np.random.default_rng([seed, int(id)])
        echo[index] = random.uniform(-ECHO, ECHO)
        values[:, index] = random.normal(size=days)
    values[0] /= np.sqrt(1 - echo**2)  # the stationary distribution
    for day in range(1, days):
        values[day] += echo * values[day - 1]
    return values.T.astype(np.float32)


def series(ids, *, days: int, test_days: int, window: int, seed: int) -> dict[str, Any]:
    """Make `turbanet.cluster.fit`'s data of these ids: x [member, row, window, 1], y [member, row, 1], predict as x.

    The last `test_days` days are predicted, the others are for training.
    """
    x, y = _windows(returns(ids, days=days, seed=seed), window)
    return {"x": x[:, :-test_days], "y": y[:, :-test_days], "per_member": True, "predict": x[:, -test_days:]}


def networks(ids, *, hidden: int, window: int, learning_rate: float, seed: int):
    """Make the untrained LSTMs of these ids."""
    import optax

    import turbanet as tn

    sample = np.zeros((1, window, 1), np.float32)
    return tn.TurbaTrainState.swarm(tn.LSTM(hidden), optax.adam(learning_rate), ids, sample_input=sample, seed=seed)


def one_process(make: Callable, data: Callable, ids, **kwargs: Any):
    """Train as a worker does, in this process: (trained swarm, `History`, predictions [member, row, 1])."""
    import turbanet as tn

    parts = data(ids)
    x, y, predict = (parts.pop(name) for name in ("x", "y", "predict"))
    swarm, history = tn.fit(make(ids), x, y, tn.mse, progress=False, **parts, **kwargs)
    return swarm, history, np.asarray(tn.predict(swarm, predict, per_member=True))


def timed(call: Callable) -> tuple[float, Any]:
    """Time a call: (seconds, its result)."""
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def errors(predictions, ids, *, days: int, window: int, seed: int) -> dict[str, np.ndarray]:
    """Compute mean squared errors of the networks, of zero and of the last return: {forecast: [series]}.

    predictions : [series, day, 1], the networks', of the last days
    """
    x, y = (part[:, -predictions.shape[1] :] for part in _windows(returns(ids, days=days, seed=seed), window))
    forecasts = {"LSTM": predictions, "zero": np.zeros_like(y), "persistence": x[:, :, -1]}
    return {name: ((each - y) ** 2).mean((1, 2)) for name, each in forecasts.items()}


def difference(one, other) -> float:
    """Return the largest absolute difference between two swarms' parameters."""
    import jax

    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def killed(cluster: "Nodes", run: Callable, folder: Path, *, done: int) -> tuple[Any, float]:
    """Kill and replace a node during `run()`: (result of `run()`, time of the kill in seconds since 1970).

    The kill comes once `done` shards in the run's folder are complete and the nodes' current ones have checkpoints.
    Raises RuntimeError where the run ends before that.
    """
    with contextlib.redirect_stdout(io.StringIO()), ThreadPoolExecutor() as pool:  # Ray prints a dead node's last lines
        future = pool.submit(run)  # Ray changes a test cluster only in the main thread
        hit = partial(_is_in_the_middle, folder, done, len(cluster.nodes))
        while not future.done() and not cluster.suspend_one(hit):
            time.sleep(0.02)
        if future.done():
            future.result()
            raise RuntimeError(f"The run ended before {done} shards were done and others under way: make it longer.")
        when = time.time()
        cluster.replace_one()
        return future.result(), when


def attempts(history, *, killed_at: float = np.inf):
    """Tabulate all attempts of a run on a cluster: shard, worker, begin, end, lost (whether a kill ended it).

    Seconds count from the first attempt's begin. killed_at : time of the kill in seconds since 1970
    """
    import pandas as pd

    from turbanet.cluster.shards import ATTEMPTS

    lines = []
    for one in history.table.itertuples():
        lines.append((one.shard, one.process, one.begin, one.begin + one.seconds, False))
        files = (history.folder / "shards" / f"{one.shard:06d}" / ATTEMPTS).iterdir()
        lost = sorted(file.stat().st_mtime for file in files)[:-1]  # each file was made when its attempt began
        lines += [(one.shard, _killed_process(history.table, killed_at), begin, killed_at, True) for begin in lost]
    table = pd.DataFrame(lines, columns=["shard", "process", "begin", "end", "lost"]).sort_values("begin")
    table["worker"] = 1 + pd.factorize(table.process)[0]
    table[["begin", "end"]] -= table.begin.min()
    return table[["shard", "worker", "begin", "end", "lost"]].reset_index(drop=True)


def _windows(values, window):
    """Make windows [series, row, window, 1] of returns [series, day] and the return after each, [series, row, 1]."""
    whole = np.lib.stride_tricks.sliding_window_view(values, window + 1, axis=1)
    return whole[..., :-1, None].copy(), whole[..., -1:].copy()


def _is_in_the_middle(folder, done, workers):
    """Whether `done` shards in a run's folder are complete and as many others as workers have checkpoints."""
    ended = {file.parent.name for file in folder.glob("shards/*/shard.json")}
    kept = {file.parts[-3] for file in folder.glob("shards/*/training/*") if file.name.isdigit() and file.name != "0"}
    return len(ended) >= done and len(kept - ended) >= workers


def _killed_process(table, killed_at):
    """Find the process that ended no shard after the kill; -1 where there is none."""
    last = table.assign(end=table.begin + table.seconds).groupby("process").end.max()
    gone = last[last < killed_at]
    return int(gone.idxmax()) if len(gone) else -1


class Nodes:
    """A Ray cluster on this machine: the driver's node without a CPU, and nodes with one worker each.

    startup_seconds : seconds to start it
    suspended : processes of the node that `suspend_one` chose
    """

    def __init__(self, count: int):
        import ray
        from ray.cluster_utils import Cluster

        begin = time.perf_counter()
        self.suspended: list[psutil.Process] = []
        self.cluster = started(Cluster, initialize_head=True, head_node_args=DRIVER | STORE)
        self.nodes = [self._another() for _ in range(count)]
        ray.init(self.cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
        self.startup_seconds = time.perf_counter() - begin

    def _another(self):
        return started(self.cluster.add_node, num_cpus=1, **STORE)

    def suspend_one(self, condition: Callable[[], bool]) -> bool:
        """Suspend the last node's workers where `condition()` is true before and after; return whether it is.

        No shard there ends between the condition and `replace_one`.
        """
        if not condition():
            return False
        raylet = self.nodes[-1].all_processes["raylet"][0].process.pid
        self.suspended = psutil.Process(raylet).children(recursive=True)
        self._each_suspended("suspend")
        if condition():
            return True
        self._each_suspended("resume")
        return False

    def replace_one(self) -> None:
        """Kill the last node, with its suspended workers, and add another one."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        self._each_suspended("kill")  # they do not see that their node has gone
        self.nodes.append(self._another())

    def close(self) -> None:
        """End all processes of the cluster."""
        import ray

        ray.shutdown()
        self.cluster.shutdown()
        self._each_suspended("kill")

    def _each_suspended(self, name):
        for process in self.suspended:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, name)()
