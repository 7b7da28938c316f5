"""What a result shows of itself: a title and a small table, as text and as HTML."""

import dataclasses

import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.core.tables import Shown, spread

NAN = np.nan


def history(train=((4.0, 3.0, 2.0), (1.0, 0.5, 0.25)), epochs=(2, 2, 2), **recorded):
    ids = np.arange(len(epochs))
    losses = {"train_loss": np.array(train), "validation_loss": None} | recorded
    names = {"seed": np.zeros_like(ids), "member": ids, "epochs": np.array(epochs, int)}
    return tn.History(**losses, **names, compile_seconds=1.25, steady_seconds=0.5, plan=None)


def test_a_history_is_its_members_epochs_seconds_and_losses():
    assert repr(history()).splitlines() == [
        "History: 3 members, 2 epochs, 0.5 s of training, 1.25 s of compilation",
        "median (range) of the members  first epoch  last epoch",
        "train_loss                     3 (2 to 4)   0.5 (0.25 to 1)",
    ]


def test_a_member_that_stopped_counts_by_its_last_epoch():
    stopped = history(train=((4.0, 3.0), (1.0, NAN)), epochs=(2, 1), validation_metric={"f1": np.ones((2, 2))})
    lines = repr(stopped).splitlines()
    assert ", 1 to 2 epochs," in lines[0]
    assert lines[2].split() == ["train_loss", "3.5", "(3", "to", "4)", "2", "(1", "to", "3)"]
    assert lines[3].split() == ["f1", "1", "1"]


@pytest.mark.parametrize("empty", [history(np.zeros((0, 2)), (0, 0)), history(np.zeros((0, 0)), ())])
def test_a_history_of_nothing_is_a_title(empty):
    assert repr(empty).splitlines()[0].startswith(f"History: {len(empty.member)} members, 0 epochs")


def test_html_is_the_same_table_and_escaped():
    @dataclasses.dataclass(repr=False)
    class Pair(Shown):
        def _shown(self):
            return "a < b", [["x"], ["<b>"]]

    assert Pair()._repr_html_() == (
        "<p>a &lt; b</p><table><thead><tr><th>x</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>"
    )


def test_a_cross_validation_has_a_line_for_each_model_and_schedule():
    x, y = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.tile([0, 1], 6)
    how = {"optimizer": optax.sgd(0.1), "loss": tn.softmax_cross_entropy, "epochs": 2, "progress": False}
    found = tn.cross_validate({"wide": tn.MLP((4, 2)), "narrow": tn.MLP((2,))}, x, y, folds=3, seeds=2, **how)
    title, columns, *lines = repr(found).splitlines()
    assert title == "CrossValidation: 2 models, 3 folds, 2 seeds" and columns.startswith("model")
    assert [line.split()[:2] for line in lines] == [["wide", "constant"], ["narrow", "constant"]]
    final = found.final().query("model == 'wide'").validation_loss
    assert f"{final.median():.3g} ({final.min():.3g} to {final.max():.3g})" in lines[0]


def test_what_is_nan_does_not_count():
    assert spread(np.array([NAN, 1.0, 3.0])) == "2 (1 to 3)" and spread(np.array([NAN])) == "nan"


def test_an_evolution_is_its_members_generations_seconds_and_first_and_last_fitness():
    fitness, parents = np.array([[1.0, NAN, 3.0], [4.0, 5.0, 9.0]]), np.full((2, 3, 2), -1)
    rates = {"learning_rate": np.array([[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]])}
    ids = np.tile(np.arange(3), (2, 1))
    assert repr(tn.evolution.EvolutionHistory(fitness, ids, parents, rates, np.array([1.0, 0.5]))).splitlines() == [
        "EvolutionHistory: 3 members, 2 generations, 1.5 s",
        "median (range) of the members  first generation  last generation",
        "fitness                        2 (1 to 3)        5 (4 to 9)",
        "learning_rate                  0.2 (0.1 to 0.3)  0.1",
    ]


def test_a_history_of_rounds_shows_the_first_and_the_last():
    losses, scored = np.array([[1.0, 2.0], [0.5, 1.5]], np.float32), np.arange(2)
    sent = np.zeros(2, int)
    history = tn.federated.FederatedHistory(
        losses, sent[None], sent[None] == 0, scored, np.array([3.0, 2.0]), np.array([0.25, 0.75]), sent, sent, 1.5, 2.0
    )
    assert repr(history).splitlines() == [
        "FederatedHistory: 2 rounds of 2 clients, 1.5 s to begin, 2 s of rounds",
        "                                           first         last",
        "train_loss, median (range) of the clients  1.5 (1 to 2)  1 (0.5 to 1.5)",
        "validation_loss                            3             2",
        "validation_metric                          0.25          0.75",
    ]


def test_a_history_of_workers_and_one_of_agents_show_the_first_and_the_last():
    losses = np.array([[1.0, 3.0], [0.5, 0.5]])
    assert repr(tn.federated.LocalHistory(losses, np.array([0.0, 4.0]), 2.0)).splitlines() == [
        "LocalHistory: 2 workers, 2 steps, 2 s to begin, 4 s of steps",
        "median (range) of the workers  first step  last step",
        "loss                           2 (1 to 3)  0.5",
    ]
    returns = np.array([[NAN, NAN], [10.0, 30.0]])
    ids = np.arange(2)
    agents = tn.rl.AgentHistory(
        *[losses] * 5, returns, losses, 8, None, ids, ids, ids, compile_seconds=2.0, steady_seconds=1.0, plan=None
    )
    assert repr(agents).splitlines() == [
        "AgentHistory: 2 members, 2 updates, 2 s of compilation, 1 s of training",
        "median (range) of the members  first update  last update",
        "train_return                   nan           20 (10 to 30)",
        "train_loss                     2 (1 to 3)    0.5",
        "entropy                        2 (1 to 3)    0.5",
    ]
