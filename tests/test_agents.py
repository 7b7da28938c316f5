import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEVICES
from flax import linen as nn, struct
from tiers import first

import turbanet as tn
from turbanet.networks.policies import Agent, Gaussian, Normalised, running
from turbanet.rl import PPOConfig, environments, evaluate_agents, train_agents
from turbanet.rl.agents import new_swarm
from turbanet.training import compilation

SHORT = PPOConfig(lr=0.01, n_steps=8, n_envs=2, batch_size=8, n_epochs=2, gamma=0.9, total_timesteps=160, ent_coef=0.01)
BLOCK = tn.Plan(1, block=2)


@struct.dataclass
class Where:
    place: Any
    time: Any


@struct.dataclass
class Params:
    reward: Any = 1.0
    limit: Any = 6
    bonus: Any = 0.0


class Line:
    """A walk: action 1 goes right and pays, 0 goes back and costs; it ends at 3 by its rules, at `limit` by time.

    Each step pays the bonus, too.
    """

    default_params = Params()
    space: Any = SimpleNamespace(n=2)

    def action_space(self, params):
        return self.space

    def reset(self, key, params):
        place = jax.random.uniform(key, (), minval=-0.1, maxval=0.1)
        return place[None], Where(place, jnp.int32(0))

    def step_env(self, key, state, action, params):
        move = jnp.where(action == 1, 1.0, -1.0)
        state = Where(state.place + move, state.time + 1)
        return state.place[None], state, params.reward * move + params.bonus, state.place > 2.5, {}

    def is_truncated(self, state, params):
        return state.time >= params.limit


class Target(Line):
    """One step an episode; what is paid is minus the squared distance of the action to 0.5."""

    space = SimpleNamespace(low=-1.0, high=1.0, shape=(1,))

    def step_env(self, key, state, action, params):
        return state.place[None], state, -((action[0] - 0.5) ** 2), jnp.bool(True), {}


def train(env=None, config=SHORT, members=3, **how):
    return train_agents(env or Line(), config, members, **{"progress": False, "plan": BLOCK} | how)


