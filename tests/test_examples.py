"""Data of members, checked and filled up."""

import jax
import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.data.examples import one_a_member

rng = np.random.default_rng(0)
LENGTHS = (30, 12, 21)
X = [rng.normal(size=(length, 3)).astype(np.float32) for length in LENGTHS]
Y = [(x[:, 0] > 0).astype(np.int32) for x in X]


def made(members=3):
    return tn.TurbaTrainState.swarm(tn.MLP((6, 2)), optax.adam(0.05), members, sample_input=X[0][:1])


def train(x, y, **more):
    how = {"epochs": 3, "batch_size": 10, "progress": False, "plan": tn.Plan(1, 3), **more}
    return tn.fit(made(), x, y, tn.softmax_cross_entropy, **how)


def test_lists_of_members_own_rows_are_rows_of_one_table():
    ours, history = train(X, Y, per_member=True, validation=(X, Y))
    ends = np.cumsum((0, *LENGTHS))
    rows = tn.ragged([np.arange(*ends[member : member + 2]) for member in range(3)])
    pairs, _ = train(X, Y, per_member=(True, True), validation=(X, Y))
    np.testing.assert_array_equal(*(jax.tree.leaves(one.params)[0] for one in (ours, pairs)))
    table = np.concatenate(X), np.concatenate(Y)
    theirs, other = train(*table, rows=rows, validation=table, validation_rows=rows)
    np.testing.assert_array_equal(history.train_loss, other.train_loss)
    np.testing.assert_allclose(history.validation_loss, other.validation_loss, rtol=1e-6)
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, two)


def test_trees_and_equal_lengths():
    x, y, rows = one_a_member([{"a": part[:5]} for part in X], [part[:5] for part in Y], None, members=3)
    assert x["a"].shape == (3, 5, 3) and y.shape == (3, 5) and rows is None


@pytest.mark.parametrize(
    ("x", "y", "more", "message"),
    [
        (X, Y[:2], {}, "an entry for each of 3 members, got 3 and 2"),
        (X[:2], Y[:2], {}, "an entry for each of 3 members, got 2 and 2"),
        (X, np.stack([Y[0]] * 3), {}, "must lead with 3 members; x is a list .* with per_member=True lists x and y"),
        (X, Y, {"validation": (X[0], Y[0])}, "validation x has shape .*members, as np.broadcast_to"),
        (X, Y, {"validation": (X[:2], Y[:2])}, "validation x and y as lists have an entry for each of 3 members"),
        (dict(enumerate(X)), Y, {}, "it must lead with 3 members; a list, not a dict, has the rows of each"),
        (X, [Y[0], Y[1][:5], Y[2]], {}, "same number of rows, at least one; member 1 has"),
        (X, Y, {"rows": np.zeros((3, 1), int)}, "as lists of each member's own rows, and rows too"),
        ([X[0], X[1][:, :2], X[2]], Y, {}, "of one shape and type but for their rows"),
        ([X[0], X[1], X[2][:0]], [Y[0], Y[1], Y[2][:0]], {}, "at least one; member 2 has"),
    ],
)
def test_lists_that_do_not_fit_are_refused(x, y, more, message):
    with pytest.raises(ValueError, match=message):
        train(x, y, per_member=True, **more)
