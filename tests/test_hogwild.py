"""study.data_parallel.hogwild: the trainer and the tester of the public study, with its faults mended."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix
from tiers import first
from torch import nn

from study.data_parallel import hogwild
from study.data_parallel.hogwild import DistributedTester, DistributedTrainer
from turbanet.data.sampling import deal

RANDOM = np.random.default_rng(0)
X = torch.tensor(RANDOM.normal(size=(60, 4)), dtype=torch.float32)
Y = torch.tensor(RANDOM.integers(0, 3, 60))
ROWS = torch.utils.data.TensorDataset(X, Y)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
ENTROPY = nn.CrossEntropyLoss()
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def alone(optimizer, scheduler, epochs):
    """What one process should end with: PyTorch's own loop over the same rows."""
    model = network()
    optimizer = optimizer(model.parameters())
    scheduler = scheduler(optimizer)
    for batches in deal(rows=60, workers=1, epochs=epochs, batch_size=7, seed=1)[0]:
        for rows in batches:
            optimizer.zero_grad()
            ENTROPY(model(X[rows]), Y[rows]).backward()
            optimizer.step()
        scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("optimizer", "given", "shared", "epochs"),
    first(1, [(ADAM, "objects", True, 2), (SGD, "functions", False, 1)]),
    ids=["an adam with shared state", "one epoch of sgd"],
)
def test_one_process_ends_where_a_plain_loop_ends(optimizer, given, shared, epochs, tmp_path):
    model = network()
    make = optimizer
    scheduler = HALVED
    if given == "objects":
        make = optimizer(model.parameters())
        scheduler = HALVED(make)
    folder = tmp_path / "new"
    train = DistributedTrainer(1, ENTROPY, folder, 7, shared_state=shared, seed=1)
    trained = train(model, ROWS, make, scheduler, epochs)
    expected = alone(optimizer, HALVED, epochs)
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(weights, expected[name])
    assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.pt", "losses.csv"]
    left = torch.load(folder / "checkpoint.pt")
    assert all(torch.equal(left[name], weights) for name, weights in model.state_dict().items())
    losses = pd.read_csv(folder / "losses.csv")
    pd.testing.assert_frame_equal(losses, trained.losses)
    assert len(losses) == epochs * 9 and (losses.behind == 0).all() and trained.startup_seconds > 0


def test_two_processes_train_one_network_on_rows_of_their_own(tmp_path):
    model = network()
    before = ENTROPY(model(X), Y).item()
    trained = DistributedTrainer(2, ENTROPY, tmp_path, 5)(model, ROWS, SGD, None, 30)
    assert ENTROPY(model(X), Y).item() < before
    assert trained.losses.groupby("worker").size().tolist() == [180, 180]
    assert np.isfinite(trained.losses.loss).all() and (trained.losses.behind >= 0).all()
    assert (tmp_path / "checkpoint.pt").is_file()


def test_shared_state_is_one_for_all_processes():
    model = network()
    model.share_memory()
    optimizer = hogwild._with_shared_state(partial(torch.optim.Adam, lr=0.1), model)
    states = list(optimizer.state.values())
    assert len(states) == 4 and all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in states)
    assert all(value.is_shared() and not value.any() for state in states for value in state.values())
    for name, weights in network().state_dict().items():  # finding out what the state is changed nothing
        assert torch.equal(model.state_dict()[name], weights)


def test_a_failing_run_leaves_no_file(tmp_path, monkeypatch):
    def failing(*job, count):
        raise RuntimeError("A worker failed.")

    (tmp_path / "checkpoint.pt").write_text("of last week")
    monkeypatch.setattr(hogwild.workers, "spawn", failing)
    with pytest.raises(RuntimeError, match="A worker failed"):
        DistributedTrainer(1, ENTROPY, tmp_path, 2)(network(), ROWS, SGD, None, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("processes", "batch_size", "epochs", "sentence"),
    [(61, 5, 1, "61 workers, 60 rows"), (0, 5, 1, "processes must be"), (2, 0, 1, "batch_size"), (2, 5, 0, "epochs")],
)
def test_numbers_that_do_not_fit_stop_before_a_process_starts(processes, batch_size, epochs, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        DistributedTrainer(processes, ENTROPY, tmp_path, batch_size)(network(), ROWS, SGD, None, epochs)


def test_scores_are_those_of_all_batches(tmp_path):
    model = network(3)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=25)  # the last batch has ten rows
    accuracy, classes, matrix = DistributedTester(loader, tmp_path)(model)
    chosen = model(X).argmax(-1).numpy()
    assert accuracy == accuracy_score(Y, chosen)
    np.testing.assert_array_equal(matrix, confusion_matrix(Y, chosen))
    expected = [np.mean(chosen[Y.numpy() == label] == label) for label in range(3)]
    np.testing.assert_allclose(classes.accuracy, expected)
    np.testing.assert_allclose(pd.read_csv(tmp_path / "scores.csv").accuracy, expected)
