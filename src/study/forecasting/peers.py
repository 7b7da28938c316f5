"""Forecasts from several origins by TurbaNet and by neuralforecast, in turn, for `make peers`."""

import json
import tempfile
from pathlib import Path

import numpy as np

from study.pipeline import programs
from study.pipeline.environments import build

JOB = {"h": 5, "input_size": 20, "hidden": 32, "learning_rate": 0.003, "batch_size": 256, "origins": 10, "seed": 0}


def origins(*, series=500, days=252, epochs=4, local_epochs=12, turns=2):
    """Forecast log prices anew from ten origins, with networks of each origin's own (refit), in turn: a table.

    One network for all by both, of as many steps of as many windows; one for each series by ours, which neuralforecast
    has not. Seconds hold compilation and start, but no import.
    """
    import optax
    import pandas as pd

    import turbanet as tn
    from study.measurement import timing
    from study.measurement.compilation import cold
    from turbanet.forecasting import Forecaster

    python = build("neuralforecast")
    table = _prices(series, days)
    lines = []
    common = {"h": JOB["h"], "input_size": JOB["input_size"], "direct": True, "seed": JOB["seed"], "progress": False}
    model, optimizer = tn.LSTM(JOB["hidden"], outputs=JOB["h"]), optax.adam(JOB["learning_rate"])
    ours = {
        "one for all": {"kind": "global", "epochs": epochs, "batch_size": JOB["batch_size"]},
        "one for each": {"kind": "local", "epochs": local_epochs, "batch_size": 32},
    }
    windows = table.unique_id.nunique() * (days - JOB["h"] * (JOB["origins"] + 1) - JOB["input_size"])
    job = JOB | {"steps": epochs * -(-windows // JOB["batch_size"])}
    with tempfile.TemporaryDirectory() as folder:
        table.to_parquet(f"{folder}/table.parquet")
        for turn in range(turns):
            for name, settings in ours.items():
                forecaster = Forecaster(model, optimizer=optimizer, **settings, **common)
                with cold(), timing.stopwatch() as watch:
                    found = forecaster.cross_validation(table, n_windows=JOB["origins"])
                lines.append(_line("TurbaNet", name, turn, watch.seconds, found, found.LSTM))
            script = [python, Path(__file__).with_name("neural_forecast.py"), folder, json.dumps(job)]
            printed = programs.output(script, "neuralforecast")
            found = pd.read_parquet(f"{folder}/found.parquet")
            seconds = json.loads(printed.strip().splitlines()[-1])["seconds"]
            lines.append(_line("neuralforecast", "one for all", turn, seconds, found, found.LSTM))
            lines.append(_line("last price", "", turn, np.nan, found, found.Naive))
    return pd.DataFrame(lines).assign(series=table.unique_id.nunique(), days=days, origins=JOB["origins"])


def _line(method, networks, turn, seconds, found, forecast):
    error = float(np.abs(forecast - found.y).mean())
    return {"method": method, "networks": networks, "turn": turn, "seconds": seconds, "error (%)": error}


def _prices(series, days):
    import pandas as pd

    from study.sources import store

    arrays, _ = store.load("stocks")
    close = arrays["close"][-days:]
    listed = np.flatnonzero(~np.isnan(close).any(axis=0))[:series]
    table = pd.DataFrame(100 * np.log(close[:, listed]), columns=arrays["tickers"][listed]).rename_axis("ds")
    return table.reset_index().melt("ds", var_name="unique_id", value_name="y").sort_values(["unique_id", "ds"])


PARTS = {"forecasts": origins}
