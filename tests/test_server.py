"""Federated learning: the server ends where loops in NumPy and Optax, written out by hand, end."""

import contextlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first

import turbanet as tn
from turbanet.core import member
from turbanet.data.sampling import epoch_order
from turbanet.federated import rounds as rounds_of
from turbanet.training import compilation

RATE = 0.1
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(23, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1 * RANDOM.normal(size=(23, 1))).astype(np.float32)
LABELS = RANDOM.integers(0, 4, len(X))
EVEN = np.arange(20).reshape(5, 4)
RAGGED = tn.ragged([np.arange(7), np.arange(7, 9), np.arange(9, 14), np.arange(14, 18), np.arange(18, 23)])
JOB = {"rounds": 4, "sampled": 3, "local_epochs": 2, "batch_size": 2, "progress": False}
SERVERS = {"mean": None, "FedAvgM": optax.sgd(1.0, 0.9), "FedAdam": optax.adam(0.05)}
WIDE = nn.Dense(3000)  # whose weights show the distribution of the noise
DROPPING = nn.Sequential([nn.Dense(8), nn.Dropout(0.5, deterministic=False)])


def line(optimizer=None, **how):
    """A linear model as a swarm of one."""
    return tn.TurbaTrainState.swarm(nn.Dense(1), optimizer or optax.sgd(RATE), 1, sample_input=X[:1], **how)


def net(optimizer=None, model=None, **how):
    """A classifier as a swarm of one."""
    model = model or tn.MLP((8, 4))
    return tn.TurbaTrainState.swarm(model, optimizer or optax.sgd(RATE), 1, sample_input=X[:1], **how)


def weights(swarm):
    return np.vstack([swarm.params["kernel"][0], swarm.params["bias"]]).astype(float)


def batches(client, rows, epochs, size=JOB["batch_size"]):
    """The rows of a client's steps in each of these epochs, of as many as it has at the most."""
    rows = np.asarray(rows)
    own = rows[rows >= 0]
    for epoch in epochs:
        key = jax.random.fold_in(member.member_key(0, client, member.SHUFFLE), epoch)
        order = epoch_order(key, len(own), length=len(own), batch_size=min(size, len(own)))
        yield from own[np.asarray(order)]


def by_hand(start, seen, clients, *, proximal=0.0, clip=None, server=None, batch_size=JOB["batch_size"]):
    """Federated averaging of a line in NumPy, on the mean squared error, by who was sampled: the weights."""
    there = weights(start)
    design = np.hstack([X, np.ones((len(X), 1))])
    moments = None if server is None else server.init(there)
    for number, sampled in enumerate(seen.clients):
        changes, counts = [], []
        for client in sampled:
            own = there.copy()
            epochs = range(number * JOB["local_epochs"], (number + 1) * JOB["local_epochs"])
            for rows in batches(client, clients[client], epochs, batch_size):
                error = design[rows] @ own - Y[rows]
                own -= RATE * (2 * design[rows].T @ error / len(rows) + proximal * (own - there))
            change = own - there
            if clip is not None:
                change *= min(1, clip / np.linalg.norm(change))
            changes.append(change)
            counts.append(1 if clip is not None else (np.asarray(clients[client]) >= 0).sum())
        change = np.average(changes, axis=0, weights=counts)
        if server is not None:
            updates, moments = server.update(-change, moments, there)
            change = np.asarray(updates, float)
        there = there + change
    return there


CASES = [  # of even clients (True) or ragged ones
    (True, "mean", (2, 1)),
    (False, "mean", (2, 2)),
    (False, "FedAdam", (1, 3)),
    (True, "mean", (1, 3)),
    (False, "mean", (1, 1)),
    (False, "FedAvgM", (2, 1)),
]


