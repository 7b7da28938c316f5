"""study.figures.labels: one name, key, colour and marker a method, without loading what trains."""

import subprocess
import sys

from study.figures.labels import COLOURS, FRAMEWORK_NAMES, FRAMEWORKS, KEYS, MARKERS, METHODS


def test_labels_load_neither_torch_nor_jax():
    code = "import sys, study.figures.plots; print(sorted({'jax', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_are_names_of_metrics_and_tell_the_methods_apart():
    assert len(set(KEYS.values())) == len(KEYS) and all(key.isidentifier() for key in KEYS.values())


def test_methods_of_one_figure_look_different():
    assert len({COLOURS[method] for method in METHODS}) == len({MARKERS[method] for method in METHODS}) == len(METHODS)


def test_every_framework_has_a_name_and_looks_of_its_own():
    from study.data_parallel.scaling import launch

    assert set(FRAMEWORK_NAMES) == set(launch.FRAMEWORKS)
    looks = [(label.colour, label.marker) for label in FRAMEWORKS.values()]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == len(FRAMEWORKS)
