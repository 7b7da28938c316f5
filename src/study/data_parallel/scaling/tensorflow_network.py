"""The network of a job in TensorFlow, which its two programs share: running statistics and SGD's momentum by hand."""

import numpy as np
import tensorflow as tf

from study.data_parallel.scaling import worker as base


class Network:
    """The ResNet of a worker's job, as variables by Flax's names, and SGD with momentum 0.9.

    One thread computes. A strategy, if any, must be in scope before; its variables are then mirrored.
    """

    def __init__(self, worker):
        self.depth = worker.job["depth"]
        self.params = {name: tf.Variable(array) for name, array in worker.weights.items() if name.startswith("params/")}
        self.paces = {name: tf.Variable(np.zeros_like(variable)) for name, variable in self.params.items()}
        kept = {name: array for name, array in worker.weights.items() if name.startswith("batch_stats/")}
        self.stats = {name: tf.Variable(array, trainable=False) for name, array in kept.items()}

    def gradients(self, x, y):
        """(The mean loss of a batch, its gradients in the order of `params`)."""
        with tf.GradientTape() as tape:
            scores = self.scores(x, True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        return loss, tape.gradient(loss, list(self.params.values()))

    def update(self, gradients, rate):
        """A step of SGD."""
        for variable, pace, gradient in zip(self.params.values(), self.paces.values(), gradients, strict=True):
            pace.assign(0.9 * pace + gradient)
            variable.assign_sub(rate * pace)

    def scores(self, x, train):
        """[row, class]; training moves the running statistics."""
        params = self.params

        def conv_norm(x, number, stride, relu):
            layer = f"params/ConvNorm_{number}"
            x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
            x = tf.nn.conv2d(x, params[f"{layer}/Conv_0/kernel"], stride, "VALID")
            kept = [self.stats[f"batch_stats/ConvNorm_{number}/BatchNorm_0/{name}"] for name in ("mean", "var")]
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

        return base.resnet(x, self.depth, conv_norm, add, head)


def one_thread():
    """Before anything else: this process computes in one thread."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