@pytest.mark.parametrize(("even", "server", "plan"), first(3, CASES), ids=str)
def test_the_server_ends_where_a_loop_in_numpy_ends(even, server, plan):
    clients = EVEN if even else RAGGED
    start, how = line(), {"server": SERVERS[server], "plan": tn.Plan(*plan)}
    found, seen = tn.federated.train(start, X, Y, tn.mse, clients=clients, **how, **JOB)
    expected = by_hand(start, seen, clients, server=SERVERS[server])
    np.testing.assert_allclose(weights(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [{"proximal": 0.7}, {"clip": 0.05}, {"clip": 100.0}], ids=str)
def test_what_a_client_may_change_is_held_as_by_hand(rule):
    start = line()
    found, seen = tn.federated.train(start, X, Y, tn.mse, clients=RAGGED, **rule, **JOB)
    np.testing.assert_allclose(weights(found), by_hand(start, seen, RAGGED, **rule), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", first(1, [6, None]))
def test_a_client_with_fewer_rows_than_a_batch_counts_each_once(batch_size):
    start, job = line(), JOB | {"batch_size": batch_size, "proximal": 0.7}
    found, seen = tn.federated.train(
        start, X, Y, tn.mse, clients=np.pad(RAGGED, ((0, 0), (0, 9)), constant_values=-1), **job
    )
    expected = by_hand(start, seen, RAGGED, proximal=0.7, batch_size=batch_size or 7)
    np.testing.assert_allclose(weights(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model", "scheduled"), first(1, [(DROPPING, True), (tn.MLP((8, 4)), False)]))
def test_one_client_with_all_rows_is_plain_training(model, scheduled):
    start = net(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0) if scheduled else None, model)
    if scheduled:  # hyperparameters and schedules are the clients' too
        start = tn.with_hyperparameters(start, learning_rate=RATE)
        start = tn.with_schedule(start, lambda epoch, base: base / (1 + epoch))
    rows = np.arange(23)[None]
    found, seen = tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, clients=rows, **JOB | {"sampled": 1})
    job = {"epochs": 8, "batch_size": 2, "progress": False}
    expected, history = tn.fit(start, X, LABELS, tn.softmax_cross_entropy, **job)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found.params, expected.params)
    np.testing.assert_allclose(seen.train_loss[:, 0], history.train_loss.reshape(4, 2).mean(1), rtol=1e-5)


def test_full_batches_and_one_epoch_are_large_batch_sgd():
    start, rows = net(), EVEN
    how = {"rounds": 6, "sampled": 5, "progress": False}
    found, _ = tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, clients=rows, **how)
    expected, _ = tn.fit(start, X[:20], LABELS[:20], tn.softmax_cross_entropy, epochs=6, progress=False)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found.params, expected.params)


def test_what_the_model_keeps_of_its_batches_is_averaged_by_rows():
    model = nn.Sequential([nn.BatchNorm(use_running_average=False, momentum=0.5), nn.Dense(1)])
    start = net(model=model)
    rows = tn.ragged([np.arange(15), np.arange(15, 23)])
    job = {"rounds": 1, "sampled": 2, "batch_size": 8, "progress": False}
    found, _ = tn.federated.train(start, X, Y, tn.mse, clients=rows, **job)
    of_clients = np.zeros((2, 3))
    for client in range(2):
        for batch in batches(client, rows[client], [0], 8):
            of_clients[client] = 0.5 * of_clients[client] + 0.5 * X[batch].mean(0)
    by_rows = np.average(of_clients, axis=0, weights=[15, 8])
    np.testing.assert_allclose(found.collections["batch_stats"]["layers_0"]["mean"][0], by_rows, rtol=1e-4)
    with pytest.raises(
        ValueError, match=r"Batches of 9 rows for client 1, which has 8, need a model without .*=8 at th"
    ):
        tn.federated.train(start, X, Y, tn.mse, clients=rows, **job | {"batch_size": 9})


