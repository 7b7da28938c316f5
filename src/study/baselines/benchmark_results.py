"""The files of `make bench`: written, and read with intervals."""

import itertools
import json

import numpy as np

from study.baselines.workloads import workloads
from study.figures.labels import COMPILED, FUSED, KEYS, LOOP, NAMES, OURS
from study.measurement import timing
from study.pipeline.paths import repository

COLUMNS = (
    "workload",
    "method",
    "members",
    "seconds_per_step",
    "ratio_to_ours",
    "cold_seconds",
    "cold_ratio_to_ours",
    "compile_seconds",
    "peak_fraction",
    "peak_memory_mb",
    "plan",  # that TurbaNet chose
    "machine",
    "date",
    "commit",
)

RUNS = "runs"  # seconds per step of each repeat, in turn with the other methods'
COLD = "cold_runs"  # seconds of a whole first run in each new process
LOOPS = LOOP, FUSED, COMPILED  # train one network after the other, ...
LOOPED = 8  # ... so many of them at most


def write(folder, table, machine, before=None) -> None:
    """Write a table of COLUMNS, RUNS and COLD and the machine's facts into the folder.

    before : a folder of earlier results; those of workloads that the table does not have are kept, and the facts of
        their machine if it measured most of all
    """
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "ratios.csv", table[list(COLUMNS)], before)
    for runs, name, column in ((RUNS, "repeats", "seconds_per_step"), (COLD, "cold", "seconds")):
        repeats = table[["workload", "method", runs]].explode(runs).astype({runs: float}).rename(columns={runs: column})
        repeats.insert(2, "repeat", repeats.groupby(["workload", "method"]).cumcount())
        _write(folder / f"{name}.csv", repeats, before)
    facts = before and before / "machine.json"
    earlier = json.loads(facts.read_text()) if facts and facts.is_file() else machine
    measured = pd.read_csv(folder / "ratios.csv").drop_duplicates("workload").machine.tolist()
    machine = max(earlier, machine, key=lambda one: measured.count(one["machine"]))
    (folder / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")


def _write(file, table, before):
    """Write a table with the earlier rows of other workloads, in the order of the suite."""
    import pandas as pd

    if before and (before / file.name).is_file():
        earlier = pd.read_csv(before / file.name)
        table = pd.concat([table, earlier[~earlier.workload.isin(table.workload)]])
    place = {name: number for number, name in enumerate(workloads(True))}
    table = table.sort_values("workload", key=lambda names: names.map(place), kind="stable")
    table.to_csv(file, index=False, float_format="%.4g")


def read(name: str):
    """Read the results of `make bench` in reports/benchmark/<name>/: (table, {a machine of it and its peak rates}).

    The table has COLUMNS with methods by their names, `ratio`, low and high for `ratio_to_ours` (`timing.ratio` of the
    paired repeats), cold_ratio, cold_low and cold_high likewise (of new processes, each of which ran all methods), the
    `steps` of a run, `repeats`, and break_even_steps (`timing.break_even`), for which a method costs at first what its
    cold run takes beyond as many warm steps, in the median.
    """
    import pandas as pd

    folder = repository() / "reports/benchmark" / name
    if not (folder / "machine.json").is_file():
        raise FileNotFoundError(f"There is no {folder / 'machine.json'}; `make bench` makes it.")
    table = pd.read_csv(folder / "ratios.csv")
    warm = _runs(folder / "repeats.csv")
    steps = {work.name: work.steps for work in workloads().values()}
    cold = {(row.workload, row.method): [row.cold_seconds] for row in table.itertuples()}
    if (folder / "cold.csv").is_file():  # results before it have one run each
        cold |= _runs(folder / "cold.csv")
    table["cold_seconds"] = [np.median(cold[row.workload, row.method]) for row in table.itertuples()]
    ours = table[table.method == KEYS[OURS]].set_index("workload")
    lines = []
    for row in table.itertuples():
        base = ours.loc[row.workload]
        ratios = [timing.ratio(runs[row.workload, row.method], runs[row.workload, KEYS[OURS]]) for runs in (warm, cold)]
        run = steps[row.workload]
        first, its_first = (max(0.0, one.cold_seconds - run * one.seconds_per_step) for one in (base, row))
        ahead = timing.break_even(first, base.seconds_per_step, its_first, ratios[0][0] * base.seconds_per_step)
        ahead = np.nan if row.method == KEYS[OURS] else ahead
        lines.append((*itertools.chain(*ratios), ahead, len(warm[row.workload, row.method])))
    found = ["ratio", "low", "high", "cold_ratio", "cold_low", "cold_high", "break_even_steps", "repeats"]
    table[found] = lines
    table = table.drop(columns=["ratio_to_ours", "cold_ratio_to_ours"])
    here = json.loads((folder / "machine.json").read_text())
    table = table.assign(method=table.method.map(NAMES), steps=table.workload.map(steps))
    return table.astype({"repeats": int}), here


def _runs(file):
    """Read {(workload, method's key): seconds [repeat]}."""
    import pandas as pd

    groups = pd.read_csv(file).set_index(["workload", "method", "repeat"]).iloc[:, 0].groupby(level=[0, 1], sort=False)
    return {pair: seconds.tolist() for pair, seconds in groups}
