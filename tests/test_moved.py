"""Names, modules and pickles of 0.6 load, with a warning that gives the new place."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest

import turbanet as tn
from turbanet import moved
from turbanet.checkpoints import serialization
from turbanet.data import examples


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """Modules of 0.6 warn when they are first loaded."""
    for name in moved.MODULES:
        monkeypatch.delitem(sys.modules, f"turbanet.{name}", raising=False)


@pytest.mark.parametrize("name", moved.NAMES)
def test_a_name_of_0_6_is_what_it_is_called_now(name):
    package, attribute = moved.NAMES[name].split(".")
    with pytest.warns(DeprecationWarning, match=rf"^turbanet\.{name} is now turbanet\.{package}\.{attribute}\.$"):
        found = getattr(tn, name)
    assert found is getattr(getattr(tn, package), attribute)
    assert name not in tn.__all__


def test_federated_is_called_as_in_0_6(monkeypatch):
    monkeypatch.setattr(tn.federated, "train", lambda *args, **kwargs: (args, kwargs))
    with pytest.warns(DeprecationWarning, match=r"^turbanet\.federated is now turbanet\.federated\.train\.$"):
        assert tn.federated(1, rounds=2) == ((1,), {"rounds": 2})


def test_what_never_was_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'turbanet' has no attribute 'swarms'"):
        getattr(tn, "swarms")  # noqa: B009  (it is to raise)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("turbanet.populations.swarms")


@pytest.mark.parametrize("name", moved.MODULES)
def test_a_module_of_0_6_is_the_one_that_it_is_now(name):
    if name.startswith("cluster"):
        pytest.importorskip("ray")
    new = f"turbanet.{moved.MODULES[name]}"
    with pytest.warns(DeprecationWarning, match=rf"turbanet\.{name} is now {new}\.$"):
        assert importlib.import_module(f"turbanet.{name}") is importlib.import_module(new)


def test_modules_of_0_6_hold_what_they_held():
    with pytest.warns(DeprecationWarning):
        from turbanet.training.data import Data
        from turbanet.training.saved import load
    assert Data is examples.Data and load is serialization.load


def test_what_0_6_pickled_loads():
    file = Path(__file__).parent / "pickles/populations_0.6.pkl"
    with pytest.warns(DeprecationWarning) as warned:
        kept = pickle.loads(file.read_bytes())
    messages = [str(warning.message) for warning in warned]
    assert "turbanet.populations.genetics is now turbanet.evolution.genetics." in messages
    assert kept["rule"] == tn.evolution.Genetic(0.3, tn.evolution.Tournament(2), "uniform")
    assert isinstance(kept["rounds"], tn.federated.FederatedHistory) and kept["rounds"].steady_seconds == 2
    assert isinstance(kept["generations"], tn.evolution.EvolutionHistory) and kept["generations"].fitness.shape == (
        4,
        1,
    )