@pytest.mark.optimized
def test_two_calls_are_one_and_repeat_bit_for_bit():
    job = {"clients": RAGGED, **JOB}
    whole, seen = tn.federated.train(line(), X, Y, tn.mse, **job)
    half, first = tn.federated.train(line(), X, Y, tn.mse, **job | {"rounds": 1})
    half, second = tn.federated.train(half, X, Y, tn.mse, **job | {"rounds": 3})
    np.testing.assert_array_equal(weights(half), weights(whole))
    np.testing.assert_array_equal(np.concatenate([first.clients, second.clients]), seen.clients)
    np.testing.assert_array_equal(np.concatenate([first.train_loss, second.train_loss]), seen.train_loss)


def test_noise_never_comes_twice_whatever_the_epochs_of_a_round():
    start = net(optax.sgd(0.0), WIDE)
    how = {"clients": EVEN, **JOB, "clip": 1.0, "noise": 1.0, "plan": tn.Plan(2)}
    seen, before = [], start
    for epochs, rounds in ((1, 3), (2, 2)):
        for _ in range(rounds):
            job = how | {"local_epochs": epochs, "rounds": 1}
            after, _ = tn.federated.train(before, X, LABELS, tn.softmax_cross_entropy, **job)
            change = np.asarray(after.params["kernel"] - before.params["kernel"])
            seen.append(change.ravel())
            before = after
    alike = np.corrcoef(seen) - np.eye(5)
    assert np.abs(alike).max() < 0.5


def test_other_numbers_compile_nothing_anew():
    how = {"clients": EVEN, **JOB, "proximal": 0.1, "clip": 1.0, "noise": 0.1}
    tn.federated.train(line(), X, Y, tn.mse, **how)
    before = list(compilation._programs())
    other = {"rounds": 3, "proximal": 0.2, "clip": 0.5, "noise": 0.0, "drop_out": 0.1, "seed": 3}
    tn.federated.train(line(seed=1), X, Y, tn.mse, **how | other)
    assert list(compilation._programs()) == before


def test_all_clients_train_in_each_round_unless_told_otherwise():
    job = {name: value for name, value in JOB.items() if name != "sampled"}
    every, seen = tn.federated.train(line(), X, Y, tn.mse, clients=RAGGED, **job)
    assert all(sorted(clients) == list(range(5)) for clients in seen.clients.tolist())
    np.testing.assert_allclose(weights(every), by_hand(line(), seen, RAGGED), rtol=1e-4, atol=1e-6)


def test_a_round_has_each_client_once_and_each_as_often():
    _, seen = tn.federated.train(line(), X, Y, tn.mse, clients=EVEN, **JOB | {"rounds": 300, "score_every": 1})
    assert all(len(set(clients)) == 3 for clients in seen.clients.tolist())
    share = np.bincount(seen.clients.ravel()) / 300
    np.testing.assert_allclose(share, 3 / 5, atol=4 * np.sqrt(0.6 * 0.4 / 300))


@pytest.mark.parametrize("plan", [(2, 2), pytest.param((1, 3), marks=pytest.mark.thorough)], ids=str)
def test_own_layers_go_on_where_their_client_left_them(plan):
    job = {"rounds": 4, "sampled": 3, "local_epochs": 1, "progress": False, "plan": tn.Plan(*plan)}
    job |= {"clients": EVEN, "own": ["Dense_1"], "drop_out": 0.3}
    start = net()
    found, seen = tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, **job)
    assert 0 < seen.returned.sum() < seen.returned.size
    first = start.get_state(0).params
    body, heads = first["Dense_0"], [first["Dense_1"]] * 5
    slope = jax.jit(jax.grad(lambda params, x, y: tn.softmax_cross_entropy(params, x, y, start.apply_fn)[0]))
    for sampled, returned in zip(seen.clients, seen.returned, strict=True):
        bodies = []
        for client in sampled[returned]:
            rows = EVEN[client]
            params = {"Dense_0": body, "Dense_1": heads[client]}
            params = jax.tree.map(lambda p, g: p - RATE * g, params, slope(params, X[rows], LABELS[rows]))
            bodies.append(params["Dense_0"])
            heads[client] = params["Dense_1"]
        body = jax.tree.map(lambda *each: jnp.mean(jnp.stack(each), 0), *bodies) if bodies else body
    assert len(found) == 5 and np.asarray(found.id).tolist() == [0, 1, 2, 3, 4]
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for client in range(5):
        jax.tree.map(close, found.get_state(client).params, {"Dense_0": body, "Dense_1": heads[client]})


