"""Two CPU devices for every test, set before JAX starts; what one test compiled, the next need not.

Tests of the study are marked by what their module imports: `pytest -m "not study"` needs only the library's own
packages, pytest, hypothesis, scikit-learn and pandas.
"""

import ast
import gc
import importlib.util
import os
import signal
from pathlib import Path

import jax
import jaxlib
import pytest
from jax._src.lru_cache import LRUCache

import turbanet
from turbanet.training import compilation, run

OPTIMIZED = "TURBANET_OPTIMIZED" in os.environ  # the tests marked so, compiled as they are for a user
if os.path.exists("/dev/nvidia0"):  # what is compiled for a test is not worth being tuned
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
elif not OPTIMIZED:  # nor being fast: on a CPU this compiles four times as fast
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # half a minute a network, in the study's notebooks
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # in the processes that tests start
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
    flags += ["--xla_cpu_use_fusion_emitters=false"] * jaxlib.__version__.startswith("0.10.")  # gone in 0.11
    os.environ["XLA_FLAGS"] = " ".join(flags)
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads at which line an operation was traced
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
turbanet.use_cores(2, cache=False)
gc.set_threshold(100_000, 50, 50)  # tracing makes many objects and little garbage: a twentieth of the time
DEVICES = min(2, len(jax.devices()))  # that a plan of several devices has here
ON_CPU = jax.default_backend() == "cpu"
if not ON_CPU:
    jax.config.update("jax_default_matmul_precision", "highest")
# Before PyTorch starts, also in the kernels that tests start: its threads spin while they wait, and `make test` has
# three processes on what may be two cores, where some trainings then take twenty times as long.
os.environ["OMP_WAIT_POLICY"] = "passive"
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are started without

PACKAGES = "dvc", "evosax", "matplotlib", "nbformat", "papermill", "pyarrow", "requests", "torch", "upath", "yaml"
HERE = Path(__file__).parent
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 8000  # of the process of some tests
COMPILED = HERE.parent / "build/tests"  # a folder that may be deleted at any time


def imports(file):
    """The dotted names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_study(file):
    """Whether a test module needs the study's packages or tests its bench."""
    return any(name.startswith("study.") or name.partition(".")[0] in PACKAGES for name in imports(file))


STUDY = {file for file in HERE.glob("test_*.py") if of_study(file)}
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
collect_ignore = [file.name for file in STUDY] if MISSING else []


def pytest_report_header():
    return f"without the study's tests, as there is no {', '.join(MISSING)}" if MISSING else None


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    """JAX's persistent cache: what one test compiled no other need, in this run, its other process and the next run."""
    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Compiled programs are dropped after a module, once they are many: Linux allows a process 65 530 mappings."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        compilation.forget()
        gc.collect()


def put(self, key, value):
    """JAX's own writes in place: who reads meanwhile, or after a run that was killed, would find half of it."""
    part = self.path / f"{key}.{os.getpid()}"
    part.write_bytes(value)
    part.replace(self.path / f"{key}-cache")


LRUCache.put = put


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Marks; and the longest files first, so that none of `make test`'s processes waits long for another."""
    if OPTIMIZED:
        items[:] = [item for item in items if item.get_closest_marker("optimized")]
    for item in items:
        if item.path in STUDY:
            item.add_marker("study")
        if item.get_closest_marker("cpu") and not ON_CPU:
            item.add_marker(pytest.mark.skip(reason="of CPU devices"))
    longest = ["test_pipeline.py", "test_cluster.py", "test_stale.py", "test_estimators.py"]
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))


def pytest_runtest_logreport(report):
    """A failure is shown at once: a run may be ended before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}, {report.when}, {report.duration:.0f} s\n{report.longreprtext[-2000:]}", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that asks for two devices is skipped where there is one."""
    try:
        return (yield)
    except ValueError as error:
        if "devices must be 1 to 1 " in str(error):
            pytest.skip("needs two devices")
        raise


@pytest.fixture
def interrupted_after(monkeypatch):
    """A function (calls, train): Ctrl-C comes after so many calls of the program; the Interrupted that comes of it."""

    def interrupt(most, train):
        calls = []

        class Noted:
            def __enter__(self):
                return lambda: len(calls) >= most

            def __exit__(self, *error):
                pass

        original = run.Training._call
        with monkeypatch.context() as patched:
            patched.setattr(run.Training, "_call", lambda *args: calls.append(1) or original(*args))
            patched.setattr(run, "noted", Noted)
            with pytest.raises(turbanet.Interrupted) as interrupted:
                train()
        return interrupted.value

    return interrupt
