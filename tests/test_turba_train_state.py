"""The public TurbaNet surface, and its faults left behind."""

import copy
import tracemalloc
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from flax import linen as nn

import turbanet
from turbanet import MLP, TurbaTrainState, mse, softmax_cross_entropy
from turbanet.turba_train_state import _unpickled

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(4, 8, 3)).astype(np.float32), rng.normal(size=(4, 8, 2)).astype(np.float32)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(5)(nn.LayerNorm()(x))))


@pytest.fixture
def swarm():
    return TurbaTrainState.swarm(MLP((5, 2)), optax.adam(0.01), 4, sample_input=X[0], seed=3)


def plain_steps(params, tx, x, y, steps, apply_fn):
    """The same network trained alone, by a plain Optax loop."""

    @jax.jit
    def step(params, opt_state, x, y):
        (loss, _), grads = jax.value_and_grad(mse, has_aux=True)(params, x, y, apply_fn)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(loss)
    return params, losses


def test_swarm_takes_the_sample_input_as_fourth_argument():
    assert TurbaTrainState.swarm(MLP((5, 2)), optax.sgd(0.1), 4, X[0]).shape == (4, 3, 2)


def test_swarm_takes_an_input_size_as_fourth_argument():
    assert TurbaTrainState.swarm(MLP((5, 2)), optax.sgd(0.1), 4, 3).shape == (4, 3, 2)


def test_swarm_takes_one_example_without_a_batch_axis():
    swarm = TurbaTrainState.swarm(swarm_size=4, seed=1, sample_input=X[0, 0], optimizer=optax.sgd(0.1), model=MLP((2,)))
    assert swarm.params["Dense_0"]["kernel"].shape == (4, 3, 2)


def test_swarm_of_an_int_seed_has_distinct_members():
    kernels = np.asarray(TurbaTrainState.swarm(MLP((1,)), optax.sgd(0.1), 100, 3, seed=42).params["Dense_0"]["kernel"])
    assert len(np.unique(kernels.reshape(100, -1), axis=0)) == 100


def test_swarm_of_equal_seeds_has_equal_members():
    kernel = TurbaTrainState.swarm(MLP((1,)), optax.sgd(0.1), 3, 3, seed=[5, 6, 5]).params["Dense_0"]["kernel"]
    assert (kernel[0] == kernel[2]).all() and (kernel[0] != kernel[1]).all()


def test_swarm_member_does_not_depend_on_the_number_of_members(swarm):
    small = TurbaTrainState.swarm(MLP((5, 2)), optax.adam(0.01), 2, sample_input=X[0], seed=3)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:2], b), swarm.params, small.params)


def test_swarm_of_ids_has_those_members():
    some = TurbaTrainState.swarm(MLP((4, 2)), optax.adam(0.1), [5, 2], input_size=3, seed=1)
    every = TurbaTrainState.swarm(MLP((4, 2)), optax.adam(0.1), 8, input_size=3, seed=1)
    assert some.id.tolist() == [5, 2]
    for own, others in zip(jax.tree.leaves(some.params), jax.tree.leaves(every.params), strict=True):
        assert np.array_equal(own, others[np.array([5, 2])])


@pytest.mark.parametrize("ids", [[1, 1], [-1], [0.5], [[1]], [2**31]])
def test_swarm_refuses_ids_that_name_no_members(ids):
    with pytest.raises(ValueError, match=r"ids int \[member\]|ids must differ"):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), ids, input_size=3)


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_swarm_refuses_a_size_that_is_no_count(size):
    with pytest.raises(ValueError, match="swarm_size must be a whole number of at least 1, got"):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), size, 3)


@pytest.mark.parametrize("given", [{}, {"input_size": 3, "sample_input": X[0]}, {"input_size": X, "sample_input": X}])
def test_swarm_needs_exactly_one_description_of_the_input(given):
    with pytest.raises(ValueError, match="either input_size"):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 2, **given)


@pytest.mark.parametrize("seed", [2**32, [1, 1, 1, 1 + 2**32], -1, 2**31, 0.5, "3"])
def test_seeds_that_int32_would_cut_to_another_ones_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be one int or 4 ints from 0 to 2147483646, got"):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 4, 3, seed=seed)


