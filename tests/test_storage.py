"""Folders at an address: what is kept there is whole, found again, and refused where it cannot be."""

import shutil
from pathlib import Path

import bucket
import numpy as np
import optax
import pytest
from upath import UPath

import turbanet as tn
from turbanet.core import storage

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


@pytest.fixture
def address(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv(bucket.ROOT, str(tmp_path))
    fsspec.filesystem("s3").clear_instance_cache()
    yield "s3://bucket/folder"
    fsspec.filesystem("s3").clear_instance_cache()


def made():
    return tn.TurbaTrainState.swarm(tn.MLP((4, 2)), optax.adam(0.01), 3, input_size=3)


def train(folder, **how):
    how = {"epochs": 6, "segment": 2, "progress": False} | how
    return tn.fit(made(), X, Y, tn.softmax_cross_entropy, checkpoints=folder, **how)


def test_a_swarm_is_saved_at_an_address_and_loaded(address):
    made().save(address)
    swarm, _ = train(None)
    swarm.save(address)  # in the first one's place
    loaded = tn.TurbaTrainState.load(address, tn.MLP((4, 2)), optax.adam(0.01))
    assert np.array_equal(tn.predict(loaded, X), tn.predict(swarm, X))


def test_a_training_at_an_address_goes_on_from_its_last_whole_checkpoint(address, tmp_path, monkeypatch):
    expected = tn.predict(train(None)[0], X)
    send = storage.Mirror.send
    sent = []

    def dies(self, number):
        send(self, number) if number < 4 else self.there.fs.put(f"{self.here}/{number}/", f"{self.there.path}/{number}")
        if number == 4:
            raise OSError("the network is gone")

    monkeypatch.setattr(storage.Mirror, "send", dies)
    with pytest.raises(OSError, match="could not be written to s3://bucket/folder .*the network is gone"):
        train(address)
    monkeypatch.setattr(storage.Mirror, "send", lambda self, number: sent.append(number) or send(self, number))
    swarm, _ = train(address)
    assert sent == [4, 6]
    assert np.array_equal(tn.predict(swarm, X), expected)
    assert sorted(path.name for path in (tmp_path / "bucket/folder").iterdir()) == ["4", "6", "last"]


def test_an_address_with_other_things_is_left_alone(address, tmp_path):
    (tmp_path / "bucket/folder").mkdir(parents=True)
    (tmp_path / "bucket/folder/thesis.tex").touch()
    with pytest.raises(ValueError, match="which is no saved swarm"):
        made().save(address)


def test_an_address_that_holds_nothing_loads_nothing(address):
    with pytest.raises(FileNotFoundError, match="holds no swarm"):
        tn.TurbaTrainState.load(address, tn.MLP((4, 2)))


@pytest.mark.parametrize(
    ("address", "error", "sentence"),
    [
        ("gs://bucket/run", ImportError, "cannot be opened .*install"),
        ("what://run", ValueError, "fsspec knows"),
        (Path("s3://bucket/run"), ValueError, "an address that a path has cut"),
        (UPath("memory://run", listings=1), ValueError, "storage_options of memory://run would stay here: set them in"),
    ],
)
def test_an_address_that_cannot_be_opened_stops_at_once(address, error, sentence):
    with pytest.raises(error, match=sentence):
        train(address)


def test_a_folder_may_be_named_by_its_address(tmp_path):
    made().save(f"file://{tmp_path}/swarm")
    assert tn.TurbaTrainState.load(tmp_path / "swarm", tn.MLP((4, 2))).shape == (3, 3, 2)


def test_a_checkpoint_that_another_attempt_removed_is_begun_anew(address, tmp_path):
    train(address, epochs=2)
    shutil.rmtree(tmp_path / "bucket/folder/2")
    swarm, _ = train(address)
    assert np.array_equal(tn.predict(swarm, X), tn.predict(train(None)[0], X))
