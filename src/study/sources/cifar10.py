"""CIFAR-10 by tensorflow-datasets from the official archive, or from some of its batches, and its stand-in."""

import gzip
import hashlib
import tarfile

import numpy as np

from study.sources import tfds as builders

SETTINGS = {}
ARCHIVE = "cifar-10-binary.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
TRAINING = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
MD5 = {"data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25", TEST: "803d5f7f4d78ea53de84dbe85f74fb6d"}
ROWS, RECORD = 10_000, 1 + 3 * 32 * 32  # of a batch; bytes: a label, then red, green, blue


def address():
    """Return the address that is requested to check for a network."""
    return URL


def from_file(folder):
    """Read the official archive in `folder`, or the test batch and some training batches, plain or gzipped.

    Batches may lie in a folder cifar-10-batches-bin in it. Raises FileNotFoundError if there are none of these files,
    ValueError if one is damaged or the test batch is missing.
    """
    if (folder / ARCHIVE).is_file():
        return _build(folder, f"put the original {ARCHIVE} into {folder}")
    found = {name: path for name in (*TRAINING, TEST) if (path := _batch_file(folder, name))}
    if not found:
        raise FileNotFoundError(f"neither {ARCHIVE} nor one of its batches is in {folder}.")
    if TEST not in found or len(found) == 1:
        raise ValueError(
            f"CIFAR-10 needs {TEST} and at least one of {', '.join(TRAINING)} in {folder}, "
            f"but only {', '.join(sorted(found))} is there; add what is missing or remove the others."
        )
    batches = {name: _batch(path, name, folder) for name, path in found.items()}
    training = [batches[name][0] for name in TRAINING if name in batches]
    x, y = (np.concatenate(part) for part in zip(*training, strict=True))
    x_test, y_test = batches[TEST][0]
    notes = [f"{len(training)} of the 5 training batches: scores are not comparable to those of all 50 000 images."]
    if unknown := sorted(set(found) - set(MD5)):
        notes.append(f"no checksum is known of {', '.join(unknown)}.")
    facts = {
        "title": "CIFAR-10" if len(training) == 5 else f"CIFAR-10, {len(x):,} of the 50 000 training images",
        "real": True,
        "versions": {},
        "inputs": {name: digest for name, (_, digest) in batches.items()},
        "notes": notes[len(training) == 5 :],
    }
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}, facts


def from_network():
    """Download and read the official archive; ConnectionError if that fails, ValueError if it is damaged."""
    return _build(None, "run it again")


def embedded(seed=0, rows=1000):
    """Generate images, 32 x 32 x 3: a coarse pattern for each of ten classes, shifted and with noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, (10, 8, 8, 3)).repeat(4, axis=1).repeat(4, axis=2)

    def images(count):
        y = rng.permutation(np.arange(count) % 10).astype(np.int32)
        moved = [np.roll(patterns[k], rng.integers(0, 32, 2), axis=(0, 1)) for k in y]
        return (0.5 * np.stack(moved) + rng.integers(0, 128, (count, 32, 32, 3))).astype(np.uint8), y

    (x, y), (x_test, y_test) = images(rows), images(rows // 5)
    facts = {
        "title": "generated images, a stand-in for CIFAR-10",
        "real": False,
        "versions": {},
        "inputs": {},
        "notes": ["Patterns under noise: scores are not comparable to CIFAR-10's."],
    }
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}, facts


def _batch_file(folder, name):
    paths = [folder / inner / file for inner in ("", "cifar-10-batches-bin") for file in (name, f"{name}.gz")]
    return next((path for path in paths if path.is_file()), None)


def _batch(path, name, folder):
    """Read a batch: ((images, labels), sha256 of the uncompressed file)."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}): put the original file into {folder}.") from None
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if len(raw) != ROWS * RECORD or md5 != MD5.get(name, md5):
        raise ValueError(
            f"{path} is not the original {name}: {len(raw)} bytes, md5 {md5}, expected {ROWS * RECORD} bytes and "
            f"{MD5.get(name, 'any')}; put the original file into {folder}."
        )
    return _images(raw), hashlib.sha256(raw).hexdigest()


def _images(raw):
    """Parse the official layout: images uint8 [row, 32, 32, 3], labels int32 [row]."""
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), records[:, 0].astype(np.int32)


def _build(folder, remedy):
    return builders.build(_builder, "CIFAR-10", folder, remedy, shape=(32, 32, 3))


def _builder():
    from PIL import Image
    from tensorflow_datasets.image_classification import cifar

    class WithoutTensorFlow(cifar.Cifar10, skip_registration=True):
        """The original builder with tarfile, NumPy and PIL as readers instead of TensorFlow."""

        name = "cifar10"

        @staticmethod
        def source():
            return URL

        def _split_generators(self, dl_manager):
            archive = dl_manager.download(URL)
            return {"train": self._rows(archive, TRAINING), "test": self._rows(archive, [TEST])}

        def _rows(self, archive, names):
            index = 0
            with tarfile.open(archive) as files:
                for name in names:
                    images, labels = _images(files.extractfile(f"cifar-10-batches-bin/{name}").read())
                    for image, label in zip(images, labels, strict=True):
                        yield index, {"id": f"{index:05d}", "image": Image.fromarray(image), "label": int(label)}
                        index += 1

    return WithoutTensorFlow
