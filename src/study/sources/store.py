"""Data sets, taken from the first available source, checked, and stored with their provenance."""

import argparse
import contextlib
import datetime
import hashlib
import importlib
import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from study.pipeline.paths import repository

SETS = ("mnist", "cifar10", "stocks")  # each a module beside this one
SOURCES = ("file", "network", "embedded")
PROBE_SECONDS = 5


def prepare(name, *, root, source="auto", **settings):
    """Fetch the data set `name`, write data/<name>/ and data/<name>.json under `root`, and return the provenance.

    source : file, network, embedded, or auto, which takes the first available of them
    settings : for stocks those of study.sources.stocks.SETTINGS

    Raises ValueError for a defective source, FileNotFoundError and ConnectionError where the chosen one is missing.
    """
    kind = module(name)
    sources = SOURCES if _check_known("source", source, ("auto", *SOURCES)) == "auto" else (source,)
    for setting in settings:
        _check_known(f"setting of {name}", setting, kind.SETTINGS)
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
            external = root / "data" / "external" / name
            others = sorted(file.name for file in external.glob("*") if not file.name.startswith("."))
            if taken == "file" and others:
                raise ValueError(
                    f"{absent} It holds {', '.join(others[:4])}: rename them, or take them away."
                ) from None
            print(f"data {name}: no {taken}: {absent}", flush=True)
    print(f"data {name}: taken from {taken}: {facts['title']}", flush=True)
    for what in ("excluded", "carried_forward"):
        if which := [*facts.get(what, ())]:
            print(f"data {name}: {len(which)} {what.replace('_', ' ')}, such as {which[0]}", flush=True)
    return _write(root / "data", name, arrays, {"name": name, "source": taken} | facts)


def load(name, root=None):
    """Read what `prepare` wrote: ({name: array}, provenance)."""
    _check_known("data set", name, SETS)
    folder = Path(root or repository()) / "data"
    try:
        provenance = json.loads((folder / f"{name}.json").read_text())
        arrays = {key: np.load(folder / name / f"{key}.npy", allow_pickle=False) for key in provenance["arrays"]}
    except FileNotFoundError:
        raise FileNotFoundError(f"The data set {name!r} is not in {folder}; run `make data` first.") from None
    return arrays, provenance


def module(name):
    """Import the module of the data set `name`; importing only this one keeps stages independent of other sets."""
    return importlib.import_module(f"study.sources.{_check_known('data set', name, SETS)}")


def _check_known(what, name, names):
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

    def request():
        with contextlib.suppress(requests.RequestException):
            answers.append(requests.head(url, timeout=PROBE_SECONDS))

    # In a thread, because no timeout bounds the look-up of the host's name.
    probe = threading.Thread(target=request, daemon=True)
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
        defaults = {"carried_forward": [], "excluded": {}, "left_out": [], "missing": []}
        provenance = defaults | provenance | {"arrays": described}
        old = json.loads(record.read_text()) if record.exists() else {}
        today = datetime.date.today().isoformat()
        date = old.pop("date", today)
        provenance["date"] = date if old == provenance else today
        text = json.dumps(provenance, indent=2, sort_keys=True) + "\n"
        (Path(work) / "record").write_text(text)
        # The record is removed first and written last, so that after an interruption `load` finds a whole set or none.
        record.unlink(missing_ok=True)
        if final.exists():
            shutil.rmtree(final)
        new.rename(final)
        (Path(work) / "record").rename(record)
    return provenance


def main(arguments=None):
    """Prepare one data set in the repository, with the settings of its section in params.yaml."""
    import yaml

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", help=", ".join(SETS))
    name = parser.parse_args(arguments).name
    try:
        root = repository()
        _check_known("data set", name, SETS)
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
