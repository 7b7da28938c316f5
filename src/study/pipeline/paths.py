"""Where the repository is."""

from pathlib import Path


def repository():
    """The folder above the working directory that holds params.yaml."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise FileNotFoundError(f"Neither {Path.cwd()} nor a folder above it holds params.yaml; go into the repository.")
