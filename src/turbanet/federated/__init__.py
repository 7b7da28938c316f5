"""Federated learning of one network by clients that keep their rows, and local SGD by workers."""

import sys

from turbanet import moved
from turbanet.federated.averaging import LocalHistory, local_sgd
from turbanet.federated.privacy import client_epsilon
from turbanet.federated.server import FederatedHistory, train

__all__ = [
    "FederatedHistory",
    "LocalHistory",
    "client_epsilon",
    "local_sgd",
    "train",
]

sys.modules[__name__].__class__ = moved.Federated
