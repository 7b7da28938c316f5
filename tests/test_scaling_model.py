"""study.data_parallel.scaling.model: a step's parts, found again in times that were made of them."""

import numpy as np
import pytest

from study.data_parallel.scaling import model


@pytest.mark.parametrize("workers", [2, 4])
def test_a_link_is_found_in_the_times_it_makes(workers):
    sizes = np.array([4e3, 4e4, 4e5, 4e6])
    made = 2 * (workers - 1) * (50e-6 + sizes / workers / 2e9)
    link = model.measured_link(sizes, np.stack([made, made * 1.0, made * 9], axis=1), workers)  # one slow repeat each
    np.testing.assert_allclose(link, (50e-6, 2e9), rtol=1e-6)


@pytest.mark.parametrize("compute", [0.1, np.array([0.1, 0.1, 0.2])], ids=["a core each", "shared cores"])
def test_a_step_is_computation_and_a_ring(compute):
    link = model.Link(latency=1e-3, bandwidth=1e6)
    workers = np.array([1, 2, 4])
    by_hand = np.array([0.0, 2 * (1e-3 + 1500 / 1e6), 6 * (1e-3 + 750 / 1e6)]) + compute
    np.testing.assert_allclose(model.throughput(compute, 8, 3000, workers, link), 8 * workers / by_hand)


def test_workers_with_cores_of_their_own_do_not_share():
    link = model.Link(0.0, np.inf)
    np.testing.assert_allclose(model.throughput(0.5, 10, 1e6, np.array([1, 64]), link), [20, 1280])


@pytest.mark.parametrize(("sizes", "workers"), [([1e3, 1e4], 1), ([1e3, 1e3], 2)])
def test_a_link_needs_two_workers_and_two_sizes(sizes, workers):
    with pytest.raises(ValueError, match="two workers and two sizes"):
        model.measured_link(sizes, np.ones((2, 1)), workers)
