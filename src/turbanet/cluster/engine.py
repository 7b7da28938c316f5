"""What this library needs of Ray: connect, run a bounded number of tasks at a time, and stop everything at the end."""

import contextlib
import itertools
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil

from turbanet.core.extras import needed
from turbanet.core.plan import say_once

WAIT_SECONDS = 5  # for a cluster to answer, and for stopped processes and tasks to end
AHEAD = 2  # tasks submitted to Ray per worker, so that no worker waits for the next
LOOK_SECONDS = 1  # between two queries of the nodes
START_SECONDS = 300  # during which a failed start of Ray's own processes is tried again; one takes up to 60
NODE_SECONDS = 300  # to wait for a node that can run these tasks
NO_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty HTTP/2 SETTINGS frame; byte 3 is the type (RFC 9113, 4.1 and 6.5)
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + NO_SETTINGS  # a server answers it with a SETTINGS frame (3.4)
ADVICE = "start one (ray start --head), mend the address, or leave it out to use this machine alone"


class Unfit(NamedTuple):
    """What a task returns on a node that cannot run it."""

    node: str
    why: str


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[ModuleType]:
    """Context with Ray: as this process is connected, or to the cluster at `address`, or started on this machine."""
    ray = needed("ray", "cluster")
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise ValueError(f"This process is connected to Ray at {here}, not at {address}: ray.shutdown() first.")
        yield ray
        return
    if address is None:
        started(ray.init, "local", log_to_driver=False, include_dashboard=False)
    else:
        _check_answers(address)
        try:
            ray.init(address, log_to_driver=False)
        except ConnectionError as error:
            raise ConnectionError(f"No Ray cluster answers at {address!r} ({error}): {ADVICE}.") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def started(start: Callable, *arguments: Any, **options: Any) -> Any:
    """Return `start(*arguments, **options)`, a call that starts processes of Ray on this machine.

    Ray gives a node half a minute to start, which may not be enough on a busy machine. So what a failed start left
    running is killed and the call is repeated for START_SECONDS; then ConnectionError is raised with Ray's last error.
    Wrong options are not tried again.
    """
    import ray

    connected = ray.is_initialized()
    start_time = time.monotonic()
    for attempt in itertools.count(1):
        before = set(_processes(ray))
        try:
            with warnings.catch_warnings():  # forked processes exec at once, so that threads do no harm
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                return start(*arguments, **options)
        except (TypeError, ValueError):
            raise
        except Exception as error:  # Ray raises no specific class for a node that timed out
            orphans = set(_processes(ray)) - before
            for process in orphans:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(orphans, timeout=WAIT_SECONDS)
            if not connected:
                ray.shutdown()
            elapsed = time.monotonic() - start_time
            if elapsed > START_SECONDS:
                tried = f"{attempt} times in {elapsed:.0f} s"
                raise ConnectionError(
                    f"Ray's processes did not start on this machine, tried {tried} ({error}): "
                    "call again when it has less to do, or begin one (ray start --head) and give its address."
                ) from error
            time.sleep(LOOK_SECONDS)


def _processes(ray):
    """Return this process's children that run Ray's programs; their own children end with them."""
    home = str(Path(ray.__file__).parent)
    processes = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            processes += [process] if home in " ".join(process.cmdline()) else []
    return processes


