"""k-fold cross-validation: all folds, schedules and seeds of an architecture as one swarm over one copy of the data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from numpy.typing import ArrayLike

from turbanet.checkpoints.checkpoint import Checkpoints
from turbanet.core import extras
from turbanet.core.arrays import as_arrays, check_seed, check_whole, is_jax_key
from turbanet.core.member import takes
from turbanet.core.metrics import ONE
from turbanet.core.plan import Plan, check_cluster
from turbanet.core.schedules import with_schedule
from turbanet.core.storage import place
from turbanet.core.tables import Shown, count, spread
from turbanet.data.augment import augmented
from turbanet.data.checks import one_prediction
from turbanet.data.sampling import ragged
from turbanet.ensembles.combine import accuracy, confusion
from turbanet.selection.scoring import metrics_of
from turbanet.training.fit import fit, predict
from turbanet.training.history import History
from turbanet.turba_train_state import TurbaTrainState

if TYPE_CHECKING:
    import pandas as pd

CLASSES = "give folds that train on every class, such as of StratifiedKFold or StratifiedGroupKFold"
RUN = ["schedule", "fold", "seed"]  # columns that tell the members of a model apart


@dataclasses.dataclass(frozen=True, repr=False)
class CrossValidation(Shown):
    """Results of `cross_validate`, by the names of the architectures.

    Attributes
    ----------
    table : pandas, a row for each model, schedule, fold, seed and epoch, with train_loss, validation_loss, accuracy
        (where y holds classes) and seconds: the swarm's training time without compilation, divided evenly over its
        rows; the next model compiles meanwhile, on the same cores
    members : pandas, a row for each member of a swarm: member (its position), schedule, fold, seed
    train_rows, validation_rows : int [fold, row], padded at the end with -1
    swarms : {model: the trained swarm}
    histories : {model: the `History` of its training}
    predictions : {model: [member, row, ...]} on each member's held-out rows
    y : [row, ...], as it was passed
    is_restored : whether `patience` gave each member the weights of its best epoch
    """

    table: pd.DataFrame
    members: pd.DataFrame
    train_rows: Any
    validation_rows: Any
    swarms: dict[str, TurbaTrainState]
    histories: dict[str, History]
    predictions: dict[str, np.ndarray]
    y: np.ndarray
    is_restored: bool = False

    def _shown(self):
        final, runs = self.final(), self.members
        scores = [name for name in ("validation_loss", "accuracy") if name in final]
        rows = [["model", "schedule", *(f"{name}, median (range)" for name in scores)]]
        for names, group in final.groupby(["model", "schedule"], sort=False):
            rows.append([*map(str, names), *(spread(group[name].to_numpy()) for name in scores)])
        parts = [("model", len(self.swarms)), ("fold", runs.fold.nunique()), ("seed", runs.seed.nunique())]
        return f"CrossValidation: {', '.join(count(number, noun) for noun, number in parts)}", rows

    def final(self) -> pd.DataFrame:
        """Return the rows of `table` of the epoch of each member's weights: the last, or with `patience` the best."""
        if not self.is_restored:
            return self.table[self.table.epoch == self.table.epoch.max()].reset_index(drop=True)
        runs = self.table.fillna({"validation_loss": np.inf}).groupby(["model", *RUN], sort=False)
        return self.table.loc[runs.validation_loss.idxmin()].reset_index(drop=True)

    def oof(self) -> pd.DataFrame:
        """Return the out-of-fold predictions: model, schedule, fold, seed, row, y (of one number a row), prediction.

        Of several outputs the columns are prediction_0, prediction_1, ...
        """
        pd = extras.pandas()

        rows = np.asarray(self.validation_rows)[self.members.fold]
        member, position = np.nonzero(rows >= 0)
        tables = {}
        for model, prediction in self.predictions.items():
            table = self.members.iloc[member][RUN].reset_index(drop=True)
            table["row"] = rows[member, position]
            if self.y.size == len(self.y):
                table["y"] = self.y.ravel()[table.row]
            outputs = prediction[member, position].reshape(len(table), -1)
            names = ["prediction"] if outputs.shape[1] == 1 else [f"prediction_{i}" for i in range(outputs.shape[1])]
            tables[model] = table.join(pd.DataFrame(outputs, columns=names))
        return pd.concat(tables, names=["model"]).reset_index(level="model").reset_index(drop=True)

    def confusion(self, model: str) -> np.ndarray:
        """Return confusion matrices int [member, true class, predicted class] of the members' held-out rows."""
        held_out = [rows[rows >= 0] for rows in np.asarray(self.validation_rows)[self.members.fold]]
        predicted = zip(self.predictions[model], held_out, strict=True)
        return np.stack([confusion(prediction[: len(rows)], self.y[rows]) for prediction, rows in predicted])

    def class_accuracy(self) -> pd.DataFrame:
        """Return the accuracy on each class's held-out rows: a table of model, schedule, fold, seed, class."""
        pd = extras.pandas()

        tables = {}
        for model in self.swarms:
            counts = self.confusion(model)
            with np.errstate(invalid="ignore"):  # NaN for an output that is no class of y
                share = np.diagonal(counts, axis1=1, axis2=2) / counts.sum(2)
            runs = pd.MultiIndex.from_frame(self.members[RUN])
            tables[model] = pd.DataFrame(share, runs).rename_axis(columns="class").stack(future_stack=True)
        return pd.concat(tables, names=["model"]).rename("accuracy").reset_index()


