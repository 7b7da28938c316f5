"""The shared folder of a run over a cluster: which run owns it, and whether every node sees it."""

import json
import socket
import uuid
from typing import Any

from turbanet.checkpoints.identity import differences, versions
from turbanet.core.storage import place, write_whole

RUN = "run.json"


def claimed(folder: Any) -> dict[str, str]:
    """Return the facts {name: text} that determine the results of the run in `folder`; empty if there is no run."""
    file = folder / RUN
    return json.loads(file.read_text()) if file.exists() else {}


def claim(folder: Any, facts: dict[str, str]) -> None:
    """Claim a folder for the run of these facts {name: text}; ValueError for a folder of another run."""
    if not (existing := claimed(folder)):
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other things than a run over a cluster: name a new folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / RUN, json.dumps(facts, indent=1))
        except OSError as error:
            raise OSError(f"Shards cannot be kept in {folder} ({error}): name another folder.") from error
        return
    for difference in differences(existing, facts).values():
        raise ValueError(f"{folder} is of another run: {difference}; name another folder, or remove this one.")


class Marker:
    """A file that the driver writes, by which a node tells whether it sees the same folder."""

    def __init__(self, folder: str):
        self.folder = folder
        self.call = uuid.uuid4().hex
        self.versions = versions()
        (place(folder) / "nodes").mkdir(parents=True, exist_ok=True)
        self._file().write_text(socket.gethostname())

    def wrong(self) -> str | None:
        """Return what is wrong on this node, a folder it does not see or other versions, or None."""
        node = socket.gethostname()
        if others := list(differences(self.versions, versions()).values()):
            return f"{node} has other versions than the driver: {'; '.join(others)}; make them equal."
        try:
            found = self._file().exists()
        except (ImportError, ValueError) as error:  # an OSError may be temporary: Ray tries the task again
            return f"{node} cannot open {self.folder} ({error}): name a folder that every node sees."
        return None if found else f"{self.folder} is not shared: {node} does not see it; name one that every node sees."

    def remove(self) -> None:
        """Remove the file at the end of the run."""
        self._file().unlink(missing_ok=True)

    def _file(self):
        return place(self.folder) / "nodes" / self.call
