"""The networks of a forecaster: one of each series, or one of all that is told which series it sees."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from turbanet.core import member
from turbanet.data.checks import one_prediction
from turbanet.series.inputs import Scaling, Seen, Shape, channels, windows
from turbanet.series.panel import Panel
from turbanet.training.fit import fit, predict
from turbanet.training.history import diverged
from turbanet.turba_train_state import TurbaTrainState

LOCAL, GLOBAL, BOTH = "local", "global", "both"
UNKNOWN = -1  # the number of a series that a global network was not trained on


class WithSeries(nn.Module):
    """A network of windows and their series: ([batch, time, channel], int [batch]) -> the output of `model`.

    An embedding of the series is appended to each value, so that `model` sees [batch, time, channel + features]. That
    of an unknown series, of number -1, is the mean of all.
    """

    model: nn.Module
    series: int
    features: int

    @nn.compact
    def __call__(self, x: tuple[jax.Array, jax.Array], train: bool = False) -> jax.Array:
        window, series = x
        embed = nn.Embed(self.series, self.features)
        embedding = embed(jnp.maximum(series, 0))
        embedding = jnp.where(series[:, None] < 0, embed.embedding.mean(axis=0), embedding)[:, None]
        embedding = jnp.broadcast_to(embedding, (*window.shape[:2], self.features))
        seen = jnp.concatenate([window, embedding.astype(window.dtype)], axis=-1)
        return self.model(seen, **member.mode(self.model.apply, train))


class Trained:
    """The trained networks of several origins.

    origin, series, stop : int [pair], of each series of each origin: its number, and the row after its last one
    swarms, histories : {kind: the swarm, its `History`}; local members are pairs, global ones origins
    scaling : `Scaling` of the pairs
    """

    def __init__(self, forecaster: Any, panel: Panel, stat: Any, pairs: Sequence[np.ndarray]):
        self.origin, self.series, self.stop = pairs
        self.forecaster, self.panel, self.stat = forecaster, panel, stat
        self.shape, target = forecaster._shape(panel, stat), forecaster._target
        self.scaling = Scaling.of(panel, target, self.series, self.stop)
        examples = [self._examples(pair) for pair in range(len(self.series))]
        self.swarms: dict[str, Any] = {}
        self.histories = {}
        kwargs = {name: getattr(forecaster, name) for name in ("epochs", "batch_size", "plan", "progress", "patience")}
        kwargs["per_member"] = True
        for kind in forecaster.kinds:
            trained, held_out = (self._of_members(kind, part) for part in zip(*examples, strict=True))
            if forecaster.val_size:
                kwargs["validation"] = held_out
            x, y = trained
            swarm = untrained(forecaster, kind, len(x), len(panel.ids), self.shape)
            self.swarms[kind], self.histories[kind] = fit(swarm, x, y, target.training_loss(), **kwargs)
            if diverged(self.swarms[kind], self.histories[kind]).all():
                problem = f"Every {kind} network diverged, its loss or weights are NaN or infinite"
                raise ValueError(f"{problem}: give an optimizer of a smaller learning rate.")

    def _examples(self, pair):
        """Return ((x, y) to train on, (x, y) held out) of one pair, windows and what follows them."""
        panel, shape, scaling = self.panel, self.shape, self.scaling[pair : pair + 1]
        target, held_out = self.forecaster._target, self.forecaster.val_size
        begin, end = panel.begin[self.series[pair]], self.stop[pair]
        y = ((panel.y[begin:end] - scaling.centre[0, 0]) / scaling.spread[0, 0]).astype(np.float32)
        x, following = windows(y, shape.window, shape.steps, target.relative)
        count = len(x)

        def of_columns(columns, length):
            values = scaling.exog(panel.exog[None, begin:end, columns], columns)[0]
            return np.moveaxis(np.lib.stride_tricks.sliding_window_view(values, length, axis=0), -1, 1)[:count]

        hist = of_columns(slice(0, panel.hist), shape.window) if shape.hist else None
        futr = of_columns(slice(panel.hist, None), shape.window + shape.steps) if shape.futr else None
        stat = np.repeat(self.stat[self.origin[pair]][None, self.series[pair]], count, axis=0) if shape.stat else None
        x = channels(x, hist, futr, stat, shape)
        following = target.targets(following, scaling.spread[0, 0])
        first = count - held_out + shape.steps - 1  # of the windows whose steps are all held out
        return ((x[: count - held_out], following[: count - held_out]), (x[first:], following[first:]))

    def _of_members(self, kind, pairs):
        """Return the lists (x, y), an entry for each member."""
        if kind == GLOBAL:
            groups = [np.flatnonzero(self.origin == number) for number in np.unique(self.origin)]
            pairs = [_joined([pairs[i] for i in group], self.series[group]) for group in groups]
        x, y = map(list, zip(*pairs, strict=True))
        return x, y

    def forecast(self, pair: np.ndarray, stop: np.ndarray, steps: int) -> tuple[np.ndarray, Callable]:
        """Forecast the `steps` after the rows `stop` [request] by the networks of a pair [request] each."""
        series = self.series[pair]
        window = stop[:, None] + np.arange(-self.shape.window, 0)
        whole = -(-steps // self.shape.steps) * self.shape.steps  # networks see as far ahead as they forecast
        ahead = stop[:, None] + np.arange(-self.shape.window, whole)
        end = self.panel.end[series][:, None]
        exog = self.panel.exog
        futr = np.where((ahead < end)[..., None], exog[np.minimum(ahead, end - 1)][..., self.panel.hist :], np.nan)
        members = {LOCAL: pair, GLOBAL: np.searchsorted(np.unique(self.origin), self.origin[pair])}
        stat = None if self.stat is None else np.stack([self.stat[self.origin[i]][self.series[i]] for i in pair])
        seen = Seen(self.panel.y[window], exog[window][..., : self.panel.hist], futr, stat, series.astype(np.int32))
        return forecast(self.forecaster, self.swarms, members, seen, self.scaling[pair], self.shape, steps)


def forecast(
    forecaster: Any,
    swarms: dict[str, Any],
    members: dict[str, np.ndarray],
    seen: Seen,
    scaling: Scaling,
    shape: Shape,
    steps: int,
) -> tuple[np.ndarray, Callable[[float], np.ndarray]]:
    """Return forecasts [request, step] in the unit of y, the mean over the kinds of networks, and their quantiles.

    The latter is a function level -> [request, step].

    members : {kind: int [request], the member that forecasts it}; scaling : of each request
    """
    target, plan = forecaster._target, forecaster.plan
    scale = scaling.centre[:, :1], scaling.spread[:, :1]
    values = ((seen.y - scale[0]) / scale[1]).astype(np.float32)
    hist, futr = scaling.exog(seen.hist, slice(0, shape.hist)), scaling.exog(seen.futr, slice(shape.hist, None))
    found = []
    for kind, swarm in swarms.items():
        run = _Requests(kind, swarm, members[kind], plan)
        window, of_kind = values, []
        for step in range(0, steps, shape.steps):
            last = window[:, -1:] if target.relative else np.zeros_like(window[:, -1:])
            ahead = futr[:, step : step + shape.window + shape.steps]
            out = run(channels(window - last, hist, ahead, seen.stat, shape), seen.number)
            out = out.reshape(len(out), shape.steps, target.outputs)
            following = np.asarray(target.point(out)) + last
            window = np.concatenate([window, following], axis=1)[:, -shape.window :]
            # Later steps of a network of one step are relative to its own forecasts.
            of_kind.append(out + (last - values[:, -1:])[..., None] if target.relative else out)
        found.append(np.concatenate(of_kind, axis=1)[:, :steps])
    out = np.asarray(target.combined(found))
    last = values[:, -1:] if target.relative else np.zeros_like(values[:, -1:])
    point = (np.asarray(target.point(out)) + last) * scale[1] + scale[0]
    return point, lambda level: target.quantile(out, level, last, scale)


class _Requests:
    """Predicts rows by a member each: rows of one member lie side by side, filled up to equal numbers."""

    def __init__(self, kind: str, swarm: Any, members: np.ndarray, plan: Any):
        used, positions = np.unique(members, return_inverse=True)
        counts = np.bincount(positions)
        order = np.argsort(positions, kind="stable")
        column = np.empty(len(members), int)
        column[order] = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.at = positions, column
        self.rows = np.full((len(used), counts.max()), 0)
        self.rows[:] = order[np.cumsum(counts) - counts][:, None]  # a member's first row in place of none
        self.rows[self.at] = np.arange(len(members))
        self.swarm = swarm if len(used) == len(swarm) else jax.tree.map(lambda leaf: leaf[used], swarm)
        self.kind, self.plan = kind, plan

    def __call__(self, x: np.ndarray, number: np.ndarray) -> np.ndarray:
        inputs = x[self.rows] if self.kind == LOCAL else (x[self.rows], number[self.rows])
        return np.asarray(predict(self.swarm, inputs, per_member=True, plan=self.plan))[self.at]


def untrained(forecaster: Any, kind: str, members: int, series: int, shape: Shape) -> TurbaTrainState:
    """Create the swarm of one kind of a forecaster's networks."""
    optimizer = optax.adam(0.01) if forecaster.optimizer is None else forecaster.optimizer
    model = forecaster.network
    sample: Any = np.zeros((1, shape.window, shape.channels), np.float32)
    if kind == GLOBAL:
        model, sample = WithSeries(model, series, forecaster.features), (sample, np.zeros(1, np.int32))
    swarm = TurbaTrainState.swarm(model, optimizer, members, sample_input=sample, seed=forecaster.seed)
    outputs = shape.steps * forecaster._target.outputs
    prediction = one_prediction(swarm, sample, [leaf.shape[1:] for leaf in jax.tree.leaves(sample)])
    sizes = [leaf.shape[1:] for leaf in jax.tree.leaves(prediction)]
    if sum(map(math.prod, sizes)) != outputs:
        received = ", ".join(str(["batch", *size]).replace("'", "") for size in sizes)
        seen = f"windows [batch, {shape.window}, {shape.channels}], of input_size values and their channels"
        raise ValueError(f"The model takes {seen}, and returns [batch, {outputs}]; it returned {received}.")
    return swarm