def test_what_drops_out_changes_nothing_and_costs_no_upload():
    start = line()
    how = {"clients": EVEN, "drop_out": 0.5, **JOB, "rounds": 40, "sampled": 1, "score_every": 1}  # in one program
    _, seen = tn.federated.train(start, X, Y, tn.mse, **how)
    one = 4 * (3 + 1)  # bytes of the network
    np.testing.assert_array_equal(seen.bytes_down, one)
    np.testing.assert_array_equal(seen.bytes_up, np.where(seen.returned[:, 0], one, 0))
    assert 8 <= seen.returned.sum() <= 32
    lost = np.flatnonzero(~seen.returned[:, 0])[0]
    before, _ = tn.federated.train(start, X, Y, tn.mse, **how | {"rounds": max(int(lost), 1)})
    after, _ = tn.federated.train(start, X, Y, tn.mse, **how | {"rounds": int(lost) + 1})
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params if lost else before.params)


@pytest.mark.parametrize("devices", first(1, [2, 1]))
def test_noise_has_the_standard_deviation_that_it_is_said_to_have(devices):
    start = net(optax.sgd(0.0), WIDE)
    how = {"clients": EVEN, **JOB, "rounds": 1, "clip": 0.5, "noise": 3.0, "plan": tn.Plan(devices)}
    found, _ = tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, **how)
    change = np.asarray(found.params["kernel"] - start.params["kernel"])
    np.testing.assert_allclose(change.std(), 3.0 * 0.5 / 3, rtol=0.05)
    assert abs(change.mean()) < 4 * change.std() / np.sqrt(change.size)


def test_scores_are_of_the_rounds_that_history_says():
    start, job = net(), {"clients": EVEN, **JOB, "rounds": 5}
    how = {"validation": (X, LABELS), "metric": tn.accuracy, "score_every": 2}
    _, seen = tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, **how, **job)
    assert seen.scored.tolist() == [2, 4, 5]
    for place, rounds in enumerate(seen.scored.tolist()):
        after, _ = tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, **job | {"rounds": rounds})
        logits = tn.predict(after, X)[0]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()
        np.testing.assert_allclose(seen.validation_loss[place], loss, rtol=1e-5)
        np.testing.assert_allclose(seen.validation_metric[place], np.mean(logits.argmax(-1) == LABELS), rtol=1e-6)


def test_a_fine_tuned_copy_is_the_client_trained_alone():
    start = net()
    job = {"epochs": 2, "batch_size": 2, "progress": False}
    tuned, _ = tn.fit(start.copies(5), X, LABELS, tn.softmax_cross_entropy, rows=EVEN, **job)
    alone, _ = tn.fit(start.copies(4)[[3]], X, LABELS, tn.softmax_cross_entropy, rows=EVEN[3:4], **job)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), tuned[[3]].params, alone.params)


def test_copies_are_of_one_network():
    with pytest.raises(ValueError, match="of one network, this is a swarm of 2"):
        net().copies(2).copies(3)


def test_rounds_to_a_score_are_read_off_the_best_so_far():
    seen = tn.federated.FederatedHistory(
        *[None] * 3, np.array([1, 2, 4, 6]), None, np.array([0.5, 0.4, 0.9, 0.8]), *[None] * 4
    )
    assert seen.rounds_to(0.7) == 3.0  # half of the way from round 2, where the best is .5, to round 4
    assert seen.rounds_to(0.5) == 1.0
    assert seen.rounds_to(0.91) == np.inf


