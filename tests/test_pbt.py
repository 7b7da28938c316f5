import jax
import numpy as np
import optax
import pytest
from test_agents import Line

import turbanet as tn
from turbanet.evolution import population_based
from turbanet.evolution.genetics import costs
from turbanet.evolution.pbt import exploit, explore
from turbanet.networks.policies import Agent
from turbanet.rl import PPOConfig

KEY = jax.random.key(0)
RATES = np.array([1e-4, 1e-3, 1e-2, 0.1, 0.3, 1e-5])
X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
Y = X @ np.ones((3, 2), np.float32)


def make(members=6):
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    return tn.TurbaTrainState.swarm(tn.MLP((4, 2)), sgd, members, input_size=3)


def train(swarm, round, values):
    swarm = tn.with_hyperparameters(swarm, **values)
    swarm, history = tn.fit(swarm, X, Y, tn.mse, epochs=2, batch_size=8, plan=tn.Plan(1, 2), progress=False)
    return swarm, -history.train_loss[-1]


def run(swarm=None, train=train, values=None, rounds=3, **how):
    values = {"learning_rate": RATES} if values is None else values
    return population_based(make() if swarm is None else swarm, train, values, rounds=rounds, progress=False, **how)


def test_the_worst_copy_the_best_and_the_others_stay():
    fitness = np.random.default_rng(1).normal(size=20)
    places = np.asarray(exploit(KEY, costs(fitness, 20), 0.2))
    order = np.argsort(-fitness)
    assert set(places[order[-4:]]) <= set(order[:4])
    np.testing.assert_array_equal(places[order[:-4]], order[:-4])


def test_copied_are_all_of_the_best_alike():
    fitness = np.arange(10.0)
    ranks = costs(fitness, len(fitness))
    copied = jax.vmap(lambda key: exploit(key, ranks, 0.3))(jax.random.split(KEY, 500))[:, :3]
    counts = np.bincount(np.ravel(copied), minlength=10)
    np.testing.assert_allclose(counts[7:] / 1500, 1 / 3, atol=0.05)


def test_all_who_have_nan_copy_and_nobody_copies_them():
    fitness = np.array([np.nan, 3.0, np.nan, np.nan, 1.0, np.nan, 2.0, np.nan])
    places = np.asarray(exploit(KEY, costs(fitness, 8), 0.25))
    assert set(places[np.isnan(fitness)]) <= {1, 6}
    np.testing.assert_array_equal(places[[1, 4, 6]], [1, 4, 6])


