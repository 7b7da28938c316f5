"""Two spirals, generated from a seed."""

import numpy as np


def spirals(n=128, *, noise=0.05, rotations=1.0, seed=0):
    """Generate two spirals, half a turn apart: x float32 [n, 2], y int32 [n]."""
    rng = np.random.default_rng(seed)
    radius = np.sqrt(np.linspace(0, 1, n))
    angle = 2 * np.pi * rotations * radius
    y = rng.integers(0, 2, n)
    x = (2 * y - 1)[:, None] * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (x + noise * rng.normal(size=(n, 2))).astype(np.float32), y.astype(np.int32)
