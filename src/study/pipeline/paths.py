"""The path of the repository."""

from pathlib import Path


def repository():
    """Find the folder at or above the working directory that contains params.yaml."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise FileNotFoundError(f"Neither {Path.cwd()} nor a folder above it holds params.yaml; go into the repository.")
