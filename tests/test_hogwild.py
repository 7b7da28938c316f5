"""study.data_parallel.hogwild: processes that share one network's weights without locks."""

from functools import partial

import numpy as np
import pytest
import torch
from tiers import first
from torch import nn

from study.data_parallel import hogwild
from turbanet.data.sampling import deal

RANDOM = np.random.default_rng(0)
X = torch.tensor(RANDOM.normal(size=(60, 4)), dtype=torch.float32)
Y = torch.tensor(RANDOM.integers(0, 3, 60))
ROWS = torch.utils.data.TensorDataset(X, Y)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
ENTROPY = nn.CrossEntropyLoss()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def order(workers, epochs, batch_size):
    dealt = deal(rows=60, workers=workers, epochs=epochs, batch_size=batch_size, seed=1)
    return torch.from_numpy(dealt).long()


def alone(optimizer, batches):
    """What one process should end with: PyTorch's own loop over the same rows."""
    model = network()
    optimizer = optimizer(model.parameters())
    for rows in batches:
        optimizer.zero_grad()
        ENTROPY(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("optimizer", "shared"), first(1, [(ADAM, True), (SGD, False)]), ids=["shared state", "own"])
def test_one_process_ends_where_a_plain_loop_ends(optimizer, shared):
    model, batches = network(), order(1, 2, 7)
    how = {"criterion": ENTROPY, "optimizer": optimizer, "shared_state": shared}
    losses, startup = hogwild.train(model, ROWS, batches, **how)
    expected = alone(optimizer, batches.flatten(end_dim=2))
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(weights, expected[name])
    assert len(losses) == 2 * 9 and (losses.behind == 0).all() and startup > 0


def test_two_processes_train_one_network_on_rows_of_their_own():
    model = network()
    before = ENTROPY(model(X), Y).item()
    losses, _ = hogwild.train(model, ROWS, order(2, 30, 5), criterion=ENTROPY, optimizer=SGD)
    assert ENTROPY(model(X), Y).item() < before
    assert losses.groupby("worker").size().tolist() == [180, 180]
    assert np.isfinite(losses.loss).all() and (losses.behind >= 0).all()


def test_shared_state_is_one_for_all_processes():
    model = network()
    model.share_memory()
    optimizer = hogwild._with_shared_state(partial(torch.optim.Adam, lr=0.1), model)
    states = list(optimizer.state.values())
    assert len(states) == 4 and all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in states)
    assert all(value.is_shared() and not value.any() for state in states for value in state.values())
    for name, weights in network().state_dict().items():  # finding out what the state is changed nothing
        assert torch.equal(model.state_dict()[name], weights)
