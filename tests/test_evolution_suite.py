import gymnax
import jax
import numpy as np
import optax
import pytest
from scipy.stats import loguniform
from tiers import first

import turbanet as tn
from study.evolution import suite as evolution_suite

CARTPOLE, _ = gymnax.make("CartPole-v1")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 6)).astype(np.float32)
    y = (x @ rng.normal(size=(6, 3))).argmax(1)
    return (x[:64], y[:64]), (x[64:80], y[64:80]), (x[80:], y[80:])


@pytest.mark.parametrize(("hidden",), first(1, [((8, 8),), ((16,),)]))
def test_numpy_acts_as_the_swarm_does(hidden):
    swarm = evolution_suite.agents(5, hidden)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    logits = np.asarray(swarm.predict(x[:, None]))[:, 0]
    np.testing.assert_array_equal(evolution_suite.actions(evolution_suite.layers(swarm), x), logits.argmax(1))


def test_agents_earn_in_gymnasium_what_they_earn_here():
    swarm = evolution_suite.agents(200, (16,))
    ours = np.asarray(tn.rl.evaluate_agents(CARTPOLE, swarm, episodes=1)).ravel()
    theirs = evolution_suite.in_gymnasium(evolution_suite.layers(swarm))
    error = np.hypot(ours.std(), theirs.std()) / np.sqrt(200)
    assert abs(ours.mean() - theirs.mean()) < 4 * error
    assert np.corrcoef(ours, theirs)[0, 1] > 0.5  # of the same networks


def test_every_agent_of_an_endless_generation_acts_all_of_its_steps():
    endless = evolution_suite.endless(CARTPOLE.default_params)
    returns = tn.rl.evaluate_agents(CARTPOLE, evolution_suite.agents(8, (4,)), episodes=1, params=endless)
    assert (returns == evolution_suite.GENERATION_STEPS).all()


def test_the_searches_begin_alike_and_are_scored_on_the_test_rows(data):
    distributions = {"learning_rate": loguniform(1e-3, 1e-1), "weight_decay": loguniform(1e-4, 1e-2)}
    how = {"members": 4, "share": 0.25, "widths": [4, 3], "batch_size": 16, "distributions": distributions}
    table, history = evolution_suite.searches(data, rounds=1, seed=0, **how)
    assert table.search.tolist() == list(evolution_suite.SEARCHES)
    assert table["validation loss"].nunique() == 1 and table["test accuracy"].nunique() == 1  # nobody copied yet
    longer, history = evolution_suite.searches(data, rounds=3, seed=0, **how)
    assert longer["validation loss"].nunique() == 3
    assert (longer["test accuracy"] * 16 % 1 < 1e-6).all()  # a share of sixteen rows
    assert history.values["learning_rate"].shape == (3, 4)


@pytest.fixture(scope="module")
def payers():
    return tn.TurbaTrainState.swarm(tn.MLP((3, 1)), optax.identity(), 4, input_size=4)


@pytest.fixture(scope="module")
def search(payers):
    return evolution_suite.RewardSearch(CARTPOLE, payers, timesteps=512, hidden=[4], episodes=2, plan=tn.Plan(1, 4))


def test_a_reward_is_worth_what_its_agent_earns(search, payers):
    _, returns = search(payers, 3)
    np.testing.assert_array_equal(returns, search.returns(payers.params, seed=3))
    assert returns.shape == (4,) and (returns >= 8).all()


def test_the_chosen_reward_is_one_of_the_fittest(search, payers):
    weights = search.chosen(payers, np.array([1.0, 4, 3, 2]), finalists=2, seed=9)
    judged = jax.tree.map(lambda leaf: np.asarray(leaf)[[1, 1, 2, 2]], payers.params)
    first, second = search.returns(judged, seed=9).reshape(2, 2).mean(axis=1)
    best = payers.get_state(1 if first >= second else 2).params
    jax.tree.map(np.testing.assert_array_equal, weights, best)


def test_always_one_is_the_true_reward(search, payers):
    weights = evolution_suite.always_one(payers.get_state(0).params)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_array_equal(payers.apply_fn({"params": weights}, x), 1)
    by_network = search.returns(search.all_paid_by(weights), seed=5)
    how = {"model": search.model, "seed": 5, "progress": False, "plan": search.plan}
    agents, _ = tn.rl.train_agents(CARTPOLE, search.config, 4, **how)
    by_world = tn.rl.evaluate_agents(CARTPOLE, agents, episodes=2, seed=5, plan=search.plan).mean(axis=1)
    np.testing.assert_array_equal(by_network, by_world)
