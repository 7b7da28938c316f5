"""Long sums in float32, against the exact ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import turbanet as tn
from turbanet.core import sums
from turbanet.training import parts


def test_a_long_sum_is_off_by_a_rounding():
    values = np.random.default_rng(0).uniform(0.05, 0.15, 300_000).astype(np.float32)
    total, _ = jax.jit(lambda all: jax.lax.fori_loop(0, len(all), lambda i, s: sums.added(s, all[i]), sums.zero()))(
        values
    )
    np.testing.assert_allclose(total, math.fsum(values.tolist()), rtol=1e-7)


def test_an_infinite_sum_stays_so():
    total = sums.zero()
    for value in (1.0, np.inf, 2.0):
        total = sums.added(total, jnp.float32(value))
    assert total[0] == np.inf and np.isnan(sums.added(total, jnp.float32(np.nan))[0])


def test_an_epoch_of_many_steps_has_their_mean_loss(monkeypatch):
    x = np.ones((100_000, 1), np.float32)
    y = np.sqrt(np.random.default_rng(1).uniform(0.05, 0.15, len(x)), dtype=np.float32)[:, None]
    still = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.sgd(0.0), 2, sample_input=x[:1])
    still = still.replace(params=jax.tree.map(jnp.zeros_like, still.params))
    job = {"epochs": 1, "batch_size": 1, "progress": False, "plan": tn.Plan(1, 2)}
    for long in (math.inf, 0):
        monkeypatch.setattr(parts, "LONG", long)
        for rows in (None, tn.ragged([np.arange(len(x)), np.arange(5)])):
            _, history = tn.fit(still, x, y, tn.mse, rows=rows, **job)
            np.testing.assert_allclose(history.train_loss[0, 0], np.mean(y.astype(float) ** 2), rtol=2e-7)
