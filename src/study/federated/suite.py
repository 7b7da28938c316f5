"""Federated learning on MNIST by the published protocol: networks, partition of rows, rounds to a target."""

import dataclasses
import functools
from typing import Any

import numpy as np

LOGISTIC, TWO, CNN = "logistic regression", "2NN", "CNN"
TARGETS = {TWO: 0.97, CNN: 0.99}  # test accuracies that McMahan et al. (2017) count rounds to
IID, SHARDS = "IID", "two classes"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The settings of one training.

    network : a name: LOGISTIC, TWO or CNN
    dealt : the partition of rows: "IID", "two classes" (McMahan's shards), or the alpha of a Dirichlet distribution
    sampled : clients in a round
    batch_size : None takes all of a client's rows
    seed : of the weights, the partition of rows and the sampled clients
    side : pixels of an image's side
    """

    network: str
    dealt: Any = IID
    clients: int = 100
    sampled: int = 10
    local_epochs: int = 1
    batch_size: int | None = 10
    learning_rate: float = 0.1
    seed: int = 0
    side: int = 28

    def model(self):
        """Make the Flax module."""
        import turbanet as tn

        cnn = tn.networks.LeNet(features=(32, 64), padding=2, hidden=(512,))
        return {LOGISTIC: tn.MLP((10,)), TWO: tn.MLP((200, 200, 10)), CNN: cnn}[self.network]

    def swarm(self):
        """Make the server's network; its optimizer is the clients'."""
        import turbanet as tn

        sample = self.inputs(np.zeros((1, self.side, self.side, 1), np.float32))
        swarm = tn.TurbaTrainState.swarm(self.model(), _sgd(), 1, sample_input=sample, seed=self.seed)
        return tn.with_hyperparameters(swarm, learning_rate=self.learning_rate)

    def rows(self, labels):
        """Partition the rows of these labels: int [client, row]."""
        import jax

        import turbanet as tn

        if self.dealt == IID:
            whole = len(labels) // self.clients * self.clients
            return np.random.default_rng(self.seed).permutation(len(labels))[:whole].reshape(self.clients, -1)
        key = jax.random.key(self.seed)
        if self.dealt == SHARDS:
            return tn.shards(key, labels=labels, clients=self.clients, per_client=2)
        return tn.dirichlet(key, labels=labels, clients=self.clients, alpha=self.dealt)

    def train(self, data, *, rounds, swarm=None, **kwargs):
        """Call `turbanet.federated.train` on data (x, y) with images [row, side, side, 1]: (swarm, history)."""
        import turbanet as tn

        x, y = data
        job = {"clients": self.rows(y), "rounds": rounds, "sampled": self.sampled, "local_epochs": self.local_epochs}
        job |= {"batch_size": self.batch_size, "seed": self.seed, "progress": False}
        return tn.federated.train(swarm or self.swarm(), self.inputs(x), y, tn.softmax_cross_entropy, **job, **kwargs)

    def inputs(self, x):
        """Reshape images to the network's input."""
        return x if self.network == CNN else x.reshape(len(x), -1)

    def rounds_to(self, train, test, *, target=None, most, piece=20):
        """Count rounds until the test accuracy reaches a target: (rounds, accuracy [round]).

        Training goes on in pieces of `piece` rounds until one reaches the target. The count is infinite after `most`
        rounds and for a training that diverges.
        """
        import turbanet as tn

        target = TARGETS[self.network] if target is None else target
        kwargs = {"validation": (self.inputs(test[0]), test[1]), "metric": tn.accuracy, "score_every": 1}
        swarm, found = self.swarm(), np.zeros(0)
        while len(found) < most and found.max(initial=0) < target:
            try:
                swarm, history = self.train(train, rounds=min(piece, most - len(found)), swarm=swarm, **kwargs)
            except FloatingPointError:
                return np.inf, found
            found = np.concatenate([found, history.validation_metric])
        whole = dataclasses.replace(history, scored=1 + np.arange(len(found)), validation_metric=found)
        return whole.rounds_to(target), found


@functools.cache
def _sgd():
    """Make the clients' optimizer: one for all rates, so that these share a program."""
    import optax

    return optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


def held_apart(data, share, *, seed=0):
    """Split off a share of the rows of data (x, y), drawn at random: (the others, these), each (x, y)."""
    x, y = data
    rows = round(share * len(x))
    order = np.random.default_rng(seed).permutation(len(x))
    return (x[order[rows:]], y[order[rows:]]), (x[order[:rows]], y[order[:rows]])


def tuned(protocol, train, held_out, rates, *, rounds, **kwargs):
    """Find the clients' learning rate with which the network is most accurate on held-out rows after some rounds.

    Returns (rate, {rate: accuracy}), 0 for a training that diverges; `kwargs` go to `Protocol.train`.
    """
    import turbanet as tn

    kwargs |= {"validation": (protocol.inputs(held_out[0]), held_out[1]), "metric": tn.accuracy, "score_every": rounds}
    found = {}
    for rate in rates:
        one = dataclasses.replace(protocol, learning_rate=rate)
        try:
            found[rate] = float(one.train(train, rounds=rounds, **kwargs)[1].validation_metric[-1])
        except FloatingPointError:
            found[rate] = 0.0
    return max(found, key=found.get), found


def halves(rows, *, held_out, least=10, seed=0):
    """Split each client's rows: (ids, training rows, held-out rows), the rows padded with -1.

    `held_out` is a share. Clients with fewer than `least` rows are left out; ids are the others' positions in `rows`.
    """
    import turbanet as tn

    random = np.random.default_rng(seed)
    own = {client: random.permutation(one[one >= 0]) for client, one in enumerate(np.asarray(rows))}
    own = {client: each for client, each in own.items() if len(each) >= least}
    cuts = [max(1, round(held_out * len(each))) for each in own.values()]
    train = tn.ragged(each[cut:] for each, cut in zip(own.values(), cuts))
    return np.array(list(own)), train, tn.ragged(each[:cut] for each, cut in zip(own.values(), cuts))


def client_accuracies(swarm, x, y, held_out):
    """Compute each client's accuracy on its own held-out rows, [client]; `swarm` has a network each or one for all."""
    import turbanet as tn

    swarm = swarm.copies(len(held_out)) if len(swarm) == 1 else swarm
    held_out = np.asarray(held_out)
    right = np.asarray(tn.predict(swarm, x, rows=held_out)).argmax(-1) == np.asarray(y)[held_out]
    return right.mean(axis=1, where=held_out >= 0)


def images(arrays):
    """Make [(x, y) for training, (x, y) for test] of MNIST's arrays in `data/`, x [row, side, side, 1] in 0 to 1."""
    parts = []
    for part in ("train", "test"):
        x = np.asarray(arrays[f"x_{part}"], np.float32)[..., None] / 255
        parts.append((x, np.asarray(arrays[f"y_{part}"], np.int32)))
    return parts
