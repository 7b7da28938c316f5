"""TensorFlow: MultiWorkerMirroredStrategy with a loop of its own, a process a worker; running statistics by hand."""

import json
import os

import numpy as np

from turbanet.lab.scaling import worker as base


def main():
    """Train."""
    worker = base.Worker(*base.begin())
    several = worker.workers > 1
    if several:
        addresses = [f"127.0.0.1:{port}" for port in worker.job["ports"][: worker.workers]]
        task = {"type": "worker", "index": worker.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    with strategy.scope():
        params = {name: tf.Variable(array) for name, array in worker.weights.items() if name.startswith("params/")}
        paces = {name: tf.Variable(np.zeros_like(variable)) for name, variable in params.items()}
    stats = {name: tf.Variable(array) for name, array in worker.weights.items() if name.startswith("batch_stats/")}

    def forward(x, train):
        def conv_norm(x, number, stride, relu):
            layer = f"params/ConvNorm_{number}"
            x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
            x = tf.nn.conv2d(x, params[f"{layer}/Conv_0/kernel"], stride, "VALID")
            kept = [stats[f"batch_stats/ConvNorm_{number}/BatchNorm_0/{name}"] for name in ("mean", "var")]
            moments = tf.nn.moments(x, [0, 1, 2]) if train else kept
            if train:
                for old, new in zip(kept, moments, strict=True):
                    old.assign(0.9 * old + 0.1 * new)
            bias, scale = params[f"{layer}/BatchNorm_0/bias"], params[f"{layer}/BatchNorm_0/scale"]
            x = tf.nn.batch_normalization(x, *moments, bias, scale, 1e-5)
            return tf.nn.relu(x) if relu else x

        def add(x, out, halves):
            if halves:
                x = tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [0, out.shape[-1] - x.shape[-1]]])
            return tf.nn.relu(x + out)

        def head(x):
            return tf.reduce_mean(x, [1, 2]) @ params["params/Dense_0/kernel"] + params["params/Dense_0/bias"]

        return base.resnet(x, worker.job["depth"], conv_norm, add, head)

    def of_replica(x, y, rate):
        with tf.GradientTape() as tape:
            scores = forward(x, True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        grads = tape.gradient(loss, list(params.values()))
        if several:
            grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, grads)
        for variable, pace, grad in zip(params.values(), paces.values(), grads, strict=True):
            pace.assign(0.9 * pace + grad)
            variable.assign_sub(rate * pace)
        return loss

    @tf.function
    def whole_step(x, y, rate):
        return strategy.run(of_replica, (x, y, rate))

    def step(x, y, rate):
        return float(whole_step(tf.constant(x), tf.constant(y), tf.constant(rate, tf.float32)))

    @tf.function
    def scores_of(x):
        return forward(x, False)

    def sum_of_ones():
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]))

    def together():
        strategy.run(tf.function(sum_of_ones))

    worker.train(step, lambda x: scores_of(tf.constant(x)).numpy(), together if several else lambda: None)
    together()  # a worker that ends early would be taken for dead


if __name__ == "__main__":
    main()
