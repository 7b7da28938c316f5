"""A forecaster of many series by one network per series, one network for all, or both, trained as swarms."""

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from operator import itemgetter
from typing import Any, Self

import jax
import numpy as np
import optax
import pandas as pd

from turbanet.checkpoints.fitted import Fitted, numbers_of, with_numbers
from turbanet.core.aliases import aliases
from turbanet.core.arrays import check_float32, check_whole
from turbanet.core.plan import Plan, say_once
from turbanet.loss import mse
from turbanet.networks.models import LSTM
from turbanet.series import baselines, calendar as calendars, inputs, networks, panel as panels, settings, tables
from turbanet.series.intervals import Conformal, check_levels, unit
from turbanet.series.networks import BOTH, GLOBAL, LOCAL, UNKNOWN
from turbanet.series.panel import Panel
from turbanet.training.history import History


@aliases(horizon="h", window="input_size")
@dataclass(repr=False, eq=False)
class Forecaster(Fitted):
    """Forecaster of many series, by a network for each ("local"), one network for all ("global"), or their mean.

    Times are as they come: networks see values one after the other, whatever lies between them. All series follow one
    calendar. An origin is one time for all of them; whatever is learned for a forecast from it is learned from rows up
    to it. Names of arguments are those of neuralforecast.

    Parameters
    ----------
    model : a Flax module [batch, input_size, channel] -> [batch, steps ahead], times the numbers of a step (one for
        each of `quantiles`, two of "negative_binomial"); None: an LSTM of 32 units. Channels are the series, then for
        each column its values and whether they are there, for columns known ahead also those so many steps later,
        static columns and, where global, `features`. Values of the series are standardised, and of real numbers the
        window's last one is subtracted from all and from what is forecast
    h : steps ahead; also called horizon
    input_size : values that a network sees; also called window
    kind : "local", "global" or "both"
    direct : whether the model returns all steps of the horizon at once; else it returns the next step, and forecasts
        are recursive
    hist_exog_list : columns of the table that are known only up to the origin; requires direct=True for h > 1
    futr_exog_list : columns that are known ahead: a network sees them at each value, and as many steps later
    stat_exog_list : columns of static_df, for a global network, which never change
        Columns of all three are numbers, bool or categories. Numbers are standardised for each series, static ones over
        all series. Missing values in hist_exog_list and futr_exog_list are marked; static ones must be there
    loss : "squared_error", or a loss of your own, of values as the model sees them; "poisson" or "negative_binomial" of
        counts
    nonnegative : whether no forecast is below 0, by a softplus after the model
    quantiles : levels to forecast beside the point, 0.5 among them, such as (0.1, 0.5, 0.9); the point is then their
        median. Of counts any levels, of the distribution; the point is its mean. Requires direct=True for h > 1
    season : steps of a season, for the seasonal naive forecast; None: by the calendar
    freq : the calendar of times to come: a pandas offset or its name, a whole number, or a list of all times; None:
        learned from the times up to the origin
    fill : "forward", or a number, for rows and values that are missing in the grid of `freq`; None: none are filled
    calibration : number of held-out horizons, forecast by networks that were trained without them, for the intervals
        of `predict`; these networks are trained in the same swarm. 80 % need at least 4, 90 % 9, 95 % 19
    val_size, patience : the last values of each series that are held out, and the epochs without a better loss on
        them after which a network stops
    epochs, batch_size, optimizer, plan, progress : as `fit` takes them; optimizer None: Adam at 0.01. With a loss of
        your own without mask=, or a model with batch statistics, a batch is at most the shortest series' windows
    features : of a series' embedding, where global
    id_col, time_col, target_col : names of the table's columns
    seed : of the networks

    Attributes
    ----------
    swarms_ : {kind: the trained swarm}, local members in the order of the series
    histories_ : {kind: the `History` of its training}
    series_ : the series in the order of their networks, [series]
    calendar_ : the rule of the times to come

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> from turbanet.forecasting import Forecaster
    >>> day = np.arange(60)
    >>> waves = {name: np.sin(2 * np.pi * (day + shift) / 7) for name, shift in [("a", 0), ("b", 1)]}
    >>> table = pd.DataFrame([(name, t, y) for name, wave in waves.items() for t, y in enumerate(wave)])
    >>> table.columns = ["unique_id", "ds", "y"]
    >>> forecaster = Forecaster(h=2, input_size=7, epochs=2, season=7, progress=False).fit(table)
    >>> print(forecaster.predict()[["unique_id", "ds", "Naive", "SeasonalNaive"]].round(2))
      unique_id  ds  Naive  SeasonalNaive
    0         a  60   0.43          -0.43
    1         a  61   0.43          -0.97
    2         b  60  -0.43          -0.97
    3         b  61  -0.43          -0.78
    """

    _parts = (History, inputs.Scaling, inputs.Shape, Conformal)

    _kept = ("freq",)  # as `calendar_`

    _fixed = (
        *("h", "input_size", "kind", "direct", "loss", "nonnegative", "quantiles"),
        *("hist_exog_list", "futr_exog_list", "stat_exog_list"),
    )

    model: Any = None
    _: KW_ONLY
    h: int
    input_size: int
    kind: str = LOCAL
    direct: bool = False
    hist_exog_list: Sequence[str] = ()
    futr_exog_list: Sequence[str] = ()
    stat_exog_list: Sequence[str] = ()
    loss: Callable | str = mse
    nonnegative: bool = False
    quantiles: Sequence[float] = ()
    season: int | None = None
    freq: Any = None
    fill: Any = None
    calibration: int = 0
    val_size: int = 0
    patience: int | None = None
    epochs: int = 50
    batch_size: int = 32
    optimizer: optax.GradientTransformation | None = None
    features: int = 4
    id_col: str = "unique_id"
    time_col: str = "ds"
    target_col: str = "y"
    seed: int = 0
    plan: Plan | None = None
    progress: bool = True

    def __post_init__(self):
        self._list()
        self.steps = self.h if self.direct else 1  # that the model returns
        self._target = settings.target_of(self, self.steps)
        self.name = type(self.network).__name__
        settings.check(self, self.steps, self.name)
        self.kinds = (LOCAL, GLOBAL) if self.kind == BOTH else (self.kind,)
        self._columns = settings.columns_of(self, self.steps)

    def _list(self):
        for name in ("hist_exog_list", "futr_exog_list", "stat_exog_list", "quantiles"):
            setattr(self, name, settings.listed(self, name))

    @property
    def network(self) -> Any:
        """The model of one series, or of all."""
        return LSTM(outputs=self.steps * self._target.outputs) if self.model is None else self.model

    def __repr__(self) -> str:
        what = f"{self.name}, {self.kind}, {self.input_size} values to {self.h} ahead"
        return f"Forecaster({what}{f', {len(self.series_)} series' if hasattr(self, 'swarms_') else ''})"

    @aliases(table="df")
    def fit(self, df: Any, *, static_df: Any = None) -> Self:
        """Train on a table of series, ids and times in any order, a row for each series and time.

        df : of pandas, polars or Arrow: unique_id, ds (dates, periods or whole numbers), y, and the columns that are
            named in hist_exog_list and futr_exog_list
        static_df : unique_id and the columns of stat_exog_list, a row for each series
        """
        self.__post_init__()  # by the parameters as they are now
        panel = self._read(df)
        times = panel.times
        calendar = self._calendar(times, panel.kind)
        if calendar is None:
            raise ValueError(
                f"The times in {self.time_col} follow no calendar, or are too few to tell: {calendars.ADVICE}."
            )
        panels.check_rhythm(panel, calendar)
        panels.say_gaps(panel, calendar)
        needed = self.h * self.calibration
        if needed >= len(times):
            raise ValueError(f"There are {len(times)} times, the calibration needs {needed}: take a shorter one.")
        cuts = [len(times) - 1 - self.h * number for number in range(1 + self.calibration)]
        stops = [panel.until(times[cut]) for cut in cuts]
        settings.check_lengths(panel, times[cuts], stops, self._needed, self.h)
        pairs = self._pairs([(stop, np.arange(len(panel.ids))) for stop in stops])
        stat, stat_scale, stat_labels = self._static(static_df, panel, [slice(None)] * len(cuts))
        trained = networks.Trained(self, panel, stat, pairs)
        count = len(panel.ids)
        errors = np.empty((0, count, self.h))  # [cut, series, step]
        if self.calibration:
            held_out = np.arange(count, len(pairs[0]))
            found, _ = trained.forecast(held_out, trained.stop[held_out], self.h)
            following = panel.truth[trained.stop[held_out][:, None] + np.arange(self.h)]
            errors = np.abs(following - found).reshape(self.calibration, count, self.h)
        first = {LOCAL: slice(count), GLOBAL: slice(1)}
        self.swarms_ = {kind: jax.tree.map(itemgetter(first[kind]), trained.swarms[kind]) for kind in self.kinds}
        self.histories_: dict[str, History] = trained.histories
        self.series_ = panel.ids.tolist()
        self.calendar_ = calendar
        self._season = self.season or calendar.season
        self._panel = panel.tail(max(self.input_size, self._season or 1))  # what `predict` goes on from
        self._slope = np.array([baselines.slope(y) for y in panel.values(panel.end)])
        self._scaling, self._fitted_shape = trained.scaling[:count], trained.shape
        self._conformal = Conformal(errors, np.array([unit(y) for y in panel.values(panel.end)]))
        self._stat: Any = None if stat is None else stat[0]
        self._stat_scale: Any = stat_scale
        self._stat_labels = stat_labels
        self._given = self._parameters_now()
        return self

    @aliases(steps="h", table="df")
    def predict(
        self,
        h: int | None = None,
        *,
        df: Any = None,
        futr_df: Any = None,
        static_df: Any = None,
        level: float | Sequence[float] | None = None,
    ) -> Any:
        """Forecast the next `h` steps of each series: a table of ids, times, the model's and the naive forecasts.

        h : None: the horizon; more only if forecasts are recursive, without quantiles and hist_exog_list
        df : newer rows, at least `input_size` of each series, as `fit` takes them; networks and scaling stay as they
            are; naive forecasts know these rows only. A global network forecasts series that it has not seen, which
            are scaled by the rows that came: of fewer rows than in `fit` a series that wanders has a smaller scale,
            and quantiles are too narrow. None: the table of `fit`
        futr_df : what is known ahead, `make_future_dataframe()` with the columns of futr_exog_list; of a direct model,
            for its whole horizon
        static_df : stat_exog_list of series that were not there in `fit`; the others keep theirs
        level : coverage in percent of the intervals from NAME-lo-LEVEL to NAME-hi-LEVEL, from the errors of the same
            series and step in `calibration` (split conformal); of a new series, those of all, in units of the mean
            absolute step of a series. NaN where a series had too few errors, as held-out values that were filled have
            none, and for a new one that never changes
        """
        self = self._as_fitted()
        steps = self._check_steps(h)
        panel = self._known(df)
        levels = check_levels(level, len(self._conformal.errors), steps, self.h)
        number = tables.located(panel.ids.tolist(), self.series_)
        new = number < 0
        scaling = self._scaling[number]
        if new.any():
            own = inputs.Scaling.of(panel, self._target, np.arange(len(new)), panel.end)
            scaling = scaling.where(~new, own)
        window = panel.end[:, None] + np.arange(-self.input_size, 0)
        hist, futr = np.split(panel.exog[window], [panel.hist], axis=2)
        if self.futr_exog_list:
            whole = -(-steps // self.steps) * self.steps
            ahead = panels.read_future(futr_df, self._columns, panel, self._coming(panel, whole))
            futr = np.concatenate([futr, ahead], axis=1)
        elif futr_df is not None:
            raise ValueError("futr_df came, and futr_exog_list names no column of it: name them, or leave it out.")
        stat = None
        if static_df is not None and not self.stat_exog_list:
            raise ValueError("static_df came, and stat_exog_list names no column of it: name them, or leave it out.")
        if self.stat_exog_list:
            stat = self._stat[number]
            if new.any():
                values, labels, _ = panels.read_static(static_df, self._columns, panel.ids[new])
                tables.check_labels(labels, self._stat_labels)
                stat[new] = (values - self._stat_scale[0]) / self._stat_scale[1]
        seen = inputs.Seen(panel.y[window], hist, futr, stat, np.where(new, UNKNOWN, number).astype(np.int32))
        members = {LOCAL: number, GLOBAL: np.zeros(len(number), int)}
        found = networks.forecast(self, self.swarms_, members, seen, scaling, self._fitted_shape, steps)
        table = self._keys(panel, self._coming(panel, steps))
        values = panel.values(panel.end)
        slopes = self._slope if df is None else list(map(baselines.slope, values))
        self._add_forecasts(table, values, slopes, found, self._season)
        units = np.array([unit(values[place]) for place in np.flatnonzero(new)])
        self._conformal.add(table, self.name, levels, number, steps, units, self._target.least)
        return panel.kind.written(table, self.time_col)

    def make_future_dataframe(self, h: int | None = None, *, df: Any = None) -> Any:
        """Return the ids and the times of the next `h` steps, to be filled with what is known ahead, for `predict`."""
        self = self._as_fitted()
        steps = self._check_steps(h)
        panel = self._known(df)
        return panel.kind.written(self._keys(panel, self._coming(panel, steps)), self.time_col)

    @aliases(table="df", windows="n_windows", step="step_size", steps="h")
    def cross_validation(
        self,
        df: Any,
        *,
        n_windows: int = 1,
        step_size: int | None = None,
        h: int | None = None,
        refit: bool | int = True,
        static_df: Any = None,
        level: float | Sequence[float] | None = None,
        models: Sequence[str] | str = (),
    ) -> Any:
        """Forecast from several origins, each with networks trained only on rows up to it (rolling-origin evaluation).

        All networks of all origins are trained as one swarm of each kind. Forecasts are scored by position: the first
        is of a series' first value after the origin.

        df, static_df : as `fit` takes them
        n_windows : number of origins; the last one is the latest whose forecasts are all in the table
        step_size : times of the table from one origin to the next; None: h
        h : steps to forecast; None: the horizon
        refit : whether each origin has networks of its own (True), those of the first one (False), or new ones after
            this number of origins
        level : as in `predict`; `calibration` earlier origins of each origin are trained and forecast as well
        models : further baselines, trained up to each origin: "ETS" and "Theta" of statsmodels, "GradientBoosting" of
            scikit-learn, one of all series (extra `baselines`)

        Returns
        -------
        A table of ids, ds, cutoff (the origin), y (NaN where it was filled), the model's forecasts and the naive ones.
        A series that has too few values before an origin, or none after it, is named in a log message and has no rows
        there.
        """
        self = replace(self)  # by the parameters as they are now; what is fitted stays as it is
        panel = self._read(df)
        steps = self._check_steps(h)
        step = steps if step_size is None else step_size
        check_whole(n_windows=n_windows, step_size=step)
        levels = check_levels(level, self.calibration, steps, self.h)
        every = {True: 1, False: n_windows}[bool(refit)] if isinstance(refit, bool | np.bool_) else refit
        check_whole(refit=every)
        names = [models] if isinstance(models, str) else models
        further = {name: baselines.model(name, self.input_size) for name in names}
        times = panel.times
        if calendar := self._calendar(times, panel.kind):
            panels.check_rhythm(panel, calendar)
        origins = [len(times) - 1 - steps - step * number for number in reversed(range(n_windows))]
        trained_at = [origins[number - number % every] for number in range(n_windows)]
        earlier = [self.h * number for number in range(1, 1 + self.calibration)] if len(levels) else []
        all_origins = sorted({*trained_at, *(origin - back for origin in origins for back in earlier)})
        if min(all_origins) < 0:
            needed = len(times) - min(all_origins)
            problem = f"a forecast from {n_windows} origins, with their calibration, needs {needed} times"
            raise ValueError(f"{problem} and more, there are {len(times)}: take fewer windows or shorter ones.")
        stops = {origin: panel.until(times[origin]) for origin in {*all_origins, *origins}}
        trainings = self._trainings(panel, [stops[origin] for origin in all_origins])
        pairs = self._pairs(trainings)
        stat, *_ = self._static(static_df, panel, [series for _, series in trainings])
        trained = networks.Trained(self, panel, stat, pairs)
        positions = {origin: number for number, origin in enumerate(all_origins)}
        of_pair = np.full((len(all_origins), len(panel.ids)), -1)
        of_pair[pairs[0], pairs[1]] = np.arange(len(pairs[0]))
        season = self.season or (rule.season if (rule := self._calendar(times[: origins[0] + 1], panel.kind)) else None)
        parts: list[pd.DataFrame] = []
        places: list[np.ndarray] = []  # of each row's series
        left_out: dict[Any, Any] = {}
        for origin, source in zip(origins, trained_at, strict=True):
            stop = stops[origin]
            pair = of_pair[positions[source]]
            scored = (pair >= 0) & (stop < panel.end) & (stop - panel.begin >= self.input_size)
            left_out = {panel.ids[i]: times[origin] for i in np.flatnonzero(~scored)} | left_out
            series = np.flatnonzero(scored)
            if not len(series):
                time = panel.kind.shown(times[origin])
                raise ValueError(f"No series has values after the origin {time}: take fewer or later origins.")
            found = trained.forecast(pair[series], stop[series], steps)
            part = self._cross_validated(panel, series, stop[series], found, season, further)
            part.insert(2, "cutoff", times[[origin]].repeat(len(part)))
            if len(levels):
                errors = self._calibration_errors(trained, of_pair, positions, origin, stops, earlier)
                Conformal(errors).add(part, self.name, levels, series, steps, least=self._target.least)
            there = (stop[series][:, None] + np.arange(steps) < panel.end[series][:, None]).ravel()
            parts.append(part[there])
            places.append(np.repeat(series, steps)[there])
        if left_out:
            name, origin = next(iter(left_out.items()))
            which = f"{len(left_out)} of {len(panel.ids)} series, such as {name} at {panel.kind.shown(origin)}"
            say_once(f"{which}, are not forecast from all origins: they have too few values before, or none after.")
        order = np.argsort(np.concatenate(places), kind="stable")  # origins and times are in order
        return panel.kind.written(pd.concat(parts).iloc[order].reset_index(drop=True), self.time_col)

    # What networks are trained on.

    @property
    def _needed(self):
        """Values that a series needs before an origin."""
        return self.input_size + self.steps + self.val_size

    def _read(self, df):
        panel = panels.read(df, self._columns, self.freq, self.fill)
        self._target.check(panel.y)
        return panel

    def _calendar(self, times, kind):
        freq = self.freq if kind.period is None else calendars.step_of(self.freq, kind.period)
        calendar = calendars.learned(times) if freq is None else calendars.given(freq, times)
        return calendar if kind.period is None else calendars.of_periods(calendar, kind.period)

    def _shape(self, panel, stat):
        futr = panel.exog.shape[1] - panel.hist
        return inputs.Shape(self.input_size, self.steps, panel.hist, futr, 0 if stat is None else stat[0].shape[1])

    def _trainings(self, panel, stops):
        """Return (where each series ends, the series that are long enough) of each origin."""
        trainings = [(stop, np.flatnonzero(stop - panel.begin >= self._needed)) for stop in stops]
        if not all(len(series) for _, series in trainings):
            lengths = panel.end - panel.begin
            problem = f"A forecast needs {self._needed} values before the first origin"
            longest = f"series {panel.ids[int(lengths.argmax())]} has {lengths.max()} in all"
            raise ValueError(f"{problem}, {longest}: take fewer origins, a shorter window or a shorter horizon.")
        return trainings

    def _pairs(self, trainings):
        """Return (origin, series, stop) of each pair of an origin and a series that is trained on."""
        origin = np.repeat(np.arange(len(trainings)), [len(series) for _, series in trainings])
        series = np.concatenate([series for _, series in trainings])
        stop = np.concatenate([stop[series] for stop, series in trainings])
        return origin, series, stop

    def _static(self, static_df, panel, present):
        """Return ([series, column] of each origin, scaled by those `present`, the first one's scale, their names)."""
        if not self.stat_exog_list:
            if static_df is not None:
                raise ValueError("static_df came, and stat_exog_list names no column of it: name them.")
            return None, None, ()
        values, labels, plain = panels.read_static(static_df, self._columns, panel.ids)
        scales = [inputs.standards(values[ids], plain) for ids in present]
        return [((values - centre) / spread).astype(np.float32) for centre, spread in scales], scales[0], labels

    def _parameters_now(self):
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _as_fitted(self):
        """Return the forecaster with the parameters of its last `fit`: those set since count from the next one on."""
        given = getattr(self, "_given", {}) | {"plan": self.plan, "progress": self.progress}
        fitted = replace(self, **given)
        found = {name: value for name, value in vars(self).items() if name not in {"_given", *vars(fitted)}}
        vars(fitted).update(found)
        return fitted

    def _check_fitted(self):
        if not hasattr(self, "swarms_"):
            raise ValueError("Nothing is trained yet: call fit(df) first.")

    def _check_steps(self, steps):
        if not (steps is None or isinstance(steps, int | np.integer)):
            raise ValueError("A table goes by its name, predict(df=newer): the first argument is h, the steps ahead.")
        steps = self.h if steps is None else steps
        check_whole(h=steps)
        if steps > self.h and (self.steps > 1 or self.hist_exog_list or self._target.quantiles):
            which = "direct models, quantiles and hist_exog_list"
            raise ValueError(f"Forecasts of {which} end at h={self.h}, {steps} steps came: fit with a longer horizon.")
        return steps

    # What forecasts go on from, and what they are written as.

    def _known(self, df):
        """Return the panel of `fit`, or of newer rows, of known series and, for a global network, of new ones."""
        self._check_fitted()
        if df is None:
            return self._panel
        panel = self._read(df)
        known = self._panel
        kinds = [(f"period[{each.kind.period}]" if each.kind.period else str(each.ds.dtype)) for each in (known, panel)]
        if kinds[0] != kinds[1]:
            raise ValueError("The times were {} in fit, the table's are {}: give the same.".format(*kinds))
        tables.check_labels(panel.names, known.names)
        panel = replace(panel, plain=known.plain)
        panels.check_rhythm(panel, self.calendar_)
        lengths = panel.end - panel.begin
        if (lengths < self.input_size).any():
            short = int((lengths < self.input_size).argmax())
            which = f"Series {panel.ids[short]} has {lengths[short]} values from its first one on"
            raise ValueError(f"{which}, a network sees {self.input_size}: give its last ones.")
        new = tables.located(panel.ids.tolist(), self.series_) < 0
        if new.any() and LOCAL in self.kinds:
            advice = 'call fit with a table that holds it, take kind="global", or leave it out'
            raise ValueError(f"No network was trained on series {panel.ids[new][0]}: {advice}.")
        if new.any():
            which = f"{new.sum()} of {len(new)} series are new, such as {panel.ids[new][0]}"
            say_once(f"{which}: they are scaled by the rows that came.")
        return panel

    def _coming(self, panel, steps):
        """Return the next `steps` times of each series."""
        last = panel.ds[panel.end - 1]
        rule = {time: self.calendar_.after(time, steps) for time in last.unique()}
        return [rule[time] for time in last]

    def _keys(self, panel, coming):
        """Return a table of ids and the times to come."""
        steps = np.array(list(map(len, coming)))
        times = coming[0].append(list(coming[1:]))
        return pd.DataFrame({self.id_col: panel.ids.repeat(steps), self.time_col: times})

    def _add_forecasts(self, table, values, slopes, found, season):
        """Add the columns of the model's and the naive forecasts to a table of keys."""
        point, quantile = found
        table[self.name] = point.ravel()
        for each in self._target.quantiles:
            table[f"{self.name}-q{each:g}"] = quantile(each).ravel()
        naive = [baselines.naive(*each, season, point.shape[1]) for each in zip(values, slopes, strict=True)]
        for name in naive[0]:
            table[name] = np.concatenate([each[name] for each in naive])

    def _cross_validated(self, panel, series, stop, found, season, further):
        """Return the forecasts from one origin beside the values that came, NaN where there are none."""
        steps = found[0].shape[1]
        rows = stop[:, None] + np.arange(steps)
        there = rows < panel.end[series][:, None]
        rows = np.minimum(rows, panel.end[series][:, None] - 1)
        table = pd.DataFrame({self.id_col: panel.ids[series].repeat(steps), self.time_col: panel.ds[rows.ravel()]})
        table[self.target_col] = np.where(there, panel.truth[rows], np.nan).ravel()
        values = panel.values(stop, series)
        self._add_forecasts(table, values, map(baselines.slope, values), found, season)
        for name, model in further.items():
            table[name] = model(values, season, self.input_size, steps).ravel()
        return table

    def _calibration_errors(self, trained, of_pair, positions, origin, stops, earlier):
        """Return the absolute errors [cut, series, step] of forecasts before an origin; NaN where there are none."""
        panel = trained.panel
        errors = np.full((len(earlier), len(panel.ids), self.h), np.nan)
        for number, back in enumerate(earlier):
            pair = of_pair[positions[origin - back]]
            stop = stops[origin - back]
            series = np.flatnonzero((pair >= 0) & (stop + self.h <= stops[origin]))
            if len(series):
                found, _ = trained.forecast(pair[series], stop[series], self.h)
                errors[number, series] = np.abs(panel.truth[stop[series][:, None] + np.arange(self.h)] - found)
        return errors

    # Saving and export.

    def save(self, path: str | os.PathLike) -> None:
        """Save to one file, written whole or not at all: what was fitted and by which parameters, without the table.

        Parameters that are code (a model, a loss, an optimizer) are given to `load` again; `plan` is not kept. `path`
        may be an address, such as s3://bucket/file. Raises ValueError if nothing is fitted, TypeError for what no file
        can hold.
        """
        Fitted.save(self._as_fitted(), path)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that can be pickled: the arrays of swarms, and the end of each series."""
        state = {name: value for name, value in vars(self).items() if name not in ("_target", "_columns", "series_")}
        if "swarms_" in state:
            state["_has_freq"] = self.freq is not None
            state["swarms_"] = {name: numbers_of(swarm) for name, swarm in self.swarms_.items()}
            state["histories_"] = {name: replace(history, plan=None) for name, history in self.histories_.items()}
            state |= {"_panel": self._panel.state(), "calendar_": calendars.state(self.calendar_)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "swarms_" in state and "_conformal" not in state:
            raise ValueError(
                "This forecaster was kept by an earlier TurbaNet, which this one cannot read: fit it anew."
            )
        vars(self).update(state)
        self._list()  # of earlier versions too
        self._target, self._columns = settings.target_of(self, self.steps), settings.columns_of(self, self.steps)
        if "swarms_" in state:
            self._panel, self.calendar_ = Panel.of(state["_panel"]), calendars.restored(state["calendar_"])
            self.series_ = self._panel.ids.tolist()
            if vars(self).pop("_has_freq", False) and self.freq is None:  # an object, which no file holds
                self.freq = getattr(self.calendar_, "offset", None) or self.calendar_.times
            vars(self).setdefault("_given", self._parameters_now())
            fitted = self._as_fitted()
            self.swarms_ = {name: fitted._swarm(name, numbers) for name, numbers in state["swarms_"].items()}

    def _swarm(self, kind, numbers):
        count = len(self.series_)
        like = networks.untrained(self, kind, count if kind == LOCAL else 1, count, self._fitted_shape)
        again = with_numbers(like, numbers)
        if again is None:
            raise ValueError("The networks' layers have other names or sizes by now: fit the forecaster anew.")
        return again

    def _to_export(self, kind):
        """Return (kind, function of {"window": ..., "series": ...}, such an x) for `turbanet.export`."""
        if kind not in (None, "forecast"):
            raise ValueError(f'A Forecaster is exported as "forecast", not as {kind!r}.')
        self._check_fitted()
        self = self._as_fitted()
        check_float32(self._scaling.centre, self._scaling.spread)
        program = networks.program_of(self, self.swarms_, self._scaling, self._stat, self._fitted_shape)
        return "forecast", program, self._fitted_shape.samples(self.h)
