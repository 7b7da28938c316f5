"""Fingerprints: equal for what computes the same, in any process; different for what does not."""

import functools
import json
import os
import subprocess
import sys
import threading
import types
from importlib.metadata import packages_distributions

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiers import first

import turbanet as tn
from turbanet.core import fingerprint as module
from turbanet.core.fingerprint import _distributions, fingerprint

OPTIMIZERS = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "chain": lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam),
    "schedule in inject_hyperparams": lambda rate: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(rate, 1, 9)
    ),
    "multi_transform": lambda rate: optax.multi_transform({"a": optax.adam(rate), "b": optax.sgd(1)}, {"w": "a"}),
    "masked": lambda rate: optax.masked(optax.adam(rate), {"w": True}),
    "lbfgs": optax.lbfgs,
    "schedule": lambda rate: optax.adam(lambda step: rate * step),
    "jitted schedule": lambda rate: optax.adam(jax.jit(lambda step: rate * step)),
    "MultiSteps": lambda rate: optax.MultiSteps(optax.adam(rate), 2),
    "its transformation": lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation(),
    "array": lambda rate: optax.adam(jnp.float32(rate)),
}


class Net(nn.Module):
    act: str = "relu"
    inner: nn.Module | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(getattr(nn, self.act)(nn.Dense(5)(x)))


class Linear(nnx.Module):
    def __init__(self, width, *, rngs):
        self.layer = nnx.Linear(3, width, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Loss:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, prediction, y):
        return self.scale * (prediction - y)


def run(source, name="<cell>", scope=None):
    """What a notebook's cell calls `f`: its names are of no file."""
    scope = {"__name__": "__main__", "jax": jax, "nn": nn, "np": np} if scope is None else scope
    exec(compile(source, name, "exec"), scope)
    return scope["f"]


def twice(a):
    return {"a", "b", "c", a}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_tells_optimizers_apart(name):
    slow, fast, same = (fingerprint(OPTIMIZERS[name](rate)) for rate in (0.1, 0.2, 0.1))
    assert slow == same != fast
    assert slow.opaque == ()


@pytest.mark.parametrize(
    "one, other",
    [
        ("f = lambda x: x + 1", "f = lambda x: x + 2"),
        ("f = lambda x: x + 1", "f = lambda x: x - 1"),
        ("f = lambda x: x + 1", "f = lambda x: x + 1.0"),
        ("f = lambda x: jax.numpy.sin(x)", "f = lambda x: jax.numpy.cos(x)"),
        ("def f(x, k=1): return k", "def f(x, k=2): return k"),
        ("def f(x, *, k=1): return k", "def f(x, *, k=2): return k"),
        ("def f(x): return (lambda y: y + 1)(x)", "def f(x): return (lambda y: y + 2)(x)"),
        ("k = 1\nf = lambda x: x + k", "k = 2\nf = lambda x: x + k"),
        ("k = 1\nf = lambda x: (lambda: x + k)()", "k = 2\nf = lambda x: (lambda: x + k)()"),
        (
            "h = lambda x: x\ng = lambda x: h(x)\nf = lambda x: g(x)",
            "h = lambda x: -x\ng = lambda x: h(x)\nf = lambda x: g(x)",
        ),
        ("f = (lambda k: lambda x: x + k)(1)", "f = (lambda k: lambda x: x + k)(2)"),
        ("f = (lambda k: lambda x: x + k)(np.ones(2))", "f = (lambda k: lambda x: x + k)(np.zeros(2))"),
        ("def f(x): return f.k\nf.k = 1", "def f(x): return f.k\nf.k = 2"),
        ("f = jax.jit(lambda x: x + 1)", "f = jax.jit(lambda x: x + 2)"),
        ("f = jax.vmap(lambda x: x + 1)", "f = jax.vmap(lambda x: x + 2)"),
        ("f = jax.checkpoint(lambda x: x + 1)", "f = jax.checkpoint(lambda x: x + 2)"),
        (
            "def f(x):\n try: abs(x); len(x)\n except OSError: 0",
            "def f(x):\n try: abs(x)\n except OSError: 0\n else: len(x)",
        ),
        ("class f:\n k = 1", "class f:\n k = 2"),
        ("class f:\n def g(self): return 1", "class f:\n def g(self): return 2"),
        ("class f:\n @property\n def g(self): return 1", "class f:\n @property\n def g(self): return 2"),
        ("class f:\n @staticmethod\n def g(): return 1", "class f:\n @staticmethod\n def g(): return 2"),
        ("class g:\n k = 1\nclass f(g): 0", "class g:\n k = 2\nclass f(g): 0"),
        (
            "class f(nn.Module):\n def __call__(self, x): return x",
            "class f(nn.Module):\n def __call__(self, x): return -x",
        ),
        ("class f(nn.Module):\n def setup(self): self.k = 1", "class f(nn.Module):\n def setup(self): self.k = 2"),
        ("class f(nn.Module):\n k: int = 1", "class f(nn.Module):\n k: int = 2"),
        ("f = nn.remat(nn.Dense)", "f = nn.remat(nn.Conv)"),
    ],
)
def test_code_and_what_it_reads_count_and_lines_do_not(one, other):
    assert fingerprint(run(one)) != fingerprint(run(other))
    assert fingerprint(run(one)) == fingerprint(run("# moved\n\n" + one, "<another cell>"))


