"""A forecaster of many series by one network per series, one network for all, or both, trained as swarms."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

from turbanet.core.arrays import check_whole
from turbanet.core.plan import Plan
from turbanet.loss import mse
from turbanet.networks.models import LSTM
from turbanet.series import panel as panels
from turbanet.series.panel import Panel
from turbanet.training.fit import fit, predict
from turbanet.training.history import History, diverged
from turbanet.turba_train_state import TurbaTrainState

LOCAL, GLOBAL, BOTH = "local", "global", "both"
NAIVE, SEASONAL = "Naive", "SeasonalNaive"


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


@dataclass(repr=False, eq=False)
class Forecaster:
    """Forecaster of many series, by a network for each ("local"), one network for all ("global"), or their mean.

    Each series is standardised by its training values, and each window is shifted to a last value of 0. All networks
    take as many steps as that of the longest series: shorter ones repeat their windows (`equal_steps` of `fit`).

    Parameters
    ----------
    model : a Flax module [batch, window, channel] -> [batch, steps ahead], of one channel, or of 1 + `features` where
        global; None: an LSTM of 32 units
    horizon : steps ahead
    window : values that a network sees
    kind : "local", "global" or "both"
    direct : whether the model returns all steps of the horizon at once; else it returns the next step, and forecasts
        are recursive
    season : steps of a season, for the seasonal naive forecast; None: by the frequency of ds
    calibration : number of held-out horizons, forecast by networks that were trained without them, for the intervals
        of `predict`; these networks are trained in the same swarm
    freq : pandas' name of the step from one ds to the next; None: inferred
    epochs, batch_size, optimizer, loss, plan, progress : as `fit` takes them; optimizer None: Adam at 0.01
    features : of a series' embedding, where global
    seed : of the networks

    Attributes
    ----------
    swarms_ : {kind: the trained swarm}, local members in the order of the series
    histories_ : {kind: the `History` of its training}

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> from turbanet.forecasting import Forecaster
    >>> day = np.arange(60)
    >>> waves = {name: np.sin(2 * np.pi * (day + shift) / 7) for name, shift in [("a", 0), ("b", 1)]}
    >>> table = pd.DataFrame([(name, t, y) for name, wave in waves.items() for t, y in enumerate(wave)])
    >>> table.columns = ["unique_id", "ds", "y"]
    >>> forecaster = Forecaster(horizon=2, window=7, epochs=2, season=7, progress=False).fit(table)
    >>> print(forecaster.predict()[["unique_id", "ds", "Naive", "SeasonalNaive"]].round(2))
      unique_id  ds  Naive  SeasonalNaive
    0         a  60   0.43          -0.43
    1         a  61   0.43          -0.97
    2         b  60  -0.43          -0.97
    3         b  61  -0.43          -0.78
    """

    model: Any = None
    _: KW_ONLY
    horizon: int
    window: int
    kind: str = LOCAL
    direct: bool = False
    season: int | None = None
    calibration: int = 0
    freq: str | None = None
    epochs: int = 50
    batch_size: int = 32
    optimizer: optax.GradientTransformation | None = None
    loss: Callable = mse
    features: int = 4
    seed: int = 0
    plan: Plan | None = None
    progress: bool = True

    def __post_init__(self):
        whole = {name: getattr(self, name) for name in ("horizon", "window", "epochs", "batch_size", "features")}
        check_whole(**whole, season=1 if self.season is None else self.season)
        if self.kind not in (LOCAL, GLOBAL, BOTH):
            raise ValueError(f'kind must be "{LOCAL}", "{GLOBAL}" or "{BOTH}", got {self.kind!r}.')
        if not isinstance(self.calibration, int) or self.calibration < 0:
            raise ValueError(f"calibration must be a whole number of horizons, 0 for none; got {self.calibration!r}.")
        self.kinds = (LOCAL, GLOBAL) if self.kind == BOTH else (self.kind,)
        self.steps = self.horizon if self.direct else 1  # that the model returns
        self.model = LSTM(outputs=self.steps) if self.model is None else self.model
        self.name = type(self.model).__name__

    def fit(self, table: pd.DataFrame) -> Self:
        """Train on a table of unique_id, ds (dates or whole numbers) and y, a row for each series and time."""
        whole = panels.read(table, self.freq)
        cuts = [self.horizon * number for number in range(1 + self.calibration)]
        self._trained = self._train(whole, cuts, "training with its calibration")
        forecasts = self._trained.forecast(self.horizon)
        errors = [np.abs(whole.after(cut, self.horizon) - forecasts[i]) for i, cut in enumerate(cuts) if cut > 0]
        self._errors = np.array(errors)  # [cut, series, step]
        first = {LOCAL: slice(len(whole.series)), GLOBAL: slice(1)}
        self.swarms_ = {kind: jax.tree.map(itemgetter(first[kind]), self._trained.swarms[kind]) for kind in self.kinds}
        self.histories_: dict[str, History] = self._trained.histories
        return self

    def predict(self, steps: int | None = None, *, level: float | Sequence[float] = ()) -> pd.DataFrame:
        """Forecast the next `steps` of each series: a table of unique_id, ds, the model's and the naive forecasts.

        steps : None: the horizon; more only if forecasts are recursive
        level : coverage in percent of the intervals from NAME-lo-LEVEL to NAME-hi-LEVEL, from the errors of the same
            series and step in `calibration` (split conformal)
        """
        steps = self._check_steps(steps)
        if not hasattr(self, "_trained"):
            raise ValueError("Nothing is trained yet: call fit(table) first.")
        (forecast, *_) = self._trained.forecast(steps)
        table = self._table(self._trained.panels[0], forecast)
        for each in np.atleast_1d(level):
            half_width = self._half_width(each, steps).ravel()
            table[f"{self.name}-lo-{each:g}"] = table[self.name] - half_width
            table[f"{self.name}-hi-{each:g}"] = table[self.name] + half_width
        return table

    def cross_validation(
        self, table: pd.DataFrame, *, windows: int, step: int | None = None, steps: int | None = None
    ) -> pd.DataFrame:
        """Forecast from several origins, each with networks trained only on earlier times (rolling-origin evaluation).

        windows : number of origins, the last one `steps` before a series' end
        step : steps from one origin to the next; None: `steps`
        steps : steps to forecast; None: the horizon

        Returns a table of unique_id, ds, cutoff (the last training time), y and the forecasts. The networks of all
        origins are trained as one swarm; the fitted state of this object does not change. Where a network is global,
        all series must end at one time.
        """
        steps = self._check_steps(steps)
        step = steps if step is None else step
        check_whole(windows=windows, step=step)
        whole = panels.read(table, self.freq)
        cuts = [steps + step * number for number in reversed(range(windows))]
        trained = self._train(whole, cuts, f"a forecast from {windows} origins")
        tables = []
        for cut, panel, forecast in zip(cuts, trained.panels, trained.forecast(steps), strict=True):
            lines = self._table(panel, forecast)
            lines.insert(2, "cutoff", np.repeat(np.array([y.index[-1] for y in panel.series.values()]), steps))
            lines.insert(3, "y", whole.after(cut, steps).ravel())
            tables.append(lines)
        return pd.concat(tables).sort_values(["unique_id", "cutoff", "ds"]).reset_index(drop=True)

    def _train(self, whole, cuts, what):
        """Train networks of the series without their last steps, by each of `cuts`."""
        needed = self.window + self.steps + max(cuts)
        lengths = pd.Series({name: len(y) for name, y in whole.series.items()})
        if lengths.min() < needed:
            problem = f"Series {lengths.idxmin()} has {lengths.min()} values, {what} needs {needed}"
            raise ValueError(f"{problem}: leave it out, or take a shorter window or horizon.")
        ends = pd.Series({name: y.index[-1] for name, y in whole.series.items()})
        if GLOBAL in self.kinds and max(cuts) > 0 and ends.nunique() > 1:
            late = f"Series {ends.idxmin()} ends at {ends.min()}, others up to {ends.max()}"
            raise ValueError(f'{late}: one network of all would see later times than it forecasts; take kind="local".')
        return _Trained(self, [whole.cut(cut) for cut in cuts])

    def _check_steps(self, steps):
        steps = self.horizon if steps is None else steps
        check_whole(steps=steps)
        if self.steps > 1 and steps > self.horizon:
            raise ValueError(f"A direct model forecasts {self.horizon} steps, not {steps}: give it a longer horizon.")
        return steps

    def _table(self, panel: Panel, forecast: np.ndarray) -> pd.DataFrame:
        """Return the forecasts [series, step] as a long table with the naive forecasts."""
        steps = forecast.shape[1]
        ids = np.repeat(np.array(list(panel.series)), steps)
        table = pd.DataFrame({"unique_id": ids, "ds": np.concatenate(panel.coming(steps))})
        table[self.name] = forecast.ravel()
        table[NAIVE] = np.repeat([y.iloc[-1] for y in panel.series.values()], steps)
        if season := self.season or panel.season:
            last = [y.to_numpy()[-season:] for y in panel.series.values()]
            table[SEASONAL] = np.ravel([np.resize(y if len(y) == season else np.nan, steps) for y in last])
        return table

    def _half_width(self, level, steps):
        """Return half the width [series, step] of intervals that cover `level` percent."""
        if not 1 <= level < 100:
            raise ValueError(f"level is in percent, from 1 to below 100, such as 90; got {level}.")
        count = len(self._errors)
        rank = int(np.ceil((count + 1) * level / 100))
        if rank > count or steps > self.horizon:
            needed = int(np.ceil(level / (100 - level)))
            advice = f"calibration of at least {needed}, and {self.horizon} steps at the most"
            raise ValueError(f"{level:g} % intervals of {steps} steps need {advice}; calibration is {count}.")
        return np.sort(self._errors, axis=0)[rank - 1][:, :steps]


class _Trained:
    """The trained networks of several panels, which hold the same series up to different times."""

    def __init__(self, forecaster: Forecaster, panels: list[Panel]):
        self.forecaster = forecaster
        self.panels = panels
        values = [y.to_numpy() for panel in panels for y in panel.series.values()]
        self.shape = len(panels), len(panels[0].series)
        self.centre = np.array([y.mean() for y in values])
        self.spread = np.array([y.std() for y in values])
        self.spread[~(self.spread > 0)] = 1
        standardised = [(y - centre) / spread for y, centre, spread in zip(values, self.centre, self.spread)]
        self.scaled = [y.astype(np.float32) for y in standardised]  # panel after panel
        self.swarms = {}
        self.histories = {}
        optimizer = optax.adam(0.01) if forecaster.optimizer is None else forecaster.optimizer
        kwargs = {name: getattr(forecaster, name) for name in ("epochs", "batch_size", "plan", "progress")}
        kwargs |= {"per_member": True, "equal_steps": True}
        for kind in forecaster.kinds:
            x, y = self._examples(kind)
            model = forecaster.model
            if kind == GLOBAL:
                model = WithSeries(model, self.shape[1], forecaster.features)
            sample = jax.tree.map(lambda leaf: leaf[:1], x[0])
            swarm = TurbaTrainState.swarm(model, optimizer, len(x), sample_input=sample, seed=forecaster.seed)
            self.swarms[kind], self.histories[kind] = fit(swarm, x, y, forecaster.loss, **kwargs)
            if diverged(self.swarms[kind], self.histories[kind]).all():
                problem = f"Every {kind} network diverged, its loss or weights are NaN or infinite"
                raise ValueError(f"{problem}: give an optimizer of a smaller learning rate.")

    def forecast(self, steps: int) -> np.ndarray:
        """Return forecasts [panel, series, step] in the unit of y: the mean over the kinds of networks."""
        scaled = np.mean([self._scaled_forecast(kind, steps) for kind in self.swarms], axis=0)
        return scaled * self.spread.reshape(*self.shape, 1) + self.centre.reshape(*self.shape, 1)

    def _examples(self, kind):
        """Return each member's x [row, ...] (windows, and their series for a global network) and y (what follows)."""
        pairs = [_windows(y, self.forecaster.window, self.forecaster.steps) for y in self.scaled]
        if kind == GLOBAL:
            count = self.shape[1]
            pairs = [_joined(pairs[begin : begin + count]) for begin in range(0, len(pairs), count)]
        x, y = zip(*pairs, strict=True)
        return list(x), list(y)

    def _scaled_forecast(self, kind, steps):
        """Return standardised forecasts [panel, series, step] by one kind of networks."""
        shape = self.shape
        window = np.array([y[-self.forecaster.window :] for y in self.scaled]).reshape(*shape, -1)
        number = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        forecast = np.empty((*shape, 0), np.float32)
        while forecast.shape[2] < steps:
            last = window[..., -1:]
            x = (window - last)[..., None]
            # A local network is one member of a series: [member, 1, time, 1].
            inputs = x.reshape(-1, 1, *x.shape[2:]) if kind == LOCAL else (x, number)
            ahead = predict(self.swarms[kind], inputs, per_member=True, plan=self.histories[kind].plan)
            ahead = np.asarray(ahead).reshape(*shape, -1) + last
            forecast = np.concatenate([forecast, ahead], axis=2)
            window = np.concatenate([window, ahead], axis=2)[..., -self.forecaster.window :]
        return forecast[..., :steps]


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
