"""Network architectures in plain Flax, and the operations that make them fast in a swarm."""

from turbanet.networks.convnets import VGG, AlexNet, LeNet, LeNet5, MobileNet, ResNet
from turbanet.networks.cpu.conv import matmul_conv
from turbanet.networks.cpu.lstm import lstm
from turbanet.networks.cpu.products import dot_general
from turbanet.networks.models import LSTM, MLP

__all__ = [
    "LSTM",
    "MLP",
    "VGG",
    "AlexNet",
    "LeNet",
    "LeNet5",
    "MobileNet",
    "ResNet",
    "dot_general",
    "lstm",
    "matmul_conv",
]
