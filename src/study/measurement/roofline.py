"""A roofline model: operations of a step, the machine's peak of matrix products and bandwidth of memory."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from study.measurement import timing
from turbanet.core.plan import Plan


def operations(function: Callable, *args) -> int:
    """Count the floating-point operations of matrix products and convolutions in one call from its trace.

    A product of [m, k] and [k, n] counts 2 m k n; a scan counts once per round. Elementwise operations are not counted,
    nor are those that the result does not depend on.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return _count(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def matmul_peak(size: int = 2048, *, repeats: int = 5, plan: Plan | None = None) -> float:
    """Measure FLOP/s of float32 [size, size] matrix products on all devices of the plan at once; best of `repeats`."""
    plan = Plan((plan or Plan()).devices, 1)
    x = plan.place(jnp.ones((len(plan.devices), size, size), jnp.float32))
    run = jax.jit(plan.vectorise(lambda own, _: own @ own), compiler_options=plan.compiler_options)
    return len(plan.devices) * 2 * size**3 / timing.best(lambda: run(x, None), repeats)


def bandwidth(megabytes: float, *, repeats: int = 5, plan: Plan | None = None) -> float:
    """Measure bytes/s of an addition to `megabytes` of float32 on all devices at once; best of `repeats`.

    Small arrays are added to repeatedly and stay in a cache.
    """
    plan = Plan((plan or Plan()).devices, 1)
    x = plan.place(jnp.zeros((len(plan.devices), int(megabytes * 2**20) // 4), jnp.float32))
    rounds = max(1, int(512 / megabytes))

    def one(own, _):
        return jax.lax.fori_loop(0, rounds, lambda i, own: own + i.astype(own.dtype), own)

    run = jax.jit(plan.vectorise(one), compiler_options=plan.compiler_options)
    return rounds * 2 * x.nbytes / timing.best(lambda: run(x, None), repeats)


def ceilings() -> dict[str, float]:
    """Measure this machine's peak of matrix products and its bandwidth of cache and memory."""
    return {
        "matmul_peak_gflops": matmul_peak() / 1e9,
        "cache_gbytes_per_second": bandwidth(1) / 1e9,
        "memory_gbytes_per_second": bandwidth(256) / 1e9,
    }


def _count(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        inner = [v for value in equation.params.values() for v in (value if isinstance(value, tuple) else (value,))]
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += rounds * sum(_count(getattr(v, "jaxpr", v)) for v in inner if hasattr(getattr(v, "jaxpr", v), "eqns"))
        shapes = [v.aval.shape for v in equation.invars if hasattr(v.aval, "shape")]
        out = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            total += 2 * out * math.prod(np.array(shapes[0])[list(summed)].tolist())
        elif equation.primitive.name == "product":  # turbanet.networks.cpu.products
            total += 2 * out * shapes[0][-1]
        elif equation.primitive.name == "conv_general_dilated":
            features = equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * out * math.prod(shapes[1]) // shapes[1][features]
    return total
