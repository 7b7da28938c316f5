"""Losses of one member: `loss(params, x, y, apply_fn) -> (scalar, prediction)`."""

import jax
import jax.numpy as jnp
import optax

from turbanet.training.member import Bound


def _check(prediction, y):
    if prediction.shape != y.shape:
        raise ValueError(f"The prediction has shape {prediction.shape}, the target {y.shape}: make them equal.")


def _predicted(params, x, apply_fn):
    """The prediction in float32 at least: a model may compute in bfloat16, a loss does not."""
    prediction = apply_fn({"params": params}, x)
    return prediction.astype(jnp.promote_types(prediction.dtype, jnp.float32))


def mse(params, x, y, apply_fn):
    """Mean squared error. x: [batch, ...]; y: [batch, output]."""
    prediction = _predicted(params, x, apply_fn)
    _check(prediction, y)
    return jnp.mean(optax.squared_error(prediction, y)), prediction


def l2_loss(params, x, y, apply_fn):
    """Half the mean squared error. x: [batch, ...]; y: [batch, output]."""
    prediction = _predicted(params, x, apply_fn)
    _check(prediction, y)
    return jnp.mean(optax.l2_loss(prediction, y)), prediction


def softmax_cross_entropy(params, x, y, apply_fn):
    """Mean cross-entropy in nats of logits [batch, class] against classes y: int [batch] or one-hot [batch, class]."""
    logits = _predicted(params, x, apply_fn)
    classes_first = jnp.moveaxis(logits, -1, 0)  # few classes as the last axis would leave the vector units idle
    if jnp.issubdtype(y.dtype, jnp.integer) and y.ndim == logits.ndim - 1:
        _check(logits[..., 0], y)
        own = jnp.arange(len(classes_first)).reshape(-1, *[1] * y.ndim) == y  # compared, not gathered: it fuses
        picked = jnp.sum(jnp.where(own, classes_first, 0), axis=0)
        return jnp.mean(jax.nn.logsumexp(classes_first, axis=0) - picked), logits
    _check(logits, y)
    return jnp.mean(optax.softmax_cross_entropy(classes_first, jnp.moveaxis(y, -1, 0), axis=0)), logits


def cross_entropy(params, x, y, apply_fn):
    """Mean cross-entropy in nats of probabilities [batch, class] against one-hot y [batch, class]; finite at p = 0."""
    probability = _predicted(params, x, apply_fn)
    _check(probability, y)
    smallest = jnp.finfo(probability.dtype).tiny
    log_probability = jnp.log(jnp.maximum(probability, smallest))
    return -jnp.mean(jnp.sum(jnp.where(y > 0, y * log_probability, 0.0), axis=-1)), probability


def binary_cross_entropy(params, x, y, apply_fn):
    """Mean binary cross-entropy in nats of one logit [batch, 1] or [batch] against y in {0, 1} [batch]."""
    logits = _predicted(params, x, apply_fn)
    flat = logits.reshape(y.shape) if logits.shape == (*y.shape, 1) else logits
    _check(flat, y)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(flat, y.astype(flat.dtype))), jax.nn.sigmoid(logits)


def weighted(loss_fn):
    """`loss_fn` with a weight for each example: y is (y, weight [batch]); the weighted mean of the losses.

    A weight may be 0; if all of a batch are, its loss is 0. The examples are taken one by one, so a model that mixes
    them (batch normalisation) is refused.
    """

    def loss(params, x, y, apply_fn):
        y, weight = y

        def one(x, y, index):
            own = apply_fn.of_example(index) if isinstance(apply_fn, Bound) else apply_fn
            x, y = jax.tree.map(lambda a: a[None], (x, y))
            value, prediction = loss_fn(params, x, y, own)
            return value, jax.tree.map(lambda a: a[0], prediction)

        values, prediction = jax.vmap(one)(x, y, jnp.arange(len(weight)))
        total = weight.sum()
        return jnp.where(total > 0, (weight * values).sum() / jnp.where(total > 0, total, 1), 0), prediction

    return loss
