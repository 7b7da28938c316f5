"""An environment whose reward is computed by a network, which may be another one for each member."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from flax.errors import ScopeParamShapeError

from turbanet.core.state import State
from turbanet.rl import environments


@struct.dataclass
class RewardedParams:
    """The parameters of a `Rewarded` environment.

    env : parameters of the wrapped environment
    reward : weights of the reward network; with a leading member axis, each member has its own
    """

    env: Any
    reward: Any


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """An environment with gymnax's interface whose reward is a network's output for each new observation.

    env : the wrapped environment, whose own reward is discarded
    pays : the reward network, pays({"params": weights}, observation) -> [1], such as `swarm.apply_fn`
    default_params : the network's weights and the environment's parameters; with `.replace(reward=swarm.params)` each
        member is rewarded by the network at its position
    """

    env: Any
    pays: Callable
    default_params: RewardedParams = dataclasses.field(compare=False)

    @classmethod
    def by(cls, env: Any, rewards: State) -> "Rewarded":
        """Return an environment rewarded by a swarm's networks, observation [feature] -> [1].

        Raises ValueError for an object that is no environment, an environment without `default_params`, and networks
        with collections, or of another input or output.
        """
        environments.check(env)
        params = getattr(env, "default_params", None)
        if params is None:
            raise ValueError(f"{type(env).__name__} has no default_params, where a reward's weights could be.")
        first = jax.tree.map(lambda leaf: leaf[0], rewards.params)
        observation = jax.eval_shape(env.reset, jax.random.key(0), params)[0]
        required = f"A reward is one number, [1], of an observation {observation.shape}"
        if rewards.collections:
            raise ValueError(f"{required}, by weights alone; the networks have {', '.join(rewards.collections)}, too.")
        try:
            reward = jax.eval_shape(rewards.apply_fn, {"params": first}, observation)
        except ScopeParamShapeError as error:
            raise ValueError(f"{required}; the networks take another input.") from error
        if getattr(reward, "shape", None) != (1,):
            raise ValueError(f"{required}; the networks make {getattr(reward, 'shape', type(reward).__name__)}.")
        return cls(env, rewards.apply_fn, RewardedParams(params, first))

    def reset(self, key: jax.Array, params: RewardedParams) -> tuple[jax.Array, Any]:
        """Return (observation, state) of a new episode."""
        return self.env.reset(key, params.env)

    def step_env(self, key: jax.Array, state: Any, action: Any, params: RewardedParams) -> tuple[Any, ...]:
        """Return what the environment's step returns, with the network's reward."""
        observation, state, _, *rest = self.env.step_env(key, state, action, params.env)
        reward = self.pays({"params": params.reward}, observation)[0]
        return observation, state, reward, *rest

    def is_truncated(self, state: Any, params: RewardedParams) -> jax.Array:
        """Whether the environment truncates the episode in this state."""
        return self.env.is_truncated(state, params.env)

    def action_space(self, params: RewardedParams) -> Any:
        """Return the environment's action space."""
        return self.env.action_space(params.env)
