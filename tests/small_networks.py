"""A network for tests of what is around it."""

from flax import linen as nn


class Line(nn.Module):
    """A linear function of a window [time, channel], which compiles faster than an LSTM."""

    outputs: int = 1

    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral(self.outputs, axis=(-2, -1))(x)
