"""The benchmark suite: every workload by every method, from the same weights on the same rows in the same order."""

import argparse
import datetime
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax

import turbanet as tn
from study.baselines import benchmark_results, methods, trainers
from study.baselines.benchmark_results import COLD, COLUMNS, LOOPED, LOOPS, RUNS
from study.baselines.workloads import Workload, workloads
from study.figures.labels import KEYS, LOOP, METHODS, OURS, PROCESSES, SCAN_PROCESSES, SKLEARN
from study.measurement import roofline, timing
from study.measurement.compilation import cold, compile_seconds
from study.measurement.machine import machine_line, peak_memory
from study.pipeline import programs
from study.pipeline.paths import commit, repository

TURN = 2  # seconds of a method's calls in a turn, at least: single calls of milliseconds vary by half
COMPARED = 256  # epochs whose losses must be equal: roundings grow in longer ones


def runs(work: Workload, *, plan, threads=None, names=METHODS) -> dict[str, Callable]:
    """Return `methods.runs` of the workload; run() trains from start to end."""
    kwargs = {"epochs": work.epochs, "per_member": work.per_member}
    kwargs |= {"batch_size": work.batch_size, "loss": work.loss, "learning_rate": work.learning_rate, "twin": work.twin}
    return methods.runs(work.swarm(), work.x, work.y, work.loss_fn, plan=plan, threads=threads, names=names, **kwargs)


def measure(work: Workload, *, plan, peak, repeats, names=METHODS, rtol=2e-3, first=None):
    """Time the workload's methods warm and in turn after checking equal losses: a table of COLUMNS, RUNS and COLD.

    A method stands by its key. Cold seconds are those of a whole first run with tracing and compilation, but without
    making the networks. Networks trained one after the other cost the same each: loops train only `LOOPED` of them, and
    their seconds are scaled to all members, those of a first run by adding the others' warm ones; their memory is NaN.

    first : of (names, threads), as `in_new_processes` has it; None takes the first runs in this process
    """
    import pandas as pd

    when = {"machine": machine_line(), "date": datetime.date.today().isoformat(), "commit": commit()}
    brief = runs(work.first(2), plan=plan, names=(LOOP,))[LOOP]
    threads = trainers.best_threads(lambda n: brief(threads=n)) if set(names) & methods.IN_PYTORCH else None
    every, scale = _every(work, plan, names, threads)
    here, memory = _first_runs(work, every, rtol)
    seconds = timing.interleave(every, repeats=repeats, warmup=0, least=TURN if repeats > 1 else 0)
    firsts = [here] if first is None else first(tuple(every), threads)  # [{method: (compile seconds, all seconds)}]
    scale = np.array([scale[method] for method in every])
    table = timing.summary(seconds).rename(columns={"median": "seconds_per_step"})
    table["seconds_per_step"] *= scale / work.steps
    others = [(by - 1) * np.median(seconds[method]) for method, by in zip(every, scale, strict=True)]
    cold_runs = [[one[method][1] + more for one in firsts] for method, more in zip(every, others, strict=True)]
    compiled = [
        np.median([compile_seconds(*one[method], np.median(seconds[method])) for one in firsts]) for method in every
    ]
    ours = table.method == OURS  # a row, or none: then the ratios are NaN
    operations = work.operations() * work.members
    table = table.assign(cold_seconds=[np.median(one) for one in cold_runs])
    table = table.assign(
        workload=work.name,
        method=table.method.map(KEYS),
        members=work.members,
        ratio_to_ours=table.seconds_per_step / table.seconds_per_step[ours].mean(),
        cold_ratio_to_ours=table.cold_seconds / table.cold_seconds[ours].mean(),
        compile_seconds=compiled,
        peak_fraction=operations / table.seconds_per_step / peak,
        peak_memory_mb=np.where(scale > 1, np.nan, [memory[method] for method in every]),
        plan=np.where(ours, "; ".join(str(plan).splitlines()), ""),
        **when,
    )
    table[RUNS] = [list(np.multiply(seconds[method], by / work.steps)) for method, by in zip(every, scale, strict=True)]
    table[COLD] = cold_runs
    return pd.DataFrame(table)[[*COLUMNS, RUNS, COLD]]


def _every(work, plan, names, threads):
    """Return {method: run} and {method: what its seconds are to be multiplied by}."""
    few = work.first(min(LOOPED, work.members))
    loops = runs(few, plan=plan, threads=threads, names=[method for method in names if method in LOOPS])
    every = loops | runs(work, plan=plan, threads=threads, names=[method for method in names if method not in loops])
    scale = {method: work.members / few.members if method in loops else 1 for method in every}
    return {method: every[method] for method in names if method in every}, scale


def in_new_processes(name, *, quick, processes):
    """Return the function (methods, threads) -> [{method: (compile seconds, all seconds)}] of first runs in processes.

    Each process runs each method once, in its own random order.
    """

    def first(methods, threads):
        found = []
        for number in range(processes):
            call = json.dumps({"name": name, "quick": quick, "names": methods, "threads": threads, "seed": number})
            command = [sys.executable, "-m", "study.baselines.benchmark", "--first", call]
            found.append(json.loads(programs.output(command, f"The first runs of {name}").splitlines()[-1]))
        return found

    return first


def _first_in_this_process(name, quick, names, threads, seed):
    """Run each method of a workload once, in random order: {method: (compile seconds, all seconds)}."""
    work = workloads(quick)[name]
    names = [names[place] for place in np.random.default_rng(seed).permutation(len(names))]
    return _first_runs(work, _every(work, chosen_plan(work), names, threads)[0])[0]