def cross_validate(
    models: Any,
    x: Any,
    y: ArrayLike,
    *,
    optimizer: optax.GradientTransformation,
    loss: Callable,
    epochs: int,
    folds: Any = 5,
    schedules: str | Callable | Sequence[str | Callable] = ("constant",),
    seeds: int = 1,
    batch_size: int | None = None,
    seed: int | jax.Array = 0,
    stratified: bool = False,
    groups: ArrayLike | None = None,
    metric: Callable | Mapping[str, Callable] | None = None,
    scoring: str | Sequence[str] | Mapping[str, str] | None = None,
    patience: int | None = None,
    augment: Any = None,
    checkpoints: str | Path | Checkpoints | None = None,
    cluster: Any = None,
    plan: Plan | Mapping[str, Plan | None] | None = None,
    allow_nan: bool = False,
    progress: bool = True,
    key: int | jax.Array | None = None,
) -> CrossValidation:
    """Train each architecture on all folds x schedules x seeds, as one swarm, and score it on the held-out rows.

    Parameters
    ----------
    models : {name: Flax model}, or one model
    x, y : [row, ...], one copy for all; x may be a dict or tuple of arrays; y int or bool [row] are classes where the
        models have several outputs, any other y is a regression target
    optimizer : of Optax; schedules other than "constant" need its learning rate as data (`optax.inject_hyperparams`)
    loss : loss(params, x, y, apply_fn) -> (scalar, prediction)
    epochs : passes over a fold's training rows
    folds : number of shuffled folds, any splitter of scikit-learn (KFold, GroupKFold, TimeSeriesSplit, ...), or pairs
        (training rows, held-out rows)
    schedules : names or functions as `with_schedule` takes them; the learning rate changes at each epoch, and "reduce"
        follows the fold's own validation loss
    seeds : networks for each fold and schedule, each from its own random numbers
    batch_size : rows in a step; None for all
    seed : an int or a JAX key, of the members and of the shuffled folds; `key` is its former name
    stratified : whether each fold has the classes in the proportions of all rows
    groups : int [row]; rows of one group are in one fold
    metric, patience : as `fit` takes them, of the held-out rows. With patience a member ends with the weights of its
        best epoch on the rows that it is scored on: its scores are too good
    scoring : names of scikit-learn's scorers, such as "roc_auc", ["f1_macro", "neg_log_loss"] or {column: name}; the
        larger, the better
    augment : changes training images only (see `augmented`)
    checkpoints : a folder or `Checkpoints`; each model has a subfolder of its name (see `fit`)
    cluster : a `Cluster` to train the members on, whose folder stores them
    plan, allow_nan : as `fit` takes them; plan also {name: plan}
    progress : whether to show a bar for each model

    Raises
    ------
    ValueError : before any training, for folds, groups, classes and shapes that do not match the data

    Examples
    --------
    >>> import numpy as np, optax, turbanet as tn
    >>> x = np.linspace(-1, 1, 60, dtype=np.float32)[:, None]
    >>> y = (x[:, 0] > 0).astype(int)
    >>> adam, loss = optax.adam(0.05), tn.softmax_cross_entropy
    >>> found = tn.cross_validate(tn.MLP((8, 2)), x, y, optimizer=adam, loss=loss, epochs=20, folds=3, progress=False)
    >>> print(found.final()[["model", "fold", "epoch"]])
      model  fold  epoch
    0   mlp     0     19
    1   mlp     1     19
    2   mlp     2     19
    >>> bool(found.final().accuracy.mean() > 0.8)
    True
    """
    models = models if isinstance(models, Mapping) else {type(models).__name__.lower(): models}
    schedules = [schedules] if isinstance(schedules, str) or callable(schedules) else list(schedules)
    check_whole(seeds=seeds)
    check_cluster(cluster)
    _check_names(models, schedules, plan, checkpoints)
    if takes(loss, "member"):
        advice = "train the folds by fit, with rows=turbanet.k_fold(...)"
        raise ValueError(f"The loss takes constants of each member's own, and cross_validate has no member=: {advice}.")
    if cluster is not None and checkpoints is not None:
        raise ValueError("A cluster keeps its members in its own folder: leave checkpoints out.")
    seed = seed if key is None else key
    seed = int(jax.random.bits(seed) >> 1) if is_jax_key(seed) else int(check_seed(seed))
    x, y = jax.tree.map(np.asarray, as_arrays(x, "x")), _targets(y)
    pairs = splits(y, folds, stratified=stratified, groups=groups, seed=seed)
    runs = list(itertools.product(range(len(schedules)), range(len(pairs)), range(seeds)))
    swarms = {}
    for name, model in models.items():  # all before any is trained: a model that cannot take x fails here
        first = jax.tree.map(lambda leaf: leaf[:1], x)
        swarms[name] = TurbaTrainState.swarm(model, optimizer, len(runs), sample_input=first, seed=seed)
        if set(schedules) != {"constant"}:
            swarms[name] = with_schedule(swarms[name], [schedules[number] for number, _, _ in runs])
    metrics = dict(metric) if isinstance(metric, Mapping) else {ONE: metric} if metric else {}
    scores = metrics_of(scoring)
    if taken := scores.keys() & metrics.keys():
        raise ValueError(f"scoring and metric both have {taken.pop()!r}: rename the metric.")
    scores |= metrics
    if _has_classes(y, swarms, x):
        unstratified = isinstance(folds, int | np.integer) and not stratified
        advice = "take fewer folds, or stratified=True" if unstratified else CLASSES
        _check_classes(y, pairs, f"{advice}; numbers that are no classes are floats, y.astype(float)")
        scores = {"accuracy": accuracy} | scores
    if taken := scores.keys() & {"model", *RUN, "seconds"}:
        raise ValueError(f"A metric is called {taken.pop()!r}, as another column of the table is: rename it.")
    train, held_out = (ragged(part) for part in zip(*pairs, strict=True))
    fold = np.array([fold for _, fold, _ in runs])
    checkpoints = checkpoints if isinstance(checkpoints, Checkpoints | None) else Checkpoints(checkpoints)
    fits = {}
    for name, swarm in swarms.items():
        own = checkpoints and dataclasses.replace(checkpoints, folder=place(checkpoints.folder) / name)
        fits[name] = partial(
            partial(fit, checkpoints=own) if cluster is None else cluster.fit,
            swarm,
            x,
            y,
            loss if augment is None else augmented(loss, augment),
            epochs=epochs,
            batch_size=batch_size,
            rows=train[fold],
            validation=(x, y),
            validation_rows=held_out[fold],
            metric=scores or None,
            patience=patience,
            allow_nan=allow_nan,
            plan=plan.get(name) if isinstance(plan, Mapping) else plan,
            progress=progress,
        )
    histories = {}
    predictions = {}
    for name in models:
        if len(fits) > 1 and cluster is None:  # the next model compiles while this one trains
            for start in list(fits.values())[0 if len(fits) == len(models) else 1 : 2]:
                start(compile_only=True)
        swarms[name], histories[name] = fits.pop(name)()
        # By the plan of the training; a cluster's history has none, as each of its workers had its own.
        predictions[name] = np.asarray(predict(swarms[name], x, rows=held_out[fold], plan=histories[name].plan))
    members = _members(runs, _names(schedules))
    table = _table(histories, members)
    return CrossValidation(table, members, train, held_out, swarms, histories, predictions, y, patience is not None)