@pytest.mark.parametrize("scores, expected", [([np.nan, 0.5, 0.9], 3.0), ([0.5, np.nan, 0.9], 2.5)])
def test_a_score_that_is_nan_is_none(scores, expected):
    seen = tn.federated.FederatedHistory(*[None] * 3, np.array([1, 2, 4]), None, np.array(scores), *[None] * 4)
    assert seen.rounds_to(0.7) == pytest.approx(expected) and seen.rounds_to(0.95) == np.inf


def test_the_first_score_that_is_a_number_is_not_interpolated():
    seen = tn.federated.FederatedHistory(*[None] * 3, np.array([1, 2]), None, np.array([np.nan, 0.9]), *[None] * 4)
    assert seen.rounds_to(0.7) == 2.0


def test_rounds_to_a_score_that_was_not_asked_for_are_refused():
    none = tn.federated.FederatedHistory(*[None] * 10)
    with pytest.raises(ValueError, match="no scores: train with validation= and metric="):
        none.rounds_to(0.5)
    several = tn.federated.FederatedHistory(
        *[None] * 3, np.array([1, 2]), None, {"top": np.array([0.2, 0.6])}, *[None] * 4
    )
    assert several.rounds_to(0.4, "top") == 1.5
    with pytest.raises(ValueError, match=r"metric=None, but of \['top'\]"):
        several.rounds_to(0.4)


def test_a_loss_that_is_no_number_names_its_client_and_round():
    with pytest.raises(FloatingPointError, match=r"client \d is (nan|inf) in round \d: take a smaller"):
        tn.federated.train(line(optax.sgd(1e20)), X, Y, tn.mse, clients=EVEN, **JOB)


BAD = [
    ({"clients": EVEN[0]}, r"clients must be int \[client, row\]"),
    ({"clients": [[0, 1], [-1, -1]]}, "at least one row each"),
    ({"clients": [[0, 40], [1, 2]], "sampled": 2}, r"0\.\.22"),
    ({"sampled": 6}, "at most the 5 clients that there are, got 6"),
    ({"sampled": 0}, "sampled must be a whole number of at least 1, got 0"),
    ({"rounds": 1.5}, "rounds must be a whole number"),
    ({"batch_size": 0}, "batch_size must be a whole number"),
    ({"own": ["Dense_9"]}, r"got 'Dense_9'; it has \['Dense_0', 'Dense_1'\]"),
    ({"own": ["Dense_0", "Dense_1"]}, "nothing is left"),
    ({"own": "Dense_1", "validation": (X, LABELS)}, "no whole network to score"),
    ({"drop_out": 1.0}, "at least 0 and below 1, got 1.0"),
    ({"proximal": -1.0}, "at least 0, got -1.0"),
    ({"clip": 0.0}, "clip must be a number above 0"),
    ({"noise": 1.0}, "say how long"),
    ({"metric": tn.accuracy}, "metric came without validation"),
    ({"metric": lambda p, y: 0.0, "validation": (X, LABELS)}, "must take mask="),
    ({"rounds": "5"}, "rounds must be a whole number"),
    ({"score_every": 0}, "score_every must be a whole number"),
    ({"validation": 0.2}, r"the pair \(x, y\)"),
    ({"plan": "auto"}, "plan must be a Plan"),
    ({"seed": 2**32}, "seed must be one int from 0 to 2147483646"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_stops_with_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        tn.federated.train(net(), X, LABELS, tn.softmax_cross_entropy, **{"clients": EVEN, **JOB, **change})


def test_several_networks_are_refused():
    with pytest.raises(ValueError, match="one network, got a swarm of 3"):
        tn.federated.train(net().copies(3), X, LABELS, tn.softmax_cross_entropy, clients=EVEN, **JOB)


def test_statistics_that_would_leave_without_noise_are_refused():
    model = nn.Sequential([nn.BatchNorm(use_running_average=False), nn.Dense(4)])
    with pytest.raises(ValueError, match="batch_stats.*without noise"):
        how = {"clip": 1.0, "noise": 1.0, **JOB}
        tn.federated.train(net(model=model), X, LABELS, tn.softmax_cross_entropy, clients=EVEN, **how)


def test_a_schedule_that_follows_a_validation_loss_is_refused():
    start = tn.with_schedule(net(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)), "reduce")
    with pytest.raises(ValueError, match="which clients do not have"):
        tn.federated.train(start, X, LABELS, tn.softmax_cross_entropy, clients=EVEN, **JOB)


def test_ctrl_c_keeps_the_rounds_so_far(monkeypatch):
    job = {"clients": EVEN, **JOB, "validation": (X, LABELS)}
    expected, seen = tn.federated.train(net(), X, LABELS, tn.softmax_cross_entropy, **job | {"rounds": 1})
    monkeypatch.setattr(rounds_of, "noted", lambda: contextlib.nullcontext(lambda: True))
    with pytest.raises(tn.Interrupted, match="after 1 round") as caught:
        tn.federated.train(net(), X, LABELS, tn.softmax_cross_entropy, **job)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), caught.value.swarm.params, expected.params)
    np.testing.assert_allclose(caught.value.history.train_loss, seen.train_loss, rtol=1e-6)
    assert caught.value.history.scored.tolist() == [1] and np.isfinite(caught.value.history.validation_loss).all()


