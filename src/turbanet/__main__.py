"""`python -m turbanet`: what the report of an issue needs."""

import importlib.metadata
import platform
from collections import Counter

import jax

import turbanet
from turbanet.core.plan import cache_folder

PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"


def main() -> None:
    """Print the versions, JAX's devices and the folder of compiled programs."""
    devices = Counter(device.device_kind for device in jax.devices())
    print(f"turbanet {turbanet.__version__}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print("devices:", ", ".join(f"{count} x {kind}" for kind, count in devices.items()))
    print(f"compiled programs: {cache_folder()}")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))


if __name__ == "__main__":
    main()
