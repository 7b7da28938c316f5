"""A training of one network by workers as files, and what it left read: throughput, losses, test accuracy."""

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np

from turbanet.data.sampling import deal

SETTLING = 3  # steps at the start that no throughput counts: compilation, first allocations


@dataclasses.dataclass
class Job:
    """A training of one network: its variables to begin with, rows, and learning rates.

    weights : {name: array}, by Flax's names joined by "/"
    x, y, x_test, y_test : float32 [row, height, width, channel], int [row]
    batch_size : rows of a worker's step
    learning_rate : of one worker; times the workers, after a warm-up
    warm_up : steps over which the learning rate grows to that (Goyal et al. 2017)
    evaluate_every : steps between two predictions of the test rows; None for none
    """

    weights: dict[str, Any]
    x: Any
    y: Any
    x_test: Any
    y_test: Any
    batch_size: int
    steps: int
    learning_rate: float
    warm_up: int = 0
    evaluate_every: int | None = None
    depth: int = 20
    seed: int = 0

    def rates(self, workers):
        """float32 [step]: the learning rate times the workers, reached in equal steps (Goyal et al. 2017)."""
        grown = np.minimum(1, np.arange(1, self.steps + 1) / max(1, self.warm_up))
        return np.float32(self.learning_rate * (1 + (workers - 1) * grown))

    @property
    def gradient_bytes(self):
        """Of the message that workers sum in a step."""
        return sum(array.nbytes for name, array in self.weights.items() if name.startswith("params/"))

    @property
    def evaluated(self):
        """int [evaluation], after how many steps the test rows are predicted."""
        every = self.evaluate_every
        return np.arange(every, self.steps + 1, every) if every else np.zeros(0, int)

    def write(self, folder, framework, workers, ports):
        """The job's files for so many workers."""
        order = deal(
            rows=len(self.x),
            workers=workers,
            epochs=-(-self.steps * self.batch_size * workers // len(self.x)) + 1,
            batch_size=self.batch_size,
            seed=self.seed,
        )
        order = order.reshape(workers, -1, self.batch_size)[:, : self.steps]
        arrays = {"x": self.x, "y": self.y, "x_test": self.x_test, "order": order}
        arrays["rates"] = self.rates(1 if framework.networks else workers)
        arrays["evaluated"] = self.evaluated
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        np.savez(folder / "weights.npz", **self.weights)
        known = {"workers": workers, "port": ports[0], "ports": ports, "depth": self.depth, "way": framework.way}
        (folder / "job.json").write_text(json.dumps(known | {"one_process": framework.one_process}))

    def result(self, left, began, workers):
        """The `Result` of what each worker left, of programs that were started at `began` (time.time())."""
        losses = np.mean([each["losses"] for each in left], axis=0)
        at = self.evaluated
        right = [(each["predictions"] == self.y_test).mean(-1) for each in left if len(each["predictions"])]
        accuracy = np.mean(right, axis=0) if len(at) else np.zeros(0)
        startup = max(float(each["began"]) for each in left) - began
        seconds = np.max([each["seconds"] for each in left], axis=0)
        return Result(seconds, losses, accuracy, at, startup, workers * self.batch_size)


class Result(NamedTuple):
    """What a training left.

    seconds : float64 [step], when the last worker ended each, evaluation apart, counted from the first step's begin
    loss : float64 [step], the mean of the workers'
    accuracy : float64 [evaluation], of the test rows, the mean of the networks'; at : int [evaluation], after how many
        steps
    startup_seconds : from the start of the programs to the first step
    rows : of a step, of all workers
    """

    seconds: Any
    loss: Any
    accuracy: Any
    at: Any
    startup_seconds: float
    rows: int

    def throughput(self):
        """Rows a second, without the first steps."""
        return self.rows * (len(self.seconds) - SETTLING) / (self.seconds[-1] - self.seconds[SETTLING - 1])

    def throughputs(self, parts=4):
        """Rows a second in each of so many parts of the run, without the first steps: how much they vary."""
        counted = len(self.seconds) - SETTLING
        ends = SETTLING + np.linspace(0, counted, min(parts, counted) + 1).round().astype(int)
        return self.rows * np.diff(ends) / np.diff(self.seconds[ends - 1])

    def seconds_to(self, accuracy):
        """Until the test accuracy was first at least this; infinite if it never was."""
        there = self.at[self.accuracy >= accuracy]
        return float(self.seconds[there[0] - 1]) if len(there) else np.inf


def cifar10_job(*, rows=None, test_rows=2000, depth=20, seed=0, learning_rate=0.02, **how):
    """A job of a ResNet on so many of CIFAR-10's rows (None: all that are there), with its initial weights."""
    import jax

    import turbanet as tn
    from study.evaluation.windows import normalised
    from study.sources import store

    arrays, _ = store.load("cifar10")
    x, x_test = normalised(arrays["x_train"][:rows]), normalised(arrays["x_test"][:test_rows])
    weights = flat(jax.device_get(tn.networks.ResNet(depth).init(jax.random.key(seed), x[:1])))
    y = arrays["y_train"][:rows], arrays["y_test"][:test_rows]
    return Job(weights, x, y[0], x_test, y[1], depth=depth, seed=seed, learning_rate=learning_rate, **how)


def flat(tree):
    """A Flax tree of dicts as {names joined by "/": array}, as a job's weights are."""
    import jax

    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
