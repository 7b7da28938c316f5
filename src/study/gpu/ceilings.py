"""The limits of a graphics card and what a step of the published sweep needs of them."""

import itertools
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import torch

from study.baselines.workloads import workloads
from study.gpu.compare import Budget
from study.gpu.torch_steps import PRECISIONS, multiplying_in
from study.measurement import timing


def roofline(budget: Budget, *, tiny: bool = False) -> Iterator[list[dict]]:
    """Measure the card's limits (launches, bandwidth, products) and compute what a step of the sweep needs of each."""
    size = 64 if tiny else 8192
    x = jnp.ones((size, size), jnp.float32)
    rows = [{"what": "launch of an empty kernel", "value": _launch(tiny), "unit": "us"}]
    seconds = timing.best(partial(jax.jit(lambda x: x + 1), x), repeats=10)
    rows.append({"what": "memory, read and written", "value": 2 * x.nbytes / seconds / 1e9, "unit": "GB/s"})
    for precision in PRECISIONS:
        with multiplying_in(precision):
            seconds = timing.best(partial(jax.jit(lambda x: x @ x), x), repeats=10)
        rows.append({"what": f"products in {precision}", "value": 2 * size**3 / seconds / 1e12, "unit": "TFLOP/s"})
    yield rows
    for name in ("sweep-small", "sweep-large"):
        work = workloads()[name]
        widths = [2, *work.model.widths]
        weights = sum((a + 1) * b for a, b in itertools.pairwise(widths))
        state = 4 * (2 * 3 + 2) * weights  # weights and moments read and written, the gradient written and read
        batch = 4 * 4 * len(work.x) * sum(widths[1:])  # each layer's sums and outputs, forward and backward
        needs = {"operations": work.operations(), "bytes": state + batch}
        yield [
            {"what": f"{name}: {what} of a network's step", "value": need, "unit": what} for what, need in needs.items()
        ]


def _launch(tiny):
    """Measure PyTorch's microseconds per launch over many kernels that do nothing."""
    x = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    count = 100 if tiny else 10_000
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(count):
            x.add_(1)
        x.item()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * min(seconds) / count
