"""JAX: the batch sharded over devices, replicated parameters, gradients averaged as one vector.

With job["one_process"] one process has a device for each worker; else each is a process under jax.distributed.
"""

from functools import partial

import jax
import numpy as np

from study.data_parallel.scaling import worker as base


def main():
    """Train."""
    worker = base.Worker(*base.begin())
    one_process = worker.job["one_process"]
    if one_process:
        jax.config.update("jax_num_cpu_devices", worker.workers)
    elif worker.workers > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{worker.job['port']}", worker.workers, worker.rank)
    import jax.numpy as jnp
    import optax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from turbanet.networks import ResNet

    model = ResNet(worker.job["depth"])
    mesh = jax.make_mesh((worker.workers,), ("worker",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("worker"))
    tx = optax.inject_hyperparams(optax.sgd, static_args="momentum")(learning_rate=0.1, momentum=0.9)
    variables = worker.nested()
    state = variables["params"], variables["batch_stats"], tx.init(variables["params"])
    state = jax.tree.map(partial(jax.make_array_from_process_local_data, whole), jax.tree.map(np.asarray, state))

    def loss_of(params, stats, x, y):
        scores, changed = model.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), changed["batch_stats"]

    def of_worker(state, x, y, rate):
        params, stats, moments = state
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, x, y)
        numbers, split = ravel_pytree((loss, stats, grads))  # one message, as latency costs more than size
        loss, stats, grads = split(jax.lax.pmean(numbers, "worker"))
        moments.hyperparams["learning_rate"] = rate
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), stats, moments), loss

    parts = PartitionSpec("worker")
    specs = {"in_specs": (PartitionSpec(), parts, parts, PartitionSpec()), "out_specs": (PartitionSpec(),) * 2}
    sharded = jax.shard_map(of_worker, mesh=mesh, check_vma=False, **specs)
    options = {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None
    compiled = jax.jit(sharded, donate_argnums=0, compiler_options=options)

    def step(x, y, rate):
        nonlocal state
        x, y = (jax.make_array_from_process_local_data(split, part) for part in (x, y))
        state, loss = compiled(state, x, y, jnp.float32(rate))
        return loss

    @partial(jax.jit, compiler_options=options)
    def scores_of(params, stats, x):
        return model.apply({"params": params, "batch_stats": stats}, x)

    def predict(x):
        own = jax.tree.map(lambda leaf: leaf.addressable_data(0), state[:2])
        return scores_of(*own, x)

    worker.train(step, predict)


if __name__ == "__main__":
    main()
