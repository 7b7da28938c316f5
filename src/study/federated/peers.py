"""Long federated measurements of `make peers`: rounds to a target by the published protocol, and Flower."""

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np

from study.federated.suite import IID, LOGISTIC, SHARDS, TWO, Protocol, images
from study.pipeline import programs
from study.pipeline.environments import build

RATES = (0.05, 0.1, 0.2, 0.4)  # SGD's grid for batches of ten


def rounds(*, most=1500, seeds=5, rates=RATES):
    """Count rounds of the 2NN to 97 % by E, B and partition of rows, for some seeds at the best rate: a table.

    The best rate needs the fewest rounds with the first seed; for batches of all of a client's rows the grid is three
    times as high.
    """
    import pandas as pd

    train, test = _data()
    lines = []
    for dealt in (IID, SHARDS):
        for local_epochs, batch_size in ((1, 10), (5, 10), (1, None), (5, None)):
            protocol = Protocol(TWO, dealt, local_epochs=local_epochs, batch_size=batch_size)
            grid = [rate if batch_size else 3 * rate for rate in rates]
            tried = {rate: dataclasses.replace(protocol, learning_rate=rate) for rate in grid}
            found = {rate: one.rounds_to(train, test, most=most)[0] for rate, one in tried.items()}
            best = min(found, key=found.get)
            for seed in range(seeds):
                one = dataclasses.replace(tried[best], seed=seed)
                count = one.rounds_to(train, test, most=most)[0] if seed else found[best]
                lines.append((dealt, local_epochs, batch_size or "all", best, seed, count))
            print(lines[-1], flush=True)
    return pd.DataFrame(lines, columns=["dealt", "E", "B", "learning_rate", "seed", "rounds"])


def flower(*, rounds=100, clients=1000, repeats=1):
    """Time logistic regression with 1 000 clients, 10 a round, by Flower's simulation in its environment: a table."""
    import pandas as pd

    python = build("flower")
    train, test = _data()
    protocol = Protocol(LOGISTIC, clients=clients)
    names = "clients", "sampled", "local_epochs", "batch_size", "learning_rate"
    job = {"rounds": rounds, **{name: getattr(protocol, name) for name in names}}
    script = Path(__file__).with_name("flower_clients.py")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for (x, y), name in ((train, ""), (test, "_test")):
            np.save(f"{folder}/x{name}.npy", protocol.inputs(x))
            np.save(f"{folder}/y{name}.npy", y)
        np.save(f"{folder}/clients.npy", protocol.rows(train[1]))
        for repeat in range(repeats):
            printed = programs.output([python, script, folder, json.dumps(job)], "Flower")
            lines.append({"repeat": repeat, "rounds": rounds, **json.loads(printed.strip().splitlines()[-1])})
    return pd.DataFrame(lines)


def _data():
    from study.sources import store

    return images(store.load("mnist")[0])


PARTS = {"federated_rounds": rounds, "flower": flower}
