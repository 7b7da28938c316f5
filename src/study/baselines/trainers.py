"""The usual methods to train the same networks in PyTorch: a loop, torch.func's vmap, torch.compile."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import joblib
import numpy as np
import torch
from torch import nn
from torch.func import functional_call, replace_all_batch_norm_modules_, stack_module_state, vmap

from study.baselines.layers import tensor
from study.measurement import timing

LOSSES = {"cross_entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}


def train_loop(
    twins: Sequence[nn.Module],
    x,
    y,
    *,
    loss: str,
    learning_rate: float,
    order=None,
    epochs: int,
    per_member: bool = False,
    fused: bool = False,
    threads: int | None = None,
) -> np.ndarray:
    """Train one network after the other in place with Adam.

    Parameters
    ----------
    x, y : arrays [row, ...], or [member, row, ...] with `per_member`
    loss : "cross_entropy" (logits; integer labels or one-hot) or "mse", mean over the batch
    order : int [member, epoch, step, batch], the rows of each step; None takes all rows in one step per epoch
    fused : PyTorch's fused Adam instead of its default
    threads : PyTorch's threads during the call; None leaves them

    Returns
    -------
    losses : float64 [epoch, member], the mean over the epoch's steps, each before its update

    Raises
    ------
    ValueError : an unknown loss; members, epochs or rows that do not fit
    """
    loss_fn, x, y, order = prepare(twins, x, y, loss, order, epochs, per_member)
    losses = np.empty((epochs, len(twins)))
    with torch_threads(threads):
        for member, twin in enumerate(twins):
            optimizer = _adam(twin.parameters(), learning_rate, fused)
            own_x, own_y = (x[member], y[member]) if per_member else (x, y)
            for epoch in range(epochs):
                steps = []
                for batch in [...] if order is None else order[member, epoch]:
                    optimizer.zero_grad()
                    value = loss_fn(twin(own_x[batch]), own_y[batch])
                    value.backward()
                    optimizer.step()
                    steps.append(value.detach())
                losses[epoch, member] = torch.stack(steps).double().mean().item()
    return losses


def train_func(
    twins, x, y, *, loss, learning_rate, order=None, epochs, per_member=False, fused=False, threads=None
) -> np.ndarray:
    """Train all networks at once with torch.func's vmap; arguments, errors and losses as in `train_loop`.

    One Adam updates the stacked parameters, which equals one Adam each because Adam is elementwise. Running statistics
    of batch normalisation, which vmap cannot write to, are not updated.
    """
    loss_fn, x, y, order = prepare(twins, x, y, loss, order, epochs, per_member)
    skeleton = replace_all_batch_norm_modules_(copy.deepcopy(twins[0]).to("meta"))
    skeleton.unrolled = True  # only an LSTM reads it
    params, _ = stack_module_state(list(twins))
    optimizer = _adam(params.values(), learning_rate, fused)
    members = torch.arange(len(twins), device=x.device)[:, None]
    axis = None if order is None and not per_member else 0

    def one(params, x, y):
        return loss_fn(functional_call(skeleton, params, (x,)), y)

    all_members = vmap(one, in_dims=(0, axis, axis))
    losses = np.empty((epochs, len(twins)))
    with torch_threads(threads):
        for epoch in range(epochs):
            steps = []
            for rows in [...] if order is None else order[:, epoch].unbind(1):
                batch = (members, rows) if per_member and order is not None else rows
                optimizer.zero_grad()
                values = all_members(params, x[batch], y[batch])
                values.sum().backward()
                optimizer.step()
                steps.append(values.detach())
            losses[epoch] = torch.stack(steps).double().mean(0).cpu().numpy()
    with torch.no_grad():
        for member, twin in enumerate(twins):
            for name, parameter in twin.named_parameters():
                parameter.copy_(params[name][member])
    return losses


def train_compiled(twins, x, y, *, network, compiled, order=None, epochs, per_member=False, **settings) -> np.ndarray:
    """Run `train_loop` on `compiled`, torch.compile's form of `network`, with each twin's weights in turn.

    The twins keep their initial weights.
    """
    losses = np.empty((epochs, len(twins)))
    for member, twin in enumerate(twins):
        network.load_state_dict(twin.state_dict())
        one = slice(member, member + 1)
        rows = None if order is None else order[one]
        pair = (x[one], y[one]) if per_member else (x, y)
        job = {"order": rows, "epochs": epochs, "per_member": per_member}
        losses[:, one] = train_loop([compiled], *pair, **job, **settings)
    return losses


def best_threads(run: Callable[[int], Any], candidates: Sequence[int] | None = None) -> int:
    """Find the fastest number of threads for `run(threads)`: after a warm-up call the best of three in turn.

    `run` does a brief piece of the work on copies; candidates default to powers of two up to the cores, and the cores.
    """
    cores = joblib.cpu_count()
    candidates = candidates or sorted({2**power for power in range(cores.bit_length())} | {cores})
    seconds = timing.interleave({threads: partial(run, threads) for threads in candidates}, repeats=3)
    return min(seconds, key=lambda threads: min(seconds[threads]))


@contextlib.contextmanager
def torch_threads(threads: int | None):
    """Set PyTorch's number of threads inside the block; None leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_predict(twin: nn.Module, x) -> np.ndarray:
    """Return the network's outputs [row, output] for x [row, ...]; a classifier's are logits."""
    with torch.no_grad():
        return twin(tensor(x).to(next(twin.parameters()))).cpu().numpy()


def _adam(parameters, learning_rate, fused):
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # None, not False: False would also disable PyTorch's own choice of implementation.
    return torch.optim.Adam(trained, lr=learning_rate, betas=(0.9, 0.999), eps=1e-8, fused=fused or None)


def prepare(twins, x, y, loss, order, epochs, per_member):
    """Return (loss function, x, y, order) after checks, as tensors on the networks' device."""
    if loss not in LOSSES:
        raise ValueError(f"Unknown loss {loss!r}; known: {', '.join(LOSSES)}.")
    order = check(len(twins), x, y, order, epochs, per_member)
    weight = next(twins[0].parameters())
    y = tensor(y)
    is_label = loss == "cross_entropy" and not y.is_floating_point()
    y = y.to(weight.device, torch.long if is_label else weight.dtype)
    order = None if order is None else torch.as_tensor(order, dtype=torch.long, device=weight.device)
    return LOSSES[loss], tensor(x).to(weight), y, order


def check(members, x, y, order, epochs, per_member):
    """Return `order` as an array, or None; raise ValueError where members, epochs or rows do not fit."""
    if members < 1 or epochs < 1:
        raise ValueError(f"Training needs at least one network and one epoch, got {members} and {epochs}.")
    if per_member and not len(x) == len(y) == members:
        raise ValueError(f"x has {len(x)} members, y has {len(y)}, there are {members} networks.")
    rows = [len(array[0] if per_member else array) for array in (x, y)]
    if rows[0] != rows[1]:
        raise ValueError(f"x has {rows[0]} rows, y has {rows[1]}.")
    if order is None:
        return None
    order = np.asarray(order)
    if order.ndim != 4 or order.shape[:2] != (members, epochs):
        expected = f"order must be [member, epoch, step, batch] with {members} members and {epochs} epochs"
        raise ValueError(f"{expected}, got shape {order.shape}.")
    if order.min() < 0 or order.max() >= rows[0]:
        raise ValueError(f"order names rows {order.min()} to {order.max()}; there are {rows[0]} rows.")
    return order