CHANGES = {
    "a global": ("k = 1\nf = lambda x: x + k", "k = 2"),
    "a global that was none": ("f = lambda x: abs(x)", "abs = lambda x: -x"),
    "an item of a list": ("k = [1]\nf = lambda x: x + k[0]", "k[0] = 2"),
    "an item of a dict": ("k = {'a': 1}\nf = lambda x: x + k['a']", "k['a'] = 2"),
    "an item that is new": ("k = {}\nf = lambda x: x + k.get('a', 1)", "k['a'] = 2"),
    "an item of a set": ("k = {1}\nf = lambda x: x + len(k)", "k.add(2)"),
    "an item of a list in a tuple": ("k = ([1],)\nf = lambda x: x + k[0][0]", "k[0][0] = 2"),
    "an item of a defaultdict": (
        "import collections\nk = collections.defaultdict(int)\nf = lambda x: x + k['a']",
        "k['a'] = 2",
    ),
    "an array": ("k = np.ones(3)\nf = lambda x: x + k", "k[1] = 2"),
    "an array of objects": ("k = np.array([{}, 1])\nf = lambda x: x + k[1]", "k[1] = 2"),
    "a view of an array": ("k = np.ones(3)\nf = (lambda a: lambda x: x + a)(k[:2])", "k[1] = 2"),
    "random numbers": ("k = np.random.default_rng(0)\nf = lambda x: x + k.normal()", "k.normal()"),
    "a cell": (
        "def make():\n k = 1\n def f(x): return x + k\n def set(v):\n  nonlocal k\n  k = v\n return f, set\n"
        "f, set = make()",
        "set(2)",
    ),
    "a cell that was empty": (
        "def make():\n def f(x): return x + k\n def set(v):\n  nonlocal k\n  k = v\n if 0: k = 1\n return f, set\n"
        "f, set = make()",
        "set(2)",
    ),
    "a default": ("def f(x, k=[1]): return x + k[0]", "f.__defaults__[0][0] = 2"),
    "defaults": ("def f(x, k=1): return x + k", "f.__defaults__ = (2,)"),
    "a keyword's default": ("def f(x, *, k=1): return x + k", "f.__kwdefaults__['k'] = 2"),
    "a function's attribute": ("def f(x): return x + f.k\nf.k = 1", "f.k = 2"),
    "a function's code": ("def g(x): return x\nf = lambda x: g(x)", "g.__code__ = (lambda x: -x).__code__"),
    "a class's attribute": ("class A: k = 1\nf = lambda x: x + A.k", "A.k = 2"),
    "an attribute of the class of what is called": (
        "class A:\n k = 1\n def __call__(self, x): return x + self.k\nf = A()",
        "A.k = 2",
    ),
    "a class's method": ("class A:\n def __call__(self, x): return x\nf = A()", "A.__call__ = lambda self, x: -x"),
    "the class above": (
        "class B: k = 1\nclass A(B):\n def __call__(self, x): return x + self.k\nf = A()",
        "B.k = 2",
    ),
    "an object's attribute": ("class A: pass\na = A()\na.k = 1\nf = lambda x: x + a.k", "a.k = 2"),
    "an object's attribute that is new": ("class A: k = 1\na = A()\nf = lambda x: x + a.k", "a.k = 2"),
    "an object's slot": (
        "class A: __slots__ = 'k',\na = A()\na.k = 1\nf = lambda x: x + a.k",
        "a.k = 2",
    ),
    "an object's state": (
        "class A:\n def __getstate__(self): return {'k': list(self.k)}\na = A()\na.k = [1]\nf = lambda x: x + a.k[0]",
        "a.k[0] = 2",
    ),
    "a list's attribute": ("class A(list): k = 1\na = A()\nf = lambda x: x + a.k", "a.append(2)"),
    "what a partial is given": (
        "import functools\nk = {'a': 1}\nf = functools.partial(lambda x, a: x + a['a'], a=k)",
        "k['a'] = 2",
    ),
    "a partial's keyword": ("import functools\nf = functools.partial(lambda x, a: x + a, a=1)", "f.keywords['a'] = 2"),
    "a builtin method's object": ("k = {'a': 1}\nf = (lambda get: lambda x: x + get('a'))(k.get)", "k['a'] = 2"),
    "an object that is equal by value": (
        "class A:\n def __eq__(self, other): return True\n def __hash__(self): return 1\n"
        " def __reduce__(self): return A, (), {'k': self.k}\na = A()\na.k = [1]\nf = lambda x: x + a.k[0]",
        "a.k[0] = 2",
    ),
    "what a custom gradient reads": (
        "k = [1]\nf = jax.custom_vjp(lambda x: x)\nf.defvjp(lambda x: (x, 0), lambda _, g: (g * k[0],))",
        "k[0] = 2",
    ),
    "a method's object": ("class A:\n def g(self, x): return x + self.k\na = A()\na.k = 1\nf = a.g", "a.k = 2"),
    "what a jitted function reads": ("k = [1]\nf = jax.jit(lambda x: x + k[0])", "k[0] = 2"),
    "an item of an empty object": ("k = types.SimpleNamespace()\nf = lambda x: x + getattr(k, 'a', 1)", "k.a = 2"),
    "an item of an empty OrderedDict": (
        "import collections\nk = collections.OrderedDict()\nf = lambda x: x + k.get('a', 1)",
        "k['a'] = 2",
    ),
    "an item of an empty bytearray": ("k = bytearray()\nf = lambda x: x + len(k)", "k.append(2)"),
    "what a function that is read reads": ("k = [1]\ng = lambda x: x + k[0]\nf = lambda x: g(x)", "k[0] = 2"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_while_the_function_stays_is_seen(name):
    source, change = CHANGES[name]
    scope = {"__name__": "__main__", "jax": jax, "nn": nn, "np": np, "types": types}
    found = fingerprint(run(source, scope=scope))
    assert found.holds() and found == fingerprint(scope["f"])
    run(change, scope=scope)
    assert not found.holds()
    assert found != fingerprint(scope["f"])


def test_what_cannot_be_read_is_to_be_the_same_object():
    class Pair:
        def __reduce__(self):
            return Pair, (self.k, self.count)

    pair = Pair()
    pair.k, pair.count = (i for i in ()), 1
    assert fingerprint(lambda x: (x, pair)).holds()


@pytest.mark.parametrize("make", first(1, [Net, lambda: tn.MLP((4, 2))]))
def test_what_stays_as_it_is_holds_however_often_it_is_used(make):
    model, optimizer = make(), optax.inject_hyperparams(optax.adamw)(0.1)
    of_model, of_optimizer = fingerprint(model), fingerprint(optimizer)
    tn.TurbaTrainState.swarm(model, optimizer, 2, 3).train(np.ones((2, 4, 3)), np.ones((2, 4, 2)), tn.mse)
    assert of_model.holds() and of_optimizer.holds()


@pytest.mark.parametrize(
    "one, other",
    [
        (Net("relu"), Net("tanh")),
        (Net(inner=nn.Dense(3)), Net(inner=nn.Dense(4))),
        (nnx.bridge.ToLinen(Linear, kwargs={"width": 3}), nnx.bridge.ToLinen(Linear, kwargs={"width": 4})),
        (tn.MLP((5, 2)), tn.MLP((6, 2))),
        (tn.weighted(tn.mse), tn.weighted(tn.l2_loss)),
        (functools.partial(tn.mse, 1), functools.partial(tn.mse, 2)),
        (functools.partial(tn.mse, k=1), functools.partial(tn.mse, k=2)),
        (Loss(1).loss, Loss(2).loss),
        (types.SimpleNamespace(k=1), types.SimpleNamespace(k=2)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (jnp.zeros(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)),
        (np.array([{}, 1]), np.array([{}, 2])),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (("ab", "c"), ("a", "bc")),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"a": 2}),
        (jnp.float32, jnp.float16),
        (np.dtype("f4"), np.dtype("f2")),
    ],
)
def test_what_objects_hold_tells_them_apart(one, other):
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one).opaque == ()


