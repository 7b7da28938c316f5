"""Numbers and tables of the report and the README on a GPU, read from the results of `make gpu` in reports/gpu/."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from study.figures.labels import FUNC_GRAPH, FUSED, GRAPH, LOOP, OURS, SCAN, USUAL, WORKLOADS

LOOPS = (LOOP, FUSED)
ONE_BY_ONE = (*LOOPS, GRAPH)
EPOCHS = 1024  # of the published sweep, of one step each
CALL = f"{OURS}, whole call"  # with the checks and copies at its start and end
SMALL, WIDE = "sweep-small", "sweep-large"


def cards(folder: Path) -> list[Path]:
    """List the folders of cards whose sweep was measured, the latest first."""
    found = {file.parent: json.loads(file.read_text()) for file in folder.glob("*/about.json")}
    swept = [card for card, about in found.items() if not about["tiny"] and (card / "sweep.csv").is_file()]
    return sorted(swept, key=lambda card: found[card]["date"], reverse=True)


def read(card: Path, section: str) -> Any:
    """Read a section's table; None if it was not measured on this card."""
    import pandas as pd

    file = card / f"{section}.csv"
    # A commit such as 2818e81 is no number.
    return pd.read_csv(file, dtype={"commit": str}) if file.is_file() and file.stat().st_size > 1 else None


def sweep(card: Path, workload: str, precision: str = "TF32") -> Any:
    """Tabulate seconds per step of all networks, [networks, method]; serial methods are scaled from one network."""
    table = read(card, "sweep")
    table = table[(table.workload == workload) & (table.precision == precision)]
    wide = _wide(table, "networks")
    for name in ONE_BY_ONE:
        if name in wide:
            wide[name] = wide[name].fillna(wide.index.to_series() * wide[name].iloc[0])
    return wide


def _wide(table, index):
    wide = table.pivot(index=index, columns="method", values="seconds_per_step")
    return wide.assign(**{CALL: table[table.method == OURS].set_index(index).wall_per_step})


def calls(card: Path) -> Any:
    """Select the small sweep's calls of `fit`, by networks; `more`: seconds of a call's checks and copies."""
    table = read(card, "sweep").query("workload == @SMALL and precision == 'TF32' and method == @OURS")
    more = (table.wall_per_step - table.seconds_per_step) * table.steps
    return table.assign(more=more).set_index("networks")


def numbers(card: Path) -> dict[str, Any]:
    """Collect the numbers and words of the chapter's text, {name: value}."""
    about = json.loads((card / "about.json").read_text())
    small, wide = (sweep(card, name) for name in (SMALL, WIDE))
    loop_one = small.loc[1, list(LOOPS)].min()
    most = int(small.index.max())
    table = read(card, "sweep").query("workload == @SMALL and precision == 'TF32' and networks == 1")
    loop = table[table.method.isin(LOOPS)].sort_values("seconds_per_step").iloc[0]
    every_call = calls(card)
    call = every_call.loc[most]
    found = {
        "card": about["card"],
        "driver": about["driver"],
        "measured": f"measured on {about['date']} by make gpu on {about['card']}, driver {about['driver']}, "
        f"jax {about['jax']}, torch {about['torch']}, of commit {about['commit']}",
        "left_out": about["left_out"],
        "others": {commit: ", ".join(what) for commit, what in about.get("others", {}).items()},
        "folder": card.name,
        "networks": int(small.index[small.index <= 128].max()),
        "most": most,
        "most_ms": 1000 * small.loc[most, OURS],
        "loop_one_ms": 1000 * loop_one,
        "graph_one_ms": 1000 * small.loc[1, GRAPH],
        "in_time_of_one": int(small.index[small[OURS] <= loop_one].max()),
        "most_over_loop_one": small.loc[most, OURS] / loop_one,
        "most_over_graph_one": small.loc[most, OURS] / small.loc[1, GRAPH],
        "call_over_loop_one": call.wall_per_step / loop_one,
        "call_over_loop_one_low": call.wall_per_step / loop.high,  # the least and greatest of the loop's turns
        "call_over_loop_one_high": call.wall_per_step / loop.low,
        "call_steps": int(call.steps),
    }
    found["in_time_ms"] = 1000 * small.loc[found["in_time_of_one"], OURS]
    found["in_time_over_loop_one"] = found["in_time_ms"] / found["loop_one_ms"]
    found["has_suite"] = read(card, "suite") is not None
    for name, table in (("small", small), ("wide", wide)):
        if not len(table):
            continue
        row = table.loc[found["networks"]]
        found[f"{name}_ms"] = 1000 * row[OURS]
        found[f"{name}_loop"] = row[list(LOOPS)].min() / row[OURS]
        found[f"{name}_graph"] = row[GRAPH] / row[OURS]
        found[f"{name}_func"] = row[FUNC_GRAPH] / row[OURS]
        found[f"{name}_by_hand"] = row[SCAN] / row[OURS]
        growth = EPOCHS * (row - table.loc[1]) / (found["networks"] - 1)  # seconds per network, as published
        found |= {f"{name}_growth": growth[OURS], f"{name}_loop_growth": growth[list(LOOPS)].min()}
    found |= {"call_least_ms": 1000 * every_call.more.min(), "call_most_ms": 1000 * every_call.more.max()}
    call = every_call.loc[found["networks"]]
    share = call.seconds_per_step / call.wall_per_step
    found |= {f"small_{name}_by_call": found[f"small_{name}"] * share for name in ("loop", "graph", "func", "by_hand")}
    found |= {"small_call_ms": 1000 * call.wall_per_step, "small_call_steps": int(call.steps)}
    return found | _kernel(card) | _mnist(card) | _trained(card)


