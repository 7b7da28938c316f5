"""A training that was killed and called again ends bit for bit where the one that was not ends."""

import functools
import logging
import os
import signal
import subprocess
import sys
import time
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import first

import turbanet as tn
from turbanet.checkpoints import checkpoint, identity
from turbanet.core import memory
from turbanet.training import run as training

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40).astype(np.int32)
PLAN = tn.Plan(2, 2)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x)))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not train)(x))


def made(size=6, rate=0.05, model=None):
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=rate)
    swarm = tn.TurbaTrainState.swarm(model or Net(), optimizer, size, sample_input=X[:1])
    return tn.with_schedule(swarm, "warm")


def train(swarm, folder=None, **more):
    how = {"epochs": 8, "batch_size": 8, "segment": 2, "plan": PLAN, "progress": False, "validation": (X[:9], Y[:9])}
    return tn.fit(swarm, X, Y, tn.softmax_cross_entropy, **{**how, "checkpoints": folder, **more})


def same(one, other):
    for a, b in zip(one, other, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def outcome(trained, history):
    return jax.tree.leaves(trained), [history.train_loss, history.validation_loss, history.epochs]


@pytest.fixture
def interrupted(monkeypatch):
    """Makes the next `fit` break after some segments."""

    def after(segments):
        run = training.Training._train

        def breaks(self, most):
            if self.done == segments * self.segment:
                raise KeyboardInterrupt
            return run(self, most)

        monkeypatch.setattr(training.Training, "_train", breaks)

    yield after
    monkeypatch.undo()


@pytest.mark.optimized
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("patience", [None, 2])
def test_an_interrupted_training_goes_on_where_it_was(tmp_path, interrupted, monkeypatch, segments, patience):
    expected = outcome(*train(made(rate=0.3), patience=patience))
    interrupted(segments)
    with pytest.raises(KeyboardInterrupt):
        train(made(rate=0.3), tmp_path, patience=patience)
    monkeypatch.undo()
    same(outcome(*train(made(rate=0.3), tmp_path, patience=patience)), expected)


def test_a_finished_training_is_not_trained_again(tmp_path, monkeypatch):
    first = outcome(*train(made(), tmp_path))
    monkeypatch.setattr(training.Training, "_train", None)
    same(outcome(*train(made(), tmp_path)), first)


def test_more_epochs_go_on_from_the_last(tmp_path):
    train(made(), tmp_path, epochs=4)
    same(outcome(*train(made(), tmp_path, epochs=8)), outcome(*train(made(), epochs=8)))


def test_fewer_epochs_than_are_done_are_refused(tmp_path):
    train(made(), tmp_path)
    with pytest.raises(ValueError, match="is past epoch 8, 6 were asked for: ask for more epochs"):
        train(made(), tmp_path, epochs=6)


def test_another_plan_goes_on_within_rounding(tmp_path):
    expected = train(made())[1].train_loss
    train(made(), tmp_path, epochs=4)
    found = train(made(), tmp_path, plan=tn.Plan(1, 3))[1]
    np.testing.assert_allclose(found.train_loss, expected, rtol=1e-4)
    assert found.plan.block == 3


def test_without_a_plan_it_keeps_the_one_it_began_with(tmp_path):
    train(made(), tmp_path, epochs=4, segment=4)
    history = train(made(), tmp_path, plan=None, segment=1)[1]
    assert (len(history.plan.devices), history.plan.block) == (2, 2)


def test_only_the_last_ones_are_kept(tmp_path):
    train(made(), tn.Checkpoints(tmp_path, keep=2))
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [6, 8]


@pytest.mark.parametrize(
    "other, names",
    [
        ({"swarm": lambda: made(5)}, "members"),
        ({"swarm": lambda: made(model=tn.MLP((5, 2)))}, "model was Net .* and is MLP"),
        ({"batch_size": 4}, "batch size was 8 and is 4"),
        ({"patience": 3}, "stopping"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path, other, names):
    train(made(), tmp_path, epochs=2)
    swarm = other.pop("swarm", made)()
    with pytest.raises(ValueError, match=f"is of another training: .*{names}"):
        train(swarm, tmp_path, **other)


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Checkpoints cannot be kept in"):
        train(made(), tmp_path / "new")


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Checkpoints cannot be kept in .*: name another folder"):
        train(made(), tmp_path / "file")


def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    train(made(), tmp_path, epochs=4)

    def full(self, *args, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match="could not be written to .*No space left.*goes on from the last"):
        train(made(), tmp_path)
    monkeypatch.undo()
    same(outcome(*train(made(), tmp_path)), outcome(*train(made())))


@pytest.mark.parametrize("keep", [0, 1.5])
def test_keep_is_a_whole_number(keep):
    with pytest.raises(ValueError, match="keep must be a whole number"):
        tn.Checkpoints("x", keep=keep)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import turbanet
turbanet.use_cores(2)
from test_checkpoint import made, train
train(made(), sys.argv[1], epochs=120)
"""


@pytest.mark.thorough
def test_killed_at_random_moments_it_ends_where_it_would_have_ended(tmp_path):
    code = KILLED.format(tests=os.path.dirname(__file__))
    command = [sys.executable, "-c", code, str(tmp_path / "killed")]
    caching = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def done():
        return max([int(path.name) for path in (tmp_path / "killed").glob("*") if path.name.isdigit()], default=0)

    random, seen = np.random.default_rng(), 0
    for _ in range(2):  # the second goes on from what the first left, and the last from what the second left
        with subprocess.Popen(command, env=os.environ | caching) as process:
            while process.poll() is None and done() <= seen:
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
        assert done() > seen
        seen = done()
    found, expected = (train(made(), folder, epochs=120) for folder in (tmp_path / "killed", None))
    same(outcome(*found), outcome(*expected))


@pytest.mark.parametrize(
    "other, named",
    [
        ({"swarm": lambda: tn.with_hyperparameters(made(), learning_rate=0.01)}, "the state"),
        ({"validation": (X[9:18], Y[9:18])}, "the data"),
    ],
)
def test_a_folder_of_an_equally_shaped_training_is_refused(tmp_path, other, named):
    train(made(), tmp_path, epochs=2)
    swarm = other.pop("swarm", made)()
    with pytest.raises(ValueError, match=f"is of another training: what {named} hold"):
        train(swarm, tmp_path, **other)


def test_a_smaller_block_for_want_of_memory_is_the_one_to_go_on_with(tmp_path, monkeypatch):
    def short(executable, plan, rounds):
        return memory.Need(2**50, 2**40) if plan.block == 2 else needs(executable, plan, rounds)

    needs = memory.needs
    monkeypatch.setattr(memory, "needs", short)
    whole = train(made())
    train(made(), tmp_path, epochs=4)
    again = train(made(), tmp_path)
    assert again[1].plan.block == 1
    same(again[0].params.values(), whole[0].params.values())


class Active(nn.Module):
    act: str = "relu"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(getattr(nn, self.act)(nn.Dense(3)(x)))


def scaled(scale):
    def loss(params, x, y, apply_fn, weight=None):
        value, prediction = tn.l2_loss(params, x, y, apply_fn, weight=weight)
        return scale * value, prediction

    return loss


def share_above(prediction, y, *, limit):
    return jnp.mean(prediction > limit)


def short(
    folder=None, *, epochs=2, model="relu", rate=0.05, loss=tn.mse, weights=False, limit=0.0, schedule=None, **more
):
    """A small training of which every part is made anew: -> (trained, History)."""
    optimizer = more.pop("optimizer", None) or optax.inject_hyperparams(optax.adamw)(rate)
    swarm = tn.TurbaTrainState.swarm(Active(model), optimizer, 2, sample_input=X[:1])
    swarm = swarm if schedule is None else tn.with_schedule(swarm, schedule)
    y = (X[:, :2], X[:, 2] ** 2) if weights else X[:, :2]
    metric = {
        "metric": functools.partial(share_above, limit=limit),
        "validation": (X[:9], jax.tree.map(lambda a: a[:9], y)),
    }
    how = {"epochs": epochs, "segment": 1, "plan": tn.Plan(1, 2), "progress": False, "checkpoints": folder}
    return tn.fit(swarm, X, y, loss, **{**how, **metric, **more})


@pytest.mark.parametrize(
    "how",
    first(
        3,
        [
            lambda: {"loss": tn.weighted(scaled(3.0)), "weights": True},
            lambda: {"optimizer": optax.adam(lambda step: 0.05 / (step + 1))},
            lambda: {"schedule": functools.partial(tn.core.schedules.multistep, milestones=(1,))},
            lambda: {"loss": functools.partial(scaled(3.0))},
            lambda: {"optimizer": optax.adam(0.05)},
        ],
    ),
)
def test_what_is_built_anew_and_equal_goes_on(tmp_path, how):
    short(tmp_path, epochs=1, **how())
    same(outcome(*short(tmp_path, **how())), outcome(*short(**how())))


@pytest.mark.parametrize(
    "one, other, named",
    [
        ({"loss": tn.weighted(tn.mse), "weights": True}, {"loss": tn.weighted(tn.l2_loss)}, "loss was weighted.loss"),
        ({"loss": scaled(3.0)}, {"loss": scaled(2.0)}, "loss was scaled.loss"),
        ({"optimizer": optax.adam(0.05)}, {"optimizer": optax.adam(0.01)}, "optimizer was chain .* and is chain"),
        ({"model": "relu"}, {"model": "tanh"}, "model was Active .* and is Active"),
        ({"limit": 0.0}, {"limit": 1.0}, "metric validation_metric was share_above .* and is share_above"),
        ({"schedule": lambda epoch, base: base}, {"schedule": lambda epoch, base: base / 2}, "schedule 0 was <lambda>"),
    ],
)
def test_another_value_inside_what_computes_is_refused(tmp_path, one, other, named):
    short(tmp_path, epochs=1, **one)
    with pytest.raises(ValueError, match=f"is of another training: {named}"):
        short(tmp_path, **{**one, **other})


def test_another_pythons_checkpoint_is_refused_with_that_reason(tmp_path, monkeypatch):
    short(tmp_path, epochs=1)
    monkeypatch.setattr(identity, "sys", types.SimpleNamespace(version_info=(3, 99, 0)))
    with pytest.raises(ValueError, match=r"is of another training: Python was 3\.\d+ and is 3\.99"):
        short(tmp_path)


def test_one_of_several_processes_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="by one of the 2 processes of jax.distributed: leave jax.distributed out"):
        short(tmp_path, epochs=1)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_format_is_refused_with_that_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "FORMAT", 4)
    short(tmp_path, epochs=1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is of another training: format was 4 and is 5; name another folder"):
        short(tmp_path)


def test_what_cannot_be_compared_is_said_at_first_and_refused_then(tmp_path, caplog):
    rows = (row for row in X)

    def loss(params, x, y, apply_fn):
        return tn.mse(params, x, y + 0 * next(rows)[:2], apply_fn)

    with caplog.at_level(logging.WARNING, "turbanet"):
        short(tmp_path, epochs=1, loss=loss)
    assert "The loss holds generator rows, which cannot be read" in caplog.text
    with pytest.raises(
        ValueError, match="cannot be compared with the one that was kept .*: the loss holds generator rows"
    ):
        short(tmp_path, loss=loss)


def noisy():
    """An optimizer whose state holds a typed random key."""
    return optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.05))


def test_random_keys_in_an_optimizers_state_go_on_where_they_were(tmp_path):
    short(tmp_path, epochs=2, optimizer=noisy())
    trained, history = short(tmp_path, epochs=5, optimizer=noisy())
    expected, straight = short(epochs=5, optimizer=noisy())
    keys = [state.opt_state[0].rng_key for state in (trained, expected)]
    assert keys[0].dtype == keys[1].dtype
    same(*[[jax.random.key_data(key)] for key in keys])
    same([trained.params, history.train_loss], [expected.params, straight.train_loss])


def test_writing_takes_no_more_than_its_share(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(checkpoint.Keeper, "write", lambda self, *_, **__: now.__setitem__(0, now[0] + 1))
    keeper = checkpoint.Keeper(tn.Checkpoints(tmp_path, share=0.1), {identity.OPAQUE: ""})
    kept = []
    for segment in range(12):
        now[0] += 5  # of training
        if keeper.is_due():
            keeper.save(segment, {}, {})
            kept.append(segment)
    assert kept == [0, 3, 5, 7, 9, 10]  # at 5, 21, 32, 43, 54, 60 s, which hold ten for each second of writing


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_is_a_part_of_the_time(tmp_path, share):
    with pytest.raises(ValueError, match="share is of a training's seconds"):
        tn.Checkpoints(tmp_path, share=share)


def test_a_folder_of_something_else_is_refused_in_a_sentence(tmp_path):
    made().save(tmp_path / "swarm")
    with pytest.raises(ValueError, match="swarm holds a swarm that swarm.save wrote: checkpoints have a folder"):
        train(made(), tmp_path / "swarm")
    (tmp_path / "other" / "7").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"other cannot be read as a checkpoint \(.*\): name another folder") as caught:
        train(made(), tmp_path / "other")
    assert "\n" not in str(caught.value)


def test_held_out_data_that_are_gone_are_named_and_not_their_digest(tmp_path):
    train(made(), tmp_path)
    with pytest.raises(ValueError, match=r"data\[1\].x was float32\[9, 3\] and is not there"):
        train(made(), tmp_path, validation=None)


def test_another_process_in_the_same_folder_is_told_so(tmp_path):
    holds = f"""
import fcntl, sys
file = open({str(tmp_path / checkpoint.LOCK)!r}, "a+")
fcntl.flock(file, fcntl.LOCK_SH)  # which only a lock for one alone cannot share
print("held", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holds], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        half_written = tmp_path / "9.orbax-checkpoint-tmp"  # by the other one
        half_written.mkdir()
        with pytest.raises(
            ValueError, match=f"Another training or process writes to {tmp_path} now: wait until it has"
        ):
            train(made(), tmp_path)
        assert half_written.exists()
        train(made(), tn.Checkpoints(tmp_path, exclusive=False))
        other.stdin.close()
    train(made(), tmp_path)


def test_a_folder_is_kept_until_its_training_ends_and_no_longer(tmp_path):
    """Whatever lets another training of this process in would let another process in."""
    tries = []

    def train_another(view):
        with pytest.raises(ValueError, match="Another training or process writes to") as refused:
            train(made(), tmp_path)
        tries.append(refused)

    train(made(), tmp_path, callbacks=[train_another])
    assert len(tries) == 4

    calls = []

    def failing(prediction, y):
        calls.append(1)
        if len(calls) > 1:  # after the one before the training
            raise KeyError("a metric of a user's")
        return 0.0

    folder = tmp_path / "failed"
    with pytest.raises(KeyError, match="of a user's") as kept:  # as IPython's sys.last_value keeps it
        train(made(), folder, metric=failing)
    train(made(), folder)
    with pytest.raises(ValueError, match="of another training") as kept_too:
        train(made(4), folder)
    train(made(), folder)
    assert kept.tb and kept_too.tb


@pytest.mark.parametrize("kind", [jnp.asarray, np.ndarray.tolist], ids=["JAX", "lists"])
def test_the_same_data_of_another_kind_are_the_same_training(tmp_path, kind):
    settings = {"batch_size": 8, "segment": 2, "plan": PLAN, "progress": False, "checkpoints": tmp_path}
    settings["validation"] = X[:9], Y[:9]
    tn.fit(made(), X, Y, tn.softmax_cross_entropy, epochs=2, **settings)
    _, history = tn.fit(made(), kind(X), kind(Y), tn.softmax_cross_entropy, epochs=4, **settings)
    assert len(history.train_loss) == 4
