import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from test_agents import SHORT, Line

import turbanet as tn
from turbanet.networks.policies import Agent


def payers(members=3, outputs=1, inputs=1):
    return tn.TurbaTrainState.swarm(tn.MLP((outputs,)), optax.identity(), members, input_size=inputs)


def linear(swarm, weights):
    """The swarm whose networks pay their own weight times the observation."""
    kernel = np.reshape(weights, (-1, 1, 1)).astype(np.float32)
    return swarm.replace(params={"Dense_0": {"kernel": kernel, "bias": np.zeros((len(swarm), 1), np.float32)}})


def test_a_member_is_paid_by_its_own_network():
    rewards = linear(payers(), [1.0, -2.0, 0.5])
    env = tn.rl.Rewarded.by(Line(), rewards)
    paid = env.default_params.replace(reward=rewards.params)
    swarm = tn.TurbaTrainState.swarm(Agent(2), optax.identity(), 3, input_size=1)
    true = np.asarray(tn.rl.evaluate_agents(Line(), swarm, episodes=4))
    own = np.asarray(tn.rl.evaluate_agents(env, swarm, episodes=4, params=paid))
    alike = paid.replace(reward=linear(rewards, np.ones(3)).params)
    once = np.asarray(tn.rl.evaluate_agents(env, swarm, episodes=4, params=alike))
    np.testing.assert_allclose(own, once * np.array([[1.0], [-2.0], [0.5]]), rtol=1e-5)
    assert (own[0] != true[0]).any()


def test_one_learns_what_it_is_paid_for():
    rewards = linear(payers(2), [1.0, -1.0])  # to be far to the right, and to the left
    env = tn.rl.Rewarded.by(Line(), rewards)
    config = SHORT._replace(total_timesteps=640)
    swarm, _ = tn.rl.train_agents(
        env, config, 2, params=env.default_params.replace(reward=rewards.params), progress=False
    )
    right, left = tn.rl.evaluate_agents(Line(), swarm, episodes=4).mean(axis=1)
    assert right == 3 and left == -6  # steps to the right until it ends, to the left until its time is up


def test_the_environment_s_own_parameters_stay():
    env = tn.rl.Rewarded.by(Line(), payers())
    assert env.default_params.env == Line.default_params
    state = env.reset(jax.random.key(0), env.default_params)[1]
    assert not env.is_truncated(state, env.default_params)
    assert env.action_space(env.default_params).n == 2


@pytest.mark.parametrize(
    ("env", "rewards", "says"),
    [
        (Line(), {"outputs": 2}, "A reward is one number"),
        (Line(), {"inputs": 2}, "take another input"),
        (object(), {}, "has no reset"),
    ],
)
def test_what_cannot_pay_is_refused(env, rewards, says):
    with pytest.raises(ValueError, match=says):
        tn.rl.Rewarded.by(env, payers(**rewards))


def test_a_network_with_running_statistics_cannot_pay():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(x))

    rewards = tn.TurbaTrainState.swarm(Normed(), optax.identity(), 2, input_size=1)
    with pytest.raises(ValueError, match="by weights alone; the networks have batch_stats"):
        tn.rl.Rewarded.by(Line(), rewards)


def test_an_environment_without_parameters_is_refused():
    class Bare(Line):
        default_params = None

    with pytest.raises(ValueError, match="Bare has no default_params"):
        tn.rl.Rewarded.by(Bare(), payers())
