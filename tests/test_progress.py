"""A progress bar says that a program compiles; `python -m turbanet` prints versions."""

import importlib.metadata
import os
import subprocess
import sys

import numpy as np
import optax

import turbanet as tn
from turbanet.core import progress


def test_fit_says_that_it_compiles(monkeypatch):
    said = []
    monkeypatch.setattr(progress.tqdm, "set_postfix_str", lambda self, text, refresh=True: said.append(text))
    swarm = tn.TurbaTrainState.swarm(tn.MLP((3, 2)), optax.sgd(0.0625), 2, input_size=5)
    tn.fit(swarm, np.zeros((7, 5), np.float32), np.zeros(7, int), tn.softmax_cross_entropy, epochs=1)
    assert said[:2] == ["compiling, the first time for these shapes", ""]  # and no longer while it trains


def test_a_bar_is_hidden_by_the_environment():
    code = "from turbanet.core.progress import progress_bar; print([progress_bar(s, total=1).disable for s in (0, 1)])"
    for environment, hidden in (({}, "[True, False]"), ({"TQDM_DISABLE": "1"}, "[True, True]")):
        here = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"} | environment
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=here)
        assert ran.stdout.strip() == hidden


def test_the_module_prints_versions_devices_and_the_cache():
    code = [sys.executable, "-m", "turbanet"]
    lines = subprocess.run(code, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == f"turbanet {tn.__version__}" and lines[2].startswith("devices: 1 x ")
    assert lines[-1].startswith(f"jax {importlib.metadata.version('jax')}, jaxlib ")
