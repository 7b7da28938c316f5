"""Folders, on this machine or, by fsspec, at addresses such as s3://bucket/run."""

import os
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

from turbanet.core.arrays import first_line
from turbanet.core.extras import FOLDER

FILE = "file://"
LAST = "last"  # the file at an address that names the last complete folder


def is_address(folder: str | os.PathLike) -> bool:
    """Whether a folder is an address, such as s3://bucket/run, and not a path."""
    return "://" in str(folder) and not str(folder).startswith(FILE)


def place(folder: str | os.PathLike) -> Any:
    """Return a folder as a resolved path; at an address as `UPath`, which has a path's methods.

    Raises ImportError if a package that the address needs is missing, ValueError for an unknown kind of address, one
    that `Path` has cut, and options that other processes would not have.
    """
    if folder is None or isinstance(folder, bool | int | float) or not str(folder):
        raise TypeError(f"A folder is a path or an address, as text or a Path; got {folder!r:.60}.")
    if not is_address(folder):
        path = Path(str(folder).removeprefix(FILE)).expanduser()
        if path.parts and path.parts[0].endswith(":") and os.name != "nt":
            raise ValueError(f"{folder} is an address that a path has cut: give it as text, with its two slashes.")
        return path.resolve()
    if getattr(folder, "storage_options", None):
        raise ValueError(f"The storage_options of {folder} would stay here: set them in fsspec's configuration.")
    try:
        from upath import UPath  # of the extra "cluster"

        remote = UPath(folder)
        _ = remote.fs  # opened now, so that its errors are raised here
    except (ImportError, ValueError) as error:
        advice = f"install what is missing (pip install '.[cluster]' {FOLDER}), or name a folder or what fsspec knows"
        raise type(error)(f"{folder} cannot be opened ({error}): {advice}.") from None
    return remote


def write_whole(file: Any, content: str | bytes) -> None:
    """Write a file of a `place` atomically; at an address, if its store writes whole objects."""
    content = content.encode() if isinstance(content, str) else content
    if is_address(file):
        file.write_bytes(content)  # an object store shows an object once it is complete
        return
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def save_file(path: str | os.PathLike, content: bytes, what: str) -> None:
    """Write a file atomically and make its folder; ValueError for a folder, OSError if it cannot be written."""
    file = place(path)
    if file.is_dir():
        raise ValueError(f"{path} is a folder, {what} is saved to a file: name one.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except OSError as error:
        raise OSError(f"{what} cannot be saved to {path} ({first_line(error)}): name another file.") from error


def remove(folder: Any) -> None:
    """Remove a folder of a `place` with its contents, if it exists."""
    if not is_address(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.fs.rm(folder.path, recursive=True)


class Mirror:
    """A folder of numbered folders at an address; while it is used, the last of them is copied to this machine."""

    def __init__(self, address: str | os.PathLike):
        self.there = place(address)
        folder = tempfile.TemporaryDirectory(prefix="turbanet-")
        self.here = Path(folder.name)
        weakref.finalize(self, folder.cleanup)
        if (last := self.there / LAST).exists():
            number = last.read_text()
            if (self.there / number).exists():  # another attempt may have removed it; this one then begins anew
                self.there.fs.get((self.there / number).path, f"{self.here / number}", recursive=True)

    def send(self, number: int) -> None:
        """Upload the folder of that number, name it as the last, and remove remote folders that are gone here."""
        self.there.mkdir(parents=True, exist_ok=True)
        self.there.fs.put(f"{self.here / str(number)}/", (self.there / str(number)).path, recursive=True)
        write_whole(self.there / LAST, str(number))
        for old in self.there.iterdir():
            if old.name.isdigit() and not (self.here / old.name).exists():
                remove(old)
