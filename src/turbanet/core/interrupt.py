"""Ctrl-C and SIGTERM during a training: recorded while a program runs, and handled after it so that no work is lost."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class GivenUpError(Exception):
    """Raised when Ctrl-C arrives while a training waits for batches."""


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM; `swarm` and `history` are what was trained so far.

    The swarm has taken all steps so far, also those of a long epoch whose end the history does not have yet.
    """

    def __init__(self, swarm: Any, history: Any, done: str = ""):
        done = done or f"{len(history.train_loss)} whole epoch(s)"
        super().__init__(f"Training was interrupted after {done}: see this exception's swarm and history.")
        self.swarm = swarm
        self.history = history


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C and SIGTERM, and yield a function that says whether one has come.

    A third Ctrl-C raises KeyboardInterrupt at once. Only the main thread gets signals, and a handler other than
    Python's default stays in place.
    """
    received = []

    def record(number, frame):
        received.append(number)
        if received.count(signal.SIGINT) > 2:
            signal.default_int_handler(number, frame)

    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        defaults = {}
    replaced = {number: handler for number, handler in defaults.items() if signal.getsignal(number) is handler}
    for number in replaced:
        signal.signal(number, record)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in replaced.items():
            if signal.getsignal(number) is record:
                signal.signal(number, handler)
