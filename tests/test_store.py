"""study.sources.store: every source of every set, what is wrong with it."""

import functools
import gzip
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pandas as pd
import pytest
import requests

from study.sources import store, yahoo as yahoo_source

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow_datasets"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:yfinance"),
]
DAYS = np.busday_offset("2016-01-04", np.arange(8))


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# MNIST: the real builder on small originals, whose checksums it is told and whose server is this machine.


@pytest.fixture
def originals(tmp_path, monkeypatch):
    """Four small files in data/external/mnist and on a server, which the builder takes for the originals."""
    from tensorflow_datasets.core import units
    from tensorflow_datasets.core.download import checksums
    from tensorflow_datasets.image_classification import mnist

    server = tmp_path / "server"
    server.mkdir()
    rng = np.random.default_rng(0)
    for part, rows in (("train", 40), ("t10k", 20)):
        pixels = rng.integers(0, 256, (rows, 28, 28), np.uint8)
        pixels[:, 0, 0] = np.arange(rows)  # each image carries its number, and its label follows from it
        (server / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + pixels.tobytes()))
        labels = (np.arange(rows) % 10).astype(np.uint8)
        (server / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels.tobytes()))

    handler = functools.partial(Quiet, directory=server)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as loopback:
        threading.Thread(target=loopback.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{loopback.server_port}/"
        known = {
            url + path.name: checksums.UrlInfo(
                size=units.Size(path.stat().st_size),
                checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
                filename=path.name,
            )
            for path in server.iterdir()
        }
        monkeypatch.setattr(checksums, "get_all_url_infos", lambda: dict(known))
        monkeypatch.setattr(mnist.MNIST, "URL", url)
        monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", 40)
        monkeypatch.setattr(mnist, "_TEST_EXAMPLES", 20)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        shutil.copytree(server, tmp_path / "data" / "external" / "mnist")
        yield server
        loopback.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send_header(self, keyword, value):
        longer = keyword == "Content-Length" and os.path.exists(os.path.join(self.directory, "short"))
        super().send_header(keyword, str(int(value) + 9) if longer else value)


@pytest.fixture
def offline(monkeypatch):
    """No network: the addresses lead to a port of this machine where nobody listens."""
    for name in store.SETS:
        monkeypatch.setattr(store.module(name), "address", lambda: "http://127.0.0.1:9/")


def test_prepare_mnist_file_equals_network_byte_for_byte(tmp_path, originals):
    store.prepare("mnist", root=tmp_path, source="file")
    from_file = tree(tmp_path / "data" / "mnist")
    provenance = store.prepare("mnist", root=tmp_path, source="network")
    assert from_file == tree(tmp_path / "data" / "mnist") and len(from_file) == 4
    assert provenance["source"] == "network" and provenance["real"]


def test_prepare_mnist_keeps_images_and_labels_together(tmp_path, originals):
    store.prepare("mnist", root=tmp_path)
    arrays, provenance = store.load("mnist", tmp_path)
    numbers = arrays["x_train"][:, 0, 0]
    assert sorted(numbers) == list(range(40)) and arrays["x_test"].shape == (20, 28, 28)
    np.testing.assert_array_equal(arrays["y_train"], numbers % 10)
    assert provenance["source"] == "file" and arrays["y_train"].dtype == np.int32
    raw = (originals / "t10k-labels-idx1-ubyte.gz").read_bytes()
    assert provenance["inputs"]["t10k-labels-idx1-ubyte.gz"] == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: gzip.compress(b"other")])
def test_prepare_stops_at_a_damaged_mnist_file_and_leaves_nothing(tmp_path, originals, damage):
    path = tmp_path / "data" / "external" / "mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="wrong checksum: Expected.*Got.*put the original files into"):
        store.prepare("mnist", root=tmp_path)
    assert tree(tmp_path) == before


def test_prepare_stops_at_a_partial_set_of_mnist_files(tmp_path, originals):
    (tmp_path / "data" / "external" / "mnist" / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="but t10k-images-idx3-ubyte.gz cannot be read"):
        store.prepare("mnist", root=tmp_path)


