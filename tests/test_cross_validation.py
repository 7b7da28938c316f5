"""cross_validate: scikit-learn's folds, each as if trained alone, and mistakes that stop before any training."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import softmax
from sklearn import model_selection
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss, make_scorer, roc_auc_score

import turbanet as tn
from turbanet.selection.cross_validation import splits
from turbanet.training import compilation, run

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0.5)
GROUPS = np.arange(60) // 4
ADAM = optax.inject_hyperparams(optax.adam)(learning_rate=0.01)
JOB = {"optimizer": ADAM, "loss": tn.softmax_cross_entropy, "epochs": 4, "batch_size": 8, "progress": False}
MODELS = {"small": tn.MLP((4, 3)), "large": tn.MLP((8, 3))}


@pytest.fixture(scope="module")
def found():
    return tn.cross_validate(
        MODELS, X, Y, folds=4, schedules=["cosine", "reduce"], seeds=2, key=3, stratified=True, **JOB
    )


SPLITTERS = [
    model_selection.KFold(5),
    model_selection.StratifiedKFold(3, shuffle=True, random_state=1),
    model_selection.GroupKFold(3),
    model_selection.TimeSeriesSplit(3),
    model_selection.LeaveOneGroupOut(),
]


def test_one_output_ranks_rows_of_two_classes():
    model = tn.MLP((1,))
    job = JOB | {"loss": tn.binary_cross_entropy}
    y = (Y > 0).astype(int)
    found = tn.cross_validate(model, X, y > 0, folds=3, stratified=True, scoring="roc_auc", **job)
    last = found.oof().groupby("fold")
    wanted = [roc_auc_score(fold.y, fold.prediction) for _, fold in last]
    np.testing.assert_allclose(found.final().roc_auc, wanted)
    with pytest.raises(ValueError, match="accuracy cannot score .* it needs an output for each class, not one"):
        tn.cross_validate(model, X, y, folds=3, stratified=True, scoring="accuracy", **job)


def test_a_fold_may_hold_out_no_row_of_a_class():
    few, y = X[:20], Y[:20]
    assert np.bincount(y).min() > 1
    found = tn.cross_validate(tn.MLP((4, 3)), few, y, folds=model_selection.LeaveOneOut(), **JOB)
    oof = found.oof()
    assert oof.row.tolist() == list(range(20))
    best = oof[[f"prediction_{label}" for label in range(3)]].to_numpy().argmax(1)
    np.testing.assert_array_equal(found.final().accuracy, best == y)


@pytest.mark.parametrize("splitter", SPLITTERS, ids=lambda s: type(s).__name__)
def test_any_splitter_gives_its_own_rows(splitter):
    y = rng.normal(size=60) if not isinstance(splitter, model_selection.StratifiedKFold) else Y
    groups = GROUPS if "Group" in type(splitter).__name__ else None  # the others warn of them
    got = splits(y, splitter, groups=groups)
    expected = list(splitter.split(X, y, groups))
    assert len(got) == len(expected)
    for pair, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(pair[0], wanted[0])
        np.testing.assert_array_equal(pair[1], wanted[1])


KINDS = {
    (False, False): model_selection.KFold,
    (True, False): model_selection.StratifiedKFold,
    (False, True): model_selection.GroupKFold,
    (True, True): model_selection.StratifiedGroupKFold,
}


@pytest.mark.parametrize("stratified, grouped", KINDS)
def test_a_number_of_folds_is_scikit_learns_shuffled_splitter(stratified, grouped):
    groups = GROUPS if grouped else None
    got = splits(Y, 3, stratified=stratified, groups=groups, seed=7)
    expected = KINDS[stratified, grouped](3, shuffle=True, random_state=7).split(X, Y, groups)
    for pair, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(pair[0], wanted[0])
        np.testing.assert_array_equal(pair[1], wanted[1])


def test_the_swarm_trains_on_the_folds_rows(found):
    expected = list(model_selection.StratifiedKFold(4, shuffle=True, random_state=3).split(X, Y))
    for fold, (train, held_out) in enumerate(expected):
        np.testing.assert_array_equal(found.train_rows[fold], train)
        np.testing.assert_array_equal(found.validation_rows[fold], held_out)


def test_the_next_model_compiles_while_one_trains(monkeypatch):
    happened, start, train = [], compilation._compile_in_thread, run.Training.advance
    monkeypatch.setattr(
        compilation, "_compile_in_thread", lambda *a, **k: happened.append("compiles") or start(*a, **k)
    )
    monkeypatch.setattr(run.Training, "advance", lambda self: happened.append("trains") or train(self))
    ahead, compile_ahead = [], run.Training.compile
    monkeypatch.setattr(run.Training, "compile", lambda self: ahead.append(self) or compile_ahead(self))
    models = {"small": tn.MLP((3,)), "large": tn.MLP((2, 3)), "largest": tn.MLP((4, 3))}
    job = JOB | {"epochs": 1, "stratified": True}
    programs = {}
    monkeypatch.setattr(compilation, "_programs", lambda: programs)
    found = tn.cross_validate(models, X, Y, **job)
    assert len(ahead) == len(models)
    scores = happened.count("compiles") - len(models)
    first = happened[: happened.index("trains")]
    assert len(first) == 2 and scores == len(models)  # and each predicts
    alone = tn.cross_validate({"large": models["large"]}, X, Y, **job).table
    np.testing.assert_array_equal(alone.train_loss, found.table[found.table.model == "large"].train_loss)


def test_the_table_has_a_line_for_each_of_all(found):
    columns = ["model", "schedule", "fold", "seed", "epoch"]
    assert len(found.table) == 2 * 2 * 4 * 2 * 4 and not found.table.duplicated(columns).any()
    assert set(found.table.columns) == {*columns, "train_loss", "validation_loss", "accuracy", "seconds"}
    assert np.isfinite(found.table.select_dtypes("number")).all(axis=None)
    assert len(found.final()) == 2 * 2 * 4 * 2 and (found.final().epoch == 3).all()
    for model, part in found.table.groupby("model"):
        assert part.seconds.sum() == pytest.approx(found.histories[model].steady_seconds)


def test_accuracy_and_loss_are_those_of_the_held_out_rows(found):
    final = found.final()
    for model, swarm in found.swarms.items():
        own = final[final.model == model].reset_index(drop=True)
        for i, (fold, state) in enumerate(zip(found.members.fold, swarm, strict=True)):
            rows = np.asarray(found.validation_rows[fold])
            logits = np.asarray(MODELS[model].apply({"params": state.params}, X[rows]), np.float64)
            assert own.accuracy[i] == pytest.approx((logits.argmax(-1) == Y[rows]).mean())
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            assert own.validation_loss[i] == pytest.approx(-logits[np.arange(len(rows)), Y[rows]].mean(), rel=1e-4)


def test_confusion_matrices_and_class_accuracies_are_scikit_learns(found):
    counts, table = found.confusion("small"), found.class_accuracy()
    for i, state in enumerate(found.swarms["small"]):
        rows = np.asarray(found.validation_rows[found.members.fold[i]])
        chosen = np.asarray(MODELS["small"].apply({"params": state.params}, X[rows])).argmax(-1)
        expected = confusion_matrix(Y[rows], chosen, labels=range(3))
        np.testing.assert_array_equal(counts[i], expected)
        own = table[table.model == "small"].iloc[3 * i : 3 * i + 3]
        assert list(own["class"]) == [0, 1, 2]
        np.testing.assert_allclose(own.accuracy, np.diag(expected) / expected.sum(1))


def test_a_fold_alone_is_the_fold_in_the_swarm(found):
    """Alone: a plain Optax loop on the plain model, the learning rate by PyTorch's formula."""
    position = 5  # cosine, fold 2, second seed
    assert tuple(found.members.loc[position, ["schedule", "fold", "seed"]]) == ("cosine", 2, 1)
    start = tn.TurbaTrainState.swarm(MODELS["small"], ADAM, 16, sample_input=X[:1], seed=3)[[position]]
    rows = np.asarray(found.train_rows)[[2]]
    order = tn.batch_order(start, rows, epochs=4, batch_size=8)[0]
    params, losses = start.get_state(0).params, []
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.01)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        def loss(params):
            logits = MODELS["small"].apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    for epoch in range(4):
        state.hyperparams["learning_rate"] = np.float32(1e-6 + (0.01 - 1e-6) * (1 + np.cos(np.pi * epoch / 10)) / 2)
        steps = []
        for batch in order[epoch]:
            params, state, value = step(params, state, X[batch], Y[batch])
            steps.append(value)
        losses.append(np.mean(steps))
    np.testing.assert_allclose(found.histories["small"].train_loss[:, position], losses, rtol=1e-4)


