"""k-fold cross-validation in PyTorch, one network after the other or a process per core, on a swarm's rows."""

import dataclasses
from functools import partial
from typing import Any

import jax
import joblib
import numpy as np
import optax
import torch
from torch.optim import lr_scheduler

import turbanet as tn
from study.baselines import trainers
from study.baselines.methods import restored
from study.figures.labels import OURS, PROCESSES, SERIAL, SERIAL_ONE
from study.measurement import timing
from study.measurement.compilation import cold
from study.measurement.machine import utilisation
from turbanet.data.augment import draw

FEW = 2  # networks for warm-up and, of a serial method, under `utilisation`
SCHEDULERS = {  # PyTorch's own, by the names of `turbanet.with_schedule`
    "constant": None,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=10, eta_min=1e-6),
    "warm": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=10, eta_min=1e-6),
    "multistep": partial(lr_scheduler.MultiStepLR, milestones=[82, 123], gamma=0.1),
    "reduce": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=5),
}


def train_folds(
    twins, x, y, *, order, held_out, schedules, learning_rate, epochs, augment=None, drawn=None, threads=None
):
    """Cross-validate PyTorch networks one after the other, in place: fused Adam, cross-entropy, a schedule each.

    Parameters
    ----------
    x, y : [row, height, width, channel], int [row]
    order : int [member, epoch, step, batch], the rows of each step, from `turbanet.batch_order`
    held_out : int [member, row], padded with -1; the validation rows, scored after each epoch, never augmented
    schedules : names in SCHEDULERS, one for each network
    augment, drawn : the augmentation of training images and its random draws (`draws`)
    threads : PyTorch's threads during the call; None leaves them

    Returns
    -------
    train_loss, validation_loss, accuracy : float64 [epoch, member]
    seconds : [member]
    right : [class, member], correctly classified validation rows of each class after the last epoch
    """
    x, y, order = torch.tensor(x), torch.tensor(y, dtype=torch.long), torch.tensor(order, dtype=torch.long)
    drawn = jax.tree.map(torch.tensor, drawn)
    scores = np.empty((3, epochs, len(twins)))
    seconds = np.empty(len(twins))
    right = np.empty((int(y.max()) + 1, len(twins)))
    with trainers.torch_threads(threads):
        for member, twin in enumerate(twins):
            rows = torch.as_tensor(held_out[member][held_out[member] >= 0], dtype=torch.long)
            of_member = jax.tree.map(lambda leaf, member=member: leaf[member], drawn)
            kwargs = {"learning_rate": learning_rate, "augment": augment, "drawn": of_member}
            with timing.stopwatch() as watch:
                losses, prediction = _train_fold(twin, x, y, order[member], rows, schedules[member], **kwargs)
            seconds[member] = watch.seconds
            scores[:, :, member] = losses.T
            found = y[rows][prediction == y[rows]]
            right[:, member] = torch.bincount(found, minlength=len(right))
    return *scores, seconds, right


def _train_fold(twin, x, y, order, held_out, schedule, *, learning_rate, augment, drawn):
    """Train one network: ([epoch, (training loss, validation loss, accuracy)], its last predicted classes)."""
    loss_fn = torch.nn.functional.cross_entropy
    optimizer = torch.optim.Adam(twin.parameters(), lr=learning_rate, fused=True)
    scheduler = SCHEDULERS[schedule] and SCHEDULERS[schedule](optimizer)
    scores = []
    for epoch, batches in enumerate(order):
        twin.train()
        losses = []
        for step, batch in enumerate(batches, start=epoch * len(batches)):
            images = x[batch]
            if drawn is not None:
                images = changed(augment, jax.tree.map(lambda leaf, step=step: leaf[step], drawn), images)
            optimizer.zero_grad()
            value = loss_fn(twin(images), y[batch])
            value.backward()
            optimizer.step()
            losses.append(value.detach())
        twin.eval()
        with torch.no_grad():
            prediction = twin(x[held_out])
            validation = loss_fn(prediction, y[held_out]).item()
            chosen = prediction.argmax(-1)
            right = (chosen == y[held_out]).double().mean().item()
        scores.append((torch.stack(losses).double().mean().item(), validation, right))
        if scheduler is not None:
            scheduler.step(*[validation] * (schedule == "reduce"))
    return np.array(scores), chosen


