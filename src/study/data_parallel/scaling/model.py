"""A measured model of a data-parallel step: what a core computes, what a sum over workers costs, and what follows."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls


class Link(NamedTuple):
    """What carries gradients between workers: seconds a message takes at least, bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, size, workers):
        """Of a sum of `size` bytes over workers in a ring: each sends and receives 2 (workers - 1) parts of it."""
        rounds = 2 * (np.asarray(workers) - 1)
        return rounds * (self.latency + np.asarray(size) / np.asarray(workers) / self.bandwidth)


def measured_link(sizes, seconds, workers: int) -> Link:
    """The link that explains the medians of seconds [size, repeat] best, each by its share: sizes are bytes [size].

    Raises ValueError for fewer than two workers or two sizes.
    """
    sizes = np.asarray(sizes, float)
    if workers < 2 or len(np.unique(sizes)) < 2:
        raise ValueError(
            f"A link is measured by two workers and two sizes at least, got {workers} and {sizes.tolist()}."
        )
    median = np.median(seconds, axis=1)
    rounds = 2 * (workers - 1)
    design = np.stack([np.full(len(sizes), rounds), rounds * sizes / workers], axis=1) / median[:, None]
    scale = design.max(axis=0)  # the columns are twelve orders of magnitude apart
    (latency, per_byte), _ = nnls(design / scale, np.ones(len(sizes)))
    return Link(latency / scale[0], scale[1] / per_byte if per_byte else np.inf)


def throughput(compute, batch_size: int, size: float, workers, link: Link):
    """Rows a second of all workers, each of which computes its batch_size rows and then sums `size` bytes with them.

    compute : seconds of a worker's step without the sum; a number, or one for each number of `workers`
    """
    workers = np.asarray(workers)
    sums = np.where(workers > 1, link.seconds(size, workers), 0.0)
    return workers * batch_size / (np.asarray(compute) + sums)
