"""The files of `make bench`: written, and read with intervals."""

import json

import numpy as np

from study.baselines.workloads import workloads
from study.figures.labels import KEYS, NAMES, OURS
from study.measurement import timing
from study.pipeline.paths import repository

COLUMNS = (
    "workload",
    "way",
    "members",
    "seconds_per_step",
    "ratio_to_ours",
    "cold_seconds",
    "cold_ratio_to_ours",
    "compile_seconds",
    "peak_fraction",
    "peak_memory_mb",
)


RUNS = "runs"  # seconds a step of each repeat, in turn with the other methods'


def write(folder, table, plans, machine) -> None:
    """Write a table of COLUMNS and RUNS, the plans {workload: plan} and the machine's facts into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table[list(COLUMNS)].to_csv(folder / "ratios.csv", index=False, float_format="%.4g")
    repeats = table[["workload", "way", RUNS]].explode(RUNS).astype({RUNS: float})
    repeats = repeats.rename(columns={RUNS: "seconds_per_step"})
    repeats.insert(2, "repeat", repeats.groupby(["workload", "way"]).cumcount())
    repeats.to_csv(folder / "repeats.csv", index=False, float_format="%.4g")
    (folder / "plans.txt").write_text("\n".join(f"{name}: {plan}" for name, plan in plans.items()) + "\n")
    (folder / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")


def read(name: str):
    """Read the results of `make bench` in reports/benchmark/<name>/: (table, {machine and its peak rates}).

    The table has COLUMNS with methods by their names, `ratio`, low and high for `ratio_to_ours` (`timing.ratio` of the
    paired repeats), cold_ratio, the `steps` of a run, `repeats`, and break_even_steps (`timing.break_even`).
    """
    import pandas as pd

    folder = repository() / "reports/benchmark" / name
    if not (folder / "machine.json").is_file():
        raise FileNotFoundError(f"There is no {folder / 'machine.json'}; `make bench` makes it.")
    table = pd.read_csv(folder / "ratios.csv")
    groups = pd.read_csv(folder / "repeats.csv").groupby(["workload", "way"]).seconds_per_step
    repeats = {pair: seconds.tolist() for pair, seconds in groups}
    ours = table[table.way == KEYS[OURS]].set_index("workload")
    lines = []
    for row in table.itertuples():
        base = ours.loc[row.workload]
        ratio, low, high = timing.ratio(repeats[row.workload, row.way], repeats[row.workload, KEYS[OURS]])
        costs = base.compile_seconds, base.seconds_per_step, row.compile_seconds, row.seconds_per_step
        ahead = np.nan if row.way == KEYS[OURS] else timing.break_even(*costs)
        lines.append((ratio, low, high, ahead, len(repeats[row.workload, row.way])))
    table[["ratio", "low", "high", "break_even_steps", "repeats"]] = lines
    table = table.drop(columns="ratio_to_ours").rename(columns={"cold_ratio_to_ours": "cold_ratio"})
    steps = {work.name: work.steps for work in workloads().values()}
    here = json.loads((folder / "machine.json").read_text())
    table = table.assign(way=table.way.map(NAMES), steps=table.workload.map(steps), machine=here["machine"])
    return table.astype({"repeats": int}), here
