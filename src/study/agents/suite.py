"""Agents by settings that others have published scores for, and other ways to train them."""

import json
import subprocess
import sys
import time

from study.agents import stable_baselines
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
ZOO = {  # of Stable-Baselines3, but for the noise on weights that it explores Pendulum with
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
WAYS = {"TurbaNet": (2, 8), "jit(vmap(train))": (1, None), "jit(vmap(train)), two processes": (1, None)}


def cart_poles(agent, steps, *, seed=0):
    """Where the cart is and how the pole leans, (metres, radians), at these steps of one greedy episode of an agent.

    agent : one network, without the member axis. An episode that has ended stands still.
    """
    import gymnax
    import jax

    env, params = gymnax.make(CARTPOLE)
    key = jax.random.key(seed)
    x, world = env.reset(key, params)
    seen = []
    for _ in range(max(steps) + 1):
        seen.append((float(world.x), float(world.theta)))
        if env.is_terminated(world, params):
            break
        action = agent.apply_fn({"params": agent.params}, x)[0].mode()
        x, world, *_ = env.step_env(key, world, action, params)
    return [seen[min(step, len(seen) - 1)] for step in steps]


def setups(*, updates=20, repeats=3):
    """Stable-Baselines3's seconds for one agent of CartPole by every set-up, for both settings: a table."""
    import pandas as pd

    cases = {"CleanRL": CLEANRL, "zoo": ZOO[CARTPOLE]}
    tables = [
        stable_baselines.set_ups(config, CARTPOLE, updates=updates, repeats=repeats).assign(settings=name)
        for name, config in cases.items()
    ]
    return pd.concat(tables, ignore_index=True)


def ways(*, members=64, timesteps=51_200, repeats=3, names=tuple(WAYS)):
    """Seconds for an agent of CartPole by this library and by `jit(vmap(train))`, of the same program: a table.

    The last way is two processes with half of the agents each, at once; each process of each way is a fresh one.
    """
    import pandas as pd

    lines = []
    for repeat in range(repeats):
        for way in names:
            devices, block = WAYS[way]
            processes = 2 if "processes" in way else 1
            share = members // processes
            calls = [json.dumps([devices, block or share, share, timesteps]) for _ in range(processes)]
            command = [sys.executable, "-m", __name__]
            running = [subprocess.Popen([*command, call], stdout=subprocess.PIPE, text=True) for call in calls]
            found = [json.loads(process.communicate()[0]) for process in running]
            if any(process.returncode for process in running):
                raise RuntimeError(f"{way} ended with {[process.returncode for process in running]}; see above.")
            warm, cold = (max(each[kind] for each in found) for kind in ("warm", "cold"))
            whole = CLEANRL.total_timesteps / timesteps / members
            lines.append((way, repeat, warm * whole, cold - warm, max(each["megabytes"] for each in found)))
            print(f"{way}: {lines[-1][2]:.2f} s an agent", flush=True)
    return pd.DataFrame(lines, columns=["way", "repeat", "seconds", "startup_seconds", "megabytes"])


def many(*, members=10_000):
    """One update of so many agents of CartPole at the public package's defaults: seconds and peak memory, a table."""
    import pandas as pd

    config = PPOConfig()
    timesteps = config.n_steps * config.n_envs
    call = json.dumps([2, 8, members, timesteps, "public"])
    done = subprocess.run([sys.executable, "-m", __name__, call], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{members} agents ended with {done.returncode}: {last}")
    found = json.loads(done.stdout)
    costs = {"seconds": found["cold"], "megabytes": found["megabytes"]}  # it runs once, compilation and all
    return pd.DataFrame([{"members": members, "transitions": members * timesteps, **costs}])


PARTS = {"agents_setups": setups, "agents_ways": ways, "agents_many": many}


def _main(devices, block, members, timesteps, which="cleanrl"):
    """Train twice, if that is short, and say what each took and the most memory that the process had."""
    import resource

    import turbanet as tn
    from turbanet.networks.policies import DualEncoderActorCritic

    tn.use_cores(devices)
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
