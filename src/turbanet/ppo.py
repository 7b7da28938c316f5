"""Proximal policy optimisation of one agent: its settings, its rollouts, its loss (Schulman et al. 2017)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from turbanet.networks.policies import (
    ActorCritic as ActorCritic,  # exported here as well
    Agent as Agent,
    Categorical as Categorical,
    DualEncoderActorCritic as DualEncoderActorCritic,
    Gaussian as Gaussian,
    distribution,
)

PUBLIC_COLUMNS = 4  # of the y of `PPOConfig.loss_fn`: action, old log-probability, advantage, return


class PPOConfig(NamedTuple):
    """The settings of an agent's training.

    In `train_agents`, each number marked [member] may be an array with one number a member.

    lr : learning rate of Adam [member]
    n_steps, n_envs : steps of a rollout in each environment; number of parallel environments
    batch_size, n_epochs : transitions of an optimizer step, the last one of a pass filled up from its beginning; passes
        over a rollout
    gamma, gae_lambda : discount of rewards, and of the terms of an advantage (Schulman et al. 2016) [member]
    clip_range : how far the ratio of new to old probability may move from 1 before it is clipped [member]
    ent_coef, vf_coef : weights of the entropy and of the value loss [member]
    max_grad_norm : norm that gradients are clipped to [member]
    total_timesteps : transitions of the whole training, rounded down to whole rollouts
    anneal : names of settings marked [member] that decay linearly to 0, such as ("lr", "clip_range")
    clip_values : whether `clip_range` also limits how far values may move
    normalize_observations, normalize_rewards : whether observations are standardised by their running mean and standard
        deviation, and rewards divided by the running standard deviation of their discounted sum
    """

    lr: Any = 3e-4
    n_steps: int = 2048
    n_envs: int = 16
    batch_size: int = 64
    n_epochs: int = 10
    gamma: Any = 0.99
    gae_lambda: Any = 0.95
    clip_range: Any = 0.2
    ent_coef: Any = 0.0
    vf_coef: Any = 0.5
    max_grad_norm: Any = 0.5
    total_timesteps: int = 100_000
    anneal: tuple[str, ...] = ()
    clip_values: bool = False
    normalize_observations: bool = False
    normalize_rewards: bool = False

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam at `lr` on gradients clipped to `max_grad_norm`; in a swarm each member may have its own."""
        numbers = {"learning_rate": self.lr, "max_grad_norm": self.max_grad_norm}
        initial = {name: float(np.ravel(value)[0]) for name, value in numbers.items()}
        return optax.inject_hyperparams(clipped_adam)(**initial)

    def loss_fn(self, params: Any, x: Any, y: Any, apply_fn: Callable) -> tuple[jax.Array, tuple]:
        """Return the loss of one member, and (policy loss, value loss, entropy).

        x : observations [batch, ...]; y : [batch, 4] of action, old log-probability, advantage and return
        apply_fn({"params": params}, x) : (logits [batch, action], values [batch])

        Advantages are normalised over this member's batch alone.
        """
        if y.ndim != 2 or y.shape[1] != PUBLIC_COLUMNS:
            raise ValueError(f"y is [batch, 4]: action, old log-probability, advantage, return; got {y.shape}.")
        if self.clip_values:
            raise ValueError("clip_values needs the values as they were, which this y does not hold: use train_agents.")
        policy, values = apply_fn({"params": params}, x)
        action, log_probability, advantage, returns = y.T
        taken = Taken(action.astype(int), log_probability, advantage, returns, values)
        weights = {name: getattr(self, name) for name in ("clip_range", "ent_coef", "vf_coef")}
        loss, parts = ppo_loss(policy, values, taken, **weights)
        return loss, (parts["policy_loss"], parts["value_loss"], parts["entropy"])


