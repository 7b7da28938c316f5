"""Two CPU devices for every test, set before JAX starts."""

import turbanet

turbanet.use_cores(2)


def pytest_collection_modifyitems(items):
    """The longest file first, so that `make test`'s other process has something to do meanwhile."""
    items.sort(key=lambda item: item.path.name != "test_pipeline.py")
