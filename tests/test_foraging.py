import jax
import jax.numpy as jnp
import numpy as np

from turbanet.rl.foraging import MOVES, Board, Foraging

STAY, UP, DOWN, LEFT, RIGHT = range(5)
KEY = jax.random.key(0)


def board(places, food, size=5):
    cells = np.zeros((size, size), bool)
    cells[tuple(np.transpose(food))] = True
    return Board(jnp.array(places), jnp.asarray(cells))


def test_an_agent_eats_what_it_steps_on_and_those_who_meet_share_it():
    world = Foraging(agents=4, size=5, growth=0.0)
    before = board([[1, 1], [1, 3], [4, 4], [0, 0]], [[1, 2], [0, 4], [3, 3]])
    _, after, reward = world.step(KEY, before, jnp.array([RIGHT, LEFT, DOWN, STAY]))
    np.testing.assert_allclose(reward, [0.5, 0.5, 1, 0])  # the third goes over the edge, to row 0
    assert np.argwhere(after.food).tolist() == [[3, 3]]
    assert after.place.tolist() == [[1, 2], [1, 2], [0, 4], [0, 0]]


def test_moves_are_what_they_are_called():
    assert MOVES.tolist() == [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]


def test_an_agent_sees_food_and_others_around_it():
    world = Foraging(agents=2, size=5, sight=1)
    seen = world.observe(board([[0, 0], [0, 1]], [[4, 4], [1, 0]]))
    assert seen.shape == (2, 18)
    # rows 4, 0, 1 and columns 4, 0, 1 around the first; the second stands to its right
    assert seen[0].tolist() == [*(1, 0, 0, 0, 0, 0, 0, 1, 0), *(0, 0, 0, 0, 0, 1, 0, 0, 0)]
    assert seen[1].tolist() == [*(0, 0, 0, 0, 0, 0, 1, 0, 0), *(0, 0, 0, 1, 0, 0, 0, 0, 0)]


def test_two_at_one_place_see_one_another_and_not_themselves():
    seen = Foraging(agents=3, size=5, sight=1).observe(board([[2, 2], [2, 2], [0, 0]], [[0, 0]]))
    assert seen[:, 9 + 4].tolist() == [1, 1, 0]


def test_food_grows_as_often_as_it_is_told():
    world = Foraging(agents=1, size=100, growth=0.1)
    _, after, _ = world.step(KEY, board([[0, 0]], [[50, 50]], size=100), jnp.array([STAY]))
    assert abs(after.food.mean() - 0.1) < 0.01 and after.food[50, 50]


def test_reset_places_agents_and_food():
    seen, begun = Foraging(agents=500, size=64, food=0.25).reset(KEY)
    assert seen.shape == (500, 50) and abs(begun.food.mean() - 0.25) < 0.02
    assert begun.place.min() == 0 and begun.place.max() == 63
