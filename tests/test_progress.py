"""A progress bar says that a program compiles, and for how long; `python -m turbanet` prints versions."""

import importlib.metadata
import subprocess
import sys
import time

import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.training import progress, run


class Bar:
    def __init__(self, disable=False):
        self.disable, self.shown = disable, []

    def set_postfix_str(self, text):
        self.shown.append(text)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)


def test_seconds_are_counted_until_the_wait_ends(quick):
    bar = Bar()
    with progress.counted(bar, "compiling"):
        while len(bar.shown) < 3:
            time.sleep(0.005)
    after = len(bar.shown)
    time.sleep(0.05)
    assert bar.shown[0] == "compiling: 0 s" and bar.shown[-1] == "" and len(bar.shown) == after


def test_a_bar_that_is_not_shown_counts_nothing(quick):
    bar = Bar(disable=True)
    with progress.counted(bar, "compiling"):
        time.sleep(0.05)
    assert bar.shown == []


def test_fit_says_that_it_compiles(quick, monkeypatch):
    said = []
    monkeypatch.setattr(run.tqdm, "set_postfix_str", lambda self, text, refresh=True: said.append(text))
    swarm = tn.TurbaTrainState.swarm(tn.MLP((3, 2)), optax.sgd(0.0625), 2, input_size=5)
    tn.fit(swarm, np.zeros((7, 5), np.float32), np.zeros(7, int), tn.softmax_cross_entropy, epochs=1)
    assert said[0].startswith("compiling, the first time for these shapes: ")


def test_the_module_prints_versions_devices_and_the_cache():
    code = [sys.executable, "-m", "turbanet"]
    lines = subprocess.run(code, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == f"turbanet {tn.__version__}" and lines[2].startswith("devices: 1 x ")
    assert lines[-1].startswith(f"jax {importlib.metadata.version('jax')}, jaxlib ")