def clipped_adam(learning_rate: Any, max_grad_norm: Any) -> optax.GradientTransformation:
    """Return Adam on gradients clipped by their norm, with the epsilon of Huang et al. (2022, detail 3)."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adam(learning_rate, eps=1e-5))


class RolloutBuffer(NamedTuple):
    """A rollout of some steps in some environments: arrays [step, env, ...] unless stated otherwise.

    dones : whether the episode ended with the step, terminated or truncated
    action_lps, values : the log-probability of the action and the value of the observation, at that step
    last_values, next_obs : the value [env] of the observation after the last step, and that observation [env, ...]
    truncated : whether the episode's time was up, so that the states that would follow have a value; None: never
    final_values : the value of an episode's last observation, before the reset, where it was truncated
    """

    observations: Any
    actions: Any
    rewards: Any
    dones: Any
    action_lps: Any
    values: Any
    last_values: Any
    next_obs: Any
    truncated: Any = None
    final_values: Any = None

    def compute_gae(self, cfg: PPOConfig) -> tuple[Any, Any]:
        """Return (advantages, returns) [step, env], as NumPy arrays if the rewards are one.

        Raises ValueError for shapes that differ, and for truncated steps without final values.
        """
        shapes = {name: np.shape(getattr(self, name)) for name in ("rewards", "dones", "values")}
        if len(set(shapes.values())) > 1 or np.shape(self.last_values) != shapes["rewards"][1:]:
            received = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            required = "rewards, dones and values are [step, env], last_values [env]"
            raise ValueError(f"{required}; got {received} and {np.shape(self.last_values)}.")
        following = jnp.concatenate([jnp.asarray(self.values)[1:], jnp.asarray(self.last_values)[None]])
        terminated = dones = jnp.asarray(self.dones, bool)
        if self.truncated is not None:
            if self.final_values is None:
                raise ValueError("Truncated episodes go on in value: give final_values, of their last observations.")
            truncated = jnp.asarray(self.truncated, bool)
            following = jnp.where(truncated, jnp.asarray(self.final_values), following)
            terminated, dones = dones & ~truncated, dones | truncated
        rewards, values = jnp.asarray(self.rewards), jnp.asarray(self.values)
        advantages = gae(rewards, values, following, terminated, dones, cfg.gamma, cfg.gae_lambda)
        returns = advantages + values
        is_numpy = isinstance(self.rewards, np.ndarray)
        return (np.array(advantages), np.array(returns)) if is_numpy else (advantages, returns)


def gae(
    rewards: Any, values: Any, following: Any, terminated: Any, dones: Any, gamma: Any, gae_lambda: Any
) -> jax.Array:
    """Return generalised advantage estimates [step, ...] (Schulman et al. 2016, equation 16).

    Parameters
    ----------
    rewards : [step, ...]
    values, following : of the observation before a step, and of the one after it, [step, ...]
    terminated, dones : whether nothing follows the step; whether the next step is of another episode
    gamma, gae_lambda : the discounts of `PPOConfig`
    """

    def back(later, step):
        delta, discount = step
        advantage = delta + discount * later
        return advantage, advantage

    deltas = rewards + gamma * jnp.where(terminated, 0, following) - values
    discounts = jnp.where(dones, 0, gamma * gae_lambda).astype(deltas.dtype)
    return jax.lax.scan(back, jnp.zeros_like(deltas[0]), (deltas, discounts), reverse=True)[1]


class Taken(NamedTuple):
    """Actions [batch, ...] of a rollout, with their log-probabilities, advantages, returns and values."""

    action: Any
    log_probability: Any
    advantage: Any
    returns: Any
    values: Any


def check_one_a_row(log_probability: Any, values: Any, like: Any) -> None:
    """Raise ValueError if a network's values or the probabilities of its actions are not one number a row of `like`."""
    rows = jnp.shape(like)
    for name, given in {"values": values, "log-probabilities": log_probability}.items():
        if jnp.shape(given) != rows:
            advice = "return values[..., 0], and flatten an observation of several axes in the network"
            raise ValueError(f"The network's {name} are of shape {jnp.shape(given)} for rows {rows}: {advice}.")


def ppo_loss(
    policy: Any,
    values: jax.Array,
    taken: Taken,
    *,
    clip_range: Any,
    ent_coef: Any,
    vf_coef: Any,
    clip_values: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a policy on a batch of actions (Schulman et al. 2017, equations 7 and 9), and its parts.

    Parameters
    ----------
    policy : logits [batch, action], or a distribution such as `Categorical` and `Gaussian`
    values : [batch], of the same network
    taken : the batch; advantages are normalised over it
    clip_range, ent_coef, vf_coef, clip_values : as in `PPOConfig`

    Returns
    -------
    (scalar, {"policy_loss", "value_loss", "entropy", "kl"}) : value_loss is half the mean squared error, kl the
        divergence KL(old || new) of the policies, in nats, estimated on the batch (Schulman 2020)
    """
    policy = distribution(policy)
    log_probability = policy.log_probability(taken.action)
    check_one_a_row(log_probability, values, taken.advantage)
    change = log_probability - taken.log_probability
    ratio = jnp.exp(change)
    advantage = taken.advantage
    if advantage.size > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    policy_loss = -jnp.minimum(advantage * ratio, advantage * clipped).mean()
    errors = (values - taken.returns) ** 2
    if clip_values:
        clipped_values = taken.values + jnp.clip(values - taken.values, -clip_range, clip_range)
        errors = jnp.maximum(errors, (clipped_values - taken.returns) ** 2)
    value_loss = 0.5 * errors.mean()
    entropy = policy.entropy().mean()
    kl = (ratio - 1 - change).mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl": kl}