def _check_names(models, schedules, plan, checkpoints):
    """Raise ValueError for no models or schedules, names that are none, and a plan for another model."""
    if not models or not schedules:
        raise ValueError("cross_validate needs at least one model and one schedule.")
    if unnamed := [name for name in models if not isinstance(name, str)]:
        raise ValueError(f"models are {{name: model}}, a name is a str; got {unnamed[0]!r}: take str({unnamed[0]!r}).")
    paths = [name for name in models if checkpoints is not None and (name in ("", ".", "..") or "/" in name)]
    if paths:
        raise ValueError(f"Each model has a folder of its name in checkpoints, and {paths[0]!r} is none: rename it.")
    if isinstance(plan, Mapping) and (unknown := plan.keys() - models.keys()):
        raise ValueError(f"plan names {unknown.pop()!r}; the models are {', '.join(models)}.")


def _targets(y: Any) -> np.ndarray:
    """Return y as one array [row, ...], bool as int."""
    if y is None or isinstance(y, Mapping) or (isinstance(y, tuple) and any(map(np.ndim, y))):
        advice = "train the folds by fit, with rows= and validation_rows="
        raise ValueError(f"cross_validate takes y as one array [row, ...], got a {type(y).__name__}: {advice}.")
    y = np.asarray(y)
    return y.astype(np.int32) if y.dtype == bool else y


