"""turbanet.lab.peers: environments from pinned lists, made once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from turbanet.lab import peers
from turbanet.lab.scaling import launch

ROOT = Path(__file__).parents[1]


def test_each_framework_that_needs_an_environment_has_a_pinned_list():
    lists = {file.stem: file.read_text().split() for file in (ROOT / "peers").glob("*.txt")}
    needed = {framework.environment for framework in launch.FRAMEWORKS.values() if framework.environment}
    assert lists.keys() == needed
    assert [line for lines in lists.values() for line in lines if not re.fullmatch(r"[\w-]+==[\w.]+", line)] == []


def test_an_unknown_environment_is_named(tmp_path):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/mxnet.txt").write_text("mxnet==1.9.1\n")
    with pytest.raises(ValueError, match="no list of packages for 'mxnett'; known: mxnet"):
        peers.build("mxnett", root=tmp_path)


def test_an_environment_is_made_from_its_list_and_again_when_that_changes(tmp_path, monkeypatch):
    commands = []

    def run(command, check, env=None):
        commands.append([str(word) for word in command])
        if "venv" in command:
            (command[-1] / "bin").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "peers").mkdir()
    wanted = tmp_path / "peers/mxnet.txt"
    wanted.write_text("mxnet==1.9.1\n")
    python = peers.build("mxnet", root=tmp_path)
    assert python == tmp_path / "build/peers/mxnet/bin/python"
    assert commands[0][:3] == [sys.executable, "-m", "venv"] and commands[1][-2:] == ["-r", str(wanted)]
    peers.build("mxnet", root=tmp_path)
    assert len(commands) == 2
    wanted.write_text("mxnet==1.9.0\n")
    peers.build("mxnet", root=tmp_path)
    assert len(commands) == 4


def test_unknown_parts_are_named(capsys):
    with pytest.raises(SystemExit):
        peers.main(["troughput"])
    assert "unknown part 'troughput'; known: throughput, accuracy, depths" in capsys.readouterr().err
