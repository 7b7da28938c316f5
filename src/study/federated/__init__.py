"""Federated learning by the published protocol, compared with PyTorch's clients and Flower's."""