def test_new_ids_are_none_that_int32_cuts():
    ids = [2**31 - 2, 5]
    swarm = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), ids, 3)
    rule = partial(turbanet.evolution.Genetic(), jax.random.key(0), fitness=np.arange(2))
    for grow in (lambda swarm: swarm.append(swarm), lambda swarm: swarm.merge(), lambda swarm: rule(swarm)):
        with pytest.raises(ValueError, match="A new member would have the id 214748364.*, ids go up to 2147483646"):
            grow(swarm)


def test_swarm_refuses_seeds_of_another_length():
    with pytest.raises(ValueError, match="one int or 2 ints"):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 2, 3, seed=[1, 2, 3])


def test_train_equals_a_plain_optax_loop(swarm):
    first = swarm
    for _ in range(20):
        swarm, loss, prediction = swarm.train(X, Y, mse)
    for i in range(4):
        params, losses = plain_steps(first.get_state(i).params, optax.adam(0.01), X[i], Y[i], 20, first.apply_fn)
        np.testing.assert_allclose(loss[i], losses[-1], rtol=1e-5)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6), swarm.params, params)
    assert prediction.shape == (4, 8, 2)


def test_train_uses_the_loss_that_was_set(swarm):
    np.testing.assert_array_equal(swarm.set_loss_fn(mse).train(X, Y)[1], swarm.train(X, Y, mse)[1])


def test_data_go_by_the_names_of_the_public_turbanet_too(swarm):
    _, loss, _ = swarm.set_loss_fn(mse).train(input_data=X, output_data=Y)
    np.testing.assert_array_equal(loss, swarm.train(X, Y, mse)[1])
    np.testing.assert_array_equal(swarm.evaluate(input_data=X, output_data=Y, loss_fn=mse)[1], swarm.predict(X))
    np.testing.assert_array_equal(swarm.predict(input_data=X), swarm.predict(X))


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_a_misspelt_keyword_is_refused(swarm, method):
    with pytest.raises(TypeError, match="los_fn"):
        getattr(swarm, method)(X, Y, los_fn=mse)


def tensor(array):
    """A PyTorch tensor that requires a gradient."""
    return pytest.importorskip("torch").from_numpy(array).clone().requires_grad_()


@pytest.mark.parametrize("dress", [tensor, np.ndarray.tolist, np.float64], ids=["tensor", "list", "float64"])
def test_methods_take_data_as_users_have_them(swarm, dress):
    x, y = dress(X), dress(Y)
    made = TurbaTrainState.swarm(MLP((5, 2)), optax.adam(0.01), 4, dress(X[0]), seed=3)
    np.testing.assert_array_equal(made.params["Dense_0"]["kernel"], swarm.params["Dense_0"]["kernel"])
    np.testing.assert_array_equal(swarm.train(x, y, mse)[1], swarm.train(X, Y, mse)[1])
    np.testing.assert_array_equal(swarm.evaluate(x, y, mse)[0], swarm.evaluate(X, Y, mse)[0])
    np.testing.assert_array_equal(swarm.predict(x), swarm.predict(X))
    assert swarm.cost_analysis(dress(X[0])) == swarm.cost_analysis(X[0])


def test_a_swarm_of_one_takes_a_table_without_the_member_axis():
    one = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 1, sample_input=pd.DataFrame(X[0]))
    np.testing.assert_array_equal(one.predict(pd.DataFrame(X[0])), one.predict(X[:1]))


def test_labels_that_fit_no_int32_are_refused_by_name(swarm):
    with pytest.raises(ValueError, match="y holds whole numbers from 3000000000 to 3000000000"):
        swarm.train(X, np.full((4, 8), 3_000_000_000), softmax_cross_entropy)


def test_text_is_refused_by_name(swarm):
    with pytest.raises(ValueError, match="x must be an array of numbers, got ndarray of type <U1"):
        swarm.predict(np.full((4, 8, 3), "a"))


def test_train_before_set_loss_fn_says_what_to_do(swarm):
    with pytest.raises(ValueError, match="set_loss_fn"):
        swarm.train(X, Y)


def test_train_refuses_a_loss_without_a_scalar(swarm):
    with pytest.raises(ValueError, match=r"returns \(scalar, prediction\)"):
        swarm.train(X, Y, lambda params, x, y, apply_fn: (apply_fn({"params": params}, x), y))


def test_train_refuses_a_wrong_leading_axis(swarm):
    with pytest.raises(ValueError, match=r"x has shape \(3, 8, 3\); it must lead with the 4 members"):
        swarm.train(X[:3], Y, mse)