def train_folds_in_processes(twins, x, y, *, order, held_out, schedules, drawn=None, processes=None, **settings):
    """Run `train_folds` in processes of one thread each (None: one per core); networks are dealt out in turn."""
    own = {"order": order, "held_out": held_out, "schedules": np.asarray(schedules), "drawn": drawn}
    return trainers.in_processes(train_folds, twins, own, x=x, y=y, processes=processes, **settings)


def draws(swarm, augment, *, steps, rows):
    """Draw `augment`'s random numbers for each member's next `steps` batches of `rows`: [member, step, row, ...]."""

    def of_step(state, step):
        return draw(augment, state.replace(step=state.step + step), rows)

    def of_member(state):
        return jax.vmap(of_step, (None, 0))(state, np.arange(steps))

    light = swarm.replace(params={}, opt_state={}, collections={}, schedule=None)  # only identity and step matter
    return jax.device_get(jax.jit(jax.vmap(of_member))(light))


def changed(augment, drawn, x):
    """Apply the drawn augmentation to x [row, height, width, channel] in PyTorch, as `augment.apply` does in JAX."""
    if isinstance(augment, tn.Chain):
        for change, own in zip(augment.changes, drawn, strict=True):
            x = changed(change, own, x)
        return x
    if isinstance(augment, tn.RandomFlip):
        return torch.where(drawn[:, None, None, None], x.flip(2), x)
    if not isinstance(augment, tn.RandomCrop):
        raise ValueError(f"There is no PyTorch form of {augment!r}; known: RandomCrop, RandomFlip, Chain.")
    padded = torch.nn.functional.pad(x, (0, 0, *(augment.padding,) * 4))
    rows = drawn[:, :1].long() + torch.arange(x.shape[1])
    columns = drawn[:, 1:].long() + torch.arange(x.shape[2])
    return padded[torch.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]


def runs(start, x, y, loss_fn, *, twin, rows, held_out, schedules, learning_rate, epochs, batch_size, augment, plan):
    """Make {method: run}: each trains the networks of the swarm `start` from the same weights, rows and draws.

    run(epochs, rate, members) -> (train_loss, validation_loss, accuracy: [epoch, member]; seconds [member]; right
    [class, member], None for the swarm; compile seconds). The swarm trains all members, the others the first
    `members`. rows and held_out : int [member, row]; schedules : a name for each member; twin(params) makes one
    member's PyTorch network.
    """
    order = tn.batch_order(start, rows, epochs=epochs, batch_size=batch_size, equal_steps=True)
    steps = order.shape[1] * order.shape[2]
    drawn = None if augment is None else draws(start, augment, steps=steps, rows=order.shape[3])
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
        SERIAL: partial(pytorch, train_folds, threads=joblib.cpu_count()),
        SERIAL_ONE: partial(pytorch, train_folds, threads=1),
        PROCESSES: partial(pytorch, train_folds_in_processes),
    }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One architecture, cross-validated by every method; `runs` and `measure` say what results, times and use are."""

    found: tn.CrossValidation
    results: dict
    times: Any
    use: dict

    def seconds(self):
        """Tabulate schedule, way, seconds: each method's median, split in proportion to the schedules' own seconds."""
        import pandas as pd

        each = pd.Series(self.results[PROCESSES][3])
        share = each.groupby(self.found.members.schedule, sort=False).sum() / each.sum()
        lines = []
        for method, whole in self.times.groupby("way", sort=False).seconds.median().items():
            lines += [(name, method, whole * part) for name, part in share.items()]
        return pd.DataFrame(lines, columns=["schedule", "way", "seconds"])

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
    job = {"folds": folds, "stratified": True, "schedules": schedules, "key": seed, "progress": False}
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
    scores = history.train_loss, history.validation_loss, history.validation_metric
    results[OURS] = *scores, np.full(len(fold), history.steady_seconds / len(fold)), None, history.compile_seconds
    times.loc[times.way == OURS, "compile_seconds"] = history.compile_seconds
    frame = use_of_swarm.frame
    use_of_swarm.frame = frame[frame.seconds > frame.seconds.max() - history.steady_seconds]  # the training alone
    return Comparison(found, results, times, {OURS: use_of_swarm, **use})


def measure(runs, *, epochs, timed_epochs=1, repeats=1, sampled=(PROCESSES,), rate=1e-5, rtol=5e-4):
    """Time every method in turn and score PyTorch: ({method: result}, times, {method: utilisation of a whole run}).

    One epoch of FEW members at the learning rate `rate` warms up and must give equal training losses; at a higher rate,
    or for longer, deep networks drift apart with any change of rounding. Epochs cost the same, so a timed run has
    `timed_epochs`; networks trained one after the other cost the same, so a serial method is timed on one. The methods
    in `sampled` run once to the end under `machine.utilisation`: the processes on all members, which gives PyTorch's
    scores, the others on FEW.

    times : a table of way, repeat, seconds (to train all members for all epochs, as the method itself reports, without
    compilation and data sent to processes), compile_seconds, networks_timed
    """
    import pandas as pd

    first = {name: run(epochs=1, rate=rate, members=FEW) for name, run in runs.items()}
    for name, (losses, *_) in first.items():
        expected = first[OURS][0][:, : losses.shape[1]]
        np.testing.assert_allclose(losses, expected, rtol=rtol, err_msg=f"{name} trains something else")
    members = len(first[OURS][3])
    lines = []
    results = {}
    for repeat in range(repeats):
        for name, run in runs.items():
            count = 1 if name in (SERIAL, SERIAL_ONE) else None  # networks cost the same
            results[name] = run(epochs=timed_epochs, members=count)
            each = results[name][3]
            seconds = _total_seconds(name, each, members) * epochs / timed_epochs
            lines.append((name, repeat, seconds, first[name][-1], len(each)))
    use = {}
    for name in sampled:
        with utilisation() as use[name]:
            results[name] = runs[name](epochs=epochs, members=None if name == PROCESSES else FEW)
    columns = ["way", "repeat", "seconds", "compile_seconds", "networks_timed"]
    return results, pd.DataFrame(lines, columns=columns), use


def _total_seconds(name, each, members):
    """Scale the members' own seconds of a run to all members; of several processes the slowest counts."""
    if name != PROCESSES:
        return each.mean() * members
    count = min(joblib.cpu_count(), len(each))
    return max(each[first::count].sum() for first in range(count))


