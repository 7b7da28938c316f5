"""Logistic regression by Flower's simulation in its own environment: `python flower_clients.py FOLDER JOB`.

It does not import this library and prints its measurements as one line of JSON. The clients compute in NumPy, which is
faster for so small a network than a framework with automatic derivatives, so that the time is Flower's.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np


def train_client(weights, bias, x, y, random, *, local_epochs, batch_size, learning_rate):
    """Train in place by SGD on the mean cross-entropy of logits x @ weights + bias: (weights, bias)."""
    for _ in range(local_epochs):
        for rows in np.array_split(random.permutation(len(x)), -(-len(x) // batch_size)):
            logits = x[rows] @ weights + bias
            slope = np.exp(logits - logits.max(1, keepdims=True))
            slope /= slope.sum(1, keepdims=True)
            slope[np.arange(len(rows)), y[rows]] -= 1
            slope *= learning_rate / len(rows)
            weights -= x[rows].T @ slope
            bias -= slope.sum(0)
    return weights, bias


def main(folder, clients, sampled, rounds, **local):
    """Train on the clients' rows, clients.npy, of x.npy and y.npy in a folder: {measurement: value}."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client = ClientApp()
    server = ServerApp()
    found = {}

    @client.train()
    def train(message, context):
        x, y, rows = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("x", "y", "clients"))
        client_rows = rows[context.node_config["partition-id"]]
        start = [array.copy() for array in message.content["arrays"].to_numpy_ndarrays()]
        after = train_client(*start, np.asarray(x[client_rows]), y[client_rows], np.random.default_rng(), **local)
        metrics = MetricRecord({"num-examples": len(client_rows)})
        return Message(RecordDict({"arrays": ArrayRecord(list(after)), "metrics": metrics}), reply_to=message)

    @server.main()
    def serve(grid, context):
        kwargs = {"min_train_nodes": sampled, "min_available_nodes": clients}
        strategy = FedAvg(fraction_train=sampled / clients, fraction_evaluate=0.0, **kwargs)
        zeros = [np.zeros((784, 10), np.float32), np.zeros(10, np.float32)]
        begin = time.perf_counter()
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(zeros), num_rounds=rounds)
        found["seconds"] = time.perf_counter() - begin
        weights, bias = result.arrays.to_numpy_ndarrays()
        x, y = (np.load(f"{folder}/{name}_test.npy") for name in "xy")
        found["accuracy"] = float(((x @ weights + bias).argmax(1) == y).mean())

    begin = time.perf_counter()
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=clients, backend_config=resources)
    return {**found, "whole_seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).absolute(), **json.loads(sys.argv[2]))))