def test_train_returns_the_prediction_not_the_target(swarm):
    np.testing.assert_array_equal(swarm.train(X, Y, mse)[2], swarm.predict(X))


def test_a_nan_neighbour_changes_no_bit(swarm):
    bad = np.where(np.arange(4)[:, None, None] == 1, np.nan, X).astype(np.float32)
    mixed, clean = swarm.train(bad, Y, mse)[0], swarm.train(X, Y, mse)[0]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2:], b[2:]), mixed.params, clean.params)


def test_evaluate_equals_numpy(swarm):
    loss, prediction = swarm.evaluate(X, Y, mse)
    np.testing.assert_allclose(loss, np.mean((np.asarray(prediction) - Y) ** 2, axis=(1, 2)), rtol=1e-6)


def test_predict_equals_each_network_alone(swarm):
    for i in range(4):
        layers = jax.tree.map(lambda a, i=i: np.asarray(a)[i], swarm.params)
        hidden = np.maximum(X[i] @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"], 0)
        alone = hidden @ layers["Dense_1"]["kernel"] + layers["Dense_1"]["bias"]
        np.testing.assert_allclose(swarm.predict(X)[i], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 1, 5, 3), (4, 6, 5, 3)])
def test_predict_takes_any_number_of_batch_axes(swarm, shape):
    assert swarm.predict(np.zeros(shape)).shape == (*shape[:-1], 2)


@pytest.mark.parametrize("shape", [(5, 3), (8, 5, 3), (1, 5, 3)])
def test_a_swarm_of_one_needs_no_member_axis(shape):
    one = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 1, 3)
    expected = shape if shape[0] == 1 else (1, *shape)
    assert one.predict(np.zeros(shape)).shape == (*expected[:-1], 2)


def test_predict_captures_intermediates(swarm):
    prediction, state = swarm.predict(X, capture_intermediates=True)
    layer = state["intermediates"]["Dense_1"]["__call__"][0]
    np.testing.assert_array_equal(layer, prediction)


def test_shape_does_not_depend_on_layer_names():
    assert TurbaTrainState.swarm(Normed(), optax.sgd(0.1), 6, 3).shape == (6, 3, 2)


def test_shape_of_twelve_layers_without_a_sample():
    deep = TurbaTrainState.swarm(MLP((7,) * 11 + (9,)), optax.sgd(0.1), 2, 3)
    again = TurbaTrainState.vmap_create(apply_fn=deep.apply_fn, params=deep.params, tx=deep.tx)
    assert again.shape == deep.shape == (2, 3, 9)


def test_vmap_create_takes_the_counters_that_are_given():
    one = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 2, input_size=3)
    how = {"apply_fn": one.apply_fn, "params": one.params, "tx": one.tx}
    again = TurbaTrainState.vmap_create(**how, seed=3, epoch=4, id=[7, 5])
    counters = [getattr(again, name).tolist() for name in ("seed", "epoch", "step", "id")]
    assert counters == [[3, 3], [4, 4], [0, 0], [7, 5]]


def test_vmap_create_refuses_params_of_different_lengths():
    with pytest.raises(ValueError, match="one member axis"):
        TurbaTrainState.vmap_create(apply_fn=None, params={"a": jnp.ones(2), "b": jnp.ones(3)}, tx=optax.sgd(0.1))


def test_len_of_a_single_state_is_one(swarm):
    assert (len(swarm), len(swarm.get_state(0))) == (4, 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda swarm, one: one.predict(np.zeros((1, 3))),
        lambda swarm, one: one.train(np.zeros((1, 3)), np.zeros(1, int), softmax_cross_entropy),
        lambda swarm, one: turbanet.evaluate(one, np.zeros((1, 3)), np.zeros(1, int), mse),
        lambda swarm, one: one.append(swarm),
        lambda swarm, one: swarm.append(one),
        lambda swarm, one: one.merge(),
        lambda swarm, one: one.copies(2),
        lambda swarm, one: one[[0]],
        lambda swarm, one: list(one),
    ],
)
def test_one_network_is_no_swarm(swarm, use):
    with pytest.raises(ValueError, match=r"this is one network: take swarm\[\[id\]\], a swarm of one"):
        use(swarm, swarm.get_state(0))


