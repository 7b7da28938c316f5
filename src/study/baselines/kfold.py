"""k-fold cross-validation by a swarm and in PyTorch, one network after the other or a process per core, timed."""

import dataclasses
from functools import partial
from typing import Any

import jax
import joblib
import numpy as np
import optax

import turbanet as tn
from study.baselines import kfold_trainers
from study.baselines.methods import restored
from study.figures.labels import OURS, PROCESSES, SERIAL, SERIAL_ONE
from study.measurement.compilation import cold
from study.measurement.machine import utilisation
from study.measurement.timing import orders

FEW = 2  # networks for warm-up and, of a serial method, under `utilisation`


def runs(start, x, y, loss_fn, *, twin, rows, held_out, schedules, learning_rate, epochs, batch_size, augment, plan):
    """Make {method: run}: each trains the networks of the swarm `start` from the same weights, rows and draws.

    run(epochs, rate, members) -> (train_loss, validation_loss, accuracy: [epoch, member]; seconds [member]; right
    [class, member], None for the swarm; compile seconds). The swarm trains all members, the others the first
    `members`. rows and held_out : int [member, row]; schedules : a name for each member; twin(params) makes one
    member's PyTorch network.
    """
    order = tn.batch_order(start, rows, epochs=epochs, batch_size=batch_size, equal_steps=True)
    steps = order.shape[1] * order.shape[2]
    drawn = None if augment is None else kfold_trainers.draws(start, augment, steps=steps, rows=order.shape[3])
    loss = loss_fn if augment is None else tn.augmented(loss_fn, augment)
    begin = restored(start, twin)

    def ours(epochs=epochs, rate=learning_rate, members=None):
        swarm = start if rate == learning_rate else tn.with_hyperparameters(start, learning_rate=rate)
        kwargs = {"epochs": epochs, "batch_size": batch_size, "rows": rows, "plan": plan, "progress": False}
        kwargs["equal_steps"] = True  # as in `order`
        validation = {"validation": (x, y), "validation_rows": held_out, "metric": tn.accuracy}
        history = tn.fit(swarm, x, y, loss, **kwargs, **validation)[1]
        each = np.full(len(start), history.steady_seconds / len(start))
        scores = history.train_loss, history.validation_loss, history.validation_metric
        return *scores, each, None, history.compile_seconds

    def pytorch(train, epochs=epochs, rate=learning_rate, members=None, **more):
        few = jax.tree.map(lambda leaf: leaf[:members], {"order": order[:, :epochs], "drawn": drawn})
        few |= {"held_out": np.asarray(held_out)[:members], "schedules": list(schedules)[:members]}
        kwargs = {"epochs": epochs, "learning_rate": rate, "augment": augment}
        return *train(begin()[:members], x, y, **few, **kwargs, **more), np.nan

    return {
        OURS: ours,
        SERIAL: partial(pytorch, kfold_trainers.train_folds, threads=joblib.cpu_count()),
        SERIAL_ONE: partial(pytorch, kfold_trainers.train_folds, threads=1),
        PROCESSES: partial(pytorch, kfold_trainers.train_folds_in_processes),
    }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One architecture, cross-validated by every method; `runs` and `measure` say what results, times and use are."""

    found: tn.CrossValidation
    results: dict
    times: Any
    use: dict

    def seconds(self):
        """Tabulate schedule, method, seconds: a method's median, split in proportion to the schedules' own seconds."""
        import pandas as pd

        each = pd.Series(self.results[PROCESSES][3])
        share = each.groupby(self.found.members.schedule, sort=False).sum() / each.sum()
        lines = []
        for method, whole in self.times.groupby("method", sort=False).seconds.median().items():
            lines += [(name, method, whole * part) for name, part in share.items()]
        return pd.DataFrame(lines, columns=["schedule", "method", "seconds"])

    def accuracy(self, method):
        """Tabulate validation accuracy after the last epoch: schedule, fold, seed, accuracy."""
        return self.found.members.drop(columns="member").assign(accuracy=self.results[method][2][-1])

    def class_accuracy(self, y):
        """Tabulate PyTorch's validation accuracy of each class over all folds: [schedule, class].

        y : int [row], the labels of all rows
        """
        import pandas as pd

        held_out = [y[rows[rows >= 0]] for rows in self.found.validation_rows[self.found.members.fold.to_numpy()]]
        right = self.results[PROCESSES][4].T
        rows = np.stack([np.bincount(labels, minlength=right.shape[1]) for labels in held_out])
        schedule = self.found.members.schedule.to_numpy()
        right, rows = (pd.DataFrame(part).groupby(schedule, sort=False).sum() for part in (right, rows))
        return right / rows


def compare(
    name,
    model,
    twin,
    x,
    y,
    *,
    folds,
    schedules,
    learning_rate,
    epochs,
    timed_epochs,
    batch_size,
    augment,
    plan,
    seed,
    repeats,
    sampled=(PROCESSES,),
) -> Comparison:
    """Cross-validate one architecture under Adam by `turbanet.cross_validate` and by the other methods."""
    adam = optax.inject_hyperparams(optax.adam, static_args=("b1", "b2", "eps"))(learning_rate=learning_rate)
    kwargs = {"epochs": epochs, "batch_size": batch_size, "augment": augment, "plan": plan}
    job = {"folds": folds, "stratified": True, "schedules": schedules, "seed": seed, "progress": False}
    loss = tn.softmax_cross_entropy
    with cold(), utilisation() as use_of_swarm:
        found = tn.cross_validate({name: model}, x, y, optimizer=adam, loss=loss, **job, **kwargs)
    history = found.histories[name]
    schedules = list(found.members.schedule)
    fold = found.members.fold.to_numpy()
    start = tn.TurbaTrainState.swarm(model, adam, len(fold), sample_input=x[:1], seed=seed)
    start = tn.with_schedule(start, schedules)
    rows = {"rows": found.train_rows[fold], "held_out": found.validation_rows[fold], "schedules": schedules}
    every = runs(start, x, y, loss, twin=twin, learning_rate=learning_rate, **rows, **kwargs)
    results, times, use = measure(every, epochs=epochs, timed_epochs=timed_epochs, repeats=repeats, sampled=sampled)
    np.testing.assert_array_equal(results[OURS][0], history.train_loss[:timed_epochs])
    scores = history.train_loss, history.validation_loss, history.validation_metric["accuracy"]
    results[OURS] = *scores, np.full(len(fold), history.steady_seconds / len(fold)), None, history.compile_seconds
    times.loc[times.method == OURS, "compile_seconds"] = history.compile_seconds
    seconds = use_of_swarm.frame.seconds - (use_of_swarm.frame.seconds.max() - history.steady_seconds)
    use_of_swarm.frame = use_of_swarm.frame.assign(seconds=seconds)[seconds > 0]  # the training alone
    return Comparison(found, results, times, {OURS: use_of_swarm, **use})


def measure(runs, *, epochs, timed_epochs=1, repeats=1, sampled=(PROCESSES,), rate=1e-5, rtol=5e-4):
    """Time every method in turn and score PyTorch: ({method: result}, times, {method: utilisation of a whole run}).

    One epoch of FEW members at the learning rate `rate` warms up and must give equal training losses; at a higher rate,
    or for longer, deep networks drift apart with any change of rounding. Epochs cost the same, so a timed run has
    `timed_epochs`; networks trained one after the other cost the same, so a serial method is timed on one. The methods
    in `sampled` run once to the end under `machine.utilisation`: the processes on all members, which gives PyTorch's
    scores, the others on FEW.

    times : a table of method, repeat, seconds (to train all members for all epochs, as the method itself reports,
    without compilation and data sent to processes), compile_seconds, networks_timed
    """
    import pandas as pd

    first = {name: run(epochs=1, rate=rate, members=FEW) for name, run in runs.items()}
    for name, (losses, *_) in first.items():
        expected = first[OURS][0][:, : losses.shape[1]]
        np.testing.assert_allclose(losses, expected, rtol=rtol, err_msg=f"{name} trains something else")
    members = len(first[OURS][3])
    lines = []
    results = {}
    for repeat, order in enumerate(orders(runs, repeats)):
        for name in order:
            count = 1 if name in (SERIAL, SERIAL_ONE) else None  # networks cost the same
            results[name] = runs[name](epochs=timed_epochs, members=count)
            each = results[name][3]
            seconds = _total_seconds(name, each, members) * epochs / timed_epochs
            lines.append((name, repeat, seconds, first[name][-1], len(each)))
    lines.sort(key=lambda line: (line[1], list(runs).index(line[0])))  # of each repeat in the order of `runs`
    use = {}
    for name in sampled:
        with utilisation() as use[name]:
            results[name] = runs[name](epochs=epochs, members=None if name == PROCESSES else FEW)
    columns = ["method", "repeat", "seconds", "compile_seconds", "networks_timed"]
    return results, pd.DataFrame(lines, columns=columns), use


def _total_seconds(name, each, members):
    """Scale the members' own seconds of a run to all members; of several processes the slowest counts."""
    if name != PROCESSES:
        return each.mean() * members
    count = min(joblib.cpu_count(), len(each))
    return max(each[first::count].sum() for first in range(count))
