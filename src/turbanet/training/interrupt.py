"""Ctrl-C during a training: noted while a program runs, heeded between two, with what was trained so far."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a training; `swarm` and `history` are what it would have returned by then.

    The swarm has taken all steps up to then, also those of a long epoch that the history has not seen the end of.
    """

    def __init__(self, swarm: Any, history: Any, done: str = ""):
        done = done or f"{len(history.train_loss)} whole epoch(s)"
        super().__init__(f"Training was interrupted after {done}: see this exception's swarm and history.")
        self.swarm = swarm
        self.history = history


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is told by the function given, and a second one raises KeyboardInterrupt at once.

    A thread beside the main one gets no signals, and a handler that is not Python's own is left alone.
    """
    came = []

    def note(number, frame):
        came.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