def test_scores_by_scikit_learns_names_are_those_of_its_functions(found):
    scoring = ["roc_auc_ovr", "f1_macro", "neg_log_loss"]
    scored = tn.cross_validate(MODELS["small"], X, Y, folds=3, stratified=True, scoring=scoring, **JOB)
    for fold, final in scored.final().iterrows():
        rows = np.asarray(scored.validation_rows[fold])
        share = softmax(scored.predictions["mlp"][fold].astype(np.float64), axis=1)
        assert final.f1_macro == pytest.approx(f1_score(Y[rows], share.argmax(1), average="macro"))
        assert final.neg_log_loss == pytest.approx(-log_loss(Y[rows], share, labels=range(3)), rel=1e-5)
        assert final.roc_auc_ovr == pytest.approx(roc_auc_score(Y[rows], share, multi_class="ovr"), rel=1e-5)
        assert final.accuracy == pytest.approx((share.argmax(1) == Y[rows]).mean())


def test_scores_take_the_names_of_a_mapping_and_ranks_several_labels():
    labels = np.stack([Y == 0, Y > 0, X[:, 0] > 0], axis=1).astype(np.float32)
    job = JOB | {"loss": tn.binary_cross_entropy}
    scored = tn.cross_validate(tn.MLP((3,)), X, labels, folds=3, scoring={"f1": "roc_auc"}, **job)
    for fold, final in scored.final().iterrows():
        rows = np.asarray(scored.validation_rows[fold])
        assert final.f1 == pytest.approx(roc_auc_score(labels[rows], scored.predictions["mlp"][fold]))
    one_hot = np.eye(3, dtype=np.float32)[Y]  # a softmax's logits are of each row by itself
    with pytest.raises(ValueError, match="The metric roc_auc cannot score predictions and y"):
        tn.cross_validate(tn.MLP((3,)), X, one_hot, folds=3, scoring="roc_auc", **JOB)


