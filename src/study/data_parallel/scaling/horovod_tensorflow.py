"""Horovod on TensorFlow: gradients summed over gloo in the compiled step, started by horovodrun."""

import horovod.tensorflow as hvd
import tensorflow as tf

from study.data_parallel.scaling import worker as base
from study.data_parallel.scaling.tensorflow_network import Network, one_thread


def main():
    """Train."""
    hvd.init()
    worker = base.Worker(*base.begin(hvd.rank()))
    one_thread()
    network = Network(worker)

    @tf.function(autograph=False)
    def compiled_step(x, y, rate):
        loss, gradients = network.gradients(x, y)
        network.update(hvd.grouped_allreduce(gradients, op=hvd.Average), rate)
        return loss

    def step(x, y, rate):
        return float(compiled_step(tf.constant(x), tf.constant(y), tf.constant(rate, tf.float32)))

    @tf.function(autograph=False)
    def scores_of(x):
        return network.scores(x, False)

    worker.train(step, lambda x: scores_of(tf.constant(x)).numpy(), lambda: hvd.allreduce(tf.zeros(1)))


if __name__ == "__main__":
    main()
