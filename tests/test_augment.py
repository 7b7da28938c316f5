"""Random changes of training images: what they do to pixels, whom they touch, what they depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import turbanet as tn
from turbanet.data import augment

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(40, 6, 5, 2)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40)


MODEL = nn.Sequential([lambda x: x.reshape(*x.shape[:-3], -1), tn.MLP((4, 3))])
ADAM = optax.adam(0.01)


def swarm(members=3, **how):
    return tn.TurbaTrainState.swarm(MODEL, ADAM, members, sample_input=X[:1], seed=0, **how)


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "x64"])
def test_a_crop_is_a_window_of_the_padded_image(wide):
    change = tn.RandomCrop(2)
    starts = np.asarray(change.draw(KEY, len(X)))
    padded = np.pad(X, [(0, 0), (2, 2), (2, 2), (0, 0)])
    expected = [image[i : i + 6, j : j + 5] for image, (i, j) in zip(padded, starts, strict=True)]
    with jax.enable_x64(wide):
        np.testing.assert_array_equal(change.apply(starts, X), expected)
    assert set(starts.ravel()) == set(range(5))


def test_a_flip_mirrors_left_and_right_of_about_half():
    change = tn.RandomFlip()
    which = np.asarray(change.draw(KEY, len(X)))
    expected = [image[:, ::-1] if flip else image for image, flip in zip(X, which, strict=True)]
    np.testing.assert_array_equal(change.apply(which, X), expected)
    assert 0.3 < which.mean() < 0.7


def test_a_chain_applies_each_in_turn_by_draws_of_its_own():
    crop, flip = tn.RandomCrop(1), tn.RandomFlip()
    chain = tn.Chain(crop, flip)
    first, second = chain.draw(KEY, len(X))
    np.testing.assert_array_equal(chain.apply((first, second), X), flip.apply(second, crop.apply(first, X)))
    both = tn.Chain(flip, flip).draw(KEY, 64)
    assert not np.array_equal(*both)


def test_equal_changes_are_equal_values():
    loss = tn.softmax_cross_entropy
    one, other = (tn.augmented(loss, tn.Chain(tn.RandomCrop(2), tn.RandomFlip())) for _ in range(2))
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)
    assert one != tn.augmented(loss, tn.Chain(tn.RandomCrop(3), tn.RandomFlip()))
    assert "softmax_cross_entropy" in repr(one) and "0x" not in repr(one)


class Remembering:
    """Ten times the image: what was changed shows in the loss."""

    def draw(self, key, rows):
        return jnp.zeros(rows)

    def apply(self, drawn, x):
        return 10 * x


def mean_input(params, x, y, apply_fn):
    return jnp.mean(x) + 0 * apply_fn({"params": params}, x).sum(), y


def test_training_rows_are_changed_and_held_out_rows_are_not():
    loss = tn.augmented(mean_input, Remembering())
    _, history = tn.fit(swarm(), X, Y, loss, epochs=2, validation=(X, Y), progress=False)
    np.testing.assert_allclose(history.train_loss, 10 * X.mean(), rtol=1e-4)
    np.testing.assert_allclose(history.validation_loss, X.mean(), rtol=1e-4)
    np.testing.assert_allclose(tn.evaluate(swarm(), X, Y, loss), X.mean(), rtol=1e-4)


def test_an_augmented_loss_within_another_is_told_where_it_belongs():
    inner = tn.augmented(mean_input, Remembering())

    def loss(params, x, y, apply_fn):
        return inner(params, x, y, lambda *inputs: apply_fn(*inputs))

    with pytest.raises(ValueError, match="takes the apply_fn that fit gives, .* this does not: augment your own"):
        tn.fit(swarm(), X, Y, loss, epochs=1, progress=False)


def test_an_augmented_loss_has_the_weights_of_its_own():
    inside = tn.weighted(tn.mse)
    y = np.zeros((3, 1)), np.ones(3)
    assert tn.augmented(inside, tn.RandomFlip()).weight_of(y) is y[1]
    assert not hasattr(tn.augmented(tn.mse, tn.RandomFlip()), "weight_of")


def test_draws_are_the_members_own_and_change_at_each_step():
    change, nets = tn.RandomCrop(4), swarm(3)
    drawn = [np.asarray(augment.draw(change, nets.get_state(i), 8)) for i in range(3)]
    assert not np.array_equal(drawn[0], drawn[1])
    later = nets.get_state(0).replace(step=jnp.int32(1))
    assert not np.array_equal(drawn[0], augment.draw(change, later, 8))
    np.testing.assert_array_equal(drawn[2], augment.draw(change, nets[[2]].get_state(0), 8))


def test_a_member_alone_ends_where_it_ends_in_a_swarm():
    loss = tn.augmented(tn.softmax_cross_entropy, tn.Chain(tn.RandomCrop(1), tn.RandomFlip()))
    job = {"epochs": 3, "batch_size": 8, "progress": False, "plan": tn.Plan(1, 1)}
    together = tn.fit(swarm(3), X, Y, loss, **job)[1].train_loss
    alone = tn.fit(swarm(3)[[1]], X, Y, loss, **job)[1].train_loss
    np.testing.assert_array_equal(together[:, 1], alone[:, 0])


@tn.mean_over_rows
def seen(params, x, y, apply_fn):
    """A loss whose prediction is the images as they were trained on."""
    return 0 * apply_fn({"params": params}, x), x


def trained_on(loss, nets, images, weights=True):
    """What each member's next step sees of `images`: [member, row, height, width, channel]."""
    y = np.zeros(images.shape[0], np.int32)
    y = (y, np.ones(len(y), np.float32)) if weights else y
    x, y = jax.tree.map(lambda a: np.stack([a] * len(nets)), (images, y))
    return np.asarray(nets.train(x, y, loss)[2])


