"""Long measurements of one network's workers for `make peers`: learning rates, seeds, numbers of workers."""

import dataclasses
import itertools
import sys


def learning_rates(*, rates=(0.003, 0.01, 0.03), seeds=5, rows=10_000, epochs=6, target_epochs=4, workers=2):
    """Train the MNIST network by every method at each learning rate with several seeds: a table.

    `target` is the loss of serial training after `target_epochs` at its best rate, by the median of the seeds; all
    methods are timed to it.
    """
    import numpy as np
    import pandas as pd

    from study.data_parallel import one_network
    from study.figures.labels import DOWNPOUR, SERIAL_ONE

    keys = [(rate, seed) for rate in rates for seed in range(seeds)]
    tasks = {key: _mnist(rows=rows, epochs=epochs, learning_rate=key[0], seed=key[1]) for key in keys}
    _, x_test, y_test = _mnist_data(rows)
    serial = {key: one_network.run(SERIAL_ONE, task) for key, task in tasks.items()}
    after = {rate: [serial[rate, seed].loss_after(target_epochs) for seed in range(seeds)] for rate in rates}
    target = min(float(np.median(each)) for each in after.values())
    lines = []
    for method in one_network.METHODS:
        for key, task in tasks.items():
            if method == DOWNPOUR:
                task = dataclasses.replace(task, every=1)  # rarer exchanges overshoot with momentum
            try:
                run = serial[key] if method == SERIAL_ONE else one_network.run(method, task, count=workers)
            except FloatingPointError as failure:
                print(f"{method}: {failure}", file=sys.stderr, flush=True)
                continue
            costs = run.seconds_to(target), run.losses.seconds.max(), run.startup_seconds
            lines.append((method, *key, target, *costs, run.score(x_test, y_test)[0], run.cpu()))
        print(f"{method}: {len(lines)} runs so far", flush=True)
    columns = ["method", "learning_rate", "seed", "target", "seconds_to_loss", "seconds", "startup_seconds", "accuracy"]
    return pd.DataFrame(lines, columns=[*columns, "cpu"])


def at_its_best(table):
    """Select each method's lines of a `learning_rates` table at its best rate, where the median seed is fastest.

    A seed that diverged has no line and counts as infinite.
    """
    import numpy as np

    seconds = table.set_index(["method", "learning_rate", "seed"]).seconds_to_loss.unstack().fillna(np.inf)
    best = seconds.median(axis=1).groupby(level="method").idxmin()
    return table[[pair in set(best) for pair in zip(table.method, table.learning_rate, strict=True)]]


def worker_counts(*, counts=(1, 2, 4), epochs=8, target_epochs=5, learning_rate=0.01):
    """Time LeNet on CIFAR-10 by one worker to more than the cores: a table of method, workers, seconds to a loss."""
    import pandas as pd

    from study.data_parallel import one_network
    from study.figures.labels import DDP, HOGWILD, LOCAL, SERIAL_ONE

    task, x_test, y_test = _lenet(epochs=epochs, learning_rate=learning_rate, every=4)
    serial = one_network.run(SERIAL_ONE, task)
    target = serial.loss_after(target_epochs)
    runs = {(SERIAL_ONE, 1): serial}
    for count, method in itertools.product(counts, (HOGWILD, DDP, LOCAL)):
        runs[method, count] = one_network.run(method, task, count=count)
    lines = []
    for (method, count), run in runs.items():
        costs = run.seconds_to(target), run.losses.seconds.max(), run.startup_seconds
        lines.append((method, count, target, *costs, run.score(x_test, y_test)[0], run.cpu(), run.losses.behind.mean()))
    columns = [
        "method",
        "workers",
        "target",
        "seconds_to_loss",
        "seconds",
        "startup_seconds",
        "accuracy",
        "cpu",
        "behind",
    ]
    return pd.DataFrame(lines, columns=columns)


def shared_state(*, epochs=6, seeds=3, rates=(("sgd", 0.01), ("adam", 0.001))):
    """Measure the effect of sharing the optimizer's state under Hogwild on LeNet, for momentum and Adam: a table."""
    import pandas as pd

    from study.data_parallel import one_network
    from study.figures.labels import HOGWILD, SERIAL_ONE, SHARED

    lines = []
    for seed in range(seeds):
        for optimizer, rate in rates:
            task, x_test, y_test = _lenet(epochs=epochs, learning_rate=rate, optimizer=optimizer, seed=seed)
            for method in (SERIAL_ONE, HOGWILD, SHARED):
                run = one_network.run(method, task, count=2)
                ended = run.loss_after(epochs), run.losses.seconds.max(), run.score(x_test, y_test)[0]
                lines.append((optimizer, method, seed, *ended, run.losses.behind.mean()))
    columns = ["optimizer", "method", "seed", "loss", "seconds", "accuracy", "behind"]
    return pd.DataFrame(lines, columns=columns)


def _mnist(*, rows, **kwargs):
    """Make the task of the study's MNIST network."""
    import turbanet as tn
    from study.baselines import twins
    from study.data_parallel import one_network

    (x, y), _, _ = _mnist_data(rows)
    return one_network.Task(tn.MLP((64, 32, 10)), twins.mlp_twin, x, y, batch_size=8, **kwargs)


def _mnist_data(rows):
    from study.sources import store

    arrays, _ = store.load("mnist")
    flat = {name: arrays[name].reshape(len(arrays[name]), -1).astype("float32") / 255 for name in ("x_train", "x_test")}
    return (flat["x_train"][:rows], arrays["y_train"][:rows]), flat["x_test"], arrays["y_test"]


def _lenet(**kwargs):
    """Make the task of LeNet on CIFAR-10 and its test data: (task, x_test, y_test)."""
    import turbanet as tn
    from study.baselines import twins
    from study.data_parallel import one_network
    from study.evaluation.windows import normalised
    from study.sources import store

    arrays, _ = store.load("cifar10")
    x, y = normalised(arrays["x_train"][:10_000]), arrays["y_train"][:10_000]
    task = one_network.Task(tn.networks.LeNet(), twins.lenet_twin, x, y, batch_size=32, **kwargs)
    return task, normalised(arrays["x_test"]), arrays["y_test"]


PARTS = {"learning_rates": learning_rates, "worker_counts": worker_counts, "shared_state": shared_state}
