"""Random changes of training images: drawn anew for each member, step and row; held-out rows are never changed."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.training.arrays import check_whole
from turbanet.training.member import AUGMENT, member_key


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """A window of the image's own size out of the image with `padding` zeros around it (Krizhevsky 2009)."""

    padding: int = 4

    def __post_init__(self):
        check_whole(padding=self.padding)

    def draw(self, key: jax.Array, rows: int) -> jax.Array:
        """Where each of `rows` windows begins: int32 [row, 2] from 0 to 2 padding."""
        return jax.random.randint(key, (rows, 2), 0, 2 * self.padding + 1, jnp.int32)

    def apply(self, drawn: jax.Array, x: jax.Array) -> jax.Array:
        """x [row, height, width, channel], each row changed by its own draw in `drawn`."""
        padded = jnp.pad(x, [(0, 0), *[(self.padding, self.padding)] * 2, (0, 0)])
        return jax.vmap(lambda image, start: jax.lax.dynamic_slice(image, (*start, 0), x.shape[1:]))(padded, drawn)


@dataclasses.dataclass(frozen=True)
class RandomFlip:
    """The image, or with `probability` its mirror image, left and right exchanged."""

    probability: float = 0.5

    def __post_init__(self):
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must lie in 0..1, got {self.probability!r}.")

    def draw(self, key: jax.Array, rows: int) -> jax.Array:
        """Which of `rows` images are mirrored: bool [row]."""
        return jax.random.bernoulli(key, self.probability, (rows,))

    def apply(self, drawn: jax.Array, x: jax.Array) -> jax.Array:
        """x [row, height, width, channel], each row changed by its own draw in `drawn`."""
        return jnp.where(drawn[:, None, None, None], x[:, :, ::-1], x)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Several changes, one after the other."""

    changes: tuple

    def __init__(self, *changes):
        object.__setattr__(self, "changes", changes)

    def draw(self, key: jax.Array, rows: int) -> tuple:
        """What each of the changes draws for `rows` images."""
        keys = jax.random.split(key, len(self.changes))
        return tuple(change.draw(key, rows) for change, key in zip(self.changes, keys, strict=True))

    def apply(self, drawn: tuple, x: jax.Array) -> jax.Array:
        """x [row, height, width, channel], each row changed by its own draws in `drawn`, one of each change."""
        for change, draws in zip(self.changes, drawn, strict=True):
            x = change.apply(draws, x)
        return x


def draw(augment: Any, state: Any, rows: int) -> Any:
    """What `augment` draws for the next batch of `rows` rows of the member `state`, by its seed, id and step alone."""
    key = jax.random.fold_in(member_key(state.seed, state.id, AUGMENT), state.step)
    return augment.draw(key, rows)


@dataclasses.dataclass(frozen=True, repr=False)
class Augmented:
    """A loss that sees x changed at random in training, and as it is in evaluation; see `augmented`."""

    loss_fn: Callable
    augment: Any

    @property
    def check(self):
        """What the loss can use as targets, if it says so."""
        return getattr(self.loss_fn, "check", None)

    @property
    def __signature__(self):
        """What the loss takes, this takes: mask= and weight= too."""
        return inspect.signature(self.loss_fn, follow_wrapped=False)

    def __call__(self, params, x, y, apply_fn, **counted):
        if getattr(apply_fn, "train", False):
            x = self.augment.apply(draw(self.augment, apply_fn.state, len(x)), x)
        return self.loss_fn(params, x, y, apply_fn, **counted)

    def __repr__(self):
        return f"augmented({getattr(self.loss_fn, '__qualname__', self.loss_fn)}, {self.augment})"


def augmented(loss_fn: Callable, augment: Any) -> Augmented:
    """`loss_fn` on training images that `augment` changes: `fit(swarm, x, y, augmented(loss, RandomCrop(4)), ...)`.

    augment: `RandomCrop`, `RandomFlip`, a `Chain` of them, or anything that compares by value and has
    draw(key, rows) -> a tree of [row, ...] and apply(drawn, x) -> x, for x [row, height, width, channel]. Each row is
    changed by its own draw, and by the same one in `weighted(augmented(...))` and `augmented(weighted(...))`. What is
    held out for validation is never changed.
    """
    return Augmented(loss_fn, augment)