def test_who_copied_explores_within_limits():
    values = {"a": np.full(200, 2.0, np.float32), "b": np.full(200, 1.0, np.float32)}
    copied = np.arange(200) < 100
    after = explore(KEY, values, copied, factors=(0.5, 3.0), limits={"b": (0.7, 2.0)})
    assert set(np.asarray(after["a"])[:100]) == {1.0, 6.0}
    np.testing.assert_allclose(np.unique(after["b"][:100]), [0.7, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(after["a"][100:], 2.0)
    assert len(set(zip(np.asarray(after["a"])[:100], np.asarray(after["b"])[:100], strict=True))) == 4


def test_a_members_constants_stay_its_own():
    def scaled(params, x, y, apply_fn, *, member):
        return tn.mse(params, x, member["scale"] * y, apply_fn)

    def train(swarm, round, values):
        constants = {"scale": np.arange(6.0)} if round == 0 else None
        return tn.fit(swarm, X, Y, scaled, epochs=1, member=constants, plan=tn.Plan(1, 2), progress=False)[0], RATES

    swarm, history = run(train=train, share=0.34)
    assert (history.parents[..., 0][1:] != history.member[1:]).any()
    assert np.asarray(swarm.member["scale"]).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_history_tells_what_was_copied_and_tried():
    _, history = run(share=0.34)
    for round in (1, 2):
        order = np.argsort(-history.fitness[round - 1])
        parents = history.parents[round, :, 0]
        assert set(parents[order[-2:]]) <= set(order[:2])
        np.testing.assert_array_equal(parents[order[:-2]], order[:-2])
        before, after = (history.values["learning_rate"][number] for number in (round - 1, round))
        factor = after / before[parents]
        np.testing.assert_allclose(factor[order[:-2]], 1, rtol=1e-6)
        assert np.isclose(factor[order[-2:], None], [0.8, 1.25], rtol=1e-5).any(axis=1).all()


def test_a_member_that_never_copied_is_the_network_trained_alone():
    swarm, history = run()
    stayed = np.flatnonzero((history.parents[1:, :, 0] == np.arange(6)).all(axis=0))
    assert 0 < len(stayed) < 6
    alone = make()
    for round in range(3):
        alone, _ = train(alone, round, {"learning_rate": RATES})
    for place in stayed:
        jax.tree.map(np.testing.assert_array_equal, swarm.get_state(place).params, alone.get_state(place).params)


def test_who_copied_goes_on_from_the_other_s_state():
    swarm, history = run(rounds=1)
    seen = []

    def watched(swarm, round, values):
        seen.append(swarm)
        return train(swarm, round, values)

    _, both = run(swarm, watched, rounds=1, history=history)
    for place, parent in enumerate(both.parents[1, :, 0]):
        one, other = seen[0].get_state(place), swarm.get_state(int(parent))
        jax.tree.map(np.testing.assert_array_equal, (one.params, one.step), (other.params, other.step))
    assert seen[0].id.tolist() == list(range(6))


@pytest.mark.optimized
def test_the_training_goes_on_bit_for_bit():
    whole, all_of_it = run(rounds=4)
    half, first = run(rounds=2)
    after, both = run(half, rounds=2, history=first)
    jax.tree.map(np.testing.assert_array_equal, after.params, whole.params)
    np.testing.assert_array_equal(both.values["learning_rate"], all_of_it.values["learning_rate"])


def test_a_history_of_another_run_is_refused():
    swarm, history = run()
    with pytest.raises(ValueError, match="history does not end with this swarm"):
        run(make(), history=history)
    with pytest.raises(ValueError, match="history has values of learning_rate"):
        run(swarm, values={"weight_decay": RATES}, history=history)
    with pytest.raises(ValueError, match="history has values of learning_rate"):
        tn.evolution.evolve(swarm, lambda swarm, generation: None, generations=1, history=history)


def test_a_good_rate_is_found():
    _, history = run(make(10), values={"learning_rate": np.geomspace(1e-5, 0.3, 10)}, rounds=8)
    assert np.median(history.values["learning_rate"][-1]) > 10 * np.median(history.values["learning_rate"][0])
    assert history.lineage().learning_rate.iloc[-1] == history.values["learning_rate"][-1, history.best]


def test_agents_are_tuned_while_they_learn():
    env, how = Line(), {"plan": tn.Plan(1, 4)}
    config = PPOConfig(n_steps=8, n_envs=2, batch_size=8, n_epochs=1, total_timesteps=32)
    values = {"lr": np.geomspace(1e-4, 1e-2, 4), "ent_coef": np.full(4, 0.01)}
    lengths = []

    def learn(swarm, round, values):
        swarm, seen = tn.rl.train_agents(env, config._replace(**values), swarm, progress=False, **how)
        lengths.append(len(seen.train_loss))
        return swarm, tn.rl.evaluate_agents(env, swarm, episodes=2, seed=round, **how).mean(axis=1)

    model = Agent(2, hidden=(4,))
    swarm, _ = tn.rl.train_agents(env, config._replace(**values), 4, model=model, progress=False, **how)
    swarm, history = population_based(swarm, learn, values, rounds=3, share=0.25, progress=False)
    assert lengths == [2, 2, 2]
    np.testing.assert_allclose(swarm.opt_state.hyperparams["learning_rate"], history.values["lr"][-1], rtol=1e-6)
    assert (history.values["ent_coef"][-1] != 0.01).any()


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="-np.inf and np.inf for none; got .1e-05, None. for learning_rate"):
        run(values={"learning_rate": np.full(6, 0.1)}, limits={"learning_rate": (1e-5, None)}, rounds=2)


def test_limits_may_be_the_values_own():
    limits = {"learning_rate": (np.float64(0.1), np.float64(0.1))}
    values = {"learning_rate": np.full(6, np.float32(0.1))}  # which is above 0.1
    _, history = run(values=values, limits=limits, rounds=2)
    assert (history.values["learning_rate"] == np.float32(0.1)).all()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"share": 0.0}, "share is at most a half"),
        ({"seed": 2**32}, "seed must be one int from 0 to 2147483646"),
        ({"share": 0.6}, "share is at most a half"),
        ({"share": 0.1}, "of 6 members at least one"),
        ({"factors": ()}, "factors are numbers above 0"),
        ({"share": 1}, "share is at most a half"),
        ({"values": RATES}, "values are {name"),
        ({"values": {"learning_rate": np.append(RATES[:5], 0)}}, "holds 0, which stays 0"),
        ({"limits": {"learning_rate": 0.5}}, "limits are \\(least, most\\)"),
        ({"limits": {"learning_rate": (0, 0.1)}}, "begins outside of its limits"),
        ({"factors": (0.0, 2.0)}, "factors are numbers above 0"),
        ({"values": {}}, "there is nothing to find"),
        ({"values": {"learning_rate": RATES[:3]}}, "one floating-point number for each of 6 members, got \\(3,\\)"),
        ({"values": {"learning_rate": np.arange(6)}}, "of int32"),
        ({"values": {"learning_rate": np.append(RATES[:5], np.nan)}}, "NaN"),
        ({"limits": {"lr": (0, 1)}}, "limits name lr; the values are learning_rate"),
        ({"limits": {"learning_rate": (1.0, 0.1)}}, "least"),
        (lambda: {"swarm": make(1), "values": {"learning_rate": RATES[:1]}}, "of 1 members at least one"),
    ],
)
def test_what_cannot_be_tuned_is_refused_at_once(how, says):
    def untouched(swarm, round, values):
        raise AssertionError("trained")

    how = how() if callable(how) else how  # a swarm is made in the test
    with pytest.raises(ValueError, match=says):
        run(**{"train": untouched, **how})
