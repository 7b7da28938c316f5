"""Splits without look-ahead: forecasting windows by day, rows by class; pixels scaled for networks."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Windows(NamedTuple):
    """The result of `forecast_windows` for the kept tickers; an example is the same calendar days for all."""

    x: np.ndarray  # float32 [ticker, example, window, 1], scaled
    y: np.ndarray  # float32 [ticker, example, 1], scaled
    train: np.ndarray  # int32 [ticker, row], rows of the example axis, padded at the end with -1
    validation: np.ndarray  # int32 [ticker, row]
    test: np.ndarray  # int32 [ticker, row]
    scale: np.ndarray  # float64 [ticker], US dollars
    last: np.ndarray  # float32 [ticker, example], the last scaled close: the persistence forecast
    target_date: np.ndarray  # int64 [example], index of the target's day
    kept: np.ndarray  # int64 [ticker], the columns of the prices
    left_out: dict[str, str]  # {ticker: reason} of the other columns


def forecast_windows(
    prices: np.ndarray,
    *,
    validation_days: int,
    test_days: int,
    window: int = 20,
    target: str = "level",
    tickers: Sequence[str] | None = None,
) -> Windows:
    """Make each ticker's examples, consecutive closes and the next one, split by calendar day without look-ahead.

    Parameters
    ----------
    prices : closes in US dollars [day, ticker], NaN before a listing
    validation_days : days of the validation set, before the test days; earlier days are for training
    test_days : days of the test set, the last ones; no example straddles two sets
    window : closes in an example's x, days
    target : "level", where y is the next scaled close, y * scale in US dollars; or "change", where the last close is
        subtracted from x and y, (y + last) * scale in US dollars
    tickers : names; None takes column numbers

    Returns
    -------
    Windows. Closes are divided by the ticker's highest training close. Examples that reach back before a listing are
    zero in x and y, NaN in last, and in no split. Tickers without a training example are listed in `left_out`.

    Raises
    ------
    ValueError : for days too few for the splits, and where no ticker has a training example.
    """
    if target not in ("level", "change"):
        raise ValueError(f"Unknown target {target!r}; known: level, change.")
    prices = np.asarray(prices, np.float64)
    training_days = len(prices) - validation_days - test_days
    edges = np.cumsum([0, max(training_days, 0), validation_days, test_days])
    if min(window, validation_days, test_days) < 1 or any(np.diff(edges) <= window):
        raise ValueError(
            f"Each split needs more days than the window of {window}; of {len(prices)} days, {training_days} "
            f"are for training, {validation_days} for validation, {test_days} for test."
        )
    starts = [np.arange(first, end - window) for first, end in itertools.pairwise(edges)]
    split = np.repeat(np.arange(3), [len(part) for part in starts])
    days = np.concatenate(starts)[:, None] + np.arange(window + 1)
    closes = prices[days].transpose(2, 0, 1)
    whole = ~np.isnan(closes).any(axis=2)
    is_kept = whole[:, split == 0].any(axis=1)
    left_out = _without_training(prices[:training_days], ~is_kept, window + 1, tickers)
    kept = np.flatnonzero(is_kept)
    closes = closes[kept]
    whole = whole[kept]
    scale = np.nanmax(prices[:training_days, kept], axis=0)
    closes = closes / scale[:, None, None]
    last = closes[:, :, window - 1]
    if target == "change":
        closes = closes - last[:, :, None]
    closes = np.where(whole[:, :, None], closes, 0).astype(np.float32)
    rows = [_rows(whole & (split == part)) for part in range(3)]
    return Windows(
        closes[:, :, :window, None],
        closes[:, :, window:],
        *rows,
        scale,
        np.where(whole, last, np.nan).astype(np.float32),
        days[:, window],
        kept,
        left_out,
    )


def split_rows(y: np.ndarray, *, rows: int, held_out: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Choose rows stratified by class and split them, by scikit-learn.

    Parameters
    ----------
    y : classes [row]
    rows : the number of rows; all where there are fewer
    held_out : the share for validation, and again for test
    seed : of the draw

    Returns
    -------
    The indices for training, validation and test, each in order.

    Raises
    ------
    ValueError : for a share that leaves nothing for one of the three.
    """
    from sklearn.model_selection import train_test_split
    from sklearn.utils import resample

    if not 0 < held_out < 0.5:
        raise ValueError(f"held_out must be between 0 and 0.5, got {held_out}.")
    chosen = np.arange(len(y))
    if rows < len(y):
        chosen = resample(chosen, replace=False, n_samples=rows, stratify=y, random_state=seed)
    size = round(held_out * len(chosen))
    train, test = train_test_split(chosen, test_size=size, stratify=y[chosen], random_state=seed)
    train, validation = train_test_split(train, test_size=size, stratify=y[train], random_state=seed)
    return np.sort(train), np.sort(validation), np.sort(test)


def normalised(images: np.ndarray, *, size: int | None = None) -> np.ndarray:
    """Scale pixels for networks to about unit size: less a half of the largest, over a quarter of it.

    Parameters
    ----------
    images : uint8 [row, height, width] or [row, height, width, channel]
    size : height and width to pad the images to with zeros, or None

    Returns
    -------
    float32 [row, height, width, channel].

    Raises
    ------
    ValueError : for a size below the images' own.
    """
    x = np.asarray(images)
    x = x[..., None] if x.ndim == 3 else x
    if size is not None:
        around = [(size - x.shape[axis]) // 2 for axis in (1, 2)]
        if min(around) < 0:
            raise ValueError(f"size must be at least the images' own, {x.shape[1]} x {x.shape[2]}, got {size}.")
        pads = [(before, size - x.shape[axis] - before) for axis, before in zip((1, 2), around, strict=True)]
        x = np.pad(x, [(0, 0), *pads, (0, 0)])
    return (x.astype(np.float32) / 255 - 0.5) / np.float32(0.25)


def _without_training(prices, left_out, length, tickers):
    """Return {ticker: reason} of the columns that are `left_out`; ValueError if that is all of them."""
    names = [str(name) for name in (range(prices.shape[1]) if tickers is None else tickers)]
    columns = np.flatnonzero(left_out)
    if len(columns) == prices.shape[1]:
        raise ValueError(
            f"No ticker has {length} training days in a row, which a window takes; of {len(prices)} training days, "
            f"{', '.join(names)} have fewer: give more days, or tickers that were listed earlier."
        )
    held = (~np.isnan(prices)).sum(axis=0)
    return {
        names[column]: f"{held[column]} closes in {len(prices)} training days, a window takes {length} in a row"
        for column in columns
    }


def _rows(chosen):
    """Turn chosen examples, bool [ticker, example], into their indices, int32 [ticker, row], padded with -1."""
    order = np.argsort(~chosen, axis=1, kind="stable")[:, : chosen.sum(axis=1).max()]
    return np.where(np.take_along_axis(chosen, order, axis=1), order, -1).astype(np.int32)
