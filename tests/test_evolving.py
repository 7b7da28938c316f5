import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from evosax.algorithms import CMA_ES, Open_ES, SimpleGA
from tiers import first

import turbanet as tn
from turbanet.evolution import Genetic, Truncation, evolve

RULE = Genetic(scale=0.1, selection=Truncation(0.25), crossover="uniform")


def make(members=8, **more):
    return tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.identity(), members, input_size=3, **more)


def near(swarm, generation=0):
    """Minus the squared distance of all weights to 1."""
    return swarm, -sum(((leaf - 1) ** 2).reshape(len(swarm), -1).sum(1) for leaf in jax.tree.leaves(swarm.params))


def key_of(seed, generation):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2**31 - 1), generation)


def run(swarm=None, train=near, rule=RULE, generations=4, **how):
    return evolve(make() if swarm is None else swarm, train, rule, generations=generations, progress=False, **how)


def test_what_is_no_swarm_does_not_evolve():
    with pytest.raises(ValueError, match="The swarm is a TurbaTrainState; got MLP"):
        run(tn.MLP((4, 2)))
    with pytest.raises(ValueError, match="this is one network"):
        run(make().get_state(0))


def test_evolve_is_a_loop_of_its_rule():
    swarm, history = run(seed=3)
    alone = make()
    for generation in range(4):
        if generation:
            alone = RULE(key_of(3, generation), alone, near(alone)[1])
        np.testing.assert_array_equal(history.fitness[generation], near(alone)[1])
        np.testing.assert_array_equal(history.member[generation], alone.id)
    jax.tree.map(np.testing.assert_array_equal, swarm.params, alone.params)


def test_what_is_fit_is_found():
    _, history = run(make(64), generations=60)
    assert history.fitness[0].max() < -3
    assert history.fitness[-1].max() > -0.2


def test_an_elite_never_gets_worse():
    assert (np.diff(run(generations=20)[1].fitness.max(axis=1)) >= 0).all()


@pytest.mark.optimized
def test_the_evolution_goes_on_bit_for_bit():
    whole, all_of_it = run(generations=5)
    half, first = run(generations=2)
    after, both = run(half, generations=3, history=first)
    jax.tree.map(np.testing.assert_array_equal, after.params, whole.params)
    for name in ("fitness", "member", "parents"):
        np.testing.assert_array_equal(getattr(both, name), getattr(all_of_it, name))


def test_children_inherit_what_train_taught():
    x, y = jnp.ones((4, 3)), jnp.zeros((4, 2))
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 4, input_size=3)

    def train(swarm, generation):
        swarm, history = tn.fit(swarm, x, y, tn.mse, epochs=3, progress=False)
        return swarm, -history.train_loss[-1]

    swarm, history = run(swarm, train, Genetic(scale=0.0), generations=4)
    assert history.fitness[-1].min() > history.fitness[0].max()
    assert swarm.step.tolist() == [12] * 4


def test_the_genealogy_tells_who_descends_from_whom():
    _, history = run(generations=5)
    table = history.frame().set_index(["generation", "member"])
    assert (table.loc[0, ["parent", "other_parent"]] == -1).all(axis=None)
    for (generation, member), line in table.loc[1:].iterrows():
        fit = table.loc[generation - 1].fitness.sort_values(ascending=False)
        assert line.parent in fit.index[:2]  # the best quarter of eight
        assert line.other_parent in (fit.index[:2] if line.parent != member else [-1])


def test_a_lineage_ends_with_its_member():
    _, history = run(generations=5)
    line = history.lineage()
    assert line.generation.tolist() == [0, 1, 2, 3, 4]
    assert line.member.iloc[-1] == history.best
    assert line.parent.tolist()[1:] == line.member.tolist()[:-1]
    assert line.fitness.iloc[-1] == history.fitness[-1].max()
    with pytest.raises(KeyError, match="No member 0 in the last generation"):
        history.lineage(0)


@pytest.mark.parametrize("strategy", first(1, [CMA_ES, Open_ES]))
def test_a_strategy_is_asked_and_told_in_order(strategy):
    swarm = make()
    one = strategy(population_size=8, solution=swarm.get_state(0).params)
    after, history = run(swarm, rule=one, generations=3, seed=5)
    params = one.default_params
    for generation in range(3):
        key = key_of(5, generation)
        if not generation:
            state = one.init(jax.random.fold_in(key, 0), swarm.get_state(0).params, params)
        population, state = one.ask(jax.random.fold_in(key, 1), state, params)
        cost = -near(swarm.replace(params=population))[1]
        np.testing.assert_allclose(history.fitness[generation], -cost, rtol=1e-6)
        state, _ = one.tell(jax.random.fold_in(key, 2), population, cost, state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after.params, population)


