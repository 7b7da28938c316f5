"""tensorflow-datasets' own builders, run without TensorFlow in a temporary folder with bounded timeouts."""

import contextlib
import io
import tempfile
from functools import partial
from unittest import mock

import numpy as np


def build(make, title, folder, remedy, shape):
    """Run the builder class that `make()` returns on images of `shape`: (arrays, facts).

    The class's `source()` is the common beginning of its files' addresses.

    folder : the folder of the original files; None downloads them

    Raises ValueError, which ends with `remedy`, for files that are not the originals, ConnectionError where they cannot
    be downloaded.
    """
    import requests
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import checksums, download_manager, downloader, util

    kind = make()
    tfds.disable_progress_bar()
    with (
        # Its messages name the temporary folder.
        contextlib.redirect_stdout(io.StringIO()),
        # tensorflow-datasets also leaves folders beside `data_dir`.
        tempfile.TemporaryDirectory(prefix=f"turbanet-{kind.name}-") as work,
        mock.patch.object(tempfile, "tempdir", work),
        # Its defaults are ten retries without a timeout.
        mock.patch.multiple(downloader, MAX_RETRIES=2, _open_url=partial(downloader._open_url, timeout=(5, 15))),
    ):
        try:
            builder = kind(data_dir=work, file_format="array_record")
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(
                    manual_dir=folder, force_checksums_validation=True, try_download_gcs=False
                )
            )
            arrays = _arrays(builder, shape)
        except download_manager.NonMatchingChecksumError as error:
            problem = " ".join(line.lstrip("* ") for line in str(error).splitlines()[:3])
            raise ValueError(f"{problem}. The file is damaged or not the original: {remedy}.") from None
        except requests.exceptions.ChunkedEncodingError as error:
            raise ValueError(f"A download of {title} was cut short ({error}): {remedy}.") from None
        except (requests.RequestException, util.DownloadError) as error:
            raise ConnectionError(f"{title} could not be downloaded ({error}).") from None
    known = {url: info for url, info in checksums.get_all_url_infos().items() if url.startswith(kind.source())}
    facts = {
        "title": f"{title}, the original files",
        "real": True,
        "versions": {"tensorflow-datasets": tfds.__version__, "builder": f"{kind.name} {builder.version}"},
        "inputs": {url.rsplit("/", 1)[1]: info.checksum for url, info in sorted(known.items())},
        "notes": [],
    }
    return arrays, facts


def _arrays(builder, shape):
    arrays = {}
    for split in ("train", "test"):
        rows = builder.as_data_source(split=split)
        arrays[f"x_{split}"] = np.empty((len(rows), *shape), np.uint8)
        arrays[f"y_{split}"] = np.empty(len(rows), np.int32)
        for i, row in enumerate(rows):
            arrays[f"x_{split}"][i] = row["image"].reshape(shape)
            arrays[f"y_{split}"][i] = row["label"]
    return arrays
