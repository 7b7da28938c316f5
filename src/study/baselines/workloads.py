"""The workloads of the benchmark suite: networks, their data and sizes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

import turbanet as tn
from study.baselines import twins
from study.measurement import roofline
from study.sources.spirals import spirals
from turbanet.core.member import train_step


@dataclass(frozen=True)
class Workload:
    """Networks to train for `epochs`; x, y and batch_size as `fit` takes them, None for full-batch steps.

    loss : PyTorch's name for loss_fn; twin : one member's params -> a PyTorch network with these weights
    """

    name: str
    model: Any
    members: int
    x: np.ndarray
    y: np.ndarray
    twin: Callable
    epochs: int = 1
    batch_size: int | None = None
    per_member: bool = False
    loss_fn: Callable = tn.softmax_cross_entropy
    loss: str = "cross_entropy"
    learning_rate: float = 0.001  # Adam
    repeats: int = 10  # timed runs of each method, in turn

    @property
    def rows(self):
        """The number of rows that a member trains on."""
        return self.x.shape[1] if self.per_member else len(self.x)

    @property
    def steps(self):
        """The number of steps of every member in one run."""
        return self.epochs * -(-self.rows // (self.batch_size or self.rows))

    def first(self, members):
        """Return the workload with its first members only."""
        own = {"x": self.x[:members], "y": self.y[:members]} if self.per_member else {}
        return replace(self, members=members, **own)

    def swarm(self):
        """Make the untrained networks, the same ones each time."""
        sample = self.x[0, :1] if self.per_member else self.x[:1]
        return tn.TurbaTrainState.swarm(
            self.model, optax.adam(self.learning_rate), self.members, sample_input=sample, seed=0
        )

    def member(self, **changed):
        """Return the shapes of one member's untrained state; `changed` replaces fields of the model."""
        sample = self.x[0, :1] if self.per_member else self.x[:1]
        model = self.model.clone(**changed)
        create = tn.TurbaTrainState._creator(model, optax.adam(self.learning_rate), sample)
        return jax.eval_shape(create, {"seed": 0, "id": 0})

    def operations(self):
        """Count the floating-point operations of matrix products in one member's step, forward and backward.

        A convolution counts by its window, however it is computed.
        """
        by_window = {"conv": jax.lax.conv_general_dilated} if hasattr(self.model, "conv") else {}
        size = self.batch_size or self.rows
        x, y = (a[0, :size] if self.per_member else a[:size] for a in (self.x, self.y))
        return roofline.operations(lambda state: train_step(self.loss_fn, state, x, y), self.member(**by_window))


def workloads(quick: bool = False) -> dict[str, Workload]:
    """Make the suite, {name: Workload}, on random numbers in the real data sets' shapes: values do not change speed."""
    rng = np.random.default_rng(0)
    share = 4 if quick else 1

    def images(rows, *shape):
        return rng.random((rows, *shape), dtype=np.float32), rng.integers(0, 10, rows).astype(np.int32)

    x, y = spirals(128, noise=0.05, seed=0)
    series = rng.random((500, 384 // share, 21, 1), dtype=np.float32)
    lstm = (series[:, :, :-1], series[:, :, -1])
    mlp, mse = twins.mlp_twin, {"loss_fn": tn.mse, "loss": "mse"}
    # Under batch normalisation Adam makes steps of rounding errors, so that equal losses show at small rates alone.
    deep = {"batch_size": 32, "learning_rate": 0.00001, "repeats": 5}
    listed = [
        Workload("sweep-small", tn.MLP((16, 2)), 128, x, y, mlp, epochs=1024 // share),
        Workload("sweep-large", tn.MLP((256, 256, 2)), 64, x, y, mlp, epochs=32 // share),
        Workload("mnist", tn.MLP((64, 32, 10)), 50, *images(3200 // share, 784), mlp, batch_size=8),
        Workload("stocks", tn.LSTM(32), 500, *lstm, twins.lstm_twin, batch_size=32, per_member=True, **mse),
        Workload("lenet", tn.networks.LeNet(), 8, *images(1280 // share, 32, 32, 3), twins.lenet_twin, batch_size=32),
        Workload(
            "mobilenet", tn.networks.MobileNet(), 4, *images(256 // share, 32, 32, 3), twins.mobilenet_twin, **deep
        ),
        Workload("vgg11", tn.networks.VGG(), 4, *images(256 // share, 32, 32, 3), twins.vgg_twin, **deep),
        Workload("resnet", tn.networks.ResNet(), 4, *images(256 // share, 32, 32, 3), twins.resnet_twin, **deep),
    ]
    return {work.name: work for work in listed}
