"""A swarm: each worker trains its own network from its own weights, without communication.

With job["one_process"] one process has a device for each network; else each network has a process.
"""

import sys
import time

import numpy as np

import turbanet as tn
from study.data_parallel.scaling import worker as base


def main():
    """Train, and write each member's result as a worker's."""
    worker = base.Worker(*base.begin())
    members = np.arange(worker.workers) if worker.job["one_process"] else np.array([worker.rank])
    tn.use_cores(len(members), cache=False)
    import optax

    steps, size = len(worker.rates), worker.order.shape[-1]
    rows = min(len(worker.x), steps * size)
    epoch = -(-rows // size)  # steps of a network
    if steps % epoch or (worker.evaluated % epoch).any():
        expected = f"steps and evaluate_every must be multiples of an epoch's {epoch} steps"
        sys.exit(f"A swarm is scored between epochs: {expected}, got {steps} and {worker.evaluated[:1].tolist()}.")
    x, y = np.array(worker.x[:rows]), np.array(worker.y[:rows])
    model, optimizer = tn.networks.ResNet(worker.job["depth"]), optax.sgd(float(worker.rates[0]), 0.9)
    swarm = tn.TurbaTrainState.swarm(model, optimizer, worker.workers, sample_input=x[:1], seed=0)[members]
    plan = tn.Plan(len(members), block=1)
    kwargs = {"batch_size": size, "plan": plan, "progress": False}
    ends = np.union1d(worker.evaluated, steps)
    began, seconds, losses, scores = None, [0.0], [], []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        swarm, history = tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=(last - first) // epoch, **kwargs)
        began = time.time() - history.steady_seconds if began is None else began
        seconds.extend(seconds[-1] + history.steady_seconds * np.arange(1, last - first + 1) / (last - first))
        losses.append(np.repeat(history.train_loss, epoch, axis=0))
        if last in worker.evaluated:
            scores.append(np.asarray(tn.predict(swarm, np.array(worker.x_test), plan=plan)).argmax(-1))
    for index, worker.rank in enumerate(members):
        predictions = [each[index] for each in scores]
        worker.save(began, np.array(seconds[1:]), np.concatenate(losses)[:, index], predictions)


if __name__ == "__main__":
    main()