def test_a_metric_of_ones_own_and_scikit_learns_of_a_regression():
    own = {"largest": lambda prediction, y: abs(prediction - y).max()}
    job = {"loss": tn.mse, "metric": own, "scoring": "neg_mean_absolute_error"}
    found = tn.cross_validate(tn.MLP((1,)), X, X[:, :1], folds=3, **JOB | job)
    errors = found.oof().assign(y=lambda table: X[table.row, 0]).eval("abs(prediction - y)").groupby(found.oof().fold)
    assert (found.table.validation_loss > 0).all()
    np.testing.assert_allclose(found.final().largest, errors.max(), rtol=1e-5)
    np.testing.assert_allclose(found.final().neg_mean_absolute_error, -errors.mean(), rtol=1e-5)


def test_with_patience_the_final_scores_are_those_of_the_weights():
    job = JOB | {"epochs": 40, "optimizer": optax.adam(0.3)}
    found = tn.cross_validate(tn.MLP((8, 3)), X, Y, folds=3, stratified=True, patience=2, **job)
    final = found.final()
    assert len(final) == 3 and final.epoch.max() < 39
    losses = optax.softmax_cross_entropy_with_integer_labels(
        found.predictions["mlp"], Y[np.asarray(found.validation_rows)]
    )
    np.testing.assert_allclose(final.validation_loss, losses.mean(1), rtol=1e-5)