@pytest.mark.parametrize(
    "reads", ["import own\ndef f(x): return own.g(x)", "def f(x):\n from own import g\n return g(x)"]
)
def test_what_is_read_of_an_own_module_counts(reads, monkeypatch):
    own = types.ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", own)
    own.__spec__ = None
    digests = []
    for own.g in (abs, len):
        digests.append(fingerprint(run(reads)))
    assert digests[0] != digests[1]


MODULES = {
    "as a closure": "def make():\n import own\n return lambda x: own.k\nf = make()",
    "as a default": "import own\ndef f(x, m=own): return m.k",
    "as an attribute": "import own, types\nheld = types.SimpleNamespace(m=own)\nf = lambda x: held.m.k",
    "as an argument": "import own\ndef g(m): return m.k\nf = lambda x: g(own)",
    "by a text": "import own\nf = lambda x: getattr(own, 'k')",
}


@pytest.mark.parametrize("reads", MODULES)
def test_what_an_own_module_holds_counts_however_it_is_reached(reads, monkeypatch):
    own = types.ModuleType("own")
    own.k, own.other = 1, np
    monkeypatch.setitem(sys.modules, "own", own)
    found = fingerprint(run(MODULES[reads]))
    assert found.holds() and found == fingerprint(run(MODULES[reads])) and found.opaque == ()
    own.k = 2
    assert not found.holds() and found != fingerprint(run(MODULES[reads]))


