"""Daily closing prices from Yahoo through yfinance."""

import time
from unittest import mock


def address() -> str:
    """Return the address that is requested to check for a network."""
    from yfinance.const import _BASE_URL_

    return _BASE_URL_


def members() -> list[str]:
    """List the tickers of the S&P 500 today, as Yahoo spells them: share classes with a dash."""
    import pytickersymbols

    symbols = pytickersymbols.PyTickerSymbols().get_stocks_by_index("S&P 500")
    return sorted({stock["symbol"].replace(".", "-") for stock in symbols})


def download(tickers, start, end, batch=50, waits=(0, 5, 15), patience=60):
    """Download closes [day, ticker]; tickers that are not received are missing, as yfinance does not raise for them."""
    import pandas as pd
    import yfinance
    from yfinance import cache
    from yfinance.data import YfData

    series = {}
    begin = time.monotonic()
    with (  # its caches of time zones and cookies lie in the user's home
        mock.patch.object(cache._TzCacheManager, "_tz_cache", cache._TzCacheDummy()),
        mock.patch.object(cache._CookieCacheManager, "_Cookie_cache", cache._CookieCacheDummy()),
    ):
        for wait in waits:
            left = [ticker for ticker in tickers if ticker not in series]
            if not left or (not series and time.monotonic() - begin > patience):
                break
            time.sleep(wait)
            YfData.cache_get.cache_clear()  # it keeps failures too
            for i in range(0, len(left), batch):
                frame = yfinance.download(left[i : i + batch], start=start, end=end, auto_adjust=True, progress=False)
                if "Close" in frame:
                    series |= dict(frame["Close"].dropna(axis=1, how="all").items())
                if not series and time.monotonic() - begin > patience:
                    break
    return pd.DataFrame(series).sort_index(axis=0).sort_index(axis=1)