def kernels(card: Path) -> Any:
    """Tabulate what one kernel gains, a row for each network, number and precision; None if it was not measured."""
    table = read(card, "kernel")
    if table is None or "workload" not in table:
        return None
    keys = ["workload", "precision", "networks"]
    wide = table.pivot(index=keys, columns="method", values="seconds_per_step")[[USUAL, OURS]] * 1e6
    wide = wide.assign(times=wide[USUAL] / wide[OURS])
    return wide.reset_index().rename(columns={"workload": "network"})


def _kernel(card):
    table = kernels(card)
    if table is None:
        return {}
    least, most = (table.loc[which(table.times)] for which in (np.argmin, np.argmax))
    found = {f"kernel_{name}": row.times for name, row in (("least", least), ("most", most))}
    swept = 1e6 * sweep(card, SMALL)[OURS]
    both = table[(table.network == "2-16-2") & (table.precision == "TF32") & table.networks.isin(swept.index)]
    nearer = np.abs(np.log(both[[USUAL, OURS]].div(swept[both.networks].to_numpy(), axis=0)))
    found["sweep_by_xla"] = bool((nearer[USUAL] < nearer[OURS]).any())  # measured before there was a kernel
    found |= {f"kernel_{name}_network": row.network for name, row in (("least", least), ("most", most))}
    return found | {f"kernel_{name}_networks": int(row.networks) for name, row in (("least", least), ("most", most))}


def _mnist(card):
    table = read(card, "mnist")
    if table is None:
        return {}
    ours = table[table.method == OURS].set_index(["networks", "precision"])
    one = table[table.method != OURS].set_index("method").seconds
    members = 50
    fifty, exact = ours.loc[(members, "TF32")], ours.loc[(members, "float32")]
    many = ours.index.get_level_values("networks").max()
    found = {
        "mnist_members": members,
        "mnist_seconds": fifty.seconds,
        "mnist_compile": fifty.compile_seconds,
        "mnist_loop": one[list(LOOPS)].min(),
        "mnist_most": int(many),
        "mnist_most_seconds": ours.loc[(many, "TF32")].seconds,
    }
    found |= {"mnist_graph": one[GRAPH], "mnist_accuracy": fifty.accuracy, "mnist_exact_accuracy": exact.accuracy}
    gap = fifty.accuracy - exact.accuracy
    half = 1.96 * np.hypot(fifty.accuracy_deviation, exact.accuracy_deviation) / np.sqrt(members)
    return found | {"tf32_gap": gap, "tf32_low": gap - half, "tf32_high": gap + half}


def _trained(card):
    """Collect the numbers of the other complete trainings."""
    found = {}
    if (table := read(card, "stocks")) is not None:
        each = table.set_index("method").seconds
        found |= {"lstms": int(table.networks.iloc[0]), "lstms_seconds": each[OURS], "lstms_graph": each[GRAPH]}
        found |= {"lstms_loop": each[list(LOOPS)].min(), "lstms_epochs": int(table.epochs.iloc[0])}
    if (table := read(card, "agents")) is not None:
        most = table.loc[table.networks.idxmax()]
        found |= {"agents": int(most.networks), "agents_seconds": most.seconds, "agents_return": most.mean_return}
        found |= {"agents_steps": int(most.timesteps), "agents_solved": most.solved}
    if (table := read(card, "federated")) is not None:
        found |= {name: int(table[name].iloc[0]) for name in ("rounds", "sampled")}
        found |= {"rounds_seconds": table.seconds.iloc[0]}
    return found


def tables(card: Path) -> dict[str, Any]:
    """Make the chapter's tables {name: frame} in readable form: the sweep, the suite."""
    import pandas as pd

    found = {}
    columns = [OURS, CALL, SCAN, FUNC_GRAPH, GRAPH, FUSED, LOOP]
    parts = []
    for name, network in ((SMALL, "2-16-2"), (WIDE, "2-256-256-2")):
        if not len(part := sweep(card, name)):
            continue
        part = 1e6 * part[[column for column in columns if column in part]]
        parts.append(part.reset_index().assign(network=network))
    table = pd.concat(parts, ignore_index=True)
    found[f"gpu-{card.name}-sweep"] = table[["network", "networks", *(column for column in columns if column in table)]]
    if (table := kernels(card)) is not None:
        found[f"gpu-{card.name}-kernel"] = table
    suite = read(card, "suite")
    if suite is not None:
        each = ["workload", "networks"]
        wide = _wide(suite, each).reset_index()
        wide = wide.replace({"workload": WORKLOADS})
        for name in columns:
            if name in wide:
                wide[name] *= 1000
        found[f"gpu-{card.name}-suite"] = wide[[*each, *(name for name in columns if name in wide)]]
    return found
