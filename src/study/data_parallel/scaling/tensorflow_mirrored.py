"""TensorFlow: MultiWorkerMirroredStrategy with a custom loop, a process a worker."""

import json
import os

from study.data_parallel.scaling import worker as base


def main():
    """Train."""
    worker = base.Worker(*base.begin())
    several = worker.workers > 1
    if several:
        addresses = [f"127.0.0.1:{port}" for port in worker.job["ports"][: worker.workers]]
        task = {"type": "worker", "index": worker.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    from study.data_parallel.scaling.tensorflow_network import Network, one_thread

    one_thread()
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    with strategy.scope():
        network = Network(worker)

    def of_replica(x, y, rate):
        loss, gradients = network.gradients(x, y)
        if several:
            gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        network.update(gradients, rate)
        return loss

    @tf.function(autograph=False)
    def compiled_step(x, y, rate):
        return strategy.run(of_replica, (x, y, rate))

    def step(x, y, rate):
        return float(compiled_step(tf.constant(x), tf.constant(y), tf.constant(rate, tf.float32)))

    @tf.function(autograph=False)
    def scores_of(x):
        return network.scores(x, False)

    def sum_of_ones():
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]))

    def synchronise():
        strategy.run(tf.function(sum_of_ones, autograph=False))

    worker.train(step, lambda x: scores_of(tf.constant(x)).numpy(), synchronise if several else lambda: None)
    synchronise()  # a worker that ends early would be taken for dead


if __name__ == "__main__":
    main()
