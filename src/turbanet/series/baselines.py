"""Forecasts that networks are held to, and the scores of all of them by step."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from turbanet.core.arrays import check_whole, divisor
from turbanet.core.extras import needed
from turbanet.core.plan import say_once
from turbanet.core.tables import BOUND, dated, quantiles
from turbanet.series.inputs import windows
from turbanet.series.tables import Columns, as_pandas
from turbanet.series.targets import pinball

NAIVE, SEASONAL, DRIFT = "Naive", "SeasonalNaive", "RWD"  # as statsforecast calls them


def slope(y: np.ndarray) -> float:
    """Return the mean step from each value of a series to the next; 0 for one value."""
    return (y[-1] - y[0]) / (len(y) - 1) if len(y) > 1 else 0.0


def naive(y: np.ndarray, slope: float, season: int | None, steps: int) -> dict[str, np.ndarray]:
    """Return the forecasts of `steps` [step] after a series' values: as the last one, as a season ago, by the slope."""
    found = {NAIVE: np.repeat(y[-1], steps)}
    if season:
        found[SEASONAL] = np.resize(y[-season:] if len(y) >= season else np.nan, steps)
    return found | {DRIFT: y[-1] + slope * np.arange(1, steps + 1)}


def model(name: str, window: int) -> Callable[..., np.ndarray]:
    """Return a further model as a function (series, season, window, steps) -> forecasts [series, step].

    series : a list of values [step] up to the origin; window : the values that gradient boosting sees
    """
    if name not in MODELS:
        raise ValueError(f"No baseline is called {name!r}; beside the naive ones there are {', '.join(MODELS)}.")
    needed("sklearn" if name == "GradientBoosting" else "statsmodels", "baselines")
    if name == "GradientBoosting" and window < 2:
        raise ValueError(f"{name} sees changes within input_size values, of {window} there are none: give more.")
    return MODELS[name]


def ets(series: Sequence[np.ndarray], season: int | None, window: int, steps: int) -> np.ndarray:
    """Exponential smoothing with a damped trend and an additive season, by statsmodels, series by series."""
    smoothing = needed("statsmodels.tsa.exponential_smoothing.ets", "baselines").ETSModel

    def one(y):
        of_season = {"seasonal": "add", "seasonal_periods": season} if season and len(y) > 2 * season > 2 else {}
        return smoothing(y, error="add", trend="add", damped_trend=True, **of_season).fit(disp=False).forecast(steps)

    return _each(one, series)


def theta(series: Sequence[np.ndarray], season: int | None, window: int, steps: int) -> np.ndarray:
    """The theta method (Assimakopoulos and Nikolopoulos 2000), by statsmodels, series by series."""
    method = needed("statsmodels.tsa.forecasting.theta", "baselines").ThetaModel

    def one(y):
        if np.ptp(y) == 0:  # statsmodels would find a trend
            return np.repeat(y[-1], steps)
        of_season = {"period": season, "method": "additive"} if season and len(y) > 2 * season > 2 else None
        settings = of_season or {"deseasonalize": False, "period": 1}
        return np.asarray(method(y, **settings).fit().forecast(steps))

    return _each(one, series)


def gradient_boosting(series: Sequence[np.ndarray], season: int | None, window: int, steps: int) -> np.ndarray:
    """One model of all series of changes from the last of `window` scaled values, by scikit-learn; recursive."""
    trees = needed("sklearn.ensemble", "baselines").HistGradientBoostingRegressor(random_state=0)
    centre = np.array([y.mean() for y in series])
    spread = divisor(np.array([y.std() for y in series]), centre)
    scaled = [(y - mean) / scale for y, mean, scale in zip(series, centre, spread, strict=True)]
    x, change = map(np.concatenate, zip(*(windows(y, window, 1) for y in scaled), strict=True))
    trees.fit(x[:, :-1], change[:, 0])
    seen = np.stack([y[-window:] for y in scaled])
    for _ in range(steps):
        last = seen[:, -1:]
        seen = np.concatenate([seen, last + trees.predict((seen[:, -window:] - last)[:, :-1])[:, None]], axis=1)
    return seen[:, -steps:] * spread[:, None] + centre[:, None]


MODELS = {"ETS": ets, "Theta": theta, "GradientBoosting": gradient_boosting}


def _each(one, series):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an optimizer's, of a series that fits no model well
        return np.stack([one(np.asarray(y, np.float64)) for y in series])


