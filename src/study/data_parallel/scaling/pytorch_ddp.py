"""PyTorch: DistributedDataParallel over gloo, or over NCCL where each worker has a GPU.

Method "fp16" halves messages; "alone" sends none: each worker trains its own network.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from study.baselines.twins import resnet_twin
from study.data_parallel.scaling import worker as base


def main():
    """Train."""
    worker = base.Worker(*base.begin())
    torch.set_num_threads(1)
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= worker.workers
    device = torch.device(f"cuda:{worker.rank}" if on_gpus else "cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(worker.job["port"])}
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=worker.rank, world_size=worker.workers)
    plain = resnet_twin(worker.nested()["params"]).to(device)
    network = plain if worker.job["method"] == "alone" else DistributedDataParallel(plain)
    if worker.job["method"] == "fp16":
        network.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    entropy = torch.nn.CrossEntropyLoss()

    def step(x, y, rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = entropy(network(torch.from_numpy(x).to(device)), torch.from_numpy(y).long().to(device))
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x):
        plain.eval()
        with torch.no_grad():
            scores = plain(torch.from_numpy(x).to(device)).cpu().numpy()
        plain.train()
        return scores

    worker.train(step, predict, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
