"""What a kernel takes of a multiprocessor, as NVIDIA's profiler counts it: registers, shared memory, spills."""

import dataclasses
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pandas as pd

import turbanet as tn
from study.baselines.workloads import Workload
from study.gpu.torch_steps import PRECISIONS

SECTORS = "l1tex__t_sectors_pipe_lsu_mem_local_op"  # of 32 bytes, in a thread's own memory: what registers do not hold
METRICS = {
    "launch__registers_per_thread": "registers",
    "launch__block_size": "threads",
    "launch__shared_mem_per_block_static": "static_shared_bytes",
    "launch__shared_mem_per_block_dynamic": "shared_bytes",
    f"{SECTORS}_ld.sum": "spilled_loads",
    f"{SECTORS}_st.sum": "spilled_stores",
}  # {the profiler's name: our column}
GRID = "launch__grid_size"


def profiled(works: list[Workload], precision: str) -> Iterator[dict]:
    """Train workloads once under the profiler `ncu`: a row for each that trains in a kernel; none without a profiler.

    Workloads differ in their number of networks, which is the size of a kernel's grid and tells kernels apart.
    """
    import cloudpickle

    if (profiler := shutil.which("ncu")) is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        log, pickled = Path(folder) / "log.csv", Path(folder) / "works.pkl"
        pickled.write_bytes(cloudpickle.dumps(works))
        select = ["--kernel-name", "regex:train", "--metrics", ",".join([GRID, *METRICS])]
        form = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        child = [sys.executable, "-m", "study.gpu.resources", str(pickled), precision]
        subprocess.run([profiler, *select, *form, *child], check=True)
        yield from read(log.read_text(), works)


def read(log: str, works: list[Workload]) -> Iterator[dict]:
    """Read the profiler's table, a kernel a row after a row of units: {column: number} of each workload found."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    if not lines:
        return
    table = pd.read_csv(io.StringIO("\n".join(lines)), thousands=",").iloc[1:]
    for work in works:
        found = table[pd.to_numeric(table[GRID]) == work.members]
        if len(found):
            yield {"workload": work.name, "networks": work.members} | {
                column: int(float(found.iloc[0][metric])) for metric, column in METRICS.items()
            }


def train(works: list[Workload]) -> None:
    """Train each workload for its epochs in one call."""
    for work in works:
        settings = {"batch_size": work.batch_size, "epochs": work.epochs, "segment": work.epochs, "progress": False}
        tn.fit(work.swarm(), work.x, work.y, work.loss_fn, **settings)


def resized(works: list[Workload], members: int) -> list[Workload]:
    """Give each workload its own number of networks, from `members` on."""
    return [dataclasses.replace(work, members=members + number) for number, work in enumerate(works)]


if __name__ == "__main__":
    import cloudpickle

    jax.config.update("jax_default_matmul_precision", PRECISIONS[sys.argv[2]].jax)
    train(cloudpickle.loads(Path(sys.argv[1]).read_bytes()))