def test_prepare_stops_at_a_tampered_download(tmp_path, originals):
    (originals / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(ValueError, match="wrong checksum.*run it again"):
        store.prepare("mnist", root=tmp_path, source="network")


def test_prepare_stops_at_a_truncated_download(tmp_path, originals):
    (originals / "short").touch()
    with pytest.raises(ValueError, match="cut short"):
        store.prepare("mnist", root=tmp_path, source="network")


def test_prepare_auto_passes_over_a_server_without_the_files(tmp_path, originals, capsys):
    shutil.rmtree(tmp_path / "data" / "external")
    (originals / "train-labels-idx1-ubyte.gz").unlink()
    assert store.prepare("mnist", root=tmp_path)["source"] == "embedded"
    assert "no network: MNIST could not be downloaded" in capsys.readouterr().out


def test_prepare_auto_falls_through_and_says_so(tmp_path, offline, capsys):
    provenance = store.prepare("mnist", root=tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in said] == [" no file", " no network", " taken from embedded"]
    assert not provenance["real"] and "stand-in" in provenance["title"]


@pytest.mark.parametrize("name", ["train-images.idx3-ubyte", "mnist.npz", "raw/train-images-idx3-ubyte.gz"])
def test_prepare_passes_over_no_file_of_another_name(tmp_path, offline, name):
    file = tmp_path / "data/external/mnist" / name
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(ValueError, match=rf"none of train-images.* It holds {name.split('/')[0]}: rename them"):
        store.prepare("mnist", root=tmp_path)
    assert not (tmp_path / "data/mnist.json").exists()


@pytest.mark.parametrize(("source", "error"), [("file", FileNotFoundError), ("network", ConnectionError)])
def test_prepare_does_not_fall_through_from_a_named_source(tmp_path, offline, source, error):
    with pytest.raises(error):
        store.prepare("mnist", root=tmp_path, source=source)
    assert tree(tmp_path) == {}


def test_prepare_embedded_digits_are_split_by_class(tmp_path):
    store.prepare("mnist", root=tmp_path, source="embedded")
    arrays, provenance = store.load("mnist", tmp_path)
    assert len(arrays["x_train"]) == 1437 and arrays["x_train"].dtype == np.uint8
    assert np.bincount(arrays["y_test"]).min() >= 34
    assert provenance["arrays"]["x_train"]["shape"] == [1437, 28, 28]


def test_embedded_digits_are_the_small_ones_enlarged_amid_a_margin(tmp_path):
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    arrays, facts = store.module("mnist").embedded()
    x = np.concatenate([arrays["x_train"], arrays["x_test"]])
    inner = x[:, 4:24, 4:24]
    assert x.sum() == inner.sum() and "enlarged" in facts["notes"][0]
    small = load_digits().images * 255 / 16
    expected = zoom(small, (1, 2.5, 2.5), order=1, mode="nearest", grid_mode=True)
    np.testing.assert_allclose(sorted(inner.sum((1, 2))), sorted(expected.sum((1, 2))), rtol=0.01)


@pytest.mark.parametrize(("name", "shape"), [("mnist", (28, 28)), ("cifar10", (32, 32, 3))])
def test_a_stand_in_has_the_shape_of_what_it_stands_for(name, shape):
    arrays, facts = store.module(name).embedded()
    assert not facts["real"] and "stand-in" in facts["title"]
    assert {arrays[f"x_{part}"].shape[1:] for part in ("train", "test")} == {shape}


def test_prepare_keeps_the_date_of_an_equal_set_only(tmp_path):
    record = tmp_path / "data" / "mnist.json"
    first = store.prepare("mnist", root=tmp_path, source="embedded")
    record.write_text(json.dumps(first | {"date": "2001-01-01"}))
    assert store.prepare("mnist", root=tmp_path, source="embedded")["date"] == "2001-01-01"
    record.write_text(json.dumps(first | {"date": "2001-01-01", "title": "other"}))
    assert store.prepare("mnist", root=tmp_path, source="embedded")["date"] == first["date"]


@pytest.mark.parametrize(
    ("name", "settings", "known"),
    [
        ("imagenet", {}, "mnist, cifar10, stocks"),
        ("mnist", {"source": "cloud"}, "auto, file, network, embedded"),
        ("stocks", {"ticker": 5}, "tickers, days, start, end, coverage"),
    ],
)
def test_prepare_lists_the_known_names(tmp_path, name, settings, known):
    with pytest.raises(ValueError, match=f"Unknown .*known: {known}"):
        store.prepare(name, root=tmp_path, **settings)


def test_load_imports_no_sets_module(tmp_path):
    store.prepare("mnist", root=tmp_path, source="embedded")
    script = (
        "import sys; from study.sources import store; store.load('mnist', sys.argv[1]); "
        "print([name for name in store.SETS if f'study.sources.{name}' in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_load_names_make_data(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `make data` first"):
        store.load("mnist", tmp_path)


def test_load_finds_the_repository_above_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").touch()
    (tmp_path / "notebooks").mkdir()
    store.prepare("stocks", root=tmp_path, source="embedded", tickers=3, days=4)
    monkeypatch.chdir(tmp_path / "notebooks")
    assert store.load("stocks")[0]["close"].shape == (4, 3)


def test_main_reads_the_settings_and_turns_errors_into_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    params = tmp_path / "params.yaml"
    params.write_text("data:\n  stocks: {source: embedded, tickers: 3, days: 4}\n")
    assert store.main(["stocks"]) == 0
    assert capsys.readouterr().out == ("data stocks: taken from embedded: simulated market, not real prices\n")
    params.write_text("data:\n  stocks: {source: embedded, tickers: 0}\n")
    assert store.main(["stocks"]) == 1
    assert capsys.readouterr().err.strip() == (
        "data stocks: tickers of stocks must be a number above 0 such as 500, not 0."
    )


# Stock prices.


def prices_file(root, columns, close="close", ticker="ticker", edit=None):
    """A prices file of the tickers and closes in `columns`, one close per day, None for no row."""
    rows = [
        (str(day), str(price), name)
        for name, prices in columns.items()
        for day, price in zip(DAYS, prices, strict=True)
        if price is not None
    ]
    frame = pd.DataFrame(rows, columns=["date", close, ticker])
    folder = root / "data" / "external" / "stocks"
    folder.mkdir(parents=True)
    (edit(frame) if edit else frame).to_csv(folder / "prices.csv.gz", index=False)
    return folder / "prices.csv.gz"


def panel(root, **settings):
    store.prepare("stocks", root=root, **{"source": "file", "tickers": 9, "days": 8} | settings)
    return store.load("stocks", root)


def test_prepare_stocks_reads_a_file(tmp_path):
    path = prices_file(tmp_path, {"NA": range(1, 9), "B": range(2, 10)}, ticker="Name")
    arrays, provenance = panel(tmp_path)
    assert arrays["tickers"].tolist() == ["B", "NA"]
    np.testing.assert_array_equal(arrays["close"], np.stack([range(2, 10), range(1, 9)], axis=1))
    np.testing.assert_array_equal(arrays["dates"], DAYS)
    assert provenance["inputs"] == {"prices.csv.gz": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert provenance["title"] == "daily closes 2016-01-04 to 2016-01-13, from a file" and provenance["real"]


def test_prepare_stocks_reads_volumes_where_they_are(tmp_path):
    closes = {"A": range(1, 9), "B": [None, None, *range(1, 7)]}
    prices_file(tmp_path, closes, edit=lambda frame: frame.assign(volume=frame.close.astype(float) * 10))
    arrays, _ = panel(tmp_path)
    np.testing.assert_array_equal(arrays["volume"], 10 * arrays["close"])
    assert arrays["volume"].shape == (8, 2) and np.isnan(arrays["volume"][:2, 1]).all()


def test_prepare_stocks_keeps_the_tickers_with_the_most_days(tmp_path):
    prices_file(tmp_path, {"C": range(1, 9), "B": [None, *range(1, 8)], "A": range(1, 9), "D": range(1, 9)})
    arrays, provenance = panel(tmp_path, tickers=2, days=5)  # B has all the last five days too
    assert arrays["tickers"].tolist() == ["A", "B"] and provenance["left_out"] == ["C", "D"]
    arrays, provenance = panel(tmp_path, tickers=2)
    assert arrays["tickers"].tolist() == ["A", "C"]


def test_prepare_stocks_leaves_days_before_a_listing_empty(tmp_path):
    prices_file(tmp_path, {"A": range(1, 9), "B": [None] * 5 + [1, 2, 3]})
    arrays, provenance = panel(tmp_path)
    np.testing.assert_array_equal(np.isnan(arrays["close"][:, 1]), [True] * 5 + [False] * 3)
    assert provenance["excluded"] == {} and provenance["carried_forward"] == []


def test_prepare_stocks_carries_a_hole_of_two_days_forward(tmp_path, capsys):
    prices_file(tmp_path, {"A": range(1, 9), "BRK B": [1, 2, None, None, 5, 6, 7, 8]})
    arrays, provenance = panel(tmp_path)
    np.testing.assert_array_equal(arrays["close"][:, 1], [1, 2, 2, 2, 5, 6, 7, 8])
    assert provenance["carried_forward"] == ["BRK B 2016-01-06", "BRK B 2016-01-07"]
    said = capsys.readouterr().out
    assert "data stocks: 2 carried forward, such as BRK B 2016-01-06\n" in said and "excluded" not in said


def test_prepare_stocks_excludes_longer_holes_and_early_ends(tmp_path):
    hole = [1, None, None, None, 5, 6, 7, 8]
    prices_file(tmp_path, {"A": range(1, 9), "B": hole, "C": [1, 2, 3, 4, 5, 6, 7, None]})
    arrays, provenance = panel(tmp_path)
    assert arrays["tickers"].tolist() == ["A"]
    assert provenance["excluded"] == {"B": "no price for 3 days from 2016-01-05", "C": "ends on 2016-01-12"}


def test_prepare_stocks_takes_no_hole_at_the_start_for_a_listing(tmp_path):
    prices_file(tmp_path, {"A": range(1, 9), "B": [1, None, None, None, 5, 6, 7, 8]})
    assert list(panel(tmp_path, days=6)[1]["excluded"]) == ["B"]
    assert panel(tmp_path, days=4)[1]["excluded"] == {}


@pytest.mark.parametrize("price", ["-2.0", "0", "", "nan", "inf", "abc"])
def test_prepare_stocks_stops_at_a_bad_price_and_leaves_nothing(tmp_path, price):
    prices_file(tmp_path, {"A": [1, 2, price, 4, 5, 6, 7, 8]})
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=f"1 rows do not, the first is line 4: .* close '{price}', ticker 'A'"):
        panel(tmp_path, source="auto")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("volume", ["1,000", "12.3M", "-5", "inf"])
def test_prepare_stocks_stops_at_a_bad_volume_and_takes_none(tmp_path, volume):
    prices_file(tmp_path, {"A": range(1, 9)}, edit=lambda frame: frame.assign(volume=["", "7", volume, *"12345"]))
    with pytest.raises(ValueError, match=f"a volume of at least 0, or none; .* line 4: .* volume '{volume}'"):
        panel(tmp_path, source="auto")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda frame: frame.drop(columns="close"), "columns date, close, ticker; close is missing, it has"),
        (lambda frame: pd.concat([frame, frame[:1]]), "one row per date and ticker; 1 rows do not"),
        (lambda frame: frame.replace("2016-01-05", "05.01.2016"), "a date YYYY-MM-DD.* line 3"),
        (lambda frame: frame[:5], "prices.csv.gz has 5 days, 8 are required"),
    ],
)
def test_prepare_stocks_stops_at_a_bad_table(tmp_path, edit, message):
    prices_file(tmp_path, {"A": range(1, 9)}, edit=edit)
    with pytest.raises(ValueError, match=message):
        panel(tmp_path)