def scores(
    forecasts: Any,
    table: Any,
    *,
    season: int = 1,
    by_step: bool = True,
    id_col: str = "unique_id",
    time_col: str = "ds",
    target_col: str = "y",
    models: Sequence[str] | str | None = None,
) -> pd.DataFrame:
    """Score forecasts of `Forecaster.cross_validation` by their step ahead, or over all steps.

    Parameters
    ----------
    forecasts : what `cross_validation` returned, all rows of it, as the step ahead is the position within an origin;
        columns such as LSTM-q0.9 are quantiles
    table : the series that were forecast, whose values up to each cutoff scale the errors
    season : steps of the naive forecast that MASE divides by (Hyndman and Koehler 2006); 1: as the last value
    by_step : False: one row a model, whose standard error is that of the series' means over steps
    models : columns to score; None: all. Rows that one of them does not forecast count for none, but for one without
        any forecast

    Returns
    -------
    A table of model, step (with `by_step`), MASE (mean over series and origins), its standard error over series, and
    pinball, the mean pinball loss over the quantile levels of the model, in the unit of y (NaN where it has none). MASE
    leaves out a series that never changed before an origin, or has no more values than a season; such are named.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> from turbanet.forecasting import scores
    >>> table = pd.DataFrame({"unique_id": "a", "ds": range(6), "y": [0.0, 1, 3, 4, 6, 9]})
    >>> known = {"unique_id": "a", "ds": [4, 5], "cutoff": 3, "y": [6.0, 9]}
    >>> print(scores(pd.DataFrame(known | {"Naive": [4.0, 4]}), table)[["model", "step", "MASE"]])
       model  step  MASE
    0  Naive     1  1.50
    1  Naive     2   3.75
    """
    check_whole(season=season)
    named = [id_col, time_col, "cutoff", target_col]
    forecasts, table = (
        _read(each, names, what)
        for each, names, what in (
            (forecasts, named, "forecasts, what cross_validation returns,"),
            (table, [id_col, time_col, target_col], "The table"),
        )
    )
    bounds = [each for each in forecasts if BOUND.search(str(each))]
    every = [each for each in forecasts if each not in [*named, *bounds]]
    models = every if models is None else [models] if isinstance(models, str) else models
    if unknown := [each for each in models if each not in forecasts]:
        raise ValueError(f"The forecasts have no column {unknown[0]!r}; they have {', '.join(forecasts)}.")
    rows = forecasts.sort_values([id_col, "cutoff", time_col], kind="stable")
    keys = rows.groupby([id_col, "cutoff"], sort=False)
    step = keys.cumcount().to_numpy() + 1 if by_step else 0
    values = {name: each.sort_values(time_col) for name, each in table.groupby(id_col, sort=False)}
    scale = np.empty(len(rows))
    if missing := set(rows[id_col]) - values.keys():
        raise ValueError(f"The table has no series {min(missing, key=str)!r}, which was forecast: give its rows.")
    times = pd.Index(table[time_col].unique()).sort_values()
    lacking = [name for name, each in values.items() if (np.diff(times.get_indexer(each[time_col])) > 1).any()]
    if lacking or not pd.MultiIndex.from_frame(rows[named[:2]]).isin(pd.MultiIndex.from_frame(table[named[:2]])).all():
        which = f"The table lacks rows{f' of {len(lacking)} series, such as {lacking[0]}' if lacking else ''}"
        advice = f'table.set_index("{time_col}").groupby("{id_col}").{target_col}.resample(freq).ffill().reset_index()'
        say_once(f"{which}, and MASE counts steps from row to row: if fill= made them, give scores {advice}.")
    for (name, cutoff), places in keys.indices.items():
        before = values[name].loc[(values[name][time_col] <= cutoff).to_numpy(), target_col].to_numpy(np.float64)
        change = np.abs(before[season:] - before[:-season])
        scale[places] = np.nanmean(change) if np.isfinite(change).any() else np.nan
    scale = np.where(scale > 0, scale, np.nan)
    if len(unscaled := rows[id_col][np.isnan(scale)].unique()):
        which = f"{len(unscaled)} of {rows[id_col].nunique()} series, such as {unscaled[0]}"
        say_once(f"MASE leaves out {which}: they never changed before an origin, or are no longer than a season.")
    y = rows[target_col].to_numpy(np.float64)
    lacks = {model: np.isnan(rows[model].to_numpy(np.float64)) & ~np.isnan(y) for model in models}
    lacks = {model: lacking for model, lacking in lacks.items() if lacking.any() and not lacking[~np.isnan(y)].all()}
    if lacks:
        without = np.any(list(lacks.values()), axis=0)
        y = np.where(without, np.nan, y)
        say_once(f"{', '.join(lacks)}: no forecast of {without.sum()} rows, which are left out for every model.")
    parts = []
    for model in models:
        error = np.abs(y - rows[model].to_numpy(np.float64)) / scale
        frame = pd.DataFrame({"id": rows[id_col].to_numpy(), "step": step, "error": error, "pinball": np.nan})
        if levels := quantiles(model, bounds):
            loss = [pinball(y - rows[name].to_numpy(np.float64), level) for name, level in levels.items()]
            frame["pinball"] = np.mean(loss, axis=0)
        by_series = frame.groupby(["step", "id"], sort=True)["error"].mean().groupby("step")
        part = frame.groupby("step")[["error", "pinball"]].mean()
        part["standard_error"] = by_series.std() / np.sqrt(by_series.count())
        part = part.rename(columns={"error": "MASE"}).reset_index()
        parts.append(part.assign(model=model))
    columns = ["model", *["step"] * by_step, "MASE", "standard_error", "pinball"]
    return pd.concat(parts, ignore_index=True)[columns]


def _read(table, names, what):
    """Return a table that has these columns as a pandas one, with dates in place of periods and of text."""
    time_col = names[1]
    frame, _ = as_pandas(table, Columns(time=time_col))
    if missing := [name for name in names if name not in frame]:
        raise ValueError(f"{what} needs the columns {', '.join(names)}; it has no {', '.join(missing)}.")
    return frame.assign(**{name: dated(frame[name]) for name in (time_col, "cutoff") if name in frame})
