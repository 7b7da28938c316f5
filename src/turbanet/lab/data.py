"""The study's data sets: spirals, MNIST, CIFAR-10, stock prices: their sources, storage and splits."""

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from turbanet.lab import cifar10, mnist, stocks
from turbanet.lab.paths import repository

SETS = {"mnist": mnist, "cifar10": cifar10, "stocks": stocks}
SOURCES = ("file", "network", "embedded")
PROBE_SECONDS = 5


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


def spirals(n=128, *, noise=0.05, rotations=1.0, seed=0):
    """Two spirals, one the other turned by half a circle: x float32 [n, 2], y int32 [n]."""
    rng = np.random.default_rng(seed)
    radius = np.sqrt(np.linspace(0, 1, n))
    angle = 2 * np.pi * rotations * radius
    y = rng.integers(0, 2, n)
    x = (2 * y - 1)[:, None] * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (x + noise * rng.normal(size=(n, 2))).astype(np.float32), y.astype(np.int32)


def prepare(name, *, root, source="auto", **settings):
    """Get the data set `name`, write data/<name>/ and data/<name>.json under `root`, return the provenance.

    source: file, network, embedded, or auto, which takes the first of them that is there. A source that is
    there but bad raises ValueError; FileNotFoundError and ConnectionError tell that the one asked for is not
    there. settings: for stocks those of turbanet.lab.stocks.SETTINGS.
    """
    kind = SETS[_known("data set", name, SETS)]
    sources = SOURCES if _known("source", source, ("auto", *SOURCES)) == "auto" else (source,)
    for setting in settings:
        _known(f"setting of {name}", setting, kind.SETTINGS)
    settings = kind.SETTINGS | settings
    for setting, default in kind.SETTINGS.items():
        value = settings[setting]
        if not isinstance(default, str) and not (isinstance(value, int | type(default)) and value > 0):
            raise ValueError(f"{setting} of {name} must be a number above 0 such as {default}, not {value!r}.")
    root = Path(root)
    for taken in sources:
        try:
            arrays, facts = _fetch(kind, taken, root / "data" / "external" / name, settings)
            break
        except (FileNotFoundError, ConnectionError) as absent:
            if source != "auto":
                raise
            print(f"data {name}: no {taken}: {absent}", flush=True)
    print(f"data {name}: taken from {taken}: {facts['title']}", flush=True)
    return _write(root / "data", name, arrays, {"name": name, "source": taken} | facts)


def load(name, root=None):
    """The arrays and the provenance that `prepare` wrote: (dict of arrays, dict)."""
    _known("data set", name, SETS)
    folder = Path(root or repository()) / "data"
    try:
        provenance = json.loads((folder / f"{name}.json").read_text())
        arrays = {key: np.load(folder / name / f"{key}.npy", allow_pickle=False) for key in provenance["arrays"]}
    except FileNotFoundError:
        raise FileNotFoundError(f"The data set {name!r} is not in {folder}; run `make data` first.") from None
    return arrays, provenance


def forecast_windows(prices, *, window=20, validation_days, test_days, target="level"):
    """Each ticker's examples: `window` closes and the one after them, split by calendar day, no look-ahead.

    prices: [day, ticker], NaN before a listing. The last `test_days` days are the test set, the
    `validation_days` before them the validation set, the rest is for training; no example straddles two of
    them. Closes are divided by the ticker's highest training close. target "level": y is the next scaled
    close, in US dollars y * scale; "change": x and y are less the last close, in US dollars
    (y + last) * scale. Examples that reach back before a listing are zeros in x and y, NaN in last, and in no
    split. Raises ValueError for a ticker without a training example.
    """
    _known("target", target, ("level", "change"))
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


def _known(what, name, names):
    if name not in names:
        raise ValueError(f"Unknown {what} {name!r}; known: {', '.join(names) or 'none'}.")
    return name


def _fetch(kind, source, folder, settings):
    if source == "file":
        return kind.from_file(folder, **settings)
    if source == "embedded":
        return kind.embedded(**settings)
    if not _reachable(kind.address()):
        raise ConnectionError(f"{kind.address()} did not answer within {PROBE_SECONDS} s; is there a network?")
    return kind.from_network(**settings)


def _reachable(url):
    import requests

    answers = []

    def ask():
        with contextlib.suppress(requests.RequestException):
            answers.append(requests.head(url, timeout=PROBE_SECONDS))

    # In a thread, since no timeout bounds the look-up of the name.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return bool(answers)


def _write(folder, name, arrays, provenance):
    folder.mkdir(parents=True, exist_ok=True)
    final, record = folder / name, folder / f"{name}.json"
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as work:
        new = Path(work) / name
        new.mkdir()
        described = {}
        for key, array in arrays.items():
            np.save(new / f"{key}.npy", array, allow_pickle=False)
            sha256 = hashlib.sha256((new / f"{key}.npy").read_bytes()).hexdigest()
            described[key] = {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": sha256}
        nothing = {"carried_forward": [], "excluded": {}, "left_out": [], "missing": []}
        provenance = nothing | provenance | {"arrays": described}
        old = json.loads(record.read_text()) if record.exists() else {}
        today = datetime.date.today().isoformat()
        date = old.pop("date", today)
        provenance["date"] = date if old == provenance else today
        text = json.dumps(provenance, indent=2, sort_keys=True) + "\n"
        (Path(work) / "record").write_text(text)
        # The record goes first and comes last: whatever interrupts this, load finds a whole set or none.
        record.unlink(missing_ok=True)
        if final.exists():
            shutil.rmtree(final)
        new.rename(final)
        (Path(work) / "record").rename(record)
    return provenance


def _rows(member):
    """Boolean [ticker, example] -> int32 [ticker, row]: the rows that are true, padded at the end with -1."""
    order = np.argsort(~member, axis=1, kind="stable")[:, : member.sum(axis=1).max()]
    return np.where(np.take_along_axis(member, order, axis=1), order, -1).astype(np.int32)


def main(arguments=None):
    """Prepare one data set in the repository, with the settings of its section in params.yaml."""
    import yaml

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", help=", ".join(SETS))
    name = parser.parse_args(arguments).name
    try:
        root = repository()
        _known("data set", name, SETS)
        sections = (yaml.safe_load((root / "params.yaml").read_text()) or {}).get("data") or {}
        if not isinstance(sections.get(name), dict):
            raise ValueError(f"params.yaml must have a section data.{name} with at least `source: auto`.")
        prepare(name, root=root, **sections[name])
    except (ValueError, OSError, yaml.YAMLError) as error:
        print(f"data {name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
