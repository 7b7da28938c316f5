"""study.measurement.compilation: what comes from JAX's cache on disk and what compiles."""

import ast
import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import study
import turbanet as tn
from study.measurement.compilation import cold
from turbanet.training import compilation

MODEL, SGD = tn.MLP((2,)), optax.sgd(0.1)  # others would be another program


@pytest.fixture
def events(tmp_path):
    """The names of JAX's events, with a cache on disk of this test's own."""
    before, seen = jax.config.jax_compilation_cache_dir, []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    compilation.forget()  # what another test compiled without this cache

    def listen(name, *_, **__):
        seen.append(name.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)
    jax.monitoring.unregister_event_duration_listener(listen)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def train():
    x, y = np.zeros((8, 2), np.float32), np.zeros(8, np.int32)
    swarm = tn.TurbaTrainState.swarm(MODEL, SGD, 2, sample_input=x[:1], seed=0)
    tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=1, batch_size=4, progress=False)


def test_a_forgotten_program_comes_from_the_disk_after_cold_too(events):
    train()
    with pytest.raises(KeyError), cold():
        raise KeyError
    compilation.forget()
    events.clear()
    train()
    assert "cache_hits" in events and "cache_misses" not in events


def test_cold_compiles_what_is_in_memory_and_on_the_disk(events, tmp_path):
    train()
    stored = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    events.clear()
    train()
    warm = events.count("backend_compile_duration")
    events.clear()
    with cold():
        train()
    assert events.count("backend_compile_duration") > warm and "compile_requests_use_cache" not in events
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == stored != {}


def test_cold_leaves_a_cache_that_was_off_as_it_was(events):
    with cold():
        with cold():
            pass
        jax.jit(lambda x: x + 41.5)(jnp.ones(3))
    assert "cache_misses" not in events and jax.config.jax_enable_compilation_cache


def test_programs_of_the_study_say_whether_they_keep_what_they_compile_and_cold_ones_do_not():
    calls = {}
    for file in Path(study.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "use_cores":
                calls[file.relative_to(Path(study.__file__).parent).as_posix()] = {
                    keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords
                }
    assert all("cache" in keywords for keywords in calls.values()), calls
    kept = {file for file, keywords in calls.items() if keywords["cache"] is not False}
    assert len(calls) >= 4 and kept == {"cluster/runs.py"}  # whose workers start with the programs of the first one


def loss_with(array):
    def loss(params, x, y, apply_fn):
        value, prediction = tn.softmax_cross_entropy(params, x, y, apply_fn)
        return value + jnp.asarray(array).mean(), prediction

    return loss


@pytest.mark.parametrize("kind", [np.ones, jnp.ones])
def test_an_array_of_a_loss_goes_with_the_loss(kind):
    x, y = np.eye(4, dtype=np.float32), np.arange(4)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4,)), optax.sgd(0.1), 2, sample_input=x[:1])
    captured = kind((600, 600), np.float32)  # more than a MiB
    loss = loss_with(captured)
    for _ in range(2):
        tn.fit(swarm, x, y, loss, epochs=1, progress=False)
    seen = weakref.ref(captured)
    del loss, captured
    tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=1, progress=False)
    gc.collect()
    assert seen() is None


def test_an_array_of_a_loss_that_changes_in_place_compiles_again():
    x, y = np.eye(4, dtype=np.float32), np.arange(4)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4,)), optax.sgd(0.1), 2, sample_input=x[:1])
    captured = np.zeros(3, np.float32)
    loss = loss_with(captured)
    first, second = [], []
    for found, number in ((first, 0), (second, 2)):
        captured[:] = number
        found.append(tn.fit(swarm, x, y, loss, epochs=1, progress=False)[1].train_loss)
    np.testing.assert_allclose(second[0], first[0] + 2, rtol=1e-6)
