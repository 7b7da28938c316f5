"""The worker programs of all frameworks: their list, how they are started and watched, their errors."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import joblib
import numpy as np

from turbanet.core.plan import say_once

PROGRAMS = Path(__file__).parent
SHOWN = 2000  # characters of a failed program's output in the error
LAUNCHED = re.compile(r"Process name: (?P<rank>\d+)\s+Exit code: (?P<code>\d+)")  # horovodrun's first failed worker


class Framework(NamedTuple):
    """A program beside this module, its environment and its launch.

    environment : a folder of build/peers; "" for the one that this is called in
    method : a variant of the program, where it has several
    one_process : whether one process has a device for each worker
    helpers : additional processes for several workers, such as MXNet's scheduler and server
    launcher : a command of its environment that starts all workers
    networks : whether each worker trains its own network without communication
    """

    program: str
    environment: str = ""
    method: str = ""
    one_process: bool = False
    helpers: int = 0
    launcher: str = ""
    networks: bool = False


FRAMEWORKS = {
    "pytorch_ddp": Framework("pytorch_ddp"),
    "pytorch_ddp_fp16": Framework("pytorch_ddp", method="fp16"),
    "pytorch_alone": Framework("pytorch_ddp", method="alone", networks=True),
    "jax": Framework("jax_parallel", one_process=True),
    "jax_processes": Framework("jax_parallel"),
    "keras": Framework("keras_jax", environment="keras", one_process=True),
    "tensorflow": Framework("tensorflow_mirrored", environment="tensorflow"),
    "mxnet": Framework("mxnet_dist", environment="mxnet", helpers=2),
    "horovod_pytorch": Framework("horovod_pytorch", environment="horovod", launcher="horovodrun"),
    "horovod_tensorflow": Framework("horovod_tensorflow", environment="horovod_tensorflow", launcher="horovodrun"),
    "swarm": Framework("swarm", one_process=True, networks=True),
    "swarm_processes": Framework("swarm", networks=True),
}


def train(name, job, *, workers, limit=3600):
    """Train the job by so many workers of a framework, a core each, and return its `Result`.

    Raises
    ------
    ValueError : for an unknown framework, more workers than rows
    FileNotFoundError : where the framework's environment has not been made
    RuntimeError : where a program fails, is killed or takes longer than `limit` seconds; no process remains
    """
    framework = _framework(name)
    ports = [free_port() for _ in range(1 + workers)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job.write(Path(folder), framework, workers, ports)
        began = time.time()
        results = _run(name, framework, Path(folder), workers, limit)
        return job.result(results, began, workers)


def all_reduce_seconds(sizes, *, workers, repeats=20):
    """Time gloo's sum of float32 messages of these lengths over local processes: seconds [size, repeat]."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = {"workers": workers, "port": free_port(), "sizes": [int(size) for size in sizes], "repeats": repeats}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        return _run("loopback", Framework("loopback"), Path(folder), workers, limit=600)[0]["seconds"]


def available(names):
    """List the frameworks that can run here and print what the others need; ValueError for unknown ones."""
    found = []
    for name in names:
        try:
            interpreter(_framework(name))
        except FileNotFoundError as missing:
            print(f"{name} is not measured. {missing}", flush=True)
        else:
            found.append(name)
    return found


def _framework(name):
    if name not in FRAMEWORKS:
        raise ValueError(f"Unknown framework {name!r}; known: {', '.join(FRAMEWORKS)}.")
    return FRAMEWORKS[name]


def interpreter(framework):
    """Return the Python that runs a framework's program; FileNotFoundError where its environment is missing."""
    if not framework.environment:
        return sys.executable
    from study.pipeline.paths import repository

    python = repository() / "build/peers" / framework.environment / "bin/python"
    if not python.exists():
        raise FileNotFoundError(f"There is no {framework.environment} in build/peers: `make peers` builds it.")
    return str(python)


def _commands(framework, folder, workers):
    """List the commands that start the workers, one for each process."""
    python = interpreter(framework)
    program = [python, str(PROGRAMS / f"{framework.program}.py"), str(folder)]
    if framework.launcher:
        hosts = ["--gloo", "-np", str(workers), "-H", f"localhost:{workers}"]
        return [[str(Path(python).with_name(framework.launcher)), *hosts, *program]]
    count = 1 if framework.one_process else workers + framework.helpers * (workers > 1)
    return [[*program, str(rank)] for rank in range(count)]


def free_port():
    """Return a port that no program uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _failed(processes):
    """Return the position of the first process that has ended and failed, or None."""
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)


def _run(name, framework, folder, workers, limit):
    """Run the programs of a job and return their result files; the first failure ends all of them."""
    if workers > joblib.cpu_count():
        say_once(f"{workers} workers share {joblib.cpu_count()} cores: what each gets is less than a core.")
    commands = _commands(framework, folder, workers)
    processes = []
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(PROGRAMS.parents[2])}
    environment = os.environ | settings
    failed = None
    try:
        for rank, command in enumerate(commands):
            with (folder / f"output_{rank}.txt").open("w") as output:
                kwargs = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
                processes.append(subprocess.Popen(command, env=environment, **kwargs))
        ends = time.monotonic() + limit
        while failed is None and any(process.poll() is None for process in processes):
            if time.monotonic() > ends:
                raise RuntimeError(f"{name} did not end within {limit} s, and its workers were stopped.")
            time.sleep(0.05)
            failed = _failed(processes)
        failed = _failed(processes) if failed is None else failed  # also of those that ended before the first look
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failed is None:
        return [np.load(file) for file in sorted(folder.glob("result_*.npz"))]
    output = (folder / f"output_{failed}.txt").read_text().strip()
    code = processes[failed].returncode
    if framework.launcher and (first := LAUNCHED.search(output)):
        failed, code = int(first["rank"]), 128 - int(first["code"])  # as a shell counts signals
        mark = f"[{failed}]<stderr>:"
        output = "\n".join(line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark))
    if code < 0:
        ended = signal.Signals(-code).name
        raise RuntimeError(f"Worker {failed} of {name} was ended by {ended}, and the others were stopped.")
    raise RuntimeError(f"Worker {failed} of {name} failed, and the others were stopped. Its output:\n{output[-SHOWN:]}")
