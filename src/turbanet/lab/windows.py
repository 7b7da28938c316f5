"""Splits without look-ahead: forecasting windows by day, rows by class, and pixels as networks take them."""

import itertools
from typing import NamedTuple

import numpy as np


class Windows(NamedTuple):
    """What forecast_windows returns; E examples, each the same calendar days for all tickers."""

    x: np.ndarray  # float32 [ticker, example, window, 1], scaled
    y: np.ndarray  # float32 [ticker, example, 1], scaled
    train: np.ndarray  # int32 [ticker, row], rows of the example axis, padded at the end with -1
    validation: np.ndarray  # int32 [ticker, row]
    test: np.ndarray  # int32 [ticker, row]
    scale: np.ndarray  # float64 [ticker], US dollars
    last: np.ndarray  # float32 [ticker, example], the last scaled close: the persistence forecast
    target_date: np.ndarray  # int64 [example], index of the target's day


def forecast_windows(prices, *, window=20, validation_days, test_days, target="level"):
    """Each ticker's examples: `window` closes and the one after them, split by calendar day, no look-ahead.

    prices: [day, ticker], NaN before a listing. The last `test_days` days are the test set, the
    `validation_days` before them the validation set, the rest is for training; no example straddles two of
    them. Closes are divided by the ticker's highest training close. target "level": y is the next scaled
    close, in US dollars y * scale; "change": x and y are less the last close, in US dollars
    (y + last) * scale. Examples that reach back before a listing are zeros in x and y, NaN in last, and in no
    split. Raises ValueError for a ticker without a training example.
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
    if len(short := np.flatnonzero(~whole[:, split == 0].any(axis=1))):
        raise ValueError(f"Tickers in columns {short.tolist()} have no training window of {window + 1} days in a row.")
    scale = np.nanmax(prices[:training_days], axis=0)
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
    )


def split_rows(y, *, rows, held_out, seed=0):
    """Stratified (train, validation, test) indices of `rows` of the examples with classes y [row], by scikit-learn.

    `held_out` is the share of the rows for validation and again for test; with fewer than `rows` examples, of all.
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


def normalised(images, *, mean=0.5, deviation=0.25, size=None):
    """Pixels uint8 [row, height, width(, channel)] -> float32 [row, height, width, channel] of about unit size.

    The constants come from no data, so that no row tells another anything. `size` puts zeros around smaller images.
    """
    x = np.asarray(images)
    x = x[..., None] if x.ndim == 3 else x
    if size is not None:
        around = [(size - x.shape[axis]) // 2 for axis in (1, 2)]
        if min(around) < 0:
            raise ValueError(f"size must be at least the images' own, {x.shape[1]} x {x.shape[2]}, got {size}.")
        pads = [(before, size - x.shape[axis] - before) for axis, before in zip((1, 2), around, strict=True)]
        x = np.pad(x, [(0, 0), *pads, (0, 0)])
    return (x.astype(np.float32) / 255 - mean) / np.float32(deviation)


def _rows(member):
    """Boolean [ticker, example] -> int32 [ticker, row]: the rows that are true, padded at the end with -1."""
    order = np.argsort(~member, axis=1, kind="stable")[:, : member.sum(axis=1).max()]
    return np.where(np.take_along_axis(member, order, axis=1), order, -1).astype(np.int32)
