"""Agents with settings that others have published scores for, and other methods to train them."""

import json
import subprocess
import sys
import time

from study.agents import stable_baselines
from study.pipeline import programs
from turbanet.ppo import PPOConfig

CARTPOLE, ACROBOT, PENDULUM = "CartPole-v1", "Acrobot-v1", "Pendulum-v1"
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
METHODS = {"TurbaNet": (2, 8), "jit(vmap(train))": (1, None), "jit(vmap(train)), two processes": (1, None)}


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


def setups(*, updates=20, repeats=3):
    """Time Stable-Baselines3's training of one CartPole agent by every set-up with both settings: a table."""
    import pandas as pd

    cases = {"CleanRL": CLEANRL, "zoo": ZOO[CARTPOLE]}
    tables = [
        stable_baselines.set_ups(config, CARTPOLE, updates=updates, repeats=repeats).assign(settings=name)
        for name, config in cases.items()
    ]
    return pd.concat(tables, ignore_index=True)


def methods(*, members=64, timesteps=51_200, repeats=3, names=tuple(METHODS)):
    """Time CartPole agents by this library and by `jit(vmap(train))` of the same program: a table, seconds per agent.

    The last method runs two processes at once with half of the agents each; every run has new processes.
    """
    import pandas as pd

    lines = []
    for repeat in range(repeats):
        for method in names:
            devices, block = METHODS[method]
            processes = 2 if "processes" in method else 1
            share = members // processes
            calls = [json.dumps([devices, block or share, share, timesteps]) for _ in range(processes)]
            command = [sys.executable, "-m", __name__]
            running = [subprocess.Popen([*command, call], stdout=subprocess.PIPE, text=True) for call in calls]
            found = [json.loads(process.communicate()[0]) for process in running]
            if any(process.returncode for process in running):
                raise RuntimeError(f"{method} ended with {[process.returncode for process in running]}; see above.")
            warm, cold = (max(each[kind] for each in found) for kind in ("warm", "cold"))
            whole = CLEANRL.total_timesteps / timesteps / members
            lines.append((method, repeat, warm * whole, cold - warm, max(each["megabytes"] for each in found)))
            print(f"{method}: {lines[-1][2]:.2f} s an agent", flush=True)
    return pd.DataFrame(lines, columns=["method", "repeat", "seconds", "startup_seconds", "megabytes"])


def many(*, members=10_000):
    """Measure one update of many CartPole agents at the public package's defaults: seconds and peak memory, a table."""
    import pandas as pd

    config = PPOConfig()
    timesteps = config.n_steps * config.n_envs
    call = json.dumps([2, 8, members, timesteps, "public"])
    found = json.loads(programs.output([sys.executable, "-m", __name__, call], f"{members} agents"))
    costs = {"seconds": found["cold"], "megabytes": found["megabytes"]}  # a single run, with compilation
    return pd.DataFrame([{"members": members, "transitions": members * timesteps, **costs}])


PARTS = {"agents_setups": setups, "agents_methods": methods, "agents_many": many}


def _main(devices, block, members, timesteps, which="cleanrl"):
    """Train, twice at CleanRL's settings, and print the seconds of each run and the process's peak memory as JSON."""
    import resource

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
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cold": seconds[0], "warm": seconds[-1], "megabytes": megabytes}))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
