"""A world that many agents live in together: they forage on a grid, see what is near and eat what they come upon."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])  # stay, up, down, left, right


@struct.dataclass
class Board:
    """Where everything is."""

    place: Any  # int [agent, 2], row and column of each
    food: Any  # bool [row, column]


@dataclasses.dataclass(frozen=True)
class Foraging:
    """A grid without edges, on which food grows and agents eat what they step on; those who meet at it share it.

    agents : how many there are
    size : rows and columns of the grid
    sight : cells that an agent sees in each direction
    food : share of the cells that have food at the beginning
    growth : probability with which food grows on an empty cell, in a step
    limit : steps of an episode

    An agent sees, [feature], the cells around it one after the other: whether there is food, and how many others.
    """

    agents: int = 64
    size: int = 32
    sight: int = 2
    food: float = 0.1
    growth: float = 0.005
    limit: int = 128

    actions = len(MOVES)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Board]:
        """(Observations [agent, feature], board) of a new episode."""
        place, food = jax.random.split(key)
        board = Board(
            jax.random.randint(place, (self.agents, 2), 0, self.size),
            jax.random.uniform(food, (self.size, self.size)) < self.food,
        )
        return self.observe(board), board

    def step(self, key: jax.Array, board: Board, action: jax.Array) -> tuple[jax.Array, Board, jax.Array]:
        """(Observations [agent, feature], board, rewards [agent]) after every agent's action, int [agent].

        A reward is the share of what was eaten: one over how many stand at the food.
        """
        place = (board.place + jnp.asarray(MOVES)[action]) % self.size
        cell = self._cells(place)
        crowd = self._counted(cell)
        food = board.food.ravel()
        reward = food[cell] / crowd[cell]
        grown = jax.random.uniform(key, food.shape) < self.growth
        board = Board(place, ((food & (crowd == 0)) | grown).reshape(board.food.shape))
        return self.observe(board), board, reward

    def observe(self, board: Board) -> jax.Array:
        """What each agent sees, [agent, feature]."""
        near = np.stack(np.meshgrid(*[np.arange(-self.sight, self.sight + 1)] * 2, indexing="ij"), axis=-1)
        seen = self._cells((board.place[:, None] + near.reshape(1, -1, 2)) % self.size)
        others = self._counted(self._cells(board.place))[seen] - (near.reshape(-1, 2) == 0).all(1)
        return jnp.concatenate([board.food.ravel()[seen], others], axis=1).astype(float)

    def _cells(self, place):
        return place[..., 0] * self.size + place[..., 1]

    def _counted(self, cell):
        """How many agents stand at each cell, float [cell]."""
        return jnp.zeros(self.size**2).at[cell].add(1.0)
