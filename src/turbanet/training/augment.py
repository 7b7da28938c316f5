"""Random changes of training images: drawn anew for each member, step and row; held-out rows are never changed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.training.member import AUGMENT, member_key


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """A window of the image's own size out of the image with `padding` zeros around it (Krizhevsky 2009)."""

    padding: int = 4

    def __post_init__(self):
        if not isinstance(self.padding, int) or self.padding < 1:
            raise ValueError(f"padding must be a whole number of pixels of at least 1, got {self.padding!r}.")

    def draw(self, key, rows: int):
        """Where each window begins: int32 [row, 2] from 0 to 2 padding."""
        return jax.random.randint(key, (rows, 2), 0, 2 * self.padding + 1, jnp.int32)

    def apply(self, drawn, x):
        """x [row, height, width, channel], each row by its own draw."""
        around = [(0, 0), (self.padding,) * 2, (self.padding,) * 2, (0, 0)]
        padded, shape = jnp.pad(x, around), x.shape[1:]
        return jax.vmap(lambda image, start: jax.lax.dynamic_slice(image, (*start, 0), shape))(padded, drawn)


@dataclasses.dataclass(frozen=True)
class RandomFlip:
    """The image, or with `probability` its mirror image, left and right exchanged."""

    probability: float = 0.5

    def __post_init__(self):
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must lie in 0..1, got {self.probability!r}.")

    def draw(self, key, rows: int):
        """Which images are mirrored: bool [row]."""
        return jax.random.bernoulli(key, self.probability, (rows,))

    def apply(self, drawn, x):
        """x [row, height, width, channel], each row by its own draw."""
        return jnp.where(drawn[:, None, None, None], x[:, :, ::-1], x)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Several changes, one after the other."""

    changes: tuple

    def __init__(self, *changes):
        object.__setattr__(self, "changes", changes)

    def draw(self, key, rows: int):
        """What each of them draws: a tuple."""
        keys = jax.random.split(key, len(self.changes))
        return tuple(change.draw(key, rows) for change, key in zip(self.changes, keys, strict=True))

    def apply(self, drawn, x):
        """x [row, height, width, channel], each row by its own draws."""
        for change, own in zip(self.changes, drawn, strict=True):
            x = change.apply(own, x)
        return x


def draw(augment, state, rows: int):
    """What one member's next step draws for its batch; it depends on its seed, id and step alone."""
    return augment.draw(jax.random.fold_in(member_key(state.seed, state.id, AUGMENT), state.step), rows)


@dataclasses.dataclass(frozen=True, repr=False)
class Augmented:
    """A loss that sees x changed at random in training, and as it is in evaluation; see `augmented`."""

    loss_fn: Callable
    augment: Any

    def __call__(self, params, x, y, apply_fn):
        if getattr(apply_fn, "train", False):
            x = self.augment.apply(draw(self.augment, apply_fn.state, len(x)), x)
        return self.loss_fn(params, x, y, apply_fn)

    def __repr__(self):
        return f"augmented({getattr(self.loss_fn, '__qualname__', self.loss_fn)}, {self.augment})"


def augmented(loss_fn, augment):
    """`loss_fn` on training images that `augment` changes: `fit(swarm, x, y, augmented(loss, RandomCrop(4)), ...)`.

    augment: `RandomCrop`, `RandomFlip`, a `Chain` of them, or anything with draw(key, rows) and apply(drawn, x) that
    compares by value. x is [row, height, width, channel]. What is held out for validation is never changed.
    """
    return Augmented(loss_fn, augment)
