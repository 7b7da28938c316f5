"""The examples in the docstrings: they run, and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((SOURCE / "turbanet").rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_print_what_they_say(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
