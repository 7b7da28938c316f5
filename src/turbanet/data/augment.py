"""Random augmentation of training images, drawn anew for each member, step and row; held-out rows stay as they are."""

import dataclasses
import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.core.arrays import check_whole
from turbanet.core.member import AUGMENT, member_key


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """Crop each image to its own size at a random position, after padding it with zeros (Krizhevsky 2009).

    padding : zeros added on each side, pixels
    """

    padding: int = 4

    def __post_init__(self):
        check_whole(padding=self.padding)

    def draw(self, key: jax.Array, rows: int) -> jax.Array:
        """Draw the first corner of each of `rows` windows: int32 [row, 2] from 0 to 2 padding."""
        return jax.random.randint(key, (rows, 2), 0, 2 * self.padding + 1, jnp.int32)

    def apply(self, drawn: jax.Array, x: jax.Array) -> jax.Array:
        """Crop x [row, height, width, channel], each row by its own draw in `drawn`."""
        _check_images(x)
        padded = jnp.pad(x, [(0, 0), *[(self.padding, self.padding)] * 2, (0, 0)])
        starts = jnp.pad(drawn, [(0, 0), (0, 1)])  # of the channels, 0
        return jax.vmap(lambda image, start: jax.lax.dynamic_slice(image, start, x.shape[1:]))(padded, starts)


@dataclasses.dataclass(frozen=True)
class RandomFlip:
    """Mirror each image, left to right, with `probability`."""

    probability: float = 0.5

    def __post_init__(self):
        if not isinstance(self.probability, Real) or not 0 <= self.probability <= 1:
            raise ValueError(f"probability must be one number in 0..1, got {self.probability!r}.")

    def draw(self, key: jax.Array, rows: int) -> jax.Array:
        """Draw which of `rows` images are mirrored: bool [row]."""
        return jax.random.bernoulli(key, self.probability, (rows,))

    def apply(self, drawn: jax.Array, x: jax.Array) -> jax.Array:
        """Mirror x [row, height, width, channel], each row by its own draw in `drawn`."""
        _check_images(x)
        return jnp.where(drawn[:, None, None, None], x[:, :, ::-1], x)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Several augmentations, one after the other."""

    changes: tuple

    def __init__(self, *changes: Any):
        for change in changes:
            _check_change(change)
        object.__setattr__(self, "changes", changes)

    def draw(self, key: jax.Array, rows: int) -> tuple:
        """Draw for `rows` images from each augmentation."""
        keys = jax.random.split(key, len(self.changes))
        return tuple(change.draw(key, rows) for change, key in zip(self.changes, keys, strict=True))

    def apply(self, drawn: tuple, x: jax.Array) -> jax.Array:
        """Augment x [row, height, width, channel], each row by its own draws in `drawn`, one of each augmentation."""
        for change, draws in zip(self.changes, drawn, strict=True):
            x = change.apply(draws, x)
        return x


def _check_images(x):
    if not hasattr(x, "ndim"):
        advice = "give an augmentation of your own, which changes the images in x"
        raise ValueError(f"Images are one array, got a {type(x).__name__} of several inputs: {advice}.")
    if x.ndim != 4:
        raise ValueError(f"Images are [row, height, width, channel], got shape {x.shape}: give x these axes.")


def _check_change(change):
    """Raise ValueError for what has no methods draw and apply, such as a function or a class."""
    if isinstance(change, type) or not all(callable(getattr(change, name, None)) for name in ("draw", "apply")):
        valid = "RandomCrop(4), a Chain of several, or an object with draw(key, rows) and apply(drawn, x)"
        raise ValueError(f"An augmentation is {valid}; got {change!r:.60}.")


def draw(augment: Any, state: Any, rows: int) -> Any:
    """Draw from `augment` for the next batch of `rows` rows of the member `state`, by its seed, id and step alone."""
    key = jax.random.fold_in(member_key(state.seed, state.id, AUGMENT), state.step)
    return augment.draw(key, rows)


@dataclasses.dataclass(frozen=True, repr=False)
class Augmented:
    """A loss that augments x in training, and leaves it as it is in evaluation; see `augmented`."""

    loss_fn: Callable
    augment: Any

    @property
    def check(self):
        """The loss's check of its targets, if it has one (see `checks.expects`)."""
        return getattr(self.loss_fn, "check", None)

    @property
    def weight_of(self):
        """The loss's weights of its targets, of a `weighted` one; AttributeError without."""
        return self.loss_fn.weight_of

    @property
    def __signature__(self):
        """The signature of the loss, with mask= and weight= where it takes them."""
        return inspect.signature(self.loss_fn, follow_wrapped=False)

    def __call__(self, params: Any, x: Any, y: Any, apply_fn: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        if not hasattr(apply_fn, "train"):
            advice = "augment your own loss, augmented(loss, ...), and call the plain one inside"
            problem = (
                "An augmented loss takes the apply_fn that fit gives, which tells whether it trains; this does not"
            )
            raise ValueError(f"{problem}: {advice}.")
        if apply_fn.train:
            rows = len(jax.tree.leaves(x)[0])
            x = self.augment.apply(draw(self.augment, apply_fn.state, rows), x)
        return self.loss_fn(params, x, y, apply_fn, **kwargs)

    def __repr__(self):
        return f"augmented({getattr(self.loss_fn, '__qualname__', self.loss_fn)}, {self.augment})"


def augmented(loss_fn: Callable, augment: Any) -> Augmented:
    """Return `loss_fn` with its training images augmented: `fit(swarm, x, y, augmented(loss, RandomCrop(4)), ...)`.

    augment: `RandomCrop`, `RandomFlip`, a `Chain` of them, or anything that compares by value and has
    draw(key, rows) -> a tree of [row, ...] and apply(drawn, x) -> x, for x [row, height, width, channel]. Each row is
    changed by its own draw, and by the same one in `weighted(augmented(...))` and `augmented(weighted(...))`. Rows held
    out for validation are never changed. Raises ValueError for what is no loss, and for a change without these methods.
    """
    if not callable(loss_fn):
        raise ValueError(f"augmented takes the loss first, such as turbanet.mse, and then the change; got {loss_fn!r}.")
    _check_change(augment)
    if isinstance(loss_fn, Augmented):  # one key serves both
        return Augmented(loss_fn.loss_fn, Chain(augment, loss_fn.augment))
    return Augmented(loss_fn, augment)
