"""Ray, as this library uses it: connect, run tasks a few at a time, leave nothing running."""

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

from turbanet.training.plan import say_once

WAIT_SECONDS = 5  # for a cluster to answer, and for what is stopped to end
AHEAD = 2  # tasks handed to Ray for each worker, so that it never waits for the next
LOOK_SECONDS = 1  # between two looks at the nodes
START_SECONDS = 300  # in which a start of Ray's own processes that failed is tried again; one takes Ray up to 60
NODE_SECONDS = 300  # that a cluster without a node for these tasks is waited for
NO_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # a frame of HTTP/2, whose fourth byte is its kind (RFC 9113, 4.1 and 6.5)
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + NO_SETTINGS  # which a server answers with such a frame (3.4)
ADVICE = "start one (ray start --head), mend the address, or leave it out to use this machine alone"


class Unfit(NamedTuple):
    """What a task returns on a node that cannot work."""

    node: str
    why: str


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[ModuleType]:
    """Inside, Ray: as this process has it, of the cluster at `address`, or begun here with a worker per core."""
    try:
        import ray
    except ImportError:
        raise ImportError('A cluster needs Ray, which is not installed: pip install "turbanet[cluster]".') from None
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
    """What `start(*arguments, **options)` returns, which begins processes of Ray's on this machine.

    Ray gives a node half a minute to begin, which a busy machine may not have for it. So what such a start left is
    ended and it is tried again, for START_SECONDS; then ConnectionError with Ray's last words. Wrong options are not
    tried again.
    """
    import ray

    connected = ray.is_initialized()
    begin = time.monotonic()
    for attempt in itertools.count(1):
        before = set(_processes(ray))
        try:
            with warnings.catch_warnings():  # Ray's processes are forked and at once replaced: threads do not matter
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                return start(*arguments, **options)
        except (TypeError, ValueError):
            raise
        except Exception as error:  # a node that timed out raises no class of its own
            left = set(_processes(ray)) - before
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=WAIT_SECONDS)
            if not connected:
                ray.shutdown()
            taken = time.monotonic() - begin
            if taken > START_SECONDS:
                tried = f"{attempt} times in {taken:.0f} s"
                raise ConnectionError(
                    f"Ray's processes did not start on this machine, tried {tried} ({error}): "
                    "call again when it has less to do, or begin one (ray start --head) and give its address."
                ) from error
            time.sleep(LOOK_SECONDS)


def _processes(ray):
    """The processes that this one has begun of Ray's own programs; what those began ends with them."""
    home = str(Path(ray.__file__).parent)
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found += [process] if home in " ".join(process.cmdline()) else []
    return found


def _check_answers(address):
    """ConnectionError where nothing at host:port speaks gRPC, as Ray does; an address of another form is Ray's to read.

    Ray itself would wait for minutes, and then end this process. Under its TLS, we see only that something listens.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_SECONDS) as there:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            there.sendall(GREETING)
            answer = there.recv(len(NO_SETTINGS))
        if answer[3:4] != NO_SETTINGS[3:4]:
            raise OSError("what listens there is not Ray's")
    except OSError as error:
        raise ConnectionError(f"No Ray cluster answers at {address} ({error}): {ADVICE}.") from None


def slots(
    ray: ModuleType, unfit: Container = (), *, num_cpus: float = 1, num_gpus: float = 0, memory: float = 0
) -> int:
    """How many tasks of these needs the nodes run at once that are alive and whose ids are not among the `unfit`."""
    needs = {"CPU": num_cpus, "GPU": num_gpus, "memory": memory}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in unfit]
    return sum(min(int(node.get(name, 0) / need) for name, need in needs.items() if need) for node in nodes)


def check_room(ray: ModuleType, **needs: Any) -> int:
    """The same; ValueError if no node could run even one, for which Ray would wait forever."""
    if there := slots(ray, **needs):
        return there
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    of = {"num_cpus": ("CPU", 1, "CPUs"), "num_gpus": ("GPU", 1, "GPUs"), "memory": ("memory", 2**30, "GiB")}
    said = []
    for need, value in needs.items():
        name, unit, called = of[need]
        most = max(node.get(name, 0) for node in nodes)
        said.append(f"{value / unit:.3g} {called} of at most {most / unit:.3g}")
    raise ValueError(f"No node has room for one worker, which needs {', '.join(said)}: ask for less, or add a node.")


def begin(ray: ModuleType, workers: int, task: Callable, *arguments: Any, **options: Any) -> None:
    """Start so many workers, each by calling `task(*arguments)`, and do not wait for them."""
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
    """(name, what came) of each job, (name, arguments of `task`), in the order in which they end.

    What came is the task's result, or an exception of Ray's after its last attempt. A job that comes back `Unfit` from
    a node that has joined since is handed on to other nodes. AHEAD times as many as run `at_once` (of the ids of unfit
    nodes) are handed to Ray; those that are left when the caller stops are killed.

    options : of `ray.remote`, such as num_cpus, memory and max_retries

    Raises ConnectionError where no node has had room for one for NODE_SECONDS, RuntimeError where a node that was there
    from the beginning is unfit, before any job has ended.
    """
    plain = remote = ray.remote(**options)(task)
    jobs = iter(jobs)
    first = {node["NodeID"] for node in ray.nodes()}
    again: list = []  # what an unfit node has given back
    unfit: set[str] = set()
    waiting: dict = {}
    seen = time.monotonic()  # when there was room last
    looked = -math.inf
    workers = 0
    try:
        while True:
            if time.monotonic() - looked > LOOK_SECONDS:
                workers, looked = at_once(unfit), time.monotonic()
            seen = time.monotonic() if workers else seen
            if time.monotonic() - seen > NODE_SECONDS:
                advice = "add one, and call again: what is done is kept"
                raise ConnectionError(f"No node has had room for a worker for {NODE_SECONDS} s: {advice}.")
            room = AHEAD * max(1, workers) - len(waiting)
            handed = [again.pop() for _ in range(min(len(again), max(0, room)))]
            handed += itertools.islice(jobs, max(0, room - len(handed)))
            waiting |= {remote.remote(*job[1]): job for job in handed}
            if not waiting and not again:
                return
            ended, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK_SECONDS)
            ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0) if ended else (ended, ())
            for reference in ended:
                name, arguments = waiting.pop(reference)
                try:
                    came = ray.get(reference)
                except ray.exceptions.RayError as error:
                    came = error
                if not isinstance(came, Unfit):
                    if not isinstance(came, Exception):
                        first.clear()  # some node works: from now on another that does not is left out
                    yield name, came
                    continue
                if came.node in first:
                    raise RuntimeError(came.why)
                again.append((name, arguments))
                if came.node not in unfit:
                    unfit.add(came.node)
                    say_once(f"{came.why} It gets no more shards.")
                    remote = plain.options(label_selector={"ray.io/node-id": f"!in({','.join(sorted(unfit))})"})
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
        if waiting:
            ray.wait(list(waiting), num_returns=len(waiting), timeout=WAIT_SECONDS)


def share(members: int, workers: int, *, most: int = 1024) -> int:
    """Members of a shard where none were named: about four shards a worker, so that none waits long for another."""
    return min(most, max(1, math.ceil(members / (4 * workers))))