class Scaled(nn.Module):
    """A model whose running statistics move further than its weights."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(100 * x))


@pytest.mark.parametrize("clip", [5.0, 0.01])
def test_the_length_of_a_change_is_that_of_its_weights(clip):
    start = tn.TurbaTrainState.swarm(Scaled(), optax.sgd(RATE), 1, sample_input=X[:1])
    job = {"clients": EVEN[:1], "rounds": 1, "sampled": 1, "progress": False}
    free, held = (tn.federated.train(start, X, Y, tn.mse, clip=each, **job)[0] for each in (None, clip))
    change, kept = (np.asarray(optax.tree.norm(optax.tree.sub(net.params, start.params))) for net in (free, held))
    assert 0.01 < change < 5 and kept == pytest.approx(min(change, clip), rel=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), held.collections, free.collections)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.contrib.schedule_free_sgd(0.5), "this one predicts by others: take an optimizer without averages"),
        (optax.contrib.reduce_on_plateau(), "must make a step with a mean change and parameters alone, .* raises"),
    ],
    ids=["averages", "needs the loss"],
)
def test_an_optimizer_of_mean_changes_needs_no_more_than_these(optimizer, message):
    with pytest.raises(ValueError, match=f"server must .*{message}|server {message}"):
        tn.federated.train(line(), X, Y, tn.mse, clients=EVEN, server=optimizer, **JOB)
    with pytest.raises(ValueError, match=f"outer must .*{message}|outer {message}"):
        tn.federated.local_sgd(line(), X, Y, tn.mse, workers=2, epochs=1, batch_size=2, every=2, outer=optimizer)


class Narrow(nn.Module):
    """Two layers of different types of parameters."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.Dense(4, param_dtype=jnp.bfloat16)(x))


@pytest.mark.parametrize("how", [{"server": optax.sgd(1.0, 0.9)}, {"server": optax.adam(0.1), "clip": 1.0}])
def test_parameters_keep_their_types(how):
    start = tn.TurbaTrainState.swarm(Narrow(), optax.sgd(RATE), 1, sample_input=X[:1])
    net, seen = tn.federated.train(start, X, Y, tn.mse, clients=EVEN, **JOB, **how)
    found, expected = ([leaf.dtype for leaf in jax.tree.leaves(each.params)] for each in (net, start))
    assert found == expected and np.isfinite(seen.train_loss).all()