def test_get_state_has_no_member_axis(swarm):
    assert swarm.get_state(-1).params["Dense_0"]["kernel"].shape == (3, 5)


@pytest.mark.parametrize("index", [4, -5])
def test_get_state_and_remove_state_refuse_an_unknown_member(swarm, index):
    with pytest.raises(IndexError, match=f"No member {index} in a swarm of 4"):
        swarm.get_state(index)
    with pytest.raises(IndexError, match=f"No member {index}"):
        swarm.remove_state(index)


def test_remove_state_keeps_the_others(swarm):
    left = swarm.remove_state(1)
    assert np.asarray(left.id).tolist() == [0, 2, 3] and len(left) == 3


def test_remove_state_refuses_the_last_member(swarm):
    one = swarm.remove_state(0).remove_state(0).remove_state(0)
    with pytest.raises(ValueError, match="last one"):
        one.remove_state(0)


def test_append_keeps_the_first_and_renumbers_the_second(swarm):
    both = swarm.append(swarm)
    assert np.asarray(both.id).tolist() == list(range(8))
    np.testing.assert_array_equal(both.params["Dense_0"]["kernel"][4:], swarm.params["Dense_0"]["kernel"])


def test_append_refuses_another_architecture(swarm):
    other = TurbaTrainState.swarm(MLP((6, 2)), optax.adam(0.01), 4, 3)
    with pytest.raises(ValueError, match="their params differ"):
        swarm.append(other)


def test_append_refuses_another_function_of_equal_arrays():
    class Net(nn.Module):
        act: str

        @nn.compact
        def __call__(self, x):
            return getattr(nn, self.act)(nn.Dense(2)(x))

    def made(act="relu", rate=0.1):
        return TurbaTrainState.swarm(Net(act), optax.adam(rate), 2, sample_input=X[0])

    for how, named in (({"act": "tanh"}, "model"), ({"rate": 0.2}, "optimizer")):
        with pytest.raises(ValueError, match=f"append needs two swarms of one {named}"):
            made().append(made(**how))
    assert len(made().append(made())) == 4


def test_merge_is_the_mean_and_keeps_counts_whole(swarm):
    trained = swarm.train(X, Y, mse)[0]
    merged = trained.merge()
    mean = np.mean(np.asarray(trained.params["Dense_0"]["kernel"]), axis=0, keepdims=True)
    np.testing.assert_array_equal(merged.params["Dense_0"]["kernel"], mean)
    assert (merged.step, merged.opt_state[0].count, merged.opt_state[0].count.dtype) == (1, 1, jnp.int32)
    assert len(merged) == 1 and merged.shape == (1, 3, 2)


def test_merge_takes_the_first_members_random_keys():
    swarm = TurbaTrainState.swarm(MLP((2,)), optax.add_noise(0.1, 0.5, key=jax.random.key(3)), 3, 3)
    (key,) = swarm.merge().opt_state.rng_key
    assert key == jax.random.key(3)


def test_apply_gradients_clips_each_member_by_itself():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    swarm = TurbaTrainState.swarm(MLP((2,)), tx, 2, 3)
    grads = jax.tree.map(
        lambda p: jnp.ones_like(p) * jnp.array([1.0, 100.0]).reshape(2, *[1] * (p.ndim - 1)), swarm.params
    )
    moved = jax.tree.map(jnp.subtract, swarm.params, swarm.apply_gradients(grads=grads).params)
    for i in range(2):
        norm = np.sqrt(sum(float((leaf[i] ** 2).sum()) for leaf in jax.tree.leaves(moved)))
        np.testing.assert_allclose(norm, 1.0, rtol=1e-5)


def test_apply_gradients_passes_the_loss_on_to_optimizers_that_want_it():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    swarm = TurbaTrainState.swarm(MLP((2,)), tx, 2, 3)
    zeros = jax.tree.map(jnp.zeros_like, swarm.params)
    for _ in range(4):
        swarm = swarm.apply_gradients(grads=zeros, value=jnp.array([1.0, jnp.nan]))
    assert swarm.opt_state[1].scale[0] < 1


def test_create_is_flax_train_state(swarm):
    state = TurbaTrainState.create(apply_fn=swarm.apply_fn, params=swarm.get_state(0).params, tx=optax.sgd(0.5))
    grads = jax.tree.map(jnp.ones_like, state.params)
    moved = state.apply_gradients(grads=grads)
    np.testing.assert_allclose(moved.params["Dense_0"]["bias"], -0.5)
    assert moved.step == 1


