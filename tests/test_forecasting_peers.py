"""Forecasts beside neuralforecast: the same table and as many steps, by a stand-in for its program."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from study.forecasting import peers
from study.sources import store


def test_neuralforecast_is_asked_for_the_same_training(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    close = np.exp(rng.normal(size=(120, 3)).cumsum(axis=0) / 100)
    close[:70, 2] = np.nan  # listed too late
    arrays = {"close": close, "tickers": np.array(["A", "B", "C"])}
    monkeypatch.setattr(store, "load", lambda name: (arrays, {}))
    monkeypatch.setattr(peers, "build", lambda name: f"python of {name}")
    monkeypatch.setitem(peers.JOB, "origins", 2)

    def output(command, name):
        python, script, folder, job = command
        assert (python, script.name, name) == ("python of neuralforecast", "neural_forecast.py", "neuralforecast")
        table = pd.read_parquet(Path(folder) / "table.parquet")
        np.testing.assert_allclose(table[table.unique_id == "B"].y, 100 * np.log(close[-100:, 1]))
        assert json.loads(job)["steps"] == 2  # epochs of 2 * (100 - 3 * 5 - 20) windows in one batch
        found = table.groupby("unique_id").tail(5).assign(cutoff=94, LSTM=lambda t: t.y + 2, Naive=lambda t: t.y - 3)
        found.to_parquet(Path(folder) / "found.parquet")
        return "said before\n" + json.dumps({"seconds": 7.5})

    monkeypatch.setattr(peers.programs, "output", output)
    table = peers.origins(series=3, days=100, epochs=2, local_epochs=1, turns=1)
    assert table.method.tolist() == ["TurbaNet", "TurbaNet", "neuralforecast", "last price"]
    assert table.networks.tolist() == ["one for all", "one for each", "one for all", ""]
    np.testing.assert_allclose(table["error (%)"][2:], [2, 3])
    assert table.seconds[2] == 7.5 and (table.seconds[:2] > 0).all() and set(table.series) == {2}
