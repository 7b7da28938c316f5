"""Programs that run in processes of their own."""

import subprocess
from concurrent.futures import ThreadPoolExecutor


def output(command: list, name: str, **kwargs) -> str:
    """Run a command to its end and return its standard output; `kwargs` go to `subprocess.run`.

    Raises RuntimeError with `name`, the exit code and the last line of standard error where the command fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{name} ended with {done.returncode}: {last}")
    return done.stdout


def outputs(command: list, name: str, count: int, **kwargs) -> list[str]:
    """Run `count` processes of a command at once: the `output` of each."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: output(command, name, **kwargs), range(count)))
