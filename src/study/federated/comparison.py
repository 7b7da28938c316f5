"""Federated learning by this library and by PyTorch: the same clients on the same batches, timed in turn."""

import dataclasses

import numpy as np

from study.federated.suite import CNN, LOGISTIC


def order(swarm, rows, clients, *, local_epochs, batch_size):
    """Return the server's order of rows for the sampled clients: int64 [round, sampled, step, batch].

    swarm : the initial one; rows : int [client, row] without padding; clients : int [round, sampled]
    """
    import turbanet as tn

    settings = {"epochs": len(clients) * local_epochs, "batch_size": batch_size}
    every = tn.batch_order(swarm.copies(len(rows)), rows, **settings)
    found = []
    for number, sampled in enumerate(clients):
        epochs = slice(number * local_epochs, (number + 1) * local_epochs)
        found.append(every[sampled, epochs].reshape(len(sampled), -1, every.shape[-1]))
    return np.stack(found).astype(np.int64)


def twin(swarm, network):
    """Make the server's network in PyTorch."""
    import jax

    from study.baselines import twins

    params = jax.device_get(swarm.get_state(0).params)
    return twins.lenet_twin(params, padding=2) if network == CNN else twins.mlp_twin(params)


def beside_pytorch(protocol, data, *, rounds, repeats=3):
    """Time a round by this library and by a PyTorch loop with a process per core, in turn: a table.

    Both train the same clients on the same batches. Equality is asserted after one round, as roundings grow in longer
    trainings. A line is one training of `rounds` rounds; `seconds` is the mean of a round, `startup_seconds` the time
    before the first.
    """
    import joblib
    import pandas as pd

    from study.figures.labels import OURS

    processes = joblib.cpu_count()
    if rounds > 1:
        _check_equal(protocol, *_both(protocol, data, rounds=1, processes=processes)[:2])
    lines = []
    for repeat in range(repeats):
        *networks, history, (seconds, startup) = _both(protocol, data, rounds=rounds, processes=processes)
        if rounds == 1:
            _check_equal(protocol, *networks)
        lines.append((OURS, repeat, history.steady_seconds / rounds, history.startup_seconds))
        lines.append(("PyTorch", repeat, seconds.mean(), startup))
    columns = ["method", "repeat", "seconds", "startup_seconds"]
    return pd.DataFrame(lines, columns=columns).assign(network=protocol.network)


def by_pytorch(protocol, data, clients, *, processes):
    """Train these clients, int [round, sampled], in PyTorch: (network, seconds [round], startup seconds)."""
    from study.baselines.layers import tensor
    from study.federated import torch_clients

    x, y = protocol.inputs(data[0]), data[1]
    most = len(y) // protocol.clients
    batch_size = min(protocol.batch_size or most, most)
    small = dataclasses.replace(protocol, network=LOGISTIC).swarm()  # any network has the same shuffles
    steps = order(small, protocol.rows(y), clients, local_epochs=protocol.local_epochs, batch_size=batch_size)
    tensors = map(tensor, (x, y.astype(np.int64), steps))
    network = twin(protocol.swarm(), protocol.network)
    job = torch_clients.Job(network, *tensors, protocol.learning_rate)
    return network, *torch_clients.train(job, processes=processes)


def _both(protocol, data, *, rounds, processes):
    """Train by both: (our swarm, PyTorch's network, our history, PyTorch's [seconds, startup seconds])."""
    swarm, history = protocol.train(data, rounds=rounds)
    network, *seconds = by_pytorch(protocol, data, history.clients, processes=processes)
    return swarm, network, history, seconds


def _check_equal(protocol, swarm, network, *, within=0.1):
    """Raise AssertionError where both differ by more than this share of what was learned; another batch exceeds 0.1."""
    import jax

    from study.baselines import twins

    trees = swarm.get_state(0).params, twins.variables(network)["params"], protocol.swarm().get_state(0).params
    ours, torch, start = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in trees)
    difference = np.linalg.norm(ours - torch) / np.linalg.norm(ours - start)
    assert difference < within, f"TurbaNet and PyTorch differ by {difference:.2g} of what was learned."
