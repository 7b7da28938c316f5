"""Federated learning that a rebuild has no time for: rounds to a target by the published protocol, and Flower."""

import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from study.federated.suite import IID, LOGISTIC, SHARDS, TWO, Protocol, images
from study.pipeline.environments import build

RATES = (0.05, 0.1, 0.2, 0.4)  # of SGD in batches of ten, among which the best is taken


def rounds(*, most=1500, seeds=5, rates=RATES):
    """Rounds of the 2NN to 97 %, by E, B and how rows are dealt, each with some seeds at its best rate: a table.

    The rate is the one of the grid that needs fewest rounds with the first seed; for batches of all of a client's rows
    the grid lies three times as far up.
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
    """Logistic regression, 1 000 clients of which 10 a round, by Flower's simulation in its environment: a table."""
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
            np.save(f"{folder}/x{name}.npy", protocol.seen(x))
            np.save(f"{folder}/y{name}.npy", y)
        np.save(f"{folder}/clients.npy", protocol.rows(train[1]))
        for repeat in range(repeats):
            done = subprocess.run([python, script, folder, json.dumps(job)], capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise RuntimeError(f"Flower ended with {done.returncode}: {last}")
            lines.append({"repeat": repeat, "rounds": rounds, **json.loads(done.stdout.strip().splitlines()[-1])})
    return pd.DataFrame(lines)


def _data():
    from study.sources import store

    return images(store.load("mnist")[0])


PARTS = {"federated_rounds": rounds, "flower": flower}
