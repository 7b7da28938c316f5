"""Agents with settings that others have published scores for, and other methods to train them."""

import json
import sys
import time
from functools import partial

import joblib

from study.agents import stable_baselines
from study.figures.labels import OURS
from study.measurement import timing
from study.measurement.machine import peak_mib
from study.pipeline import programs
from turbanet.ppo import PPOConfig

CARTPOLE, ACROBOT, PENDULUM = "CartPole-v1", "Acrobot-v1", "Pendulum-v1"
VMAP, SB3 = "jit(vmap(train))", "Stable-Baselines3"
CLEANRL = PPOConfig(
    lr=2.5e-4,
    n_steps=128,
    n_envs=4,
    batch_size=128,
    n_epochs=4,
    ent_coef=0.01,
    total_timesteps=500_000,
    anneal=("lr",),
    clip_values=True,
)
ZOO = {  # Stable-Baselines3's, without the noise on weights by which it explores Pendulum
    CARTPOLE: PPOConfig(
        lr=1e-3,
        n_steps=32,
        n_envs=8,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        total_timesteps=100_000,
        anneal=("lr", "clip_range"),
    ),
    ACROBOT: PPOConfig(
        n_steps=256,
        n_envs=16,
        n_epochs=4,
        gae_lambda=0.94,
        total_timesteps=1_000_000,
        normalize_observations=True,
        normalize_rewards=True,
    ),
    PENDULUM: PPOConfig(lr=1e-3, n_steps=1024, n_envs=4, gamma=0.9, total_timesteps=100_000),
}


def cart_poles(agent, steps, *, seed=0):
    """Play one greedy episode and return the cart's position and the pole's angle, (metres, radians), at these steps.

    agent : one network without a member axis. After its end an episode keeps its last state.
    """
    import gymnax
    import jax

    env, params = gymnax.make(CARTPOLE)
    key = jax.random.key(seed)
    x, world = env.reset(key, params)
    states = []
    for _ in range(max(steps) + 1):
        states.append((float(world.x), float(world.theta)))
        if env.is_terminated(world, params):
            break
        action = agent.apply_fn({"params": agent.params}, x)[0].mode()
        x, world, *_ = env.step_env(key, world, action, params)
    return [states[min(step, len(states) - 1)] for step in steps]


def methods(*, members=64, timesteps=25_600, updates=40, repeats=12, names=None):
    """Time CartPole agents by this library, as one `jit(vmap(train))` and by Stable-Baselines3, in turn.

    Every run has new processes. Its seconds are warm, in proportion to an agent's whole training: those of a swarm's
    second training of `timesteps` steps, or of `updates` updates of Stable-Baselines3 after the first.

    Returns
    -------
    pandas table : method, repeat, seconds (per agent)
    """
    import pandas as pd

    cores = joblib.cpu_count()
    swarm, sb3 = partial(_swarm, members, timesteps), partial(_stable_baselines, updates)
    one, several = stable_baselines.VECTORISED
    runs = {
        OURS: partial(swarm, devices=cores, block=8),
        VMAP: swarm,
        f"{VMAP}, process per core": partial(swarm, processes=cores),
        SB3: partial(sb3, vectorised=one, threads=1),
        f"{SB3}, all threads": partial(sb3, vectorised=one, threads=cores),
        f"{SB3}, process per environment": partial(sb3, vectorised=several, threads=1),
        f"{SB3}, process per core": partial(sb3, vectorised=one, threads=1, agents=cores),
    }
    runs = {name: runs[name] for name in names or runs}
    timing.interleave(runs, repeats=repeats, warmup=0, results=(found := {}))
    lines = [(name, turn, found[name][turn]) for turn in range(repeats) for name in runs]
    return pd.DataFrame(lines, columns=["method", "repeat", "seconds"])


def _swarm(members, timesteps, *, devices=1, block=None, processes=1):
    """Train agents in new processes at once: seconds per agent of the slowest one's second training."""
    share = members // processes
    command = [sys.executable, "-m", __name__, json.dumps([devices, block or share, share, timesteps])]
    warm = max(json.loads(one)["warm"] for one in programs.outputs(command, "Agents", processes))
    return warm / (share * processes) * CLEANRL.total_timesteps / timesteps


def _stable_baselines(updates, **kwargs):
    """Train agents by Stable-Baselines3 at once: seconds per agent."""
    seconds = stable_baselines.seconds(CLEANRL, CARTPOLE, updates=updates, **kwargs)
    return seconds / updates * CLEANRL.total_timesteps / (CLEANRL.n_steps * CLEANRL.n_envs)


def many(*, members=10_000):
    """Measure one update of many CartPole agents at the public package's defaults: seconds and peak memory, a table."""
    import pandas as pd

    config = PPOConfig()
    timesteps = config.n_steps * config.n_envs
    call = json.dumps([2, 8, members, timesteps, "public"])
    found = json.loads(programs.output([sys.executable, "-m", __name__, call], f"{members} agents"))
    costs = {"seconds": found["cold"], "megabytes": found["megabytes"]}  # a single run, with compilation
    return pd.DataFrame([{"members": members, "transitions": members * timesteps, **costs}])


PARTS = {"agents_methods": methods, "agents_many": many}


def _main(devices, block, members, timesteps, which="cleanrl"):
    """Train, twice at CleanRL's settings, and print the seconds of each run and the process's peak memory as JSON."""
    import turbanet as tn
    from turbanet.networks.policies import DualEncoderActorCritic

    tn.use_cores(devices, cache=False)
    import gymnax

    env, _ = gymnax.make(CARTPOLE)
    public = which == "public"
    config = (PPOConfig() if public else CLEANRL)._replace(total_timesteps=timesteps)
    model = DualEncoderActorCritic(2) if public else None
    seconds = []
    for _ in range(1 if public else 2):
        begin = time.perf_counter()
        tn.rl.train_agents(env, config, members, model=model, plan=tn.Plan(devices, block), progress=False)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"cold": seconds[0], "warm": seconds[-1], "megabytes": peak_mib()}))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