def test_out_of_fold_predictions_are_of_the_members_that_did_not_see_the_row(found):
    table = found.oof()
    assert list(table) == ["model", "schedule", "fold", "seed", "row", "y", *(f"prediction_{i}" for i in range(3))]
    own = table[(table.model == "small") & (table.schedule == "reduce") & (table.seed == 1)]
    np.testing.assert_array_equal(own.row.sort_values(), range(60))
    np.testing.assert_array_equal(own.y, Y[own.row])
    for each in own.sample(5, random_state=0).itertuples():
        (member,) = found.members.query(f"schedule == 'reduce' and seed == 1 and fold == {each.fold}").index
        params = found.swarms["small"].get_state(member).params
        expected = MODELS["small"].apply({"params": params}, X[each.row])
        np.testing.assert_allclose(each[-3:], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("y", [X[:, 0], X[:, :1]], ids=["row", "column"])
def test_out_of_fold_targets_of_one_number_are_there(y):
    model = (
        tn.MLP((1,)) if y.ndim == 2 else (lambda key, x: {"w": jax.random.normal(key, (5,))}, lambda p, x: x @ p["w"])
    )
    oof = tn.cross_validate({"line": model}, X, y, folds=3, **JOB | {"loss": tn.mse}).oof()
    np.testing.assert_array_equal(oof.y, X[oof.row, 0])


def test_nan_is_let_through_to_a_loss_that_knows_it():
    y = np.where(X[:, :1] > 1.5, np.nan, X[:, :1])

    def known(params, x, y, apply_fn):
        return tn.mse(params, x, y, apply_fn, weight=jnp.isfinite(y[:, 0]))

    found = tn.cross_validate(tn.MLP((1,)), X, y, folds=3, allow_nan=True, **JOB | {"loss": known})
    assert np.isnan(y).any() and np.isfinite(found.table.train_loss).all()
    with pytest.raises(ValueError, match="say allow_nan=True"):
        tn.cross_validate(tn.MLP((1,)), X, y, folds=3, **JOB | {"loss": known})


def test_folds_may_be_pairs_and_x_a_dict():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x["a"]) + nn.Dense(3)(x["b"])

    pairs = list(model_selection.KFold(3).split(X))
    first, second = (
        tn.cross_validate(Two(), {"a": X[:, :2], "b": X[:, 2:]}, Y, folds=folds, **JOB)
        for folds in (pairs, model_selection.KFold(3))
    )
    assert first.table.drop(columns="seconds").equals(second.table.drop(columns="seconds"))


def test_held_out_rows_are_never_trained_on():
    """Rows of a fold hold a value that no other row has: training sees it in all folds but that one."""
    y = rng.normal(size=(12, 1)).astype(np.float32)
    pairs = splits(y[:, 0], 3, seed=0)
    for fold, (_, held_out) in enumerate(pairs):
        spoilt = y.copy()
        spoilt[held_out] = 1e30  # whose square is infinite
        found = tn.cross_validate(tn.MLP((1,)), X[:12], spoilt, folds=3, **JOB | {"loss": tn.mse})
        bad = found.table.groupby("fold").train_loss.apply(lambda loss: not np.isfinite(loss).all())
        assert list(bad[bad].index) == [other for other in range(3) if other != fold]
        assert "accuracy" not in found.table  # of a regression


def test_ragged_folds_are_scored_as_whole_ones():
    found = tn.cross_validate(tn.MLP((3,)), X[:50], Y[:50], folds=4, stratified=True, **JOB)
    final = found.final()
    assert (np.asarray(found.validation_rows) < 0).any()
    for fold, (_, rows) in enumerate(
        model_selection.StratifiedKFold(4, shuffle=True, random_state=0).split(X[:50], Y[:50])
    ):
        logits = tn.predict(found.swarms["mlp"], X[rows])[fold]
        assert final.accuracy[fold] == pytest.approx((logits.argmax(-1) == Y[rows]).mean())
        assert found.confusion("mlp")[fold].sum() == len(rows)


