"""A swarm that was saved is the same one in another process, predicts and goes on training bit for bit."""

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from conftest import DEVICES

import turbanet as tn
from turbanet.checkpoints import checkpoint, identity, serialization
from turbanet.core import schedules

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40).astype(np.int32)
load = tn.TurbaTrainState.load


class Net(nn.Module):
    act: str = "relu"

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = getattr(nn, self.act)(nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x)))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not train)(x))


def optimizer(rate=0.05):
    """One whose state holds a typed random key and a learning rate."""
    noise = optax.add_noise(0.01, 0.5, key=jax.random.key(3))
    return optax.chain(noise, optax.inject_hyperparams(optax.adam)(learning_rate=rate))


def made(model=None, schedule=("warm", "cosine", "reduce")):
    swarm = tn.TurbaTrainState.swarm(model or Net(), optimizer(), 3, sample_input=X[:1], seed=4)
    return swarm if schedule is None else tn.with_schedule(swarm, schedule)


def train(swarm):
    how = {"epochs": 3, "batch_size": 8, "segment": 3, "plan": tn.Plan(DEVICES, 2), "validation": (X[:9], Y[:9])}
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, progress=False, **how)[0]


def numbers(swarm):
    return [checkpoint.as_numbers(leaf) for leaf in jax.tree.leaves(swarm)]


def same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def run(code, *arguments):
    """Run `code` in another process, with this module's names."""
    paths = os.pathsep.join([os.path.dirname(__file__), str(Path(tn.__file__).parents[1])])
    start = "import sys, turbanet as tn\ntn.use_cores(2)\nfrom test_serialization import *\n"
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    caching = {"JAX_COMPILATION_CACHE_DIR": arguments[0], "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | {"PYTHONPATH": paths} | {name: str(value) for name, value in caching.items()}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.optimized
def test_a_loaded_swarm_goes_on_training_bit_for_bit_in_another_process(tmp_path):
    swarm = train(made())
    swarm.save(tmp_path / "swarm")
    code = "swarm = train(load(sys.argv[1] + '/swarm', Net(), optimizer()))\nnp.savez(sys.argv[2], *numbers(swarm))"
    run(code, tmp_path, tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as found:
        same(list(found.values()), numbers(train(swarm)))


def test_load_brings_back_every_array_and_its_type(tmp_path):
    swarm = train(made())
    swarm.save(tmp_path)
    again = load(tmp_path, Net(), optimizer())
    same(numbers(again), numbers(swarm))
    assert [leaf.dtype for leaf in jax.tree.leaves(again)] == [leaf.dtype for leaf in jax.tree.leaves(swarm)]
    assert again.sample == swarm.sample and again.schedule.functions == swarm.schedule.functions


def test_without_an_optimizer_it_predicts_and_says_why_it_does_not_train(tmp_path):
    swarm = train(made())
    swarm.save(tmp_path)
    again = load(tmp_path, Net())
    same([tn.predict(again, X)], [tn.predict(swarm, X)])
    with pytest.raises(ValueError, match="loaded without an optimizer, to predict: to train it, load it with its own"):
        train(again)


def test_a_single_network_is_saved_too(tmp_path):
    train(made()).get_state(1).save(tmp_path)
    network = load(tmp_path, Net(), optimizer())
    assert (int(network.id), network.step.shape) == (1, ())


def test_a_swarm_of_several_inputs_knows_them_again(tmp_path):
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x["left"] + x["right"][0])

    x = {"left": X[:1], "right": (X[:1],)}
    swarm = tn.TurbaTrainState.swarm(Sum(), optax.sgd(0.1), 2, sample_input=x)
    swarm.save(tmp_path)
    again = load(tmp_path, Sum(), optax.sgd(0.1))
    assert repr(again.sample) == repr(swarm.sample)
    own = jax.tree.map(lambda leaf: np.stack([leaf] * 2), x)
    same([again.predict(own)], [swarm.predict(own)])


def test_a_swarm_that_does_not_know_its_input_is_told(tmp_path):
    first = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, input_size=3)
    kinds = {"apply_fn": tn.MLP((2,)).apply, "params": first.params, "tx": optax.sgd(0.1)}
    tn.TurbaTrainState.vmap_create(**kinds).save(tmp_path)
    with pytest.raises(ValueError, match="does not know its input: give a batch of it as sample_input="):
        load(tmp_path, tn.MLP((2,)), optax.sgd(0.1))
    same(numbers(load(tmp_path, tn.MLP((2,)), sample_input=X[:1]).params), numbers(first.params))


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    made().save(tmp_path)
    swarm = train(made())
    swarm.save(tmp_path)
    same(numbers(load(tmp_path, Net(), optimizer())), numbers(swarm))


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def full(self, *args, **how):
        raise OSError(28, "No space left on device")

    swarm = made()
    swarm.save(tmp_path)
    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match="could not be written to .*No space left.*: make room, or name another"):
        train(swarm).save(tmp_path)
    same(numbers(load(tmp_path, Net(), optimizer())), numbers(swarm))


