"""A swarm: each core trains a network of its own, from weights of its own, and nothing is communicated."""

import sys
import time

import numpy as np

import turbanet as tn
from turbanet.lab.scaling import worker as base


def main():
    """Train; the result of each member is left as if it were a worker's."""
    worker = base.Worker(*base.begin())
    tn.use_cores(worker.workers)
    import optax

    if len(worker.evaluated) > 1:
        sys.exit("A swarm is scored at its end alone: evaluate_every must be the number of steps, or None.")
    members = worker.workers
    steps, size = len(worker.rates), worker.order.shape[-1]
    rows = min(len(worker.x), steps * size)
    x, y = np.array(worker.x[:rows]), np.array(worker.y[:rows])
    epoch = -(-rows // size)
    rate = float(worker.rates[0])
    model = tn.ResNet(worker.job["depth"])
    swarm = tn.TurbaTrainState.swarm(model, optax.sgd(rate, 0.9), members, sample_input=x[:1], seed=0)
    plan = tn.Plan(members, block=1)
    how = {"epochs": -(-steps // epoch), "batch_size": size, "plan": plan, "progress": False}
    swarm, history = tn.fit(swarm, x, y, tn.softmax_cross_entropy, **how)
    began = time.time() - history.steady_seconds
    seconds = history.steady_seconds * np.arange(1, steps + 1) / (how["epochs"] * epoch)
    test = np.array(worker.x_test)
    scores = np.asarray(tn.predict(swarm, test, plan=plan)) if len(worker.evaluated) else np.zeros((members, 0, 1))
    for worker.rank in range(members):
        losses = np.repeat(history.train_loss[:, worker.rank], epoch)[:steps]
        worker.save(began, seconds, losses, [scores[worker.rank].argmax(-1)] * len(worker.evaluated))


if __name__ == "__main__":
    main()