def assert_equal(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.thorough  # the agents of two tests below learn it too: by worlds of their own, and until they solve it
def test_agents_learn_what_pays():
    swarm, history = train(members=4, config=SHORT._replace(total_timesteps=1600), evaluations=2, episodes=5)
    assert history.evaluation.shape == (2, 4)
    np.testing.assert_array_equal(history.evaluation[-1], 3)
    np.testing.assert_array_equal(evaluate_agents(Line(), swarm, episodes=7), np.full((4, 7), 3.0))


def test_continuous_actions_learn_their_target():
    config = SHORT._replace(n_envs=16, batch_size=64, total_timesteps=8 * 16 * 120, ent_coef=0.0)
    swarm, _ = train(Target(), config, members=2)
    policy, _ = tn.predict(swarm, np.zeros((1, 1), np.float32))
    np.testing.assert_allclose(policy.mean, 0.5, atol=0.1)


def test_the_history_counts_episodes_and_their_returns():
    _, history = train(params=Params(reward=0.0, bonus=2.0, limit=2))  # too short to reach the end
    np.testing.assert_array_equal(history.episodes, 8)  # two environments of eight steps
    np.testing.assert_array_equal(history.train_return, 4)
    assert history.steps == 16 and history.updates.tolist() == [10, 10, 10]
    assert len(history.frame()) == 30 and history.frame().steps.max() == 160


class Worth(nn.Module):
    """A policy over two actions; every state is worth 3."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x), self.param("worth", nn.initializers.constant(3.0), (1,)) * jnp.ones(len(x))


def test_an_episode_cut_by_time_goes_on_in_value_and_one_ended_by_its_rules_does_not():
    class Ends(Line):
        def step_env(self, key, state, action, params):
            *parts, _, info = super().step_env(key, state, action, params)
            return *parts, parts[1].time >= 2, info

    paid = Params(reward=0.0, bonus=1.0, limit=2)
    one = SHORT._replace(batch_size=16, n_epochs=1, gae_lambda=0.0, total_timesteps=16)
    for env, goes_on in ((Line(), 1), (Ends(), 0)):
        _, history = train(env, one, members=1, model=Worth(), params=paid)
        # Half the squared errors of returns: every second step ends an episode of two.
        expected = (0.5 * (3 - 1 - 0.9 * 3) ** 2 + 0.5 * (3 - 1 - goes_on * 0.9 * 3) ** 2) / 2
        np.testing.assert_allclose(history.frame().value_loss, [expected], rtol=1e-5)


@pytest.mark.optimized
def test_an_agent_of_a_swarm_equals_the_agent_trained_alone():
    swarm, history = train(members=5)
    alone = tn.TurbaTrainState.swarm(Agent(2), SHORT.optimizer, 5, sample_input=np.zeros((1, 1)))[[3]]
    one, of_one = train(members=alone)
    assert_equal(swarm[[3]].params, one.params)
    np.testing.assert_array_equal(history.train_loss[:, 3:4], of_one.train_loss)


@pytest.mark.parametrize(("devices", "block"), first(1, [(DEVICES, 3), (1, 1)]))
def test_blocks_and_devices_change_roundings_alone(devices, block):
    _, history = train(members=5, config=SHORT._replace(total_timesteps=48))
    _, other = train(members=5, config=SHORT._replace(total_timesteps=48), plan=tn.Plan(devices, block))
    np.testing.assert_allclose(other.train_loss, history.train_loss, rtol=1e-4, atol=1e-5)


def test_settings_of_each_member_equal_a_swarm_with_them():
    own = {
        "lr": [0.01, 0.1, 0.0],
        "gamma": [0.5, 0.9, 0.9],
        "clip_range": [0.2, 0.1, 0.2],
        "max_grad_norm": [0.5, 1, 2],
    }
    swarm, history = train(config=SHORT._replace(**{name: np.array(value) for name, value in own.items()}))
    for position in range(3):
        config = SHORT._replace(**{name: value[position] for name, value in own.items()})
        _, of_alone = train(config=config)
        np.testing.assert_allclose(history.train_loss[:, position], of_alone.train_loss[:, position], rtol=1e-5)
    begun, _ = train(config=SHORT._replace(total_timesteps=16, lr=0.0))
    assert_equal(swarm.get_state(2).params, begun.get_state(2).params)  # which learned nothing


def test_settings_are_annealed_to_zero():
    swarm, _ = train(config=SHORT._replace(anneal=("lr",)))
    np.testing.assert_allclose(tn.hyperparameters(swarm)["learning_rate"], 0.01 * (1 - 9 / 10), rtol=1e-5)


def test_each_member_has_an_environment_of_its_own():
    reward = np.array([1.0, 2.0, -1.0], np.float32)
    swarm, _ = train(params=Params(reward=reward), config=SHORT._replace(total_timesteps=1600))
    paid = evaluate_agents(Line(), swarm, params=Params(reward=reward), episodes=3, plan=BLOCK).mean(1)
    np.testing.assert_array_equal(paid, [3, 6, 6])  # the third goes left, until its time is up


@pytest.mark.parametrize(("updates", "evaluations"), first(1, [(11, 3), (6, 4), (3, 3)]))
def test_agents_make_the_updates_asked_for_whatever_the_evaluations(updates, evaluations):
    config = SHORT._replace(total_timesteps=16 * updates, anneal=("lr",))
    expected, whole = train(config=config)
    swarm, history = train(config=config, evaluations=evaluations, episodes=2)
    assert history.updates.tolist() == [updates] * 3
    assert history.evaluation.shape == (evaluations, 3)
    np.testing.assert_allclose(history.train_loss, whole.train_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), swarm.params, expected.params)


def test_a_solved_member_stops_and_keeps_its_weights():
    how = {"evaluations": 10, "episodes": 3, "config": SHORT._replace(total_timesteps=1600)}
    reward = np.array([1.0, 0.1, 1.0], np.float32)
    _, history = train(params=Params(reward=reward), solved=2.5, **how)
    assert history.updates[1] == 100 and (history.updates[[0, 2]] < 100).all()
    for member in (0, 2):
        last = history.updates[member] // 10
        assert history.evaluation[last - 1, member] == 3 and np.isnan(history.evaluation[last:, member]).all()


def test_a_member_whose_rewards_are_nan_is_named_and_the_others_go_on(caplog):
    good, _ = train()
    with caplog.at_level(logging.WARNING, "turbanet"):
        swarm, history = train(params=Params(reward=np.array([1.0, np.nan, 1.0], np.float32)))
    assert history.updates.tolist() == [10, 1, 10]
    assert "member 1 are NaN or infinite from update 0 on" in caplog.text
    assert np.isfinite(jax.tree.leaves(swarm.params)[0]).all()
    for member in (0, 2):
        assert_equal(swarm.get_state(member).params, good.get_state(member).params)


@pytest.mark.optimized
def test_a_training_that_was_killed_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    config = SHORT._replace(normalize_observations=True, normalize_rewards=True)
    whole, expected = train(config=config)
    advance, calls = tn.training.run.Training.advance, []

    def dies(run):
        calls.append(run.done)
        if len(calls) > 4:
            raise RuntimeError("killed")
        advance(run)

    monkeypatch.setattr(tn.training.run.Training, "advance", dies)
    with pytest.raises(RuntimeError, match="killed"):
        train(config=config, checkpoints=tmp_path)
    monkeypatch.undo()
    swarm, history = train(config=config, checkpoints=tmp_path)
    assert_equal(swarm, whole)
    np.testing.assert_array_equal(history.train_loss, expected.train_loss)
    with pytest.raises(ValueError, match="another training: settings was"):
        train(config=config._replace(n_epochs=3), checkpoints=tmp_path)
    with pytest.raises(ValueError, match="another training"):
        train(config=config, params=Params(limit=5), checkpoints=tmp_path)


def test_normalised_observations_are_what_numpy_says():
    random = np.random.default_rng(0)
    parts = [random.normal(3, 2, (10, 2)), random.normal(-1, 5, (30, 2))]
    seen = {"mean": jnp.zeros(2), "variance": jnp.ones(2), "count": jnp.zeros(())}
    for part in parts:
        seen = running(seen, jnp.asarray(part))
    every = np.concatenate(parts)
    np.testing.assert_allclose(seen["mean"], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen["variance"], every.var(0), rtol=1e-5)

    class Sees(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x

    out = Normalised(Sees()).apply({"observations": seen}, jnp.asarray(every))
    np.testing.assert_allclose(out, (every - every.mean(0)) / every.std(0), rtol=1e-4, atol=1e-5)


def test_agents_learn_on_from_where_they_were():
    swarm, _ = train()
    again, _ = train(members=swarm)
    assert (again.step == 2 * swarm.step).all() and (again.epoch == 20).all()


def test_play_stops_with_the_episode():
    class Long(Line):
        def step_env(self, key, state, action, params):
            return jnp.zeros(1), Where(state.place, state.time + 1), 1.0, jnp.bool(False), {}

    swarm, _ = train(config=SHORT._replace(total_timesteps=16))
    returns = evaluate_agents(Long(), swarm, params=Params(limit=9), episodes=2, plan=BLOCK)
    np.testing.assert_array_equal(returns, 9)


def test_a_seed_of_episodes_is_one_that_int32_holds():
    swarm, _ = train(config=SHORT._replace(total_timesteps=16))
    with pytest.raises(ValueError, match="seed must be one int from 0 to 2147483646, got 4294967296"):
        evaluate_agents(Line(), swarm, seed=2**32)


def test_equal_calls_compile_once():
    train()
    compiled = list(compilation._programs().values())
    train(config=SHORT._replace(lr=0.02, gamma=0.5, total_timesteps=320))
    assert list(compilation._programs().values()) == compiled


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"env": object()}, "object has no reset, step_env, is_truncated, action_space"),
        ({"config": SHORT._replace(batch_size=17)}, "batch_size 17 is more than a rollout of n_steps . n_envs = 16"),
        ({"config": SHORT._replace(total_timesteps=15)}, "15 is less than one rollout of 16"),
        ({"config": SHORT._replace(n_epochs=0)}, "n_epochs must be a whole number"),
        ({"config": SHORT._replace(anneal=("learning_rate",))}, "anneal names learning_rate; known: lr, gamma"),
        ({"config": SHORT._replace(lr=[0.1, 0.2])}, "lr must be one number or 3 of them"),
        ({"config": SHORT._replace(lr=-0.1)}, "lr must be numbers of at least 0"),
        ({"config": SHORT._replace(gamma=99)}, "gamma must be numbers from 0 to 1, got 99"),
        ({"params": Params(limit=np.arange(2))}, r"params.limit must be of shape \(\), or \(3,\)"),
        ({"params": {"limit": 3}}, "params are Params"),
        ({"solved": 3.0}, "give evaluations="),
        ({"solved": np.array([1.0, 2.0]), "evaluations": 2}, "solved is one mean return, for all members, or None"),
        ({"solved": float("nan"), "evaluations": 2}, "solved is one mean return, for all members, or None"),
        ({"evaluations": 11}, "There are 10 updates"),
        ({"plan": "auto"}, "plan must be a Plan"),
        ({"on_interrupt": "stop"}, "on_interrupt must be"),
        ({"members": 0}, "swarm_size"),
        (lambda: {"members": new_swarm(Agent(2), SHORT, 3, (1,), 0), "model": Agent(2)}, "A model came with a swarm"),
        ({"seed": 2**32}, "seed must be one int .* from 0 to 2147483646, got 4294967296"),
    ],
)
def test_bad_input_is_refused(how, words):
    how = how() if callable(how) else how  # a swarm is made in the test
    with pytest.raises(ValueError, match=words):
        train(**how)


SPACES = [
    SimpleNamespace(low=0, high=1, shape=(2, 2)),
    SimpleNamespace(spaces=[]),
    SimpleNamespace(n=3, shape=(3,)),  # as MultiBinary has them
    SimpleNamespace(n=2, shape=(), start=1),
]


class Counted(Line):
    """A walk whose parameters are a dict."""

    default_params: ClassVar = {"limit": 6, "bonus": 0.0}

    def is_truncated(self, state, params):
        return state.time >= params["limit"]

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, action, Params(bonus=params["bonus"]))


@pytest.mark.parametrize("params", [{"limit": 3}, {"limit": 3, "bonus": 1.0, "wind": 2.0}])
def test_parameters_are_the_entries_of_the_default_ones(params):
    with pytest.raises(ValueError, match="params must have the entries of env.default_params, {'limit': 6"):
        train(env=Counted(), params=params)
    train(env=Counted(), params={"limit": 3, "bonus": [0.0, 1.0, 2.0]})


@pytest.mark.parametrize("space", SPACES)
def test_an_action_space_that_is_not_supported_is_refused(space):
    env = Line()
    env.space = space
    with pytest.raises(ValueError, match="Actions are numbered from 0, Discrete.n., or a Box of one axis; Line takes"):
        environments.actions(env, None)


def test_a_network_may_have_a_policy_alone():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.identity(), 3, input_size=1)
    alone = evaluate_agents(Line(), swarm, episodes=5, plan=BLOCK)
    paired = swarm.replace(apply_fn=lambda variables, x: (swarm.apply_fn(variables, x), x[..., 0]))
    np.testing.assert_array_equal(alone, evaluate_agents(Line(), paired, episodes=5, plan=BLOCK))


@pytest.mark.parametrize(
    ("env", "outputs", "says"),
    [
        (Line, 3, "Line takes 2 action\\(s\\), the network's policy is over 3"),
        (Target, 1, "Target takes a distribution over numbers, such as Gaussian; the network returned Categorical"),
    ],
)
def test_a_policy_over_other_actions_is_refused(env, outputs, says):
    swarm = tn.TurbaTrainState.swarm(tn.MLP((4, outputs)), optax.identity(), 3, input_size=1)
    with pytest.raises(ValueError, match=says):
        evaluate_agents(env(), swarm, episodes=5)


def test_an_agent_for_other_actions_is_not_trained():
    with pytest.raises(ValueError, match="Line takes logits of numbered actions; the network returned Gaussian"):
        train_agents(Line(), SHORT, 2, model=Agent(1, continuous=True), progress=False)


class PolicyAlone(nn.Module):
    @nn.compact
    def __call__(self, x):
        mean = nn.Dense(1)(x)
        return Gaussian(mean, jnp.zeros_like(mean))


@pytest.mark.parametrize("model", [tn.MLP((1,)), PolicyAlone()], ids=["array", "Gaussian"])
def test_a_network_without_values_does_not_learn(model):
    with pytest.raises(ValueError, match="A network that learns returns \\(policy, values\\), not"):
        train_agents(Target(), SHORT, 2, model=model, progress=False)


class OfGymnasium:
    """The shape of a gymnasium.Env: spaces as attributes, a step on the host."""

    action_space = observation_space = SimpleNamespace(n=2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3), {}

    def step(self, action):
        return np.zeros(3), 0.0, False, False, {}


@pytest.mark.parametrize("env", [OfGymnasium(), OfGymnasium], ids=["env", "class"])
def test_an_environment_of_gymnasium_is_told_what_is_expected(env):
    expected = "an object with reset, step_env, is_truncated, action_space; .*OfGymnasium has no step_env, .* gymnax's"
    for call in (lambda: train_agents(env, SHORT), lambda: evaluate_agents(env, None)):
        with pytest.raises(ValueError, match=expected):
            call()


class Keyed(Line):
    """A random walk, whose state holds a key."""

    def reset(self, key, params):
        observation, state = super().reset(key, params)
        return observation, (state, key)

    def step_env(self, key, state, action, params):
        own, drawn = jax.random.split(state[1])
        observation, where, reward, ended, info = super().step_env(key, state[0], action, params)
        return observation + jax.random.normal(drawn), (where, own), reward, ended, info

    def is_truncated(self, state, params):
        return super().is_truncated(state[0], params)


def test_a_state_may_hold_a_key(tmp_path):
    _, history = train(Keyed(), checkpoints=tmp_path)
    _, again = train(Keyed())
    np.testing.assert_array_equal(history.train_loss, again.train_loss)


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dropout(0.5, deterministic=not train)(nn.tanh(nn.Dense(8)(x)))
        return nn.Dense(2)(x), nn.Dense(1)(x)[..., 0]


def test_a_network_of_normalised_observations_knows_whether_it_trains(caplog):
    train(model=Drops(), config=SHORT._replace(normalize_observations=True))
    assert "never draws" not in caplog.text
    pair = (lambda key, x: {"w": jnp.zeros(1)}, lambda params, x: x)
    with pytest.raises(ValueError, match="normalize_observations takes a Flax module as model=, got a pair"):
        train(model=pair, config=SHORT._replace(normalize_observations=True))


class Whole(Line):
    def reset(self, key, params):
        observation, state = super().reset(key, params)
        return observation, state.replace(place=jnp.int32(0))


class Wide(Line):
    def step_env(self, key, state, action, params):
        observation, *rest = super().step_env(key, state, action, params)
        return jnp.tile(observation, 2), *rest


class Alone(Line):
    def reset(self, key, params):
        return super().reset(key, params)[0]


class More(Line):
    def reset(self, key, params):
        observation, state = super().reset(key, params)
        return observation, (state,)

    def step_env(self, key, state, action, params):
        observation, where, *rest = super().step_env(key, state[0], action, params)
        return observation, (where, jnp.int32(0)), *rest


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Whole(), r"Whole: reset returns state.place int32\[\], step_env state.place float32\[\]: make them equal"),
        (Wide(), r"Wide: reset returns observation \[1\], step_env observation \[2\]"),
        (Alone(), r"reset returns \(observation, state\); Alone's returned"),
        (More(), "More: reset returns 2 arrays as the state, step_env 3"),
        (Line, "The environment is an object; got the class Line: make one"),
    ],
)
def test_an_environment_that_changes_its_types_is_refused(env, message):
    with pytest.raises(ValueError, match=message):
        train(env)


def test_agents_for_other_observations_and_a_seed_beside_them_are_refused():
    swarm, _ = train(config=SHORT._replace(total_timesteps=16))
    wide = tn.TurbaTrainState.swarm(tn.rl.Agent(2), SHORT.optimizer, 3, input_size=3)
    for call in (lambda: train(members=wide), lambda: evaluate_agents(Line(), wide)):
        with pytest.raises(ValueError, match=r"Line gives observations \(1,\), the agents were made for \(3,\)"):
            call()
    with pytest.raises(ValueError, match="A seed came with a swarm, which has its own"):
        train(members=swarm, seed=3)
    with pytest.raises(ValueError, match="config is a PPOConfig, .*; got {'n_steps': 8}"):
        train(config={"n_steps": 8})


class Parts(Line):
    def reset(self, key, params):
        place, state = super().reset(key, params)
        return {"place": place, "time": state.time}, state


class Six(Line):
    def step_env(self, key, state, action, params):
        *parts, info = super().step_env(key, state, action, params)
        return *parts, True, info  # the fifth of Gymnasium's is `truncated`


def test_a_step_of_six_values_is_refused():
    with pytest.raises(ValueError, match="truncation told by is_truncated; Six's returned 6 values"):
        train_agents(Six(), SHORT)


def test_an_observation_of_one_number_is_refused():
    class Number(Line):
        def reset(self, key, params):
            observation, state = super().reset(key, params)
            return observation[0], state

    with pytest.raises(ValueError, match=r"An observation has at least one axis; Number gives one number: return"):
        train_agents(Number(), SHORT)


class Shaped(Line):
    """A walk whose observation, reward and end have these forms."""

    def __init__(self, observation=(1,), reward=(), truncated=bool):
        self.forms = observation, reward, truncated

    def reset(self, key, params):
        place, state = super().reset(key, params)
        return jnp.full(self.forms[0], place[0]), state

    def step_env(self, key, state, action, params):
        place, state, reward, terminated, info = super().step_env(key, state, jnp.ravel(action)[0], params)
        return jnp.full(self.forms[0], place[0]), state, jnp.full(self.forms[1], reward), terminated, info

    def is_truncated(self, state, params):
        return jnp.asarray(super().is_truncated(state, params), self.forms[2])


class Column(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x), nn.Dense(1)(x)


@pytest.mark.parametrize(
    ("env", "model", "says"),
    [
        (Shaped((1, 2)), None, r"one action for each observation, the policy is \[2, 1\]: flatten an observation"),
        (Shaped((2, 3)), None, r"one action for each observation, the policy is \[2, 2\]: flatten an observation"),
        (Line(), Column(), r"values are of shape \(16, 1\) for rows \(16,\)"),
        (Shaped(reward=(1,)), None, r"Shaped's reward has shape \(1,\): make it one number"),
    ],
    ids=["one row", "matrix", "column", "reward"],
)
def test_what_is_more_than_one_number_a_step_is_refused(env, model, says):
    with pytest.raises(ValueError, match=says):
        train(env, model=model)


class Push(Line):
    """A line of continuous actions, whose bounds are lists."""

    def action_space(self, params=None):
        return SimpleNamespace(low=[-1.0], high=[1.0])

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, (action[0] > 0).astype(int), params)


def test_bounds_of_actions_may_be_lists():
    swarm, _ = train(Push())
    assert tn.rl.evaluate_agents(Push(), swarm, episodes=2).shape == (len(swarm), 2)


@pytest.mark.parametrize("anneal", [None, "lr"])
def test_what_is_annealed_is_a_tuple(anneal):
    with pytest.raises(ValueError, match=r"anneal is a tuple of names, such as \(.lr.,\), or \(\); got"):
        train(config=SHORT._replace(anneal=anneal))


def test_an_end_by_time_may_be_a_number():
    assert_equal(train(Shaped(truncated=float))[0].params, train(Shaped())[0].params)


def test_agents_are_normalised_as_they_were_made():
    swarm, _ = train()
    with pytest.raises(ValueError, match="normalize_observations=True came for agents that were made otherwise"):
        train(members=swarm, config=SHORT._replace(normalize_observations=True))


def test_observations_of_several_arrays_are_refused():
    with pytest.raises(ValueError, match="one array; Parts gives a dict of 2: join them in reset and step_env"):
        train(Parts())


def test_agents_are_a_number_or_a_swarm():
    with pytest.raises(ValueError, match="The swarm is a TurbaTrainState; got str"):
        train(members="3")
    with pytest.raises(ValueError, match="The swarm is a TurbaTrainState; got MLP"):
        evaluate_agents(Line(), tn.MLP((4, 2)))


def test_a_schedule_of_epochs_is_refused():
    swarm, _ = train_agents(Line(), SHORT, 2, plan=BLOCK, progress=False)
    with pytest.raises(ValueError, match=r"follows no schedule of epochs: name the settings in PPOConfig\(anneal=\)"):
        train_agents(Line(), SHORT, tn.with_schedule(swarm, "cosine"), plan=BLOCK, progress=False)


class Board(Line):
    """Line, seen as [row, feature]."""

    def reset(self, key, params):
        observation, state = super().reset(key, params)
        return jnp.stack([observation, 2 * observation]), state

    def step_env(self, *arguments):
        observation, *others = super().step_env(*arguments)
        return jnp.stack([observation, 2 * observation]), *others


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(*x.shape[:-2], -1)
        return nn.Dense(2)(x), nn.Dense(1)(x)[..., 0]


def test_observations_of_several_axes_are_normalised_by_feature():
    config = SHORT._replace(normalize_observations=True)
    swarm, _ = train_agents(Board(), config, 2, model=Flat(), plan=BLOCK, progress=False)
    seen = swarm.collections["observations"]
    rows = 2 * config.total_timesteps  # of two in each observation
    assert np.asarray(seen["count"]).tolist() == [rows, rows] and (seen["variance"] != 1).all()
