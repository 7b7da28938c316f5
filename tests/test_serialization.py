"""A swarm that was saved is the same one in another process, predicts and goes on training bit for bit."""

import collections
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
import pandas as pd
import pytest
from conftest import DEVICES
from flax import nnx
from small_networks import Line

import turbanet as tn
from turbanet.checkpoints import checkpoint, identity, serialization
from turbanet.core import schedules
from turbanet.estimators import TurbaClassifier, TurbaRegressor
from turbanet.forecasting import Forecaster

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


def test_a_swarm_that_is_replaced_while_it_is_read_is_the_new_one(tmp_path, monkeypatch):
    old, read = made(), checkpoint.Folder.arrays
    new = train(old)
    old.save(tmp_path)

    def late(store):
        if not later:
            later.append(new.save(tmp_path))
        return read(store)

    later = []
    monkeypatch.setattr(checkpoint.Folder, "arrays", late)
    same(numbers(tn.TurbaTrainState.load(tmp_path, Net(), optimizer())), numbers(new))


def test_another_process_that_saves_there_is_waited_for(tmp_path):
    holds = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    swarm = made()
    swarm.save(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holds, str(tmp_path)], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="Another training or process writes to .* now: wait until"):
            train(swarm).save(tmp_path)
        other.stdin.close()
    train(swarm).save(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"to a folder of its own, but .* holds notes.txt, .*: name a new folder"):
        made().save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    for name in (None, ""):
        with pytest.raises(TypeError, match="A folder is a path or an address"):
            made().save(name)


def test_a_schedule_for_a_swarm_that_follows_none_is_refused(tmp_path):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, sample_input=X[:1])
    swarm.save(tmp_path)
    with pytest.raises(ValueError, match="schedule= came, and the optimizer has no learning rate as data"):
        tn.TurbaTrainState.load(tmp_path, tn.MLP((2,)), optax.sgd(0.1), schedule="cosine")
    assert tn.TurbaTrainState.load(tmp_path, tn.MLP((2,)), schedule="cosine").schedule is None  # to predict


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent holds no swarm that swarm.save wrote: name the folder of one"):
        load(tmp_path / "absent", Net())
    assert not (tmp_path / "absent").exists()


def test_a_checkpoint_of_fit_is_no_saved_swarm(tmp_path):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, sample_input=X[:1])
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


def test_a_schedule_of_an_earlier_file_counts_all_epochs(tmp_path, monkeypatch):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    swarm = tn.with_schedule(tn.TurbaTrainState.swarm(tn.MLP((2,)), optimizer, 3, sample_input=X[:1]), "warm")

    def without_begin(tree):
        return {name: leaf for name, leaf in leaves_by_name(tree).items() if name != ".schedule.begin"}

    leaves_by_name = identity.leaves_by_name
    with monkeypatch.context() as patch:
        patch.setattr(identity, "leaves_by_name", without_begin)
        swarm.replace(epoch=swarm.epoch + 4).save(tmp_path)
    again = load(tmp_path, tn.MLP((2,)), optimizer)
    assert again.schedule.begin.tolist() == [0, 0, 0] and again.epoch.tolist() == [4, 4, 4]


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


class Summed(nn.Module):
    @nn.compact
    def __call__(self, x):
        assert type(x) is dict
        return nn.Dense(2)(sum(x.values()))


def test_a_model_of_a_dict_receives_a_dict_when_it_is_loaded(tmp_path):
    swarm = tn.TurbaTrainState.swarm(Summed(), optax.sgd(0.1), 2, sample_input={"a": X[:1], "b": X[:1]})
    swarm.save(tmp_path / "swarm")
    again = load(tmp_path / "swarm", Summed(), optax.sgd(0.1))
    np.testing.assert_array_equal(tn.predict(again, {"a": X, "b": X}), tn.predict(swarm, {"a": X, "b": X}))


def test_an_nnx_module_is_not_pickled_to_what_nobody_can_read():
    module = nnx.bridge.ToLinen(nnx.Linear, args=(3, 2))
    swarm = tn.TurbaTrainState.swarm(module, optax.sgd(0.1), 2, sample_input=X[:1])
    with pytest.raises(TypeError, match=r"an NNX module in Flax's bridge cannot be read.*swarm.save"):
        pickle.dumps(swarm)


def test_a_pickle_holds_the_swarm():
    pytest.importorskip("cloudpickle")
    swarm = train(made(schedule=None))
    again = pickle.loads(pickle.dumps(swarm))
    same([*numbers(again), tn.predict(again, X)], [*numbers(swarm), tn.predict(swarm, X)])


@pytest.mark.thorough
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


WALKS = pd.DataFrame(
    {"unique_id": np.repeat(["a", "b"], 20), "ds": [*pd.date_range("2024-03-01", periods=20, tz="Asia/Tokyo")] * 2}
).assign(y=X.ravel()[:40].astype(float))
NETWORK = {"model": Line()}  # code, which is given again
FITTED = {
    "classifier": lambda: TurbaClassifier(3, hidden=(4,), epochs=2, oob_score=True, class_weight={"n": 1, "y": 2}).fit(
        pd.DataFrame(X, columns=list("abc")), np.array(["n", "y"])[Y]
    ),
    "regressor": lambda: TurbaRegressor(20, hidden=(4,), epochs=2, oob_score=True).fit(X, np.stack([Y, 1e6 + Y], 1)),
    "forecaster": lambda: Forecaster(**NETWORK, horizon=2, window=4, kind="both", epochs=1, calibration=2).fit(WALKS),
}


