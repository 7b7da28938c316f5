import json

import numpy as np
import pytest

import turbanet as tn
from study.agents import suite as agents_suite
from turbanet.ppo import Agent, PPOConfig


def test_settings_are_the_published_ones():
    # CleanRL's ppo.py and the zoo's hyperparameters/ppo.yml
    c, zoo = agents_suite.CLEANRL, agents_suite.ZOO
    assert (c.n_envs, c.n_steps, c.batch_size, c.n_epochs, c.lr) == (4, 128, 128, 4, 2.5e-4)
    assert (c.gamma, c.gae_lambda, c.clip_range) == (0.99, 0.95, 0.2)
    assert (c.ent_coef, c.vf_coef, c.max_grad_norm) == (0.01, 0.5, 0.5)
    cart = zoo[agents_suite.CARTPOLE]
    assert (cart.n_envs, cart.n_steps, cart.batch_size, cart.n_epochs, cart.gae_lambda) == (8, 32, 256, 20, 0.8)
    pendulum = zoo[agents_suite.PENDULUM]
    assert (pendulum.n_steps, pendulum.gamma, pendulum.lr, pendulum.n_epochs) == (1024, 0.9, 1e-3, 10)


def test_cart_poles_stand_still_after_their_end():
    swarm = tn.TurbaTrainState.swarm(Agent(2), PPOConfig().optimizer, 1, input_size=4)
    states = agents_suite.cart_poles(swarm.get_state(0), [0, 1, 300, 400])
    assert abs(states[0][1]) < 0.05 and states[2] == states[3] and abs(states[2][1]) > 0.2


def test_methods_are_timed_in_turn_per_agent_of_the_whole_training(monkeypatch):
    whole, update = agents_suite.CLEANRL.total_timesteps, 4 * 128
    monkeypatch.setattr(agents_suite.joblib, "cpu_count", lambda: 2)
    monkeypatch.setattr(agents_suite.stable_baselines, "seconds", lambda *_, agents=1, **__: 6 / agents)
    calls = []

    def output(command, name):
        calls.append(json.loads(command[-1]))
        return json.dumps({"cold": 9, "warm": float(len(calls))})

    monkeypatch.setattr(agents_suite.programs, "output", output)
    names = ["TurbaNet", "Stable-Baselines3", "Stable-Baselines3, process per core"]
    table = agents_suite.methods(members=10, timesteps=2 * update, updates=3, repeats=2, names=names)
    assert table.method.tolist() == 2 * names and table.repeat.tolist() == [0] * 3 + [1] * 3
    trained, one, each = table.seconds.to_numpy().reshape(2, 3).T
    np.testing.assert_allclose(trained, np.array([1, 2]) / 10 * whole / (2 * update))
    np.testing.assert_allclose(one, 6 / 3 * whole / update)
    np.testing.assert_allclose(each, one / 2)
    assert calls == [[2, 8, 10, 2 * update]] * 2
    calls.clear()
    halves = "jit(vmap(train)), process per core"
    table = agents_suite.methods(members=10, timesteps=2 * update, repeats=1, names=[halves])
    assert calls == [[1, 5, 5, 2 * update]] * 2  # two processes with half of the agents each
    np.testing.assert_allclose(table.seconds, 2 / 10 * whole / (2 * update))  # the slower one
    table = agents_suite.methods(members=11, timesteps=2 * update, repeats=1, names=[halves])
    np.testing.assert_allclose(table.seconds, 4 / 10 * whole / (2 * update))  # one agent fewer trains


@pytest.mark.thorough
def test_agents_are_trained_in_processes_of_their_own():
    table = agents_suite.methods(members=2, timesteps=1024, repeats=1, names=["jit(vmap(train)), process per core"])
    assert np.isfinite(table.seconds).all() and (table.seconds > 0).all()
