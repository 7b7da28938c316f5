"""Grids, draws and halving."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import loguniform

import turbanet as tn
from turbanet.core.plan import say_once


def test_a_grid_is_every_combination():
    arrays, table = tn.grid(learning_rate=[0.1, 0.01], weight_decay=[0.0, 0.1, 0.2])
    assert len(table) == 6 and list(arrays) == ["learning_rate", "weight_decay"]
    assert set(zip(*(a.tolist() for a in arrays.values()), strict=True)) == {
        (r, d) for r in (0.1, 0.01) for d in (0.0, 0.1, 0.2)
    }
    assert table.learning_rate[4] == arrays["learning_rate"][4] and table.index.name == "member"


def test_none_and_whole_numbers_stay_what_they_are():
    arrays, table = tn.grid(patience=[None, 5], name=["a", None])
    assert arrays["patience"].tolist() == table["patience"].tolist() == [None, None, 5, 5]
    assert arrays["name"].tolist() == ["a", None, "a", None]
    assert set(tn.draw(20, patience=[None, 5])[0]["patience"].tolist()) == {None, 5}


def test_a_random_search_draws_and_repeats():
    ranges = {"learning_rate": loguniform(1e-4, 1e-1), "weight_decay": [0.0, 0.1]}
    with pytest.raises(ValueError, match="seed must be one int from 0 to"):
        tn.draw(50, seed=jax.random.key(3), **ranges)
    arrays, table = tn.draw(50, seed=3, **ranges)
    assert ((arrays["learning_rate"] > 1e-4) & (arrays["learning_rate"] < 1e-1)).all() and len(table) == 50
    np.testing.assert_array_equal(arrays["learning_rate"], tn.draw(50, seed=3, **ranges)[0]["learning_rate"])
    assert set(arrays["weight_decay"]) == {0.0, 0.1}


def swarm(size=8):
    return tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), size, sample_input=np.zeros((1, 3)))


def test_halving_keeps_a_share_that_floats_do_not_have():
    lengths = []

    def train(swarm, rung):
        lengths.append(len(swarm))
        return swarm, np.arange(len(swarm))

    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.sgd(0.1), 100, input_size=2)
    tn.halving(swarm, train, rungs=2, keep=0.07)  # 0.07 * 100 is above 7
    assert lengths == [100, 7]


def test_halving_keeps_the_best():
    score = {0: 5.0, 1: 1.0, 2: 4.0, 3: np.nan, 4: 2.0, 5: 8.0, 6: 3.0, 7: 7.0}
    seen = []

    def train(members, rung):
        seen.append(members.id.tolist())
        return members, [score[i] for i in members.id.tolist()]

    best, table = tn.halving(swarm(), train, rungs=4)
    assert seen == [list(range(8)), [1, 2, 4, 6], [1, 4], [1]] and best.id.tolist() == [1]
    assert table.groupby("rung").member.count().tolist() == [8, 4, 2, 1]
    assert table[table.rung == 1].score.tolist() == [1, 4, 2, 3]


def test_halving_trains_the_kept_on_as_if_alone():
    x, y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2

    def train(members, rung):
        members, history = tn.fit(members, x, y, tn.softmax_cross_entropy, epochs=2, batch_size=5, progress=False)
        return members, history.train_loss[-1]

    best, _ = tn.halving(swarm(), train, rungs=3)
    whole, _ = tn.fit(swarm(), x, y, tn.softmax_cross_entropy, epochs=6, batch_size=5, progress=False)
    for id, network in zip(best.id.tolist(), best, strict=True):
        expected = whole[id].params["Dense_0"]["kernel"][0]
        np.testing.assert_allclose(network.params["Dense_0"]["kernel"], expected, rtol=1e-4)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"rungs": 0}, "rungs must be a whole number of at least 1, got 0"),
        ({"rungs": 2, "keep": 1}, "keep is the share that goes on"),
        ({"rungs": 2, "train": lambda members, rung: (members, [1.0])}, "one score for each of 8 members"),
        ({"rungs": 2, "train": lambda members, rung: -members.id}, r"train returns \(swarm, score \[member\]\), got"),
        ({"rungs": 2, "train": lambda members, rung: (members, ["a"] * 8)}, "score"),
    ],
)
def test_bad_input_is_named(how, message):
    train = how.pop("train", lambda members, rung: (members, members.id))
    with pytest.raises(ValueError, match=message):
        tn.halving(swarm(), train, **how)


def test_halving_of_members_that_share_their_numbers():
    pairs = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 4, sample_input=np.zeros((1, 3)), seed=[0, 0, 1, 1])
    best, _ = tn.halving(pairs, lambda members, rung: (members, -np.arange(len(members))), rungs=2)
    assert best.seed.tolist() == [1, 1]


def test_a_short_list_is_drawn_from_with_repetition():
    arrays, table = tn.draw(10, learning_rate=[0.1, 0.01])
    assert len(table) == len(arrays["learning_rate"]) == 10


@pytest.mark.parametrize("pair", [(1e-4, 1e-1), (1, 8)])
def test_a_pair_is_no_range(pair):
    with pytest.raises(
        ValueError, match=r"may be a range or two values: .*loguniform\((0.0001, 0.1|1, 8)\).* the list"
    ):
        tn.draw(60, learning_rate=pair)


def test_values_may_be_an_array_of_jax():
    values, table = tn.grid(learning_rate=jnp.array([0.5, 0.25]))
    assert values["learning_rate"].tolist() == table.learning_rate.tolist() == [0.5, 0.25]
    assert tn.draw(9, learning_rate=jnp.array([0.5, 0.25]))[0]["learning_rate"].dtype.kind == "f"


@pytest.mark.parametrize("values", ["adam", [], 0.1, {0.1, 0.2}, {"a": 0.1}, loguniform(1e-4, 1e-1)])
def test_what_holds_no_values_in_order_is_refused(values):
    with pytest.raises(ValueError, match="learning_rate must be a list of at least one value, got "):
        tn.grid(learning_rate=values)
    if not hasattr(values, "rvs"):
        with pytest.raises(ValueError, match="learning_rate must be a list of at least one value, got "):
            tn.draw(3, learning_rate=values)


def test_halving_leaves_out_who_has_no_finite_score(caplog):
    say_once.cache_clear()
    score = np.array([np.nan, 3.0, np.inf, np.nan, np.nan, -np.inf, 1.0, np.nan])
    best, table = tn.halving(swarm(), lambda members, rung: (members, score[np.asarray(members.id)]), rungs=2)
    assert best.id.tolist() == [1, 6] and len(table) == 10
    assert "6 of 8 members, such as 0, have a NaN or infinite score and do not go on; with patience" in caplog.text
    with pytest.raises(ValueError, match="All 8 members of rung 0 have a NaN or infinite score, so none can continue"):
        tn.halving(swarm(), lambda members, rung: (members, np.full(8, np.nan)), rungs=1)
