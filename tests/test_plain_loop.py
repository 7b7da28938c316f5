"""fit, evaluate, predict and cross_validate against a slow loop over members in NumPy: drawn jobs, a line a member."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings, strategies as st

import turbanet as tn

MEMBERS, ROWS, EPOCHS, RATE = 3, 14, 12, 0.2
rng = np.random.default_rng(3)
X = rng.normal(size=(MEMBERS, ROWS, 2)).astype(np.float32)
Y = (X @ [[1.0], [-2.0]] + rng.normal(size=(MEMBERS, ROWS, 1))).astype(np.float32)
WEIGHTS = rng.uniform(0, 2, size=(MEMBERS, ROWS)).astype(np.float32)
COUNTS = st.sampled_from([(9, 9, 9), (9, 4, 3), (3, 9, 5)])


def predicted(params, x, apply_fn):
    return apply_fn({"params": params}, x)


@tn.mean_over_rows
def absolute(params, x, y, apply_fn):
    prediction = predicted(params, x, apply_fn)
    return jnp.abs(prediction - y), prediction


def rmse(params, x, y, apply_fn):
    prediction = predicted(params, x, apply_fn)
    return jnp.sqrt(jnp.mean((prediction - y) ** 2)), prediction


def rmse_with_mask(params, x, y, apply_fn, mask=None):
    prediction = predicted(params, x, apply_fn)
    return jnp.sqrt(jnp.mean((prediction - y) ** 2, where=None if mask is None else mask[:, None])), prediction


def ranking(params, x, y, apply_fn):
    """Logistic loss of each pair of rows (RankNet, Burges et al. 2005)."""
    score = predicted(params, x, apply_fn)
    above = y > y.T
    pairs = jnp.where(above, jax.nn.softplus(score.T - score), 0)
    return pairs.sum() / jnp.maximum(above.sum(), 1), score


def of_squares(p, y, w):
    return np.average((p - y) ** 2, weights=w), 2 * w * (p - y) / w.sum()


def of_distances(p, y, w):
    return np.abs(p - y).mean(), np.sign(p - y) / len(p)


def of_root(p, y, w):
    value = np.sqrt(np.mean((p - y) ** 2))
    return value, (p - y) / len(p) / value


def of_pairs(p, y, w):
    above, apart = y[:, None] > y, p - p[:, None]
    slope = np.where(above, 1 / (1 + np.exp(-apart)), 0) / max(above.sum(), 1)
    return np.where(above, np.log1p(np.exp(apart)), 0).sum() / max(above.sum(), 1), slope.sum(0) - slope.sum(1)


LOSSES = {  # the loss, by hand its (value, slope) of predictions, targets and weights [row], whether it takes a mask
    "mse": (tn.mse, of_squares, True),
    "weighted": (tn.weighted(tn.mse), of_squares, True),
    "absolute": (absolute, of_distances, True),
    "rmse": (rmse, of_root, False),
    "rmse with a mask": (rmse_with_mask, of_root, True),
    "ranking": (ranking, of_pairs, False),
}


class Plain:
    """One member in float64: its line, its optimizer, its stopping, each an obvious loop."""

    def __init__(self, state, x, y, w, by_hand):
        self.line = np.concatenate([state.params["kernel"][:, 0], state.params["bias"]]).astype(float)
        self.x, self.y, self.w = np.column_stack([x, np.ones(len(x))]).astype(float), y[:, 0].astype(float), w
        self.by_hand = by_hand

    def loss(self, rows):
        return self.by_hand(self.x[rows] @ self.line, self.y[rows], self.w[rows])

    def train(self, order, held_out, schedule=None, patience=None):
        """(training losses, held-out losses), an entry an epoch."""
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=6, rtol=1e-4)
        reduced = plateau.init(0.0)
        best, kept, waited, seen = np.inf, self.line, 0, []
        for epoch, steps in enumerate(order):
            rate = RATE * float(reduced.scale) if schedule == "reduce" else RATE
            rate = 1e-6 + (RATE - 1e-6) * (1 + np.cos(np.pi * epoch / 10)) / 2 if schedule == "cosine" else rate
            losses = []
            for step in steps:
                rows = step[step >= 0]
                if len(rows):
                    value, slope = self.loss(rows)
                    losses.append(value)
                    self.line = self.line - rate * slope @ self.x[rows]
            value, _ = self.loss(held_out)
            seen.append((np.mean(losses), value))
            reduced = plateau.update({}, reduced, value=np.float32(value))[1]
            waited = 0 if value < best else waited + 1
            best, kept = (value, self.line) if waited == 0 else (best, kept)
            if waited == patience:
                break
        self.line = kept if patience else self.line
        return np.transpose(seen)


def drawn_rows(counts, seed):
    random = np.random.default_rng(seed)
    return np.stack([np.pad(random.permutation(ROWS)[:n], (0, 9 - n), constant_values=-1) for n in counts])


def sgd():
    return optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)


def batches(loss, counts):
    """A batch for the loss: one without a mask needs as many rows of each member."""
    return 9 if LOSSES[loss][2] or len(set(counts)) == 1 else 3


def equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    loss=st.sampled_from(list(LOSSES)),
    counts=COUNTS,
    held=COUNTS,
    large=st.booleans(),
    own=st.booleans(),
    patience=st.sampled_from([None, 2]),
    schedule=st.sampled_from([None, "reduce", "cosine"]),
    seed=st.integers(0, 1),
)
def test_fit_evaluate_and_predict_are_a_loop_over_members(loss, counts, held, large, own, patience, schedule, seed):
    loss_fn, by_hand, _ = LOSSES[loss]
    rows, held_out = drawn_rows(counts, seed), drawn_rows(held, seed + 10)
    is_weighted = loss == "weighted"
    x, y, w = (X, Y, WEIGHTS) if own else (X[0], Y[0], WEIGHTS[0])
    data = x, (y, w) if is_weighted else y
    batch_size = batches(loss, counts) if large else 3
    swarm = tn.TurbaTrainState.swarm(nn.Dense(1), sgd(), MEMBERS, input_size=2, seed=seed)
    swarm = swarm if schedule is None else tn.with_schedule(swarm, schedule)
    job = {"epochs": EPOCHS, "batch_size": batch_size, "rows": rows, "per_member": own, "plan": tn.Plan(1, MEMBERS)}
    job |= {"validation": data, "validation_rows": held_out, "patience": patience, "progress": False}
    trained, history = tn.fit(swarm, *data, loss_fn, **job)
    scores = tn.evaluate(trained, *data, loss_fn, rows=held_out, per_member=own)
    predictions = tn.predict(trained, x, per_member=own)
    order = tn.batch_order(swarm, rows, epochs=EPOCHS, batch_size=batch_size)
    best = history.best().validation_loss
    for member in range(MEMBERS):
        data = (x[member], y[member], w[member]) if own else (x, y, w)
        plain = Plain(swarm.get_state(member), *data[:2], data[2] if is_weighted else np.ones(ROWS), by_hand)
        own_held = held_out[member][: held[member]]
        train_loss, validation_loss = plain.train(order[member], own_held, schedule, patience)
        epochs = len(train_loss)
        assert history.epochs[member] == epochs
        equal(history.train_loss[:epochs, member], train_loss)
        equal(history.validation_loss[:epochs, member], validation_loss)
        equal(predictions[member][:, 0], plain.x @ plain.line)
        equal(scores[member], plain.loss(own_held)[0])
        equal(best[member], validation_loss.min())


class Folds:
    """A splitter with folds of these numbers of rows."""

    def __init__(self, pairs):
        self.pairs = pairs

    def split(self, *data):
        return self.pairs


@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    loss=st.sampled_from([name for name in LOSSES if name != "weighted"]),
    counts=COUNTS,
    held=COUNTS,
    schedule=st.sampled_from(["constant", "reduce"]),
)
def test_cross_validate_is_a_loop_over_folds(loss, counts, held, schedule):
    loss_fn, by_hand, _ = LOSSES[loss]
    parts = zip(drawn_rows(counts, 1), drawn_rows(held, 2), strict=True)
    pairs = [(train[train >= 0], held_out[held_out >= 0]) for train, held_out in parts]
    folds = Folds([(train, held_out + ROWS) for train, held_out in pairs])  # of copies: no row is in both
    x, y = (np.concatenate([part[0], part[0]]) for part in (X, Y))
    job = {"epochs": EPOCHS, "batch_size": batches(loss, counts), "optimizer": sgd(), "schedules": schedule}
    found = tn.cross_validate(nn.Dense(1), x, y, loss=loss_fn, folds=folds, progress=False, **job)
    swarm = tn.TurbaTrainState.swarm(nn.Dense(1), sgd(), MEMBERS, sample_input=X[0, :1], seed=0)
    order = tn.batch_order(swarm, drawn_rows(counts, 1), epochs=EPOCHS, batch_size=job["batch_size"])
    for fold, (_, held_out) in enumerate(pairs):
        plain = Plain(swarm.get_state(fold), X[0], Y[0], np.ones(ROWS), by_hand)
        train_loss, validation_loss = plain.train(order[fold], held_out, schedule)
        lines = found.table[found.table.fold == fold]
        equal(lines.train_loss, train_loss)
        equal(lines.validation_loss, validation_loss)
        equal(found.predictions["dense"][fold][: len(held_out), 0], plain.x[held_out] @ plain.line)
