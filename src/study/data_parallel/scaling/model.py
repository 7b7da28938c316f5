"""A measured model of a data-parallel step: a core's computation, the sum over workers, the resulting throughput."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls


class Link(NamedTuple):
    """A connection between workers: latency in seconds per message, bandwidth in bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, size, workers):
        """Return the seconds of a ring's sum of `size` bytes: each worker sends and receives 2 (workers - 1) parts."""
        rounds = 2 * (np.asarray(workers) - 1)
        return rounds * (self.latency + np.asarray(size) / np.asarray(workers) / self.bandwidth)


def measured_link(sizes, seconds, workers: int) -> Link:
    """Fit the link to the medians of seconds [size, repeat] by least relative squares; sizes are bytes [size].

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
    """Return rows per second of all workers, each of which computes batch_size rows and then sums `size` bytes.

    compute : seconds of a worker's step without the sum, a number or an array like `workers`
    """
    workers = np.asarray(workers)
    sums = np.where(workers > 1, link.seconds(size, workers), 0.0)
    return workers * batch_size / (np.asarray(compute) + sums)
