"""Arrays on disk train as arrays in memory, and need little of it."""

import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from conftest import DEVICES

import turbanet as tn
from turbanet.data import batches, memmap
from turbanet.data.examples import prepare
from turbanet.training import run as training

rng = np.random.default_rng(0)
X = rng.normal(size=(70, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
HELD_OUT = X[60:], Y[60:]
X, Y = X[:60], Y[:60]


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """A function of an array, the same as it lies on disk; any size is much, and JAX takes over none."""
    monkeypatch.setattr(memmap, "OF_TOTAL", 0)
    monkeypatch.setattr(memmap, "_is_aligned", lambda leaf: False)
    count = iter(range(10))

    def kept(array):
        file = tmp_path / f"{next(count)}.npy"
        np.save(file, array)
        return np.load(file, mmap_mode="r")

    return kept


def made(members=5):
    return tn.TurbaTrainState.swarm(tn.MLP((6, 2)), optax.adam(0.05), members, sample_input=X[:1])


def train(x, y, swarm=None, **more):
    how = {"epochs": 4, "batch_size": 16, "progress": False, "plan": tn.Plan(DEVICES, 2)} | more
    return tn.fit(made() if swarm is None else swarm, x, y, tn.softmax_cross_entropy, **how)


def equal(ours, theirs, rtol=0):
    np.testing.assert_allclose(ours[1].train_loss, theirs[1].train_loss, rtol=1e-5)  # a mean, summed in another way
    for one, two in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(one, two, rtol=rtol, atol=rtol / 10)


ROWS = tn.ragged([rng.choice(60, size, replace=True) for size in (60, 33, 40, 51, 60)])


HOW = [{}, {"rows": ROWS}, {"rows": ROWS, "equal_steps": True}, {"rows": ROWS, "batch_size": 50}]


@pytest.mark.optimized
@pytest.mark.parametrize("how", HOW, ids=["all", "ragged", "equal steps", "fewer than a batch"])
@pytest.mark.parametrize("most", [1, 3, 256])
def test_arrays_on_disk_train_bit_for_bit_as_in_memory(on_disk, monkeypatch, how, most):
    whole = train(X, Y, **how)
    monkeypatch.setattr(batches, "MOST_BATCHES", most)
    monkeypatch.setattr(training.Training, "_train", None)  # of what is in memory
    equal(train(on_disk(X), on_disk(Y), **how), whole)
    equal(train(on_disk(X), Y, **how), whole)


def test_an_order_that_is_always_the_same(on_disk):
    equal(train(on_disk(X), Y, shuffle=False), train(X, Y, shuffle=False), rtol=1e-4)


def test_epochs_count_on(on_disk):
    first, _ = train(X, Y)
    equal(train(on_disk(X), Y, swarm=first), train(X, Y, swarm=first))


def test_each_members_own_arrays_on_disk(on_disk):
    x = rng.normal(size=(5, 60, 3)).astype(np.float32)
    y = (x[..., 0] > 0).astype(np.int32)
    equal(train(on_disk(x), on_disk(y), per_member=True), train(x, y, per_member=True))
    equal(train(on_disk(X), on_disk(y), per_member=(False, True)), train(X, y, per_member=(False, True)))


def test_those_who_stop_are_left_out(on_disk):
    how = {"validation": HELD_OUT, "patience": 1, "epochs": 12, "segment": 1, "rows": ROWS}
    ours, theirs = train(on_disk(X), Y, **how), train(X, Y, **how)
    assert len(set(theirs[1].epochs)) > 1
    equal(ours, theirs)


def test_a_training_goes_on_where_it_was(on_disk, tmp_path):
    x = on_disk(X)
    whole = train(x, Y, segment=1, callbacks=[lambda view: None])

    def die(view):
        if view.epoch == 3:
            raise OSError

    with pytest.raises(OSError):
        train(x, Y, segment=1, callbacks=[die], checkpoints=tmp_path / "kept")
    equal(train(x, Y, segment=1, callbacks=[lambda view: None], checkpoints=tmp_path / "kept"), whole)
    with pytest.raises(ValueError, match="what the data hold was"):
        train(on_disk(X + 1), Y, segment=1, callbacks=[print], checkpoints=tmp_path / "kept")


def test_a_training_that_was_interrupted_in_an_epoch_goes_on_in_it(on_disk, tmp_path, monkeypatch, interrupted_after):
    monkeypatch.setattr(batches, "MOST_BATCHES", 1)
    x = on_disk(X)
    stopped = interrupted_after(6, lambda: train(x, Y, checkpoints=tmp_path / "kept"))  # of four steps an epoch
    assert int(stopped.swarm.step[0]) == 6
    assert (tmp_path / "kept/6").is_dir()  # by steps
    equal(train(x, Y, checkpoints=tmp_path / "kept"), train(x, Y))


def test_what_is_little_or_needed_whole_is_copied(on_disk, monkeypatch):
    monkeypatch.setattr(memmap, "Mapped", None)  # of what is read as it goes
    with pytest.raises(TypeError):
        train(on_disk(X), Y)
    train(on_disk(X), Y, batch_size=None)
    monkeypatch.setattr(memmap, "OF_TOTAL", 1)
    train(on_disk(X), Y)


def test_labels_out_of_range_on_disk_are_found_before(on_disk):
    with pytest.raises(ValueError, match="y holds 9 in row 3"):
        train(on_disk(X), on_disk(np.where(np.arange(60) == 3, 9, Y)))


def test_a_cpu_reads_what_is_aligned_where_it_lies(on_disk, monkeypatch):
    monkeypatch.undo()
    x = on_disk(X)
    monkeypatch.setattr(memmap, "OF_TOTAL", 0)
    assert not memmap.is_streamed(prepare(made(), x, Y), 16, tn.Plan(1))
    assert memmap.is_streamed(prepare(made(), x[:, :2], Y), 16, tn.Plan(1))


LIMITED = """
import re, resource, sys
import numpy as np, optax, turbanet as tn
from turbanet.data import memmap

tn.use_cores(2)
own, streamed = sys.argv[1] == "own", sys.argv[2] == "streamed"
memmap.is_streamed = lambda *what: streamed
x = np.load("x.npy", mmap_mode="r").reshape(4, -1, 1000) if own else np.load("x.npy", mmap_mode="r")
y = np.arange(x.shape[-2], dtype=np.int32) % 2
swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.01), 4, sample_input=np.zeros((1, 1000), np.float32))
how = {"epochs": 1, "batch_size": 64, "progress": False, "plan": tn.Plan(2, 2), "per_member": (own, False)}
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
@pytest.mark.parametrize("way", [("shared", "where it lies"), ("own", "where it lies"), ("shared", "streamed")])
def test_a_set_twice_as_large_as_the_memory_that_there_is_trains(tmp_path, way):
    """Rows of 1.6 GB in a process that may take half of that beyond what it has."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(400_000, 1000))
    some = np.random.default_rng(0).normal(size=(10_000, 1000))
    for begin in range(0, len(x), len(some)):
        x[begin : begin + len(some)] = some
    del x
    (tmp_path / "limited.py").write_text(LIMITED)
    ran = subprocess.run([sys.executable, "limited.py", *way], cwd=tmp_path, capture_output=True, text=True)
    (tmp_path / "x.npy").unlink()
    assert ran.stdout.splitlines() == ["a copy does not fit", "trained (1, 4) True"], ran.stdout + ran.stderr[-2000:]