def test_a_strategy_that_evolves_members_begins_with_them():
    swarm = make(16)
    one = SimpleGA(population_size=16, solution=swarm.get_state(0).params, std_schedule=optax.constant_schedule(0.1))
    _, history = run(swarm, rule=one, generations=40)
    np.testing.assert_array_equal(history.fitness[0], near(swarm)[1])
    assert history.fitness[-1].max() > history.fitness[0].max() + 1


def test_a_strategy_goes_on_bit_for_bit():
    one = CMA_ES(population_size=8, solution=make().get_state(0).params)
    whole, _ = run(rule=one, generations=4)
    half, first = run(rule=one, generations=2)
    after, _ = run(half, rule=one, generations=2, history=first)
    jax.tree.map(np.testing.assert_array_equal, after.params, whole.params)


def test_a_strategy_is_told_the_worst_for_nan():
    def lost(swarm, generation):
        return swarm, near(swarm)[1].at[2].set(jnp.nan)

    swarm, _ = run(train=lost, rule=CMA_ES(population_size=8, solution=make().get_state(0).params), generations=3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(swarm.params))


def test_a_strategy_of_another_size_is_refused():
    with pytest.raises(ValueError, match="population_size of 9, the swarm 8 members"):
        run(rule=CMA_ES(population_size=9, solution=make().get_state(0).params))


@pytest.mark.parametrize("other", [Open_ES, SimpleGA])
def test_a_history_of_another_strategy_is_refused(other):
    solution = make().get_state(0).params
    swarm, history = run(rule=CMA_ES(population_size=8, solution=solution), generations=1)
    with pytest.raises(ValueError, match="history is of another strategy: continue with the one that produced it"):
        run(swarm, rule=other(population_size=8, solution=solution), generations=1, history=history)


def test_a_strategy_of_several_populations_is_refused():
    one = CMA_ES(population_size=8, solution=make().get_state(0).params)
    one.num_populations = 2
    with pytest.raises(ValueError, match="A strategy has one population, CMA_ES has 2"):
        run(rule=one)


def test_a_rule_tells_large_fitnesses_apart():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((1,)), optax.sgd(0.1), 5, input_size=1)
    received = []

    def rule(key, swarm, fitness):
        received.append(fitness - 1e8)
        return swarm

    tn.evolution.evolve(swarm, lambda s, g: (s, 1e8 + np.arange(5.0)), rule, generations=2, seed=0, progress=False)
    assert received[0].tolist() == [0, 1, 2, 3, 4]


def test_a_rule_may_be_any_function():
    def reversed_order(key, swarm, fitness):
        return jax.tree.map(lambda leaf: leaf[::-1], swarm)

    swarm, history = run(rule=reversed_order, generations=2)
    assert swarm.id.tolist() == list(range(7, -1, -1))
    assert history.parents[1, :, 0].tolist() == list(range(7, -1, -1))


def test_a_rule_of_ones_own_may_tell_the_parents():
    expected, told = run(generations=3)[1], run(rule=RULE.offspring, generations=3)[1]
    np.testing.assert_array_equal(told.parents, expected.parents)

    def copies_of_the_best(key, swarm, fitness):
        best = fitness.argmax()
        params = jax.tree.map(lambda leaf: leaf[best] + 0.1 * jax.random.normal(key, leaf.shape), swarm.params)
        return swarm.replace(params=params), np.full(len(swarm), swarm.id[best])

    _, history = run(rule=copies_of_the_best)
    assert history.lineage().member.tolist() == [*history.fitness[:-1].argmax(1), history.best]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda key, swarm, fitness: swarm.merge(), "like the 8 members that it is given; it made 1 members"),
        (lambda key, swarm, fitness: None, "it made NoneType"),
        (
            lambda key, swarm, fitness: (swarm, [0, 1]),
            r"A rule's parents must be ids of .*, int \[8\] or \[8, 2\]; got",
        ),
        (
            lambda key, swarm, fitness: (swarm, swarm.id + 1),
            "A rule's parents must be ids of the last generation or -1",
        ),
        (lambda key, swarm, fitness: jax.tree.map(lambda leaf: leaf[:1].repeat(8, 0), swarm), "share an id"),
    ],
)
def test_what_a_rule_returns_is_checked(rule, says):
    with pytest.raises(ValueError, match=says):
        run(rule=rule)


