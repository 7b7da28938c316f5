"""Ctrl-C and SIGTERM during a training: noted while a program runs, heeded between two; nothing trained is lost."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class GivenUpError(Exception):
    """Ctrl-C came while a training waited."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or SIGTERM, during a training; `swarm` and `history` are what it would have returned by then.

    The swarm has taken all steps up to then, also those of a long epoch that the history has not seen the end of.
    """

    def __init__(self, swarm: Any, history: Any, done: str = ""):
        done = done or f"{len(history.train_loss)} whole epoch(s)"
        super().__init__(f"Training was interrupted after {done}: see this exception's swarm and history.")
        self.swarm = swarm
        self.history = history


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C and SIGTERM are told by the function given; a third Ctrl-C raises KeyboardInterrupt at once.

    A thread beside the main one gets no signals, and a handler that is not Python's own is left alone.
    """
    came = []

    def note(number, frame):
        came.append(number)
        if came.count(signal.SIGINT) > 2:
            signal.default_int_handler(number, frame)

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    noted = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
    for number in noted:
        signal.signal(number, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in noted.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
