"""Stable-Baselines3's PPO of one agent by the settings of a `PPOConfig`, timed in a process of its own."""

import itertools
import json
import subprocess
import sys
import time

import joblib

from turbanet.ppo import PPOConfig

VECTORISED = "one process", "process per environment"


def agent(config: PPOConfig, environment: str, *, vectorised: str = VECTORISED[0], seed: int = 0):
    """Stable-Baselines3's PPO for a Gymnasium environment, as TurbaNet's agents are made.

    Its value loss is not halved, ours is: its weight is half of ours. Tanh and orthogonal weights are its defaults.
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


def seconds(config: PPOConfig, environment: str, *, vectorised: str, threads: int, updates: int) -> float:
    """Seconds that so many updates of one agent take in a process of its own, after one that warms up."""
    call = json.dumps([config._asdict(), environment, vectorised, threads, updates])
    done = subprocess.run([sys.executable, "-m", __name__, call], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"Stable-Baselines3 ended with {done.returncode}: {last}")
    return float(done.stdout.split()[-1])


def set_ups(config: PPOConfig, environment: str, *, updates: int, repeats: int):
    """Seconds of one agent's whole training, read off `updates` of them, by every set-up: a table.

    Returns
    -------
    pandas table : vectorised, threads, repeat, seconds
    """
    import pandas as pd

    whole = config.total_timesteps / (config.n_steps * config.n_envs)
    threads = sorted({1, joblib.cpu_count()})
    lines = []
    for repeat, kind, count in itertools.product(range(repeats), VECTORISED, threads):
        took = seconds(config, environment, vectorised=kind, threads=count, updates=updates)
        lines.append((kind, count, repeat, took * whole / updates))
    return pd.DataFrame(lines, columns=["vectorised", "threads", "repeat", "seconds"])


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