def _has_classes(y, swarms, x):
    """Whether y holds classes: whole numbers [row], beside models with several outputs."""
    rows = [leaf.shape[1:] for leaf in jax.tree.leaves(x)]
    shapes = {name: one_prediction(swarm, x, rows) for name, swarm in swarms.items()}
    if several := [name for name, prediction in shapes.items() if not hasattr(prediction, "shape")]:
        raise ValueError(f"The model {several[0]} predicts several arrays, and its folds are scored by one: return it.")
    is_whole = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    return is_whole and all(len(each.shape) == 2 and each.shape[1] > 1 for each in shapes.values())


def _members(runs, names):
    """Return a table of the members, in the order of `runs`: (number of the schedule, fold, seed) of each."""
    members = extras.pandas().DataFrame(runs, columns=RUN).rename_axis("member").reset_index()
    return members.assign(schedule=[names[number] for number, _, _ in runs])


def _table(histories, members):
    """Return the losses and metrics of all models in one table."""
    tables = {}
    for name, history in histories.items():
        frame = history.frame().drop(columns="seed")
        frame["seconds"] = history.steady_seconds / len(frame)
        tables[name] = members.merge(frame, on="member", how="right").drop(columns="member")
    return extras.pandas().concat(tables, names=["model"]).reset_index(level="model").reset_index(drop=True)


def _names(schedules):
    """Return the names of schedules; equal ones are numbered: decay, decay 2."""
    names = [getattr(schedule, "__name__", str(schedule)) for schedule in schedules]
    numbers = [names[: position + 1].count(name) for position, name in enumerate(names)]
    return [name if number == 1 else f"{name} {number}" for name, number in zip(names, numbers, strict=True)]