def test_a_save_that_was_killed_is_no_swarm_and_stands_in_nobodys_way(tmp_path):
    (tmp_path / f"1{serialization.TEMPORARY}").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no swarm"):
        load(tmp_path, Net())
    made().save(tmp_path)
    assert len(load(tmp_path, Net())) == 3


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"to a folder of its own, but .* holds notes.txt, .*: name a new folder"):
        made().save(tmp_path)


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent holds no swarm that swarm.save wrote: name the folder of one"):
        load(tmp_path / "absent", Net())
    assert not (tmp_path / "absent").exists()


def test_a_checkpoint_of_fit_is_no_saved_swarm(tmp_path):
    swarm = made(schedule=None)
    tn.fit(swarm, X, Y, tn.softmax_cross_entropy, epochs=2, segment=1, progress=False, checkpoints=tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no swarm .* or call fit again if it kept its checkpoints there"):
        load(tmp_path, Net(), optimizer())
    with pytest.raises(ValueError, match="holds 1, 2, which is no saved swarm"):
        swarm.save(tmp_path)


@pytest.mark.parametrize(
    ("model", "rate", "message"),
    [
        (Net("tanh"), 0.05, r"model was Net\(\) \w+ and is Net\(act='tanh'\) \w+; give what .* or check=False"),
        (Net(), 0.01, r"optimizer was chain \w+ and is chain \w+; give what it was saved with"),
    ],
)
def test_another_model_or_optimizer_is_refused(tmp_path, model, rate, message):
    made().save(tmp_path)
    with pytest.raises(ValueError, match=f"is another one: {message}"):
        load(tmp_path, model, optimizer(rate))


def test_check_false_takes_another_function_and_no_other_shape(tmp_path):
    made(schedule=None).save(tmp_path)
    assert load(tmp_path, Net("tanh"), optimizer(), check=False).apply_fn.__self__ == Net("tanh")
    with pytest.raises(ValueError, match=r"\.params.* was float32\[3, 5\] and is not there; give what it was saved"):
        load(tmp_path, tn.MLP((5, 2)), optimizer(), check=False)


def test_under_another_python_another_model_is_said(tmp_path, monkeypatch, caplog):
    made(schedule=None).save(tmp_path)
    versions = identity.versions() | {"Python": "3.99"}
    monkeypatch.setattr(identity, "versions", lambda: versions)
    with caplog.at_level(logging.WARNING, "turbanet"):
        load(tmp_path, Net("tanh"), optimizer())
    assert "computes the same by now is unknown: model was Net()" in caplog.text and "'3.99'" in caplog.text


def test_another_format_is_refused(tmp_path, monkeypatch):
    made().save(tmp_path)
    monkeypatch.setattr(serialization, "FORMAT", 2)
    with pytest.raises(ValueError, match=r"in format 1, and .* reads format 2: load it with the turbanet \d"):
        load(tmp_path, Net())


def test_what_cannot_be_read_is_said(tmp_path, caplog):
    rows = (row for row in X)

    def apply(params, x):
        return x @ params + 0 * next(rows)[:2]

    model = lambda key, x: jax.random.normal(key, (3, 2)), apply
    with caplog.at_level(logging.WARNING, "turbanet"):
        tn.TurbaTrainState.swarm(model, optax.sgd(0.1), 2, input_size=3).save(tmp_path)
        load(tmp_path, model)
    assert "The model holds generator" in caplog.text and "is not checked" in caplog.text


def test_a_rate_that_began_as_an_int_and_was_set_is_loaded(tmp_path):
    whole = optax.inject_hyperparams(optax.sgd)(learning_rate=1)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), whole, 3, sample_input=X[:1])
    rates = np.float32([0.25, 0.5, 1.0])
    tn.with_schedule(tn.with_hyperparameters(swarm, learning_rate=rates), "warm").save(tmp_path)
    again = load(tmp_path, tn.MLP((2,)), whole)
    for found in (tn.hyperparameters(again)["learning_rate"], again.schedule.base["learning_rate"]):
        np.testing.assert_array_equal(found, rates)


def test_a_schedule_of_ones_own_is_given_again(tmp_path):
    def halves(epoch, base):
        return base * 0.5**epoch

    swarm = train(made(schedule=[halves, "warm", halves]))
    swarm.save(tmp_path)
    with pytest.raises(ValueError, match="follows a schedule of your own: give schedule="):
        load(tmp_path, Net(), optimizer())
    again = load(tmp_path, Net(), optimizer(), schedule=[halves, "warm", halves])
    assert again.schedule.functions == (halves, schedules.warm)
    same(numbers(train(again)), numbers(train(swarm)))
    with pytest.raises(ValueError, match="is another one: schedule 0 was .*halves .* and is cosine"):
        load(tmp_path, Net(), optimizer(), schedule=["cosine", "warm"])


def test_a_pickle_goes_through_another_process(tmp_path):
    pytest.importorskip("cloudpickle")
    swarm = train(made(schedule=None))
    (tmp_path / "swarm").write_bytes(pickle.dumps(swarm))
    code = "import pickle\nswarm = pickle.loads(open(sys.argv[1] + '/swarm', 'rb').read())\n"
    run(code + "np.savez(sys.argv[2], *numbers(swarm), tn.predict(swarm, X))", tmp_path, tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as found:
        same(list(found.values()), [*numbers(swarm), tn.predict(swarm, X)])


def test_what_cannot_be_pickled_names_save_and_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"cannot be pickled .* swarm.save\(folder\), for TurbaTrainState.load"):
        pickle.dumps(made())