def test_prepare_stocks_stops_at_a_truncated_file(tmp_path):
    path = prices_file(tmp_path, {"A": range(1, 9)})
    path.write_bytes(path.read_bytes()[:-15])
    with pytest.raises(ValueError, match="damaged or empty"):
        panel(tmp_path, source="auto")


def test_prepare_stocks_stops_at_two_files(tmp_path):
    path = prices_file(tmp_path, {"A": range(1, 9)})
    shutil.copy(path, path.with_name("more.csv.gz"))
    with pytest.raises(ValueError, match="one prices file, it holds more.csv.gz, prices.csv.gz"):
        panel(tmp_path)


def test_prepare_stocks_simulates_a_seeded_market(tmp_path):
    arrays, provenance = panel(tmp_path, source="embedded", tickers=50, days=300)
    again, _ = panel(tmp_path, source="embedded", tickers=50, days=300)
    assert (arrays["close"] > 0).all() and not provenance["real"] and "not real" in provenance["title"]
    np.testing.assert_array_equal(arrays["close"], again["close"])
    steps = np.diff(np.log(arrays["close"]), axis=0)
    assert 0.1 < np.corrcoef(steps.T)[np.triu_indices(50, 1)].mean() < 0.6


class Yahoo(requests.adapters.BaseAdapter):
    """Answers /v8/finance/chart/SYMBOL as Yahoo does; unknown symbols, and busy ones once, get an error."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.asked, self.busy = columns, [], set()

    def send(self, request, **_):
        symbol = request.path_url.split("?")[0].rsplit("/", 1)[1]
        if "/v8/finance/chart/" in request.path_url and "period1" in request.path_url:
            self.asked.append(symbol)
        response = requests.Response()
        response.status_code, response.url, response.request = 200, request.url, request
        prices = None if symbol in self.busy else self.columns.get(symbol)
        self.busy.discard(symbol)
        response._content = json.dumps({"chart": self.chart(prices)}).encode()
        return response

    def chart(self, prices):
        if prices is None:
            return {"result": None, "error": {"code": "Not Found", "description": "No data found"}}
        times = (DAYS.astype("datetime64[s]").astype(int) + 15 * 3600).tolist()
        closes = [float(price) for price in prices]
        quote = {key: closes for key in ("open", "high", "low", "close")} | {"volume": [1] * len(times)}
        meta = {
            "instrumentType": "EQUITY",
            "exchangeTimezoneName": "America/New_York",
            "currency": "USD",
            "validRanges": ["1d"],
            "dataGranularity": "1d",
            "priceHint": 2,
        }
        adjusted = [{"adjclose": [price / 2 for price in closes]}]
        return {
            "result": [{"meta": meta, "timestamp": times, "indicators": {"quote": [quote], "adjclose": adjusted}}],
            "error": None,
        }

    def close(self):
        pass


@pytest.fixture
def yahoo(monkeypatch):
    """yfinance asks the Yahoo above; ten tickers are the S&P 500, one of them a share class."""
    import pytickersymbols

    with warnings.catch_warnings():  # it sets filters of its own when imported
        import yfinance.multi

    adapter = Yahoo({f"T{i}": np.arange(1, 9) + i for i in range(9)} | {"B-B": np.arange(1, 9)})
    session = requests.Session()
    session.mount("https://", adapter)
    members = [{"symbol": name.replace("-", ".")} for name in adapter.columns]
    monkeypatch.setattr(pytickersymbols.PyTickerSymbols, "get_stocks_by_index", lambda *_: members)
    monkeypatch.setattr(yfinance.multi, "new_session", lambda: session)
    monkeypatch.setattr(store, "_reachable", lambda _: True)
    monkeypatch.setattr(yahoo_source.time, "sleep", lambda _: None)
    return adapter


def network(root, **settings):
    return panel(root, source="network", start="2016-01-04", end="2016-01-14", **settings)


def test_prepare_stocks_takes_adjusted_closes_from_yahoo(tmp_path, yahoo):
    arrays, provenance = network(tmp_path, tickers=10)
    assert arrays["tickers"].tolist() == ["B-B", *(f"T{i}" for i in range(9))]
    np.testing.assert_allclose(arrays["close"][:, 3], (np.arange(1, 9) + 2) / 2)
    np.testing.assert_array_equal(arrays["dates"], DAYS)
    assert provenance["missing"] == [] and "yfinance" in provenance["versions"]


def test_prepare_stocks_asks_again_only_for_the_missing(tmp_path, yahoo):
    yahoo.busy = {"T4"}
    arrays, provenance = network(tmp_path, tickers=10)
    assert len(arrays["tickers"]) == 10 and provenance["missing"] == []
    assert sorted(yahoo.asked) == sorted(yahoo.columns)


def test_prepare_stocks_lists_a_ticker_that_returns_nothing(tmp_path, yahoo):
    del yahoo.columns["T4"]
    arrays, provenance = network(tmp_path, tickers=10)
    assert len(arrays["tickers"]) == 9 and provenance["missing"] == ["T4"]


def test_prepare_stocks_raises_below_the_coverage_floor(tmp_path, yahoo):
    del yahoo.columns["T4"], yahoo.columns["T5"]
    with pytest.raises(ConnectionError, match="8 of 10 tickers, at least 90%"):
        network(tmp_path)
    assert tree(tmp_path) == {}


def test_prepare_stocks_raises_when_yahoo_answers_nothing(tmp_path, yahoo):
    yahoo.columns.clear()
    with pytest.raises(ConnectionError, match="0 of 10 tickers"):
        network(tmp_path)


def test_prepare_stocks_leaves_nothing_in_yfinances_caches(tmp_path, yahoo, monkeypatch):
    from yfinance import cache

    for kind in (cache._TzDBManager, cache._CookieDBManager):
        monkeypatch.setattr(kind, "_cache_dir", str(tmp_path / "home"))
        monkeypatch.setattr(kind, "_db", None)
    before = cache._TzCacheManager._tz_cache, cache._CookieCacheManager._Cookie_cache
    network(tmp_path)
    yahoo.columns.clear()
    with pytest.raises(ConnectionError):
        network(tmp_path)
    assert (cache._TzCacheManager._tz_cache, cache._CookieCacheManager._Cookie_cache) == before
    assert not (tmp_path / "home").exists()


def test_prepare_stocks_stops_at_a_negative_price_from_yahoo(tmp_path, yahoo):
    yahoo.columns["T4"] = [1, 2, -3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="those of T4 are not"):
        network(tmp_path)
