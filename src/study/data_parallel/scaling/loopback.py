"""The time of a sum over processes: gloo's all-reduce on this machine for messages of several sizes."""

import os
import time

import numpy as np
import torch
import torch.distributed as dist

from study.data_parallel.scaling import worker as base


def main():
    """Write seconds [size, repeat]; job["sizes"] are numbers of float32, each summed job["repeats"] times."""
    folder, rank = base.begin()
    job = base.read_job(folder)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    dist.init_process_group("gloo", rank=rank, world_size=job["workers"])
    seconds = np.zeros((len(job["sizes"]), job["repeats"]))
    for number, size in enumerate(job["sizes"]):
        message = torch.ones(size)
        dist.all_reduce(message)
        for repeat in range(job["repeats"]):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(message)
            seconds[number, repeat] = time.perf_counter() - begin
    np.savez(f"{folder}/result_{rank}.npz", seconds=seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