def test_cost_analysis_counts_the_products_of_one_member(swarm):
    assert swarm.cost_analysis(X[0])["flops"] >= 2 * 8 * (3 * 5 + 5 * 2)


def test_a_swarm_works_under_jit_and_tree_map(swarm):
    doubled = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf * 2, s))(swarm)
    assert len(doubled) == 4 and doubled.apply_fn == swarm.apply_fn


def test_setting_the_same_loss_again_compiles_nothing(swarm):
    from turbanet.turba_train_state import _compiled_each

    swarm.set_loss_fn(mse).train(X, Y)
    size = _compiled_each._cache_size()
    swarm.set_loss_fn(mse).train(X, Y)
    assert _compiled_each._cache_size() == size


def test_the_public_readme_loop_runs_unchanged():
    x, y = rng.integers(0, 2, (10, 10)).astype(float), rng.integers(0, 2, (10, 1)).astype(float)
    swarm = TurbaTrainState.swarm(MLP((32, 1)), optax.adam(0.01), 10, x[0].reshape(1, -1))
    losses = np.zeros((30, 10))
    for epoch in range(30):
        batch = np.expand_dims(x, 0).repeat(len(swarm), axis=0), np.expand_dims(y, 0).repeat(len(swarm), axis=0)
        swarm, losses[epoch], _ = swarm.train(*batch, mse)
    assert (losses[-1] < losses[0] / 2).all()


def test_evaluate_takes_the_softmax_loss_of_one_hot_targets(swarm):
    one_hot = np.eye(2, dtype=np.float32)[rng.integers(0, 2, (4, 8))]
    loss, logits = swarm.evaluate(X, one_hot, softmax_cross_entropy)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log((probability * one_hot).sum(-1)).mean(1), rtol=1e-5)


def test_members_are_selected_by_their_ids():
    swarm = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 5, 3).remove_state(1)
    chosen = swarm[[4, 0]]
    assert chosen.id.tolist() == [4, 0]
    np.testing.assert_array_equal(chosen.params["Dense_0"]["kernel"][0], swarm.params["Dense_0"]["kernel"][3])
    assert len(swarm[2]) == 1 and [state.id for state in swarm] == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((28, 28, 1), r"input_size is one number, .*: give sample_input=np.zeros\(\(1, 28, 28, 1\)\)"),
        ([4], r"give sample_input=np.zeros\(\(1, 4\)\)"),
        (0, "input_size must be a whole number of at least 1"),
        (4.0, "input_size must be a whole number of at least 1"),
    ],
)
def test_an_input_size_is_one_number(size, message):
    with pytest.raises(ValueError, match=message):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 3, size)


def test_equal_schedules_built_apart_are_appended():
    def made(factor):
        adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
        swarm = TurbaTrainState.swarm(MLP((2,)), adam, 2, 3)
        return turbanet.with_schedule(swarm, lambda epoch, base: base * factor**epoch)

    assert len(made(0.9).append(made(0.9))) == 4
    with pytest.raises(ValueError, match="their schedule differ"):
        made(0.9).append(made(0.8))


def test_a_position_is_one_int_and_one_network_has_one_rate():
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    swarm = TurbaTrainState.swarm(MLP((2,)), adam, 3, 3)
    assert swarm.get_state(jnp.argmax(jnp.array([0, 1]))).id == 1
    with pytest.raises(TypeError, match=r"by its position, one int; got \[0, 1\]: several are swarm\[ids\]"):
        swarm.remove_state([0, 1])
    with pytest.raises(ValueError, match="learning_rate must be one number, of one network"):
        turbanet.with_hyperparameters(swarm.get_state(0), learning_rate=[0.2])


def test_members_of_several_seeds_are_selected_by_pairs():
    swarm = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 3, 3, seed=[5, 6, 7])
    assert swarm[[(7, 0), (5, 0)]].seed.tolist() == [7, 5]
    with pytest.raises(ValueError, match="0 names more than one member"):
        swarm[[0]]


