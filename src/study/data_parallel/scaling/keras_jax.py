"""Keras 3 on JAX: keras.distribution.DataParallel, one process with a device for each worker.

Its batch normalisation takes statistics over all workers' rows, that of other frameworks over each worker's.
"""

import os

from study.data_parallel.scaling import worker as base


def main():
    """Train."""
    worker = base.Worker(*base.begin())
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_num_cpu_devices", worker.workers)
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.devices()))

    def conv_norm(x, number, stride, relu):
        features = worker.weights[f"params/ConvNorm_{number}/Conv_0/kernel"].shape[-1]
        x = keras.layers.ZeroPadding2D(1)(x)
        x = keras.layers.Conv2D(features, 3, stride, use_bias=False, name=f"ConvNorm_{number}.Conv_0")(x)
        x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"ConvNorm_{number}.BatchNorm_0")(x)
        return keras.ops.relu(x) if relu else x

    def add(x, out, halves):
        if halves:
            x = keras.ops.pad(x[:, ::2, ::2, :], [[0, 0], [0, 0], [0, 0], [0, out.shape[-1] - x.shape[-1]]])
        return keras.ops.relu(x + out)

    def head(x):
        classes = worker.weights["params/Dense_0/bias"].shape[0]
        return keras.layers.Dense(classes, name="Dense_0")(keras.ops.mean(x, (1, 2)))

    inputs = keras.Input(worker.x.shape[1:])
    model = keras.Model(inputs, base.resnet(inputs, worker.job["depth"], conv_norm, add, head))
    for layer in model.layers:
        if layer.weights:
            path = layer.name.replace(".", "/")
            names = [f"params/{path}/{name}" for name in ("kernel", "scale", "bias")]
            names += [f"batch_stats/{path}/{name}" for name in ("mean", "var")]
            layer.set_weights([worker.weights[name] for name in names if name in worker.weights])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=entropy, jit_compile=True)

    def step(x, y, rate):
        model.optimizer.learning_rate.assign(rate)
        model.reset_metrics()
        return float(model.train_on_batch(x, y))

    worker.train(step, model.predict_on_batch)


if __name__ == "__main__":
    main()
