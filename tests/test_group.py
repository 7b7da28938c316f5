"""study.data_parallel.group: workers through torch.distributed end where a loop by hand ends, or in one sentence."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import multiprocessing, nn

from study.data_parallel import group, workers
from turbanet.data.sampling import deal

RANDOM = np.random.default_rng(0)
X = torch.tensor(RANDOM.normal(size=(40, 4)), dtype=torch.float32)
Y = torch.tensor(RANDOM.integers(0, 3, 40))
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ENTROPY = nn.CrossEntropyLoss()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def job(method, workers=2, epochs=2, optimizer=SGD, **kwargs):
    order = deal(rows=40, workers=workers, epochs=epochs, batch_size=5, seed=2)
    data = torch.utils.data.TensorDataset(X, Y)
    return group.Job(method, network(), data, torch.from_numpy(order).long(), ENTROPY, optimizer, **kwargs)


def loop(batches):
    """PyTorch's own loop over batches [epoch, step, row]."""
    model = network()
    optimizer = SGD(model.parameters())
    for steps in batches:
        for rows in steps:
            optimizer.zero_grad()
            ENTROPY(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    return model.state_dict()


def assert_equal(model, expected):
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(weights, expected[name], rtol=1e-4, atol=1e-6)


def test_workers_in_step_end_where_one_loop_over_all_their_rows_ends():
    given = job("ddp")
    losses, startup = group.train(given)
    together = np.concatenate(list(given.order.numpy()), axis=-1)  # the mean of two means of as many rows is theirs
    assert_equal(given.model, loop(together))
    assert len(losses) == 2 * 8 and startup > 0 and np.isfinite(losses.loss).all()


def several(rank, jobs, records, addresses, started):
    """What `group.train` starts in a process, of one job after the other."""
    for each, record, address in zip(jobs, records, addresses, strict=True):
        if rank < each.processes:
            group._local(rank, each, record, address, started)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """[(job, its steps)] of a server with one worker and with two: in the same processes, which take long to start."""
    folder = tmp_path_factory.mktemp("meet")
    jobs = [job("downpour", workers=1, every=3), job("downpour", epochs=40, every=2)]
    for each in jobs:
        each.model.share_memory()
        each.order = each.order.share_memory_()
    records = [workers.room(each.order) for each in jobs]
    addresses = [f"file://{folder}/{number}" for number in range(len(jobs))]
    started = multiprocessing.get_context("spawn").Value("d", 0.0)
    workers.spawn(several, jobs, records, addresses, started, count=3)
    return [(each, workers.table(record)) for each, record in zip(jobs, records, strict=True)]


def test_one_worker_and_a_server_end_where_a_plain_loop_ends(served):
    given, losses = served[0]
    assert_equal(given.model, loop(given.order[0].numpy()))
    assert (losses.behind == 0).all()


def test_two_workers_and_a_server_learn_and_see_how_far_they_are_behind(served):
    given, losses = served[1]
    assert ENTROPY(given.model(X), Y).item() < ENTROPY(network()(X), Y).item()
    exchanges = losses[losses.step % 2 == 1]
    assert losses.behind.sum() == exchanges.behind.sum() > 0


def test_an_unknown_method_and_running_statistics_at_a_server_are_refused():
    with pytest.raises(ValueError, match="method must be 'ddp' or 'downpour', got 'horovod'"):
        job("horovod")
    with pytest.raises(ValueError, match="carries no running statistics"):
        given = job("downpour")
        group.Job("downpour", nn.BatchNorm1d(4), given.dataset, given.order, ENTROPY, SGD)
