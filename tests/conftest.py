"""Two CPU devices for every test, set before JAX starts; what one test compiled, the next need not."""

import jax
import pytest

import turbanet

turbanet.use_cores(2)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """JAX's persistent cache, for this run of the tests alone: hundreds of them compile the same small programs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_modifyitems(items):
    """The longest files first, so that neither of `make test`'s two processes waits long for the other at the end."""
    longest = ["test_pipeline.py", "test_twins.py"]
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))
