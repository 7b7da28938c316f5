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

    def forward(x):
        def conv_norm(x, number, stride, relu):
            kernel = params[f"params/ConvNorm_{number}/Conv_0/kernel"]
            kwargs = {"kernel": (3, 3), "stride": (stride, stride), "pad": (1, 1), "num_filter": kernel.shape[0]}
            x = mx.nd.Convolution(x, kernel, no_bias=True, **kwargs)
            own = [values[f"params/ConvNorm_{number}/BatchNorm_0/{name}"] for name in ("scale", "bias")]
            own += [values[f"batch_stats/ConvNorm_{number}/BatchNorm_0/{name}"] for name in ("mean", "var")]
            x = mx.nd.BatchNorm(x, *own, eps=1e-5, momentum=0.9, fix_gamma=False)
            return mx.nd.relu(x) if relu else x

        def add(x, out, halves):
            if halves:
                more = out.shape[1] - x.shape[1]
                x = x[:, :, ::2, ::2]
                x = mx.nd.concat(x, mx.nd.zeros((x.shape[0], more, *x.shape[2:])), dim=1)
            return mx.nd.relu(x + out)

        def head(x):
            return mx.nd.dot(x.mean((2, 3)), params["params/Dense_0/kernel"]) + params["params/Dense_0/bias"]

        return base.resnet(x.transpose((0, 3, 1, 2)), job["depth"], conv_norm, add, head)

    def step(x, y, rate):
        with mx.autograd.record():
            scores = forward(mx.nd.array(x))
            loss = -mx.nd.pick(mx.nd.log_softmax(scores), mx.nd.array(y)).mean()
        loss.backward()
        for number, value in enumerate(params.values()):
            if several:
                store.push(number, value.grad, priority=-number)
                store.pull(number, value.grad, priority=-number)
        for value, momentum in zip(params.values(), momenta.values()):
            momentum[:] = 0.9 * momentum + value.grad / job["workers"]
            value[:] = value - rate * momentum
        mx.nd.waitall()
        return loss.asscalar()

    def predict(x):
        return forward(mx.nd.array(x)).asnumpy()

    one = mx.nd.zeros(1)
    store.init(len(params), one)

    def synchronise():
        store.push(len(params), one)
        store.pull(len(params), one)
        one.wait_to_read()

    worker.train(step, predict, synchronise)


if __name__ == "__main__":
    main()
