"""A worker program's input and output: its job's files, the training loop, its results; needs NumPy, `nested` Flax too.

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
    """One worker: its part of the job, the clock, its results.

    job : dict of job.json: workers, port, method (the program's variant), depth of the ResNet, and one_process, whether
        this process is all workers
    weights : {name: array}, the network's initial weights by Flax's names
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
        """Return (x [row, height, width, channel], y int32 [row]) of a step, for this worker or all of one process."""
        rows = self.order[:, step].ravel() if self.job["one_process"] else self.order[self.rank, step]
        return self.x[rows], self.y[rows].astype(np.int32)

    def train(self, step, predict, synchronise=lambda: None):
        """Train by step(x, y, learning rate) -> loss as a number and predict(x) -> scores [row, class].

        synchronise() is called where all workers wait for one another. The first step's time includes compilation; no
        time includes evaluation.
        """
        steps = len(self.rates)
        seconds, losses, predictions = np.zeros(steps), np.zeros(steps), []
        synchronise()
        began, begin, paused = time.time(), time.perf_counter(), 0.0
        for number, rate in enumerate(map(float, self.rates)):
            losses[number] = step(*self.batch(number), rate)
            seconds[number] = time.perf_counter() - begin - paused
            if not np.isfinite(losses[number]):
                problem = (
                    f"The loss of worker {self.rank} is {losses[number]} at step {number}, with learning rate {rate:g}"
                )
                sys.exit(f"{problem}: take a smaller one.")
            if number + 1 in self.evaluated:
                stopped = time.perf_counter()
                if self.rank == 0:
                    predictions.append(self.predict(predict))
                synchronise()
                paused += time.perf_counter() - stopped
        self.save(began, seconds, losses, predictions)

    def predict(self, predict):
        """Predict the class of each test row, in batches."""
        parts = np.array_split(self.x_test, -(-len(self.x_test) // 500))
        return np.concatenate([np.asarray(predict(part)).argmax(-1) for part in parts])

    def save(self, began, seconds, losses, predictions):
        """Write the results: begin (time.time()), seconds [step], losses [step], classes [evaluation, row]."""
        found = {"began": began, "seconds": seconds, "losses": losses, "predictions": np.array(predictions)}
        np.savez(self.folder / f"result_{self.rank}.npz", **found)

    def nested(self):
        """Return the weights as Flax's nested dicts: {"params": ..., "batch_stats": ...}."""
        from flax.traverse_util import unflatten_dict

        return unflatten_dict(self.weights, sep="/")


def resnet(x, depth, conv_norm, add, head):
    """Build a ResNet from a framework's layers, numbered as in `turbanet.networks.ResNet`.

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
    """Read job.json from a job's folder."""
    return json.loads((Path(folder) / "job.json").read_text())


def begin(rank=None):
    """Return (the job's folder, the worker's number) from the program's arguments; a launcher's `rank` has precedence.

    Also makes this process end with its parent and, on Linux, pins it to a core, or to one for each worker of a single
    process; with more workers than cores they share.
    """
    parent = os.getppid()
    folder, rank = sys.argv[1], int(sys.argv[2]) if rank is None else rank
    job = read_job(folder)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(job["workers"]) if job.get("one_process") else [rank]
        os.sched_setaffinity(0, {cores[worker % len(cores)] for worker in ranks})

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return folder, rank
