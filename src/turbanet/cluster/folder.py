"""The shared folder of a run over a cluster: whose it is, and whether every node sees it."""

import json
import socket
import uuid
from typing import Any

from turbanet.training.checkpoint import differences, versions
from turbanet.training.storage import place, write_whole

RUN = "run.json"


def claimed(folder: Any) -> dict[str, str]:
    """{name: text} of all that decides what comes out of the run whose `place` it is, nothing where there is none."""
    file = folder / RUN
    return json.loads(file.read_text()) if file.exists() else {}


def claim(folder: Any, facts: dict[str, str]) -> None:
    """Make a `place` that of one run, known by its facts {name: text}; ValueError for the place of another one."""
    if not (there := claimed(folder)):
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other things than a run over a cluster: name a new folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / RUN, json.dumps(facts, indent=1))
        except OSError as error:
            raise OSError(f"Shards cannot be kept in {folder} ({error}): name another folder.") from error
        return
    for other in differences(there, facts).values():
        raise ValueError(f"{folder} is of another run: {other}; name another folder, or remove this one.")


class Marker:
    """A file by which a node tells whether it sees the folder that the driver does."""

    def __init__(self, folder: str):
        self.folder = folder
        self.call = uuid.uuid4().hex
        self.versions = versions()
        (place(folder) / "nodes").mkdir(parents=True, exist_ok=True)
        self._file().write_text(socket.gethostname())

    def wrong(self) -> str | None:
        """A sentence on a node that does not see the folder, or that would compute with other versions."""
        node = socket.gethostname()
        if others := list(differences(self.versions, versions()).values()):
            return f"{node} has other versions than the driver: {'; '.join(others)}; make them equal."
        try:
            seen = self._file().exists()
        except (ImportError, ValueError) as error:  # an OSError may pass, and is tried again
            return f"{node} cannot open {self.folder} ({error}): name a folder that every node sees."
        return None if seen else f"{self.folder} is not shared: {node} does not see it; name one that every node sees."

    def remove(self) -> None:
        """The run is over."""
        self._file().unlink(missing_ok=True)

    def _file(self):
        return place(self.folder) / "nodes" / self.call
