"""Losses that are weighted means over rows, and masks."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from turbanet.backend import on_accelerator
from turbanet.core.member import takes
from turbanet.data.checks import expects


def mean_over_rows(of_rows: Callable) -> Callable[..., tuple[jax.Array, Any]]:
    """Turn a function of rows into a loss: the mean of its values, which takes a mask and weights (a decorator).

    Parameters
    ----------
    of_rows : of_rows(params, x, y, apply_fn) -> (values [batch, ...], prediction), each row's values from that row; it
        may take the keyword `member` (see `fit`)

    Returns
    -------
    loss(params, x, y, apply_fn, *, mask=None, weight=None) -> (scalar, prediction): the mean of all values; with mask,
    bool [batch], of those of the rows where it is true; with weight, [batch], each row counts so much. A row that does
    not count may hold anything, NaN too; where none does the loss is 0.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import turbanet as tn
    >>> @tn.mean_over_rows
    ... def absolute(params, x, y, apply_fn):
    ...     prediction = apply_fn({"params": params}, x)
    ...     return jnp.abs(prediction - y), prediction
    >>> double = lambda variables, x: 2 * x
    >>> x, y = jnp.array([[1.0], [2.0], [jnp.nan]]), jnp.array([[0.0], [0.0], [0.0]])  # errors 2, 4 and NaN
    >>> print(absolute({}, x, y, double, mask=jnp.array([True, True, False]))[0])
    3.0
    """

    @wraps(of_rows)
    def loss(
        params: Any,
        x: Any,
        y: Any,
        apply_fn: Callable,
        *,
        mask: jax.Array | None = None,
        weight: jax.Array | None = None,
        **constants: Any,
    ) -> tuple[jax.Array, Any]:
        if mask is None and weight is None:
            values, prediction = of_rows(params, x, y, apply_fn, **constants)
            _check_values(values, prediction, y, x)
            return jnp.mean(values), prediction
        weight = jnp.asarray(mask if weight is None else weight if mask is None else jnp.where(mask, weight, 0))
        if weight.ndim != 1:
            raise ValueError(f"mask and weight are [batch], a number a row, got {list(weight.shape)}: take one axis.")
        counts = weight != 0
        y = only(counts, y)
        if getattr(apply_fn, "train", True):  # a gradient would be NaN; scores keep the prediction of each row
            x = only(counts, x)
        values, prediction = of_rows(params, x, y, apply_fn, **constants)
        _check_values(values, prediction, (y, weight), x)
        weight = weight.astype(jnp.promote_types(weight.dtype, values.dtype))
        total = weight.sum()
        each = jnp.where(counts, values.reshape(len(weight), -1).mean(axis=1), 0)
        return jnp.where(total == 0, 0, (weight * each).sum() / jnp.where(total == 0, 1, total)), prediction

    del loss.__wrapped__  # so that its own signature is seen
    return _with_member(loss, of_rows)


def _check_values(values, prediction, y, x):
    """Raise ValueError for values that are not [batch, ...], and for those of each row with every other."""
    shape, leaves = jnp.shape(values), [jnp.shape(leaf) for leaf in jax.tree.leaves(y)]
    rows = {leaf[0] for leaf in leaves if leaf}
    if len(rows) == 1 and shape[:1] != (*rows,):
        got = f"{list(shape)} of {rows.pop()} rows"
        raise ValueError(f"mean_over_rows takes each row's values, [batch, ...], got {got}: leave the mean to it.")
    leads = {jnp.shape(leaf)[:2] for leaf in jax.tree.leaves((prediction, y, x))}
    if shape[:2] == shape[:1] * 2 != (1, 1) and shape[:2] not in leads:
        advice = "give both one shape, such as [batch, 1]; a loss of pairs of rows returns its mean itself"
        got = f"{list(shape)}, each row's with every other row, as of a [batch, 1] with a [batch]"
        raise ValueError(f"The values are {got}: {advice}.")


def weighted(loss_fn: Callable) -> Callable:
    """Return `loss_fn` with a weight for each example: its y is (y, weight [batch]).

    `loss_fn` takes weight=, [batch], as all losses of this library and of `mean_over_rows` do; theirs is then the
    weighted mean. A weight may be 0: the row may then hold anything, and if all of a batch are 0, so is the loss.
    Batch statistics count all rows alike, so `fit` refuses weights of 0 there, though not within a loss of your own.
    Raises ValueError for a loss that takes no weight=.

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
    if not takes(loss_fn, "weight"):
        name = getattr(loss_fn, "__qualname__", loss_fn)
        advice = "give it weight=, or write what a row costs under turbanet.mean_over_rows"
        raise ValueError(f"weighted needs a loss that takes weight=, [batch], which {name} does not: {advice}.")

    def check(y, prediction):
        y, weight = _with_weight(y)
        of_loss = loss_fn.check(y, prediction) if getattr(loss_fn, "check", None) else ()
        return [*((*each, weight) for each in of_loss), (weight, weight < 0, "a weight of at least 0")]

    @expects(check)
    def loss(params, x, y, apply_fn, *, mask=None, **constants):
        y, weight = _with_weight(y)
        weight = weight if mask is None else jnp.where(mask, weight, 0)
        return loss_fn(params, x, y, apply_fn, weight=weight, **constants)

    loss.weight_of = lambda y: _with_weight(y)[1]
    return _with_member(loss, loss_fn)


def only(counts: jax.Array, tree: Any) -> Any:
    """Replace each row of `tree` [batch, ...] that does not count by one that does; by zeros where none does.

    counts : bool [batch]
    """

    def one_that_counts(leaf):
        if not on_accelerator():
            return jnp.where(counts.any(), leaf[jnp.argmax(counts)], jnp.zeros((), leaf.dtype))
        number = jnp.arange(len(counts))  # compared, not gathered: a kernel takes that, and a CPU longer
        is_first = number == jnp.where(counts, number, len(counts)).min()
        return jnp.where(is_first.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0).sum(axis=0).astype(leaf.dtype)

    def filled(leaf):
        leaf = jnp.asarray(leaf)
        return jnp.where(counts.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, one_that_counts(leaf))

    return jax.tree.map(filled, tree)


def _with_member(wrapper, function):
    """Return a loss whose signature has the keyword `member` if that of the function that it calls has."""
    if takes(function, "member"):
        own = inspect.signature(wrapper)
        named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        wrapper.__signature__ = own.replace(parameters=[*named, inspect.Parameter("member", named[-1].kind)])
    return wrapper


def _with_weight(y: Any) -> Any:
    if isinstance(y, tuple | list) and len(y) == 2:
        return y
    got = f"{type(y).__name__} {getattr(y, 'shape', '')}".strip()
    raise ValueError(f"A weighted loss takes y as (y, weight), in validation too; got {got}: give ones as weights.")
