"""A forecaster of many series by one network per series, one network for all, or both, trained as swarms."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import itemgetter
from typing import Any, Self

import jax
import numpy as np
import optax
import pandas as pd

from turbanet.checkpoints.fitted import Fitted, numbers_of, with_numbers
from turbanet.core.arrays import check_float32, check_whole
from turbanet.core.plan import Plan
from turbanet.loss import mse
from turbanet.networks.models import LSTM
from turbanet.series import networks, panel as panels
from turbanet.series.networks import BOTH, GLOBAL, LOCAL
from turbanet.series.panel import Panel
from turbanet.training.history import History

NAIVE, SEASONAL = "Naive", "SeasonalNaive"


@dataclass(repr=False, eq=False)
class Forecaster(Fitted):
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
    series_ : the series in the order of their networks, [series]

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

    _parts = (History,)

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
        self.name = type(self.network).__name__

    @property
    def network(self) -> Any:
        """The model of one series, or of all."""
        return LSTM(outputs=self.steps) if self.model is None else self.model

    def fit(self, table: pd.DataFrame) -> Self:
        """Train on a table of unique_id, ds (dates or whole numbers) and y, a row for each series and time."""
        whole = panels.read(table, self.freq)
        cuts = [self.horizon * number for number in range(1 + self.calibration)]
        trained = self._train(whole, cuts, "training with its calibration" if self.calibration else "training")
        forecasts = trained.forecast(self.window, self.horizon, self.plan)
        errors = [np.abs(whole.after(cut, self.horizon) - forecasts[i]) for i, cut in enumerate(cuts) if cut > 0]
        self._errors = np.array(errors)  # [cut, series, step]
        first = {LOCAL: slice(len(whole.series)), GLOBAL: slice(1)}
        self.swarms_ = {kind: jax.tree.map(itemgetter(first[kind]), trained.swarms[kind]) for kind in self.kinds}
        self.histories_: dict[str, History] = trained.histories
        self.series_ = list(whole.series)
        self._panel = whole.tail(max(self.window, self.season or whole.season or 1))  # what `predict` goes on from
        self._centre, self._spread = trained.centre[0], trained.spread[0]
        return self

    def predict(
        self, steps: int | None = None, *, table: pd.DataFrame | None = None, level: float | Sequence[float] = ()
    ) -> pd.DataFrame:
        """Forecast the next `steps` of each series: a table of unique_id, ds, the model's and the naive forecasts.

        steps : None: the horizon; more only if forecasts are recursive
        table : newer rows of series that were there in `fit`, at least `window` of each, as `fit` takes them; networks
            and scaling stay as they are. None: the table of `fit`
        level : coverage in percent of the intervals from NAME-lo-LEVEL to NAME-hi-LEVEL, from the errors of the same
            series and step in `calibration` (split conformal)
        """
        steps = self._check_steps(steps)
        if not hasattr(self, "swarms_"):
            raise ValueError("Nothing is trained yet: call fit(table) first.")
        panel = self._panel if table is None else self._read_newer(table)
        number = np.array([self.series_.index(name) for name in panel.series])
        swarms = dict(self.swarms_)
        if LOCAL in swarms and len(number) < len(self.series_):
            swarms[LOCAL] = jax.tree.map(itemgetter(number), swarms[LOCAL])
        scaling = self._centre[None, number], self._spread[None, number]
        (forecast,) = networks.forecast(swarms, panel.last(self.window)[None], *scaling, steps, self.plan, number)
        forecasts = self._table(panel, forecast)
        for each in np.atleast_1d(level):
            half_width = self._half_width(each, steps)[number].ravel()
            forecasts[f"{self.name}-lo-{each:g}"] = forecasts[self.name] - half_width
            forecasts[f"{self.name}-hi-{each:g}"] = forecasts[self.name] + half_width
        return forecasts

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
        forecasts = trained.forecast(self.window, steps, self.plan)
        for cut, panel, forecast in zip(cuts, trained.panels, forecasts, strict=True):
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
        return networks.Trained(self, [whole.cut(cut) for cut in cuts])

    def _read_newer(self, table):
        """Return the panel of newer rows of known series, in the order of `series_`."""
        known = self._panel
        whole = isinstance(known.freq, int) or ("ds" in table and pd.api.types.is_integer_dtype(table.ds))
        new = panels.read(table, None if whole else known.freq)
        if new.freq != known.freq:
            raise ValueError(f"The series were {known.freq} apart in fit, the table's are {new.freq}: give the same.")
        if unknown := [name for name in new.series if name not in known.series]:
            advice = "call fit with a table that holds it, or leave it out"
            raise ValueError(f"No network was trained on series {unknown[0]}: {advice}.")
        for name, y in new.series.items():
            if len(y) < self.window:
                raise ValueError(
                    f"Series {name} has {len(y)} values, a network sees {self.window}: give its last ones."
                )
        return Panel({name: new.series[name] for name in self.series_ if name in new.series}, new.freq)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that can be pickled: the arrays of swarms, and the end of each series."""
        state = dict(vars(self))
        if "swarms_" in state:
            state["swarms_"] = {name: numbers_of(swarm) for name, swarm in self.swarms_.items()}
            state["histories_"] = {name: replace(history, plan=None) for name, history in self.histories_.items()}
            state["_panel"] = self._panel.state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "swarms_" in state:
            self._panel = Panel.of(state["_panel"])
            self.swarms_ = {name: self._swarm(name, numbers) for name, numbers in state["swarms_"].items()}

    def _swarm(self, kind, numbers):
        count = len(self.series_)
        like = networks.untrained(self, kind, count if kind == LOCAL else 1, count)
        again = with_numbers(like, numbers)
        if again is None:
            raise ValueError("The networks' layers have other names or sizes by now: fit the forecaster anew.")
        return again

    def _to_export(self, kind):
        """Return (kind, function of {"window": ..., "series": ...}, such an x) for `turbanet.export`."""
        if not hasattr(self, "swarms_"):
            raise ValueError("Nothing is trained yet: call fit(table) first.")
        if kind not in (None, "forecast"):
            raise ValueError(f'A Forecaster is exported as "forecast", not as {kind!r}.')
        check_float32(self._centre, self._spread)
        program = networks.program_of(self.swarms_, self._centre, self._spread, self.horizon, self.steps)
        return "forecast", program, networks.sample_of(self.window)

    def _check_steps(self, steps):
        if isinstance(steps, pd.DataFrame):
            raise ValueError("A table goes by its name, predict(table=newer): the first argument is steps.")
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
