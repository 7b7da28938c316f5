import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import turbanet as tn
from turbanet.networks.policies import Agent
from turbanet.rl import PPOConfig
from turbanet.rl.agents import new_swarm
from turbanet.rl.foraging import Foraging
from turbanet.rl.multi_agent import Together, evaluate_together, play_together, train_together
from turbanet.training import compilation

WORLD = Foraging(agents=6, size=12, sight=1, food=0.1, growth=0.005, limit=16)
SHORT = PPOConfig(lr=0.01, n_steps=16, n_envs=8, batch_size=32, n_epochs=2, total_timesteps=384)


def train(config=SHORT, world=WORLD, **how):
    return train_together(world, config, progress=False, **how)


def assert_equal(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_agents_with_a_network_each_learn_to_eat():
    swarm, _ = train(SHORT._replace(lr=0.003, total_timesteps=16 * 8 * 60))
    assert evaluate_together(WORLD, swarm).mean() > 1.3 * evaluate_together(WORLD).mean()


def test_agents_with_one_network_learn_to_eat():
    config = SHORT._replace(lr=0.003, n_envs=2, batch_size=128, total_timesteps=32 * 60)
    one, history = train(config, shared=True)
    assert len(one) == 1 and history.train_return.shape == (60, 1)
    assert evaluate_together(WORLD, one).mean() > 1.3 * evaluate_together(WORLD).mean()


def test_history_is_of_every_agent_and_update():
    swarm, history = train()
    assert len(swarm) == 6 and swarm.epoch.tolist() == [3] * 6
    assert history.train_return.shape == history.train_loss.shape == (3, 6)
    np.testing.assert_array_equal(history.episodes, 8)  # one in each copy of the world
    assert history.updates.tolist() == [3] * 6 and len(history.frame()) == 18


def test_play_shows_the_world_before_each_step():
    returns, boards = play_together(WORLD, episodes=10)
    assert returns.shape == (6, 10) and boards.food.shape == (16, 10, 12, 12) and boards.place.shape == (16, 10, 6, 2)
    steps = abs(boards.place[1:] - boards.place[:-1])
    assert np.minimum(steps, 12 - steps).sum(-1).max() == 1  # a cell at a time, over the edge too


def test_equal_calls_give_equal_bits_and_compile_once():
    swarm, _ = train()
    compiled = list(compilation._programs().values())
    again, _ = train()
    assert_equal(swarm.params, again.params)
    assert list(compilation._programs().values()) == compiled


def test_one_device_changes_roundings_alone():
    _, history = train()
    _, other = train(devices=1)
    np.testing.assert_allclose(history.train_loss[0], other.train_loss[0], rtol=1e-3, atol=1e-5)


def test_agents_learn_on():
    swarm, _ = train()
    again, _ = train(swarm=swarm)
    assert again.epoch.tolist() == [6] * 6 and (again.step == 2 * swarm.step).all()


def test_a_member_whose_rewards_are_nan_is_named_and_the_others_go_on(caplog):
    class Unfair(Foraging):
        def step(self, key, board, action):
            observation, board, reward = super().step(key, board, action)
            return observation, board, reward.at[4].set(np.nan)

    with caplog.at_level(logging.WARNING, "turbanet"):
        swarm, _ = train(world=Unfair(**vars(WORLD)))
    assert "member 4 are NaN or infinite from update 0 on" in caplog.text and "its weights are lost" in caplog.text
    finite = np.isfinite(jax.tree.leaves(swarm.params)[0]).reshape(6, -1).all(1)
    assert finite.tolist() == [True, True, True, True, False, True]


def test_a_second_call_acts_in_other_worlds(monkeypatch):
    worlds, begun = Together.worlds, []
    monkeypatch.setattr(Together, "worlds", lambda *given: begun.append(worlds(*given)) or begun[-1])
    swarm, _ = train()
    train(swarm=swarm)
    assert not np.array_equal(begun[0][0], begun[1][0])


def test_what_a_world_reads_and_that_changed_counts():
    factor = [1.0]

    class Paying(Foraging):
        def step(self, key, state, action):
            observation, state, reward = super().step(key, state, action)
            return observation, state, factor[0] * reward

    world = Paying(agents=2, size=4, sight=1, food=0.5, growth=0.1, limit=8)
    before = evaluate_together(world, episodes=2)
    factor[0] = 2.0
    assert before.any()
    np.testing.assert_allclose(evaluate_together(world, episodes=2), 2 * before, rtol=1e-6)


def test_bad_input_is_refused():
    swarm, _ = train()
    with pytest.raises(ValueError, match="A member is an agent: the swarm has 6, and 1 act"):
        train(swarm=swarm, shared=True)
    with pytest.raises(ValueError, match="object has no reset, step, agents, actions, limit"):
        train(world=object())
    with pytest.raises(ValueError, match="batch_size 900 is more than .* 128 transitions times 6 agents"):
        train(SHORT._replace(batch_size=900), shared=True)
    for actions in (3, 9):
        with pytest.raises(ValueError, match=rf"Foraging takes 5 action\(s\), the network's policy is over {actions}"):
            train(model=Agent(actions, hidden=(4,)))
    other = new_swarm(Agent(3, hidden=(4,)), SHORT, 6, (18,), 0)  # nine cells in sight, of two features each
    with pytest.raises(ValueError, match=r"Foraging takes 5 action\(s\), the network's policy is over 3"):
        evaluate_together(WORLD, other)
    with pytest.raises(ValueError, match="6 agents act in this world, by a network each or by one; got 2"):
        evaluate_together(WORLD, swarm[[0, 1]])
    with pytest.raises(ValueError, match="episodes must be a whole number"):
        evaluate_together(WORLD, episodes=0)
    for call in (lambda: train(seed=2**32), lambda: evaluate_together(WORLD, seed=-1)):
        with pytest.raises(ValueError, match="seed must be one int from 0 to 2147483646"):
            call()


def test_agents_learn_in_float64():
    with jax.enable_x64(True):
        _, history = train(model=Agent(WORLD.actions, hidden=(4,)))
        assert history.train_loss.shape == (3, 6) and np.isfinite(history.train_loss).all()


class Team:
    """Two agents; what it returns is as its fields say."""

    agents, actions, limit = 2, 3, 4

    def __init__(self, observed=(2, 3), rewards=(2,), more=()):
        self.observed, self.rewards, self.more = observed, rewards, more

    def reset(self, key):
        return jnp.zeros(self.observed), jnp.int32(0)

    def step(self, key, state, actions):
        return jnp.zeros(self.observed), state + 1, jnp.ones(self.rewards), *self.more


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (Team(rewards=()), r"step returns .*: it must be \(observations \[2, 3\], the world's state, rewards \[2\]\)"),
        (
            Team(more=(False,)),
            r"step returns .*: it must be \(observations \[2, 3\], the world's state, rewards \[2\]\)",
        ),
        (Team(observed=(3,)), r"reset returns .*: it must be \(observations \[2, ...\], the world's state\)"),
    ],
)
def test_a_world_that_returns_something_else_is_told_what(world, says):
    for call in (evaluate_together, train_together):
        with pytest.raises(ValueError, match=says):
            call(world)


def test_who_acts_is_a_swarm_made_for_the_world():
    logits = tn.TurbaTrainState.swarm(tn.MLP((4, 3)), optax.sgd(0.1), 2, sample_input=np.zeros((1, 3)))
    np.testing.assert_array_equal(evaluate_together(Team(), logits, episodes=3), np.full((2, 3), 4))
    others = tn.TurbaTrainState.swarm(tn.MLP((4, 3)), optax.sgd(0.1), 2, sample_input=np.zeros((1, 5)))
    with pytest.raises(ValueError, match=r"Team gives observations \(3,\), the agents were made for \(5,\)"):
        evaluate_together(Team(), others)
    with pytest.raises(ValueError, match="The swarm is a TurbaTrainState; got tuple"):
        evaluate_together(Team(), (logits, None))