def test_more_rows_than_float16_holds_are_counted():
    x = RANDOM.normal(size=(70_000, 2)).astype(np.float32)
    model = nn.Dense(1, param_dtype=jnp.float16, dtype=jnp.float32)
    start = tn.TurbaTrainState.swarm(model, optax.sgd(0.5), 1, sample_input=x[:1])
    job = {"clients": np.arange(len(x)).reshape(2, -1), "rounds": 1, "sampled": 2, "progress": False}
    net, _ = tn.federated.train(start, x, x[:, :1], tn.mse, **job)
    plain, _ = tn.fit(start, x, x[:, :1], tn.mse, epochs=1, progress=False)  # equal clients and one step: the mean
    np.testing.assert_allclose(net.params["kernel"], plain.params["kernel"], rtol=2e-3, atol=2e-3)


@tn.mean_over_rows
def by_member(params, x, y, apply_fn, *, member):
    prediction = apply_fn({"params": params}, x)
    return member * (prediction - y) ** 2, prediction


def test_a_loss_with_constants_is_held_near_the_server_too():
    with pytest.raises(ValueError, match="takes the keyword `member`: give each member's own constants to fit"):
        tn.federated.train(line(), X, Y, by_member, clients=EVEN, **JOB)
    with pytest.raises(ValueError, match="takes the keyword `member`"):
        tn.federated.local_sgd(line(), X, Y, by_member, workers=2, epochs=1, batch_size=2, every=2)
    start = line().replace(member=np.ones(1, np.float32))
    found = tn.federated.train(start, X, Y, by_member, clients=EVEN, proximal=0.5, **JOB)[0]
    equal = tn.federated.train(line(), X, Y, tn.mse, clients=EVEN, proximal=0.5, **JOB)[0]
    np.testing.assert_allclose(weights(found), weights(equal), rtol=1e-5)


def test_rows_of_no_client_may_hold_anything():
    x, y = X.copy(), Y.copy()
    x[20:], y[20:] = np.nan, np.inf
    found, expected = (tn.federated.train(line(), *data, tn.mse, clients=EVEN, **JOB)[0] for data in ((x, y), (X, Y)))
    np.testing.assert_array_equal(weights(found), weights(expected))
    y[3] = np.nan
    with pytest.raises(ValueError, match="row 3"):
        tn.federated.train(line(), x, y, tn.mse, clients=EVEN, **JOB)


@pytest.mark.parametrize("name", ["proximal", "noise", "drop_out"])
@pytest.mark.parametrize("value", [None, "a", [0.1]])
def test_what_is_no_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number, 0 for none; got"):
        tn.federated.train(line(), X, Y, tn.mse, clients=RAGGED, **JOB | {name: value})


@pytest.mark.parametrize("value", ["a", [0.1], 0])
def test_a_clip_is_a_number_above_0(value):
    with pytest.raises(ValueError, match="clip must be a number"):
        tn.federated.train(line(), X, Y, tn.mse, clients=RAGGED, **JOB | {"clip": value})


def test_no_clients_are_refused():
    with pytest.raises(ValueError, match="clients must be int .client, row., .*: there are no clients"):
        tn.federated.train(line(), X, Y, tn.mse, clients=np.zeros((0, 3), int), **JOB)


def test_the_one_metric_without_a_name_is_asked_for_without():
    how = {"clients": RAGGED, "validation": (X, LABELS), "metric": tn.accuracy, **JOB}
    _, history = tn.federated.train(net(), X, LABELS, tn.softmax_cross_entropy, **how)
    assert history.rounds_to(0.0) == history.scored[0]
    with pytest.raises(ValueError, match="The one metric has no name: leave metric= out"):
        history.rounds_to(0.5, "accuracy")
