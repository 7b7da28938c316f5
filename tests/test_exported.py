"""An exported swarm predicts what the swarm predicts, in a process that does not have the model."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from conftest import DEVICES
from scipy.special import softmax
from small_networks import Line
from tiers import first

import turbanet as tn
from turbanet.estimators import TurbaClassifier, TurbaRegressor
from turbanet.forecasting import Forecaster
from turbanet.networks.policies import Agent

rng = np.random.default_rng(0)
ROWS = 1, 20


class Normed(nn.Module):
    """Running statistics and dropout, in plain layers."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


MODELS = {
    "MLP": (tn.MLP((8, 3)), (4,)),
    "LSTM": (tn.LSTM(8, 2), (5, 3)),
    "LeNet": (tn.networks.LeNet(), (28, 28, 1)),
    "VGG": (tn.networks.VGG(widths=(8, 8, 8, 16, 16)), (32, 32, 3)),
    "MobileNet": (tn.networks.MobileNet(blocks=((16, 1), (24, 2))), (32, 32, 3)),
    "ResNet": (tn.networks.ResNet(depth=8), (32, 32, 3)),
    "Normed": (Normed(), (4,)),
}


def made(name, **how):
    model, shape = MODELS[name]
    x = rng.normal(size=(max(ROWS), *shape)).astype(np.float32)
    return tn.TurbaTrainState.swarm(model, optax.sgd(0.01), 2, **{"sample_input": x[:1], **how}), x


LOADS = """
import pathlib, sys, numpy as np, turbanet as tn
for file in pathlib.Path(sys.argv[1]).glob("*.tn"):
    exported, x = tn.load_exported(file), np.load(file.with_suffix(".npy"))
    np.savez(file.with_suffix(".npz"), **{str(rows): exported(x[:rows]) for rows in map(int, sys.argv[2:])})
assert not {name for name in sys.modules if name.startswith("turbanet.networks")} and "test_exported" not in sys.modules
"""


