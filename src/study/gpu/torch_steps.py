"""Training in PyTorch of one network or all at once, eager or as a CUDA graph; losses accumulate on the device."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch
from torch import nn
from torch.func import functional_call, vmap

WARM_UP = 3  # steps before a graph is captured, as PyTorch's manual asks for


class Training:
    """Networks in training: `step(rows)` takes a step on these rows, an index tensor, or on all rows for None.

    total : the sum of the losses so far, [network]
    """

    def __init__(self, weights: list[torch.Tensor], losses: Callable, *, networks: int, learning_rate: float, **adam):
        """losses(rows) -> [network]; `adam` : keyword arguments of PyTorch's Adam, such as fused=True."""
        self.weights = weights
        self.losses = losses
        self.optimizer = torch.optim.Adam(weights, lr=learning_rate, **adam)
        self.total = torch.zeros(networks, device=weights[0].device)
        self.start = [value.detach().clone() for value in weights]

    def step(self, rows: torch.Tensor | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        values = self.losses(rows)
        values.sum().backward()
        self.optimizer.step()
        self.total.add_(values.detach())

    def reset(self) -> None:
        """Restart: initial weights, moments and losses at zero."""
        with torch.no_grad():
            for value, first in zip(self.weights, self.start, strict=True):
                value.copy_(first)
            for moments in self.optimizer.state.values():
                for value in moments.values():
                    value.zero_()
            self.total.zero_()

    def capture(self, rows: torch.Tensor | None = None) -> None:
        """Turn the step into one CUDA graph; its Adam must be capturable."""
        static = None if rows is None else rows.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(static)

        def replay(rows=None):
            if static is not None:
                static.copy_(rows)
            graph.replay()

        self.step = replay  # type: ignore[method-assign]


def one_network(network: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Callable, **settings: Any) -> Training:
    """Make the training of one network."""

    def losses(rows):
        batch = (x, y) if rows is None else (x[rows], y[rows])
        return loss(network(batch[0]), batch[1])[None]

    return Training(list(network.parameters()), losses, networks=1, **settings)


def all_networks(
    skeleton: nn.Module,
    params: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    loss: Callable,
    **settings: Any,
) -> Training:
    """Make the training of all networks by torch.func's vmap; params {name: [network, ...]}, rows [network, batch]."""
    skeleton = copy.deepcopy(skeleton).to("meta")
    params = {name: value.requires_grad_() for name, value in params.items()}

    def of_one(params, x, y):
        return loss(functional_call(skeleton, params, (x,)), y)

    def losses(rows):
        batch = (x, y) if rows is None else (x[rows], y[rows])
        axis = None if rows is None else 0
        return vmap(of_one, in_dims=(0, axis, axis))(params, *batch)

    weights = list(params.values())
    return Training(weights, losses, networks=len(weights[0]), **settings)


def stacked_products(params: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, **settings: Any) -> Training:
    """Make the training of all MLPs as batched products, compiled by torch.compile(mode="reduce-overhead")."""
    weights = [value.requires_grad_() for value in params.values()]  # weight, bias, weight, bias, ...
    networks = len(weights[0])

    @torch.compile(mode="reduce-overhead")
    def compiled(weights):
        h = x.expand(networks, *x.shape)
        for number in range(0, len(weights), 2):
            h = torch.relu(h) if number else h
            h = torch.baddbmm(weights[number + 1][:, None], h, weights[number].transpose(1, 2))
        picked = torch.log_softmax(h, -1).gather(-1, y.expand(networks, -1)[..., None])
        return -picked.squeeze(-1).mean(-1)

    return Training(weights, lambda rows: compiled(weights).clone(), networks=networks, **settings)


TF32 = "TF32"
PRECISIONS = {TF32: (None, "high"), "float32": ("highest", "highest")}  # of float32 products, to JAX and to PyTorch


@contextlib.contextmanager
def multiplying_in(precision: str) -> Iterator[None]:
    """Multiply float32 matrices so in both libraries, within a `with` block."""
    in_jax, in_torch = PRECISIONS[precision]
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(in_torch)
    torch.backends.cudnn.allow_tf32 = precision == TF32
    try:
        with jax.default_matmul_precision(in_jax):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