@pytest.mark.parametrize(
    "reads",
    [
        "import own\ndef f(x): return own.k + x",
        "def f(x):\n import own\n return own.k + x",
        "def make():\n import own\n def f(x): return own.k + x\n return f\nf = make()",
        "import own\ndef f(x):\n g = lambda: own.k\n return own.other + g()",
    ],
)
def test_what_is_not_read_of_an_own_module_does_not_count(reads, monkeypatch):
    own = types.ModuleType("own")
    own.k, own.other, own.lock = 1, 2, threading.Lock()
    monkeypatch.setitem(sys.modules, "own", own)
    found = fingerprint(run(reads))
    assert found.opaque == () and found == fingerprint(run(reads))
    own.k = 3
    assert found != fingerprint(run(reads))


def everything():
    """Digests of much that a training may hold, in the order of its names."""
    things = {name: make(0.1) for name, make in OPTIMIZERS.items()}
    things |= {"net": Net(inner=Net("tanh")), "class": Net, "nnx": nnx.bridge.ToLinen(Linear, kwargs={"width": 3})}
    things |= {name: getattr(tn, name) for name in ("MLP", "LSTM", "mse", "accuracy")}
    things["ResNet"] = tn.networks.ResNet
    things |= {"set": {"a", "b", "c"}, "constants": twice, "weighted": tn.weighted(tn.mse), "loss": Loss(1).loss}
    things["a teacher"] = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.adam(0.1), 2, input_size=3)
    return [fingerprint(thing) for thing in things.values()]