def test_a_plan_for_each_model_and_checkpoints_in_a_folder_of_each(tmp_path):
    plans = {"small": tn.Plan(1, 2), "large": tn.Plan(1, 3)}
    job = {"folds": 3, "plan": plans, "checkpoints": tmp_path, **JOB}
    first = tn.cross_validate(MODELS, X, Y, **job)
    assert {name: history.plan.block for name, history in first.histories.items()} == {"small": 2, "large": 3}
    assert {path.name for path in tmp_path.iterdir()} == {"small", "large"}
    again = tn.cross_validate(MODELS, X, Y, **job)  # all is there: nothing is trained again
    columns = ["train_loss", "validation_loss", "accuracy"]
    np.testing.assert_array_equal(first.table[columns], again.table[columns])
    with pytest.raises(ValueError, match="batch size was 8 and is 4"):
        tn.cross_validate(MODELS, X, Y, **job | {"batch_size": 4})


def test_a_jax_key_is_a_key():
    job = {"folds": 3, **JOB}
    losses = [
        tn.cross_validate(tn.MLP((3,)), X, Y, key=jax.random.key(seed), **job).table.train_loss for seed in (1, 1, 2)
    ]
    assert losses[0].equals(losses[1]) and not losses[0].equals(losses[2])


class Both(nn.Module):
    """Two arrays of one shape, as a model of several outputs returns them."""

    kind: str

    @nn.compact
    def __call__(self, x):
        one, other = nn.Dense(3)(x), nn.Dense(3)(x)
        return (one, other) if self.kind == "tuple" else {"one": one, "other": other}


BAD = [
    ({"folds": 61}, "number of splits n_splits=61 greater than the number of samples: n_samples=60"),
    ({"folds": 1}, "setting n_splits=2 or more, got n_splits=1"),
    ({"folds": 16, "groups": GROUPS}, "n_splits=16 greater than the number of groups: 15"),
    ({"groups": GROUPS[:-1]}, r"groups must be \[row\], one for each of 60 rows; got shape \(59,\)"),
    ({"folds": [(range(30), range(30, 60))], "groups": np.arange(99)}, r"of 60 rows; got shape \(99,\)"),
    ({"groups": GROUPS[:, None]}, r"of 60 rows; got shape \(60, 1\)"),
    ({"folds": []}, "folds are pairs .training rows, held-out rows., at least one; got"),
    ({"folds": (range(30), range(30, 60))}, "folds are pairs .training rows, held-out rows., at least one; got"),
    ({"models": {"..": tn.MLP((4, 3))}, "checkpoints": "kept"}, "folder of its name in checkpoints, and '..' is none"),
    ({"models": {(4, 3): tn.MLP((4, 3))}}, r"a name is a str; got \(4, 3\): take str"),
    ({"plan": {"mpl": tn.Plan(1, 1)}}, "plan names 'mpl'; the models are"),
    ({"scoring": make_scorer(accuracy_score)}, "scoring is names .* a function of your own is metric="),
    ({"models": {"both": Both("tuple")}}, "The model both predicts several arrays"),
    ({"models": {"both": Both("dict")}}, "The model both predicts several arrays"),
    ({"folds": 3, "y": np.sort(Y), "splitter": model_selection.KFold(3)}, "Fold 2 trains on no row of class 2"),
    ({"y": {"a": Y, "b": Y}}, r"takes y as one array \[row, ...\], got a dict: train the folds by fit"),
    ({"y": None}, r"takes y as one array \[row, ...\], got a NoneType: train the folds by fit"),
    ({"cluster": "auto"}, r"cluster must be a turbanet.cluster.Cluster\(folder, ...\) or None, got 'auto'"),
    ({"y": (Y, Y)}, r"takes y as one array \[row, ...\], got a tuple: train the folds by fit"),
    ({"y": np.arange(60)}, r"trains on no row of class .*; numbers that are no classes are floats, y.astype\(float\)"),
    ({"folds": 30, "stratified": True}, "n_splits=30 cannot be greater than the number of members in each class"),
    ({"folds": [(range(50), range(49, 60))]}, "Fold 0 trains on a row that it holds out: row 49"),
    ({"folds": [(range(50), range(50, 61))]}, "Fold 0 has rows from 50 to 60; there are rows 0 to 59"),
    ({"folds": [(range(50), [])]}, r"Fold 0 must be \(training rows, held-out rows\)"),
    ({"folds": "five"}, "Expected `cv` as an integer"),
    ({"groups": [*GROUPS[:-1].tolist(), None]}, "groups must have a group for each row; row 59 has none"),
    ({"scoring": "auc_roc"}, "such as roc_auc; got 'auc_roc'"),
    ({"scoring": 5}, "such as roc_auc; got 5"),
    ({"scoring": [["f1_macro"]]}, r"such as roc_auc; got \['f1_macro'\]"),
    ({"scoring": {"f1": "f1_makro"}}, "such as roc_auc; got 'f1_makro'"),
    ({"scoring": "f1_macro", "metric": {"f1_macro": tn.accuracy}}, "scoring and metric both have 'f1_macro'"),
    ({"seeds": 0}, "seeds must be a whole number of at least 1"),
    ({"schedules": []}, "at least one"),
    ({"metric": {"fold": tn.accuracy}}, "A metric is called 'fold', as another column"),
    ({"metric": {"seconds": tn.accuracy}}, "A metric is called 'seconds', as another column"),
    ({"seed": 2**32}, "seed must be one int from 0 to 2147483646"),
    ({"models": {}}, "at least one"),
    ({"schedules": ["sometimes"]}, "Unknown schedule 'sometimes'"),
    ({"models": {"mlp": tn.MLP((3,)), "lenet": tn.networks.LeNet()}}, "LeNet needs x"),
]


