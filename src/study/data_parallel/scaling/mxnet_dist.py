"""MXNet: kvstore dist_sync, workers with a server and a scheduler, which are the last two processes of a job."""

import os
import sys

import numpy as np

from study.data_parallel.scaling import worker as base


def main():
    """Train, or run MXNet's server or scheduler."""
    folder, rank = base.begin()
    job = base.read_job(folder)
    several = job["workers"] > 1
    if several:
        role = {job["workers"]: "scheduler", job["workers"] + 1: "server"}.get(rank, "worker")
        settings = {"DMLC_ROLE": role, "DMLC_NUM_WORKER": job["workers"], "DMLC_NUM_SERVER": 1}
        settings |= {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": job["port"]}
        os.environ.update({name: str(value) for name, value in settings.items()})
    np.bool = bool  # MXNet 1.9.1 still reads it
    import mxnet as mx  # a server and a scheduler stay in here until the workers end

    if several and role != "worker":
        sys.exit(0)
    worker = base.Worker(folder, rank)
    store = mx.kv.create("dist_sync" if several else "local")
    kernels = {name: array.transpose(3, 2, 0, 1) for name, array in worker.weights.items() if array.ndim == 4}
    values = {name: mx.nd.array(array) for name, array in (worker.weights | kernels).items()}
    params = {name: value for name, value in values.items() if name.startswith("params/")}
    momenta = {name: mx.nd.zeros_like(value) for name, value in params.items()}
    for number, value in enumerate(params.values()):
        value.attach_grad()
        store.init(number, mx.nd.zeros_like(value))

    def conv_norm(x, number, stride, relu):
        name = f"params/ConvNorm_{number}/Conv_0/kernel"
        kwargs = {"kernel": (3, 3), "stride": (stride, stride), "pad": (1, 1), "num_filter": values[name].shape[0]}
        x = mx.sym.Convolution(x, mx.sym.var(name), no_bias=True, **kwargs)
        own = [mx.sym.var(f"params/ConvNorm_{number}/BatchNorm_0/{name}") for name in ("scale", "bias")]
        own += [mx.sym.var(f"batch_stats/ConvNorm_{number}/BatchNorm_0/{name}") for name in ("mean", "var")]
        x = mx.sym.BatchNorm(x, *own, eps=1e-5, momentum=0.9, fix_gamma=False)
        return mx.sym.relu(x) if relu else x

    def add(x, out, halves):
        if halves:
            x = mx.sym.slice(x, begin=(None,) * 4, end=(None,) * 4, step=(1, 1, 2, 2))
            x = mx.sym.concat(x, mx.sym.zeros_like(x), dim=1)
        return mx.sym.relu(x + out)

    def head(x):
        kernel, bias = (mx.sym.var(f"params/Dense_0/{name}") for name in ("kernel", "bias"))
        return mx.sym.broadcast_add(mx.sym.dot(x.mean((2, 3)), kernel), bias)

    graph = base.resnet(mx.sym.var("x").transpose((0, 3, 1, 2)), job["depth"], conv_norm, add, head)
    hybrid = mx.nd.CachedOp(graph, [("static_alloc", True), ("static_shape", True)])  # Gluon's `hybridize`

    def forward(x):
        given = values | {"x": mx.nd.array(x)}
        return hybrid(*[given[name] for name in graph.list_inputs()])

    last = worker.rates[0]

    def step(x, y, rate):
        nonlocal last
        with mx.autograd.record():
            scores = forward(x)
            loss = -mx.nd.pick(mx.nd.log_softmax(scores), mx.nd.array(y)).mean()
        loss.backward()
        for number, value in enumerate(params.values()):
            if several:
                store.push(number, value.grad, priority=-number)
                store.pull(number, value.grad, priority=-number)
        # MXNet's momentum holds the learning rate, which may change.
        kwargs = {"lr": rate, "momentum": 0.9 * rate / last, "rescale_grad": 1 / job["workers"]}
        for value, momentum in zip(params.values(), momenta.values()):
            mx.nd.sgd_mom_update(value, value.grad, momentum, out=value, **kwargs)
        last = rate
        mx.nd.waitall()
        return loss.asscalar()

    def predict(x):
        return forward(x).asnumpy()

    one = mx.nd.zeros(1)
    store.init(len(params), one)

    def synchronise():
        store.push(len(params), one)
        store.pull(len(params), one)
        one.wait_to_read()

    worker.train(step, predict, synchronise)


if __name__ == "__main__":
    main()
