"""A swarm's repr says in three lines what it is, whatever its leaves are by now."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import turbanet as tn


@pytest.fixture
def swarm():
    return tn.TurbaTrainState.swarm(tn.MLP((16, 3)), optax.adam(0.01), 5, input_size=4, seed=7)


MODEL = "model: MLP(widths=(16, 3)), 131 parameters"  # 4 * 16 + 16 + 16 * 3 + 3


def test_repr_is_members_model_and_place(swarm):
    who = "TurbaTrainState: 5 member(s), seed 7, ids 0 to 4"
    assert repr(swarm) == f"{who}\n{MODEL} each, float32\nwhere: {jax.devices()[0]}"


def test_repr_of_one_network(swarm):
    assert repr(swarm.get_state(2)).splitlines()[:2] == [
        "TurbaTrainState: one network, seed 7, id 2",
        f"{MODEL}, float32",
    ]


def test_repr_of_several_seeds_and_of_numpy_arrays():
    swarm = tn.TurbaTrainState.swarm(tn.MLP((2,)), optax.sgd(0.1), 2, input_size=3, seed=[3, 9])
    first, _, last = repr(jax.tree.map(np.asarray, swarm)).splitlines()
    assert first.endswith("2 member(s), seeds 3 to 9, id 0") and last == "where: in the host's memory"


def test_repr_names_every_device(swarm):
    swarm = tn.Plan(2, 3).place(swarm)
    assert repr(swarm).endswith(f"where: {jax.devices()[0]}, {jax.devices()[1]}")


def test_repr_of_a_model_is_brief():
    class Long(nn.Module):
        words: tuple = ()
        act: object = nn.relu

        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    swarm = tn.TurbaTrainState.swarm(Long(tuple("words" * 99), nn.tanh), optax.sgd(0.1), 2, input_size=3)
    assert len(repr(swarm)) < 300 and " ...), 4 parameters each" in repr(swarm)
    assert "Long(act=tanh)" in repr(swarm.replace(apply_fn=Long(act=nn.tanh).apply))


@pytest.mark.parametrize("how", [jax.jit, jax.vmap])
def test_repr_of_a_traced_swarm_names_its_model(swarm, how):
    seen = []
    how(lambda swarm: (seen.append(repr(swarm)), swarm.step)[1])(swarm)
    assert seen == ["TurbaTrainState: of leaves without values\nmodel: MLP(widths=(16, 3))\nwhere: nowhere"]


def test_repr_of_other_leaves_fails_not(swarm):
    assert "MLP" in repr(jax.tree.map(lambda leaf: leaf.sharding, swarm))
    assert "MLP" in repr(jax.eval_shape(lambda swarm: swarm, swarm))
    deleted = jax.tree.map(jnp.copy, swarm)
    jax.tree.map(lambda leaf: leaf.delete(), deleted)
    assert "MLP" in repr(deleted)


def test_notebooks_see_it_escaped(swarm):
    swarm = swarm.replace(apply_fn=lambda variables, x: x)
    assert swarm._repr_html_().startswith("<pre>TurbaTrainState") and "&lt;lambda&gt;" in swarm._repr_html_()
