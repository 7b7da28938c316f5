"""Where members run."""

import copy
import logging
import os
import pickle
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first

import turbanet as tn
from turbanet.core import gather, plan as plan_module


def swarm(members, widths=(4, 2)):
    return tn.TurbaTrainState.swarm(tn.MLP(widths), optax.adam(0.1), members, 3)


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.cpu
def test_plan_takes_all_devices_by_default():
    assert tn.Plan().devices == tuple(jax.devices()) and len(jax.devices()) == 2


def test_plan_refuses_no_devices():
    twice = [jax.devices()[0]] * 2
    for devices in ([], 1.5, [0], twice):
        with pytest.raises(ValueError, match="devices are some of jax.devices"):
            tn.Plan(devices)
    assert tn.Plan(jax.devices()[0]).devices == (jax.devices()[0],)
    assert tn.Plan(block=np.int64(2)).block == 2


@pytest.mark.cpu
@pytest.mark.parametrize("devices", [0, 3])
def test_plan_refuses_devices_that_do_not_exist(devices):
    with pytest.raises(ValueError, match=f"devices must be 1 to 2 .*, got {devices}"):
        tn.Plan(devices)


@pytest.mark.cpu
def test_plan_takes_a_platform_by_name():
    assert tn.Plan("cpu").devices == tuple(jax.devices("cpu"))
    with pytest.raises(ValueError, match="no 'abacus' device here; it has: cpu"):
        tn.Plan("abacus")


@pytest.mark.parametrize("block", [0, -1, 1.5])
def test_plan_refuses_a_block_that_is_no_count(block):
    with pytest.raises(ValueError, match="block must be a whole number"):
        tn.Plan(block=block)


def test_resolve_keeps_a_given_block_so_that_bits_do_not_depend_on_the_number_of_members():
    assert tn.Plan(2, 64).resolve(swarm(10)).block == 64


@pytest.mark.cpu
def test_resolve_balances_its_blocks():
    assert tn.Plan(1).resolve(swarm(18)).block == 9  # the rule says 16: 16 + 2 would leave one near-empty


@pytest.mark.cpu
def test_resolve_takes_fewer_members_when_they_are_large():
    blocks = [tn.Plan(1).resolve(swarm(16, widths)).block for widths in ((4, 2), (32, 32, 2), (200, 200, 2))]
    assert blocks == [16, 8, 1]


@pytest.mark.cpu
def test_resolve_takes_one_where_two_or_three_would_fit():
    members = swarm(8, (200, 200, 2))
    bytes_of_one = 16 * sum(leaf.size // 8 for leaf in jax.tree.leaves(members.params))  # weights, gradients, moments
    assert 2 <= plan_module.CACHE_BYTES // bytes_of_one <= 3
    assert tn.Plan(1).resolve(members).block == 1


def test_place_pads_with_the_last_member_and_splits_over_devices():
    placed = tn.Plan(2, 2).place(jnp.arange(5))
    assert np.asarray(placed).tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert len(placed.sharding.device_set) == 2


@pytest.mark.cpu
@pytest.mark.parametrize(
    "plan, members, expected",
    [
        ((2, 2), 5, [range(4), range(4, 8)]),
        ((1, 3), 3, [range(3)]),
        ((2, 1), 32, [range(begin, begin + 2) for begin in range(0, 32, 2)]),
        ((2, 1), 33, [range(34)]),  # too many calls
        ((2, 8), 64, [range(64)]),  # small networks, whose calls are short
        ((2, 2), 0, [range(0)]),
    ],
    ids=str,
)
def test_few_blocks_of_large_networks_are_calls_of_their_own(plan, members, expected):
    plan = tn.Plan(*plan)
    assert plan.rounds(members) == expected
    if members:
        placed = [plan.place(np.arange(members), round) for round in plan.rounds(members)]
        filled = [*range(members), *[members - 1] * (plan.padded(members) - members)]
        np.testing.assert_array_equal(gather.gathered(*placed), filled)
        np.testing.assert_array_equal(gather.gathered(*placed, members=members), range(members))


@pytest.mark.cpu
def test_a_swarm_of_which_few_are_left_is_called_as_it_began():
    assert tn.Plan(1, 1).rounds(12) == [range(place, place + 1) for place in range(12)]
    assert tn.Plan(1, 1).rounds(12, of=40) == [range(12)]
    assert tn.Plan(1, 1).rounds(12, of=14) == tn.Plan(1, 1).rounds(12)


def test_what_lies_on_other_devices_than_the_hosts_is_resized_there(monkeypatch):
    monkeypatch.setattr(gather, "is_on_host", lambda leaf: False)
    leaf, before = jnp.arange(5, dtype=jnp.int16), gather._resized_on_devices._cache_size()
    placed = [tn.Plan(2, 2).place(leaf, round) for round in tn.Plan(2, 2).rounds(5)]
    np.testing.assert_array_equal(np.concatenate(placed), [0, 1, 2, 3, 4, 4, 4, 4])
    np.testing.assert_array_equal(gather.gathered(*placed, members=5), leaf)
    known = gather._resized_on_devices._cache_size()
    tn.Plan(2, 2).place(leaf + 1, range(4, 8))
    assert gather._resized_on_devices._cache_size() == known > before  # nothing compiles again


@pytest.mark.parametrize("plan", [(1, 4), (2, 2)], ids=["one device", "two"])
def test_a_program_that_is_given_what_was_placed_leaves_the_callers(plan):
    plan = tn.Plan(*plan)
    leaf = jnp.arange(4 * 4096.0).reshape(4, 4096)
    placed = plan.place(leaf)
    after = jax.jit(lambda leaf: leaf.at[:, 0].set(-1), donate_argnums=0)(placed)
    assert (np.asarray(after)[:, 0] == -1).all()
    placed = plan.place(leaf)
    placed.delete()
    np.testing.assert_array_equal(leaf, np.arange(4 * 4096.0).reshape(4, 4096))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16"])
def test_what_lies_on_several_devices_is_gathered_where_jax_takes_it_over(dtype):
    given = {"w": jnp.arange(4 * 30).reshape(4, 5, 6).astype(dtype), "none": jnp.zeros((4, 0), dtype)}
    whole = gather.gathered(tn.Plan(2, 1).place(given))
    np.testing.assert_array_equal(whole["w"], np.asarray(given["w"]))
    assert whole["w"].dtype == given["w"].dtype and whole["none"].shape == (4, 0)
    back = jax.device_put(whole["w"], given["w"].sharding)
    assert back.unsafe_buffer_pointer() == whole["w"].ctypes.data


@pytest.mark.parametrize("plan", [(1, 3), (2, 1), (2, 2)])
def test_vectorise_maps_over_members(plan):
    plan = tn.Plan(*plan)
    own, shared = plan.place(jnp.arange(6.0)), plan.share(jnp.array(10.0))
    out = jax.jit(plan.vectorise(lambda member, common: member * common))(own, shared)
    np.testing.assert_array_equal(out[:6], np.arange(6) * 10)


def test_use_cores_too_late_says_so():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"use_cores\(7\) came too late"):
        tn.use_cores(7)


