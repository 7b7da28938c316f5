"""Daily closing prices from a file, from Yahoo through yfinance, or simulated, as one panel [day, ticker].

Volumes stand beside them where a file has them, and are NaN elsewhere.
"""

import hashlib
import importlib.metadata
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from study.sources import yahoo

Panel = tuple[dict[str, np.ndarray], dict[str, Any]]  # close and volume [day, ticker], dates, tickers; facts on them

# Tickers and trading days to keep, calendar days to request from the network (end exclusive), share of the tickers that
# must be received.
SETTINGS = {"tickers": 500, "days": 505, "start": "2016-02-08", "end": "2018-02-08", "coverage": 0.9}
CARRY = 2  # days of a hole that are filled; a longer one excludes the ticker
SP500_2018 = {
    "e0edea30216667f4f0eb0b40e84550e57993a13f9d6ba67afaf7e929958197a3",
    "affb14384f3c2479d5d071c700bc74b789ecfd880128935b017f13c8ef0ba45d",
}


def address() -> str:
    """Return the address that is requested to check for a network."""
    return yahoo.address()


def from_file(folder: Path, *, tickers: int, days: int, **_: Any) -> Panel:
    """Read the last `days` days of at most `tickers` tickers from the one *.csv or *.csv.gz in `folder`.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or incomplete.
    """
    import pandas as pd

    paths = sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])
    if not paths:
        raise FileNotFoundError(f"no *.csv or *.csv.gz is in {folder}.")
    if len(paths) > 1:
        raise ValueError(f"{folder} must hold one prices file, it holds {', '.join(p.name for p in paths)}.")
    (path,) = paths
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, EOFError, zlib.error, ValueError) as error:  # pandas' own are ValueErrors
        raise ValueError(f"{path} is damaged or empty ({error}); put it there again.") from None
    if "ticker" not in frame:
        frame = frame.rename(columns={"Name": "ticker"})
    if missing := {"date", "close", "ticker"} - set(frame.columns):
        raise ValueError(
            f"{path} must have the columns date, close, ticker; {', '.join(sorted(missing))} is missing, "
            f"it has {', '.join(frame.columns)}."
        )
    prices = pd.DataFrame(
        {
            "date": pd.to_datetime(frame["date"], format="%Y-%m-%d", errors="coerce"),
            "close": pd.to_numeric(frame["close"], errors="coerce"),
            "ticker": frame["ticker"].replace("", None),
        }
    )
    volume = np.nan
    if "volume" in frame:
        volume = pd.to_numeric(frame["volume"], errors="coerce")
        bad = (frame["volume"] != "") & ~volume.between(0, np.inf, inclusive="left")
        _first_bad(path, frame, bad, "a volume of at least 0, or none", "volume")
    bad = prices.isna().any(axis=1) | ~(prices["close"] > 0) | np.isinf(prices["close"])
    _first_bad(path, frame, bad, "a date YYYY-MM-DD, a close above 0 and a ticker")
    _first_bad(path, frame, prices.duplicated(["date", "ticker"]), "one row per date and ticker")
    wide = prices.pivot(index="date", columns="ticker", values="close").sort_index(axis=0).sort_index(axis=1)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    known = sha256 in SP500_2018
    arrays, facts = _select(wide, tickers, days, path.name)
    volume = prices.assign(volume=volume).pivot(index="date", columns="ticker", values="volume")
    arrays["volume"] = volume.reindex(index=arrays["dates"], columns=arrays["tickers"]).to_numpy(float)
    first, last = arrays["dates"][[0, -1]]
    facts |= {
        "title": f"{'S&P 500 ' if known else ''}daily closes {first} to {last}, from a file",
        "real": True,
        "versions": {"pandas": pd.__version__},
        "inputs": {path.name: sha256},
        "notes": [
            "The index members of February 2018: survivorship bias.",
            "Adjusted for most splits, not for dividends or spin-offs.",
        ]
        if known
        else ["A prices file of your own, taken as it is."],
    }
    return arrays, facts


