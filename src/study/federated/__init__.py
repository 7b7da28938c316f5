"""Federated learning by the published protocol, PyTorch's clients and Flower's beside it."""