@pytest.mark.parametrize("seed", first(1, ["1", "2"]))
def test_another_process_finds_the_same(seed):
    code = "import json, test_fingerprint; print(json.dumps(test_fingerprint.everything()))"
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == everything()


def test_functions_that_call_one_another_have_one():
    source = "def f(x): return g(x)\ndef g(x): return f(x + {})"
    one, other, same = (fingerprint(run(source.format(k))) for k in (1, 2, 1))
    assert one == same != other


def test_methods_that_name_their_own_class_have_one():
    source = "class f:\n def __init__(self): super().__init__()\n def g(self): return f, {}"
    one, other, same = (fingerprint(run(source.format(k))) for k in (1, 2, 1))
    assert one == same != other


def test_what_cannot_be_read_is_named_and_equal_to_nothing():
    rows = (row for row in ())

    def loss(prediction, y):
        return next(rows)

    assert fingerprint(loss).opaque == ("generator rows",)
    assert fingerprint(loss) != fingerprint(loss)


def test_an_open_file_is_named_by_where_it_lies(tmp_path):
    with open(tmp_path / "log", "w") as file:
        assert fingerprint({"a": types.SimpleNamespace(log=file)}).opaque == ("TextIOWrapper a.log",)


def test_what_nests_too_deep_is_named():
    nested = functools.reduce(lambda inner, _: [inner], range(10_000), [])
    assert fingerprint(nested).opaque == ("what nests deeper than Python follows",)


def test_a_packages_version_counts(monkeypatch):
    before = fingerprint(nn.Dense(3))
    monkeypatch.setattr(module, "version", lambda name: "another")
    module._package.cache_clear()
    assert fingerprint(nn.Dense(3)) != before
    module._package.cache_clear()


def test_what_a_function_of_the_library_reads_counts(monkeypatch):
    before = fingerprint(tn.mse)
    monkeypatch.setattr(tn.loss, "_predicted", lambda params, x, apply_fn: x)
    module._library_globals.cache_clear()
    assert fingerprint(tn.mse) != before
    monkeypatch.undo()
    module._library_globals.cache_clear()
    assert fingerprint(tn.mse) == before


def test_what_was_compiled_so_far_is_no_part_of_a_function_that_predicts():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, input_size=3)

    def distilled(params, x, y, apply_fn):
        return tn.mse(params, x, tn.predict(swarm, x)[0], apply_fn)

    before = fingerprint(distilled)
    tn.predict(swarm, np.ones((4, 3), np.float32))
    assert fingerprint(distilled) == before and not before.opaque


@functools.cache
def by_importlib():
    """What importlib reads of all packages, which takes seconds."""
    return packages_distributions()


@pytest.mark.parametrize("module", ["sklearn", "yaml", "PIL", "dateutil", "six", "_cffi_backend", "no_such_module"])
def test_the_distribution_of_a_module_is_the_one_that_importlib_names(module):
    assert _distributions(module) == sorted(set(by_importlib().get(module, [])))