def test_a_member_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="No member 9 in this swarm"):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 3, 3)[[0, 9]]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([True, False, True], TypeError, "a mask by position"),
        (["a"], KeyError, "Members go by id, an int each, or by pairs"),
        ([(0, 1, 2)], KeyError, "Members go by id, an int each, or by pairs"),
        ([(1, 0)], KeyError, r"No member \[1, 0\]"),
        ([-1], KeyError, "No member -1"),
        ([], ValueError, "at least one member, and no id came"),
    ],
)
def test_what_names_no_member_is_refused(ids, error, message):
    with pytest.raises(error, match=message):
        TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 3, 3)[ids]


def test_iteration_gives_each_network_as_get_state_does():
    swarm = TurbaTrainState.swarm(MLP((2,)), optax.adam(0.1), 3, 3, seed=4)
    for position, state in enumerate(swarm):
        assert jax.tree.structure(state) == jax.tree.structure(swarm.get_state(position))
        jax.tree.map(np.testing.assert_array_equal, state, swarm.get_state(position))
        assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, swarm.get_state(position))


def test_memory_and_time_grow_with_the_members_and_not_with_their_square():
    params = {"w": np.zeros((20_000, 1), np.float32)}
    swarm = TurbaTrainState.vmap_create(apply_fn=lambda variables, x: x, params=params, tx=optax.sgd(0.1))
    tracemalloc.start()
    reverse = swarm[np.arange(20_000)[::-1]]
    both = swarm.append(reverse)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reverse.id[0] == 19_999 and both.id.tolist() == list(range(40_000))
    assert peak < 100 * 2**20


def test_append_tells_the_new_ids():
    swarm = TurbaTrainState.swarm(MLP((2,)), optax.sgd(0.1), 3, 3)
    both, ids = swarm.append(swarm[[2, 0]], return_ids=True)
    assert ids.tolist() == [3, 4] and both.id.tolist() == [0, 1, 2, 3, 4]


def test_a_model_of_several_inputs_takes_a_dict():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.Dense(4)(x["left"]) + nn.Dense(4)(x["right"]))

    x = {"left": X[0], "right": np.ones((8, 2), np.float32)}
    made = TurbaTrainState.swarm(Two(), optax.adam(0.01), 3, sample_input=x, seed=3)
    again = TurbaTrainState.swarm(Two(), optax.adam(0.01), 3, sample_input=jax.tree.map(jnp.asarray, x), seed=3)
    jax.tree.map(np.testing.assert_array_equal, made.params, again.params)
    trained, history = turbanet.fit(made, x, Y[0, :, :1], mse, epochs=2, progress=False)
    assert turbanet.predict(trained, x).shape == (3, 8, 1) and np.isfinite(history.train_loss).all()
    swarm, loss, _ = made.train(jax.tree.map(lambda leaf: np.stack([leaf] * 3), x), np.stack([Y[0, :, :1]] * 3), mse)
    np.testing.assert_allclose(loss, history.train_loss[0], rtol=1e-5)
    with pytest.raises(ValueError, match="shape is unknown: an input of this swarm is no single array"):
        _ = swarm.shape


def test_a_swarm_of_numpy_arrays_is_trained_and_taken_apart(swarm):
    held = jax.tree.map(np.asarray, swarm)
    for method in ("train", "evaluate"):
        given, expected = (getattr(each, method)(X, Y, mse) for each in (held, swarm))
        jax.tree.map(np.testing.assert_array_equal, given[-2:], expected[-2:])
    np.testing.assert_array_equal(held.predict(X), swarm.predict(X))
    takes = [lambda s: s[[2, 0]], lambda s: s.get_state(1), lambda s: s.append(s), lambda s: s.merge()]
    for take in takes:
        for found, expected in zip(*[jax.tree.leaves(take(each)) for each in (held, swarm)], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_copies_keep_the_functions(swarm):
    for again in (copy.copy(swarm), copy.deepcopy(swarm)):
        assert jax.tree.structure(again) == jax.tree.structure(swarm)
        np.testing.assert_array_equal(again.predict(X), swarm.predict(X))
    assert copy.deepcopy(swarm).id is not swarm.id


def test_members_are_plain_flax_params():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))

    made = TurbaTrainState.swarm(Net(), optax.adam(0.1), 3, sample_input=X[0])
    trained, _ = turbanet.fit(made, X[0], Y[0], mse, epochs=3, progress=False)
    one = trained.get_state(1)
    found = Net().apply({"params": one.params, **one.collections}, X[0])
    np.testing.assert_allclose(found, turbanet.predict(trained, X[0])[1], rtol=1e-6)


