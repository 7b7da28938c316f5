"""A forecaster of many series by one network per series, one network for all, or both, trained as swarms."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

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


class Scaled(NamedTuple):
    """A series standardised by its own mean and standard deviation."""

    values: np.ndarray  # float32 [time]
    centre: float
    spread: float


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

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        horizon: int,
        window: int,
        kind: str = LOCAL,
        direct: bool = False,
        season: int | None = None,
        calibration: int = 0,
        freq: str | None = None,
        epochs: int = 50,
        batch_size: int = 32,
        optimizer: optax.GradientTransformation | None = None,
        loss: Callable = mse,
        features: int = 4,
        seed: int = 0,
        plan: Plan | None = None,
        progress: bool = True,
    ):
        check_whole(horizon=horizon, window=window, epochs=epochs, batch_size=batch_size, features=features)
        check_whole(**({} if season is None else {"season": season}))
        if kind not in (LOCAL, GLOBAL, BOTH):
            raise ValueError(f'kind must be "{LOCAL}", "{GLOBAL}" or "{BOTH}", got {kind!r}.')
        if not isinstance(calibration, int) or calibration < 0:
            raise ValueError(f"calibration must be a whole number of horizons, 0 for none; got {calibration!r}.")
        self.horizon = horizon
        self.window = window
        self.kinds = (LOCAL, GLOBAL) if kind == BOTH else (kind,)
        self.steps = horizon if direct else 1  # that the model returns
        self.model = LSTM(outputs=self.steps) if model is None else model
        self.name = type(self.model).__name__
        self.season = season
        self.calibration = calibration
        self.freq = freq
        self.optimizer = optax.adam(0.01) if optimizer is None else optimizer
        self.loss = loss
        self.features = features
        self.seed = seed
        self.how: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "plan": plan, "progress": progress}

    def fit(self, table: pd.DataFrame) -> Self:
        """Train on a table of unique_id, ds (dates or whole numbers) and y, a row for each series and time."""
        whole = panels.read(table, self.freq)
        cuts = [self.horizon * (1 + number) for number in range(self.calibration)]
        whole.check_length(self.window + self.steps + max(cuts, default=0), "training with its calibration")
        if cuts and GLOBAL in self.kinds:
            whole.check_ends()
        trained = _Trained(self, [whole, *map(whole.cut, cuts)])
        self._trained = trained
        self._panel = whole
        errors = []
        for cut, forecast in zip(cuts, trained.forecast(self.horizon)[1:], strict=True):
            true = np.stack([values[len(values) - cut :][: self.horizon] for values in whole.values])
            errors.append(np.abs(true - forecast))
        self._errors = np.array(errors)  # [cut, series, step]
        first = {LOCAL: slice(len(whole.ids)), GLOBAL: slice(1)}
        self.swarms_ = {kind: trained.members(kind, first[kind]) for kind in self.kinds}
        self.histories_: dict[str, History] = trained.histories
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
        table = self._table(self._panel, forecast)
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
        whole.check_length(self.window + self.steps + cuts[0], f"a forecast from {windows} origins")
        if GLOBAL in self.kinds:
            whole.check_ends()
        known = [whole.cut(cut) for cut in cuts]
        tables = []
        for cut, panel, forecast in zip(cuts, known, _Trained(self, known).forecast(steps), strict=True):
            lines = self._table(panel, forecast)
            true = [values[len(values) - cut :][:steps] for values in whole.values]
            lines.insert(2, "cutoff", np.repeat(np.array([times[-1] for times in panel.times]), steps))
            lines.insert(3, "y", np.concatenate(true))
            tables.append(lines)
        return pd.concat(tables).sort_values(["unique_id", "cutoff", "ds"]).reset_index(drop=True)

    def _check_steps(self, steps):
        steps = self.horizon if steps is None else steps
        check_whole(steps=steps)
        if self.steps > 1 and steps > self.horizon:
            raise ValueError(f"A direct model forecasts {self.horizon} steps, not {steps}: give it a longer horizon.")
        return steps

    def _table(self, panel: Panel, forecast: np.ndarray) -> pd.DataFrame:
        """Return the forecasts [series, step] as a long table with the naive forecasts."""
        steps = forecast.shape[1]
        table = pd.DataFrame({"unique_id": np.repeat(panel.ids, steps), "ds": np.concatenate(panel.coming(steps))})
        table[self.name] = forecast.ravel()
        table[NAIVE] = np.concatenate([panels.naive(values, steps) for values in panel.values])
        if season := self.season or panel.season:
            seasonal = [panels.seasonal_naive(values, steps, season) for values in panel.values]
            table[SEASONAL] = np.concatenate(seasonal)
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
        self.scaled = [[_standardise(values) for values in panel.values] for panel in panels]
        self.swarms = {}
        self.histories = {}
        for kind in forecaster.kinds:
            x, y = self._examples(kind)
            model = forecaster.model
            if kind == GLOBAL:
                model = WithSeries(model, len(panels[0].ids), forecaster.features)
            sample = jax.tree.map(lambda leaf: leaf[:1], x[0])
            kwargs = {"sample_input": sample, "seed": forecaster.seed}
            swarm = TurbaTrainState.swarm(model, forecaster.optimizer, len(x), **kwargs)
            self.swarms[kind], self.histories[kind] = fit(
                swarm, x, y, forecaster.loss, per_member=True, equal_steps=True, **forecaster.how
            )
            if diverged(self.swarms[kind], self.histories[kind]).all():
                problem = f"Every {kind} network diverged, its loss or weights are NaN or infinite"
                raise ValueError(f"{problem}: give an optimizer of a smaller learning rate.")

    def forecast(self, steps: int) -> list[np.ndarray]:
        """Return, for each panel, forecasts [series, step] in the unit of y: the mean over the kinds of networks."""
        centre = np.array([[each.centre for each in series] for series in self.scaled])[..., None]
        spread = np.array([[each.spread for each in series] for series in self.scaled])[..., None]
        scaled = np.mean([self._scaled_forecast(kind, steps) for kind in self.swarms], axis=0)
        return list(scaled * spread + centre)

    def members(self, kind: str, which: slice) -> Any:
        """Return the members of a kind at these positions."""
        swarm = self.swarms[kind]
        return swarm[np.stack([swarm.seed[which], swarm.id[which]], axis=1)]

    def _examples(self, kind):
        """Return each member's x [row, ...] (windows, and their series for a global network) and y (what follows)."""
        members: list[tuple] = []
        for series in self.scaled:
            pairs = [_windows(one.values, self.forecaster.window, self.forecaster.steps) for one in series]
            if kind == LOCAL:
                members += pairs
                continue
            number = np.repeat(np.arange(len(pairs), dtype=np.int32), [len(x) for x, _ in pairs])
            x, y = map(np.concatenate, zip(*pairs, strict=True))
            members.append(((x, number), y))
        return [x for x, _ in members], [y for _, y in members]

    def _scaled_forecast(self, kind, steps):
        """Return standardised forecasts [panel, series, step] by one kind of networks."""
        shape = len(self.panels), len(self.panels[0].ids)
        window = np.array([[one.values[-self.forecaster.window :] for one in series] for series in self.scaled])
        number = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        forecast = np.empty((*shape, 0), np.float32)
        while forecast.shape[2] < steps:
            last = window[..., -1:]
            x = (window - last)[..., None]
            if kind == LOCAL:  # one member per series: [member, 1, time, 1]
                x = x.reshape(-1, 1, *x.shape[2:])
            inputs = x if kind == LOCAL else (x, number)
            ahead = predict(self.swarms[kind], inputs, per_member=True, plan=self.histories[kind].plan)
            ahead = np.asarray(ahead).reshape(*shape, -1) + last
            forecast = np.concatenate([forecast, ahead], axis=2)
            window = np.concatenate([window, ahead], axis=2)[..., -self.forecaster.window :]
        return forecast[..., :steps]


def _standardise(values):
    centre, spread = values.mean(), values.std()
    spread = spread if spread > 0 else 1.0
    return Scaled(((values - centre) / spread).astype(np.float32), centre, spread)


def _windows(values, window, steps):
    """Return the windows [row, time, 1] and what follows them [row, step], both minus the window's last value."""
    whole = np.lib.stride_tricks.sliding_window_view(values, window + steps)
    last = whole[:, window - 1 : window]
    relative = whole - last
    return relative[:, :window, None], relative[:, window:]
