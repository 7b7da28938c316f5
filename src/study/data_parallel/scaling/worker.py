"""What a worker program reads of its job and leaves of its training; it needs NumPy alone.

A program runs once for each worker, or once in all where one process has several devices, with the job's folder and
the worker's number as its arguments.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np


class Worker:
    """One worker: its part of the job, the clock, and what it leaves.

    job : dict of job.json: workers, port, way (what the program may do in several ways), depth of the ResNet, and
        one_process, whether this process is all workers
    weights : {name: array} of the network to begin with, by Flax's names
    rates : float32 [step], the learning rates; momentum is 0.9
    evaluated : int [evaluation], the steps after which the test rows are predicted
    """

    def __init__(self, folder, rank):
        self.folder = Path(folder)
        self.rank = rank
        self.job = read_job(folder)
        self.workers = self.job["workers"]
        self.weights = dict(np.load(self.folder / "weights.npz"))
        names = "rates", "evaluated", "order", "x", "y", "x_test"
        read = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in names}
        self.rates, self.evaluated, self.order, self.x, self.y, self.x_test = read.values()

    def batch(self, step):
        """(x [row, height, width, channel], y int32 [row]) of a step: this worker's, or all workers' in their order."""
        rows = self.order[:, step].ravel() if self.job["one_process"] else self.order[self.rank, step]
        return self.x[rows], self.y[rows].astype(np.int32)

    def train(self, step, predict, together=lambda: None):
        """Train: step(x, y, learning rate) -> the loss as a number, predict(x) -> scores [row, class].

        together() is called where all workers wait for one another. What the first step compiles is in its time;
        evaluation is in no time.
        """
        steps = len(self.rates)
        seconds, losses, predictions = np.zeros(steps), np.zeros(steps), []
        together()
        began, begin, paused = time.time(), time.perf_counter(), 0.0
        for number, rate in enumerate(map(float, self.rates)):
            losses[number] = step(*self.batch(number), rate)
            seconds[number] = time.perf_counter() - begin - paused
            if not np.isfinite(losses[number]):
                came = (
                    f"The loss of worker {self.rank} is {losses[number]} at step {number}, with learning rate {rate:g}"
                )
                sys.exit(f"{came}: take a smaller one.")
            if number + 1 in self.evaluated:
                stopped = time.perf_counter()
                if self.rank == 0:
                    predictions.append(self.predict(predict))
                together()
                paused += time.perf_counter() - stopped
        self.save(began, seconds, losses, predictions)

    def predict(self, predict):
        """The class of each test row, some rows at a time."""
        parts = np.array_split(self.x_test, -(-len(self.x_test) // 500))
        return np.concatenate([np.asarray(predict(part)).argmax(-1) for part in parts])

    def save(self, began, seconds, losses, predictions):
        """Leave what the training was: when it began (time.time()), [step], [step], classes [evaluation, row]."""
        found = {"began": began, "seconds": seconds, "losses": losses, "predictions": np.array(predictions)}
        np.savez(self.folder / f"result_{self.rank}.npz", **found)

    def nested(self):
        """The weights as Flax's tree of dicts: {"params": ..., "batch_stats": ...}."""
        tree = {}
        for name, array in self.weights.items():
            *path, last = name.split("/")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
            place[last] = array
        return tree


def resnet(x, depth, conv_norm, add, head):
    """A ResNet by what a framework makes of its layers, numbered as `turbanet.networks.ResNet` numbers them.

    conv_norm(x, number, stride, relu); add(x, out, halves) is relu(x + out), where halves takes every other pixel of x
    and fills its channels up with zeros; head(x) is the mean over pixels and the last layer.
    """
    x = conv_norm(x, 0, 1, True)
    number = 1
    for stage in range(3):
        for block in range(depth // 6):
            halves = stage > 0 and block == 0
            out = conv_norm(x, number, 2 if halves else 1, True)
            x = add(x, conv_norm(out, number + 1, 1, False), halves)
            number += 2
    return head(x)


def read_job(folder):
    """job.json."""
    return json.loads((Path(folder) / "job.json").read_text())


def begin(rank=None):
    """(The job's folder, the worker's number), by the arguments unless the framework says who it is.

    From now on this process ends with its parent, and has a core of its own, or one for each worker that it is, as long
    as there are enough; not where the system cannot say so.
    """
    parent = os.getppid()
    folder, rank = sys.argv[1], int(sys.argv[2]) if rank is None else rank
    job = read_job(folder)
    if hasattr(os, "sched_setaffinity"):
        known = sorted(os.sched_getaffinity(0))
        own = range(job["workers"]) if job.get("one_process") else [rank]
        os.sched_setaffinity(0, {known[worker % len(known)] for worker in own})

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return folder, rank
