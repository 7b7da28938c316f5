"""The progress bar of a training."""

from typing import Any

from tqdm.auto import tqdm


def progress_bar(progress: bool, **kwargs: Any) -> tqdm:
    """Return tqdm's bar, hidden without `progress` or by TQDM_DISABLE, which disable=False would override."""
    return tqdm(**kwargs) if progress else tqdm(**kwargs, disable=True)
