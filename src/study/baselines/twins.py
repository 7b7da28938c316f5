"""PyTorch twins of the models, with one member's weights copied to PyTorch and back."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from study.baselines.layers import (
    ChannelsFirst,
    LSTMTwin,
    MeanOverSpace,
    Residual,
    copy_value,
    filled,
    freeze_input_bias,
    make_conv,
    make_linear,
)
from turbanet.networks.convnets import VGG_STAGES, ConvNorm, MobileNet

CONV_NORM = ConvNorm.__name__  # the prefix of its parameters


def mlp_twin(params: Mapping[str, Any]) -> nn.Sequential:
    """Make one member's `turbanet.networks.models.MLP` in PyTorch; `params` have no member axis."""
    if not params or not all(name.startswith("Dense_") for name in params):
        raise ValueError(f"mlp_twin needs layers named Dense_0, Dense_1, ..., got {sorted(params)}.")
    layers = [layer for dense in _numbered(params, "Dense") for layer in (make_linear(dense), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def lstm_twin(params: Mapping[str, Any]) -> "LSTMTwin":
    """Make one member's `turbanet.networks.models.LSTM` in PyTorch; `params` have no member axis.

    Flax's cell has one bias per gate, PyTorch's has two. Here `bias_ih` is zero and not trained: if both were trained,
    Adam would move their sum twice as far.
    """
    cells = [layer for layer in params.values() if "hi" in layer]
    heads = [layer for layer in params.values() if "kernel" in layer]
    if len(cells) != 1 or len(heads) != 1:
        raise ValueError(f"lstm_twin needs one LSTM cell and one Dense layer, got {sorted(params)}.")
    cell = cells[0]
    head = make_linear(heads[0])
    weight_ih, weight_hh = (
        np.concatenate([np.asarray(cell[kind + gate]["kernel"]).T for gate in "ifgo"])  # PyTorch's gate order
        for kind in "ih"
    )
    bias = np.concatenate([np.asarray(cell["h" + gate]["bias"]) for gate in "ifgo"])
    features, hidden = weight_ih.shape[1], weight_hh.shape[1]
    lstm = nn.LSTM(features, hidden, batch_first=True, device="meta", dtype=head.weight.dtype)
    lstm.to_empty(device="cpu")
    copy_value(lstm.weight_ih_l0, weight_ih)
    copy_value(lstm.weight_hh_l0, weight_hh)
    copy_value(lstm.bias_hh_l0, bias)
    freeze_input_bias(lstm)
    return LSTMTwin(lstm, head)


def lenet_twin(params: Mapping[str, Any], padding: int = 0) -> nn.Module:
    """Make one member's `LeNet` with this `padding` in PyTorch, also for x [batch, height, width, channel]."""
    if not {"Conv_0", "Dense_0"} <= set(params):
        raise ValueError(f"lenet_twin needs the params of one LeNet, got {sorted(params)}.")
    convs = [make_conv(layer, padding=padding) for layer in _numbered(params, "Conv")]
    stages = [layer for conv in convs for layer in (conv, nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(ChannelsFirst(), *stages, *_head(params, stages[-3].out_channels))


def lenet5_twin(params: Mapping[str, Any]) -> nn.Module:
    """Make one member's `turbanet.networks.LeNet5` in PyTorch; `with_statistics` sets its running statistics."""
    layers = [_conv_norm(layer, padding=0) for layer in _numbered(params, CONV_NORM)]
    stages = [layer for norm in layers for layer in (norm, nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(ChannelsFirst(), *stages, *_head(params, layers[-1][0].out_channels))


def alexnet_twin(params: Mapping[str, Any]) -> nn.Module:
    """Make one member's `turbanet.networks.AlexNet` in PyTorch."""
    layers = list(_numbered(params, "Conv"))
    stages = []
    for i, layer in enumerate(layers):
        pool = [nn.MaxPool2d(2)] if i in (0, 1, len(layers) - 1) else []
        stages += [make_conv(layer, padding=1), nn.ReLU(), *pool]
    return nn.Sequential(ChannelsFirst(), *stages, *_head(params, layers[-1]["kernel"].shape[-1]))


def vgg_twin(params: Mapping[str, Any]) -> nn.Module:
    """Make one member's `turbanet.networks.VGG` in PyTorch; running statistics start anew."""
    layers = _numbered(params, CONV_NORM)
    stages = []
    for count in VGG_STAGES[len(params) + 2]:  # a VGG's depth counts three Dense layers, ours has one
        for _ in range(count):
            stages += [_conv_norm(next(layers)), nn.ReLU()]
        stages.append(nn.MaxPool2d(2))
    head = make_linear(params["Dense_0"], channels=stages[-3][0].out_channels)
    return nn.Sequential(ChannelsFirst(), *stages, nn.Flatten(), head)


def mobilenet_twin(params: Mapping[str, Any], blocks=MobileNet.blocks) -> nn.Module:
    """Make one member's `turbanet.networks.MobileNet` of these `blocks` in PyTorch; running statistics start anew."""
    layers = _numbered(params, CONV_NORM)
    stages = [_conv_norm(next(layers)), nn.ReLU()]
    for _, stride in blocks:
        stages += [_conv_norm(next(layers), stride, depthwise=True), nn.ReLU(), _conv_norm(next(layers)), nn.ReLU()]
    return nn.Sequential(ChannelsFirst(), *stages, MeanOverSpace(), make_linear(params["Dense_0"]))


def resnet_twin(params: Mapping[str, Any]) -> nn.Module:
    """Make one member's `turbanet.networks.ResNet` in PyTorch; running statistics start anew."""
    layers = _numbered(params, CONV_NORM)
    stages = [_conv_norm(next(layers)), nn.ReLU()]
    width = 16
    blocks = (len(params) - 2) // 6  # in each of three stages, of two layers each; a stem and a head are left over
    for features in (16, 32, 64):
        for _ in range(blocks):
            first = next(layers)
            second = next(layers)
            more = features - width
            body = nn.Sequential(_conv_norm(first, 2 if more else 1), nn.ReLU(), _conv_norm(second))
            stages.append(Residual(body, more))
            width = features
    return nn.Sequential(ChannelsFirst(), *stages, MeanOverSpace(), make_linear(params["Dense_0"]))


def with_statistics(twin: nn.Module, batch_stats: Mapping[str, Any]) -> nn.Module:
    """Copy one member's running means and variances into the twin and return it; batch counts stay."""
    norms = [module for module in twin.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm, layer in zip(norms, _numbered(batch_stats, CONV_NORM), strict=True):
        copy_value(norm.running_mean, layer["BatchNorm_0"]["mean"])
        copy_value(norm.running_var, layer["BatchNorm_0"]["var"])
    return twin


def variables(twin: nn.Module) -> dict[str, Any]:
    """Return the twin's weights as Flax variables: {"params": ...} and, with batch normalisation, "batch_stats"."""

    def of(kind):
        return [module for module in twin.modules() if isinstance(module, kind)]

    def array(tensor):
        return tensor.detach().cpu().numpy().copy()

    params = {}
    batch_stats = {}
    convs = of(nn.Conv2d)
    norms = of(nn.BatchNorm2d)
    for i, conv in enumerate(convs):
        layer = {"kernel": array(conv.weight).transpose(2, 3, 1, 0)}
        if conv.bias is not None:
            layer["bias"] = array(conv.bias)
        if not norms:
            params[f"Conv_{i}"] = layer
            continue
        norm = norms[i]
        scaled = {"scale": array(norm.weight), "bias": array(norm.bias)}
        params[f"{CONV_NORM}_{i}"] = {"Conv_0": layer, "BatchNorm_0": scaled}
        batch_stats[f"{CONV_NORM}_{i}"] = {
            "BatchNorm_0": {"mean": array(norm.running_mean), "var": array(norm.running_var)}
        }
    for i, linear in enumerate(of(nn.Linear)):
        kernel = array(linear.weight).T
        if i == 0 and convs:  # PyTorch flattens channel first
            kernel = kernel.reshape(convs[-1].out_channels, -1, kernel.shape[1]).swapaxes(0, 1).reshape(kernel.shape)
        params[f"Dense_{i}"] = {"kernel": kernel, "bias": array(linear.bias)}
    return {"params": params} | ({"batch_stats": batch_stats} if batch_stats else {})


def reinitialise(twin: nn.Module, *, seed: int) -> nn.Module:
    """Copy the twin with PyTorch's default initialisation; an LSTM's `bias_ih` stays zero and frozen."""
    twin = copy.deepcopy(twin)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in twin.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.LSTM):
                freeze_input_bias(module)
    return twin


def _numbered(params, name):
    """Iterate over the params of the layers `name`_0, `name`_1, ... in order."""
    count = sum(layer.startswith(f"{name}_") for layer in params)
    return iter([params[f"{name}_{i}"] for i in range(count)])


def _head(params, channels):
    """Make the Dense layers, ReLU between them, that follow convolutions with so many output channels."""
    first, *others = _numbered(params, "Dense")
    rest = [layer for other in others for layer in (nn.ReLU(), make_linear(other))]
    return [nn.Flatten(), make_linear(first, channels), *rest]


def _conv_norm(layer, stride=1, *, depthwise=False, padding=None):
    """Make the convolution and batch normalisation of a `ConvNorm`; `padding` None keeps the size."""
    padding = layer["Conv_0"]["kernel"].shape[0] // 2 if padding is None else padding
    conv = make_conv(layer["Conv_0"], stride, depthwise=depthwise, padding=padding)
    norm = nn.BatchNorm2d(conv.out_channels, dtype=conv.weight.dtype)
    return nn.Sequential(conv, filled(norm, layer["BatchNorm_0"]["scale"], layer["BatchNorm_0"]["bias"]))
