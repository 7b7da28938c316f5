"""The shared folder of a run over a cluster: whose it is, and whether every node sees it."""

import json
import socket
import uuid
from pathlib import Path

from turbanet.training.checkpoint import differences, versions

RUN = "run.json"


def claimed(folder: Path) -> dict[str, str]:
    """{name: text} of all that decides what comes out of the run whose folder it is, nothing where there is none."""
    file = folder / RUN
    return json.loads(file.read_text()) if file.exists() else {}


def claim(folder: Path, facts: dict[str, str]) -> None:
    """Make a folder that of one run, known by its facts {name: text}; ValueError for the folder of another one."""
    if not (there := claimed(folder)):
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other things than a run over a cluster: name a new folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{RUN}.part"  # there whole or not at all
            part.write_text(json.dumps(facts, indent=1))
            part.replace(folder / RUN)
        except OSError as error:
            raise OSError(f"Shards cannot be kept in {folder} ({error}): name another folder.") from error
        return
    for other in differences(there, facts).values():
        raise ValueError(f"{folder} is of another run: {other}; name another folder, or remove this one.")


class Marker:
    """A file by which a node tells whether it sees the folder that the driver does."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / "nodes" / uuid.uuid4().hex
        self.versions = versions()
        self.file.parent.mkdir(exist_ok=True)
        self.file.touch()

    def check(self) -> None:
        """RuntimeError on a node that does not see the folder, or that would compute with other versions."""
        node = socket.gethostname()
        if not self.file.exists():
            raise RuntimeError(f"{self.folder} is not shared: {node} does not see it; name one that every node sees.")
        if others := list(differences(self.versions, versions()).values()):
            raise RuntimeError(f"{node} has other versions than the driver: {'; '.join(others)}; make them equal.")

    def remove(self) -> None:
        """The run is over."""
        self.file.unlink(missing_ok=True)