def from_network(*, tickers: int, days: int, start: str, end: str, coverage: float) -> Panel:
    """Download adjusted closes of the S&P 500's members from Yahoo.

    Parameters
    ----------
    tickers : the number to keep at most
    days : trading days to keep, the last ones
    start, end : the first day and the day after the last, YYYY-MM-DD
    coverage : the share of the members that must be received, 0 to 1

    Returns
    -------
    The panel and facts on it.

    Raises
    ------
    ConnectionError : if too few members are received.
    ValueError : for closes that are not positive, and for too few days.
    """
    members = yahoo.members()
    wide = yahoo.download(members, str(start), str(end))
    missing = sorted(set(members) - set(wide.columns))
    if len(wide.columns) / len(members) < coverage:
        raise ConnectionError(
            f"Yahoo answered for {len(members) - len(missing)} of {len(members)} tickers, at least "
            f"{coverage:.0%} were required (data.stocks.coverage in params.yaml)."
        )
    if bad := sorted(wide.columns[(wide <= 0).any() | np.isinf(wide).any()]):
        raise ValueError(f"Yahoo's closes must be positive, those of {', '.join(bad)} are not; use a file.")
    arrays, facts = _select(wide, tickers, days, "Yahoo")
    arrays["volume"] = np.full_like(arrays["close"], np.nan)  # not asked for
    first, last = arrays["dates"][[0, -1]]
    facts |= {
        "title": f"S&P 500 daily closes {first} to {last}, from Yahoo",
        "real": True,
        "versions": {name: importlib.metadata.version(name) for name in ("yfinance", "pytickersymbols")},
        "inputs": {},
        "missing": missing,
        "notes": ["Today's index members: survivorship bias.", "Adjusted for splits and dividends."],
    }
    return arrays, facts


def embedded(*, tickers: int, days: int, seed: int = 0, **_: Any) -> Panel:
    """Simulate `tickers` geometric random walks of `days` days with one common factor, drawn by `seed`.

    Daily volatility: 1 % common, 1.5 % each ticker's own.
    """
    rng = np.random.default_rng(seed)
    common = rng.normal(0.0003, 0.01, (days, 1)) * rng.uniform(0.5, 1.5, tickers)
    steps = common + rng.normal(0, 0.015, (days, tickers))
    steps[0] = rng.normal(4, 0.8, tickers)  # the first day's log price, around 55 US dollars
    size = np.exp(rng.normal(14, 1, tickers) + 20 * np.abs(steps[1:]) + rng.normal(0, 0.2, (days - 1, tickers)))
    arrays = {
        "close": np.exp(steps.cumsum(axis=0)).round(2).clip(0.01),
        "volume": np.concatenate([size[:1], size]).round(),
        "dates": np.busday_offset("2000-01-03", np.arange(days)),
        "tickers": np.array([f"SIM{i:04d}" for i in range(tickers)]),
    }
    facts = {
        "title": "simulated market, not real prices",
        "real": False,
        "versions": {"numpy": np.__version__},
        "inputs": {},
        "notes": [f"Geometric random walks with a common factor, seed {seed}; the dates are made up too."],
    }
    return arrays, facts


def _first_bad(path, frame, bad, expected, *more):
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        found = ", ".join(f"{name} {frame.loc[row, name]!r}" for name in ("date", "close", "ticker", *more))
        first = f"{int(bad.sum())} rows do not, the first is line {row + 2}"
        raise ValueError(f"{path} must hold {expected}; {first}: {found}.")


def _select(wide, tickers, days, origin):
    """Select the last `days` days of the `tickers` tickers with the most closes; fill short holes, drop long ones."""
    if len(wide) < days:
        raise ValueError(f"{origin} has {len(wide)} days, {days} are required; lower data.stocks.days in params.yaml.")
    close = wide.to_numpy(float, copy=True)
    names = [str(name) for name in wide.columns]
    dates = wide.index.to_numpy().astype("datetime64[D]")
    carried = []
    excluded = {}
    for column, name in enumerate(names):
        prices = close[:, column]
        known = np.flatnonzero(~np.isnan(prices))
        if known[-1] < len(prices) - 1:
            excluded[name] = f"ends on {dates[known[-1]]}"
            continue
        for gap in np.flatnonzero(np.diff(known) > 1):
            before = known[gap]
            after = known[gap + 1]
            hole = range(max(before + 1, len(prices) - days), after)
            if not hole:
                continue
            if after - before - 1 > CARRY:
                excluded[name] = f"no price for {after - before - 1} days from {dates[before + 1]}"
                break
            prices[hole.start : hole.stop] = prices[before]
            carried += [f"{name} {dates[day]}" for day in hole]
    close = close[-days:]
    dates = dates[-days:]
    counts = (~np.isnan(close)).sum(axis=0)
    whole = [i for i, name in enumerate(names) if name not in excluded]
    longest = sorted(whole, key=lambda i: (-counts[i], names[i]))[:tickers]
    kept = sorted(longest, key=names.__getitem__)
    if not kept:
        raise ValueError(f"{origin} has no ticker whose series runs to {dates[-1]} without a long hole.")
    arrays = {"close": close[:, kept], "dates": dates, "tickers": np.array([names[i] for i in kept])}
    facts = {
        "carried_forward": [day for day in carried if day.rsplit(" ", 1)[0] in arrays["tickers"]],
        "excluded": excluded,
        "left_out": [names[i] for i in whole if i not in kept],
    }
    return arrays, facts
