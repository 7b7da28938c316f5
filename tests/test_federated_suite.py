"""The federated study: the published protocol, the same work by PyTorch, and what a long measurement tables."""

import dataclasses
import functools
import json
import subprocess
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiers import first

from study.federated import (
    comparison,
    flower_clients,
    peers as federated_peers,
    suite as federated_suite,
    torch_clients as federated_torch,
)
from study.federated.suite import CNN, IID, LOGISTIC, SHARDS, TWO, Protocol

RANDOM = np.random.default_rng(0)
LABELS = np.repeat(np.arange(10), 40).astype(np.int32)
IMAGES = (RANDOM.random((10, 28, 28, 1))[LABELS] + RANDOM.random((400, 28, 28, 1))).astype(np.float32) / 2
DATA = IMAGES, LABELS
SMALL = {"clients": 8, "sampled": 3, "local_epochs": 2}


def test_networks_have_the_published_numbers_of_parameters():
    counts = {}
    for protocol in (Protocol(TWO), Protocol(CNN)):
        shapes = jax.eval_shape(protocol.model().init, jax.random.key(0), protocol.inputs(IMAGES[:1]))
        counts[protocol.network] = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    assert counts == {TWO: 199_210, CNN: 1_663_370}  # McMahan et al. 2017, section 3


def test_rows_are_dealt_as_the_protocol_says():
    even = Protocol(TWO, IID, **SMALL).rows(LABELS)
    assert even.shape == (8, 50) and len(set(even.ravel().tolist())) == 400
    classes = [len(set(LABELS[own].tolist())) for own in np.asarray(Protocol(TWO, SHARDS, clients=20).rows(LABELS))]
    assert max(classes) <= 2
    ragged = np.asarray(Protocol(TWO, 0.1, **SMALL).rows(LABELS))
    assert (ragged >= 0).sum() == 400 and len(set((ragged >= 0).sum(1).tolist())) > 1


@functools.cache
def both(network):
    """(the protocol, its network by this library, by two processes of PyTorch, their [seconds, startup seconds])."""
    protocol = Protocol(network, **SMALL)
    swarm, theirs, _, seconds = comparison._both(protocol, DATA, rounds=1, processes=2)
    return protocol, swarm, theirs, seconds


@pytest.mark.parametrize("network", first(1, [LOGISTIC, TWO]))
def test_pytorch_ends_with_the_same_weights(network):
    protocol, swarm, theirs, (seconds, startup) = both(network)
    comparison._check_equal(protocol, swarm, theirs, within=1e-4)
    assert seconds.shape == (1,) and startup > 0


def test_a_rate_is_tuned_on_rows_that_are_held_apart(monkeypatch):
    part, apart = federated_suite.held_apart(DATA, 0.25, seed=1)
    rows = np.concatenate([part[0], apart[0]])
    assert len(apart[1]) == 100 and sorted(rows.sum((1, 2, 3))) == sorted(IMAGES.sum((1, 2, 3)))
    scores, used = {0.1: 0.5, 0.2: 0.7, 0.4: None}, []

    def train(protocol, data, *, rounds, validation, proximal, **_):
        used.append((len(data[1]), len(validation[1]), proximal))
        if scores[protocol.learning_rate] is None:
            raise FloatingPointError
        return None, SimpleNamespace(validation_metric=np.array([0.9, scores[protocol.learning_rate]]))

    monkeypatch.setattr(Protocol, "train", train)
    found = federated_suite.tuned(Protocol(TWO, **SMALL), part, apart, [0.1, 0.2, 0.4], rounds=2, proximal=0.1)
    assert found == (0.2, {0.1: 0.5, 0.2: 0.7, 0.4: 0.0}) and used == [(300, 100, 0.1)] * 3


@pytest.mark.thorough
def test_both_are_timed_in_turn(monkeypatch):
    checked = []
    monkeypatch.setattr(comparison, "_check_equal", lambda *networks: checked.append(networks))
    table = comparison.beside_pytorch(Protocol(LOGISTIC, **SMALL), DATA, rounds=2, repeats=1)
    assert table.method.tolist() == ["TurbaNet", "PyTorch"]
    assert (table.seconds > 0).all() and (table.startup_seconds > 0).all()
    assert len(checked) == 1


def test_other_batches_are_noticed():
    protocol, ours, theirs, _ = both(LOGISTIC)
    others, _ = dataclasses.replace(protocol, batch_size=5).train(DATA, rounds=1)
    comparison._check_equal(protocol, ours, theirs)
    with pytest.raises(AssertionError, match=r"differ by [\d.]+ of what was learned"):
        comparison._check_equal(protocol, others, theirs)


@pytest.mark.thorough  # `test_pytorch_ends_with_the_same_weights` deals three clients out to two processes too
def test_a_process_trains_every_other_client():
    import torch

    model = torch.nn.Linear(2, 2)
    before = [each.detach().clone() for each in model.parameters()]
    x, y = torch.rand(12, 2), torch.arange(12) % 2
    order = torch.arange(12).reshape(1, 3, 2, 2)
    job = federated_torch.Job(model, x, y, order, 0.5)
    seconds, startup = federated_torch.train(job, processes=2)
    assert seconds.shape == (1,) and startup > 0
    ends = []
    for client in range(3):
        own = torch.nn.Linear(2, 2)
        own.load_state_dict(dict(zip(("weight", "bias"), before, strict=True)))
        for rows in order[0, client]:
            own.zero_grad()
            torch.nn.functional.cross_entropy(own(x[rows]), y[rows]).backward()
            with torch.no_grad():
                for each in own.parameters():
                    each -= 0.5 * each.grad
        ends.append([each.detach() for each in own.parameters()])
    for found, *of_clients in zip(model.parameters(), *ends, strict=True):
        torch.testing.assert_close(found, torch.stack(of_clients).mean(0))


