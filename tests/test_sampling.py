"""Which rows each member sees."""

from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.model_selection import KFold

from turbanet import all_rows, bootstrap, dirichlet, k_fold, ragged, shards, subset
from turbanet.data.sampling import check_rows, deal, epoch_order
from turbanet.ensembles import accuracy_by_size

KEY = jax.random.key(0)


def test_all_rows_counts_up_for_every_member():
    assert np.asarray(all_rows(members=2, rows=3)).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_subset_has_no_repetition_and_differs_by_member():
    rows = np.asarray(subset(KEY, members=5, rows=100, portion=0.3))
    assert rows.shape == (5, 30) and all(len(set(row)) == 30 for row in rows)
    assert len({tuple(row) for row in rows}) == 5


@pytest.mark.parametrize("portion", [0, 1.5, 0.001])
def test_subset_refuses_a_portion_that_leaves_nothing(portion):
    with pytest.raises(ValueError, match="portion"):
        subset(KEY, members=2, rows=10, portion=portion)


def test_bootstrap_leaves_out_about_a_third():
    rows = np.asarray(bootstrap(KEY, members=20, rows=2000))
    distinct = np.mean([len(set(row)) / 2000 for row in rows])
    np.testing.assert_allclose(distinct, 1 - np.exp(-1), atol=0.01)


def test_k_fold_partitions_with_the_sizes_of_scikit_learn():
    train, held_out = map(np.asarray, k_fold(KEY, folds=3, rows=11))
    sizes = [len(test) for _, test in KFold(3).split(np.zeros(11))]
    assert (held_out >= 0).sum(1).tolist() == sizes
    for fold in range(3):
        both = np.concatenate([train[fold], held_out[fold]])
        assert sorted(both[both >= 0]) == list(range(11))


@pytest.mark.parametrize("folds", [1, 12])
def test_k_fold_refuses_folds_that_cannot_be(folds):
    with pytest.raises(ValueError, match="folds must be from 2 to the 11 rows"):
        k_fold(KEY, folds=folds, rows=11)


def test_ragged_takes_the_splits_of_scikit_learn():
    rows = np.asarray(ragged(train for train, _ in KFold(2).split(np.zeros(5))))
    assert rows.tolist() == [[3, 4, -1], [0, 1, 2]]


def test_ragged_refuses_a_member_without_rows():
    with pytest.raises(ValueError, match="at least one row"):
        ragged([[1], []])


@pytest.mark.parametrize(
    "rows",
    [[[0, 5]], [[0, -2]], [[-1, 0]], [[-1, -1]]],
    ids=["too large", "too small", "padded in front", "empty"],
)
def test_check_rows_refuses_rows_out_of_range(rows):
    with pytest.raises(ValueError, match=r"rows must lie in 0\.\.4"):
        check_rows(np.array(rows), members=1, length=5)


def test_check_rows_refuses_another_number_of_members():
    with pytest.raises(ValueError, match="rows has 2 members, the swarm has 3"):
        check_rows(np.zeros((2, 4), int), members=3, length=5)


def test_rows_may_be_tensors_or_lists():
    torch = pytest.importorskip("torch")
    rows = [[0, 4, 2], [1, -1, -1]]
    for dress in (rows, torch.tensor(rows)):
        checked, counts = check_rows(dress, members=2, length=5)
        assert checked.tolist() == rows and counts.tolist() == [3, 1]
    assert np.asarray(ragged([torch.tensor([0, 4, 2]), [1]])).tolist() == rows


def test_rows_of_text_are_refused_by_name():
    with pytest.raises(ValueError, match="^rows must be an array of numbers, got"):
        check_rows([["a"]], members=1, length=5)


def test_check_rows_refuses_floats():
    with pytest.raises(ValueError, match="integers"):
        check_rows(np.zeros((3, 4)), members=3, length=5)


def test_epoch_order_sees_every_row_once_then_wraps():
    order = np.asarray(epoch_order(KEY, 10, length=10, batch_size=4))
    assert order.shape == (3, 4) and sorted(order.ravel()[:10]) == list(range(10))
    assert order.ravel()[10:].tolist() == order.ravel()[:2].tolist()


