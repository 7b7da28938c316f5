"""Small architectures of one network, in plain Flax."""

from collections.abc import Sequence

from flax import linen as nn


class MLP(nn.Module):
    """Dense layers with ReLU between them: x [..., feature] -> [..., widths[-1]], no activation at the end."""

    widths: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class LSTM(nn.Module):
    """One LSTM layer and a linear read-out of its last state: x [batch, time, feature] -> [batch, outputs]."""

    hidden: int = 32
    outputs: int = 1

    @nn.compact
    def __call__(self, x):
        (_, last), _ = nn.RNN(nn.OptimizedLSTMCell(self.hidden), return_carry=True)(x)
        return nn.Dense(self.outputs)(last)
