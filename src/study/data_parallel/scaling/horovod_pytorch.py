"""Horovod on PyTorch: DistributedOptimizer over gloo, started by horovodrun."""

import horovod.torch as hvd
import torch

from study.baselines.twins import resnet_twin
from study.data_parallel.scaling import worker as base


def main():
    """Train."""
    hvd.init()
    worker = base.Worker(*base.begin(hvd.rank()))
    torch.set_num_threads(1)
    network = resnet_twin(worker.nested()["params"])
    plain = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=network.named_parameters())
    entropy = torch.nn.CrossEntropyLoss()

    def step(x, y, rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = entropy(network(torch.from_numpy(x)), torch.from_numpy(y).long())
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(x):
        network.eval()
        with torch.no_grad():
            scores = network(torch.from_numpy(x)).numpy()
        network.train()
        return scores

    worker.train(step, predict, lambda: hvd.allreduce(torch.zeros(1)))


if __name__ == "__main__":
    main()