def test_rounds_to_a_target_end_with_the_piece_that_reaches_it():
    protocol = Protocol(LOGISTIC, **SMALL)
    count, accuracies = protocol.rounds_to(DATA, DATA, target=0.3, most=30, piece=5)
    assert accuracies.max() >= 0.3 and len(accuracies) % 5 == 0 and max(accuracies[:-5], default=0) < 0.3
    assert np.maximum.accumulate(accuracies)[int(np.ceil(count)) - 1] >= 0.3
    never, accuracies = protocol.rounds_to(DATA, DATA, target=1.1, most=7, piece=5)
    assert never == np.inf and len(accuracies) == 7


def test_a_training_that_diverges_never_reaches_its_target():
    count, _ = Protocol(LOGISTIC, learning_rate=1e38, **SMALL).rounds_to(DATA, DATA, target=0.5, most=4)
    assert count == np.inf


def test_images_lie_between_nothing_and_one():
    arrays = {"x_train": np.full((2, 28, 28), 255, np.uint8), "y_train": [1, 2]}
    (x, y), _ = federated_suite.images(arrays | {"x_test": np.zeros((1, 28, 28), np.uint8), "y_test": [3]})
    assert x.shape == (2, 28, 28, 1) and x.max() == 1 and y.dtype == np.int32


def test_rounds_are_counted_at_the_best_rate_with_several_seeds(monkeypatch):
    monkeypatch.setattr(federated_peers, "_data", lambda: (DATA, DATA))
    monkeypatch.setattr(Protocol, "rounds_to", lambda one, *_, most: (100 * one.learning_rate + one.seed, []))
    table = federated_peers.rounds(most=3, seeds=2, rates=(0.2, 0.1))
    assert len(table) == 2 * 4 * 2
    assert table[table.B == 10].learning_rate.unique().tolist() == [0.1]
    assert table[table.B == "all"].learning_rate.unique().tolist() == pytest.approx([0.3])
    assert table[table.B == 10].rounds.unique().tolist() == [10, 11]


def test_flower_is_asked_for_the_same_training(monkeypatch):
    monkeypatch.setattr(federated_peers, "_data", lambda: (DATA, DATA))
    monkeypatch.setattr(federated_peers, "build", lambda name: f"python of {name}")

    def run(command, **_):
        python, script, folder, job = command
        assert python == "python of flower" and script.name == "flower_clients.py"
        assert np.load(f"{folder}/x.npy").shape == (400, 784)
        asked = json.loads(job)
        assert asked["clients"] == 400 and asked["batch_size"] == 10 and asked["rounds"] == 5
        return SimpleNamespace(returncode=0, stdout='some line\n{"seconds": 3.5, "accuracy": 0.9}\n')

    monkeypatch.setattr(subprocess, "run", run)
    table = federated_peers.flower(rounds=5, clients=400)
    assert table.to_dict("records") == [{"repeat": 0, "rounds": 5, "seconds": 3.5, "accuracy": 0.9}]


def test_flowers_clients_take_the_steps_of_softmax_regression():
    import torch

    x, y = DATA[0].reshape(400, -1)[:20], LABELS[:20].astype(int)
    start = np.zeros((784, 10), np.float32), np.zeros(10, np.float32)
    job = {"local_epochs": 3, "batch_size": 20, "learning_rate": 0.1}
    weights, bias = flower_clients.train_client(*start, x, y, np.random.default_rng(0), **job)
    layer = torch.nn.Linear(784, 10)
    torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layer(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    np.testing.assert_allclose(weights, layer.weight.detach().T, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(bias, layer.bias.detach(), rtol=1e-3, atol=1e-5)


def test_halves_keep_every_row_of_those_who_have_enough():
    rows = np.stack([np.r_[np.arange(12), -np.ones(8, int)], np.r_[[50, 51], -np.ones(18, int)], np.arange(20, 40)])
    ids, train, held_out = (np.asarray(part) for part in federated_suite.halves(rows, held_out=0.25))
    assert ids.tolist() == [0, 2]
    assert (train >= 0).sum(1).tolist() == [9, 15] and (held_out >= 0).sum(1).tolist() == [3, 5]
    for client, own in enumerate(rows[ids]):
        both = np.r_[train[client][train[client] >= 0], held_out[client][held_out[client] >= 0]]
        assert sorted(both) == sorted(own[own >= 0])


def test_client_accuracies_are_of_each_ones_own_rows():
    x, y = DATA[0].reshape(400, -1), LABELS
    swarm = Protocol(LOGISTIC).swarm()
    held_out = np.array([[0, 45, -1], [90, 130, 399]])
    right = np.asarray(swarm.apply_fn({"params": swarm.get_state(0).params}, x)).argmax(1) == y
    expected = [right[[0, 45]].mean(), right[[90, 130, 399]].mean()]
    np.testing.assert_allclose(federated_suite.client_accuracies(swarm, x, y, held_out), expected)
