"""PyTorch layers of the twins: made from Flax's parameters of one member, or missing in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils import skip_init


def tensor(array) -> torch.Tensor:
    """Convert the array to a tensor; it is copied only where PyTorch may not write to it."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def freeze_input_bias(lstm):
    """Set an LSTM's `bias_ih` to zero and exclude it from training."""
    nn.init.zeros_(lstm.bias_ih_l0)
    lstm.bias_ih_l0.requires_grad_(False)


class LSTMTwin(nn.Module):
    """`turbanet.networks.models.LSTM` in PyTorch: x [batch, time, feature] -> [batch, output]."""

    unrolled = False  # True runs the cell step by step, as torch.func's vmap has no rule for nn.LSTM

    def __init__(self, lstm: nn.LSTM, head: nn.Linear):
        super().__init__()
        self.lstm = lstm
        self.head = head

    def forward(self, x):
        return self.head(self._unroll(x) if self.unrolled else self.lstm(x)[1][0][-1])

    def _unroll(self, x):
        lstm = self.lstm
        inputs = nn.functional.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0)
        hidden = carry = x.new_zeros(len(x), lstm.hidden_size)
        for gates in inputs.unbind(1):
            i, f, g, o = (gates + hidden @ lstm.weight_hh_l0.T).chunk(4, dim=-1)
            carry = f.sigmoid() * carry + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * carry.tanh()
        return hidden


class Residual(nn.Module):
    """relu(x + body(x)); where the body adds `more` channels, x is strided by two and padded with zero channels."""

    def __init__(self, body, more):
        super().__init__()
        self.body = body
        self.more = more

    def forward(self, x):
        out = self.body(x)
        if self.more:
            x = nn.functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, 0, self.more))
        return nn.functional.relu(x + out)


class MeanOverSpace(nn.Module):
    """Mean over pixels: x [batch, channel, height, width] -> [batch, channel]."""

    def forward(self, x):
        return x.mean((2, 3))


class ChannelsFirst(nn.Module):
    """PyTorch's axis order: x [batch, height, width, channel] -> [batch, channel, height, width].

    In memory the channels stay last, which convolutions on CPU cores are faster with.
    """

    def forward(self, x):
        return x.movedim(-1, 1)


def make_conv(layer, stride=1, *, depthwise=False, padding=0):
    kernel = np.asarray(layer["kernel"])  # [height, width, input of a group, output]
    *window, inputs, outputs = kernel.shape
    groups = outputs if depthwise else 1
    kwargs = {"stride": stride, "padding": padding, "groups": groups, "bias": "bias" in layer}
    conv = skip_init(nn.Conv2d, inputs * groups, outputs, window, dtype=tensor(kernel).dtype, **kwargs)
    return filled(conv, kernel.transpose(3, 2, 0, 1), layer.get("bias"))


def make_linear(layer, channels=1):
    """Make a Dense layer; after a convolution its inputs are reordered, as PyTorch flattens channels first."""
    kernel = np.asarray(layer["kernel"])
    if kernel.ndim != 2:
        raise ValueError(f"A kernel is [input, output], this one {kernel.shape}: pass one member's params.")
    rows = kernel.reshape(-1, channels, kernel.shape[1]).swapaxes(0, 1).reshape(kernel.shape)
    linear = skip_init(nn.Linear, *kernel.shape, dtype=tensor(kernel).dtype)
    return filled(linear, rows.T, layer["bias"])


def filled(module, weight, bias):
    copy_value(module.weight, weight)
    if bias is not None:
        copy_value(module.bias, bias)
    return module


def copy_value(parameter, value):
    with torch.no_grad():
        parameter.copy_(tensor(value))