def predictions(name, fitted):
    if name == "forecaster":
        found = fitted.predict(level=60)
        return [found.ds.dt.tz_convert(None).to_numpy(), found.drop(columns=["unique_id", "ds"]).to_numpy()]
    if name == "classifier":
        table = pd.DataFrame(X, columns=list("abc"))
        return [fitted.predict_proba(table), fitted.predict(table), fitted.oob_decision_function_]
    return [fitted.predict(X), *fitted.predict_interval(X, 0.5), fitted.history_.train_loss]


def load_fitted(name, path):
    kinds = {"classifier": TurbaClassifier, "regressor": TurbaRegressor, "forecaster": Forecaster}
    return kinds[name].load(path, **NETWORK if name == "forecaster" else {})


@pytest.fixture(scope="module")
def fitted():
    return {name: make() for name, make in FITTED.items()}


@pytest.mark.optimized
def test_what_is_fitted_predicts_bit_for_bit_in_another_process(fitted, tmp_path):
    for name, each in fitted.items():
        each.save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(fitted)  # and nothing unfinished
    code = """
for name in FITTED:
    np.savez(f"{sys.argv[1]}/{name}.npz", *predictions(name, load_fitted(name, f"{sys.argv[1]}/{name}")))
"""
    run(code, tmp_path)
    for name, each in fitted.items():
        with np.load(tmp_path / f"{name}.npz") as found:
            same(list(found.values()), predictions(name, each))


def test_what_is_loaded_goes_on_training_as_what_was_saved(fitted, tmp_path):
    model = fitted["regressor"].set_params(warm_start=True)
    model.save(tmp_path / "model")
    again = TurbaRegressor.load(tmp_path / "model")
    assert again.get_params() == model.get_params()
    y = np.stack([Y, 1e6 + Y], 1)
    same([again.fit(X, y).predict(X)], [model.fit(X, y).predict(X)])


def test_random_keys_and_short_floats_come_back(tmp_path):
    how = {"horizon": 1, "window": 2, "epochs": 1, "progress": False, "optimizer": optax.chain(optimizer())}
    model = Line()
    forecaster = Forecaster(model, **how).fit(WALKS)
    forecaster.swarms_["local"] = jax.tree.map(
        lambda leaf: leaf.astype("bfloat16") if leaf.dtype == "float32" else leaf, forecaster.swarms_["local"]
    )
    forecaster.save(tmp_path / "file")
    again = Forecaster.load(tmp_path / "file", model=model, optimizer=how["optimizer"])
    same(numbers(again.swarms_["local"]), numbers(forecaster.swarms_["local"]))


def test_a_forecaster_of_the_default_network_needs_no_code(tmp_path):
    how = {"horizon": 1, "window": 2, "epochs": 1, "kind": "global", "progress": False}
    forecaster = Forecaster(**how).fit(WALKS)
    forecaster.save(tmp_path / "file")
    pd.testing.assert_frame_equal(Forecaster.load(tmp_path / "file").predict(), forecaster.predict())


def test_code_is_given_again_and_compared(fitted, tmp_path):
    fitted["forecaster"].save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"saved with model=Line, which is code .*Forecaster.load\(path, model=...\)"):
        Forecaster.load(tmp_path / "file")
    with pytest.raises(ValueError, match="another model, Line, than the Net that came"):
        Forecaster.load(tmp_path / "file", model=Net())
    with pytest.raises(ValueError, match="layers have other names or sizes by now"):
        Forecaster.load(tmp_path / "file", model=tn.LSTM(3), check=False)
    with pytest.raises(ValueError, match=r"returns \[batch, 1\]; it returned \[batch, 2\]"):
        Forecaster.load(tmp_path / "file", model=Line(2), check=False)


def test_a_file_of_something_else_is_refused(fitted, tmp_path):
    fitted["classifier"].save(tmp_path / "classifier")
    (tmp_path / "notes").write_text("none of ours")
    np.savez(tmp_path / "arrays.npz", a=X)
    (tmp_path / "pickle").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match="holds a TurbaClassifier, not a TurbaRegressor: load it by TurbaClassifier"):
        TurbaRegressor.load(tmp_path / "classifier")
    for name in ("notes", "arrays.npz", "pickle", "."):
        with pytest.raises(ValueError, match="holds no TurbaClassifier that save wrote: name the file of one"):
            TurbaClassifier.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="absent"):
        TurbaClassifier.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="is a folder, TurbaClassifier is saved to a file"):
        fitted["classifier"].save(tmp_path)
    with pytest.raises(ValueError, match="Nothing is fitted yet: call fit before save"):
        TurbaClassifier().save(tmp_path / "none")


def test_a_file_that_cannot_be_finished_leaves_the_one_before(fitted, tmp_path, monkeypatch):
    fitted["classifier"].save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()

    def full(path, content):
        path.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        fitted["regressor"].save(tmp_path / "file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


Named = collections.namedtuple("Named", "a")


@pytest.mark.parametrize("member", [Named(np.ones(3)), {3: np.ones(3)}], ids=["a named tuple", "a number as a name"])
def test_a_tree_that_no_file_brings_back_is_not_saved(tmp_path, member):
    swarm = made(schedule=None).replace(member=member)
    with pytest.raises(ValueError, match="The swarm's member holds a .*, which no file brings back"):
        swarm.save(tmp_path / "swarm")
    assert not (tmp_path / "swarm").exists()
