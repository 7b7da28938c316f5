"""A job in files, its worker programs started and watched, what they leave read: throughput, losses, test accuracy."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np

from turbanet.training.plan import say_once
from turbanet.training.sampling import deal

PROGRAMS = Path(__file__).parent
SETTLING = 3  # steps at the start that no throughput counts: compilation, first allocations
SAID = 2000  # characters of a failed program's own words


class Framework(NamedTuple):
    """A program beside this module, the environment that it needs and how it is started.

    environment : a folder of build/peers; "" for the one that this is called in
    way : what the program does, where it can do several things
    one_process : whether one process has a device for each worker
    helpers : processes that it needs beside several workers, such as MXNet's scheduler and server
    launcher : a command of its environment that starts the workers, which is told how many
    """

    program: str
    environment: str = ""
    way: str = ""
    one_process: bool = False
    helpers: int = 0
    launcher: str = ""


FRAMEWORKS = {
    "pytorch_ddp": Framework("pytorch_ddp"),
    "pytorch_ddp_fp16": Framework("pytorch_ddp", way="fp16"),
    "jax": Framework("jax_parallel", one_process=True),
    "jax_processes": Framework("jax_parallel"),
    "keras": Framework("keras_jax", environment="keras", one_process=True),
    "tensorflow": Framework("tensorflow_mirrored", environment="tensorflow"),
    "mxnet": Framework("mxnet_dist", environment="mxnet", helpers=2),
    "horovod_pytorch": Framework("horovod_pytorch", environment="horovod", launcher="horovodrun"),
    "swarm": Framework("swarm", one_process=True),
}


@dataclasses.dataclass
class Job:
    """A training of one network: its variables to begin with, rows, and learning rates.

    weights : {name: array}, by Flax's names joined by "/"
    x, y, x_test, y_test : float32 [row, height, width, channel], int [row]
    batch_size : rows of a worker's step
    rates : float [step], by which a network at one worker would be trained; times the workers, after a warm-up
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
        arrays = {"x": self.x, "y": self.y, "x_test": self.x_test, "order": order, "rates": self.rates(workers)}
        arrays["evaluated"] = self.evaluated
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        np.savez(folder / "weights.npz", **self.weights)
        known = {"workers": workers, "port": ports[0], "ports": ports, "depth": self.depth, "way": framework.way}
        (folder / "job.json").write_text(json.dumps(known | {"one_process": framework.one_process}))


class Result(NamedTuple):
    """What a training left.

    seconds : float64 [step], when each ended, evaluation apart, counted from the first step's begin
    loss : float64 [step], the mean of the workers'
    accuracy : float64 [evaluation], of the test rows; at : int [evaluation], after how many steps
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
    from turbanet.lab.sources import store
    from turbanet.lab.windows import normalised

    arrays, _ = store.load("cifar10")
    x, x_test = normalised(arrays["x_train"][:rows]), normalised(arrays["x_test"][:test_rows])
    weights = flat(jax.device_get(tn.ResNet(depth).init(jax.random.key(seed), x[:1])))
    y = arrays["y_train"][:rows], arrays["y_test"][:test_rows]
    return Job(weights, x, y[0], x_test, y[1], depth=depth, seed=seed, learning_rate=learning_rate, **how)


def flat(tree):
    """A Flax tree of dicts as {names joined by "/": array}, as a job's weights are."""
    import jax

    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def train(name, job, *, workers, port=None, limit=3600):
    """Train the job by so many workers of a framework, a core each: a `Result`.

    Raises
    ------
    ValueError : for an unknown framework, more workers than rows, a port that is in use
    FileNotFoundError : where the framework's environment has not been made
    RuntimeError : where a program fails, is killed or takes longer than `limit` seconds; no process is left behind
    """
    if name not in FRAMEWORKS:
        raise ValueError(f"Unknown framework {name!r}; known: {', '.join(FRAMEWORKS)}.")
    framework = FRAMEWORKS[name]
    ports = [free_port(port), *(free_port() for _ in range(workers))]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job.write(Path(folder), framework, workers, ports)
        began = time.time()
        results = _run(name, framework, Path(folder), workers, limit)
        return _result(job, results, began, workers)


def all_reduce_seconds(sizes, *, workers, repeats=20):
    """Seconds that gloo takes to sum float32 messages of these lengths over so many processes here: [size, repeat]."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = {"workers": workers, "port": free_port(), "sizes": [int(size) for size in sizes], "repeats": repeats}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        return _run("loopback", Framework("loopback"), Path(folder), workers, limit=600)[0]["seconds"]


def interpreter(framework):
    """The Python that runs a framework's program, or FileNotFoundError."""
    if not framework.environment:
        return sys.executable
    from turbanet.lab.paths import repository

    python = repository() / "build/peers" / framework.environment / "bin/python"
    if not python.exists():
        raise FileNotFoundError(f"There is no {framework.environment} in build/peers: `make peers` builds it.")
    return str(python)


def _commands(framework, folder, workers):
    """What starts the workers: a command for each process."""
    python = interpreter(framework)
    program = [python, str(PROGRAMS / f"{framework.program}.py"), str(folder)]
    if framework.launcher:
        hosts = ["--gloo", "-np", str(workers), "-H", f"localhost:{workers}"]
        return [[str(Path(python).with_name(framework.launcher)), *hosts, *program]]
    count = 1 if framework.one_process else workers + framework.helpers * (workers > 1)
    return [[*program, str(rank)] for rank in range(count)]


def free_port(port=None):
    """`port` if no other program has it, or any free one; ValueError otherwise."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError:
            raise ValueError(
                f"Port {port} is in use by another program: take another, or none for a free one."
            ) from None
        return probe.getsockname()[1]


def _run(name, framework, folder, workers, limit):
    """Run the programs of a job to their end, or end all of them with the first that fails: what each left."""
    if workers > joblib.cpu_count():
        say_once(f"{workers} workers share {joblib.cpu_count()} cores: what each gets is less than a core.")
    commands = _commands(framework, folder, workers)
    processes = []
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(PROGRAMS.parents[2])}
    environment = os.environ | settings
    failed = None
    try:
        for rank, command in enumerate(commands):
            with (folder / f"said_{rank}.txt").open("w") as said:
                how = {"stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True}
                processes.append(subprocess.Popen(command, env=environment, **how))
        ends = time.monotonic() + limit
        while failed is None and any(process.poll() is None for process in processes):
            if time.monotonic() > ends:
                raise RuntimeError(f"{name} did not end within {limit} s, and its workers were stopped.")
            time.sleep(0.05)
            failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failed is None:
        return [np.load(file) for file in sorted(folder.glob("result_*.npz"))]
    code = processes[failed].returncode
    if code < 0:
        ended = signal.Signals(-code).name
        raise RuntimeError(f"Worker {failed} of {name} was ended by {ended}, and the others were stopped.")
    said = (folder / f"said_{failed}.txt").read_text().strip()[-SAID:]
    raise RuntimeError(f"Worker {failed} of {name} failed, and the others were stopped. It said:\n{said}")


def _result(job, results, began, workers):
    losses = np.mean([result["losses"] for result in results], axis=0)
    first = results[0]
    at = job.evaluated
    accuracy = (first["predictions"] == job.y_test).mean(-1) if len(at) else np.zeros(0)
    startup = max(float(result["began"]) for result in results) - began
    return Result(first["seconds"], losses, accuracy, at, startup, workers * job.batch_size)