@cold()
def _first_runs(work, every, rtol=None):
    """Run each method once and check equal losses: {method: (compile seconds, all seconds)}, {method: memory in MB}.

    Compile seconds are NaN where a method does not report them. One that fails is removed from `every` with a message.
    rtol : of the losses; None does not compare them
    """
    seconds = {}
    memory = {}
    expected = None
    for name, run in list(every.items()):
        gc.collect()
        with peak_memory() as peak_of, timing.stopwatch() as first:
            try:
                losses, apart = run()
            except (RuntimeError, NotImplementedError, ImportError) as error:
                print(f"{work.name}: {name} cannot: {str(error).strip().splitlines()[0][:150]}", file=sys.stderr)
                del every[name]
                continue
        memory[name] = np.nan if name in (PROCESSES, SCAN_PROCESSES) else peak_of()  # child processes hold its memory
        seconds[name] = apart, first.seconds
        if rtol is None:
            continue
        expected = losses if expected is None else expected
        wide = 5 * rtol if name == SKLEARN else rtol  # its Adam adds epsilon before correcting the moments' bias
        some = min(losses.shape[1], expected.shape[1])  # loops train a few of the networks
        message = f"{work.name}: {name} trains something else"
        np.testing.assert_allclose(losses[:COMPARED, :some], expected[:COMPARED, :some], rtol=wide, err_msg=message)
    return seconds, memory


def speed_of_size(x, y, *, members: int, hidden: int, steps: int, learning_rate: float, seed: int = 0) -> dict:
    """Time a full-batch step of MLPs with one hidden layer: median, least and greatest seconds of three warm runs."""
    model = tn.MLP((hidden, 2))
    adam = optax.adam(learning_rate)
    swarm = tn.TurbaTrainState.swarm(model, adam, members, sample_input=x[:1], seed=seed)
    kwargs = {"epochs": steps, "progress": False}
    with cold():
        first = tn.fit(swarm, x, y, tn.softmax_cross_entropy, **kwargs)[1]
    runs = [tn.fit(swarm, x, y, tn.softmax_cross_entropy, **kwargs)[1] for _ in range(3)]
    seconds = [run.steady_seconds / steps for run in runs]
    return {
        "members": members,
        "hidden": hidden,
        "seconds_per_step": np.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "compile_seconds": first.compile_seconds,
        "state_bytes_per_member": sum(leaf.nbytes for leaf in jax.tree.leaves(swarm)) / members,
    }


def chosen_plan(work: Workload, *, devices=None):
    """Return the plan that `fit` chooses for the workload."""
    return tn.Plan(devices).resolve(work.swarm())


def main(arguments=None):
    """Measure the suite, or some of it, into reports/benchmark/<device>/; --quick writes to build/."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps, one repeat, cold in this process")
    parser.add_argument("--workloads", nargs="+", help="some; the others' results stay", metavar="NAME")
    parser.add_argument("--first", help=argparse.SUPPRESS)  # what `in_new_processes` asks of a process
    options = parser.parse_args(arguments)
    tn.use_cores(cache=False)  # cold timings compile
    if options.first:
        print(json.dumps(_first_in_this_process(**json.loads(options.first))))
        return 0
    suite = workloads(options.quick)
    if unknown := set(options.workloads or ()) - set(suite):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; known: {', '.join(suite)}")
    root, device = repository(), jax.devices()[0].platform
    here = {"machine": machine_line(), **roofline.ceilings()}
    peak = 1e9 * here["matmul_peak_gflops"]
    table, failures = run(list(options.workloads or suite), quick=options.quick, peak=peak)
    runner = os.environ.get("TURBANET_REPORTS")  # set by the notebook runner, which publishes itself
    folder = Path(runner or root / "build/benchmark" / device)
    print(table[list(COLUMNS)].to_string(index=False, float_format="%.4g"))
    kept = root / "reports/benchmark" / device
    benchmark_results.write(folder, table, here, before=kept if options.workloads and not options.quick else None)
    if not (runner or options.quick or failures):
        from study.pipeline import notebook

        folder = notebook.publish(folder, f"benchmark/{device}", root=root)
    print(f"{machine_line()}; written to {folder / 'ratios.csv'}")
    for name, failure in failures.items():
        print(f"{name} is not in it: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run(names, *, quick=False, repeats=None, peak=None):
    """Measure some workloads: (their concatenated tables, {name: reason for a missing table}).

    peak : the machine's peak in operations a second; None measures it

    A workload whose methods end with different losses has no table; the others are still measured.
    """
    import pandas as pd

    peak = peak or roofline.matmul_peak()
    tables = []
    failures = {}
    for name in names:
        work = workloads(quick)[name]
        begin = time.perf_counter()
        plan = chosen_plan(work)
        try:
            first = None if quick else in_new_processes(name, quick=quick, processes=5)
            table = measure(work, plan=plan, peak=peak, repeats=repeats or (1 if quick else work.repeats), first=first)
        except AssertionError as error:
            failures[name] = " ".join(str(error).split())
            print(failures[name], file=sys.stderr)
            continue
        tables.append(table)
        text = table.to_string(index=False, float_format="%.4g")
        print(f"{text}\n{name}: {time.perf_counter() - begin:.0f} s\n{plan}", file=sys.stderr, flush=True)
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*COLUMNS, RUNS, COLD])
    return table, failures


if __name__ == "__main__":
    sys.exit(main())
