"""An LSTM with a custom gradient: that of the weights is one product after the loop over time, not one per step."""

import jax
import jax.numpy as jnp
from jax import lax

from turbanet.networks.cpu.products import product


@jax.custom_jvp
def lstm(x: jax.Array, kernel: jax.Array, recurrent_kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Return the last hidden state of an LSTM from a zero state, by the equations of `flax.linen.OptimizedLSTMCell`.

    All arrays have one floating type; gates and cell state are at least float32. It is differentiable in any mode, any
    number of times.

    Parameters
    ----------
    x : [time, ..., feature]
    kernel : [feature, 4 * hidden], of the input, forget, cell and output gates side by side
    recurrent_kernel : [hidden, 4 * hidden], likewise
    bias : [4 * hidden], likewise

    Returns
    -------
    [..., hidden]
    """
    return _over_time(x, kernel, recurrent_kernel, bias, slopes=False)[0]


def _over_time(x, kernel, recurrent_kernel, bias, *, slopes):
    """Return (the last hidden state, the values of every time step that the derivative needs, if `slopes`)."""
    hidden = len(recurrent_kernel)
    types = {leaf.dtype for leaf in (x, kernel, recurrent_kernel, bias)}
    if len(types) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"lstm takes x and weights of one floating-point type, got {', '.join(map(str, types))}.")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    half = jnp.repeat(jnp.array([0.5, 0.5, 1, 0.5], x.dtype), hidden)
    kernel, recurrent_kernel, bias = (weights * half for weights in (kernel, recurrent_kernel, bias))

    def step(state, x):
        h, c = state
        gates = jnp.tanh((x @ kernel + h @ recurrent_kernel + bias).astype(wide))  # sigmoid(2 z) = tanh(z) / 2 + 1 / 2
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        i, f, o = (0.5 * gate + 0.5 for gate in (i, f, o))
        new_c = f * c + i * g
        t = jnp.tanh(new_c)
        state = (o * t).astype(h.dtype), new_c
        if not slopes:
            return state, None
        by_sum = jnp.concatenate([g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), t * o * (1 - o)], axis=-1)
        return state, (h, by_sum, f, o * (1 - t * t))

    shape = (*x.shape[1:-1], hidden)
    start = jnp.zeros(shape, x.dtype), jnp.zeros(shape, wide)
    (h, _), saved = lax.scan(step, start, x)
    return h, saved


@lstm.defjvp
def _lstm_jvp(primals, tangents):
    """Tangent of the last state: the weights' part needs no loop, so neither does its transpose, their gradient."""
    x, kernel, recurrent_kernel, _ = primals
    dx, d_kernel, d_recurrent_kernel, d_bias = tangents
    last_state, (h, by_sum, f, by_c) = _over_time(*primals, slopes=True)
    d_sums = product(dx, kernel) + product(x, d_kernel) + product(h, d_recurrent_kernel) + d_bias
    transposed = recurrent_kernel.T  # the gradient multiplies by the transpose of this, which it then reads by rows

    def step(tangent, of_this_step):
        dh, dc = tangent
        d_sum, by_sum, f, by_c = of_this_step
        d_sum = d_sum + jnp.einsum("...h,zh->...z", dh, transposed)
        from_i, from_f, from_g, from_o = jnp.split(d_sum * by_sum, 4, axis=-1)
        dc = f * dc + from_i + from_f + from_g
        return ((from_o + by_c * dc).astype(dh.dtype), dc), None

    zeros = jnp.zeros_like(last_state), jnp.zeros(last_state.shape, f.dtype)
    (dh, _), _ = lax.scan(step, zeros, (d_sums, by_sum, f, by_c))
    return last_state, dh
