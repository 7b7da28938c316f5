"""Settings of PPO: checks, arrays of what may differ by member, and their way into the optimizer."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from turbanet.core.arrays import as_array, check_whole
from turbanet.core.optimizers import check_plain
from turbanet.core.schedules import with_hyperparameters
from turbanet.core.state import Swarm
from turbanet.ppo import PPOConfig

WHOLE_NUMBERS = "n_steps", "n_envs", "batch_size", "n_epochs", "total_timesteps"
OF_MEMBER = "lr", "gamma", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "max_grad_norm"
IN_OPTIMIZER = {"lr": "learning_rate", "max_grad_norm": "max_grad_norm"}


def as_config(config: PPOConfig | None) -> PPOConfig:
    """Return a config, the default for None; ValueError for anything but a `PPOConfig`."""
    if config is not None and not isinstance(config, PPOConfig):
        raise ValueError(f"config is a PPOConfig, such as PPOConfig(n_steps=128), or None; got {config!r:.60}.")
    return config or PPOConfig()


def count_updates(config: PPOConfig, agents: int = 1) -> int:
    """Return the number of updates of a training; raise ValueError for settings that contradict one another.

    agents : how many agents one network acts for, each of which adds a rollout to an update
    """
    check_whole(**{name: getattr(config, name) for name in WHOLE_NUMBERS})
    transitions = config.n_steps * config.n_envs
    if config.batch_size > agents * transitions:
        of_agents = f" times {agents} agents" if agents > 1 else ""
        most = f"a rollout of n_steps * n_envs = {transitions} transitions{of_agents}"
        raise ValueError(f"batch_size {config.batch_size} is more than {most}.")
    if config.total_timesteps < transitions:
        raise ValueError(f"total_timesteps {config.total_timesteps} is less than one rollout of {transitions}.")
    if config.anneal is None or isinstance(config.anneal, str):
        raise ValueError(f'anneal is a tuple of names, such as ("lr",), or (); got {config.anneal!r}.')
    if unknown := set(config.anneal) - set(OF_MEMBER):
        raise ValueError(f"anneal names {', '.join(sorted(unknown))}; known: {', '.join(OF_MEMBER)}.")
    return config.total_timesteps // transitions


def of_members(config: PPOConfig, members: int, *, updates: int) -> dict[str, np.ndarray]:
    """Return {name: scalar or [member]} of the settings that may differ by member, and the number of `updates`."""
    dtype = jnp.result_type(float)
    settings = {name: np.asarray(as_array(getattr(config, name), name), dtype) for name in OF_MEMBER}
    for name, value in settings.items():
        if value.shape not in ((), (members,)):
            raise ValueError(f"{name} must be one number or {members} of them, got shape {value.shape}.")
        most = 1 if name in ("gamma", "gae_lambda") else np.inf
        if not np.isfinite(value).all() or (value < 0).any() or (value > most).any():
            bounds = "from 0 to 1" if most == 1 else "of at least 0"
            raise ValueError(f"{name} must be numbers {bounds}, got {getattr(config, name)!r:.80}.")
    return settings | {"updates": np.asarray(updates, dtype)}


def without_numbers(config: PPOConfig) -> PPOConfig:
    """Return the settings without those passed as data, so that another value or total length compiles nothing."""
    zeros: dict[str, Any] = dict.fromkeys(OF_MEMBER, 0.0)
    return config._replace(**zeros, total_timesteps=0)


def into_swarm(swarm: Swarm, settings: dict[str, Any], config: PPOConfig) -> Swarm:
    """Return `swarm` with these settings in its optimizer; ValueError for one that `config` cannot train on."""
    check_plain(swarm, "an agent's training")
    if ("observations" in swarm.collections) != config.normalize_observations:
        had = f"normalize_observations={config.normalize_observations} came for agents that were made otherwise"
        raise ValueError(f"{had}: give what they were made with.")
    if swarm.schedule is not None:
        raise ValueError("An agent's training follows no schedule of epochs: name the settings in PPOConfig(anneal=).")
    return with_hyperparameters(swarm, **{key: settings[name] for name, key in IN_OPTIMIZER.items()})


def into_optimizer(opt_state: Any, settings: dict[str, Any]) -> Any:
    """Return one member's optimizer state with these settings in it."""
    values = {key: settings[name] for name, key in IN_OPTIMIZER.items()}
    return optax.tree.set(opt_state, lambda path, _: getattr(path[-2], "name", None) == "hyperparams", **values)