def test_an_equal_model_made_anew_compiles_nothing(monkeypatch):
    compiled, creator = [], TurbaTrainState._creator
    monkeypatch.setattr(TurbaTrainState, "_creator", lambda *given: compiled.append(given) or creator(*given))

    def made(width=7, rate=0.1, seed=0, rows=1, name="tanh"):
        class Net(nn.Module):
            width: int
            act: str = name

            @nn.compact
            def __call__(self, x):
                return nn.Dense(2)(getattr(jnp, self.act)(nn.Dense(self.width)(x)))

        model, optimizer = Net(width), optax.adam(rate)
        swarm = TurbaTrainState.swarm(model, optimizer, 3, sample_input=np.ones((rows, 4), np.float32), seed=seed)
        assert swarm.tx is optimizer and swarm.apply_fn.__self__ is model
        return swarm

    first = made()
    made(), made(seed=5), made(rate=0.1)
    assert len(compiled) == 1
    jax.tree.map(np.testing.assert_array_equal, made().params, first.params)
    other = made(seed=5)
    assert not np.array_equal(other.params["Dense_0"]["kernel"], first.params["Dense_0"]["kernel"])
    for number, how in enumerate(({"width": 8}, {"rate": 0.2}, {"rows": 2}, {"name": "sin"})):
        made(**how)
        assert len(compiled) == 2 + number, how


@pytest.mark.parametrize("rows", [1, 2])
def test_a_swarm_of_one_takes_rows_with_and_without_the_member_axis(rows):
    one = TurbaTrainState.swarm(MLP((3,)), optax.sgd(0.1), 1, input_size=4)
    x, y = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4), np.arange(rows)
    layer = one.params["Dense_0"]
    logits = x @ np.asarray(layer["kernel"][0]) + np.asarray(layer["bias"][0])
    for bare in (x, x[None]):
        np.testing.assert_allclose(one.predict(bare), logits[None], rtol=1e-5)
    losses = -jax.nn.log_softmax(logits)[np.arange(rows), y]
    for data in ((x, y), (x[None], y[None]), (x, np.eye(3)[y]), (x[None], np.eye(3)[y][None])):
        np.testing.assert_allclose(one.evaluate(*data, softmax_cross_entropy)[0], [losses.mean()], rtol=1e-5)
        assert one.train(*data, softmax_cross_entropy)[2].shape == (1, rows, 3)


def test_a_loss_of_no_rows_is_refused():
    swarm = TurbaTrainState.swarm(MLP((3,)), optax.sgd(0.1), 2, input_size=4)
    empty = np.zeros((2, 0, 4)), np.zeros((2, 0), int)
    for call in (swarm.train, swarm.evaluate):
        with pytest.raises(ValueError, match=r"x has shape \(2, 0, 4\): a loss needs at least one row of each member"):
            call(*empty, softmax_cross_entropy)


class Curious(TurbaTrainState):
    """A swarm with a field of the user's own, of a name that 0.6 had for itself, and an update of its own."""

    stopping: Any = None

    def apply_gradients(self, *, grads, **kwargs):
        return super().apply_gradients(grads=jax.tree.map(jnp.sign, grads), **kwargs)


def test_a_subclass_trains_with_a_field_and_an_update_of_its_own():
    x, y = X[0], Y[0]
    swarm = Curious.swarm(MLP((5, 2)), optax.sgd(0.1), 2, 3).replace(stopping=jnp.array([7, 8]))
    held_out = {"validation": (x, y), "patience": 2}
    trained, _ = turbanet.fit(swarm, x, y, mse, epochs=1, progress=False, **held_out)
    assert type(trained) is Curious and trained.stopping.tolist() == [7, 8]
    steps = jax.tree.map(lambda new, old: abs(new - old), trained.params, swarm.params)
    np.testing.assert_allclose(steps["Dense_1"]["bias"], 0.1, rtol=1e-5)


def test_a_pickle_of_a_swarm_of_0_6_loads(swarm):
    cloudpickle = pytest.importorskip("cloudpickle")
    of_0_6 = {name.removeprefix("_"): value for name, value in vars(swarm).items()}
    assert {"stopping", "underway"} < of_0_6.keys()
    again = _unpickled(TurbaTrainState, cloudpickle.dumps(of_0_6))
    np.testing.assert_array_equal(again.predict(X), swarm.predict(X))