@pytest.mark.parametrize("cores", [-1, 0, 2.5, "2"])
def test_use_cores_takes_a_number_of_cores(cores):
    with pytest.raises(ValueError, match="cores must be a whole number of at least 1"):
        tn.use_cores(cores)


def test_use_cores_again_with_the_same_number_is_fine():
    assert tn.use_cores(2) == 2


TRAIN = """
import sys, jax, numpy as np, optax, turbanet as tn
tn.use_cores(2, cache={cache})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # so fast are some machines
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition("/")[2]))
x = np.eye(4, dtype=np.float32)
swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 4)), optax.adam(0.01), 3, sample_input=x)
_, history = tn.fit(swarm, x, np.arange(4), tn.softmax_cross_entropy, epochs=3, progress=False)
print(found.count("cache_hits"), history.train_loss.tobytes().hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("cache", first(1, ["True", "folder"]))
def test_use_cores_keeps_programs_for_the_next_process(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("TURBANET_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache/compiled" / platform.node() if cache == "True" else tmp_path / "folder"
    kept.mkdir(parents=True)
    (kept / "older-cache").touch()  # without the time of its use, as version 0.6 or a killed process left it
    code = TRAIN.format(cache="True" if cache == "True" else repr(str(tmp_path / "folder")))
    first, again = (in_a_new_process(code) for _ in range(2))
    (none, loss), (hits, same) = first.stdout.split(), again.stdout.split()
    assert none == "0" and int(hits) > 0 and loss == same, first.stderr + again.stderr
    assert "Error writing" not in first.stderr, first.stderr
    assert len(list(kept.glob("*-cache"))) > 1 and len(list(tmp_path.iterdir())) == 1


def test_use_cores_leaves_a_cache_that_jax_was_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBANET_CACHE", str(tmp_path))
    told = jax.config.jax_compilation_cache_dir
    assert told  # tests/conftest.py
    tn.use_cores(2, cache=True)
    assert jax.config.jax_compilation_cache_dir == told and not any(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="a folder that nobody can write into, as root can others")
def test_use_cores_says_that_programs_are_not_kept(caplog):
    told = jax.config.jax_compilation_cache_dir
    plan_module.say_once.cache_clear()
    tn.use_cores(2, cache="/proc/self")
    assert "Compiled programs are not kept, as /proc/self cannot be used" in caplog.text
    assert jax.config.jax_compilation_cache_dir == told


@pytest.mark.cpu
def test_fit_on_one_device_of_many_cores_advises_once(caplog, monkeypatch):
    monkeypatch.setattr(plan_module.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(plan_module.jax, "devices", lambda kind: [None])
    plan_module.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "turbanet"):
        for _ in range(2):
            plan_module.choose(tn.Plan(1), swarm(2))
    assert [r.message.count("use_cores()") for r in caplog.records] == [1]


HEAVY = "torch matplotlib pandas sklearn papermill tensorflow_datasets yfinance IPython"


@pytest.mark.cpu
def test_import_turbanet_loads_nothing_heavy_and_does_not_start_jax():
    code = f"import sys, turbanet, jax; print([m for m in {HEAVY.split()} if m in sys.modules])"
    code += "; print(turbanet.use_cores(3), len(jax.devices()))"
    done = in_a_new_process(code)
    assert done.stdout.splitlines() == ["[]", "3 3"], done.stdout + done.stderr


def test_a_plan_is_copied_and_pickled():
    plan = tn.Plan(2, 3)
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)).devices == plan.devices
