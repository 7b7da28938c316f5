"""turbanet.lab.labels: one name, key, colour and marker a way, without loading what trains."""

import subprocess
import sys

from turbanet.lab.labels import COLOURS, KEYS, MARKERS, WAYS


def test_labels_load_neither_torch_nor_jax():
    code = "import sys, turbanet.lab.plots; print(sorted({'jax', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_are_names_of_metrics_and_tell_the_ways_apart():
    assert len(set(KEYS.values())) == len(KEYS) and all(key.isidentifier() for key in KEYS.values())


def test_ways_of_one_figure_look_different():
    assert len({COLOURS[way] for way in WAYS}) == len({MARKERS[way] for way in WAYS}) == len(WAYS)
