"""Every network that a stage can build, at each of its sizes, on each shape that its data can have: by shapes alone."""

import ast

import jax
import numpy as np
import pytest
from test_notebooks import PARAMS, SOURCE, cells, closure, code

import turbanet as tn
from study.baselines.workloads import workloads
from study.evaluation.windows import normalised
from study.federated import suite as federated_suite
from study.pipeline import notebook, project
from study.sources import store
from turbanet.networks.policies import Agent

MODELS = {"AlexNet", "LSTM", "LeNet", "LeNet5", "MLP", "MobileNet", "ResNet", "VGG", "Agent"}
SHAPES = {"mnist": (28, 28), "cifar10": (32, 32, 3)}  # of an image, from files and from the network
STAGES = [name for name in PARAMS if name not in (*notebook.SECTIONS, "report")]


def sizes():
    """{size: params.yaml at it}: as it is, and as `make smoke` and `make published` have it."""
    over = {"default": {}} | PARAMS["sizes"]
    return {name: project.overlay(PARAMS, changes or {}, name) for name, changes in over.items()}


SIZES = sizes()


@pytest.fixture(scope="module")
def images():
    """{set: [uint8 [1, height, width, ...] of each shape that a source gives]}."""
    found = {}
    for name, shape in SHAPES.items():
        embedded = store.module(name).embedded()[0]["x_train"].shape[1:]
        found[name] = [np.zeros((1, *each), np.uint8) for each in {shape, embedded}]
    return found


def flat(x):
    return x.reshape(len(x), -1).astype(np.float32)


def of_kfold(p, images):
    """The notebook's own networks: its cell of `models`, run with these parameters."""
    (cell,) = (each.source for each in cells("kfold.ipynb") if "models = {" in each.source)
    names = dict(p)
    exec("import turbanet as tn\nfrom functools import partial\nfrom study.baselines import twins\n" + cell, names)
    pixels = {"lenet5": {"size": 32}, "alexnet": {"size": 28}}
    for name in p["networks"]:
        of = "cifar10" if name in ("lenet", "mobilenet", "vgg") else "mnist"
        for x in images[of]:
            yield names["models"][name][0], normalised(x, **pixels.get(name, {}))


def of_federated(p, images):
    for network in (federated_suite.LOGISTIC, federated_suite.TWO, federated_suite.CNN):
        for x in images["mnist"]:
            protocol = federated_suite.Protocol(network, side=x.shape[1])
            yield protocol.model(), protocol.inputs(x[..., None].astype(np.float32))


def of_forecasting(p, images):
    for channels in (1, 3 + 4 * 5):  # with volumes and weekdays
        yield tn.LSTM(p["hidden"], outputs=p["horizon"]), np.zeros((1, p["window"], channels))
    yield tn.LSTM(p["packaged_hidden"]), np.zeros((1, 24, 1))


def of_benchmark(p, images):
    for work in workloads(quick=True).values():
        yield work.model, np.asarray(work.x[0][:1] if work.per_member else work.x[:1])
    for hidden in (16, *p["widths"]):
        yield tn.MLP((hidden, 2)), np.zeros((1, 2))
    yield from ((tn.MLP((64, 32, 10)), flat(x)) for x in images["mnist"])


def on_mnist(name, *classes):
    return lambda p, images: ((tn.MLP((*p[name], last)), flat(x)) for last in classes for x in images["mnist"])


def of_evolution(p, images):
    yield from ((tn.MLP((*hidden, 2)), np.zeros((1, 4))) for hidden in (p["hidden"], *p["timed_hidden"]))
    yield tn.MLP((*p["reward_hidden"], 1)), np.zeros((1, 4))
    yield Agent(2, hidden=tuple(p["hidden"])), np.zeros((1, 4))
    yield from on_mnist("searched_hidden", 10)(p, images)


def of_async_sgd(p, images):
    yield from ((tn.networks.LeNet(), normalised(x)) for x in images["cifar10"])
    yield from ((tn.MLP((64, 32, 10)), flat(x)) for x in images["mnist"])  # of `make peers`


NETWORKS = {  # by stage: (parameters, images) -> (network, its input of one row) of each that it can build
    "sweep": lambda p, images: [(tn.MLP((*p[size]["hidden"], 2)), np.zeros((1, 2))) for size in ("small", "large")],
    "mnist": on_mnist("hidden", 10, 2),
    "stocks": lambda p, images: [(tn.LSTM(p["hidden"]), np.zeros((1, p[n], 1))) for n in ("window", "rolling_window")],
    "forecasting": of_forecasting,
    "benchmark": of_benchmark,
    "search": on_mnist("hidden", 10),
    "kfold": of_kfold,
    "async_sgd": of_async_sgd,
    "scaling": lambda p, images: [(tn.networks.ResNet(p["depth"]), normalised(x)) for x in images["cifar10"]],
    "agents": lambda p, images: [(Agent(actions), np.zeros((1, seen))) for actions, seen in ((2, 4), (3, 6))],
    "federated": of_federated,
    "evolution": of_evolution,
    "cluster": lambda p, images: [(tn.LSTM(p["hidden"]), np.zeros((1, p["window"], 1)))],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_every_network_of_a_stage_fits_every_source(stage, size, images):
    built = list(NETWORKS[stage](SIZES[size][stage], images))
    assert built
    for model, x in built:
        shapes = jax.eval_shape(model.init, jax.random.key(0), jax.numpy.asarray(x, np.float32))
        assert min(leaf.size for leaf in jax.tree.leaves(shapes)) > 0


@pytest.mark.parametrize("stage", STAGES)
def test_no_network_of_a_stage_is_forgotten(stage, images):
    built = {type(model).__name__ for p in SIZES.values() for model, _ in NETWORKS[stage](p[stage], images)}
    assert called(stage) <= built


def called(stage):
    """The networks of ours that a stage's notebook and what it imports of the study call by name."""
    own = code(f"{stage}.ipynb")
    study = [file.read_text() for file in closure(own) if file.is_relative_to(SOURCE / "study")]
    calls = [node.func for text in (own, *study) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = {ast.unparse(func) for func in calls} - {"LSTM"}  # PyTorch's
    return MODELS & {name.removeprefix("tn.") for name in names}