def program_of(forecaster: Any, swarms: dict[str, Any], scaling: Scaling, stat: Any, shape: Shape) -> Any:
    """Return `forecast` of the horizon as a function of inputs as `Shape.samples` gives -> [row, step]."""
    target, steps = forecaster._target, forecaster.h

    def of(leaf, number):  # not the last one in place of one that is not there
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return leaf.at[number].get(mode="fill", fill_value=np.nan, wrap_negative_indices=False) if inexact else leaf[0]

    def run(kind, swarm, x, number):
        if kind == GLOBAL:
            return member.predict(swarm.get_state(0), (x, number))

        def one(x, number):
            return member.predict(jax.tree.map(lambda leaf: of(leaf, number), swarm), x[None])[0]

        return jax.vmap(one)(x, number)

    def scaled(kind, swarm, values, x):
        def step(window, begin):
            last = window[:, -1:] if target.relative else jnp.zeros_like(window[:, -1:])
            length = shape.window + shape.steps
            futr = jax.lax.dynamic_slice_in_dim(x["futr_exog"], begin, length, axis=1) if shape.futr else None
            seen = channels(window - last, x.get("hist_exog"), futr, x.get("stat"), shape, jnp)
            out = run(kind, swarm, seen, x["series"])
            out = out.reshape(len(out), shape.steps, target.outputs)
            window = jnp.concatenate([window, target.point(out) + last], axis=1)[:, -shape.window :]
            return window, out + (last - values[:, -1:])[..., None] if target.relative else out

        _, found = jax.lax.scan(step, values, jnp.arange(0, steps, shape.steps))
        return jnp.moveaxis(found, 0, 1).reshape(len(values), steps, target.outputs)

    def program(x):
        number = x["series"]
        centre, spread = (of(jnp.float32(each), number) for each in (scaling.centre, scaling.spread))
        values = (x["window"] - centre[:, :1]) / spread[:, :1]
        for name, columns in (("hist_exog", slice(1, 1 + shape.hist)), ("futr_exog", slice(1 + shape.hist, None))):
            if name in x:
                x = x | {name: (x[name] - centre[:, None, columns]) / spread[:, None, columns]}
        x = x | {"stat": of(jnp.float32(stat), number)} if shape.stat else x
        out = target.combined([scaled(*of_kind, values, x) for of_kind in swarms.items()])
        last = values[:, -1:] if target.relative else 0
        return (target.point(out) + last) * spread[:, :1] + centre[:, :1]

    return program


def _joined(pairs, series):
    """Return the examples of several series as those of a network that is told which one it sees."""
    x, y = zip(*pairs, strict=True)
    number = np.repeat(series.astype(np.int32), list(map(len, x)))
    return (np.concatenate(x), number), np.concatenate(y)
