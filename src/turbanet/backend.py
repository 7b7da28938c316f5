"""The platform that a program is traced for: what is fast on a CPU and on an accelerator differs."""

import contextlib
from contextlib import AbstractContextManager

import jax


def platform() -> str:
    """Return the platform of JAX's default device, such as "cpu" or "gpu"; within `tracing_for`, that of its device."""
    device = getattr(jax.config, "jax_default_device")  # noqa: B009  (missing in its stub)
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def on_accelerator() -> bool:
    """Whether programs are now traced for an accelerator."""
    return platform() != "cpu"


def tracing_for(device: jax.Device) -> AbstractContextManager:
    """Return a context in which programs are traced for `device`.

    In it `device` is JAX's default device, which JAX's own caches of traced functions distinguish.
    """
    return contextlib.nullcontext() if device.platform == platform() else jax.default_device(device)
