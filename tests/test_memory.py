"""The memory that a process may use, of its control groups too, and that of programs, free once they are dropped."""

import gc
import math
import weakref

import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.core.memory import container
from turbanet.training import compilation

GIB = 2**30


def group(folder, limit, used, cached, *, names=("memory.max", "memory.current", "inactive_file")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def belongs(root, line):
    (root / "proc/self/cgroup").write_text(f"{line}\n")


def test_a_containers_limit_is_what_there_is(root):
    belongs(root, "0::/")
    group(root / "sys/fs/cgroup", 4 * GIB, 3 * GIB, GIB)
    assert container(root) == 2 * GIB  # cached files make room


def test_the_narrowest_group_of_those_around_counts(root):
    belongs(root, "0::/job/task")
    group(root / "sys/fs/cgroup/job", 4 * GIB, 3 * GIB, 0)
    group(root / "sys/fs/cgroup/job/task", 8 * GIB, 2 * GIB, 0)
    assert container(root) == GIB


def test_groups_of_version_one_are_read(root):
    belongs(root, "9:memory:/docker/of-the-host")
    (root / "proc/self/cgroup").write_text("9:memory:/docker/of-the-host\n3:cpu:/x\n0::/\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group(root / "sys/fs/cgroup/memory", 2 * GIB, GIB, 0, names=names)
    assert container(root) == GIB


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_the_system_decides(root, limit):
    belongs(root, "0::/")
    if limit:
        group(root / "sys/fs/cgroup", limit, GIB, 0)
    assert container(root) == math.inf


def test_where_there_are_no_groups_the_system_decides(tmp_path):
    assert container(tmp_path) == math.inf


def test_a_program_that_is_forgotten_is_freed():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.sgd(0.1), 2, input_size=3)
    tn.fit(swarm, np.zeros((6, 3), np.float32), np.zeros(6, int), tn.softmax_cross_entropy, epochs=1, progress=False)
    (one, *_) = [
        weakref.ref(each.result().executable) for each in compilation._programs().values() if hasattr(each, "result")
    ]
    compilation.forget()
    gc.collect()
    assert one() is None