def _check_answers(address):
    """Raise ConnectionError if no gRPC server answers at host:port; an address of another form is left to Ray.

    Ray itself would wait for minutes and then end this process. With Ray's TLS, only an open port is checked.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(GREETING)
            answer = connection.recv(len(NO_SETTINGS))
        if answer[3:4] != NO_SETTINGS[3:4]:
            raise OSError("what listens there is not Ray's")
    except OSError as error:
        raise ConnectionError(f"No Ray cluster answers at {address} ({error}): {ADVICE}.") from None


def slots(
    ray: ModuleType, unfit: Container = (), *, num_cpus: float = 1, num_gpus: float = 0, memory: float = 0
) -> int:
    """Return the number of tasks of these needs that can run at once on live nodes whose ids are not in `unfit`."""
    needs = {"CPU": num_cpus, "GPU": num_gpus, "memory": memory}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in unfit]
    return sum(min(int(node.get(name, 0) / need) for name, need in needs.items() if need) for node in nodes)


def check_room(ray: ModuleType, **needs: Any) -> int:
    """Return `slots`; ValueError if no node could run even one task, for which Ray would wait forever."""
    if count := slots(ray, **needs):
        return count
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    units = {"num_cpus": ("CPU", 1, "CPUs"), "num_gpus": ("GPU", 1, "GPUs"), "memory": ("memory", 2**30, "GiB")}
    needed = []
    for need, value in needs.items():
        name, unit, label = units[need]
        most = max(node.get(name, 0) for node in nodes)
        needed.append(f"{value / unit:.3g} {label} of at most {most / unit:.3g}")
    raise ValueError(f"No node has room for one worker, which needs {', '.join(needed)}: ask for less, or add a node.")


def begin(ray: ModuleType, workers: int, task: Callable, *arguments: Any, **options: Any) -> None:
    """Start so many workers, each by a call of `task(*arguments)`, without waiting for them."""
    remote = ray.remote(max_retries=0, **options)(task)
    for _ in range(workers):
        remote.remote(*arguments)


def run(
    ray: ModuleType,
    task: Callable,
    jobs: Iterable[tuple[Any, tuple]],
    *,
    at_once: Callable[[Container[str]], int],
    **options: Any,
) -> Generator[tuple[Any, Any], None, None]:
    """Run jobs (name, arguments of `task`) and yield (name, outcome) of each in the order in which they end.

    The outcome is the task's result, or Ray's exception after the last attempt. A job that returns `Unfit` from a node
    that joined later is given to another node. `at_once(unfit node ids)` is the number of jobs that can run at once;
    AHEAD times as many are submitted. Submitted jobs are killed when the caller stops.

    options : of `ray.remote`, such as num_cpus, memory and max_retries

    Raises ConnectionError if no node has room for a job for NODE_SECONDS, and RuntimeError if a node that was there at
    the start is unfit before any job has ended.
    """
    plain = remote = ray.remote(**options)(task)
    jobs = iter(jobs)
    first = {node["NodeID"] for node in ray.nodes()}
    returned: list = []  # jobs that unfit nodes gave back
    unfit: set[str] = set()
    waiting: dict = {}
    last_room = time.monotonic()  # when some node had room
    last_look = -math.inf
    workers = 0
    try:
        while True:
            if time.monotonic() - last_look > LOOK_SECONDS:
                workers, last_look = at_once(unfit), time.monotonic()
            last_room = time.monotonic() if workers else last_room
            if time.monotonic() - last_room > NODE_SECONDS:
                advice = "add one, and call again: what is done is kept"
                raise ConnectionError(f"No node has had room for a worker for {NODE_SECONDS} s: {advice}.")
            room = AHEAD * max(1, workers) - len(waiting)
            submitted = [returned.pop() for _ in range(min(len(returned), max(0, room)))]
            submitted += itertools.islice(jobs, max(0, room - len(submitted)))
            waiting |= {remote.remote(*job[1]): job for job in submitted}
            if not waiting and not returned:
                return
            ended, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK_SECONDS)
            ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0) if ended else (ended, ())
            for reference in ended:
                name, arguments = waiting.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    outcome = error
                if not isinstance(outcome, Unfit):
                    if not isinstance(outcome, Exception):
                        first.clear()  # some node works: from now on unfit nodes are left out
                    yield name, outcome
                    continue
                if outcome.node in first:
                    raise RuntimeError(outcome.why)
                returned.append((name, arguments))
                if outcome.node not in unfit:
                    unfit.add(outcome.node)
                    say_once(f"{outcome.why} It gets no more shards.")
                    remote = plain.options(label_selector={"ray.io/node-id": f"!in({','.join(sorted(unfit))})"})
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
        if waiting:
            ray.wait(list(waiting), num_returns=len(waiting), timeout=WAIT_SECONDS)


def share(members: int, workers: int, *, most: int = 1024) -> int:
    """Return the default members of a shard: about four shards per worker, so that no worker waits long for another."""
    return min(most, max(1, math.ceil(members / (4 * workers))))
