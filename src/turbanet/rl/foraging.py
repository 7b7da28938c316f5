"""A world for many agents: they forage on a grid, see the cells near them and eat the food they step on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])  # stay, up, down, left, right


@struct.dataclass
class Board:
    """State of a `Foraging` world: where the agents and the food are."""

    place: Any  # int [agent, 2], row and column of each agent
    food: Any  # bool [row, column]


@dataclasses.dataclass(frozen=True)
class Foraging:
    """A grid that wraps around at its edges, on which food grows; agents that step on the same food share it.

    agents : number of agents
    size : rows and columns of the grid
    sight : cells that an agent sees in each direction
    food : share of the cells that have food at the beginning
    growth : probability that food grows on an empty cell in a step
    limit : steps of an episode

    An observation [feature] holds whether each cell in sight has food, then how many other agents are on each.
    """

    agents: int = 64
    size: int = 32
    sight: int = 2
    food: float = 0.1
    growth: float = 0.005
    limit: int = 128

    actions = len(MOVES)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Board]:
        """Return (observations [agent, feature], board) of a new episode."""
        place_key, food_key = jax.random.split(key)
        board = Board(
            jax.random.randint(place_key, (self.agents, 2), 0, self.size),
            jax.random.uniform(food_key, (self.size, self.size)) < self.food,
        )
        return self.observe(board), board

    def step(self, key: jax.Array, board: Board, action: jax.Array) -> tuple[jax.Array, Board, jax.Array]:
        """Return (observations [agent, feature], board, rewards [agent]) after the agents' actions, int [agent].

        A reward is an agent's share of the food in its cell: one over the number of agents there.
        """
        place = (board.place + jnp.asarray(MOVES)[action]) % self.size
        cell = self._cells(place)
        crowd = self._crowd(cell)
        food = board.food.ravel()
        reward = food[cell] / crowd[cell]
        grown = jax.random.uniform(key, food.shape) < self.growth
        board = Board(place, ((food & (crowd == 0)) | grown).reshape(board.food.shape))
        return self.observe(board), board, reward

    def observe(self, board: Board) -> jax.Array:
        """Return what each agent sees, [agent, feature]."""
        near = np.stack(np.meshgrid(*[np.arange(-self.sight, self.sight + 1)] * 2, indexing="ij"), axis=-1)
        visible = self._cells((board.place[:, None] + near.reshape(1, -1, 2)) % self.size)
        others = self._crowd(self._cells(board.place))[visible] - (near.reshape(-1, 2) == 0).all(1)
        return jnp.concatenate([board.food.ravel()[visible], others], axis=1).astype(float)

    def _cells(self, place):
        """Index of each cell in the flattened grid."""
        return place[..., 0] * self.size + place[..., 1]

    def _crowd(self, cell):
        """Number of agents on each cell of the grid, float [cell]."""
        return jnp.zeros(self.size**2).at[cell].add(1.0)
