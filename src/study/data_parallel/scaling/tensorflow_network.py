"""A job's network in TensorFlow for its two programs, with manual running statistics and momentum."""

import numpy as np
import tensorflow as tf

from study.data_parallel.scaling import worker as base


class Network:
    """The ResNet of a worker's job as variables by Flax's names, and SGD with momentum 0.9.

    Make it inside a strategy's scope, if there is one; then its variables are mirrored.
    """

    def __init__(self, worker):
        self.depth = worker.job["depth"]
        self.params = {name: tf.Variable(array) for name, array in worker.weights.items() if name.startswith("params/")}
        self.momenta = {name: tf.Variable(np.zeros_like(variable)) for name, variable in self.params.items()}
        stats = {name: array for name, array in worker.weights.items() if name.startswith("batch_stats/")}
        self.stats = {name: tf.Variable(array, trainable=False) for name, array in stats.items()}

    def gradients(self, x, y):
        """Compute the mean loss of a batch and its gradients, in the order of `params`."""
        with tf.GradientTape() as tape:
            scores = self.scores(x, True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        return loss, tape.gradient(loss, list(self.params.values()))

    def update(self, gradients, rate):
        """Take a step of SGD with momentum."""
        for variable, momentum, gradient in zip(self.params.values(), self.momenta.values(), gradients, strict=True):
            momentum.assign(0.9 * momentum + gradient)
            variable.assign_sub(rate * momentum)

    def scores(self, x, train):
        """Compute scores [row, class]; with `train`, update the running statistics."""
        params = self.params

        def conv_norm(x, number, stride, relu):
            layer = f"params/ConvNorm_{number}"
            x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
            x = tf.nn.conv2d(x, params[f"{layer}/Conv_0/kernel"], stride, "VALID")
            running = [self.stats[f"batch_stats/ConvNorm_{number}/BatchNorm_0/{name}"] for name in ("mean", "var")]
            scale, bias = (params[f"{layer}/BatchNorm_0/{name}"] for name in ("scale", "bias"))
            mean, var = (None, None) if train else running
            rows = tf.cast(tf.size(x[..., 0]), tf.float32)
            x, mean, var = tf.compat.v1.nn.fused_batch_norm(x, scale, bias, mean, var, epsilon=1e-5, is_training=train)
            if train:
                moments = mean, var * (1 - 1 / rows)  # TensorFlow divides by one less than the number of rows
                for old, new in zip(running, moments, strict=True):
                    old.assign(0.9 * old + 0.1 * new)
            return tf.nn.relu(x) if relu else x

        def add(x, out, halves):
            if halves:
                x = tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [0, out.shape[-1] - x.shape[-1]]])
            return tf.nn.relu(x + out)

        def head(x):
            return tf.reduce_mean(x, [1, 2]) @ params["params/Dense_0/kernel"] + params["params/Dense_0/bias"]

        return base.resnet(x, self.depth, conv_norm, add, head)


def one_thread():
    """Limit TensorFlow to one thread; call this before any other of its functions."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
