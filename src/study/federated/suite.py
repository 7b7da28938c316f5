"""Federated learning on MNIST by the published protocol: networks, how rows are dealt, rounds to a target, seconds."""

import dataclasses
from typing import Any

import numpy as np

LOGISTIC, TWO, CNN = "logistic regression", "2NN", "CNN"
TARGETS = {TWO: 0.97, CNN: 0.99}  # test accuracies that McMahan et al. (2017) count rounds to
IID, SHARDS = "IID", "two classes"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One training.

    network : its name
    dealt : "IID", "two classes" (McMahan's shards), or the alpha of a Dirichlet distribution
    sampled : clients of a round
    batch_size : None for all of a client's rows
    seed : of the weights, of how rows are dealt, of who is sampled
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
        """The network, before it has weights."""
        import turbanet as tn

        cnn = tn.networks.LeNet(features=(32, 64), padding=2, hidden=(512,))
        return {LOGISTIC: tn.MLP((10,)), TWO: tn.MLP((200, 200, 10)), CNN: cnn}[self.network]

    def swarm(self):
        """The server's network, whose optimizer is the clients'."""
        import optax

        import turbanet as tn

        sample = self.seen(np.zeros((1, self.side, self.side, 1), np.float32))
        optimizer = optax.sgd(self.learning_rate)
        return tn.TurbaTrainState.swarm(self.model(), optimizer, 1, sample_input=sample, seed=self.seed)

    def rows(self, labels):
        """Each client's rows of these labels, int [client, row]."""
        import jax

        import turbanet as tn

        if self.dealt == IID:
            whole = len(labels) // self.clients * self.clients
            return np.random.default_rng(self.seed).permutation(len(labels))[:whole].reshape(self.clients, -1)
        key = jax.random.key(self.seed)
        if self.dealt == SHARDS:
            return tn.shards(key, labels=labels, clients=self.clients, per_client=2)
        return tn.dirichlet(key, labels=labels, clients=self.clients, alpha=self.dealt)

    def train(self, data, *, rounds, swarm=None, **how):
        """`turbanet.federated.train` for so many rounds on (x, y), of images [row, side, side, 1]: (swarm, history)."""
        import turbanet as tn

        x, y = data
        job = {"clients": self.rows(y), "rounds": rounds, "sampled": self.sampled, "local_epochs": self.local_epochs}
        job |= {"batch_size": self.batch_size, "seed": self.seed, "progress": False}
        return tn.federated.train(swarm or self.swarm(), self.seen(x), y, tn.softmax_cross_entropy, **job, **how)

    def seen(self, x):
        """Images as the network takes them."""
        return x if self.network == CNN else x.reshape(len(x), -1)

    def rounds_to(self, train, test, *, target=None, most, piece=20):
        """Rounds until the test accuracy reaches a target: (rounds, accuracy [round]).

        The training ends with the piece, of so many rounds, that reaches it. Infinite are more than the `most`, and a
        training that diverges.
        """
        import turbanet as tn

        target = TARGETS[self.network] if target is None else target
        how = {"validation": (self.seen(test[0]), test[1]), "metric": tn.accuracy, "score_every": 1}
        swarm, found = self.swarm(), np.zeros(0)
        while len(found) < most and found.max(initial=0) < target:
            try:
                swarm, history = self.train(train, rounds=min(piece, most - len(found)), swarm=swarm, **how)
            except FloatingPointError:
                return np.inf, found
            found = np.concatenate([found, history.validation_metric])
        whole = dataclasses.replace(history, scored=1 + np.arange(len(found)), validation_metric=found)
        return whole.rounds_to(target), found


def order(swarm, rows, clients, *, local_epochs, batch_size):
    """The rows of each step of the clients of each round, as the server has them: int64 [round, sampled, step, batch].

    swarm : as it began; rows : int [client, row] without padding; clients : int [round, sampled]
    """
    import turbanet as tn

    epochs = len(clients) * local_epochs
    every = tn.batch_order(swarm.copies(len(rows)), rows, epochs=epochs, batch_size=batch_size)
    found = []
    for number, sampled in enumerate(clients):
        own = every[sampled, number * local_epochs : (number + 1) * local_epochs]
        found.append(own.reshape(len(sampled), -1, own.shape[-1]))
    return np.stack(found).astype(np.int64)


def halves(rows, *, held_out, least=10, seed=0):
    """Each client's rows in two, of which a share is held out: (ids, training rows, held-out rows), the latter ragged.

    Left out are clients with fewer rows than the `least`; ids are the others' places in `rows`.
    """
    import turbanet as tn

    random = np.random.default_rng(seed)
    own = {client: random.permutation(one[one >= 0]) for client, one in enumerate(np.asarray(rows))}
    own = {client: each for client, each in own.items() if len(each) >= least}
    cuts = [max(1, round(held_out * len(each))) for each in own.values()]
    train = tn.ragged(each[cut:] for each, cut in zip(own.values(), cuts))
    return np.array(list(own)), train, tn.ragged(each[:cut] for each, cut in zip(own.values(), cuts))


def client_accuracies(swarm, x, y, held_out):
    """Each client's accuracy on its own held-out rows, [client]; `swarm` of a network each, or of one for all."""
    import turbanet as tn

    swarm = swarm.copies(len(held_out)) if len(swarm) == 1 else swarm
    held_out = np.asarray(held_out)
    right = np.asarray(tn.predict(swarm, x, rows=held_out)).argmax(-1) == np.asarray(y)[held_out]
    return right.mean(axis=1, where=held_out >= 0)


def twin(swarm, network):
    """The server's network in PyTorch."""
    import jax

    from study.baselines import twins

    params = jax.device_get(swarm.get_state(0).params)
    return twins.lenet_twin(params, padding=2) if network == CNN else twins.mlp_twin(params)


def beside_pytorch(protocol, data, *, rounds, repeats=3):
    """Seconds of a round by this library and by a PyTorch loop with a process per core, in turn: a table.

    Both train the same clients on the same batches; that they learn the same is asserted after one round, as roundings
    grow in longer trainings. A line is one training of so many rounds; `seconds` of a round are the mean,
    `startup_seconds` what came before the first.
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
    return pd.DataFrame(lines, columns=["way", "repeat", "seconds", "startup_seconds"]).assign(network=protocol.network)


def by_pytorch(protocol, data, clients, *, processes):
    """Train these clients, int [round, sampled], in PyTorch: (network, seconds [round], seconds before them)."""
    from study.baselines import twins
    from study.federated import torch_clients as federated_torch

    x, y = protocol.seen(data[0]), data[1]
    most = len(y) // protocol.clients
    how = {"local_epochs": protocol.local_epochs, "batch_size": min(protocol.batch_size or most, most)}
    small = dataclasses.replace(protocol, network=LOGISTIC).swarm()  # of the same shuffles
    steps = order(small, protocol.rows(y), clients, **how)
    tensors = map(twins.tensor, (x, y.astype(np.int64), steps))
    network = twin(protocol.swarm(), protocol.network)
    job = federated_torch.Job(network, *tensors, protocol.learning_rate)
    return network, *federated_torch.train(job, processes=processes)


def _both(protocol, data, *, rounds, processes):
    """(Our swarm, PyTorch's network, our history, PyTorch's seconds as `by_pytorch` has them)."""
    swarm, history = protocol.train(data, rounds=rounds)
    network, *seconds = by_pytorch(protocol, data, history.clients, processes=processes)
    return swarm, network, history, seconds


def _check_equal(protocol, swarm, network, *, within=0.1):
    """AssertionError unless both learned the same up to this share of it: another batch makes more than a tenth."""
    import jax

    from study.baselines import twins

    ours, begun = (jax.device_get(one.get_state(0).params) for one in (swarm, protocol.swarm()))
    trees = ours, twins.variables(network)["params"], begun
    ours, theirs, begun = (np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in trees)
    far = np.linalg.norm(ours - theirs) / np.linalg.norm(ours - begun)
    assert far < within, f"TurbaNet and PyTorch differ by {far:.2g} of what was learned."


def images(arrays):
    """((x, y) for training, (x, y) for testing) of the MNIST arrays in `data/`, x [row, side, side, 1] in 0 to 1."""
    parts = []
    for part in ("train", "test"):
        x = np.asarray(arrays[f"x_{part}"], np.float32)[..., None] / 255
        parts.append((x, np.asarray(arrays[f"y_{part}"], np.int32)))
    return parts
