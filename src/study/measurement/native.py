"""What compiled libraries print to the process's standard error, past Python."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def native_errors() -> Iterator[Callable[[], str]]:
    """Keep what is written to file descriptor 2 meanwhile, and write it there afterwards; yields a function for it."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:

        def printed():
            return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            sys.stderr.write(printed())
