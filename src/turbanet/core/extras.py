"""Packages that a part of the library alone needs, and the extras that bring them."""

import importlib
from typing import Any

FOLDER = "in the folder of TurbaNet's clone"


def needed(module: str, extra: str) -> Any:
    """Import and return a module; ImportError that names the extra which brings it, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise lacking(error, extra) from None


def pandas() -> Any:
    """Import and return pandas."""
    return needed("pandas", "forecast")


def lacking(error: ModuleNotFoundError, extra: str) -> ImportError:
    """Return the error that says which extra brings the module that is not installed."""
    package = (error.name or str(error)).partition(".")[0]
    return ImportError(f"This needs {package}: pip install '.[{extra}]' {FOLDER}.", name=error.name)
