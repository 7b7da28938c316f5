"""The networks of a forecaster: one of each series, or one of all that is told which series it sees."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from turbanet.core import member
from turbanet.series.panel import Panel
from turbanet.training.fit import fit, predict
from turbanet.training.history import diverged
from turbanet.turba_train_state import TurbaTrainState

LOCAL, GLOBAL, BOTH = "local", "global", "both"


class WithSeries(nn.Module):
    """A network of windows and their series: ([batch, time, 1], int [batch]) -> the output of `model`.

    An embedding of the series is appended to each value, so that `model` sees [batch, time, 1 + features].
    """

    model: nn.Module
    series: int
    features: int

    @nn.compact
    def __call__(self, x: tuple[jax.Array, jax.Array]) -> jax.Array:
        window, series = x
        embedding = nn.Embed(self.series, self.features)(series)[:, None]
        embedding = jnp.broadcast_to(embedding, (*window.shape[:2], self.features))
        return self.model(jnp.concatenate([window, embedding.astype(window.dtype)], axis=-1))


class Trained:
    """The trained networks of several panels, which hold the same series up to different times.

    swarms, histories : {kind: the swarm of all panels' networks, its `History`}
    centre, spread : [panel, series], by which series are standardised
    """

    def __init__(self, forecaster: Any, panels: list[Panel]):
        self.panels = panels
        values = [y.to_numpy() for panel in panels for y in panel.series.values()]
        shape = len(panels), len(panels[0].series)
        centre = np.array([y.mean() for y in values])
        spread = np.array([y.std() for y in values])
        spread[~(spread > 0)] = 1
        standardised = [(y - mean) / scale for y, mean, scale in zip(values, centre, spread)]
        scaled = [y.astype(np.float32) for y in standardised]  # panel after panel
        self.centre, self.spread = centre.reshape(shape), spread.reshape(shape)
        self.swarms = {}
        self.histories = {}
        kwargs = {name: getattr(forecaster, name) for name in ("epochs", "batch_size", "plan", "progress")}
        kwargs |= {"per_member": True, "equal_steps": True}
        for kind in forecaster.kinds:
            pairs = [_windows(y, forecaster.window, forecaster.steps) for y in scaled]
            if kind == GLOBAL:
                pairs = [_joined(pairs[begin : begin + shape[1]]) for begin in range(0, len(pairs), shape[1])]
            x, y = map(list, zip(*pairs, strict=True))
            swarm = untrained(forecaster, kind, len(x), shape[1])
            self.swarms[kind], self.histories[kind] = fit(swarm, x, y, forecaster.loss, **kwargs)
            if diverged(self.swarms[kind], self.histories[kind]).all():
                problem = f"Every {kind} network diverged, its loss or weights are NaN or infinite"
                raise ValueError(f"{problem}: give an optimizer of a smaller learning rate.")

    def forecast(self, window: int, steps: int, plan: Any) -> np.ndarray:
        """Return forecasts [panel, series, step] in the unit of y."""
        last = np.stack([panel.last(window) for panel in self.panels])
        return forecast(self.swarms, last, self.centre, self.spread, steps, plan)


def untrained(forecaster: Any, kind: str, members: int, series: int) -> TurbaTrainState:
    """Create the swarm of one kind of a forecaster's networks."""
    optimizer = optax.adam(0.01) if forecaster.optimizer is None else forecaster.optimizer
    model, sample = forecaster.network, sample_of(forecaster.window)
    if kind == GLOBAL:
        model = WithSeries(model, series, forecaster.features)
    x = (sample["window"][..., None], sample["series"]) if kind == GLOBAL else sample["window"][..., None]
    return TurbaTrainState.swarm(model, optimizer, members, sample_input=x, seed=forecaster.seed)


def sample_of(window: int) -> dict[str, np.ndarray]:
    """Return a window of zeros [1, time], and the number of its series [1]."""
    return {"window": np.zeros((1, window), np.float32), "series": np.zeros(1, np.int32)}


def forecast(
    swarms: dict[str, Any],
    last: np.ndarray,
    centre: np.ndarray,
    spread: np.ndarray,
    steps: int,
    plan: Any,
    number: np.ndarray | None = None,
) -> np.ndarray:
    """Return forecasts [panel, series, step] in the unit of y, the mean over the kinds of networks.

    swarms : {kind: swarm}, a local member for each panel and series, a global one for each panel
    last : [panel, series, time], the last values; centre, spread : [panel, series]
    number : int [series], of the series that a global network is told; None for all
    """
    number = np.arange(last.shape[1]) if number is None else number
    number = np.tile(number.astype(np.int32), (len(last), 1))
    windows = ((last - centre[..., None]) / spread[..., None]).astype(np.float32)
    of_kinds = [_scaled_forecast(kind, swarm, windows, number, steps, plan) for kind, swarm in swarms.items()]
    return np.mean(of_kinds, axis=0) * spread[..., None] + centre[..., None]


def _scaled_forecast(kind, swarm, window, number, steps, plan):
    """Return standardised forecasts [panel, series, step] by one kind of networks."""
    shape, time = window.shape[:2], window.shape[2]
    ahead = np.empty((*shape, 0), np.float32)
    while ahead.shape[2] < steps:
        last = window[..., -1:]
        x = (window - last)[..., None]
        # A local network is one member of a series: [member, 1, time, 1].
        inputs = x.reshape(-1, 1, *x.shape[2:]) if kind == LOCAL else (x, number)
        following = np.asarray(predict(swarm, inputs, per_member=True, plan=plan)).reshape(*shape, -1) + last
        ahead = np.concatenate([ahead, following], axis=2)
        window = np.concatenate([window, following], axis=2)[..., -time:]
    return ahead[..., :steps]


def program_of(swarms: dict[str, Any], centre: np.ndarray, spread: np.ndarray, steps: int, at_once: int) -> Any:
    """Return `forecast` of one panel as a function for a program: {"window": ..., "series": ...} -> [row, step].

    at_once : steps that a network returns, 1 or `steps`
    """

    def of(leaf, number):  # not the last one in place of one that is not there
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return leaf.at[number].get(mode="fill", fill_value=np.nan, wrap_negative_indices=False) if inexact else leaf[0]

    def ahead(kind, swarm, window, number):
        if kind == GLOBAL:
            return member.predict(swarm.get_state(0), (window, number))

        def one(window, number):
            return member.predict(jax.tree.map(lambda leaf: of(leaf, number), swarm), window[None])[0]

        return jax.vmap(one)(window, number)

    def scaled(kind, swarm, window, number):
        def step(window, _):
            last = window[:, -1:]
            following = ahead(kind, swarm, (window - last)[..., None], number) + last
            return jnp.concatenate([window, following], axis=1)[:, -window.shape[1] :], following

        _, found = jax.lax.scan(step, window, length=steps // at_once)
        return jnp.moveaxis(found, 0, 1).reshape(window.shape[0], steps)

    def program(x):
        number = x["series"]
        mean, scale = (of(jnp.float32(each), number)[:, None] for each in (centre, spread))
        window = (x["window"] - mean) / scale
        return sum(scaled(*of_kind, window, number) for of_kind in swarms.items()) / len(swarms) * scale + mean

    return program


def _joined(pairs):
    """Return the examples of several series as those of a network that is told which one it sees."""
    x, y = zip(*pairs, strict=True)
    number = np.repeat(np.arange(len(x), dtype=np.int32), list(map(len, x)))
    return (np.concatenate(x), number), np.concatenate(y)


def _windows(values, window, steps):
    """Return the windows [row, time, 1] and what follows them [row, step], both minus the window's last value."""
    whole = np.lib.stride_tricks.sliding_window_view(values, window + steps)
    last = whole[:, window - 1 : window]
    relative = whole - last
    return relative[:, :window, None], relative[:, window:]
