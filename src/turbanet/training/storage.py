"""Folders of this machine, and at addresses such as s3://bucket/run by fsspec."""

import os
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

FILE = "file://"
LAST = "last"  # the file at an address that names the last folder that is there whole


def is_address(folder: str | os.PathLike) -> bool:
    """Whether a folder is named by an address, such as s3://bucket/run, not by a path."""
    return "://" in str(folder) and not str(folder).startswith(FILE)


def place(folder: str | os.PathLike) -> Any:
    """A folder as a path, resolved, or one at an address as `UPath`, which has a path's methods.

    Raises ImportError without what that address needs, ValueError for a kind of address that nobody knows, one that
    `Path` has cut, and options that would stay in this process.
    """
    if not is_address(folder):
        path = Path(str(folder).removeprefix(FILE)).expanduser()
        if path.parts and path.parts[0].endswith(":") and os.name != "nt":
            raise ValueError(f"{folder} is an address that a path has cut: give it as text, with its two slashes.")
        return path.resolve()
    try:
        from upath import UPath
    except ImportError:
        advice = 'pip install "turbanet[cluster]", or name a folder'
        raise ImportError(f"{folder} needs universal-pathlib, which is not installed: {advice}.") from None
    try:
        there = UPath(folder)
        if getattr(folder, "storage_options", None):
            raise ValueError("its storage_options would stay here; set them in fsspec's configuration, on every node")
        _ = there.fs  # which is made now
    except ImportError as error:
        raise ImportError(f"{folder} cannot be opened ({error}): install it, or name a folder.") from None
    except ValueError as error:
        raise ValueError(f"{folder} cannot be opened ({error}): name a folder, or what fsspec knows.") from None
    return there


def write_whole(file: Any, text: str) -> None:
    """Write a file of a `place`: others see all of it or nothing, at an address if its kind of store does so."""
    if is_address(file):
        file.write_text(text)  # an object is there when all of it is
        return
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    part.write_text(text)
    part.replace(file)


def remove(folder: Any) -> None:
    """Remove a folder of a `place` with all that is in it, if it is there."""
    if not is_address(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.fs.rm(folder.path, recursive=True)


class Mirror:
    """A folder of numbered folders at an address, of which what was last kept is on this machine while it is used."""

    def __init__(self, address: str | os.PathLike):
        self.there = place(address)
        folder = tempfile.TemporaryDirectory(prefix="turbanet-")
        self.here = Path(folder.name)
        weakref.finalize(self, folder.cleanup)
        if (last := self.there / LAST).exists():
            number = last.read_text()
            if (self.there / number).exists():  # not where another attempt has removed it: then it begins anew
                self.there.fs.get((self.there / number).path, f"{self.here / number}", recursive=True)

    def send(self, number: int) -> None:
        """Copy the folder of that number there, then name it as the last, then remove there what is no more here."""
        self.there.mkdir(parents=True, exist_ok=True)
        self.there.fs.put(f"{self.here / str(number)}/", (self.there / str(number)).path, recursive=True)
        write_whole(self.there / LAST, str(number))
        for old in self.there.iterdir():
            if old.name.isdigit() and not (self.here / old.name).exists():
                remove(old)
