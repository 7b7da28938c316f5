import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
import torch
from tiers import first

import turbanet as tn
from turbanet.evolution import genetics, variation
from turbanet.evolution.genetics import Genetic, Tournament, Truncation

KEY = jax.random.key(0)
FITNESS = np.array([3.0, 9.0, 1.0, 7.0, 5.0, 8.0])  # best first: members 1, 5, 3, 4, 0, 2


def make(members=6, optimizer=None):
    return tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optimizer or optax.identity(), members, input_size=3)


def draws(selection, among, count=4000):
    return np.asarray(jax.vmap(lambda key: selection(key, among))(jax.random.split(KEY, count)))


def weights(swarm, place):
    return [np.asarray(leaf[place]) for leaf in jax.tree.leaves(swarm.params)]


def test_truncation_draws_evenly_from_the_best_share():
    assert [Truncation(share).parents(members) for share, members in ((0.3, 10), (0.07, 100), (0.1, 6))] == [3, 7, 1]
    np.testing.assert_allclose(np.bincount(draws(Truncation(0.3), 3)) / 4000, 1 / 3, atol=0.03)


def test_a_tournament_is_won_by_the_best_of_its_entrants():
    counts = np.bincount(draws(Tournament(3), 5), minlength=5)
    rank = np.arange(5)
    wins = ((5 - rank) / 5) ** 3 - ((4 - rank) / 5) ** 3  # all three at this rank or worse, not all worse
    np.testing.assert_allclose(counts / 4000, wins, atol=0.03)


def pairs(fitness, rule, generations=400):
    """The parents of many generations, [child, 2]."""
    swarm = make(len(fitness))
    offspring = jax.jit(lambda key: rule.offspring(key, swarm, fitness)[1])
    found = [np.asarray(offspring(key)) for key in jax.random.split(KEY, generations)]
    return np.concatenate([parents[rule.elites :] for parents in found])


def test_what_a_crossover_reads_and_that_changed_counts():
    share = [0.0]

    def cross(key, one, other):
        return jax.tree.map(lambda a: a * share[0], one)

    rule, swarm = Genetic(scale=0.0, crossover=cross, elites=0), make(8)
    assert not jax.tree.leaves(rule(KEY, swarm, np.arange(8)).params)[1].any()
    share[0] = 1.0
    assert jax.tree.leaves(rule(KEY, swarm, np.arange(8)).params)[1].any()


def test_both_parents_of_a_truncation_are_drawn_evenly_and_differ():
    found = pairs(FITNESS, Genetic(selection=Truncation(0.5), crossover="layer"))  # 1, 5 and 3
    counts = np.array([[(found == (first, second)).all(axis=1).mean() for second in (1, 5, 3)] for first in (1, 5, 3)])
    np.testing.assert_allclose(counts, (1 - np.eye(3)) / 6, atol=0.03)


def test_of_equal_members_it_is_drawn_who_is_the_parent():
    found = pairs(np.array([5.0, 5, 5, 5, 1, 1]), Genetic(selection=Truncation(0.1)))
    np.testing.assert_allclose(np.bincount(found[:, 0], minlength=6) / len(found), [0.25] * 4 + [0, 0], atol=0.08)


def test_fitness_is_compared_in_the_precision_that_it_came_in():
    fitness = np.array([-1234567.0, -1234566.99, -1234567.01, -1234567.02, -1234567.0, -1234567.0])
    assert Genetic()(KEY, make(), fitness).id[0] == 1


def test_who_has_no_fitness_is_no_elite():
    after, parents = Genetic(elites=3).offspring(KEY, make(), np.array([np.nan, np.nan, 1.0, np.nan, np.nan, np.nan]))
    assert after.id.tolist() == [2, 10, 11, 6, 7, 8]  # children stand in
    assert parents[:, 0].tolist() == [2] * 6