@pytest.fixture(scope="module", params=first(1, [["LSTM", "Normed"], ["MLP", "LeNet", "VGG", "MobileNet", "ResNet"]]))
def elsewhere(tmp_path_factory, request):
    """{name: (swarm, x)}, and the folder where another process left its predictions."""
    folder = tmp_path_factory.mktemp("exported")
    swarms = {name: made(name) for name in request.param}
    for name, (swarm, x) in swarms.items():
        tn.export(swarm, kind="members").save(folder / f"{name}.tn")
        np.save(folder / f"{name}.npy", x)
    environment = {"PYTHONPATH": str(Path(tn.__file__).parents[1]), "JAX_PLATFORMS": "cpu", "PATH": ""}
    command = [sys.executable, "-c", LOADS, str(folder), *map(str, ROWS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return swarms, folder


@pytest.mark.slow
def test_a_loaded_program_predicts_as_the_swarm_in_another_process(elsewhere):
    swarms, folder = elsewhere
    for name, (swarm, x) in swarms.items():
        expected = np.asarray(tn.predict(swarm, x))
        with np.load(folder / f"{name}.npz") as found:
            for rows in ROWS:
                scale = np.abs(expected).max()
                np.testing.assert_allclose(found[str(rows)], expected[:, :rows], rtol=1e-5, atol=1e-5 * scale)


def test_running_statistics_are_as_they_were_trained():
    swarm, x = made("Normed")
    trained, _ = tn.fit(swarm, 3 + x, np.zeros((20, 2)), tn.mse, epochs=9, progress=False)
    found = tn.export(trained, kind="members")(x)
    np.testing.assert_allclose(found, tn.predict(trained, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("continuous", [False, True])
def test_agents_are_saved_as_a_program(tmp_path, continuous):
    agents = tn.TurbaTrainState.swarm(Agent(2, continuous=continuous), optax.sgd(0.1), 2, input_size=4)
    tn.export(agents, kind="members").save(tmp_path / "new folder" / "agents")
    x = rng.normal(size=(5, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, numpy as np, turbanet as tn; policy, values = tn.load_exported(sys.argv[1])(np.load(sys.argv[2]))"
    )
    command = [sys.executable, "-c", f"{code}; assert policy.mode().shape[:2] == values.shape == (2, 5)"]
    environment = {"PYTHONPATH": str(Path(tn.__file__).parents[1]), "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run([*command, tmp_path / "new folder" / "agents", tmp_path / "x.npy"], env=environment, check=True)
    policy, values = tn.load_exported(tmp_path / "new folder" / "agents")(x)
    expected, expected_values = tn.predict(agents, x)
    np.testing.assert_allclose(policy.mode(), expected.mode(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, expected_values, rtol=1e-5, atol=1e-6)


def test_predictions_that_no_file_holds_are_refused_by_save(tmp_path):
    class Pair(NamedTuple):
        one: Any
        other: Any

    model = (lambda key, x: jax.random.normal(key, (4, 3))), (lambda params, x: Pair(x @ params, x @ params))
    exported = tn.export(tn.TurbaTrainState.swarm(model, optax.sgd(0.1), 2, input_size=4), kind="mean")
    assert exported(np.ones((2, 4), np.float32)).one.shape == (2, 3)
    with pytest.raises(ValueError, match="No file holds these x or predictions: let the model take and return arrays"):
        exported.save(tmp_path / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "rows"), [("MLP", 16), ("Normed", None)])
def test_export_says_whether_rows_are_fixed(name, rows):
    exported = tn.export(made(name)[0], kind="members", rows=16)
    assert exported.rows == rows
    said = "16 rows at a time" if rows else "any number of rows"
    assert repr(exported) == f"Exported members of x float32[row, 4], {said}, for cpu"


def test_kinds_are_the_members_their_mean_and_the_mean_of_probabilities():
    swarm, x = made("MLP")
    logits = np.asarray(tn.predict(swarm, x))
    expected = {"members": logits, "mean": logits.mean(0), "probability": softmax(logits, axis=-1).mean(0)}
    for kind, of_kind in expected.items():
        np.testing.assert_allclose(tn.export(swarm, kind=kind)(x), of_kind, rtol=1e-5, atol=1e-6)
    diverged = swarm.replace(params=jax.tree.map(lambda leaf: leaf.at[1].set(np.nan), swarm.params))
    for kind in ("mean", "probability"):
        with pytest.raises(ValueError, match=r"The members at positions \[1\] have weights that are NaN"):
            tn.export(diverged, kind=kind)
    softmaxed = (lambda key, x: jax.random.normal(key, (4, 3))), (lambda params, x: jax.nn.softmax(x @ params))
    probabilities = tn.TurbaTrainState.swarm(softmaxed, optax.sgd(0.1), 2, input_size=4)
    with pytest.raises(ValueError, match="The model ends in a softmax"):
        tn.export(probabilities, kind="probability")
    scaled = (
        (lambda key, x: jax.random.normal(key, (4, 3))),
        (lambda w, x: x / jnp.linalg.norm(x, axis=-1)[:, None] @ w),
    )
    assert tn.export(tn.TurbaTrainState.swarm(scaled, optax.sgd(0.1), 2, input_size=4), kind="probability")
    with pytest.raises(ValueError, match=r"one array of logits \[row, class\], this model returns a tuple"):
        tn.export(tn.TurbaTrainState.swarm(Agent(2), optax.sgd(0.1), 2, input_size=4), kind="probability")


def test_trees_go_in_and_come_out():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return {"sum": nn.Dense(2)(x["left"] + x["right"])}

    x = {"left": rng.normal(size=(9, 3)).astype(np.float32), "right": np.ones((9, 3), np.float32)}
    swarm = tn.TurbaTrainState.swarm(Two(), optax.sgd(0.1), 2, sample_input=jax.tree.map(lambda leaf: leaf[:1], x))
    exported = tn.export(swarm, kind="mean")
    expected = np.asarray(tn.predict(swarm, x)["sum"]).mean(0)
    np.testing.assert_allclose(exported(x)["sum"], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="got {'left': 'float32.9, 3.', 'right': 'float32.2, 3.'}: convert it"):
        exported(x | {"right": x["right"][:2]})


def test_a_swarm_spread_over_devices_is_exported_for_one():
    swarm, x = made("MLP")
    exported = tn.export(tn.Plan(DEVICES, 1).place(swarm), kind="members")
    assert exported.program.nr_devices == 1
    np.testing.assert_allclose(exported(x), tn.predict(swarm, x), rtol=1e-5, atol=1e-6)


def test_programs_for_a_gpu_are_written_without_one():
    swarm, x = made("MLP")
    assert tn.export(swarm, kind="mean", platforms=("cpu", "cuda"))(x).shape == (20, 3)
    assert tn.export(swarm, kind="mean", platforms="cpu")(x).shape == (20, 3)
    with pytest.raises(ValueError, match="exported for platforms .*cuda.* used on .*cpu"):
        tn.export(swarm, kind="mean", platforms=("cuda",))(x)
    with pytest.raises(ValueError, match="platforms are of cpu, cuda, rocm, tpu; got 'gpu'"):
        tn.export(swarm, kind="mean", platforms=("cpu", "gpu"))


@pytest.fixture(scope="module")
def exported():
    return tn.export(made("MLP")[0], kind="members")


@pytest.mark.parametrize(
    ("x", "came"),
    [
        (np.zeros((2, 5), np.float32), r"float32\[2, 5\]"),
        (np.zeros((2, 4), int), r"int32\[2, 4\]"),
        (np.zeros((0, 4)), r"float32\[0, 4\]"),
        ({"x": np.zeros((2, 4))}, r"{'x': 'float32\[2, 4\]'}"),
    ],
)
def test_another_input_is_refused_with_the_signature(x, came, exported):
    with pytest.raises(ValueError, match=rf"takes x as float32\[row, 4\], at least one row, got {came}: convert it"):
        exported(x)


def test_export_refuses_what_it_cannot_write():
    swarm, x = made("MLP")
    with pytest.raises(ValueError, match="Of a swarm give kind='members' or 'mean' or 'probability'; got 'median'"):
        tn.export(swarm, kind="median")
    with pytest.raises(ValueError, match="A swarm leads with a member axis; this is one network"):
        tn.export(swarm.get_state(0), kind="mean")
    with pytest.raises(ValueError, match="does not know its input: give a batch of it as sample_input"):
        tn.export(swarm.replace(sample=None), kind="mean")
    with pytest.raises(ValueError, match="rows must be a whole number"):
        tn.export(swarm, kind="mean", rows=0)
    one = made("MLP", sample_input=x[0])[0]
    with pytest.raises(ValueError, match=r"The model takes no rows of float32\[4\]: give a batch .* as sample_input"):
        tn.export(one, kind="mean")
    assert tn.export(one, kind="mean", sample_input=x)(x).shape == (20, 3)


def test_a_prediction_without_rows_is_refused():
    model = (lambda key, x: jax.random.normal(key, (4, 2))), (lambda params, x: (x @ params).mean(0))
    swarm = tn.TurbaTrainState.swarm(model, optax.sgd(0.1), 2, input_size=4)
    with pytest.raises(ValueError, match="must have the rows of x"):
        tn.export(swarm, kind="mean")


def test_another_file_is_refused(tmp_path):
    (tmp_path / "notes").write_text("none of ours, and long enough to be read as something")
    with pytest.raises(ValueError, match=r"notes holds no program of turbanet.export .*: export it anew"):
        tn.load_exported(tmp_path / "notes")
    (tmp_path / "other").write_bytes(jax.export.export(jax.jit(lambda x: -x))(np.ones(3)).serialize())
    with pytest.raises(ValueError, match="is a folder: of a swarm that was saved there, take TurbaTrainState.load"):
        tn.load_exported(tmp_path)
    with pytest.raises(ValueError, match="other holds no program"):
        tn.load_exported(tmp_path / "other")


def test_a_program_is_saved_where_swarms_and_estimators_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, input_size=3)
    program = tn.export(swarm, kind="mean")
    program.save("~/deep/mean")
    assert [file.name for file in tmp_path.iterdir()] == ["deep"]
    np.testing.assert_array_equal(tn.load_exported("~/deep/mean")(np.ones((1, 3))), program(np.ones((1, 3))))
    with pytest.raises(ValueError, match="deep is a folder, a program is saved to a file: name one"):
        program.save("deep")
    with pytest.raises(OSError, match=r"a program cannot be saved to deep/mean/x \(.*\): name another file"):
        program.save("deep/mean/x")


def test_a_classifier_is_exported_as_its_probabilities(tmp_path):
    x = rng.normal(size=(90, 4))
    classifier = TurbaClassifier(3, hidden=(8,), epochs=2, random_state=0).fit(x, np.where(x[:, 0] > 0, "a", "b"))
    tn.export(classifier).save(tmp_path / "file")
    program = tn.load_exported(tmp_path / "file")
    np.testing.assert_allclose(program(x), classifier.predict_proba(x), rtol=1e-5)
    np.testing.assert_allclose(tn.export(classifier, kind="members")(x), classifier.predict_members(x), rtol=1e-5)
    with pytest.raises(ValueError, match="A TurbaClassifier is exported as members or probability, not as 'mean'"):
        tn.export(classifier, kind="mean")


def test_a_regressor_is_exported_in_the_unit_of_y_without_members_that_diverged():
    x = rng.normal(size=(90, 4))
    for y in (500 + 20 * x[:, 0], 500 + 20 * x[:, :2]):
        regressor = TurbaRegressor(3, hidden=(8,), epochs=2, random_state=0).fit(x, y)
        regressor._sound = np.array([True, False, True])
        np.testing.assert_allclose(tn.export(regressor)(x), regressor.predict_members(x)[[0, 2]].mean(0), rtol=1e-5)
        np.testing.assert_allclose(tn.export(regressor, kind="members")(x), regressor.predict_members(x), rtol=1e-5)
    far = TurbaRegressor(3, hidden=(8,), epochs=2, random_state=0).fit(x, 1e9 + x[:, 0])
    with pytest.raises(ValueError, match=r"float32 cannot tell apart numbers around 1e\+09, with a spread of"):
        tn.export(far)


@pytest.mark.parametrize(("kind", "direct"), first(1, [("global", True), ("local", False), ("both", False)]))
def test_a_forecaster_is_exported_as_a_function_of_windows_and_their_series(kind, direct):
    values = 100 + rng.normal(size=(3, 30)).cumsum(1)
    table = pd.DataFrame({"unique_id": np.repeat(["a", "b", "c"], 30), "ds": [*range(30)] * 3, "y": values.ravel()})
    how = {"horizon": 3, "window": 6, "kind": kind, "direct": direct, "epochs": 2, "progress": False}
    forecaster = Forecaster(Line(3 if direct else 1), **how).fit(table)
    program = tn.export(forecaster)
    order = np.array([2, 0, 1, 0], np.int32)
    expected = forecaster.predict().Line.to_numpy().reshape(3, 3)[order]
    found = program({"window": values[order, -6:], "series": order})
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.isnan(program({"window": values[:2, -6:], "series": np.array([3, -1])})).all()
    with pytest.raises(ValueError, match='A Forecaster is exported as "forecast", not as .mean.'):
        tn.export(forecaster, kind="mean")


def test_what_is_not_fitted_is_not_exported():
    with pytest.raises(ValueError, match="not fitted yet"):
        tn.export(TurbaClassifier())
    with pytest.raises(ValueError, match="Nothing is trained yet"):
        tn.export(Forecaster(horizon=1, window=2))
    with pytest.raises(
        ValueError, match="export takes a swarm, an estimator or a forecaster, got dict: for a pipeline"
    ):
        tn.export({})