def test_nan_is_named_and_the_others_go_on(caplog):
    caplog.set_level(logging.WARNING, "turbanet")

    def lost(swarm, generation):
        return swarm, near(swarm)[1].at[5].set(jnp.nan)

    _, history = run(train=lost, generations=2)
    assert "The fitness of member 5 is NaN or infinite" in caplog.text
    assert 5 not in history.parents[1]
    run(train=lambda swarm, generation: (swarm, near(swarm)[1].at[4].set(jnp.inf)), generations=1)
    assert "The fitness of member 4 is NaN or infinite" in caplog.text
    with pytest.raises(ValueError, match="No member has a fitness"):
        run(train=lambda swarm, generation: (swarm, np.full(8, np.nan)))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (lambda swarm, generation: near(swarm)[1], "train returns \\(swarm, fitness \\[member\\]\\), got"),
        (lambda swarm, generation: (swarm, near(swarm)[1][:3]), "one number for each of 8; got \\(3,\\)"),
        (lambda swarm, generation: (swarm[[1, 2]], near(swarm)[1]), "train returns the swarm that it was given"),
        (lambda swarm, generation: near(swarm)[::-1], "train returns the swarm that it was given"),
    ],
)
def test_what_train_returns_is_checked(train, says):
    with pytest.raises(ValueError, match=says):
        run(train=train)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"generations": 0}, "generations must be a whole number"),
        ({"rule": 0.2}, "rule is a Genetic"),
        ({"rule": Genetic}, "rule is a Genetic"),
        ({"params": 3}, "params are a strategy's"),
        ({"seed": 2**32}, "seed must be one int from 0 to 2147483646"),
        (lambda: {"swarm": make(1)}, "one alone has no children"),
        (lambda: {"swarm": make(3, seed=[1, 2, 3])}, "share an id"),
    ],
)
def test_what_cannot_evolve_is_refused_at_once(how, says):
    def untouched(swarm, generation):
        raise AssertionError("trained")

    how = how() if callable(how) else how  # a swarm is made in the test
    with pytest.raises(ValueError, match=says):
        run(**{"train": untouched, **how})


def test_a_history_of_another_swarm_is_refused():
    swarm, history = run()
    for other in (make(), swarm.replace(params=jax.tree.map(jnp.zeros_like, swarm.params))):
        with pytest.raises(ValueError, match="history does not end with this swarm"):
            run(other, history=history)


def test_fitness_keeps_the_precision_that_it_came_in():
    def close(swarm, generation):
        return swarm, -1234567 + 0.01 * np.arange(8.0)

    assert run(train=close, generations=2)[1].member[1, 0] == 7


def test_a_history_of_another_kind_is_refused():
    swarm, history = run()
    with pytest.raises(ValueError, match="history has no values and no strategy"):
        run(swarm, rule=CMA_ES(population_size=8, solution=swarm.get_state(0).params), history=history)


def test_a_strategy_for_another_network_is_refused():
    with pytest.raises(ValueError, match="The strategy is for another network"):
        run(rule=SimpleGA(population_size=8, solution=make().params))


def test_only_the_last_state_of_a_strategy_is_kept():
    alive = []

    def watched(swarm, generation):
        alive.append(sum(leaf.shape == (8, 8) for leaf in jax.live_arrays()))
        return near(swarm)

    run(train=watched, rule=CMA_ES(population_size=8, solution=make().get_state(0).params), generations=8)
    assert alive[-1] <= alive[2]


def test_ctrl_c_keeps_the_whole_generations():
    def interrupted(swarm, generation):
        if generation == 2:
            raise KeyboardInterrupt
        return near(swarm)

    with pytest.raises(tn.Interrupted, match="after 2 whole generation") as caught:
        run(train=interrupted, generations=5)
    after, _ = run(caught.value.swarm, generations=3, history=caught.value.history)
    jax.tree.map(np.testing.assert_array_equal, after.params, run(generations=5)[0].params)


def test_what_a_generation_raises_carries_the_ones_before():
    def broken(swarm, generation):
        if generation == 2:
            raise OSError("the disk is gone")
        return near(swarm)

    with pytest.raises(OSError, match="the disk is gone") as caught:
        run(train=broken, generations=5)
    assert len(caught.value.history.fitness) == 2
    after, _ = run(caught.value.swarm, generations=3, history=caught.value.history)
    jax.tree.map(np.testing.assert_array_equal, after.params, run(generations=5)[0].params)


@pytest.mark.thorough  # what is fit is found in a test above; the fitness may be any numbers, returns as well
def test_cart_poles_are_held_by_evolution_alone():
    gymnax = pytest.importorskip("gymnax")
    env, _ = gymnax.make("CartPole-v1")
    swarm = tn.TurbaTrainState.swarm(tn.MLP((8, 2)), optax.identity(), 64, input_size=4)

    def score(swarm, generation):
        return swarm, tn.rl.evaluate_agents(env, swarm, episodes=2, seed=generation).mean(axis=1)

    swarm, history = run(swarm, score, Genetic(scale=0.3), generations=12)
    assert history.fitness[0].mean() < 60
    assert tn.rl.evaluate_agents(env, swarm[[history.best]], episodes=20, seed=99).mean() > 400