@pytest.mark.parametrize("bad, said", BAD, ids=[said[:20] for _, said in BAD])
def test_mistakes_stop_before_any_training(bad, said, monkeypatch):
    import turbanet.selection.cross_validation as module

    monkeypatch.setattr(module, "fit", lambda *_, **__: pytest.fail("it trained"))
    bad = dict(bad)
    models, y, folds = bad.pop("models", MODELS), bad.pop("y", Y), bad.pop("splitter", bad.pop("folds", 3))
    with pytest.raises(ValueError, match=said):
        tn.cross_validate(models, X, y, folds=folds, **bad, **JOB)


def test_counts_are_no_classes():
    y = np.arange(60) % 7  # a fold would lack some of them, were they classes
    job = {"optimizer": optax.sgd(0.01), "loss": tn.mse, "epochs": 1, "folds": 20, "progress": False}
    with pytest.raises(ValueError, match=r"prediction has shape \(.*1\), the target \(.*\): make them equal"):
        tn.cross_validate(tn.MLP((1,)), X, y, **job)
    assert "accuracy" not in tn.cross_validate(tn.MLP((1,)), X, y[:, None], **job).table


def test_images_of_the_other_byte_order_are_the_same():
    one, other = (tn.cross_validate(tn.MLP((3,)), x, Y, folds=3, **JOB).table for x in (X, X.astype(">f4")))
    np.testing.assert_array_equal(one.train_loss, other.train_loss)


@pytest.mark.filterwarnings("ignore:The groups parameter is ignored")
@pytest.mark.parametrize("folds", [model_selection.KFold(5), [(range(30), range(30, 60))]], ids=["splitter", "pairs"])
def test_what_folds_would_ignore_is_refused(folds):
    with pytest.raises(ValueError, match="stratified=True came, and folds is .*: give the number of folds"):
        splits(Y, folds, stratified=True)
    with pytest.raises(ValueError, match="Fold 0 trains on rows of group ., of which it holds out others"):
        splits(Y, folds, groups=np.arange(60) // 8)
    assert len(splits(Y, folds, groups=np.arange(60) // 6))


def test_schedules_of_one_name_are_told_apart():
    def decay(rate):
        def schedule(epoch, base):
            return base * rate**epoch

        return schedule

    schedules = [decay(0.5), "cosine", decay(0.99)]
    found = tn.cross_validate(MODELS["small"], X, Y, folds=2, schedules=schedules, patience=2, **JOB)
    assert found.members.schedule.tolist() == ["schedule"] * 2 + ["cosine"] * 2 + ["schedule 2"] * 2
    assert len(found.final()) == 6
