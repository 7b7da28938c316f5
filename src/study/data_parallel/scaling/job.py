"""A training of one network by workers, written to files, and its result: throughput, losses, test accuracy."""

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np

from turbanet.data.sampling import deal

SETTLING = 3  # first steps that throughput does not count: compilation, first allocations


@dataclasses.dataclass
class Job:
    """A training of one network: its initial variables, rows and learning rates.

    weights : {name: array}, by Flax's names joined by "/"
    x, y, x_test, y_test : float32 [row, height, width, channel], int [row]
    batch_size : rows in a worker's step
    learning_rate : for one worker; after the warm-up times the number of workers
    warm_up : steps over which the learning rate grows (Goyal et al. 2017)
    evaluate_every : steps between two evaluations on the test rows; None for none
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
        """Return learning rates, float32 [step], that grow linearly in the warm-up (Goyal et al. 2017)."""
        grown = np.minimum(1, np.arange(1, self.steps + 1) / max(1, self.warm_up))
        return np.float32(self.learning_rate * (1 + (workers - 1) * grown))

    @property
    def gradient_bytes(self):
        """Bytes of the gradients that workers sum in a step."""
        return sum(array.nbytes for name, array in self.weights.items() if name.startswith("params/"))

    @property
    def evaluated(self):
        """Steps after which the test rows are evaluated, int [evaluation]."""
        every = self.evaluate_every
        return np.arange(every, self.steps + 1, every) if every else np.zeros(0, int)

    def write(self, folder, framework, workers, ports):
        """Write the job's files for so many workers."""
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
        settings = {"workers": workers, "port": ports[0], "ports": ports, "depth": self.depth}
        settings |= {"method": framework.method, "one_process": framework.one_process}
        (folder / "job.json").write_text(json.dumps(settings))

    def result(self, files, began, workers):
        """Combine the workers' result files, of programs that were started at `began` (time.time()), to a `Result`."""
        losses = np.mean([each["losses"] for each in files], axis=0)
        at = self.evaluated
        right = [(each["predictions"] == self.y_test).mean(-1) for each in files if len(each["predictions"])]
        accuracy = np.mean(right, axis=0) if len(at) else np.zeros(0)
        startup = max(float(each["began"]) for each in files) - began
        seconds = np.max([each["seconds"] for each in files], axis=0)
        return Result(seconds, losses, accuracy, at, startup, workers * self.batch_size)


class Result(NamedTuple):
    """The result of a training.

    seconds : float64 [step], from the begin of the first step until the last worker ended the step, without evaluation
    loss : float64 [step], mean over workers
    accuracy : float64 [evaluation], on the test rows, mean over networks
    at : int [evaluation], the steps after which `accuracy` was measured
    startup_seconds : from the start of the programs to the first step
    rows : rows in a step of all workers
    """

    seconds: Any
    loss: Any
    accuracy: Any
    at: Any
    startup_seconds: float
    rows: int

    def throughput(self):
        """Return rows per second without the first steps."""
        return self.rows * (len(self.seconds) - SETTLING) / (self.seconds[-1] - self.seconds[SETTLING - 1])

    def throughputs(self, parts=4):
        """Return rows per second in each of `parts` parts of the run without the first steps, to show their spread."""
        counted = len(self.seconds) - SETTLING
        ends = SETTLING + np.linspace(0, counted, min(parts, counted) + 1).round().astype(int)
        return self.rows * np.diff(ends) / np.diff(self.seconds[ends - 1])

    def seconds_to(self, accuracy):
        """Return seconds until the test accuracy first was at least `accuracy`; infinite if it never was."""
        reached = self.at[self.accuracy >= accuracy]
        return float(self.seconds[reached[0] - 1]) if len(reached) else np.inf


def cifar10_job(*, rows=None, test_rows=2000, depth=20, seed=0, learning_rate=0.02, **kwargs):
    """Make a job of a ResNet with initial weights on so many of CIFAR-10's rows (None: all)."""
    import jax
    from flax.traverse_util import flatten_dict

    import turbanet as tn
    from study.evaluation.windows import normalised
    from study.sources import store

    arrays, _ = store.load("cifar10")
    x, x_test = normalised(arrays["x_train"][:rows]), normalised(arrays["x_test"][:test_rows])
    variables = jax.device_get(tn.networks.ResNet(depth).init(jax.random.key(seed), x[:1]))
    weights = flatten_dict(variables, sep="/")
    y = arrays["y_train"][:rows], arrays["y_test"][:test_rows]
    return Job(weights, x, y[0], x_test, y[1], depth=depth, seed=seed, learning_rate=learning_rate, **kwargs)