def test_uniform_crossover_takes_each_number_from_one_of_both():
    first, second = {"a": jnp.zeros((40, 40)), "b": jnp.zeros(40)}, {"a": jnp.ones((40, 40)), "b": jnp.ones(40)}
    mixed = variation.uniform(KEY, first, second)
    assert set(np.unique(mixed["a"])) == {0, 1}
    assert abs(float(mixed["a"].mean()) - 0.5) < 0.05
    assert (np.asarray(mixed["a"][0]) != np.asarray(mixed["b"])).any()  # a coin a number, not one for all leaves


def test_crossover_per_layer_keeps_kernel_and_bias_together():
    first, second = (jax.tree.map(jnp.zeros_like, make(1).params), jax.tree.map(jnp.ones_like, make(1).params))
    seen = set()
    for number in range(20):
        mixed = variation.per_layer(jax.random.key(number), first, second)
        layers = [
            {float(value) for leaf in jax.tree.leaves(layer) for value in np.unique(leaf)} for layer in mixed.values()
        ]
        assert all(len(values) == 1 for values in layers)
        seen.add(tuple(min(values) for values in layers))
    assert len(seen) == 4  # both layers of either


def test_gaussian_noise_has_its_leaf_s_deviation():
    params = {"one": {"kernel": jnp.ones((100, 100)), "bias": jnp.ones(10_000)}, "other": jnp.ones(10_000)}
    noisy = variation.gaussian(KEY, params, {"one": {"kernel": 0.5, "bias": 0.0}, "other": 2.0})
    assert abs(float(noisy["one"]["kernel"].std()) - 0.5) < 0.02
    assert abs(float(noisy["other"].std()) - 2.0) < 0.06
    np.testing.assert_array_equal(noisy["one"]["bias"], 1)
    assert abs(np.corrcoef(noisy["one"]["kernel"].ravel(), noisy["other"])[0, 1]) < 0.05


def test_elites_go_on_and_children_have_new_ids():
    swarm = make()
    after, parents = Genetic(elites=2).offspring(KEY, swarm, FITNESS)
    assert after.id.tolist() == [1, 5, 6, 7, 8, 9]
    assert parents[:2].tolist() == [[1, -1], [5, -1]]
    for place, elite in enumerate((1, 5)):
        jax.tree.map(np.testing.assert_array_equal, after.get_state(place).params, swarm.get_state(elite).params)


def test_a_child_without_mutation_is_its_parent():
    start = make(optimizer=optax.adam(0.1))
    swarm, _ = tn.fit(start, jnp.ones((4, 3)), jnp.ones((4, 2)), tn.mse, epochs=2, progress=False)
    after, parents = Genetic(scale=0.0, selection=Truncation(0.5)).offspring(KEY, swarm, FITNESS)
    assert set(np.asarray(parents[:, 0])) <= {1, 5, 3}
    for place, parent in enumerate(np.asarray(parents[:, 0])):
        child, one = after.get_state(place), swarm.get_state(int(parent))
        jax.tree.map(np.testing.assert_array_equal, (child.params, child.opt_state), (one.params, one.opt_state))
        assert int(child.step) == 2


@pytest.mark.parametrize("crossover", first(1, ["uniform", "layer"]))
def test_a_crossed_child_has_the_numbers_of_its_two_parents(crossover):
    swarm = make()
    after, parents = Genetic(scale=0.0, crossover=crossover, elites=0).offspring(KEY, swarm, FITNESS)
    assert (np.asarray(parents[:, 0]) != np.asarray(parents[:, 1])).all()
    for place, (mother, father) in enumerate(np.asarray(parents)):
        for child, one, other in zip(*(weights(*who) for who in ((after, place), (swarm, mother), (swarm, father)))):
            assert ((child == one) | (child == other)).all()


def test_members_without_fitness_are_nobody_s_parents():
    fitness = np.array([np.nan, np.nan, 1.0, np.nan, 2.0, np.nan])
    for selection in (Truncation(1.0), Tournament(2)):
        _, parents = Genetic(selection=selection, crossover="uniform").offspring(KEY, make(), fitness)
        assert set(np.asarray(parents).ravel()) <= {2, 4, -1}


