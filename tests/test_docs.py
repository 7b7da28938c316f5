"""The examples in the library's docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import turbanet

ROOT = Path(turbanet.__file__).parents[1]
FILES = [file.relative_to(ROOT) for file in Path(turbanet.__file__).parent.rglob("*.py") if ">>>" in file.read_text()]
MODULES = sorted(".".join(file.with_suffix("").parts) for file in FILES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", ["ensemble_mean", "accuracy", "cross_validate", "grid"])
def test_the_functions_used_most_have_an_example(name):
    assert ">>>" in getattr(turbanet, name).__doc__