def splits(
    y: np.ndarray, folds: Any, *, stratified: bool = False, groups: ArrayLike | None = None, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split rows into folds by scikit-learn, and return the (training, held-out) rows of each.

    Parameters
    ----------
    y : [row, ...]; int [row] are classes
    folds : number of shuffled folds, any splitter of scikit-learn, or pairs (training rows, held-out rows)
    stratified : whether each fold has the classes in the proportions of all rows
    groups : [row]; rows of one group are in one fold
    seed : of the shuffling

    Returns
    -------
    A list of pairs of int [row]

    Raises
    ------
    ValueError : by scikit-learn, for more folds than rows, groups or rows of a class, and for groups of another length;
        for a row without a group, for a fold that trains on rows or groups that it holds out, or on rows that are not
        there, and for `stratified` with folds that are not a number
    """
    pd = extras.pandas()
    from sklearn import model_selection

    if groups is not None and np.shape(groups) != (len(y),):
        raise ValueError(f"groups must be [row], one for each of {len(y)} rows; got shape {np.shape(groups)}.")
    if groups is not None and (lacking := np.flatnonzero(pd.isna(np.asarray(groups, object)))).size:
        raise ValueError(f"groups must have a group for each row; row {lacking[0]} has none.")
    if isinstance(folds, list | tuple) and not (folds and all(len(pair) == 2 for pair in folds)):
        raise ValueError(f"folds are pairs (training rows, held-out rows), at least one; got {folds!r:.60}.")
    if isinstance(folds, int | np.integer):
        splitter = ("Stratified" if stratified else "") + ("KFold" if groups is None else "GroupKFold")
        folds = getattr(model_selection, splitter)(int(folds), shuffle=True, random_state=seed)
    elif stratified:
        problem = f"stratified=True came, and folds is {folds!r:.60}"
        raise ValueError(f"{problem}: give the number of folds, or sklearn's StratifiedKFold alone.")
    pairs = model_selection.check_cv(folds).split(np.zeros(len(y)), y, groups)
    pairs = [_checked_fold(fold, pair, len(y)) for fold, pair in enumerate(pairs)]
    if groups is not None:
        _check_groups(np.asarray(groups), pairs)
    return pairs


def _checked_fold(fold: int, pair: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a fold's (training, held-out) rows, int [row] each; bool [row] marks them."""
    parts = [
        np.flatnonzero(part) if part.dtype == bool and len(part) == rows else part for part in map(np.asarray, pair)
    ]
    for part in parts:
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer) or not part.size:
            raise ValueError(f"Fold {fold} must be (training rows, held-out rows), int [row] each; got {pair!r:.60}.")
        if part.min() < 0 or part.max() >= rows:
            raise ValueError(f"Fold {fold} has rows from {part.min()} to {part.max()}; there are rows 0 to {rows - 1}.")
    train, held_out = parts
    if len(both := np.intersect1d(train, held_out)):
        raise ValueError(f"Fold {fold} trains on a row that it holds out: row {both[0]}.")
    return train, held_out


def _check_groups(groups, pairs):
    """Raise ValueError for a fold that trains on some rows of a group and holds out others."""
    of_row, names = extras.pandas().factorize(groups)
    for fold, (train, held_out) in enumerate(pairs):
        if len(both := np.intersect1d(of_row[train], of_row[held_out])):
            problem = f"Fold {fold} trains on rows of group {names[both[0]]}, of which it holds out others"
            raise ValueError(f"{problem}: give the number of folds, or a splitter that keeps groups apart.")


def _check_classes(y, pairs, advice):
    """Raise ValueError for a class that is missing from a fold's training rows."""
    for fold, (train, _) in enumerate(pairs):
        if len(missing := np.setdiff1d(y, y[train])):
            raise ValueError(f"Fold {fold} trains on no row of class {missing[0]}: {advice}.")
