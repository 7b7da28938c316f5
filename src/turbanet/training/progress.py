"""What a progress bar says while nothing moves it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

EVERY_SECONDS = 1.0


@contextlib.contextmanager
def counted(bar: Any, text: str) -> Iterator[None]:
    """Context in which a tqdm `bar` shows `text` and the seconds so far, from the first second on."""
    ended, begin = threading.Event(), time.perf_counter()

    def count():
        while not ended.wait(EVERY_SECONDS):
            bar.set_postfix_str(f"{text}: {time.perf_counter() - begin:.0f} s")

    thread = threading.Thread(target=count, daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if not bar.disable:
            thread.join()
            bar.set_postfix_str("")