def test_epoch_order_of_a_short_member_sees_its_own_rows_again():
    order = np.asarray(epoch_order(KEY, 4, length=10, batch_size=5)).ravel()
    assert sorted(order[:4]) == [0, 1, 2, 3] and order[4:8].tolist() == order[:4].tolist()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_epoch_order_visits_rows_equally_often_whatever_the_sizes(data):
    length, batch_size = data.draw(st.sampled_from([(1, 1), (7, 1), (7, 3), (7, 7), (12, 5), (12, 8)]))  # compiled each
    count = data.draw(st.integers(1, length))
    order = np.asarray(epoch_order(KEY, count, length=length, batch_size=batch_size))
    visits = np.bincount(order.ravel(), minlength=count)
    assert order.shape == (-(-length // batch_size), batch_size)
    assert len(visits) == count and visits.max() - visits.min() <= 1


def test_epoch_order_differs_by_key():
    orders = [np.asarray(epoch_order(jax.random.key(i), 50, length=50, batch_size=5)).tolist() for i in range(2)]
    assert orders[0] != orders[1]


def test_epoch_order_is_uniform():
    keys = jax.random.split(KEY, 4000)
    first = np.asarray(jax.vmap(lambda k: epoch_order(k, 5, length=8, batch_size=8)[0, 0])(keys))
    np.testing.assert_allclose(np.bincount(first, minlength=5) / 4000, 0.2, atol=0.03)


@pytest.mark.parametrize(("rows", "workers", "batch_size"), [(10, 2, 3), (11, 2, 3), (12, 3, 4), (5, 5, 2), (7, 1, 7)])
def test_dealt_rows_are_each_workers_own_and_all_of_them(rows, workers, batch_size):
    order = deal(rows=rows, workers=workers, epochs=3, batch_size=batch_size, seed=1)
    most = -(-rows // workers)
    assert order.shape == (workers, 3, -(-most // batch_size), min(batch_size, most))
    for epoch in range(3):
        shares = [set(order[worker, epoch].ravel()) for worker in range(workers)]
        assert sorted(row for share in shares for row in share) == list(range(rows))
        for worker, share in enumerate(shares):  # each of them once before any of them again
            assert set(order[worker, epoch].ravel()[: len(share)]) == share


def test_rows_are_dealt_anew_in_each_epoch_and_alike_for_a_seed():
    how = {"rows": 40, "workers": 2, "epochs": 2, "batch_size": 5}
    order = deal(**how, seed=3)
    assert set(order[0, 0].ravel()) != set(order[0, 1].ravel())
    assert np.array_equal(order, deal(**how, seed=3)) and not np.array_equal(order, deal(**how, seed=4))


@pytest.mark.parametrize("wrong", [{"workers": 11}, {"workers": 0}, {"epochs": 0}, {"batch_size": 0}, {"rows": 2.5}])
def test_deal_refuses_what_leaves_a_worker_without_rows(wrong):
    with pytest.raises(ValueError, match="whole number|11 workers, 10 rows"):
        deal(**{"rows": 10, "workers": 2, "epochs": 1, "batch_size": 2} | wrong)


def classes(rows, labels):
    """How many rows of each class each client has, [client, class]."""
    rows = np.asarray(rows)
    return np.stack([np.bincount(labels[own[own >= 0]], minlength=labels.max() + 1) for own in rows])


def test_shards_are_equal_runs_of_rows_sorted_by_class():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    rows = np.asarray(shards(jax.random.key(0), labels=labels, clients=10, per_client=2))
    assert rows.shape == (10, 60) and sorted(rows.ravel()) == list(range(600))
    held = classes(rows, labels)
    assert set(held.ravel().tolist()) <= {0, 30, 60}  # shards of 30 rows, and 60 of each class
    assert (held > 0).sum(1).max() == 2


def test_shards_are_dealt_anew_by_another_key():
    labels = np.repeat(np.arange(10), 60)
    one, two, again = (shards(jax.random.key(k), labels=labels, clients=10) for k in (0, 1, 0))
    assert (one != two).any() and (one == again).all()


@pytest.mark.parametrize("alpha", [0.05, 1.0, 1000.0])
def test_dirichlet_deals_every_row_to_one_client(alpha):
    labels = np.random.default_rng(1).integers(0, 5, 700)
    rows = np.asarray(dirichlet(jax.random.key(2), labels=labels, clients=12, alpha=alpha))
    assert sorted(rows[rows >= 0]) == list(range(700))
    assert (rows >= 0).any(1).all()


def test_dirichlet_shares_have_the_spread_of_their_alpha():
    labels = np.zeros(100_000, int)
    held = classes(dirichlet(jax.random.key(3), labels=labels, clients=200, alpha=2.0), labels)[:, 0] / 100_000
    total = 200 * 2.0  # of a Dirichlet's alphas: a share has the mean 1/200 and this variance
    expected = (1 / 200) * (1 - 1 / 200) / (total + 1)
    np.testing.assert_allclose(held.var(), expected, rtol=0.4)


def test_a_client_that_a_dirichlet_leaves_without_rows_gets_one():
    labels = np.zeros(20, int)
    rows = np.asarray(dirichlet(jax.random.key(4), labels=labels, clients=20, alpha=0.01))
    np.testing.assert_array_equal((rows >= 0).sum(1), 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(dirichlet, alpha=0), "alpha must be a number above 0, got 0"),
        (partial(dirichlet, alpha=np.nan), "alpha must be a number above 0, got nan"),
        (partial(shards, per_client=3), "8 clients of 3 shards each need 24 rows, got 20"),
        (partial(shards, per_client=0), "per_client must be a whole number"),
    ],
)
def test_dealing_that_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(jax.random.key(0), labels=np.zeros(20, int), clients=8)


def test_labels_of_several_axes_are_refused():
    with pytest.raises(ValueError, match=r"labels must be \[row\].*got \(20, 2\)"):
        shards(jax.random.key(0), labels=np.zeros((20, 2), int), clients=8)


LABELS = np.arange(20) % 4
LOGITS = np.random.default_rng(0).normal(size=(5, 20, 4))
SEEDED = {
    "subset": lambda **seed: subset(members=2, rows=9, portion=0.5, **seed),
    "bootstrap": lambda **seed: bootstrap(members=2, rows=9, **seed),
    "k_fold": lambda **seed: k_fold(folds=3, rows=9, **seed),
    "shards": lambda **seed: shards(labels=LABELS, clients=2, **seed),
    "dirichlet": lambda **seed: dirichlet(labels=LABELS, clients=2, alpha=1.0, **seed),
    "accuracy_by_size": lambda **seed: accuracy_by_size(LOGITS, LABELS, orders=3, **seed),
}


@pytest.mark.parametrize("draw", SEEDED.values(), ids=SEEDED)
def test_an_int_seeds_as_its_key_and_key_is_the_former_name(draw):
    expected = draw(seed=jax.random.key(3))
    for seed in ({"seed": 3}, {"seed": np.int64(3)}, {"key": jax.random.key(3)}, {"seed": jax.random.PRNGKey(3)}):
        jax.tree.map(np.testing.assert_array_equal, draw(**seed), expected)
    others = jax.tree.map(np.array_equal, draw(seed=4), expected)
    assert not all(jax.tree.leaves(others))


def test_a_seed_is_an_int_or_a_key():
    with pytest.raises(ValueError, match="seed must be one int from 0 to 2147483646, got 0.5"):
        bootstrap(0.5, members=2, rows=9)


@pytest.mark.parametrize("rows", [[[True, False, True], [False, True, True]], [[0.9, 2.7]]], ids=["masks", "fractions"])
def test_ragged_takes_row_numbers_alone(rows):
    with pytest.raises(ValueError, match=r"rows must be int \[row\] for each member, got (bool|float32)"):
        ragged([np.array(row) for row in rows])


def test_rows_are_no_labels_of_pandas():
    table = pd.DataFrame({"store": ["a", "b", "b", "a", "b"]}, index=[4, 3, 2, 1, 0])
    labels = table.groupby("store").groups.values()
    for call in (lambda: ragged(labels), lambda: check_rows([table.index, table.index], members=2, length=5)):
        with pytest.raises(ValueError, match="rows are positions, counted from 0, and got the labels of pandas"):
            call()
    assert ragged(table.groupby("store").indices.values()).tolist() == [[0, 3, -1], [1, 2, 4]]


def test_draws_of_rows_are_called_by_name():
    with pytest.raises(TypeError, match="bootstrap takes seed, members, rows, size, by name: too many"):
        bootstrap(0, 3, 9)


@pytest.mark.parametrize("draw", [partial(shards, per_client=1), partial(dirichlet, alpha=0.5)])
def test_labels_without_a_class_are_refused(draw):
    with pytest.raises(ValueError, match="labels holds NaN in row 2: leave such rows out"):
        draw(0, labels=np.array([0.0, 1.0, np.nan, 1.0]), clients=2)


def test_rows_of_each_member_have_one_axis():
    for rows, shape in (([1, 2], r"\(\)"), ([np.zeros((2, 2), int)] * 2, r"\(2, 2\)")):
        with pytest.raises(ValueError, match=rf"int \[row\] for each member, got shape {shape}"):
            ragged(rows)