def test_a_child_depends_on_the_key_its_id_and_its_parents_alone():
    swarm = make()
    rule = Genetic(selection=Truncation(0.1))  # one parent, member 1
    whole, _ = rule.offspring(KEY, swarm, FITNESS)
    fewer, _ = rule.offspring(KEY, swarm.remove_state(2), np.delete(FITNESS, 2))
    jax.tree.map(np.testing.assert_array_equal, whole[[7]].params, fewer[[7]].params)
    other, _ = rule.offspring(jax.random.key(1), swarm, FITNESS)
    assert any((a != b).any() for a, b in zip(weights(whole, 1), weights(other, 1), strict=True))


def test_generations_and_scales_compile_nothing_anew():
    swarm, rule = make(), Genetic(scale=0.1, crossover="uniform")
    swarm = rule(KEY, swarm, jnp.asarray(FITNESS))
    before = genetics._offspring._cache_size()
    for generation in range(3):
        rule = rule.replace(scale=0.1 / (2 + generation))
        swarm = rule(jax.random.key(generation), swarm, jnp.asarray(FITNESS))
    assert genetics._offspring._cache_size() == before


def test_a_rule_is_pure():
    rule, swarm = Genetic(crossover="layer"), make()
    inside = jax.jit(lambda rule, *order: rule(*order))(rule, KEY, swarm, FITNESS)
    for one, other in zip(jax.tree.leaves(inside.params), jax.tree.leaves(rule(KEY, swarm, FITNESS).params)):
        np.testing.assert_allclose(one, other, rtol=1e-6)  # another program, other roundings


@pytest.mark.parametrize(
    ("rule", "members", "says"),
    [
        (Genetic(), 1, "one alone has no children"),
        (Genetic(elites=6), 6, "fewer than the 6 members"),
        (Genetic(elites=-1), 6, "at least 0"),
        (Genetic(crossover="uniform", elites=0), 1, "needs two parents"),
        (Genetic(crossover="uniform", selection=Truncation(0.1)), 6, "needs two parents"),
        (Genetic(crossover="unifrom"), 6, "Unknown crossover 'unifrom'; known: uniform, layer"),
        (Genetic(elites=2.0), 6, "elites are a whole number"),
        (Genetic(selection=0.2), 6, "selection is a Truncation"),
        (Genetic(selection=Tournament), 6, "selection is a Truncation"),
        (Genetic(crossover=0.5), 6, "Unknown crossover 0.5"),
        (Genetic(scale=-0.1), 6, "at least 0"),
        (Genetic(scale=float("nan")), 6, "at least 0"),
        (Genetic(scale=np.ones(6)), 6, "at least 0, each for all of its leaf"),
        (Genetic(scale={"Dense_7": 0.1}), 6, "scale is a number, or a tree"),
        (Genetic(scale="0.1"), 6, "scale must be an array of numbers"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(rule, members, says):
    with pytest.raises(ValueError, match=says):
        rule(KEY, make(members), FITNESS[:members])


def test_fitness_is_one_number_a_member():
    with pytest.raises(ValueError, match="one number for each of 6 members, got \\(5,\\)"):
        Genetic()(KEY, make(), FITNESS[:5])


@pytest.mark.parametrize(
    "fitness", [FITNESS.tolist(), pd.Series(FITNESS), torch.tensor(FITNESS), jnp.asarray(FITNESS)], ids=type
)
def test_fitness_may_be_any_numbers(fitness):
    assert Genetic()(KEY, make(), fitness).id[0] == 1


def test_without_any_fitness_there_are_no_parents():
    with pytest.raises(ValueError, match="No member has a fitness"):
        Genetic()(KEY, make(), np.full(6, np.nan))


@pytest.mark.parametrize("share", ["0.2", 0, -1, 1.1, float("nan")])
def test_a_share_is_part_of_the_members(share):
    with pytest.raises(ValueError, match="share is the part"):
        Truncation(share)


@pytest.mark.parametrize("entrants", [0, -1, 1.5])
def test_entrants_are_a_whole_number(entrants):
    with pytest.raises(ValueError, match="entrants"):
        Tournament(entrants)
