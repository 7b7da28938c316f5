"""Small runs over a cluster, in a module that a worker imports in little time: no test's packages come with it."""

import time

import bucket  # noqa: F401  (in the workers too, s3:// is a folder)
import jax
import numpy as np
import optax

import turbanet as tn
from turbanet.cluster import engine, shards

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3)).astype(np.float32)
Y = (X @ RANDOM.normal(size=(3, 2))).argmax(-1).astype(np.int32)
SERIES = RANDOM.normal(size=(12, 20, 3)).astype(np.float32)  # [member, row, feature]
NEXT = SERIES.sum(-1, keepdims=True)
HOW = {"epochs": 6, "batch_size": 10, "segment": 2, "plan": tn.Plan(1, block=2)}  # blocks that every shard fills

LONG = {"members": 8, "shard": 4, "epochs": 20, "segment": 4}


def classifiers(ids):
    return tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.adam(0.01), ids, input_size=3, seed=7)


def waiting(file):
    """A loss of LONG that waits for a file once more than half of a shard's epochs are trained."""
    calls = []

    def wait():
        calls.append(1)  # of 160: 2 blocks, 20 epochs, 4 steps
        while len(calls) > 100 and not file.exists():
            time.sleep(0.01)

    def loss(params, x, y, apply_fn):
        jax.debug.callback(wait)
        return tn.softmax_cross_entropy(params, x, y, apply_fn)

    return loss


def regressors(ids):
    return tn.TurbaTrainState.swarm(tn.MLP((8, 1)), optax.adam(0.01), ids, input_size=3, seed=7)


def of_series(ids):
    return {"x": SERIES[ids], "y": NEXT[ids], "per_member": True, "predict": SERIES[ids][:, :4]}


def on_cluster(where, make=classifiers, data=(X, Y), loss=tn.softmax_cross_entropy, members=42, **how):
    return tn.cluster.fit(make, data, loss, members=members, checkpoints=where, progress=False, **HOW | how)


def picky(cpus, file=None):
    """This node's id; on one with so many CPUs, that it is unfit. Others wait a minute for that, if there is a file."""
    node = shards.ray_node()
    (here,) = (each for each in __import__("ray").nodes() if each["NodeID"] == node)
    if here["Resources"]["CPU"] == cpus:
        if file:
            file.touch()
        return engine.Unfit(node, "This node is bad.")
    begin = time.monotonic()
    while file and not file.exists() and time.monotonic() - begin < 60:
        time.sleep(0.05)
    return node
