"""Arrays on disk train as arrays in memory, where they lie."""

import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from conftest import DEVICES, ON_CPU
from tiers import first

import turbanet as tn
from turbanet.data import examples

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def on_disk(array, file):
    np.save(file, array)
    return np.load(file, mmap_mode="r")


def train(x, y, **more):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((6, 2)), optax.adam(0.05), 5, sample_input=X[:1])
    settings = {"epochs": 4, "batch_size": 16, "progress": False, "plan": tn.Plan(DEVICES, 2)}
    return tn.fit(swarm, x, y, tn.softmax_cross_entropy, **settings | more)


@pytest.mark.parametrize("begin", [0, 1])  # aligned, and not
def test_arrays_on_disk_train_as_in_memory(tmp_path, begin):
    x, y = on_disk(X, tmp_path / "x.npy")[begin:], on_disk(Y, tmp_path / "y.npy")[begin:]
    ours, theirs = train(x, y), train(X[begin:].copy(), Y[begin:].copy())
    for one, two in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_array_equal(one, two)


def test_labels_out_of_range_on_disk_are_found_before(tmp_path):
    with pytest.raises(ValueError, match="y holds 9 in row 3"):
        train(X, on_disk(np.where(np.arange(60) == 3, 9, Y), tmp_path / "y.npy"))


@pytest.mark.parametrize("x", [X[1:], np.stack([X[1:]] * 5)[:, 1:]], ids=["shared", "own"])
def test_what_a_device_cannot_hold_is_refused(x, monkeypatch):
    """Rows that JAX would copy: these begin where no array of its own does. A CPU's devices share a memory."""
    y = (x[..., 0] > 0).astype(np.int32)
    copies = (DEVICES if x.ndim == 2 else 1) if ON_CPU else 0.5
    monkeypatch.setattr(examples, "free_memory", lambda devices: 0.9 * copies * x.nbytes)
    monkeypatch.setattr(examples, "ALIGNED_BYTES", 2**40)
    with pytest.raises(
        MemoryError, match="GiB are free: take fewer rows, or read them batch by batch with fit_batches"
    ):
        train(x, y, per_member=x.ndim == 3)


LIMITED = """
import re, resource, sys
import numpy as np, optax, turbanet as tn

tn.use_cores(2)
own = sys.argv[1] == "own"
x = np.load("x.npy", mmap_mode="r").reshape(4, -1, 1000) if own else np.load("x.npy", mmap_mode="r")
y = np.arange(x.shape[-2], dtype=np.int32) % 2
swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.01), 4, sample_input=np.zeros((1, 1000), np.float32))
how = {"epochs": 1, "batch_size": 256, "progress": False, "plan": tn.Plan(2, 2), "per_member": (own, False)}
few = x[..., :640, :].copy(), y[:640]
tn.fit(swarm, *few, tn.softmax_cross_entropy, **how)  # what it takes without these data
held = 1024 * int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_DATA, (held + x.nbytes // 2,) * 2)
try:
    x.copy()
except MemoryError:
    print("a copy does not fit")
_, history = tn.fit(swarm, x, y, tn.softmax_cross_entropy, **how)
print("trained", history.train_loss.shape, bool(np.isfinite(history.train_loss).all()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is allocated on Linux alone")
@pytest.mark.parametrize("rows", first(1, ["shared", "own"]))
def test_a_set_twice_as_large_as_the_memory_that_there_is_trains(tmp_path, rows):
    """Rows of 0.8 GB in a process that may take half of that beyond what it has."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(200_000, 1000))
    some = np.random.default_rng(0).normal(size=(10_000, 1000))
    for begin in range(0, len(x), len(some)):
        x[begin : begin + len(some)] = some
    del x
    (tmp_path / "limited.py").write_text(LIMITED)
    ran = subprocess.run([sys.executable, "limited.py", rows], cwd=tmp_path, capture_output=True, text=True)
    (tmp_path / "x.npy").unlink()
    assert ran.stdout.splitlines() == ["a copy does not fit", "trained (1, 4) True"], ran.stdout + ran.stderr[-2000:]
