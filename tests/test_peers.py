"""study.peers and study.pipeline.environments: environments from pinned lists, made once."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from study import peers
from study.data_parallel.scaling import launch
from study.pipeline import environments

ROOT = Path(__file__).parents[1]


def test_each_framework_that_needs_an_environment_has_a_pinned_list():
    lists = {file.stem: file.read_text().split() for file in (ROOT / "peers").glob("*.txt")}
    needed = {framework.environment for framework in launch.FRAMEWORKS.values() if framework.environment}
    assert lists.keys() == needed | {"flower", "neuralforecast"}
    assert [line for lines in lists.values() for line in lines if not re.fullmatch(r"[\w\[\]-]+==[\w.]+", line)] == []


def test_what_is_committed_are_parts_each_with_the_machine_that_measured_it():
    found = {file.name for file in (ROOT / "reports/peers").glob("*.*")}
    assert found == {f"{part}.{kind}" for part in peers.PARTS for kind in ("csv", "json")}


def test_an_unknown_environment_is_named(tmp_path):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/mxnet.txt").write_text("mxnet==1.9.1\n")
    with pytest.raises(ValueError, match="no list of packages for 'mxnett'; known: mxnet"):
        environments.build("mxnett", root=tmp_path)


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
    python = environments.build("mxnet", root=tmp_path)
    assert python == tmp_path / "build/peers/mxnet/bin/python"
    assert commands[0][:3] == [sys.executable, "-m", "venv"] and commands[1][-2:] == ["-r", str(wanted)]
    environments.build("mxnet", root=tmp_path)
    assert len(commands) == 2
    wanted.write_text("mxnet==1.9.0\n")
    environments.build("mxnet", root=tmp_path)
    assert len(commands) == 4


@pytest.mark.parametrize(
    ("name", "on", "other"), [("horovod", "PYTORCH", "TENSORFLOW"), ("horovod_tensorflow", "TENSORFLOW", "PYTORCH")]
)
def test_horovod_is_built_from_source_on_one_framework(name, on, other, tmp_path, monkeypatch):
    commands, settings = [], []

    def run(command, check, env=None):
        command = [str(word) for word in command]
        commands.append(command)
        settings.append(env)
        if "venv" in command:
            (Path(command[-1]) / "lib/python3.11/site-packages").mkdir(parents=True)
        if "download" in command:
            unpacked = tmp_path / "horovod-0.28.1"
            (unpacked / "horovod/torch").mkdir(parents=True)
            for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
                (unpacked / file).write_text("  set(CMAKE_CXX_STANDARD 17)\nproject(horovod)\n")
            with tarfile.open(Path(command[-2]) / "horovod-0.28.1.tar.gz", "w:gz") as archive:
                archive.add(unpacked, "horovod-0.28.1")

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "peers").mkdir()
    (tmp_path / f"peers/{name}.txt").write_text("cmake==3.31.10\nhorovod==0.28.1\n")
    environments.build(name, root=tmp_path)
    folder = tmp_path / "build/peers" / name
    _, tools, download, build = commands
    assert tools[-1] == "cmake==3.31.10" and download[-1] == "horovod==0.28.1"
    assert build[-1] == str(folder / "source/horovod-0.28.1") and "--no-build-isolation" in build
    flags = settings[-1]
    assert flags[f"HOROVOD_WITH_{on}"] == flags[f"HOROVOD_WITHOUT_{other}"] == flags["HOROVOD_WITH_GLOO"] == "1"
    assert f"HOROVOD_WITHOUT_{on}" not in flags and flags["PATH"].startswith(str(folder / "bin"))
    standard = (folder / "source/horovod-0.28.1/horovod/torch/CMakeLists.txt").read_text().split("\n")[0]
    assert standard.strip() == f"set(CMAKE_CXX_STANDARD {20 if on == 'PYTORCH' else 17})"
    assert (folder / "lib/python3.11/site-packages/study.pth").exists() == (on == "PYTORCH")


def test_unknown_parts_are_named(capsys):
    with pytest.raises(SystemExit):
        peers.main(["troughput"])
    assert "unknown part 'troughput'; known: throughput, accuracy, depths" in capsys.readouterr().err
