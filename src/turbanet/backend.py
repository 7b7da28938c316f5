"""The platform that a program is traced for: what is fast on a CPU and on an accelerator differs."""

import contextlib
from contextlib import AbstractContextManager

import jax


def platform() -> str:
    """The platform of JAX's default device, such as "cpu" or "gpu"; within `tracing_for` that of its device."""
    device = getattr(jax.config, "jax_default_device")  # noqa: B009  (its stub does not know it)
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def on_accelerator() -> bool:
    """Whether what is traced now is for an accelerator."""
    return platform() != "cpu"


def tracing_for(device: jax.Device) -> AbstractContextManager:
    """A context in which programs are traced for `device`.

    It is JAX's default device, which JAX's own caches of traced functions know of.
    """
    return contextlib.nullcontext() if device.platform == platform() else jax.default_device(device)
