"""A loss with a weight for each example, of a loss of one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.training.checks import expects
from turbanet.training.member import Bound


def weighted(loss_fn: Callable) -> Callable:
    """`loss_fn` with a weight for each example: its y is (y, weight [batch]), its value the weighted mean.

    A weight may be 0; if all of a batch are, its loss is 0. The examples are taken one by one, so a model that mixes
    them (batch normalisation) is refused.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from turbanet import mse, weighted
    >>> double = lambda variables, x: 2 * x
    >>> x, y, weight = jnp.array([[1.0], [2.0]]), jnp.array([[0.0], [4.0]]), jnp.array([1.0, 3.0])
    >>> loss, prediction = weighted(mse)({}, x, (y, weight), double)  # squared errors 4 and 0
    >>> print(loss)
    1.0
    """

    def check(y, prediction):
        y, weight = _with_weight(y)
        of_loss = loss_fn.check(y, prediction) if hasattr(loss_fn, "check") else ()
        return [*of_loss, (weight, weight < 0, "a weight of at least 0")]

    @expects(check)
    def loss(params, x, y, apply_fn):
        y, weight = _with_weight(y)
        examples = len(weight)

        def counted(leaf):  # what does not count may be anything: NaN times 0 is NaN
            return jnp.where(weight.reshape(-1, *[1] * (leaf.ndim - 1)) > 0, leaf, jnp.zeros((), leaf.dtype))

        x, y = jax.tree.map(counted, (x, y))

        def loss_of_one(x, y, index):
            apply_to_one = apply_fn.of_example(index, examples) if isinstance(apply_fn, Bound) else apply_fn
            x, y = jax.tree.map(lambda leaf: leaf[None], (x, y))
            value, prediction = loss_fn(params, x, y, apply_to_one)
            return value, jax.tree.map(lambda leaf: leaf[0], prediction)

        values, prediction = jax.vmap(loss_of_one)(x, y, jnp.arange(examples))
        total = weight.sum()
        return jnp.where(total > 0, (weight * values).sum() / jnp.where(total > 0, total, 1), 0), prediction

    return loss


def _with_weight(y: Any) -> Any:
    if isinstance(y, tuple | list) and len(y) == 2:
        return y
    came = f"{type(y).__name__} {getattr(y, 'shape', '')}".strip()
    raise ValueError(f"A weighted loss takes y as (y, weight), in validation too; got {came}: give ones as weights.")
