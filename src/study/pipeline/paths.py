"""The repository: its path and the commit of its code."""

import os
import subprocess
from pathlib import Path


def repository():
    """Find the folder at or above the working directory that contains params.yaml."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise FileNotFoundError(f"Neither {Path.cwd()} nor a folder above it holds params.yaml; go into the repository.")


def commit():
    """Return git's commit of the code, short, or TURBANET_COMMIT for a copy without git; "unknown" without both."""
    if known := os.environ.get("TURBANET_COMMIT"):
        return known
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=repository(), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
