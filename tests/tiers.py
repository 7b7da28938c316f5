"""Which values of a parametrized test `make test` tries, and which only `make test-all` does."""

import pytest


def first(count, values):
    """The first `count` of the values as they are, the others marked `thorough`."""
    values = list(values)
    others = [value if isinstance(value, tuple) else (value,) for value in values[count:]]
    return [*values[:count], *(pytest.param(*one, marks=pytest.mark.thorough) for one in others)]
