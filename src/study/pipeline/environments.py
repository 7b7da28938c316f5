"""Virtual environments for frameworks that the study does not install, each from a pinned list in peers/."""

import os
import subprocess
import sys
import sysconfig
import tarfile

from study.pipeline.paths import repository

HOROVOD = {"horovod": "PYTORCH", "horovod_tensorflow": "TENSORFLOW"}  # environment: framework of the build from source
FLAGS = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_WITHOUT_MPI": "1"}  # of Horovod's build


def build(name, *, root=None):
    """Make build/peers/<name> from peers/<name>.txt unless it is up to date, and return its Python."""
    root = root or repository()
    packages = root / "peers" / f"{name}.txt"
    if not packages.is_file():
        known = ", ".join(sorted(file.stem for file in (root / "peers").glob("*.txt")))
        raise ValueError(f"There is no list of packages for {name!r}; known: {known}.")
    folder = root / "build/peers" / name
    python, made = folder / "bin/python", folder / "made-from.txt"
    if made.is_file() and made.read_text() == packages.read_text():
        return python
    print(f"Building {name} in build/peers", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if name in HOROVOD:
        lines = packages.read_text().splitlines()
        others = [line for line in lines if not line.startswith("horovod==")]
        subprocess.run([*pip, "install", "-q", *others], check=True)
        horovod = next(line for line in lines if line.startswith("horovod=="))
        _build_horovod(folder, pip, horovod, on=HOROVOD[name])
    else:
        subprocess.run([*pip, "install", "-q", "-r", packages], check=True)
    made.write_text(packages.read_text())
    return python


def _build_horovod(folder, pip, requirement, on):
    """Build Horovod from source on this environment's TensorFlow or on the study's PyTorch."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", source]
    subprocess.run([*pip, *download, requirement], check=True)
    with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    unpacked = next(path for path in source.iterdir() if path.is_dir())
    if on == "PYTORCH":
        study = sysconfig.get_path("purelib")
        (next((folder / "lib").glob("python*")) / "site-packages/study.pth").write_text(f"{study}\n")
        for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            _require_cpp20(unpacked / name)
    flags = {f"HOROVOD_WITHOUT_{each}": "1" for each in ("PYTORCH", "TENSORFLOW", "MXNET") if each != on}
    own = {f"HOROVOD_WITH_{on}": "1", "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])}
    command = [*pip, "install", "-q", "--no-build-isolation", "--no-deps", unpacked]
    subprocess.run(command, env=os.environ | FLAGS | flags | own, check=True)


def _require_cpp20(file):
    """Replace Horovod 0.28.1's C++17 by C++20, which PyTorch's headers require."""
    lines = [
        "set(CMAKE_CXX_STANDARD 20)" if line.strip().startswith("set(CMAKE_CXX_STANDARD ") else line
        for line in file.read_text().splitlines()
    ]
    file.write_text("\n".join(lines) + "\n")
