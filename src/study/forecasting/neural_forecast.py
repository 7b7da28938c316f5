"""neuralforecast's LSTM from several origins, in its own environment: `python neural_forecast.py FOLDER JOB`.

FOLDER holds table.parquet, and gets found.parquet with the forecasts; the last line printed is JSON with the seconds.
"""

import json
import logging
import sys
import time


def main(folder, job):
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.losses.pytorch import MSE
    from neuralforecast.models import LSTM

    logging.disable(logging.WARNING)
    table = pd.read_parquet(f"{folder}/table.parquet")
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    model = LSTM(
        h=job["h"],
        input_size=job["input_size"],
        encoder_n_layers=1,
        encoder_hidden_size=job["hidden"],
        decoder_layers=1,
        decoder_hidden_size=job["hidden"],
        loss=MSE(),
        max_steps=job["steps"],
        learning_rate=job["learning_rate"],
        windows_batch_size=job["batch_size"],
        scaler_type="standard",
        random_seed=job["seed"],
        **quiet,
    )
    start = time.perf_counter()
    forecaster = NeuralForecast(models=[model], freq=1)
    settings = {"n_windows": job["origins"], "step_size": job["h"], "refit": True}
    found = forecaster.cross_validation(table, **settings).reset_index()
    seconds = time.perf_counter() - start
    last = table.set_index(["unique_id", "ds"]).y
    keys = pd.MultiIndex.from_arrays([found.unique_id, found.cutoff])
    found["Naive"] = last.reindex(keys).to_numpy()
    found.to_parquet(f"{folder}/found.parquet")
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
