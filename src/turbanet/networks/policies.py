"""Policy networks: from an observation, a distribution over actions and the value of the state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from turbanet.core.member import mode
from turbanet.networks.models import Precise

CLIP = 10.0  # largest normalised observation, in standard deviations from the mean


class Categorical(NamedTuple):
    """Categorical distribution over actions, of logits [..., action]."""

    logits: Any

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw the noise with which `sample` draws [*lead, ...] actions."""
        return jax.random.gumbel(key, (*lead, *self.logits.shape), self.logits.dtype)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions, int [...], drawn by `noise`."""
        return jnp.argmax(self.logits + noise, axis=-1)

    def mode(self) -> jax.Array:
        """Return the most probable actions, int [...]."""
        return jnp.argmax(self.logits, axis=-1)

    def log_probability(self, action: jax.Array) -> jax.Array:
        """Return the log-probability of actions, int [...], in nats."""
        chosen = jnp.arange(self.logits.shape[-1]) == action[..., None]  # a gather is slower by far
        return jnp.where(chosen, jax.nn.log_softmax(self.logits), 0).sum(-1)

    def entropy(self) -> jax.Array:
        """Return the entropy [...], in nats."""
        logarithm = jax.nn.log_softmax(self.logits)
        finite = jnp.maximum(logarithm, jnp.finfo(logarithm.dtype).min)  # of actions that are ruled out
        return -(jnp.exp(logarithm) * finite).sum(-1)


class Gaussian(NamedTuple):
    """Independent normal distributions, of mean and logarithm of the standard deviation [..., action]."""

    mean: Any
    log_deviation: Any

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw the noise with which `sample` draws [*lead, ...] actions."""
        return jax.random.normal(key, (*lead, *self.mean.shape), self.mean.dtype)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions [..., action], drawn by `noise`."""
        return self.mean + jnp.exp(self.log_deviation) * noise

    def mode(self) -> jax.Array:
        """Return the most probable actions [..., action]."""
        return self.mean

    def log_probability(self, action: jax.Array) -> jax.Array:
        """Return the log-density of actions [..., action], in nats."""
        away = (action - self.mean) * jnp.exp(-self.log_deviation)
        return -(0.5 * away**2 + self.log_deviation + 0.5 * np.log(2 * np.pi)).sum(-1)

    def entropy(self) -> jax.Array:
        """Return the entropy [...], in nats."""
        entropies = jnp.broadcast_to(self.log_deviation, self.mean.shape) + 0.5 * np.log(2 * np.pi * np.e)
        return entropies.sum(-1)


for policy in (Categorical, Gaussian):  # for `turbanet.export`
    jax.export.register_namedtuple_serialization(policy, serialized_name=f"{__name__}.{policy.__name__}")


def distribution(policy: Any) -> Categorical | Gaussian:
    """Return the distribution that a network returned as its policy; an array is the logits of actions."""
    return policy if hasattr(policy, "log_probability") else Categorical(policy)


class Agent(Precise):
    """Separate actor and critic with tanh and orthogonal weights: x [..., feature] -> (policy, values [...]).

    The policy is a `Gaussian` whose deviation does not depend on x if `continuous`, else a `Categorical`. Widths and
    initial weights are those with which CleanRL and Stable-Baselines3 publish scores (Huang et al. 2022, details 2, 3).
    """

    actions: int
    hidden: Sequence[int] = (64, 64)
    continuous: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[Categorical | Gaussian, jax.Array]:
        logits = self._tower(x, "actor", self.actions, scale=0.01)
        values = self._tower(x, "critic", 1, scale=1.0)[..., 0]
        if not self.continuous:
            return Categorical(logits), values
        deviation = self.param("log_deviation", nn.initializers.zeros_init(), (self.actions,), self.param_dtype)
        return Gaussian(logits, jnp.broadcast_to(deviation, logits.shape)), values

    def _tower(self, x, name, outputs, scale):
        scales = [np.sqrt(2)] * len(self.hidden) + [scale]
        for layer, (width, size) in enumerate(zip((*self.hidden, outputs), scales, strict=True)):
            x = nn.tanh(x) if layer else x
            kernel_init = nn.initializers.orthogonal(size)
            x = nn.Dense(width, kernel_init=kernel_init, name=f"{name}_{layer}", **self.precision)(x)
        return x


class ActorCritic(nn.Module):
    """Actor and critic that share two hidden layers: x [..., feature] -> (logits [..., action], values [...])."""

    n_actions: int
    hidden_dim: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _two_layers(x, self.hidden_dim)
        return nn.Dense(self.n_actions)(x), nn.Dense(1)(x)[..., 0]


class DualEncoderActorCritic(nn.Module):
    """Actor and critic with two hidden layers each: x [..., feature] -> (logits [..., action], values [...])."""

    n_actions: int
    actor_hidden: int = 16
    critic_hidden: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        actor = _two_layers(x, self.actor_hidden)
        critic = _two_layers(x, self.critic_hidden)
        return nn.Dense(self.n_actions)(actor), nn.Dense(1)(critic)[..., 0]


def _two_layers(x, width):
    """Apply two Dense layers with tanh; called within a network's `__call__`."""
    for _ in range(2):
        x = nn.tanh(nn.Dense(width)(x))
    return x


class Normalised(nn.Module):
    """A network of observations that are normalised by their running mean and standard deviation.

    Mean, variance and count are in the collection "observations" and are no weights: the training loop updates them
    (see `running`).
    """

    network: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> Any:
        shape = x.shape[-1:]
        mean = self.variable("observations", "mean", jnp.zeros, shape, float).value
        variance = self.variable("observations", "variance", jnp.ones, shape, float).value
        self.variable("observations", "count", jnp.zeros, (), float)
        x = jnp.clip((x - mean) / jnp.sqrt(variance + 1e-8), -CLIP, CLIP)
        return self.network(x, **mode(self.network.apply, train))


def running(stats: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Return {"mean", "variance", "count"} updated by x [row, ...] (Chan, Golub and LeVeque 1979)."""
    count = stats["count"] + len(x)
    away = x.mean(0) - stats["mean"]
    squares = stats["variance"] * stats["count"] + x.var(0) * len(x) + away**2 * stats["count"] * len(x) / count
    return {"mean": stats["mean"] + away * len(x) / count, "variance": squares / count, "count": count}
