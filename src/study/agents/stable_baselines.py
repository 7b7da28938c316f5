"""Stable-Baselines3's PPO for one agent with the settings of a `PPOConfig`, timed in its own process."""

import json
import sys
import time

from study.pipeline import programs
from turbanet.ppo import PPOConfig

VECTORISED = "one process", "process per environment"


def agent(config: PPOConfig, environment: str, *, vectorised: str = VECTORISED[0], seed: int = 0):
    """Make Stable-Baselines3's PPO for a Gymnasium environment with TurbaNet's settings.

    Its value loss is not halved as ours is, so its weight is half. Tanh and orthogonal weights are its defaults.
    """
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    kind = DummyVecEnv if vectorised == VECTORISED[0] else SubprocVecEnv
    env = make_vec_env(environment, n_envs=config.n_envs, vec_env_cls=kind, seed=seed)

    def setting(name):
        value = getattr(config, name)
        return (lambda left: left * value) if name in config.anneal else value

    return PPO(
        "MlpPolicy",
        env,
        learning_rate=setting("lr"),
        n_steps=config.n_steps,
        batch_size=config.batch_size,
        n_epochs=config.n_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=setting("clip_range"),
        clip_range_vf=setting("clip_range") if config.clip_values else None,
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef / 2,
        max_grad_norm=config.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}},
        device="cpu",
        seed=seed,
    )


def seconds(
    config: PPOConfig, environment: str, *, vectorised: str, threads: int, updates: int, agents: int = 1
) -> float:
    """Time `updates` updates of an agent after a warm-up update: seconds per agent, of `agents` processes at once."""
    call = json.dumps([config._asdict(), environment, vectorised, threads, updates])
    command = [sys.executable, "-m", __name__, call]
    printed = programs.outputs(command, "Stable-Baselines3", agents)
    return max(float(one.split()[-1]) for one in printed) / agents


def _main(call):
    settings, environment, vectorised, threads, updates = json.loads(call)
    import torch

    torch.set_num_threads(threads)
    config = PPOConfig(**settings)._replace(anneal=tuple(settings["anneal"]))
    trained = agent(config, environment, vectorised=vectorised)
    transitions = config.n_steps * config.n_envs
    trained.learn(transitions)
    begin = time.perf_counter()
    trained.learn(updates * transitions)
    print(time.perf_counter() - begin)
    trained.get_env().close()


if __name__ == "__main__":
    _main(sys.argv[1])