def accuracy_table(accuracy, *, folds):
    """Tabulate each model's and schedule's accuracy over the folds in percent, with the interval of `difference`.

    accuracy : a table of model, schedule, accuracy and serial (PyTorch's, of the same networks), one line a fold
    """
    import pandas as pd

    lines = []
    for (model, schedule), part in accuracy.groupby(["model", "schedule"], sort=False):
        own = 100 * part.accuracy
        serial = 100 * part.serial
        mean, low, high, _ = difference(own, np.zeros(len(own)), train=folds - 1, test=1)
        gap = difference(own, serial, train=folds - 1, test=1)[:3]
        line = [mean, low, high, serial.mean(), *gap, own.std()]
        lines.append((model, schedule, *np.round(line, 9)))  # a gap of zero shows no rounding error
    columns = [
        "swarm (%)",
        "low",
        "high",
        "serial (%)",
        "swarm less serial",
        "gap low",
        "gap high",
        "spread over folds",
    ]
    return pd.DataFrame(lines, columns=["model", "schedule", *columns])


def difference(a, b, *, train, test, level=0.95):
    """Compare two networks' scores [fold] in pairs: (mean of a - b, low, high, p).

    Student's t with the variance corrected for training rows that folds share (Nadeau and Bengio 2003).

    train, test : the rows of a fold's two parts, or their proportion
    """
    from scipy import stats

    gap = np.asarray(a, float) - np.asarray(b, float)
    if len(gap) < 2:
        raise ValueError(f"A paired comparison needs at least two folds, got {len(gap)}.")
    error = np.sqrt((1 / len(gap) + test / train) * gap.var(ddof=1))
    if error == 0:
        return float(gap.mean()), float(gap.mean()), float(gap.mean()), 1.0 if gap.mean() == 0 else 0.0
    low, high = stats.t.interval(level, len(gap) - 1, gap.mean(), error)
    p = 2 * stats.t.sf(abs(gap.mean()) / error, len(gap) - 1)
    return float(gap.mean()), float(low), float(high), float(p)
