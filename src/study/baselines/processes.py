"""Training in PyTorch by several processes, to which the networks are dealt out."""

from collections.abc import Callable

import jax
import joblib
import numpy as np

from study.baselines.trainers import prepare, train_loop


def train_processes(twins, x, y, *, epochs, order=None, per_member=False, **settings) -> np.ndarray:
    """Run `train_loop` in processes of one thread each; `settings` are those of `in_processes` and `train_loop`."""
    prepare(twins, x, y, settings["loss"], order, epochs, per_member)  # raise errors here, not in a process
    data = {"x": x, "y": y}
    own = {"order": order} | (data if per_member else {})
    settings |= {"epochs": epochs, "per_member": per_member} | ({} if per_member else data)
    return in_processes(train_loop, twins, own, **settings)


def in_processes(train: Callable, twins, own, *, processes: int | None = None, **settings):
    """Run `train(twins, **own, threads=1, **settings)` in processes (None: one per core), members dealt out in turn.

    own : each member's part of the arguments, {name: tree of arrays [member, ...]}. The twins are trained in place;
    returns the results of `train`, arrays [..., member].
    """
    count = min(processes or joblib.cpu_count(), len(twins))
    shares = [slice(first, None, count) for first in range(count)]
    jobs = []
    for share in shares:
        part = jax.tree.map(lambda leaf, share=share: np.asarray(leaf)[share], own)
        jobs.append(joblib.delayed(_train_share)(train, twins[share], **part, threads=1, **settings))
    weights, results = zip(*joblib.Parallel(n_jobs=count, backend="loky")(jobs), strict=True)
    for share, trained in zip(shares, weights, strict=True):
        for twin, state in zip(twins[share], trained, strict=True):
            twin.load_state_dict(state)

    def gather(*parts):
        whole = np.empty((*parts[0].shape[:-1], len(twins)))
        for share, part in zip(shares, parts, strict=True):
            whole[..., share] = part
        return whole

    return jax.tree.map(gather, *results)


def _train_share(train, twins, **job):
    results = train(twins, **job)
    return [twin.state_dict() for twin in twins], results