WEIGHTED = tn.weighted(tn.augmented(seen, tn.Chain(tn.RandomCrop(4), tn.RandomFlip())))


def test_a_change_of_ones_own_is_told_the_rows_of_several_inputs():
    class OfImages(Remembering):
        def apply(self, drawn, x):
            assert drawn.shape == (len(X),)
            return x | {"image": 10 * x["image"]}

    class Of(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x["image"].reshape(len(x["image"]), -1))

    x, y = {"image": X, "other": X}, np.zeros((len(X), 1), np.float32)
    nets = tn.TurbaTrainState.swarm(Of(), ADAM, 2, sample_input=jax.tree.map(lambda leaf: leaf[:1], x))
    how = {"epochs": 1, "progress": False}
    changed = tn.fit(nets, x, y, tn.augmented(tn.mse, OfImages()), **how)[1].train_loss
    np.testing.assert_allclose(changed, 100 * tn.fit(nets, x, y, tn.mse, **how)[1].train_loss, rtol=1e-4)
    with pytest.raises(ValueError, match="Images are one array, got a dict"):
        tn.fit(nets, x, y, tn.augmented(tn.mse, tn.RandomFlip()), **how)


def test_weighted_examples_are_changed_each_by_itself():
    same = np.stack([X[0]] * len(X))
    for crops in trained_on(WEIGHTED, swarm(2), same):
        assert len(np.unique(crops, axis=0)) > 8


def test_weighted_examples_are_changed_again_at_each_step_and_alike_when_repeated():
    nets = swarm(2)
    first, again = trained_on(WEIGHTED, nets, X), trained_on(WEIGHTED, nets, X)
    later = trained_on(WEIGHTED, nets.replace(step=nets.step + 1), X)
    alone = trained_on(WEIGHTED, nets[[1]], X)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[1], alone[0])
    assert (first != later).any(axis=(2, 3, 4)).mean() > 0.9
    assert (first[0] != first[1]).any(axis=(1, 2, 3)).mean() > 0.9


def test_a_weight_changes_no_draw_whichever_is_inside():
    change, nets = tn.Chain(tn.RandomCrop(4), tn.RandomFlip()), swarm(2)
    plain = trained_on(tn.augmented(seen, change), nets, X, weights=False)
    np.testing.assert_array_equal(trained_on(tn.weighted(tn.augmented(seen, change)), nets, X), plain)
    np.testing.assert_array_equal(trained_on(tn.augmented(tn.weighted(seen), change), nets, X), plain)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: tn.RandomCrop(0), "padding"),
        (lambda: tn.RandomFlip(2), "probability"),
        (
            lambda: tn.RandomFlip().apply(np.ones(5, bool), np.ones((5, 8, 8))),
            r"got shape \(5, 8, 8",
        ),
        (lambda: tn.RandomCrop().apply(np.ones((5, 2), int), np.ones((5, 8, 8))), "give x these axes"),
    ],
)
def test_bad_numbers_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: tn.augmented(tn.RandomCrop(4), tn.mse), r"takes the loss first, .*; got RandomCrop\(padding=4\)"),
        (lambda: tn.augmented(None, tn.RandomCrop(4)), "takes the loss first, .*; got None"),
        (
            lambda: tn.augmented(tn.mse, lambda x: x),
            r"an object with draw\(key, rows\) and apply\(drawn, x\); got <func",
        ),
        (lambda: tn.augmented(tn.mse, tn.RandomCrop), "An augmentation is .*; got <class"),
        (lambda: tn.Chain([tn.RandomCrop(4)]), r"a Chain of several, .*; got \[RandomCrop"),
    ],
)
def test_what_is_no_loss_or_no_augmentation_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_nested_augmentations_are_a_chain_with_draws_of_their_own():
    """By one key two flips would undo one another in every row."""
    flips = tn.augmented(tn.augmented(tn.mse, tn.RandomFlip()), tn.RandomCrop(1))
    assert flips == tn.augmented(tn.mse, tn.Chain(tn.RandomCrop(1), tn.RandomFlip()))
    drawn = tn.augmented(tn.augmented(tn.mse, tn.RandomFlip()), tn.RandomFlip()).augment.draw(jax.random.key(0), 64)
    assert 0 < (drawn[0] != drawn[1]).sum() < 64


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan"), "a", [0.1, 0.2]])
def test_the_probability_of_a_flip_is_one_number(probability):
    with pytest.raises(ValueError, match="probability must be one number in 0..1, got"):
        tn.RandomFlip(probability)
