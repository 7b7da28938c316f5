"""Rewards that networks pay: an environment in which each member learns for a reward of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from flax.errors import ScopeParamShapeError

from turbanet.rl import environments
from turbanet.training.member import Swarm


@struct.dataclass
class RewardedParams:
    """The parameters of a `Rewarded` environment.

    env : of the environment itself
    reward : the weights of the network that pays; with a leading member axis, each member's own
    """

    env: Any
    reward: Any


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """An environment with gymnax's interface that pays what a network makes of each new observation.

    env : the environment, whose own reward nobody sees
    pays : the network, pays({"params": weights}, observation) -> [1], as `swarm.apply_fn` is one
    default_params : its weights and the environment's own parameters; `.replace(reward=swarm.params)` are those in
        which every member is paid by the network at its position
    """

    env: Any
    pays: Callable
    default_params: RewardedParams = dataclasses.field(compare=False)

    @classmethod
    def by(cls, env: Any, rewards: Swarm) -> "Rewarded":
        """An environment that pays what a swarm's networks, observation [feature] -> [1], make of its observations.

        Raises ValueError for what is no environment, one without `default_params`, and networks that cannot pay.
        """
        environments.check(env)
        own = getattr(env, "default_params", None)
        if own is None:
            raise ValueError(f"{type(env).__name__} has no default_params, where a reward's weights could be.")
        first = jax.tree.map(lambda leaf: leaf[0], rewards.params)
        observed = jax.eval_shape(env.reset, jax.random.key(0), own)[0]
        wanted = f"A reward is one number, [1], of an observation {observed.shape}"
        if rewards.collections:
            raise ValueError(f"{wanted}, by weights alone; the networks have {', '.join(rewards.collections)}, too.")
        try:
            paid = jax.eval_shape(rewards.apply_fn, {"params": first}, observed)
        except ScopeParamShapeError as error:
            raise ValueError(f"{wanted}; the networks take another input.") from error
        if getattr(paid, "shape", None) != (1,):
            raise ValueError(f"{wanted}; the networks make {getattr(paid, 'shape', type(paid).__name__)}.")
        return cls(env, rewards.apply_fn, RewardedParams(own, first))

    def reset(self, key: jax.Array, params: RewardedParams) -> tuple[jax.Array, Any]:
        """As the environment."""
        return self.env.reset(key, params.env)

    def step_env(self, key: jax.Array, state: Any, action: Any, params: RewardedParams) -> tuple[Any, ...]:
        """As the environment, but for the reward."""
        observation, state, _, *rest = self.env.step_env(key, state, action, params.env)
        paid = self.pays({"params": params.reward}, observation)[0]
        return observation, state, paid, *rest

    def is_truncated(self, state: Any, params: RewardedParams) -> jax.Array:
        """As the environment."""
        return self.env.is_truncated(state, params.env)

    def action_space(self, params: RewardedParams) -> Any:
        """As the environment."""
        return self.env.action_space(params.env)
