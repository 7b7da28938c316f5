"""CIFAR-10: the archive through the real builder, some of its batches, what is wrong with them, the stand-in."""

import functools
import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading

import numpy as np
import pytest

from study.sources import cifar10, store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow_datasets")
ROWS = 20  # of a batch here


def raw(seed):
    """A batch in the official layout: each record's first pixel is its number."""
    records = np.random.default_rng(seed).integers(0, 256, (ROWS, cifar10.RECORD), np.uint8)
    records[:, 0] = np.arange(ROWS) % 10
    records[:, 1] = np.arange(ROWS)
    return records.tobytes()


RAW = {name: raw(i) for i, name in enumerate((*cifar10.TRAINING, cifar10.TEST))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "ROWS", ROWS)
    monkeypatch.setattr(cifar10, "MD5", {name: hashlib.md5(RAW[name]).hexdigest() for name in cifar10.MD5})
    folder = tmp_path / "data/external/cifar10"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """The archive on a server that the builder takes for the original's; its bytes."""
    from tensorflow_datasets.core import units
    from tensorflow_datasets.core.download import checksums

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        for name, content in RAW.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            files.addfile(info, io.BytesIO(content))
    server = tmp_path / "server"
    server.mkdir()
    (server / cifar10.ARCHIVE).write_bytes(packed.getvalue())
    handler = functools.partial(Quiet, directory=server)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as loopback:
        threading.Thread(target=loopback.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{loopback.server_port}/{cifar10.ARCHIVE}"
        checksum = hashlib.sha256(packed.getvalue()).hexdigest()
        size = units.Size(len(packed.getvalue()))
        known = {url: checksums.UrlInfo(size=size, checksum=checksum, filename=cifar10.ARCHIVE)}
        monkeypatch.setattr(checksums, "get_all_url_infos", lambda: dict(known))
        monkeypatch.setattr(cifar10, "URL", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield packed.getvalue()
        loopback.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def put(folder, *names, gzipped=True):
    for name in names:
        content = gzip.compress(RAW[name]) if gzipped else RAW[name]
        (folder / (f"{name}.gz" if gzipped else name)).write_bytes(content)


def test_the_archive_from_file_and_from_network_is_the_same_set(tmp_path, folder, archive):
    (folder / cifar10.ARCHIVE).write_bytes(archive)
    first = store.prepare("cifar10", root=tmp_path, source="file")
    arrays, _ = store.load("cifar10", tmp_path)
    second = store.prepare("cifar10", root=tmp_path, source="network")
    assert first["arrays"] == second["arrays"] and second["real"]
    assert arrays["x_train"].shape == (5 * ROWS, 32, 32, 3) and arrays["x_test"].shape == (ROWS, 32, 32, 3)
    np.testing.assert_array_equal(arrays["y_test"], arrays["x_test"][:, 0, 0, 0] % 10)
    by_hand = np.frombuffer(RAW[cifar10.TEST], np.uint8).reshape(ROWS, -1)[:, 1:].reshape(-1, 3, 32, 32)
    order = arrays["x_test"][:, 0, 0, 0]
    np.testing.assert_array_equal(arrays["x_test"].transpose(0, 3, 1, 2), by_hand[order])


def test_a_damaged_archive_stops_the_run(tmp_path, folder, archive):
    (folder / cifar10.ARCHIVE).write_bytes(archive[:-20])
    with pytest.raises(ValueError, match="wrong checksum.*put the original cifar-10-binary.tar.gz into"):
        store.prepare("cifar10", root=tmp_path)


@pytest.mark.parametrize("gzipped", [True, False])
def test_some_batches_are_some_of_the_set_and_say_so(tmp_path, folder, gzipped):
    put(folder, "data_batch_1.bin", cifar10.TEST, gzipped=gzipped)
    facts = store.prepare("cifar10", root=tmp_path)
    arrays, _ = store.load("cifar10", tmp_path)
    assert facts["real"] and facts["title"] == "CIFAR-10, 20 of the 50 000 training images"
    assert "1 of the 5 training batches" in facts["notes"][0] and len(facts["notes"]) == 1
    expected = np.frombuffer(RAW["data_batch_1.bin"], np.uint8).reshape(ROWS, -1)
    np.testing.assert_array_equal(arrays["y_train"], expected[:, 0])
    np.testing.assert_array_equal(arrays["x_train"][:, 3, 7, 2], expected[:, 1 + 2 * 1024 + 3 * 32 + 7])
    assert facts["inputs"][cifar10.TEST] == hashlib.sha256(RAW[cifar10.TEST]).hexdigest()


def test_batches_may_lie_in_the_archives_folder_and_unknown_ones_are_named(tmp_path, folder):
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir()
    put(inner, "data_batch_3.bin", cifar10.TEST)
    facts = store.prepare("cifar10", root=tmp_path)
    assert facts["notes"][1] == "no checksum is known of data_batch_3.bin."


DAMAGES = {
    "other bytes": lambda content: gzip.compress(bytes(ROWS * cifar10.RECORD)),
    "too short": lambda content: gzip.compress(content[:-1]),
    "no gzip": lambda content: b"nothing",
    "cut short": lambda content: gzip.compress(content)[:-30],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_batch_stops_the_run(tmp_path, folder, damage):
    put(folder, "data_batch_1.bin", cifar10.TEST)
    (folder / "data_batch_1.bin.gz").write_bytes(DAMAGES[damage](RAW["data_batch_1.bin"]))
    with pytest.raises(ValueError, match="put the original file into"):
        store.prepare("cifar10", root=tmp_path)
    assert not (tmp_path / "data/cifar10.json").exists()


@pytest.mark.parametrize("name", ["data_batch_1.bin", cifar10.TEST])
def test_training_and_test_batches_are_both_needed(tmp_path, folder, name):
    put(folder, name)
    with pytest.raises(ValueError, match=f"but only {name} is there"):
        store.prepare("cifar10", root=tmp_path)


def test_without_files_and_network_images_are_generated(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(cifar10, "address", lambda: "http://127.0.0.1:9/")
    facts = store.prepare("cifar10", root=tmp_path)
    arrays, _ = store.load("cifar10", tmp_path)
    assert not facts["real"] and "stand-in" in facts["title"]
    assert arrays["x_train"].shape == (1000, 32, 32, 3) and np.bincount(arrays["y_train"]).tolist() == [100] * 10
    assert json.loads((tmp_path / "data/cifar10.json").read_text())["source"] == "embedded"


def test_the_known_checksums_are_the_published_ones():
    assert cifar10.MD5 == {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    }
